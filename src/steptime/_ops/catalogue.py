"""The op catalogue: what an op is by its name. Device work, host costs, waits and memory all ask here.

A name is first one of the framework's frames, of communication, of a function of somebody's own, or of an op proper. What is
not declared falls to defaults: an op with known overloads launches, any other is open until what is inside it tells; its host
cost is that of a launch; it reads its inputs and writes its outputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache, lru_cache

from steptime._ops.overloads import add_declarations, overloads_of


class Role(IntEnum):
    """What an op does on the device."""

    NOTHING = 0  # launches nothing, nor does anything inside it: views, reservations of memory, questions about a tensor
    COMPOSITE = 1  # made of other ops, which launch what there is to launch
    LAUNCHES = 2  # an op with known overloads: it launches kernels, and so may the ops inside it, which belong to it
    LOOKUP = 3  # an embedding lookup, its backward pass or the update of the rows it read
    COLLECTIVE = 4
    OPEN = 5  # not known by name: what is inside it tells


class HostClass(StrEnum):
    """What an op costs the host where the op itself was never measured: as much as its class."""

    VIEW = "view"
    ALLOCATION = "allocation"
    LAUNCH = "launch"
    FOREACH = "foreach"
    COLLECTIVE = "collective"


class Data(IntEnum):
    """What an op does with the data of its arguments."""

    FRAME = 0  # the framework's own, around ops: what it does, they do
    UNTOUCHED = 1  # memory, shapes, bookkeeping
    OPAQUE = 2  # a function of somebody's own: what it does with its arguments is not recorded
    IN_PLACE = 3  # writes its first argument
    PLAIN = 4  # reads its inputs, writes its outputs


class Scratch(IntEnum):
    """Which memory an op takes for itself while it runs."""

    NONE = 0
    SORT = 1
    SUM = 2
    CONVOLUTION = 3
    CONVOLUTION_BACKWARD = 4
    COALESCE = 5


class Workspace(IntEnum):
    """What a library keeps from the first such op of a thread on."""

    NONE = 0
    PRODUCT = 1
    PRODUCT_WITH_BIAS = 2


@dataclass(frozen=True, slots=True)
class OpKind:
    """What the name of an op says about it."""

    name: str
    role: Role
    host_class: HostClass
    data: Data
    communicates: bool
    reserves: bool  # asks for memory
    allocates: bool  # asks for memory of its own
    scratch: Scratch
    workspace: Workspace
    reads_back: bool  # the host waits until the value is there
    sparse_part: bool  # returns what a sparse tensor is made of


# Other views of the same memory.
_VIEWS = """
    alias as_strided as_strided_ broadcast_tensors chunk _conj detach detach_ diagonal expand expand_as flatten imag lift_fresh
    movedim mT narrow _neg_view numpy_T permute real _reshape_alias resolve_conj resolve_neg select slice split split_with_sizes
    squeeze squeeze_ swapaxes t t_ transpose transpose_ unbind unflatten unflatten_dense_tensors unfold unsafe_chunk
    unsafe_split _unsafe_view unsqueeze unsqueeze_ view view_as view_as_complex view_as_real
"""
_QUESTIONS = """
    can_cast _debug_has_internal_overlap dense_dim _has_compatible_shallow_copy_type is_coalesced is_floating_point is_leaf
    is_nonzero is_pinned is_same_size is_set_to _nnz numel output_nr promote_types record_stream result_type set_ size
    sparse_dim storage_offset stride _version
