"""Sparse tensors of the pretended device, as `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)` give gradients.

Such a tensor holds row numbers and rows, both of the device. What ops do with it is made of ops on those two, as PyTorch has it
for CUDA (in native/sparse: SparseTensor.cpp, SparseTensorMath.cpp, cuda/SparseCUDATensor.cu, cuda/SparseCUDATensorMath.cu). How
many distinct rows a gradient has decides the size of what follows: they are counted where the lookups are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

from steptime._capture.known import Known
from steptime._capture.refusals import only_gradients, user_line
from steptime._capture.tensors import META, as_meta, is_pretended, on_device, unseen

aten = torch.ops.aten
_MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
# PyTorch knows of sparse tensors without memory what these give.
_PARTS = frozenset(
    f"aten::{name}"
    for name in ("_nnz", "_indices", "_values", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim", "detach", "alias")
)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of row numbers and rows."""
    return tensor.layout is torch.sparse_coo


def makes(func: Any) -> bool:
    """Whether an op makes a sparse tensor of its parts."""
    return func is _MAKE


def has_kernel(func: Any) -> bool:
    """Whether PyTorch does something of its own with sparse tensors, though it could make the op of others."""
    return func is _MAKE or func._schema.name in _PARTS or func._schema.name in _CONTENTS


def part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a sparse tensor is made of, or one made of its parts."""

    def down(value: Any) -> Any:
        return as_meta(value) if isinstance(value, torch.Tensor) and is_pretended(value) else value

    with unseen():
        result = func(*map(down, args), **{name: down(value) for name, value in kwargs.items()})
        if func is aten._coalesced_.default:
            args[0].data = on_device(result)
            return args[0]
        return on_device(result) if isinstance(result, torch.Tensor) else result


def contents_of(func: Any, known: Known) -> Callable[..., Any] | None:
    """What an op on sparse tensors calls on CUDA; None where it only looks at their parts."""
    name: str = func._schema.name
    if func is _MAKE:
        return _put_together
    if name in _PARTS:
        return None
    if name == "aten::_coalesce":
        return lambda source: _coalesced(source, known)
    if name not in _CONTENTS:
        if func.has_kernel_for_dispatch_key(DispatchKey.SparseCPU):
            raise only_gradients()
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'SparseCUDA' backend.")  # as PyTorch does
    return _CONTENTS[name]


def _put_together(*args: Any, **kwargs: Any) -> Any:
    """An empty tensor, whose parts are then put in."""
    dims, _, _, indices, values = args[:5]
    no_values = torch.empty([0], dtype=values.dtype, device=values.device)
    no_indices = torch.empty([dims, 0], dtype=indices.dtype, device=values.device)
    no_values.resize_([0, *values.shape[1:]])
    no_indices.resize_([dims, 0])
    with _disable_current_modes():
        return part(_MAKE, args, kwargs)


def _made(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, coalesced: bool | None = None) -> torch.Tensor:
    result: torch.Tensor = aten._sparse_coo_tensor_unsafe(indices, values, like.shape, is_coalesced=coalesced)
    return result


def _coalesced(source: torch.Tensor, known: Known) -> torch.Tensor:
    """Row numbers are sorted and made unique by kernels that are no ops, and rows of equal numbers summed by another."""
    count, _ = source._nnz(), source.is_coalesced()
    values, _ = source._values(), source.sparse_dim()
    flat = source._indices().squeeze(0).clone(memory_format=torch.contiguous_format)
    for _ in range(2):  # where rows were, and where those of one number begin
        torch.empty([count], dtype=flat.dtype, device=source._indices().device)
    distinct = _distinct(flat, source.shape[0], known)
    known.forget(flat)
    flat.resize_([1, distinct])
    summed = torch.empty([distinct, *values.shape[1:]], dtype=values.dtype, device=values.device)
    options = {"dtype": values.dtype, "layout": torch.sparse_coo, "device": values.device}
    result: torch.Tensor = _MAKE(1, source.dim() - 1, source.shape, flat, summed, **options)
    return result._coalesced_(True)


def _distinct(numbers: torch.Tensor, rows: int, known: Known) -> int:
    """How many row numbers differ: as many as of evenly drawn ones where they are not known, which is said."""
    count = numbers.numel()
    with unseen():
        values = known.values(numbers)
        if values is not None:
            return len(set(values.tolist()))
    expected = max(1, min(count, rows, round(rows * (1.0 - (1.0 - 1.0 / rows) ** count))))
    known.said[
        f"{user_line() or 'PyTorch'} sums gradients of equal rows, of lookups that are not known: {count:,} evenly drawn of "
        f"{rows:,} rows are taken, {expected:,} of them distinct"
    ] = None
    return expected


def _add(one: torch.Tensor, other: torch.Tensor, *, alpha: float = 1, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows added to a dense tensor at their numbers; two sparse tensors are put side by side."""
    if is_sparse(one):
        return _side_by_side(one, other, alpha)
    into = aten.empty_like(one) if out is None else out
    count, dtype = other._nnz(), torch.result_type(one, other)
    dense = one.to(dtype)
    values = other._values().to(dtype)
    if out is None:
        into.copy_(dense)
    indices, _, _ = other._indices(), other.sparse_dim(), other.is_coalesced()
    numbers = indices.squeeze(0)
    rows = into.view([one.shape[0], math.prod(one.shape[1:])])
    rows.index_add_(0, numbers, values.reshape([count, rows.shape[1]]), alpha=alpha)
    return into.copy_(into)  # nothing, of a tensor to itself


