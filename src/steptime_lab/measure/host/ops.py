"""Ops in loops: what the CPU spends on one call of an op, through the dispatcher and through Python's own binding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from steptime._calibrate.host.probe import Probe
from steptime._calibrate.host.representative import op_probe
from steptime._models.kernels.call import Call
from steptime_lab.measure.host.issued import Issued
from steptime_lab.measure.host.tensors import arguments, binding_of
from steptime_lab.measure.ops.arguments import operator

Lookup = Callable[[str], Callable[..., Any] | None]

# Sizes of their arguments depend on each other in ways that shrinking breaks and kernels do not check.
AT_RECORDED_SIZES = ("attention", "convolution", "pool", "embedding_bag", "upsample", "batch_norm", "group_norm", "ctc", "rnn")


def op_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op`: the call through `torch.ops.aten`, at small sizes where it runs at them."""
    return _probes("op", issued, operator)


def python_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op_python`: the same through the function that people call, where there is one."""
    return _probes("op_python", (item for item in issued if binding_of(item.small.op) is not None), binding_of)


def _probes(kind: str, issued: Iterable[Issued], lookup: Lookup) -> Iterator[Probe]:
    for item in issued:
        at_recorded = _probe(kind, item.recorded, item.source, lookup)
        if item.small == item.recorded or any(word in item.small.op for word in AT_RECORDED_SIZES):
            yield at_recorded
        else:
            yield _probe(kind, item.small, item.source, lookup, otherwise=at_recorded)


def _probe(kind: str, call: Call, source: str, lookup: Lookup, otherwise: Probe | None = None) -> Probe:
    return op_probe(kind, call, lookup, partial(arguments, call), source=source, otherwise=otherwise)