"""
# Views where the memory allows it, else copies, which the ops inside them make.
_MOSTLY_VIEWS = frozenset(("contiguous", "reshape", "reshape_as", "to"))
_RESERVES = re.compile(r"(?:new_empty\w*|empty\w*|resize_|resize_as_|_resize_output_)")
_SPARSE_PARTS = frozenset(("_values", "_indices", "values", "indices"))
_MAKE_SPARSE = "_sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor _coalesced_"
# Nothing on the device and next to nothing on the host.
_SILENT = frozenset((*_VIEWS.split(), *_QUESTIONS.split(), *_MAKE_SPARSE.split(), *_SPARSE_PARTS))
# Ops that touch no data of what they are given, as PyTorch's list of native functions has them.
_NO_DATA = re.compile(
    r"(?:new_\w+|\w+_like|empty\w*|resize_|resize_as_|_resize_output_|set_|record_stream|result_type|size|stride|numel|is_\w+"
    r"|detach_?|squeeze_|unsqueeze_|t_|transpose_|as_strided_|requires_grad_|_version|_has_compatible_shallow_copy_type)"
)
_SCRATCH = {
    "sort": Scratch.SORT, "sum": Scratch.SUM, "cudnn_convolution": Scratch.CONVOLUTION,
    "convolution_backward": Scratch.CONVOLUTION_BACKWARD, "_coalesce": Scratch.COALESCE,
}  # fmt: skip
_WORKSPACES = dict.fromkeys(("mm", "bmm", "baddbmm", "addmv", "mv", "dot"), Workspace.PRODUCT) | dict.fromkeys(
    ("addmm", "_addmm_activation"), Workspace.PRODUCT_WITH_BIAS
)
_READ_BACK = frozenset(("item", "_local_scalar_dense", "nonzero", "is_nonzero"))

# The project's own lookup, PyTorch's bags, FBGEMM's table-batched embeddings.
_LOOKUP = re.compile(r"^(?:TableBatchedLookup|aten::(?:_?embedding_bag|embedding_sparse)|fbgemm::split_embedding|SplitLookup)")
_COLLECTIVE_CALL = "record_param_comms"
_COMMUNICATES = ("c10d::", "nccl:", "_c10d_functional", "c10d_functional", _COLLECTIVE_CALL)
# Frames around ops, and autograd's own nodes. Nodes of somebody's own (CppNode) may launch kernels too.
_FRAME = re.compile(
    r"^(?:autograd::|torch::(?!autograd::CppNode)|torch\.|Optimizer\.|ProfilerStep|##|\[|nn\.Module)|[ #]|Backward\d+$"
    r"|\.forward$"
)
_FUNCTION = re.compile(r"CppNode|Backward$")


@cache
def aten(name: str) -> str:
    """The whole name of an op of PyTorch's own library."""
    return f"aten::{name}"


def declare(text: str) -> None:
    """Adds ops that launch device work, in the notation of `declared`: `mylib::gelu.default T f`."""
    add_declarations(text)
    op_kind.cache_clear()


@lru_cache(maxsize=1 << 14)
def op_kind(name: str) -> OpKind:
    """What the catalogue has about an op of this name."""
    space, _, full = name.rpartition("::")
    plain = full.partition(".")[0]
    communicates, frame = name.startswith(_COMMUNICATES), bool(_FRAME.search(name))
    function = not frame and ("::" not in name or bool(_FUNCTION.search(name)))
    return OpKind(
        name=name,
        role=_role(name, plain, composite=frame or communicates or function),
        host_class=_host_class(name, plain),
        data=_data(plain, frame=frame, function=function),
        communicates=communicates,
        reserves=bool(_RESERVES.fullmatch(plain)),
        allocates=name.startswith("aten::empty"),
        scratch=_SCRATCH.get(plain, Scratch.NONE) if space == "aten" else Scratch.NONE,
        workspace=_WORKSPACES.get(plain, Workspace.NONE) if space == "aten" else Workspace.NONE,
        reads_back=space == "aten" and plain in _READ_BACK,
        sparse_part=space == "aten" and plain in _SPARSE_PARTS,
    )


def _role(name: str, plain: str, *, composite: bool) -> Role:
    if name.startswith("aten::") and (plain in _SILENT or _RESERVES.fullmatch(plain)):
        return Role.NOTHING
    if _LOOKUP.match(name):
        return Role.LOOKUP
    if name == _COLLECTIVE_CALL:
        return Role.COLLECTIVE
    if overloads_of(name):
        return Role.LAUNCHES
    return Role.COMPOSITE if composite else Role.OPEN


def _data(plain: str, *, frame: bool, function: bool) -> Data:
    if frame:
        return Data.FRAME
    if _NO_DATA.fullmatch(plain):
        return Data.UNTOUCHED
    if function:
        return Data.OPAQUE
    return Data.IN_PLACE if plain.endswith("_") and not plain.endswith("__") else Data.PLAIN


def _host_class(name: str, plain: str) -> HostClass:
    # Functional collectives (_c10d_functional) are ops around these.
    if name.startswith(("c10d::", "nccl:", _COLLECTIVE_CALL)):
        return HostClass.COLLECTIVE
    if plain.startswith(("_foreach_", "_fused_")):
        return HostClass.FOREACH
    if plain.startswith(("empty", "new_empty")):
        return HostClass.ALLOCATION
    cheap = plain in _SILENT or plain in _MOSTLY_VIEWS or _RESERVES.fullmatch(plain)
    return HostClass.VIEW if cheap else HostClass.LAUNCH
