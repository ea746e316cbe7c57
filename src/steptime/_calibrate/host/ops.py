"""Ops in loops: what the CPU spends on one call of an op, through the dispatcher and through Python's own binding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from steptime._calibrate.host.bench import LAUNCHES_PER_CALL, MOST_LAUNCHES, Bench
from steptime._calibrate.host.issued import Issued
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.tensors import arguments, binding_of
from steptime._calibrate.ops.arguments import operator
from steptime._models.kernels.call import Call, TensorArg

# Sizes of their arguments depend on each other in ways that shrinking breaks and kernels do not check.
AT_RECORDED_SIZES = ("attention", "convolution", "pool", "embedding_bag", "upsample", "batch_norm", "group_norm", "ctc", "rnn")
# More than this is not made twice just to see what the CPU does meanwhile.
MOST_BYTES = 512 << 20
# Arguments up to here stay alive from one pass to the next.
KEPT_BYTES = 1 << 20


def op_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op`: the call through `torch.ops.aten`, at small sizes where it runs at them."""
    return _probes("op", issued, operator)


def python_probes(issued: Iterable[Issued]) -> Iterator[Probe]:
    """`op_python`: the same through the function that people call, where there is one."""
    return _probes("op_python", (one for one in issued if binding_of(one.small.op) is not None), binding_of)


def _probes(kind: str, issued: Iterable[Issued], lookup: Callable[[str], Callable[..., Any] | None]) -> Iterator[Probe]:
    for one in issued:
        at_recorded = _probe(kind, one.recorded, one.source, lookup)
        if one.small == one.recorded or any(word in one.small.op for word in AT_RECORDED_SIZES):
            yield at_recorded
        else:
            yield _probe(kind, one.small, one.source, lookup, otherwise=at_recorded)


def _probe(
    kind: str, call: Call, source: str, lookup: Callable[[str], Callable[..., Any] | None], otherwise: Probe | None = None
) -> Probe:
    kept: list[tuple[list[Any], dict[str, Any]]] = []

    def measure(bench: Bench) -> Times:
        if call.nbytes > MOST_BYTES:
            raise MemoryError("arguments too large")
        function = lookup(call.op)
        assert function is not None
        args, kwargs = kept[0] if kept else arguments(call, bench.group.device)
        if not kept and call.nbytes <= KEPT_BYTES:
            kept.append((args, kwargs))
        return (bench.per_op(function, *args, most_calls=calls_of(call), **kwargs),)

    return Probe((kind,), call.op, measure, call=call.to_json(), source=source, otherwise=otherwise)


def calls_of(call: Call) -> int:
    """How many calls surely fit into the launch queue: one on a list of tensors may launch for each of them."""
    lists = [value for value in call.args if isinstance(value, tuple) and any(isinstance(one, TensorArg) for one in value)]
    return max(1, MOST_LAUNCHES // max([LAUNCHES_PER_CALL, *map(len, lists)]))
