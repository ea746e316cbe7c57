"""What would make a step shorter: changes that one can make, and apart from them how much room there is at most.

Each is tried in the simulator, change by change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from steptime._models.memory.lifetimes import MemoryKind
from steptime._ops.families import WorkFamily
from steptime._sim.prediction import PredictedStep
from steptime._whatif.grammar import Change, parse
from steptime._whatif.savings import Saving, Scene
from steptime._whatif.targets import sync_name, synchronising
from steptime.errors import InputError

MOST_LISTED = 10
# Of the step: less is not worth a line.
_WORTH_SAYING = 0.002
_MOST_SYNCHRONISATIONS = 8
_LARGER_BATCH = "batch * 2"

# What a line of code or an option switches on.
_MEANINGS = {
    "compile": "torch.compile(model), fused by steptime itself; predict --compile has more of it",
    "cuda graph": "the step captured in a CUDA graph: launches and ops cost the host nothing",
    "tf32 on": "torch.set_float32_matmul_precision('high')",
    "bf16 on": "the forward pass under torch.autocast in bfloat16",
    "optimizer fused": "the optimiser made with fused=True",
    "optimizer foreach": "the optimiser made with foreach=True",
}
_Alternatives = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Suggested:
    """The best changes, the room that there is besides, what each means, and how many were tried."""

    savings: tuple[Saving, ...]  # that one can make
    headroom: tuple[Saving, ...]  # bounds of what kernels, the host and the network could save
    meanings: Mapping[str, str]
    tried: int


def suggested(scene: Scene) -> Suggested:
    """Return the changes that gain most for as many samples, best first."""
    meanings: dict[str, str] = {}
    switched, bounds = (_best(scene, each, meanings) for each in (_switches(scene.prediction), _bounds(scene.prediction)))
    return Suggested(switched, bounds, meanings, len(meanings))


def _best(scene: Scene, candidates: Iterable[_Alternatives], meanings: dict[str, str]) -> tuple[Saving, ...]:
    """The candidates that gain most; adds what each that was tried means."""
    found: list[tuple[float, Change]] = []
    for alternatives in candidates:
        for text, meaning in alternatives:
            change = parse(text)
            try:
                gained = scene.gains_ms([change])
            except InputError:
                continue  # nothing to change, or no model to ask
            meanings[change.text] = meaning
            found.append((gained, change))
            if gained:
                break
    worth = [each for each in found if each[0] >= _WORTH_SAYING * scene.prediction.step_time_ms]
    worth.sort(key=lambda each: (-each[0], each[1].text))
    return tuple(scene.saving([change]) for _, change in worth[:MOST_LISTED])


def _switches(step: PredictedStep) -> Iterator[_Alternatives]:
    """What one can do: texts of changes and what each means."""
    for each in _MEANINGS.items():
        yield (each,)
    for kind in _collectives(step):
        yield ((f"{kind} overlap", f"{kind} beside computation, not waited for until gradients are needed"),)
    for name in _synchronisations(step):
        yield ((f"sync:{name} remove", f"the host does not wait in {name}"),)
    if _has_room_for_twice_the_batch(step):
        yield ((_LARGER_BATCH, "twice as many samples in a step: it takes longer, and each sample less"),)


def _bounds(step: PredictedStep) -> Iterator[_Alternatives]:
    """What could be gained at most; of several texts, the first that saves something."""
    for family in step.breakdown:
        if family != WorkFamily.COMMUNICATION.label:
            kernels = f"kernels of {family.replace('_', ' ')}"
            at_peak = f"{family} roofline", f"{kernels} as close to the device's peak as large ones get"
            yield at_peak, (f"{family} * 0.5", f"{kernels} twice as quick; what they could be at best is not known")
    for kind in _collectives(step):
        yield ((f"{kind} remove", f"no {kind} at all: the most that a faster network can save"),)
    if step.straggler is not None:
        rank = step.straggler.rank
        yield ((f"rank:{rank} level", f"rank {rank} as fast as the median of the others"),)
    yield (("python remove", "Python and other host code beside ops (data loading, logging) made to cost nothing"),)


def _collectives(step: PredictedStep) -> list[str]:
    programs = (each.cohort.program for each in step.timeline.cohorts)
    return list(dict.fromkeys(each.kind for program in programs for each in program.collectives))


def _has_room_for_twice_the_batch(step: PredictedStep) -> bool:
    """Whether the batch is known, and the device has room for what grows with it."""
    if step.workload.description.batch is None:
        return False
    if step.fit is None:
        return True
    grows = sum(step.fit.parts.get(kind.value, 0) for kind in (MemoryKind.ACTIVATIONS, MemoryKind.TEMPORARIES))
    return step.fit.needing(step.fit.needed_bytes + grows).fits


def _synchronisations(step: PredictedStep) -> list[str]:
    """The synchronisations in which the host waits longest."""
    waited: dict[str, float] = {}
    for each in step.timeline.cohorts:
        program = each.cohort.program
        for call in np.flatnonzero(synchronising(program)).tolist():
            name = sync_name(program, call)
            waited[name] = waited.get(name, 0.0) + float(np.mean(each.call_end_ns[call] - each.call_start_ns[call]))
    return sorted(waited, key=lambda name: -waited[name])[:_MOST_SYNCHRONISATIONS]
