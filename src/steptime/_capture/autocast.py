"""`torch.autocast("cuda")` for tensors of the pretended device.

PyTorch casts where a tensor says in C++ that it is on CUDA, which these do not. So while a device is pretended, the kernels
that autocast has for CUDA are replaced by ones written here: the same ops (the lists of ATen/autocast_mode.h), the same rules
(ATen/autocast_mode.cpp), the same order of casts, and so the same nodes in an execution trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey, DispatchKeySet

from steptime._capture import recurrent
from steptime._capture.tensors import is_pretended, tensors_in

# AT_FORALL_LOWER_PRECISION_FP and the two of cuDNN.
_LOWER = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
    chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution cudnn_convolution_transpose
"""
# AT_FORALL_FP32.
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa
"""
# AT_FORALL_FP32_SET_OPT_DTYPE.
_DTYPE_SET = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
# AT_FORALL_PROMOTE.
_PROMOTED = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64 and is_pretended(value)
    )


class _Casts:
    """Casts, those of weights kept until the outermost autocast ends."""

    def __init__(self) -> None:
        self._of_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._of_weights.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return [self.cast(each, dtype) for each in value] if any(map(_eligible, value)) else value
        if not _eligible(value) or value.dtype == dtype:
            return value
        weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (weight and dtype == torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self._of_weights:
            self._of_weights[id(value)] = (value, value.to(dtype))
        return self._of_weights[id(value)][1]


def _lower(*_: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _promoted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """To float32 where any is, else to the lower precision."""
    wide = any(_eligible(each) and each.dtype == torch.float32 for each in tensors_in((args, kwargs)))
    return torch.float32 if wide else torch.get_autocast_dtype("cuda")


def _in_float32(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lets the op itself compute in float32, where its caller says nothing else."""
    index = next(index for index, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    dtype = args[index] if index < len(args) else kwargs.get("dtype")
    if dtype is not None or not _eligible(args[0]):
        return args, kwargs
    return args[:index], {**kwargs, "dtype": torch.float32}


# Ops, and the dtype that the arguments of a call are cast to; None: the op itself computes in float32.
_RULES: tuple[tuple[str, Callable[..., torch.dtype] | None], ...] = (
    (_LOWER, _lower), (_FLOAT32, lambda *_: torch.float32), (_DTYPE_SET, None), (_PROMOTED, _promoted),
)  # fmt: skip
_OFF = DispatchKeySet(DispatchKey.AutocastCUDA)


def _kernel(name: str, dtype_of: Callable[..., torch.dtype] | None, casts: _Casts) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            if dtype_of is None:
                args, kwargs = _in_float32(op, args, kwargs)
                return op(*args, **kwargs)
            dtype = dtype_of(args, kwargs)
            # The last argument first: compilers evaluate the arguments of the call in that order where PyTorch casts them.
            named = {key: casts.cast(kwargs[key], dtype) for key in reversed(kwargs)}
            return op(*reversed([casts.cast(each, dtype) for each in reversed(args)]), **named)

    return run


def _off(run: Callable[..., Any]) -> Callable[..., Any]:
    """Without casts of what it calls."""

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_OFF):
            return run(*args)

    return call


@contextmanager
def casting() -> Iterator[None]:
    """While it lasts, autocast for CUDA casts tensors of the pretended device."""
    casts = _Casts()
    library: Any = torch.library.Library("aten", "IMPL", "AutocastCUDA")  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        casts.clear()
        clear()

    try:
        with warnings.catch_warnings(action="ignore"):  # each kernel is there to take the place of another
            for names, dtype_of in _RULES:
                for name in names.split():
                    library.impl(name, _kernel(name, dtype_of, casts), allow_override=True)
            library.impl("_cudnn_rnn", _off(recurrent.cast_layer), allow_override=True)
        with patch.object(torch, "clear_autocast_cache", cleared):
            yield
    finally:
        library._destroy()
