"""Op families, one file each: its ops, the calls that are measured to model them, what these launch, and its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from pkgutil import iter_modules

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Rule
from steptime._models.kernels.sweep import KernelSweep
from steptime._ops.catalogue import ATEN, declare, overloads_of
from steptime._ops.generated import NAMES as GENERATED_NAMES
from steptime._units import dtype_bytes
from steptime.errors import InputError

# Calls whose launches are kept: several steps' worth of distinct ones.
_KEPT = 20_000
# What rules may run into on arguments that are not what an op takes.
_ODD_ARGUMENTS = (IndexError, TypeError, ValueError, ZeroDivisionError, KeyError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Family:
    """Ops that are modelled alike: those of its sweep and their kin.

    A family without a sweep has ops that PyTorch alone cannot run: its kernels are taken for those of others.
    `weight` is its share of a measuring run beside the other families'; `warm` is how many of the sweep's calls are run with
    their input just written as well as cold.
    """

    name: str
    sweep: KernelSweep
    weight: float = 1.0
    warm: float = 1.0
    borrows: tuple[str, ...] = ()  # ops of its sweep that are another family's
    # ATen's ops beside those of its sweep, of kernels that calls of sweeps launch too: names (in all overloads), or overloads.
    kin: str = ""
    form: str = "launched"  # the module in `forms` that models it
    # What its calls launch, where the form goes by rules: for all alike, or by name of the op, without namespace and overload.
    rules: Rule | Mapping[str, Rule] | None = None
    # The call with arguments that lie in memory as its kernels take them, where the form expects so, and the places of those
    # that are copied first, once for each copy.
    dense: Callable[[Call], tuple[Call, tuple[int, ...]]] | None = None
    declares: str = ""  # what its ops take, where they are not ATen's: lines in the notation of data/ops/aten.txt

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that it answers for."""
        kin = [f"{ATEN}{name}" for name in self.kin.split()]
        overloads = (overload.op for name in kin for overload in overloads_of(name.partition(".")[0]))
        declared = (op for op in overloads if op in kin or op.partition(".")[0] in kin)
        own = (line.partition(" ")[0] for line in self.declares.splitlines() if "::" in line)
        return (*(op for op in self.sweep.ops if op not in self.borrows), *dict.fromkeys(declared), *own)

    def launches(self, call: GpuCall) -> list[Launch]:
        """What a call launches, by the rule for its op. Raises InputError where there is none."""
        rule = self.rules.get(call.name) if isinstance(self.rules, Mapping) else self.rules
        if rule is None:
            raise InputError(f"{call.op}: no rule says what it launches")
        return rule(call)


@cache
def families() -> dict[str, Family]:
    """Every family, by name: a file in the folder `families`."""
    package = import_module("steptime._models.kernels.families")
    modules = sorted(entry.name for entry in iter_modules(package.__path__))
    members: list[Family] = [import_module(f"{package.__name__}.{module}").FAMILY for module in modules]
    if declared := "\n".join(family.declares for family in members if family.declares):
        declare(declared)
    return {family.name: family for family in members}


@cache
def swept_families() -> dict[str, Family]:
    """Those whose calls a GPU can be asked about."""
    return {name: family for name, family in families().items() if family.sweep.ops}


@cache
def family_of(op: str) -> str:
    """The family that answers for an op; empty where none does."""
    if GENERATED_NAMES.fullmatch(op):
        return "generated"
    return next((family.name for family in families().values() if op in family.ops), "")


@lru_cache(maxsize=_KEPT)
def launches_of(call: Call, gpu: Gpu) -> tuple[Launch, ...]:
    """What a call launches, by the rules of its family. Raises InputError where there are none or the call cannot be."""
    name = family_of(call.op)
    if not name:
        raise InputError(f"{call.op}: no family has it")
    for shape, dtype in {(tensor.shape, tensor.dtype) for tensor in call.tensors()}:
        if not dtype_bytes(dtype):
            raise InputError(f"{call.op}: dtype {dtype!r} is unknown")
        if min(shape, default=0) < 0:
            raise InputError(f"{call.op}: a tensor of shape {list(shape)} cannot be")
    try:
        launches = families()[name].launches(GpuCall(call.op, call.args, call.kwargs, call.written, gpu=gpu))
    except _ODD_ARGUMENTS as error:
        raise InputError(f"{call.op}: its arguments are not what the op takes ({error})") from error
    # A kernel over no elements is not launched.
    return tuple(launch for launch in launches if launch.elements > 0)
