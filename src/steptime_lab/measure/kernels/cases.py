"""Which calls are measured, in which order: the shapes of the workloads first, then the families' sweeps by importance."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import steptime_lab
from steptime._files import write_whole
from steptime._hardware.description import read_toml
from steptime._measurements.store import key_of
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import Family, families, family_of, swept_families
from steptime._ops.families import WorkFamily, op_family
from steptime.errors import InputError
from steptime_lab.measure.kernels.sections import SECTIONS, section_calls
from steptime_lab.measurements.sets import KERNELS

FILE_NAME = "workload_calls.json"


def read_calls(path: Path) -> dict[str, dict[Call, int]]:
    """What `write_calls` wrote: workload to calls to counts."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(name): {Call.from_json(text): int(count) for text, count in calls} for name, calls in sorted(content.items())
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a file of recorded calls ({error}); record them again or remove it") from error


def write_calls(path: Path, name: str, calls: Mapping[Call, int]) -> None:
    """Adds a workload's calls to the file, in place of those it had; the file is whole at every moment."""
    known = read_calls(path) if path.exists() else {}
    known[name] = dict(calls)
    content = {
        workload: [[call.to_json(), count] for call, count in sorted(held.items(), key=lambda item: item[0].to_json())]
        for workload, held in sorted(known.items())
    }
    write_whole(path, json.dumps(content, indent=0))


# Calls of a sweep on a whole GPU; each gives a cold and, nearly always, a warm row.
FULL = 16_000
SMALL = 60
# On parts of a GPU: a subset of the full sweep, so that a part and the whole can be compared call by call.
FULL_PART = 1_700
SMALL_PART = 16
# How many of those are shapes of the workloads, at most.
_PART_OF_WORKLOADS = 0.3

SWEEP = "sweep"
RECURRENT_OPS = ("aten::_cudnn_rnn.default", "aten::_cudnn_rnn_backward.default")
# Of the calls of sections, how many are run with their input just written as well.
_WARM_OF_SECTIONS = 0.4
# Of every family, calls that come before more of any other; and what is added to a seed for the second sweep, which draws by
# how much families matter.
_FIRST, _FURTHER = 40, 1_000
_SHARES, _SHARES_VERSION = Path(steptime_lab.__file__).parent / "data" / "share_of_steps.toml", 1


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call and the settings it is run under."""

    call: Call
    text: str
    family: str
    source: str
    tf32: bool = False
    benchmark: bool = False
    warm: bool = True  # whether it is run with its input just written, too

    def key(self, cache: str, share: int, others: str) -> str:
        """The key of its row in the set."""
        return key_of(KERNELS, {**self.asked(), "cache": cache, "share": share, "others": others})

    def asked(self) -> dict[str, str | bool]:
        """The columns of its rows that do not depend on cache or device."""
        return {
            "family": self.family,
            "op": self.call.op,
            "call": self.text,
            "tf32": self.tf32,
            "benchmark": self.benchmark,
            "source": self.source,
        }


def draw_of(text: str, what: str) -> float:
    """A number from 0 to 1 that depends on nothing but the text and what it is drawn for."""
    return int.from_bytes(hashlib.sha256(f"{what}:{text}".encode()).digest()[:6], "big") / 2**48


def sweep_cases(
    chosen: Iterable[Family], count: int, seed: int, weights: Mapping[str, float] | None = None
) -> list[KernelCase]:
    """So many calls over the families by their weights or by others, none twice, in the families' order."""
    every = list(chosen)
    weigh = {family.name: family.weight if weights is None else weights[family.name] for family in every}
    result: dict[str, KernelCase] = {}
    for family in every:
        each = max(1, round(count * weigh[family.name] / sum(weigh.values())))
        random = np.random.default_rng([seed, zlib.crc32(family.name.encode())])
        for call in family.sweep(random, each):
            text = call.to_json()
            warm = draw_of(text, "warm") < family.warm
            result.setdefault(text, KernelCase(call, text, family.name, SWEEP, tf32=_tf32_of_sweep(call, text), warm=warm))
    return list(result.values())


def workload_cases(file: Path, chosen: Iterable[str] | None = None) -> list[KernelCase]:
    """The calls of recorded steps, none twice; a call of several workloads belongs to the first. None without the file."""
    if not file.exists():
        return []
    allowed = None if chosen is None else set(chosen)
    result: dict[str, KernelCase] = {}
    for name, calls in read_calls(file).items():
        for call in calls:
            text, family = call.to_json(), _family_of(call)
            if allowed is None or family in allowed:
                # As PyTorch sets it unless told otherwise.
                tf32 = _kind(call) is WorkFamily.CONVOLUTION and call.dtype == "float32"
                result.setdefault(text, KernelCase(call, text, family, name, tf32=tf32))
    return list(result.values())


def shuffled(cases: Sequence[KernelCase], seed: int) -> list[KernelCase]:
    """In an order that depends on the calls and the seed only: a longer list keeps the order of a shorter one."""
    return sorted(cases, key=lambda case: draw_of(case.text, f"order {seed}"))


def by_importance(cases: Sequence[KernelCase], seed: int) -> list[KernelCase]:
    """Some of every family first, then more of those that matter most: a run cut short anywhere knows what it can."""
    matters, counts = importance(), Counter[str]()
    order = []
    for case in shuffled(cases, seed):
        order.append((max(0, counts[case.family] - _FIRST) / matters[case.family], case))
        counts[case.family] += 1
    return [case for _, case in sorted(order, key=lambda item: item[0])]


