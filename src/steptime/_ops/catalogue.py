"""The op catalogue: what an op is by its name. Device work, host costs, waits and memory all ask here.

A name is first one of the framework's frames, of communication, of a function of somebody's own, or of an op proper. What is
not declared falls to defaults: an op with known overloads launches, any other is open until what is inside it tells; its host
cost is that of a launch; it reads its inputs and writes its outputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache, lru_cache
from pathlib import Path

import steptime
from steptime._ops.generated import NAMES as GENERATED_NAMES
from steptime._program.program import Scalar, Tensor, Value


class Role(IntEnum):
    """What an op does on the device."""

    NOTHING = 0  # launches nothing, nor does anything inside it: views, reservations of memory, questions about a tensor
    COMPOSITE = 1  # made of other ops, which launch what there is to launch
    LAUNCHES = 2  # an op with known overloads: it launches kernels, and so may the ops inside it, which belong to it
    LOOKUP = 3  # an embedding lookup, its backward pass or the update of the rows it read
    COLLECTIVE = 4
    OPEN = 5  # not known by name: what is inside it tells
    RECURRENT = 6  # a recurrent layer or cell: kernels of its own beside the ops inside it


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


class Integers(IntEnum):
    """What whole numbers in a tensor argument of an op point at."""

    ANYTHING = 0
    OFFSETS = 1  # into the argument before
    ROWS = 2  # of the first argument
    COUNTED = 3  # so many as the argument behind says
    ALONG = 4  # the first argument along the dimension that the second names
    CLASSES = 5  # of scores
    SEVERAL = 6  # one of several indices, each along a dimension of the first argument


@dataclass(frozen=True, slots=True)
class OpKind:
    """What the name of an op says about it."""

    name: str
    plain: str  # without namespace and overload
    aten: bool  # of PyTorch's own library
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
    counts: bool  # makes whole numbers in order
    host_tensors: bool  # a tensor of the host without dimensions is one to it, not a number: copies, random states
    probabilities: bool  # takes numbers from 0 to 1
    across_devices: (
        bool  # takes tensors of the host beside those of a device: copies, indices (native/TensorAdvancedIndexing.cpp), lengths
    )
    row_lookup: bool  # `nn.Embedding`, whose ops other models than lookups answer too

    def integers(self, argument: int | str) -> Integers:
        """What whole numbers point at in an argument."""
        return next((kind for kind, at, op in _INTEGERS if at in (argument, None) and op.fullmatch(self.plain)), _ANYTHING)


ATEN = "aten::"
"""What the names of ops of PyTorch's own library begin with."""