def _side_by_side(one: torch.Tensor, other: torch.Tensor, alpha: float) -> torch.Tensor:
    if not is_sparse(other):
        raise NotImplementedError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")  # as PyTorch does
    added = other._values()
    indices = torch.cat([one._indices(), other._indices()], 1)
    values = torch.cat([one._values(), added.mul(alpha) if alpha != 1 else added], 0)
    result = _made(indices, values, one)
    return result.coalesce() if values.shape[0] > one.numel() else result


def _add_(one: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    if is_sparse(one):
        one.data = _side_by_side(one, other, alpha)
        return one
    result: torch.Tensor = aten.add.out(one, other, alpha=alpha, out=one)
    return result


def _masked(source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows of a dense tensor at the numbers of a sparse one: multiplied by ones."""
    values = mask._values()
    ones = torch.ones([1], dtype=values.dtype, device=values.device).expand_as(values)
    return source.mul(_made(mask._indices(), ones, mask, coalesced=mask.is_coalesced())).to(source.dtype)


def _mul(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows times those of a dense tensor at their numbers, or times one number."""
    sparse, dense = (one, other) if is_sparse(one) else (other, one)
    if is_sparse(dense):
        raise NotImplementedError("Could not run 'aten::mul.Tensor' with two arguments from the 'SparseCUDA' backend.")
    indices, values = sparse._indices(), sparse._values()
    met = dense[indices[0]] if dense.dim() > values.dim() - 1 else dense
    return _made(indices.clone(), torch.mul(met, values), sparse, coalesced=sparse.is_coalesced())


def _mul_(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one._values().mul_(other)
    return one


def _div_(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one._values().div_(other)
    return one


def _clone(source: torch.Tensor, **_: Any) -> torch.Tensor:
    """A copy of both parts.

    A parameter takes over a gradient that nobody else holds (autograd/functions/accumulate_grad.h): here Python holds it, and
    PyTorch asks for a copy.
    """
    indices, values = source._indices(), source._values()
    taken_over = torch._C._current_graph_task_id() >= 0 and not torch.is_grad_enabled()
    if not (taken_over and indices.is_contiguous() and values.is_contiguous()):
        indices, values = indices.clone(), values.clone()
    return _made(indices, values, source, coalesced=source.is_coalesced())


def _zero_(source: torch.Tensor) -> torch.Tensor:
    """Nothing is left: `zero_grad(set_to_none=False)`."""
    values = source._values()
    kept = torch.empty([0, *values.shape[1:]], dtype=values.dtype, device=values.device)
    source.data = _made(torch.empty([1, 0], dtype=torch.int64, device=values.device), kept, source)
    return source


def _neg(source: torch.Tensor) -> torch.Tensor:
    return _made(source._indices().clone(), source._values().neg(), source, coalesced=source.is_coalesced())


def _to_dense(source: torch.Tensor, dtype: torch.dtype | None = None, _: bool | None = None) -> torch.Tensor:
    values = source._values()
    return torch.zeros(source.shape, dtype=dtype or values.dtype, device=values.device).add_(source)


_CONTENTS: dict[str, Callable[..., Any]] = {
    "aten::add": _add,
    "aten::add_": _add_,
    "aten::mul": _mul,
    "aten::mul_": _mul_,
    "aten::div_": _div_,
    "aten::neg": _neg,
    "aten::clone": _clone,
    "aten::zero_": _zero_,
    "aten::sparse_mask": _masked,
    "aten::_to_dense": _to_dense,
}


def _empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """PyTorch makes empty parts for a sparse tensor before it is given its own."""
    return on_device(aten.empty.memory_format(size, dtype=dtype, device=META))


def _registered() -> Library | None:
    """The registration, which holds as long as this object does."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", "CUDA"):
        return None  # a build with CUDA
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("empty.memory_format", _empty, "CUDA")
    result: Library = library
    return result


_REGISTERED = _registered()
