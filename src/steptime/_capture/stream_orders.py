"""From the marks that streams and events leave in a trace to the orders of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptime._capture.log import (
    AFTER_BACKWARD,
    DEVICE,
    EVENT,
    EVENT_SYNC,
    FOLLOW,
    LAUNCH_ON,
    ORDER,
    RECORD,
    STREAM,
    STREAM_SYNC,
)
from steptime._program.execution import ExecutionTrace, Node
from steptime._program.nesting import ENGINE
from steptime._program.program import CallKind, StreamOrder


@dataclass(frozen=True)
class Streamed:
    """A trace, and for every node the stream that its device work goes to; 0 is where compute is."""

    trace: ExecutionTrace
    streams: tuple[int, ...]
    orders: tuple[StreamOrder, ...] = ()  # of the script's own streams


class StreamOrders:
    """Reads marks in their order. An event that is waited for before it is recorded was recorded by the step before."""

    def __init__(self) -> None:
        self._orders: list[StreamOrder] = []
        self._recorded: dict[int, tuple[int, int]] = {}  # event -> stream and row of the op that came next
        self._open: dict[int, list[int]] = {}  # event -> orders that wait for its place

    def read(self, mark: str, op: int) -> None:
        """A mark before the op of this row."""
        kind, *rest = mark[len(ORDER) :].split()
        numbers = tuple(map(int, rest))
        if kind == RECORD:
            self._recorded[numbers[0]] = (numbers[1], op)
        elif kind == LAUNCH_ON:
            self._add(op, CallKind.LAUNCH, numbers[0])
        elif kind == DEVICE:
            self._add(op, CallKind.DEVICE_SYNC)
        elif kind == FOLLOW:
            self._add(op, CallKind.STREAM_WAIT, numbers[0], numbers[1], op)
        elif kind == STREAM_SYNC:
            self._add(op, CallKind.EVENT_SYNC, -1, numbers[0], op)
        elif kind == EVENT:
            self._await(op, CallKind.STREAM_WAIT, numbers[0], numbers[1])
        elif kind == EVENT_SYNC:
            self._await(op, CallKind.EVENT_SYNC, -1, numbers[0])

    def _add(self, op: int, kind: CallKind, stream: int = -1, of: int = -1, before: int = -1) -> None:
        self._orders.append(StreamOrder(op, int(kind), stream, of, before))

    def _await(self, op: int, kind: CallKind, stream: int, event: int) -> None:
        of, before = self._recorded.get(event, (-1, -1))
        if of < 0:
            self._open.setdefault(event, []).append(len(self._orders))
        self._add(op, kind, stream, of, before)

    def orders(self) -> tuple[StreamOrder, ...]:
        """All of them; what waits for an event that no step records waits for nothing."""
        for event, waiting in self._open.items():
            of, before = self._recorded.get(event, (-1, -1))
            for index in waiting:
                self._orders[index] = replace(self._orders[index], of=of, before=before)
        needs_event = (CallKind.STREAM_WAIT, CallKind.EVENT_SYNC)
        return tuple(order for order in self._orders if order.kind not in needs_event or order.of >= 0)


def without_marks(trace: ExecutionTrace) -> Streamed:
    """Marks of streams hold until the next one, on whatever thread: the host calls one op after another."""
    backward = next((node.tid for node in trace.nodes if node.name.startswith(ENGINE)), 0)
    nodes: list[Node] = []
    parents: list[int] = []
    streams: list[int] = []
    position: dict[int, int] = {-1: -1}
    after: set[int] = set()
    current, orders = 0, StreamOrders()
    for row, node in enumerate(trace.nodes):
        parent = trace.parents[row]
        if node.name.startswith(ORDER):
            orders.read(node.name, len(nodes))
            continue
        if node.name.startswith(STREAM):
            current = int(node.name[len(STREAM) :])
            continue
        late = node.name == AFTER_BACKWARD or parent in after
        if late:
            after.add(row)
        if node.name == AFTER_BACKWARD:
            position[row] = position[parent]
            continue
        position[row] = len(nodes)
        nodes.append(replace(node, tid=backward) if late and backward else node)
        parents.append(position[parent])
        streams.append(current)
    return Streamed(replace(trace, nodes=tuple(nodes), parents=tuple(parents)), tuple(streams), orders.orders())
