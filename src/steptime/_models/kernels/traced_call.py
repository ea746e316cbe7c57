"""Calls behind traced ops: a traced op's arguments written the way calls are recorded beside the measured kernels.

Three things a trace does not tell: the values of numbers that PyTorch wrapped into tensors, more than six decimals of a float,
and which integers an index holds. Where shapes say what is indexed, that is the range; else it stays open (`high` 0). Ops that
differ in nothing but the identity of tensors share one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg, computed_in, contiguous
from steptime._models.kernels.question import Question
from steptime._ops.catalogue import INDEX_ARGUMENT, Integers, OpKind, Overload, Parameter, op_kind, overload_of
from steptime._program.program import DEFAULT_SWITCHES, Signature, Switches, Tensor, Value

# c10::ScalarType, c10::Layout and c10::MemoryFormat by number, as execution traces write them.
_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 9: "complex64",
    10: "complex128", 11: "bool", 15: "bfloat16",
}  # fmt: skip
_ENUMERATED = {
    "layout": {0: "strided", 1: "sparse"},
    "format": {0: "contiguous_format", 1: "preserve_format", 2: "channels_last", 3: "channels_last_3d"},
}
# What a number becomes when an op that takes tensors is given one; its value is not recorded.
_WRAPPED: dict[str, float | int | bool] = {"float64": 1.0, "int64": 1, "bool": True}
# Ops that run in the format their tensors suggest: that of filters of one tap is told by the strides of their single pixels.
_FORMATTED = ("aten::convolution.default", "aten::convolution_backward.default")
# Distinct calls that are kept; a step has some hundreds.
_MOST = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """A distinct call without what was written before it, which differs from one place in a step to another."""

    overload: Overload
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    switches: Switches = DEFAULT_SWITCHES
    _questions: dict[tuple[tuple[int, ...], bool], Question] = field(default_factory=dict)

    def question(self, written: tuple[int, ...], *, warm: bool) -> Question:
        """What to ask about the call where these arguments are written just before a step makes it."""
        result = self._questions.get((written, warm))
        if result is None:
            call = Call(self.overload.op, self.args, self.kwargs, written)
            tf32 = computed_in(call.op, call.dtype, self.switches.tf32) == "tf32"
            result = Question(call, tf32=tf32, benchmark=self.switches.benchmark, warm=warm)
            self._questions[written, warm] = result
        return result


_calls: dict[object, TracedCall | None] = {}


def traced_call(name: str, signature: Signature, *, ordered: bool = False) -> TracedCall | None:
    """The call that an op with these arguments is; None where no known overload takes them.

    `ordered` says that the index along a dimension counts.
    """
    derived = (TracedCall, name, ordered)
    if derived in signature.derived:
        known: TracedCall | None = signature.derived[derived]
        return known
    values = signature.inputs
    key = (name, ordered, signature.switches, *map(_plain, values))
    if key not in _calls:
        if len(_calls) >= _MOST:
            _calls.clear()
        overload = overload_of(name, values)
        _calls[key] = None
        if overload is not None:
            arguments = _call_arguments(overload, values, ordered=ordered)
            _calls[key] = TracedCall(overload, *arguments, switches=signature.switches)
    call = signature.derived[derived] = _calls[key]
    return call


def _plain(value: Value) -> object:
    """What tells arguments of different calls apart, and no more."""
    if value.__class__ is Tensor:
        return value.shape, value.dtype, value.strides, value.device == "cpu"
    if value.__class__ is tuple:
        return tuple(map(_plain, value))
    # 1, 1.0 and True are equal as keys.
    return value.__class__, value


def _call_arguments(
    overload: Overload, values: Sequence[Value], *, ordered: bool = False
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """Positional and named arguments, defaults left out as PyTorch's dispatcher leaves them out.

    `ordered` says that the index along a dimension counts.
    """
    positional: list[Argument] = []
    count = 0  # up to the last one that is not its default
    named: list[tuple[str, Argument]] = []
    for index, (value, parameter) in enumerate(zip(values, overload.parameters, strict=False)):
        unsaid = value is None and parameter.type == "s"  # profilers leave texts out: taken as the default
        needed = not unsaid and (parameter.required or value != parameter.default)
        if parameter.name:
            if needed and parameter.type != "generator":
                named.append((parameter.name, _argument(value, parameter, overload, values, index)))
            continue
        result = _argument(value, parameter, overload, values, index)
        if ordered and index == INDEX_ARGUMENT and isinstance(result, TensorArg):
            result = replace(result, values="ordered")
        positional.append(result)
        count = len(positional) if needed else count
    return tuple(positional[:count]), tuple(sorted(named, key=lambda item: item[0]))


def _argument(value: Value, parameter: Parameter, overload: Overload, values: Sequence[Value], place: int) -> Argument:
    if isinstance(value, Tensor):
        wrapped = not value.shape and value.device == "cpu" and not op_kind(overload.op).host_tensors
        return (wrapped and _WRAPPED.get(value.dtype)) or _tensor(value, overload, values, place)
    if isinstance(value, tuple):
        return tuple(_argument(each, parameter, overload, values, place) for each in value)
    if parameter.type == "device" and value is not None:
        return "cpu" if value == "cpu" else "device"
    if isinstance(value, str):
        return float(value) if parameter.type in ("S", "f") else value
    if isinstance(value, int) and not isinstance(value, bool):
        return _enumerated(value, parameter.type)
    return value


def _enumerated(value: int, kind: str) -> Argument:
    if kind == "dtype":
        return DtypeArg(_DTYPES.get(value, str(value)))
    if kind in _ENUMERATED:
        return _ENUMERATED[kind].get(value, str(value))
    return float(value) if kind == "f" else value


def _tensor(tensor: Tensor, overload: Overload, values: Sequence[Value], place: int) -> TensorArg:
    where = "device" if tensor.device != "cpu" else "pinned" if True in values else "pageable"
    drawn, high = "normal", 0
    if tensor.dtype == "bool":
        drawn = "mask"
    elif tensor.dtype.startswith(("int", "uint")):
        drawn, high = _integers(tensor, op_kind(overload.op), values, place)
    elif op_kind(overload.op).probabilities:
        drawn = "unit"
    strides = _own_strides(tensor.shape, tensor.strides, formatted=overload.op in _FORMATTED)
    return TensorArg(tensor.shape, tensor.dtype, strides, high, where, drawn)


@lru_cache(maxsize=1 << 14)
def _own_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None, *, formatted: bool) -> tuple[int, ...] | None:
    """Strides where they are not those of a contiguous tensor, else None. Dimensions of one element have no say.

    They have where an op looks at its tensors' format.
    """
    if strides is None or len(strides) != len(shape) or 0 in shape:
        return None
    expected = zip(shape, strides, contiguous(shape), strict=True)
    plain = all(stride == wanted or (size == 1 and not formatted) for size, stride, wanted in expected)
    return None if plain else strides


def _integers(tensor: Tensor, op: OpKind, values: Sequence[Value], place: int) -> tuple[str, int]:
    """Which integers an op takes at a place, by what it indexes."""
    if not tensor.numel:
        return "normal", 1
    match op.integers(place):
        case Integers.OFFSETS:
            return "offsets", values[1].numel if isinstance(values[1], Tensor) else 0
        case Integers.ROWS:
            return "normal", _size(values[0], 0)
        case Integers.COUNTED:
            return "normal", values[2] if isinstance(values[2], int) else 0
        case Integers.ALONG:
            return "normal", _size(values[0], values[1]) or 1
        case Integers.CLASSES if tensor.shape:
            classes = values[1] if op.plain.endswith("_backward") else values[0]
            wide = isinstance(classes, Tensor) and len(classes.shape) >= 3
            return "normal", _size(classes, 1 if wide else -1)
        case Integers.SEVERAL:
            return _index(tensor, values)
    return "normal", 0


def _index(tensor: Tensor, values: Sequence[Value]) -> tuple[str, int]:
    """One of several indices: rows and columns below the diagonal of a square are taken for what DLRM's interaction takes."""
    indices, indexed = values[1], values[0]
    if not isinstance(indices, tuple) or not isinstance(indexed, Tensor) or len(tensor.shape) != 1:
        return "normal", 0
    at = next(index for index, each in enumerate(indices) if each is tensor)
    high = indexed.shape[at] if at < len(indexed.shape) else 0
    square = len(indices) >= 2 and indexed.shape[len(indices) - 2 : len(indices)] == (high, high)
    if square and at >= len(indices) - 2 and 2 * tensor.numel == high * (high - 1):
        return ("lower_row" if at == len(indices) - 2 else "lower_column"), high
    return "normal", high


def _size(value: Value, dimension: Value) -> int:
    if not isinstance(value, Tensor) or not isinstance(dimension, int) or not value.shape:
        return 0
    return value.shape[dimension] if -len(value.shape) <= dimension < len(value.shape) else 0
