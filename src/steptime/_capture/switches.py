"""What a script has switched in PyTorch when it calls an op: TF32, cuDNN's search, deterministic kernels.

The switches are global, and those that hold when an op runs count: a script may change them between two layers, and backward
runs under whatever holds then. Only what concerns an op and is not as PyTorch has it is noted with the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from steptime._capture.tensors import tensors_in
from steptime._program.program import DEFAULT_SWITCHES, Switches

_get: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_set: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter
# What cuBLAS and cuDNN ask for (ATen/Context.cpp, float32Precision): the part of PyTorch's precision that an op goes by.
_PRECISION = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::baddbmm_"), "matmul"),
    **dict.fromkeys(("aten::_addmm_activation", "aten::addbmm", "aten::addbmm_"), "matmul"),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_backward"), "conv"),
    **dict.fromkeys(("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"), "rnn"),
}
_TF32 = "tf32"
_USUAL_BLAS = ("default", "cublas")
_preferred = ["default"]  # the last is what holds
_ALLOWED_BY_DEFAULT = ("conv", "rnn")
_OF_PRECISION = (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
# Ops of which PyTorch has another kernel for torch.use_deterministic_algorithms (its documentation lists them).
_ALTERNATIVES = frozenset(
    f"aten::{name}"
    for name in (
        "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_", "index_select",
        "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "gather", "cumsum",
        "embedding_dense_backward", "upsample_bilinear2d_backward", "upsample_linear1d_backward", "repeat_interleave",
    )
)  # fmt: skip


def is_switched(name: str) -> bool:
    """Whether there is a switch that concerns an op."""
    return name in _PRECISION or name in _ALTERNATIVES


def switches_at(func: Any, args: tuple[Any, ...]) -> Switches:
    """What is switched for this op now."""
    name = func._schema.name
    part = _PRECISION.get(name)
    if part is None:
        different = name in _ALTERNATIVES and torch.are_deterministic_algorithms_enabled()
        return Switches(deterministic=True) if different else DEFAULT_SWITCHES
    tf32 = _tf32(part) if any(tensor.dtype == torch.float32 for tensor in tensors_in(args)) else None
    if part == "matmul":
        other = _preferred[-1] not in _USUAL_BLAS
        return Switches(tf32, other_library=other) if other or tf32 is not None else DEFAULT_SWITCHES
    cudnn = torch.backends.cudnn
    deterministic = bool(cudnn.deterministic) or torch.are_deterministic_algorithms_enabled()
    searches = part == "conv" and bool(cudnn.benchmark) and not deterministic
    return Switches(tf32, searches, deterministic, other_library=not cudnn.enabled)


def preferred_blas_library(backend: Any = None) -> str:
    """As of `torch.backends.cuda`, which refuses what a build without CUDA does not have."""
    if backend is not None:
        _preferred.append(str(backend).rpartition(".")[2].lower())
    return _preferred[-1]


def _tf32(part: str) -> bool | None:
    """Whether TF32 is allowed, where that is not so by default."""
    allowed = _get("cuda", part) == _TF32
    return None if allowed == (part in _ALLOWED_BY_DEFAULT) else allowed


@contextmanager
def restored() -> Iterator[None]:
    """What is switched while it lasts is as before afterwards: the next script that is captured begins with its own."""
    precision = torch.get_float32_matmul_precision()
    parts = {key: _get(*key) for key in _OF_PRECISION}
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    kept = [(cudnn, name, getattr(cudnn, name)) for name in ("enabled", "benchmark", "deterministic")]
    back_ends = {name: getattr(cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")}
    deterministic = _deterministic()
    try:
        with patch.object(cuda, "preferred_blas_library", preferred_blas_library):
            yield
    finally:
        del _preferred[1:]
        torch.set_float32_matmul_precision(precision)
        # The flag that was there before the settings by part, which these do not move.
        torch._C._set_cudnn_allow_tf32(parts["cuda", "conv"] == _TF32)
        for key, value in parts.items():
            _set(*key, value)
        for owner, name, value in kept:
            setattr(owner, name, value)
        for name, value in back_ends.items():
            getattr(cuda, f"enable_{name}_sdp")(value)
        if _deterministic() != deterministic:  # which imports the compiler
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
