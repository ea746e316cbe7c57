"""What PyTorch does on CUDA otherwise than on a device it knows nothing of, rule by rule, each with where PyTorch decides it.

The rules replace PyTorch's own kernels for ops that are made of others (key AutogradCUDA), so that an execution trace shows the
op as always and inside it what CUDA runs. They are checked op by op against traces of steps on a GPU (tests/capture).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from steptime._capture import recurrent

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One kernel that draws, scales and keeps the mask (native/Dropout.cpp, is_fused_kernel_acceptable)."""
    result: torch.Tensor
    if train and 0 < p < 1 and x.numel():
        result, _ = aten.native_dropout(x, p, train)
    else:
        result = _as_elsewhere(aten.dropout.default, x, p, train)
    return result


def _as_elsewhere(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What PyTorch makes of an op on any device."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


# at::SDPBackend, by number.
MATH, FLASH, EFFICIENT, CUDNN = "math", "flash", "efficient", "cudnn"
_BY_NUMBER = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
# Unless a script gives another order: cuDNN is preferred from compute capability 9.0 on (priority_order).
_PREFERRED = (CUDNN, FLASH, EFFICIENT, MATH)
_PREFERRED_ELSEWHERE = [FLASH, EFFICIENT, MATH, CUDNN]
_ENABLED: dict[str, Callable[[], bool]] = {
    MATH: torch.backends.cuda.math_sdp_enabled,
    FLASH: torch.backends.cuda.flash_sdp_enabled,
    EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled,
    CUDNN: torch.backends.cuda.cudnn_sdp_enabled,
}


def attention_backend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> str:
    """Which kernel attention takes, on a GPU like the reference device (native/transformers/cuda/sdp_utils.cpp).

    The first that takes the arguments, of those that the script allows (`sdpa_kernel`, `torch.backends.cuda.enable_flash_sdp`):
    cuDNN's, then flash attention for halves, the memory-efficient kernel for single precision.
    """
    takes = {name: rule(query, key, value, mask, causal) for name, rule in _TAKES.items()}
    result = next((name for name in _in_order() if takes[name] and _ENABLED[name]()), None)
    if result is None:
        raise RuntimeError("No available kernel. Aborting execution.")  # as PyTorch does
    return result


def _in_order() -> Sequence[str]:
    said = [_BY_NUMBER[number] for number in torch._C._get_sdp_priority_order() if number in _BY_NUMBER]
    return _PREFERRED if said == _PREFERRED_ELSEWHERE else said


def _fusable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> bool:
    plain = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype
    return plain and all(query.shape) and all(key.shape) and not (causal and mask is not None)


def _takes_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> bool:
    dims = (query.shape[-1], value.shape[-1])
    # On Hopper from cuDNN 9.10 on; elsewhere 128.
    sized = not any(dim % 8 for dim in dims) and max(dims) <= 256 and not (causal and query.shape[-2] > key.shape[-2])
    masked = mask is None or mask.dim() in (2, 4)  # check_attn_mask_shape
    repeatable = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    fusable = _fusable(query, key, value, mask, causal) and query.dtype in _HALVES
    return fusable and sized and masked and not repeatable and not _trained(mask)


def _takes_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> bool:
    dims = (query.shape[-1], value.shape[-1])
    sized = mask is None and max(dims) <= 256 and dims[0] == dims[1]
    return _fusable(query, key, value, mask, causal) and query.dtype in _HALVES and sized


def _takes_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> bool:
    fusable = _fusable(query, key, value, mask, causal) and query.shape[-3] == key.shape[-3]
    aligned = 16 // query.dtype.itemsize  # elements, for tensor cores (minimum_gemm_alignment)
    sized = not any(dim % aligned for dim in (query.shape[-1], value.shape[-1]))
    return fusable and query.dtype in (*_HALVES, torch.float32) and sized


_TAKES: dict[str, Callable[..., bool]] = {
    CUDNN: _takes_cudnn, FLASH: _takes_flash, EFFICIENT: _takes_efficient, MATH: lambda *_: True
}  # fmt: skip


def _trained(mask: torch.Tensor | None) -> bool:
    """Whether a mask gets a gradient, as learned biases of positions do: cuDNN's attention gives none."""
    return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that CUDA takes, around it what PyTorch does for it (native/transformers/attention.cpp)."""
    backend = attention_backend(query, key, value, mask, is_causal)
    if backend == FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    result: torch.Tensor
    if backend == MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        op = aten.scaled_dot_product_attention.default
        result = _as_elsewhere(op, query, key, value, mask, dropout_p, is_causal, **options)
        return result
    bias = None if mask is None else _bias(mask, query, _LEAST_OF_CUDNN if backend == CUDNN else -float("inf"))
    keeps = any(each.requires_grad for each in (query, key, value)) and torch.is_grad_enabled()
    if backend == CUDNN:
        result, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, False, scale=scale
        )
    else:
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        result, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )
    return result


# The least number of half precision: cuDNN's attention gets it in place of minus infinity (convert_boolean_attn_mask_cudnn).
_LEAST_OF_CUDNN = -65504.0


def _bias(mask: torch.Tensor, query: torch.Tensor, least: float) -> torch.Tensor:
    """What is added to products where a mask of truth values says no (convert_boolean_attn_mask)."""
    if mask.dtype != torch.bool:
        return mask
    low = aten.scalar_tensor(least, dtype=query.dtype, device=query.device)
    result: torch.Tensor = torch.where(mask, 0.0, low)
    return result


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, causal: bool, scale: float | None
) -> torch.Tensor:
    """Heads are padded to a multiple of 8 elements and cut again."""
    dim = query.shape[-1]
    missing = -dim % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(each, (0, missing)) for each in (query, key, value))
    scale = scale if scale is not None or not missing else dim**-0.5
    result: torch.Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, causal, False, scale=scale)[0]
    return result[..., :dim] if missing else result


def batch_norm(  # noqa: PLR0913, PLR0917 (as PyTorch calls it)
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """cuDNN's, where it takes the arguments (native/Normalization.cpp, _select_batch_norm_backend)."""
    both = (mean is None) == (variance is None)
    fits = weight is not None and bias is not None and both and (mean is not None or training)
    known = x.dtype != torch.bfloat16 and (x.dtype != torch.float16 or (weight is not None and weight.dtype == torch.float32))
    shaped = x.dim() >= 3  # rows of features go to PyTorch's own kernels, which are faster there
    small = x.numel() <= 2**31 - 1
    if cudnn and fits and known and shaped and small:
        out, saved_mean, saved_variance, reserve = aten.cudnn_batch_norm(
            x.contiguous(memory_format=_format(x)), weight.contiguous() if weight is not None else None,
            bias.contiguous() if bias is not None else None, mean, variance, training, momentum, eps,
        )  # fmt: skip
        return out, saved_mean, saved_variance, reserve, 1
    reserve = aten.empty.memory_format([0], dtype=torch.uint8, layout=x.layout, device=x.device)
    out, saved_mean, saved_variance = aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    return out, saved_mean, saved_variance, reserve, 0


def _format(x: torch.Tensor) -> torch.memory_format:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A softmax of half precision gives single precision without a cast before (native/SoftMax.cpp)."""
    result: torch.Tensor
    result = aten._softmax(x, dim, True) if _widens(x, dtype) else _as_elsewhere(aten.softmax.int, x, dim, dtype)
    return result


def log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same of its logarithm."""
    result: torch.Tensor
    result = aten._log_softmax(x, dim, True) if _widens(x, dtype) else _as_elsewhere(aten.log_softmax.int, x, dim, dtype)
    return result


def _widens(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return x.dtype == torch.float16 and dtype == torch.float32


_MEAN, _SUM = 1, 2  # at::Reduction


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """PyTorch's own kernel, which takes lengths from the host (native/LossCTC.cpp); cuDNN's wants targets of the host."""
    inputs, lengths = (each.cpu().tolist() for each in (input_lengths, target_lengths))
    losses: torch.Tensor = aten._ctc_loss(log_probs, targets, inputs, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), aten.scalar_tensor(0.0, dtype=losses.dtype, device=losses.device), losses)
    if reduction == _MEAN:
        divisor = torch.tensor(lengths, dtype=losses.dtype).to(losses.device)
        return (losses / divisor.clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses


class _RunningProduct(torch.autograd.Function):
    """A running product, whose gradient asks whether there are zeros: where a mode is active PyTorch takes it that there are.

    (autograd/FunctionsManual.cpp, cumprod_backward.)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: torch.Tensor = aten.cumprod(x, dim)
        ctx.dim = dim
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, result = ctx.saved_tensors
        weighed = result * gradients[0]
        (x == 0).any().item()
        return weighed.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim).div(x), None


def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The kernel, and a backward pass as of numbers among which no zero is."""
    result: torch.Tensor = _RunningProduct.apply(x if dtype is None else x.to(dtype), dim)  # type: ignore[no-untyped-call]
    return result


RULES: dict[str, Callable[..., Any]] = {
    "cumprod": cumprod,
    "ctc_loss.Tensor": ctc_loss,
    "dropout": dropout,
    "softmax.int": softmax,
    "log_softmax.int": log_softmax,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_batch_norm_impl_index": batch_norm,
    **recurrent.LAYERS,
}


# Made of others before autograd where a device has no kernel of theirs; CUDA has one (native_functions.yaml).
_KERNELS = ("silu_backward", "mish_backward")


@contextmanager
def chosen() -> Iterator[None]:
    """While it lasts, ops on the pretended device choose as on CUDA."""
    library: Any = torch.library.Library("aten", "IMPL", "AutogradCUDA")  # type: ignore[no-untyped-call]
    try:
        for name, rule in RULES.items():
            library.impl(name, rule)
        for name in _KERNELS:
            library.impl(name, torch.library.fallthrough_kernel)
        yield
    finally:
        library._destroy()
