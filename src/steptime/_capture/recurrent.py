"""LSTM, GRU and RNN as CUDA runs them: one call of cuDNN for all layers and time steps, or a fused kernel for one cell.

PyTorch decides in native/RNN.cpp and native/cudnn/RNN.cpp. Weights lie one after the other in one buffer, into which a module's
move to a GPU puts them; weights that lie otherwise (cut up by a wrapper) are copied into such a buffer in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
RELU, TANH, LSTM, GRU = range(4)  # cuDNN's modes
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}


def _layer(mode: int, packed: bool) -> Callable[..., Any]:
    """`torch.lstm` and its kin; packed sequences come with the number of samples at every time step."""

    def run(x: torch.Tensor, *args: Any) -> Any:
        sizes, batch_first = [], False
        if packed:
            lengths, hidden, weights, biases, layers, dropout, train, both = args
            sizes = lengths.tolist()
        else:
            hidden, weights, biases, layers, dropout, train, both, batch_first = args
        hx, cx = hidden if mode == LSTM else (hidden, None)
        size = hx.shape[2] if cx is None else cx.shape[2]
        projected = size != hx.shape[2]
        each = (4 if biases else 2) + projected
        output, hy, cy, *_ = aten._cudnn_rnn(
            x, weights, each, _flat(weights), hx, cx, mode, size, hx.shape[2] if projected else 0, layers, batch_first,
            dropout, train, both, sizes, None,
        )  # fmt: skip
        return (output, hy, cy) if mode == LSTM else (output, hy)

    return run


@torch.no_grad()
def _flat(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The buffer that weights lie in, one after the other; None where they do not, and cannot be laid so."""
    total = sum(weight.numel() for weight in weights)
    storage = weights[0].untyped_storage()
    whole = total * weights[0].element_size()
    if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
        if any(weight.untyped_storage().nbytes() != weight.nbytes for weight in weights) or not weights[0].is_leaf:
            return None
        # What `flatten_parameters` does when a module is moved to a GPU; without addresses it does nothing.
        buffer, at = torch.empty(total, dtype=weights[0].dtype, device=weights[0].device), 0
        for weight in weights:
            weight.data = buffer[at : at + weight.numel()].view(weight.shape)
            at += weight.numel()
    elif storage.nbytes() != whole:
        return None
    return weights[0].detach().as_strided((total,), (1,), 0)


def _cell(mode: int) -> Callable[..., Any]:
    """One time step: two products, and one kernel for all gates (native/RNN.cpp, `LSTMCell` and `GRUCell`)."""

    def run(
        x: torch.Tensor,
        hidden: Any,
        weight: torch.Tensor,
        hidden_weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        hidden_bias: torch.Tensor | None = None,
    ) -> Any:
        h = hidden[0] if mode == LSTM else hidden
        gates = [torch.matmul(x, weight.t()), torch.matmul(h, hidden_weight.t())]
        if mode == LSTM:
            hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hidden[1], bias, hidden_bias)
            return hy, cy
        return aten._thnn_fused_gru_cell(*gates, h, bias, hidden_bias)[0]

    return run


def _places(x: torch.Tensor, mode: int, size: int, layers: int, both: bool) -> tuple[int, int]:
    """Bytes that are kept for the backward pass, and bytes of scratch memory.

    Kept are the gates, the cells of an LSTM and what one layer gives to the next: cuDNN does not say what it asks for.
    """
    rows, directions = math.prod(x.shape[:-1]), 2 if both else 1
    kept = rows * layers * directions * size * (GATES[mode] + (2 if mode == LSTM else 1)) * x.element_size()
    return kept, rows * directions * size * GATES[mode] * x.element_size()


