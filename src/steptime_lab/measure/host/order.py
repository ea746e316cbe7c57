"""Which probes there are, and in which order: any pass may be cut off, so that what is worth most comes first."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._calibrate.host.probe import Probe
from steptime_lab.measure.host.data_parallel import together_probes
from steptime_lab.measure.host.issued import Issued
from steptime_lab.measure.host.lookups import lookup_probes
from steptime_lab.measure.host.mechanisms import mechanisms
from steptime_lab.measure.host.ops import op_probes, python_probes

# What lies between ops is two fifths of the host's time in a step of DLRM and of BERT; launching comes next.
BETWEEN_OPS = (
    "between_backward", "accumulate_grad", "ddp_forward", "module_call", "between_forward", "launch", "optimizer_step",
    "zero_grad", "backward_node",
)  # fmt: skip
# Ops that make up nearly all calls of a step.
OFTEN = 150
# Ops of the short lists: after a profiler, under an execution trace, on parts of a GPU.
SHORT_OPS = 150


def probes(issued: Sequence[Issued], *, short: bool = False, python: bool = True) -> list[Probe]:
    """What lies between ops, the ops that workloads issue most, lookups and collectives, then the rest."""
    asked = issued[:SHORT_OPS] if short else issued
    around = [*mechanisms(short=short), *together_probes()]
    first = [probe for kind in BETWEEN_OPS for probe in around if probe.kinds[0] == kind]
    exchanges = [probe for probe in around if probe.kinds[0] == "collective_call"]
    others = [probe for probe in around if probe.kinds[0] not in (*BETWEEN_OPS, "collective_call")]
    return [
        *first, *op_probes(asked[:OFTEN]), *exchanges, *lookup_probes(), *others,
        *(python_probes(asked[:OFTEN]) if python else ()), *op_probes(asked[OFTEN:]),
        *(python_probes(asked[OFTEN:]) if python else ()),
    ]  # fmt: skip


def handful(chosen: Sequence[Probe], each: int = 2) -> list[Probe]:
    """The first few of every kind."""
    kept: dict[tuple[str, ...], list[Probe]] = {}
    for probe in chosen:
        kept.setdefault(probe.kinds, []).append(probe)
    return [probe for item in kept.values() for probe in item[:each]]
