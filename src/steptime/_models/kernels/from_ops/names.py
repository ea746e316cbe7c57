"""What an op does by its name: makes no device work of its own, looks up embeddings, communicates."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from steptime._models.kernels.from_ops.overloads import overloads_of


class Role(IntEnum):
    """What an op's name says about device work."""

    NOTHING = 0  # launches nothing, nor does anything inside it: views, reservations of memory, questions about a tensor
    COMPOSITE = 1  # made of other ops, which launch what there is to launch
    LAUNCHES = 2  # an op with known overloads: it launches kernels, and so may the ops inside it, which belong to it
    LOOKUP = 3  # an embedding lookup, its backward pass or the update of the rows it read
    COLLECTIVE = 4
    OPEN = 5  # not known by name: what is inside it tells


_VIEWS = """
    alias as_strided chunk detach detach_ diagonal expand expand_as flatten lift_fresh movedim mT narrow numpy_T permute
    _reshape_alias resolve_conj resolve_neg select slice split split_with_sizes squeeze squeeze_ swapaxes t transpose transpose_
    t_ unbind
    unflatten unfold unsafe_chunk unsafe_split _unsafe_view unsqueeze unsqueeze_ view view_as broadcast_tensors as_strided_
    unflatten_dense_tensors real imag view_as_real view_as_complex _conj _neg_view
"""
_RESERVATIONS = (
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ _resize_output_ record_stream"
)
_QUESTIONS = """
    is_coalesced sparse_dim dense_dim _nnz _indices _values indices values result_type size stride numel is_floating_point
    is_nonzero is_same_size can_cast promote_types _has_compatible_shallow_copy_type is_pinned _version
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor _debug_has_internal_overlap is_set_to
    _coalesced_ storage_offset output_nr is_leaf
"""
_NOTHING = frozenset(f"aten::{name}" for name in f"{_VIEWS} {_RESERVATIONS} {_QUESTIONS}".split())

# The project's own lookup, PyTorch's bags, FBGEMM's table-batched embeddings.
_LOOKUP = re.compile(r"^(?:TableBatchedLookup|aten::(?:_?embedding_bag|embedding_sparse)|fbgemm::split_embedding|SplitLookup)")
_COLLECTIVE = "record_param_comms"
# What the framework calls its own frames; their names say nothing about what they launch.
_FRAME = re.compile(
    r"^(?:autograd::|c10d::|_c10d_functional|nccl:|torch::|torch\.|Optimizer\.|ProfilerStep|##|\[)|[ #]|Backward\d*$"
)


@lru_cache(maxsize=1 << 14)
def role_of(name: str) -> Role:
    """The role of an op by its name alone."""
    if name in _NOTHING:
        return Role.NOTHING
    if _LOOKUP.match(name):
        return Role.LOOKUP
    if name == _COLLECTIVE:
        return Role.COLLECTIVE
    if overloads_of(name):
        return Role.LAUNCHES
    return Role.COMPOSITE if _FRAME.search(name) or "::" not in name else Role.OPEN
