"""Operands as training has them: inputs and output gradients of the linear layers of a Transformer that trains for a while."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steptime._models.kernels.call import TensorArg
from steptime_lab.measure.op_calls import Arena, Region

_WIDTH, _LAYERS, _TOKENS, _SEQUENCE, _VOCABULARY, _STEPS = 2048, 4, 8192, 1024, 32_000, 12


def fill(arena: Arena) -> None:
    """Puts captured activations and gradients where calls that ask for such values find them."""
    activations, gradients = _captured(arena.device)
    for values, captured in (("activations", activations), ("gradients", gradients)):
        _repeat(arena.region(TensorArg((1,), "bfloat16", values=values), mutable=False), captured)


def _repeat(region: Region, captured: torch.Tensor) -> None:
    for start in range(0, region.size, captured.numel()):
        part = region.flat[start : start + captured.numel()]
        part.copy_(captured[: part.numel()])


def _captured(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_WIDTH, 16, 4 * _WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), body, nn.Linear(_WIDTH, _VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def keep(_module: nn.Module, given: tuple[Any, ...], _result: Any) -> None:
        inputs.append(given[0].detach().to(torch.bfloat16).flatten())

    def keep_gradient(_module: nn.Module, _given: Any, given: tuple[Any, ...]) -> None:
        outputs.append(given[0].detach().to(torch.bfloat16).flatten())

    for step in range(_STEPS):
        if step == _STEPS - 1:
            for module in body.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(keep)
                    module.register_full_backward_hook(keep_gradient)
        # Words as common as in text: the rank of a word times its frequency is constant.
        drawn = torch.rand(_TOKENS // _SEQUENCE, _SEQUENCE + 1, device=device)
        tokens = (_VOCABULARY**drawn).long().clamp_(max=_VOCABULARY - 1)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat(inputs), torch.cat(outputs)