def _forward(  # noqa: PLR0913, PLR0917 (as PyTorch calls it)
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    each: int,
    buffer: torch.Tensor | None,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    sizes: Sequence[int],
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """What PyTorch does around the call of cuDNN (native/cudnn/RNN.cpp, _cudnn_rnn)."""
    del each, dropout, state
    turned = batch_first and not sizes
    x = (x.transpose(0, 1) if turned else x).contiguous()
    width = (projected or size) * (2 if both else 1)
    output = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    hy = torch.empty(hx.shape, dtype=hx.dtype, device=hx.device)
    cy = torch.empty([0] if cx is None else cx.shape, dtype=hx.dtype, device=hx.device)
    if buffer is None:
        buffer = _copied(weights)
    kept, scratch = _places(x, mode, size, layers, both)
    torch.empty(scratch, dtype=torch.uint8, device=x.device)
    reserve = torch.empty(kept if train else 0, dtype=torch.uint8, device=x.device)
    return output.transpose(0, 1) if turned else output, hy, cy, reserve, buffer


def _copied(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights copied into one buffer."""
    buffer = torch.empty(sum(weight.numel() for weight in weights), dtype=weights[0].dtype, device=weights[0].device)
    buffer.zero_()
    for part, weight in zip(_parts(buffer, weights), weights, strict=True):
        part.copy_(weight)
    return buffer


def _parts(buffer: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    results, at = [], 0
    for weight in weights:
        results.append(buffer[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()
    return results


def _backward(  # noqa: PLR0913, PLR0917 (as PyTorch calls it)
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    each: int,
    buffer: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    output: torch.Tensor,
    gradient: torch.Tensor | None,
    hidden_gradient: torch.Tensor | None,
    cell_gradient: torch.Tensor | None,
    mode: int,
    size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    both: bool,
    sizes: Sequence[int],
    state: torch.Tensor | None,
    reserve: torch.Tensor,
    wanted: Sequence[bool],
) -> tuple[Any, ...]:
    """Gradients of the inputs, then those of all weights in one buffer (_cudnn_rnn_backward)."""
    del each, projected, dropout, train, state, reserve
    gradient = torch.zeros_like(output) if gradient is None else gradient
    for given, like in ((hidden_gradient, hx), (cell_gradient, cx)):
        if given is None and like is not None:
            torch.zeros_like(like)
    turned = batch_first and not sizes
    x = (x.transpose(0, 1) if turned else x).contiguous()
    (gradient.transpose(0, 1) if turned else gradient).contiguous()
    of_input = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_hidden = torch.empty_like(hx)
    of_cells = None if cx is None else torch.empty_like(cx)
    scratch = _places(x, mode, size, layers, both)[1]
    torch.empty(scratch, dtype=torch.uint8, device=x.device)
    of_weights: list[torch.Tensor | None] = [None] * len(weights)
    if wanted[3]:
        summed = torch.zeros_like(buffer)
        torch.empty(scratch, dtype=torch.uint8, device=x.device)
        of_weights = [*_parts(summed, weights)]
    return of_input.transpose(0, 1) if turned else of_input, of_hidden, of_cells, of_weights


def _fused_cell(mode: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    def run(gates: torch.Tensor, _: torch.Tensor, state: torch.Tensor, *__: Any) -> tuple[torch.Tensor, ...]:
        made = [torch.empty_like(state) for _ in range(2 if mode == LSTM else 1)]
        kept = 4 if mode == LSTM else 5  # gates of an LSTM; of a GRU two more (native/cuda/RNN.cu)
        work = torch.empty([gates.shape[0], kept * state.shape[1]], dtype=gates.dtype, device=gates.device)
        return *made, work

    return run


def _fused_lstm_backward(
    hidden: torch.Tensor | None, cell: torch.Tensor | None, cx: torch.Tensor, cy: torch.Tensor, work: torch.Tensor, bias: bool
) -> tuple[torch.Tensor, ...]:
    del hidden, cell, cy
    gates, of_cx = torch.empty_like(work), torch.empty_like(cx)
    return gates, of_cx, gates.sum(0) if bias else gates.new_empty(0)


def _fused_gru_backward(gradient: torch.Tensor, work: torch.Tensor, bias: bool) -> tuple[Any, ...]:
    width = 3 * gradient.shape[1]
    gates = [torch.empty([work.shape[0], width], dtype=work.dtype, device=work.device) for _ in range(2)]
    of_hx = torch.empty_like(gradient)
    return *gates, of_hx, *([each.sum(0) for each in gates] if bias else (None, None))


def cast_layer(*args: Any) -> Any:
    """Under autocast all is cast to half precision, weights into a buffer of their own (cudnn/AutocastRNN.cpp)."""
    x, weights, each, _, hx, cx, *rest = args
    half = torch.float16
    if weights[0].dtype == torch.float32:
        weights = [weight.to(half) for weight in weights]
    # In the order in which compilers evaluate the arguments of the call.
    cx, hx, x = None if cx is None else cx.to(half), hx.to(half), x.to(half)
    buffer = torch.empty(sum(weight.numel() for weight in weights), dtype=half, device=x.device)
    return aten._cudnn_rnn(x, weights, each, buffer, hx, cx, *rest)


_NAMES = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}
LAYERS: dict[str, Callable[..., Any]] = {
    **{f"{name}.input": _layer(mode, packed=False) for name, mode in _NAMES.items()},
    **{f"{name}.data": _layer(mode, packed=True) for name, mode in _NAMES.items()},
    "lstm_cell": _cell(LSTM),
    "gru_cell": _cell(GRU),
}
"""In place of what PyTorch makes of them elsewhere."""

CONTENTS: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn": _forward,
    "aten::_cudnn_rnn_backward": _backward,
    "aten::_thnn_fused_lstm_cell": _fused_cell(LSTM),
    "aten::_thnn_fused_gru_cell": _fused_cell(GRU),
    "aten::_thnn_fused_lstm_cell_backward_impl": _fused_lstm_backward,
    "aten::_thnn_fused_gru_cell_backward": _fused_gru_backward,
}
"""By op, what PyTorch does around the kernels of cuDNN, and what they give."""