@cache
def importance() -> dict[str, float]:
    """How much a family matters to the error of steps: half by its share of measured steps, half by how much there is to it."""
    content = read_toml(_SHARES, "families' shares of steps", _SHARES_VERSION)
    of_steps: dict[str, float] = content["share_of_steps"]
    total = sum(family.weight for family in families().values())
    return {name: (family.weight / total + of_steps.get(name, 0.0)) / 2 for name, family in families().items()}


def section_cases(names: Sequence[str], seed: int, *, small: bool, smallest: bool = False) -> list[KernelCase]:
    """The calls of some sections, of each by its share throughout."""
    drawn = list(section_calls(names, 8 * SMALL if smallest else SMALL if small else FULL, seed))
    if smallest:
        drawn = sorted(drawn, key=lambda call: (call.dtype != "float32", call.nbytes))[:SMALL]
    cases = []
    for call in drawn:
        text = call.to_json()
        # Of hundreds of kernels only the first would find anything warm.
        never = call.dtype == "float8" or call.op in RECURRENT_OPS
        warm = draw_of(text, "warm") < _WARM_OF_SECTIONS and not never
        cases.append(KernelCase(call, text, _family_of(call), SWEEP, tf32=_tf32_of_sweep(call, text), warm=warm))
    return _unique(cases)


def whole_gpu_cases(file: Path, only: Sequence[str], seed: int, *, small: bool, smallest: bool = False) -> list[KernelCase]:
    """Everything a whole GPU is asked. `smallest`: single precision and few bytes, for a CPU."""
    if named := [name for name in only if name in SECTIONS]:
        first = section_cases(named, seed, small=small, smallest=smallest)
        others = [name for name in only if name not in SECTIONS]
        return first if not others else _unique([*first, *whole_gpu_cases(file, others, seed, small=small, smallest=smallest)])
    every = _families(only)
    if not small:
        workloads = shuffled(workload_cases(file, only or None), seed)
        first, further = sweep_cases(every, FULL, seed), sweep_cases(every, FULL, seed + _FURTHER, importance())
        return _unique([*workloads, *by_importance(_unique([*first, *further]), seed)])
    results = [*workload_cases(file, only or None)[:6]]
    each = max(2, -(-SMALL // max(1, len(every))))
    for family in every:
        drawn = sweep_cases([family], 8 * each if smallest else each, seed)
        # A slow machine: few bytes, and in the precision that every CPU has.
        order = sorted(drawn, key=lambda case: (case.call.dtype != "float32", case.call.nbytes))
        results += (order if smallest else shuffled(drawn, seed))[:each]
    return _unique(shuffled(results, seed))


def part_cases(file: Path, only: Sequence[str], seed: int, *, largest_bytes: int, small: bool) -> list[KernelCase]:
    """What a part of a GPU is asked: calls of the whole GPU's sweep that fit it."""
    count = SMALL_PART if small else FULL_PART
    fitting = [case for case in workload_cases(file, only or None) if case.call.nbytes <= largest_bytes]
    workloads = shuffled(fitting, seed)[: int(_PART_OF_WORKLOADS * count)]
    sweep = [case for case in sweep_cases(_families(only), FULL, seed) if case.call.nbytes <= largest_bytes]
    # By shares within each family, so that a family of few small calls is not crowded out.
    wanted = (count - len(workloads)) / max(1, len(sweep))
    chosen: list[KernelCase] = []
    for family in dict.fromkeys(case.family for case in sweep):
        own = shuffled([case for case in sweep if case.family == family], seed)
        chosen += own[: max(1, round(wanted * len(own)))]
    return _unique(shuffled([*workloads, *chosen], seed))


def benchmark_cases(only: Sequence[str], seed: int, count: int, largest_bytes: int) -> list[KernelCase]:
    """Convolutions of the sweep for which cuDNN may try its algorithms; each costs a search."""
    results = [
        KernelCase(case.call, case.text, case.family, case.source, tf32=case.tf32, benchmark=True)
        for case in shuffled(sweep_cases(_families(only), FULL, seed), seed)
        if _kind(case.call) is WorkFamily.CONVOLUTION and case.call.nbytes <= largest_bytes
    ]
    return results[:count]


def _families(only: Sequence[str]) -> list[Family]:
    return [family for family in swept_families().values() if not only or family.name in only]


def _unique(cases: Iterable[KernelCase]) -> list[KernelCase]:
    result: dict[tuple[str, bool], KernelCase] = {}
    for case in cases:
        result.setdefault((case.text, case.tf32), case)
    return list(result.values())


def _tf32_of_sweep(call: Call, text: str) -> bool:
    """Half of the products and convolutions of fp32 may use TF32, and most recurrent layers, as PyTorch sets it."""
    if call.dtype != "float32":
        return False
    if call.op in RECURRENT_OPS:
        return draw_of(text, "tf32") < 0.7
    return _kind(call) in (WorkFamily.MATMUL, WorkFamily.CONVOLUTION) and draw_of(text, "tf32") < 0.5


def _family_of(call: Call) -> str:
    """As the families' ops say; a copy that leaves or reaches the host is a transfer."""
    if _kind(call) is WorkFamily.COPY and any(tensor.device != "device" for tensor in call.tensors()):
        return "transfer"
    return family_of(call.op) or "other"


def _kind(call: Call) -> WorkFamily:
    return op_family(call.op.partition(".")[0])
