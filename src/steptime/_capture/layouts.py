"""How CUDA lays out what ops make, where PyTorch's meta functions lay it out otherwise.

Found by comparing the two op by op on tensors in channels_last (tests/capture/test_layouts.py): most meta functions follow
their inputs as the kernels do. Convolutions do not, since the library behind them decides; some losses and gates make
gradients in the order of their shape whatever they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

Format = torch.memory_format
_PLAIN = torch.contiguous_format
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def cudnn_format(*tensors: torch.Tensor) -> Format:
    """How cuDNN wants its tensors: with channels last where one of two is so (ATen/native/ConvUtils.h).

    Not in float64, and never for one dimension, which PyTorch makes contiguous first.
    """
    last = _LAST.get(tensors[0].dim())
    if last is None or tensors[0].dtype == torch.float64 or not torch.backends.cudnn.enabled:
        return _PLAIN
    return last if any(suggest_memory_format(each) is last for each in tensors) else _PLAIN


def _convolution(args: Sequence[Any]) -> tuple[Format, ...]:
    """Transposed ones too: cuDNN's backward pass computes them."""
    return (cudnn_format(args[0], args[1]),)


def _convolution_backward(args: Sequence[Any]) -> tuple[Format, ...]:
    """As in forward: what is given of the output is laid out as the input is (native/cudnn/ConvShared.cpp)."""
    forward = cudnn_format(args[1], args[2])
    return forward, forward, _PLAIN


def _batch_norm_backward(args: Sequence[Any]) -> tuple[Format, ...]:
    """Kernels for channels last where the input is so, else for the order of its shape (native/cuda/Normalization.cu)."""
    return suggest_memory_format(args[1]), _PLAIN, _PLAIN


# Whatever their arguments are: made as LEGACY_CONTIGUOUS_MEMORY_FORMAT, or empty and resized (native/cuda/layer_norm_kernel.cu,
# native/SoftMax.cpp, native/Loss.cpp, native/GatedLinearUnit.cpp).
_ROW_MAJOR = frozenset(
    f"aten::{name}"
    for name in (
        "native_layer_norm_backward", "_fused_rms_norm_backward", "_log_softmax_backward_data", "mse_loss_backward",
        "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward",
    )
)  # fmt: skip
_FORMATS: dict[str, Callable[[Sequence[Any]], tuple[Format, ...]]] = {
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _batch_norm_backward,
}


def laid_out(name: str, args: Sequence[Any], result: Any) -> Any:
    """What a meta function gave, as CUDA lays it out."""
    rule = _FORMATS.get(name)
    if rule is None and name not in _ROW_MAJOR:
        return result
    made = (result,) if isinstance(result, torch.Tensor) else result
    formats = rule(args) if rule else (_PLAIN,) * len(made)
    laid = tuple(None if each is None else _as(each, wanted) for each, wanted in zip(made, formats, strict=True))
    return laid[0] if isinstance(result, torch.Tensor) else laid


def _as(tensor: torch.Tensor, wanted: Format) -> torch.Tensor:
    if wanted in _LAST.values() and _LAST.get(tensor.dim()) is not wanted:
        wanted = _PLAIN
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=wanted)
