"""The changes that would save most of a step: what there is to change is tried, change by change, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

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

_MEANINGS = {
    "cuda graph": "the step captured in a CUDA graph, or compiled: launches and ops cost the host nothing",
    "python remove": "Python and other host code beside ops (data loading, logging) made to cost nothing",
    "tf32 on": "torch.set_float32_matmul_precision('high')",
    "bf16 on": "the forward pass under torch.autocast in bfloat16",
    "optimizer fused": "the optimiser made with fused=True",
    "optimizer foreach": "the optimiser made with foreach=True",
}


@dataclass(frozen=True)
class Suggested:
    """The best changes, what each means, and how many were tried."""

    savings: tuple[Saving, ...]
    meanings: Mapping[str, str]
    tried: int


def suggested(scene: Scene) -> Suggested:
    """The changes that save most, best first."""
    meanings: dict[str, str] = {}
    found: list[tuple[float, Change]] = []
    for alternatives in _candidates(scene.prediction):
        for text, meaning in alternatives:
            change = parse(text)
            try:
                saved = scene.saves_ms([change])
            except InputError:
                continue  # nothing to change, or no model to ask
            meanings[change.text] = meaning
            found.append((saved, change))
            if saved:
                break
    worth = [each for each in found if each[0] >= _WORTH_SAYING * scene.prediction.step_time_ms]
    worth.sort(key=lambda each: (-each[0], each[1].text))
    return Suggested(tuple(scene.saving([change]) for _, change in worth[:MOST_LISTED]), meanings, len(found))


def _candidates(step: PredictedStep) -> Iterator[tuple[tuple[str, str], ...]]:
    """What can be tried: texts of changes and what each means; of several, the first that saves something."""
    programs = [each.cohort.program for each in step.timeline.cohorts]
    for family in step.breakdown:
        if family != WorkFamily.COMMUNICATION.label:
            kernels = f"kernels of {family.replace('_', ' ')}"
            at_peak = f"{family} roofline", f"{kernels} as close to the device's peak as large ones get"
            yield at_peak, (f"{family} * 0.5", f"{kernels} twice as quick; what they could be at best is not known")
    for kind in dict.fromkeys(each.kind for program in programs for each in program.collectives):
        yield ((f"{kind} overlap", f"{kind} beside computation, not waited for until gradients are needed"),)
        yield ((f"{kind} remove", f"no {kind} at all: the most that a faster network can save"),)
    if step.straggler is not None:
        rank = step.straggler.rank
        yield ((f"rank:{rank} level", f"rank {rank} as fast as the median of the others"),)
    for name in _synchronisations(step):
        yield ((f"sync:{name} remove", f"the host does not wait in {name}"),)
    for each in _MEANINGS.items():
        yield (each,)


def _synchronisations(step: PredictedStep) -> list[str]:
    """The synchronisations in which the host waits longest."""
    waited: dict[str, float] = {}
    for each in step.timeline.cohorts:
        program = each.cohort.program
        for call in np.flatnonzero(synchronising(program)).tolist():
            name = sync_name(program, call)
            waited[name] = waited.get(name, 0.0) + float(np.mean(each.call_end_ns[call] - each.call_start_ns[call]))
    return sorted(waited, key=lambda name: -waited[name])[:_MOST_SYNCHRONISATIONS]