# Other views of the same memory.
_VIEWS = """
    alias as_strided as_strided_ broadcast_tensors chunk _conj detach detach_ diagonal expand expand_as imag
    lift_fresh movedim mT narrow _neg_view _nested_get_values _nested_view_from_jagged numpy_T permute real _reshape_alias
    select slice split split_with_sizes squeeze squeeze_ swapaxes t t_ transpose transpose_ unbind
    unflatten unflatten_dense_tensors unfold unsafe_chunk unsafe_split _unsafe_view unsqueeze unsqueeze_ view view_as
    view_as_complex view_as_real
"""
_QUESTIONS = """
    can_cast _debug_has_internal_overlap dense_dim _has_compatible_shallow_copy_type is_coalesced is_floating_point is_leaf
    is_pinned is_same_size is_set_to _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen
    _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nnz numel output_nr promote_types record_stream
    result_type set_ size sparse_dim storage_offset stride _version
"""
# Views where the memory allows it, else copies, which the ops inside them make.
_MOSTLY_VIEWS = frozenset(("contiguous", "flatten", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to"))
_RESERVES = re.compile(r"(?:new_empty\w*|empty\w*|resize_|resize_as_|_resize_output_)")
_SPARSE_PARTS = "_values _indices values indices"
_MAKE_SPARSE = "_sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors sparse_coo_tensor _coalesced_"
# Nothing on the device and next to nothing on the host.
_SILENT = frozenset((*_VIEWS.split(), *_QUESTIONS.split(), *_MAKE_SPARSE.split(), *_SPARSE_PARTS.split()))
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
_FACTS = {
    "reads_back": re.compile(r"item|_local_scalar_dense|(?:is_)?nonzero|masked_select|_unique2|unique_\w+|bincount"),
    "sparse_part": re.compile(_SPARSE_PARTS.replace(" ", "|")),
    "counts": re.compile(r"arange"),
    "host_tensors": re.compile(r"copy_|_to_copy|_foreach_copy_|_scaled_dot_product\w*"),  # native/TensorAdvancedIndexing.cpp
    "probabilities": re.compile(r"(?:binary_cross_entropy|bernoulli|multinomial)\w*"),
    "across_devices": re.compile(r"copy_|index|index_put_?|_index_put_impl_|_scaled_dot_product\w*|_ctc_loss\w*"),
    "row_lookup": re.compile(r"embedding(?:_dense|_sparse)?(?:_backward)?"),
}
_ANYTHING = Integers.ANYTHING
# What whole numbers of an argument (None: of any) point at, by op; the first that fits wins.
INDEX_ARGUMENT = 2  # of ops that index along one dimension
_INTEGERS = (
    (Integers.OFFSETS, 2, re.compile(r"_embedding_bag(?:(?!backward)\w)*")),
    (Integers.ROWS, 1, re.compile(r"_?embedding(?:(?!backward)\w)*")),
    (Integers.COUNTED, 1, re.compile(r"embedding_dense_backward")),
    (Integers.ALONG, INDEX_ARGUMENT, re.compile(r"index_select|gather|scatter_?|(?:scatter|index)_add_?")),
    (Integers.CLASSES, None, re.compile(r"nll_loss\w*")),
    (Integers.SEVERAL, 1, re.compile(r"_?index\w*")),
)

# What an optimiser calls once for each parameter whose gradient holds looked-up rows only.
SPARSE_UPDATES = {"sgd": "aten::add_", "rowwise_adagrad": "aten::coalesce"}
# The project's own lookup, PyTorch's bags, FBGEMM's table-batched embeddings.
_LOOKUP = re.compile(
    r"^(?:TableBatchedLookup|aten::_?embedding_bag|fbgemm::(?:split|dense)_embedding|(?:torch::autograd::CppNode<)?SplitLookup)"
)
_RECURRENT = re.compile(r"^aten::(?:_cudnn_rnn(?:_backward)?|_thnn_fused_(?:lstm|gru)_cell(?:_backward(?:_impl)?)?)$")
# Around the ones that launch, if any do (native/RNN.cpp, native/transformers/attention.cpp, native/Dropout.cpp); what puts row
# numbers and rows together (native/Embedding.cpp).
_AROUND = frozenset(
    f"{ATEN}{name}"
    for name in (
        *("_thnn_fused_lstm_cell_backward", "_scaled_dot_product_attention_math", "embedding_sparse_backward"),
        *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
    )
)
_COLLECTIVE_CALL = "record_param_comms"
_COMMUNICATES = ("c10d::", "nccl:", "_c10d_functional", "c10d_functional", _COLLECTIVE_CALL)
# Frames around ops, and autograd's own nodes. Nodes of somebody's own (CppNode) may launch kernels too.
_FRAME = re.compile(
    r"^(?:autograd::|torch::(?!autograd::CppNode)|torch\.|Optimizer\.|ProfilerStep|##|\[|nn\.Module)|[ #]|Backward\d+$"
    r"|\.forward$|^CompiledFunction(?:Backward)?$|^cudagraph:"
)
_FUNCTION = re.compile(r"CppNode|Backward$")


FLAT_GATHER = "FSDP::all_gather (flat parameter)"
"""The frame around the gather of a flat parameter (FSDP1) in captured steps: its memory is taken here, without an op."""
ADDS_TO_KEPT = "wgrad_gemm_accum_fp32"
"""The frame around a product that adds to a gradient which is there already, as apex calls it."""


@lru_cache(maxsize=1 << 14)
def op_kind(name: str) -> OpKind:
    """What the catalogue has about an op of this name."""
    space, _, full = name.rpartition("::")
    plain = full.partition(".")[0]
    ours = space == "aten"
    communicates, frame = name.startswith(_COMMUNICATES), bool(_FRAME.search(name))
    function = not frame and ("::" not in name or bool(_FUNCTION.search(name)))
    return OpKind(
        name=name,
        plain=plain,
        aten=ours,
        role=_role(name, plain, ours=ours, composite=frame or communicates or function),
        host_class=_host_class(name, plain),
        data=_data(plain, frame=frame, function=function),
        communicates=communicates,
        reserves=bool(_RESERVES.fullmatch(plain)),
        allocates=ours and plain.startswith("empty"),
        scratch=_SCRATCH.get(plain, Scratch.NONE) if ours else Scratch.NONE,
        workspace=_WORKSPACES.get(plain, Workspace.NONE) if ours else Workspace.NONE,
        **{fact: ours and bool(names.fullmatch(plain)) for fact, names in _FACTS.items()},
    )


def _role(name: str, plain: str, *, ours: bool, composite: bool) -> Role:
    if ours and (plain in _SILENT or _RESERVES.fullmatch(plain)):
        return Role.NOTHING
    if _LOOKUP.match(name):
        return Role.LOOKUP
    if name == _COLLECTIVE_CALL:
        return Role.COLLECTIVE
    if name in _AROUND:
        return Role.COMPOSITE
    if _RECURRENT.match(name):
        return Role.RECURRENT
    if overloads_of(name) or GENERATED_NAMES.fullmatch(name):
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


# What ops take

_DECLARED = Path(steptime.__file__).parent / "data" / "ops" / "aten.txt"
_WORD = re.compile(
    r"(?:(?P<name>\w+):)?(?P<type>[A-Za-z]+)(?P<many>\??\[\d*\])?(?P<optional>\?)?(?P<written>!)?(?:=(?P<default>.*))?"
)
# Numbers that JSON has no way of writing.
_NOT_FINITE = ("inf", "infinity", "nan")
_CONSTANTS: dict[str, Scalar] = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an overload."""

    name: str  # empty where it is given by position
    type: str
    many: bool = False
    optional: bool = False
    written: bool = False
    required: bool = True
    default: Value = None


@dataclass(frozen=True, slots=True)
class Overload:
    """One overload: its whole name and what it takes."""

    op: str
    parameters: tuple[Parameter, ...]

    def takes(self, values: Sequence[Value]) -> bool:
        """Whether a call with these arguments, recorded in the order they are declared in, can be one of this overload."""
        missing = self.parameters[len(values) :]
        if len(values) > len(self.parameters) or any(parameter.required for parameter in missing):
            return False
        return all(_fits(value, parameter) for value, parameter in zip(values, self.parameters, strict=False))


@cache
def overloads_of(name: str) -> tuple[Overload, ...]:
    """The overloads of an op that launches device work, those with the fewest arguments first; none for any other op."""
    return _overloads().get(name, ())


def overload_of(name: str, values: Sequence[Value]) -> Overload | None:
    """The overload of an op that takes these arguments; None where none that is known does."""
    return next((each for each in overloads_of(name) if each.takes(values)), None)


# Ops that families declare themselves.
_declared_besides: set[str] = set()


def declare(text: str) -> None:
    """Adds ops that launch device work, in the notation of data/ops/aten.txt: `mylib::gelu.default T f`."""
    _declared_besides.update(text.split("\n"))
    for kept in (_overloads, overloads_of, op_kind):
        kept.cache_clear()


@cache
def _overloads() -> dict[str, tuple[Overload, ...]]:
    result: dict[str, list[Overload]] = {}
    shared: dict[str, str] = {}  # arguments that many ops share, by what stands for them
    for line in (*_DECLARED.read_text(encoding="utf-8").split("\n"), *sorted(_declared_besides)):
        name, _, words = line.strip().partition(" ")
        if words.startswith("="):
            shared[name] = words.removeprefix("=")
        elif name and name != "#":
            for each, meaning in shared.items():
                words = words.replace(each, meaning)
            full = name if "::" in name else f"{ATEN}{name}"
            parameters = tuple(_parameter(word) for word in words.split() if word != "*")
            result.setdefault(full.partition(".")[0], []).append(Overload(full, parameters))
    return {name: tuple(sorted(each, key=lambda overload: len(overload.parameters))) for name, each in result.items()}


def _parameter(word: str) -> Parameter:
    parts = _WORD.fullmatch(word)
    assert parts is not None, word
    many = parts["many"] or ""
    default = parts["default"]
    return Parameter(
        name=parts["name"] or "",
        type=parts["type"],
        many=bool(many),
        optional=bool(parts["optional"]) or many.startswith("?"),
        written=bool(parts["written"]),
        required=default is None,
        default=None if default is None else _default(default, many),
    )


def _default(text: str, many: str) -> Value:
    if text == "[]":
        return ()
    item: Value = _CONSTANTS[text] if text in _CONSTANTS else _number(text)
    length = many.strip("?[]")
    return (item,) * int(length) if length and item is not None else item


def _number(text: str) -> Scalar:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _fits(value: Value, parameter: Parameter) -> bool:
    if value is None:
        # A tensor that is not defined can stand for any; profilers leave texts out.
        return parameter.optional or parameter.type in ("T", "generator") or (parameter.type == "s" and not parameter.required)
    if parameter.many:
        return isinstance(value, tuple) and all(
            _is(each, parameter.type) or (each is None and parameter.optional) for each in value
        )
    return _is(value, parameter.type)


def _is(value: Value, kind: str) -> bool:
    if kind == "T":
        return isinstance(value, Tensor)
    if kind in ("s", "device"):
        return isinstance(value, str)
    if kind == "b":
        return isinstance(value, bool)
    if kind in ("S", "f") and isinstance(value, str):
        return value.lower().strip("+-") in _NOT_FINITE
    if kind == "generator" or isinstance(value, Tensor | tuple | str) or value is None:
        return False
    # Traces write enumerations (dtypes, layouts, memory formats) as numbers.
    return kind in ("S", "f") or (isinstance(value, int) and not isinstance(value, bool))
