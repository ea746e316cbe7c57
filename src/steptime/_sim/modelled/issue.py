"""From ops to what the CUDA API sees: the calls that the host makes for a program, the works they enqueue, and when.

The host's pieces of time (`host_columns`) are gone through in order. A piece's CPU work is the gap before its launches, between
them and after them; what is left over is the gap before the next call of the same thread. Compute goes to one stream, the
collectives of each group to one of their own: their stream waits for what compute has enqueued so far, and compute waits for a
collective where `tensor_waits` finds that somebody needs it. FSDP gathers parameters ahead of compute: what happens within its
`all_gather` has streams of its own and waits for the copy out of the gather before, as recorded steps show
(examples/gpt_fsdp2_small). The main thread sleeps while the backward thread works.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.estimate import Estimate
from steptime._models.host.columns import HostColumns, Piece
from steptime._models.host.model import Speed
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.contention import MemoryUse
from steptime._models.power.model import KernelDraw
from steptime._ops.waits import DATA, tensor_waits
from steptime._program.program import NEVER, CallKind, Calls, Program, Stream, StreamOrder, WorkKind, Works
from steptime._sim.core.timing import Timing
from steptime._units import LONG_AGO
from steptime._values import value_class
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

_COMPUTE = 0
_DISPATCH = ("return_ns", "latency_ns", "spacing_ns", "release_ns")
# Twelve days of one launch or of the host between two calls. Thousands of them still add up within 64 bits.
LONGEST_NS = 1e15
_LAUNCH, _WAIT, _HOST = "cudaLaunchKernel", "cudaStreamWaitEvent", "host"
_REPLAY = "cudaGraphLaunch"  # one call for all kernels of a CUDA graph
# Pieces that launch what the ops within them do; all others are CPU work before them.
_LAUNCHING = frozenset((
    Piece.OP, Piece.OWN_LAUNCHES, Piece.OPTIMIZER_STEP, Piece.ZERO_GRAD, Piece.DDP_GRADIENT, Piece.DDP_BUCKET, Piece.DDP_COPY,
    Piece.COLLECTIVE, Piece.REPLAY,
))  # fmt: skip
# FSDP's frame around a gather with its copy in, "FSDP::all_gather" or "FSDP::all_gather (name)", and around its copy out.
_GATHER = re.compile(r"FSDP::all_gather(?: .*)?")
_COPY_OUT = "FSDP::all_gather_copy_out"
_FSDP = "FSDP::"
_AHEAD = "ahead"  # the stream of copies in
_OWN = "own"  # streams that the script made
_OTHER_KINDS = {
    **dict.fromkeys(("Memcpy", "copy"), WorkKind.COPY),
    **dict.fromkeys(("Memset", "memset"), WorkKind.MEMSET),
}


@dataclass(frozen=True, slots=True)
class OpWork:
    """The launches of one op. `group` says which estimates err together: those of one model about one size."""

    op: int
    launches: tuple[LaunchTime, ...]
    estimate: Estimate  # of all launches together
    group: str
    read_back: int = -1  # index of the launch of which the host waits for the end: a value that it reads, a copy that blocks
    memory: MemoryUse | None = None  # of a lookup beside others
    draw: KernelDraw | None = None  # of all launches together; None: as a call of which only the time is known


@dataclass(frozen=True)
class DeviceWork:
    """All launches of a program but its collectives, in order of their ops."""

    works: tuple[OpWork, ...]
    warnings: tuple[str, ...] = ()

    def launches(self, ops: int) -> list[float]:
        """How many launches each op makes itself."""
        counts = [0.0] * ops
        for work in self.works:
            counts[work.op] += len(work.launches)
        return counts


@dataclass(frozen=True, eq=False)
class Issued:
    """A program with its calls and works, and what each of them costs, host time at speed 1."""

    program: Program
    gap_cpu_ns: Floats  # per call
    call_cpu_ns: Floats  # per call: of a piece measured with its launches as a whole, nothing
    call_launch_ns: Floats  # per call
    estimate: tuple[int, ...]  # per work: index into `estimates`
    share: Floats  # per work: of its estimate, how much it is
    estimates: tuple[Estimate, ...]
    groups: tuple[str, ...]  # per estimate: which err together
    memory: tuple[MemoryUse | None, ...]  # per estimate: of lookups beside others
    draws: tuple[KernelDraw | None, ...] = ()  # per estimate but collectives
    warnings: tuple[str, ...] = ()
    own_streams: tuple[int, ...] = ()  # those that the script launches on, where there are several
    sections: npt.NDArray[np.int64] | None = None  # per call of a sample: its section
    recorded: Timing | None = None  # of a run on such a device: how soon works start after launches and each other

    def timing(self, speed: Speed, device: DeviceLimits, factors: Floats | None = None) -> Timing:
        """With the host at this speed; `factors` (estimate, scenario) multiply durations."""
        program, dispatch = self.program, device.dispatch
        times = np.array([estimate.time_ns for estimate in self.estimates])[:, None]
        each = times if factors is None else times * factors
        call_ns = self.call_cpu_ns * speed.cpu + self.call_launch_ns * speed.launch

        def call_name(call: int) -> str:
            return f"the host's {program.names[program.calls.api[call]]}"

        def same(rows: int, value: float) -> npt.NDArray[np.int64]:
            return np.full((rows, 1, 1), round(value), dtype=np.int64)

        works = len(program.works)
        result = Timing(
            gap_ns=_whole_ns((self.gap_cpu_ns * speed.cpu)[:, None], call_name)[:, :, None],
            call_ns=_whole_ns(call_ns[:, None], call_name)[:, :, None],
            return_ns=same(len(program.calls), dispatch.return_ns.value),
            latency_ns=same(works, dispatch.latency_ns.value),
            spacing_ns=self._spacing_ns(device),
            release_ns=same(works, dispatch.release_ns.value),
            duration_ns=_whole_ns(
                each[np.array(self.estimate, dtype=np.int64)] * self.share[:, None],
                lambda work: program.names[program.works.name[work]],
            )[:, None, :],
            waits=program.works.kind == WorkKind.COLLECTIVE,
            absent_ns=same(works, LONG_AGO),
            thread_start_ns=same(len(program.threads), 0),
            stream_start_ns=same(len(program.streams), 0),
        )
        if self.recorded is None:
            return result
        return replace(result, **{name: getattr(self.recorded, name) for name in _DISPATCH})

    def _spacing_ns(self, device: DeviceLimits) -> npt.NDArray[np.int64]:
        """Per work: between kernels of one graph there is less; graphs of several streams were not measured."""
        program = self.program
        call = program.works.call
        if not len(program.calls):
            return np.zeros((len(call), 1, 1), dtype=np.int64)
        replays = program.calls.api == _index(program.names, _REPLAY)
        whole = replays if self.call_launch_ns[replays].all() else np.zeros_like(replays)
        follows = (np.diff(call, prepend=-1) == 0) & whole[call]
        spacing = np.where(follows, device.dispatch.graph_spacing_of(device.share), device.dispatch.spacing_of(device.share))
        return np.rint(spacing).astype(np.int64)[:, None, None]


@value_class
class _Launch:
    """One work to be enqueued; `collective` is its index in Program.collectives or -1."""

    op: int
    kernel: str
    estimate: int
    share: float
    collective: int = -1
    blocking: bool = False
    ahead: bool = False  # within a gather that goes ahead of compute


class _Issuer:
    """Goes through a program's pieces of host time and writes down what they call and enqueue."""

    def __init__(self, program: Program, host: HostColumns, works: Sequence[OpWork]) -> None:
        self._program, self._host = program, host
        self._names: dict[str, int] = {name: row for row, name in enumerate(program.names)}
        self._calls: list[tuple[int, ...]] = []
        self._works: list[tuple[int, ...]] = []
        self._gap: list[float] = []
        self._launch_ns: list[float] = []
        self._estimate: list[int] = []
        self._share: list[float] = []
        self._pending: dict[int, float] = defaultdict(float)  # per thread: CPU work since its last call
        self._last = -1  # the call before, of any thread
        self._last_op: dict[int, int] = {}  # per thread: the op it spent time on last
        self._compute_work = -1
        self._ahead_work = -1
        self._copied_out = -1  # the last copy out of a gather, or what came before the step's first gather
        self._opening: set[int] = set()  # streams of collectives that come before all compute
        self._frames = self._framed()
        self._work_of: dict[int, int] = {}  # collective -> its work
        self._waited: set[int] = set()
        self._streams: dict[str, int] = {}
        self._orders = deque(program.orders)
        self._late: list[StreamOrder] = []  # orders about what the step before gave
        self._current = 0  # the script's stream, of those that the orders name
        self._given: dict[int, list[tuple[int, int]]] = defaultdict(list)  # per such stream: ops and their works, in order
        self._launches = self._by_piece(works)
        self._sends_on = _sends_on(program)
        # (op, collective): from this op on compute waits for the collective, unless another one sends its result on.
        sent = {earlier for every in self._sends_on.values() for earlier in every}
        waits = [wait for wait in tensor_waits(program) if wait.needed_by >= 0]
        self._needs = deque(
            sorted((wait.needed_by, wait.collective) for wait in waits if wait.reason != DATA or wait.collective not in sent)
        )
        self._step = -1
        self._starts = () if program.repetition is None else program.repetition.starts
        self._replayed: tuple[int, int] | None = None  # step and graph of the last replay
        self._replay_call = -1
        self._section = 0  # of a sample
        self._sections: list[int] = []  # per call
        roles = [thread.role for thread in program.threads]
        self._main = roles.index("main") if "main" in roles else 0
        self._turns = {row for row, role in enumerate(roles) if role in ("main", "backward")}

    def _framed(self) -> dict[int, bool]:
        """Rows of ops within FSDP's frames: whether they are of a gather (else of its copy out)."""
        names = self._program.names
        marked = {row: bool(_GATHER.fullmatch(name)) for row, name in enumerate(names) if name.startswith("FSDP::all_gather")}
        if not marked:
            return {}
        result: dict[int, bool] = {}
        ops = self._program.ops
        for row, (name, parent) in enumerate(zip(ops.name.tolist(), ops.parent.tolist(), strict=True)):
            if name in marked:
                result[row] = marked[name]
            elif parent in result:
                result[row] = result[parent]
        return result

    def _by_piece(self, works: Sequence[OpWork]) -> dict[int, list[_Launch]]:
        """Per piece, what is enqueued in it: works of the op it stands for and of all ops within."""
        covering: dict[int, int] = {}
        for index, (piece, row) in enumerate(zip(self._host.piece.tolist(), self._host.op.tolist(), strict=True)):
            if piece in _LAUNCHING:
                covering[row] = index
        result: dict[int, list[_Launch]] = defaultdict(list)
        for number, work in enumerate(works):
            total = sum(launch.time_ns for launch in work.launches)
            piece = self._covering(work.op, covering)
            for index, timed in enumerate(work.launches):
                share = timed.time_ns / total if total else 1.0 / len(work.launches)
                back, ahead = index == work.read_back, self._frames.get(work.op, False)
                result[piece].append(_Launch(work.op, timed.kernel, number, share, blocking=back, ahead=ahead))
        program = self._program
        for row in np.flatnonzero(program.works.kind == WorkKind.COLLECTIVE).tolist():
            op, collective = int(program.calls.op[program.works.call[row]]), int(program.works.collective[row])
            name = program.names[int(program.works.name[row])]
            launch = _Launch(op, name, len(works) + collective, 1.0, collective, ahead=self._frames.get(op, False))
            result[self._covering(op, covering)].append(launch)
        for launches in result.values():
            launches.sort(key=lambda launch: launch.op)
        return result

    def _covering(self, op: int, covering: Mapping[int, int]) -> int:
        """The piece within which an op launches; where the host model has none, the last before it."""
        at = op
        while at >= 0:
            if at in covering:
                return covering[at]
            at = int(self._program.ops.parent[at])
        before = np.flatnonzero(self._host.op <= op)
        return int(before[-1]) if len(before) else 0

    def run(self) -> None:
        """Everything, in order."""
        host = self._host
        pieces = host.piece.tolist()
        columns = zip(
            host.op.tolist(), host.thread.tolist(), host.step.tolist(), host.before_ns.tolist(), host.between_ns.tolist(),
            host.after_ns.tolist(), host.launch_ns.tolist(), strict=True,
        )  # fmt: skip
        for index, (op, thread, step, before, between, after, launch_ns) in enumerate(columns):
            if step != self._step:
                self._enter(step)
            while self._section + 1 < len(self._starts) and self._starts[self._section + 1] <= op:
                self._section += 1
            launches = self._launches.get(index, ())
            self._wait(thread, op)
            self._turn(thread)
            self._pending[thread] += before
            self._last_op[thread] = op
            graph = 0 if host.graphed else index + 1 if pieces[index] == Piece.REPLAY else None
            each = launch_ns / (1 if graph is not None else len(launches)) if launches else 0.0
            for number, launch in enumerate(launches):
                if number:
                    self._pending[thread] += between / (len(launches) - 1)
                self._wait(thread, launch.op)
                self._enqueue(thread, launch, each, graph)
            self._pending[thread] += after + (between if len(launches) < 2 else 0.0) + (0.0 if launches else launch_ns)
        for op, collective in self._needs:
            self._await(self._main, op, collective)
        for order in (*self._orders, *self._late):
            self._obey(self._main, order, last=True)
        for stream in sorted(self._opening):  # what they wait for is the step before's: to do so is to wait for this one's
            self._order(self._main, len(self._program.ops) - 1, stream, self._compute_work)
        self._enter(-1)

    def _enter(self, step: int) -> None:
        """The mark of a step's end and the next one's beginning, on the main thread."""
        left = self._step
        self._step = left if left >= 0 else step
        self._turn(self._main)
        if left >= 0:
            self._call(CallKind.STEP_END, "ProfilerStep", self._main, -1)
        self._step = step
        if step >= 0:
            self._copied_out = self._compute_work
            self._call(CallKind.STEP_BEGIN, "ProfilerStep", self._main, -1)

    def _turn(self, thread: int) -> None:
        """Ends the turn of the thread before: what it still has to do comes before the other begins."""
        previous = self._calls[self._last][2] if self._last >= 0 else thread
        if previous == thread or not {previous, thread} <= self._turns:
            return
        if self._pending[previous]:
            self._call(CallKind.HOST, _HOST, previous, self._last_op.get(previous, -1))
        # The other thread's next call names the last one of this thread.

    def _wait(self, thread: int, op: int) -> None:
        """Makes compute wait for all collectives that ops up to this one need."""
        while self._needs and self._needs[0][0] <= op:
            self._await(thread, *self._needs.popleft())
        while self._orders and self._orders[0].op <= op:
            self._obey(thread, self._orders.popleft())

    def _obey(self, thread: int, order: StreamOrder, *, last: bool = False) -> None:
        """Does what the script says about its streams.

        What a step waits for and has not given yet is the step before's: to wait for that where a step begins is to wait for
        this step's where it ends (`last`).
        """
        if order.kind == CallKind.LAUNCH:
            self._current = order.stream
            return
        work = self._awaited(order, last=last)
        if work < 0:
            if not last:
                self._late.append(replace(order, before=len(self._program.ops)) if order.before <= order.op else order)
        elif order.kind == CallKind.DEVICE_SYNC:
            self._call(CallKind.DEVICE_SYNC, "cudaDeviceSynchronize", thread, order.op - 1)
        elif order.kind == CallKind.EVENT_SYNC:
            self._call(CallKind.EVENT_SYNC, "cudaEventSynchronize", thread, order.op - 1, awaits=work)
        else:
            stream = self._own_stream(order.stream)
            self._call(CallKind.STREAM_WAIT, _WAIT, thread, order.op - 1, stream=stream, awaits=work)

    def _awaited(self, order: StreamOrder, *, last: bool) -> int:
        """The last of the works that an order is about, or -1."""
        if order.kind == CallKind.DEVICE_SYNC:
            return len(self._works) - 1
        before = order.before if order.before <= order.op or last else 0
        return next((work for op, work in reversed(self._given[order.of]) if op < before), -1)

    def _own_stream(self, number: int) -> int:
        return self._stream(f"{_OWN} {number}") if number else _COMPUTE

    def _await(self, thread: int, op: int, collective: int) -> None:
        if collective in self._work_of and collective not in self._waited:
            self._waited.add(collective)
            self._call(CallKind.STREAM_WAIT, _WAIT, thread, op, stream=_COMPUTE, awaits=self._work_of[collective])

    def _enqueue(self, thread: int, launch: _Launch, launch_ns: float, graph: int | None = None) -> None:
        stream, kind = self._own_stream(self._current), _OTHER_KINDS.get(launch.kernel, WorkKind.KERNEL)
        if launch.collective >= 0:
            kind = WorkKind.COLLECTIVE
            stream = self._stream(f"{self._program.collectives[launch.collective].group} {launch.ahead}")
            before = self._ahead_work if launch.ahead and self._ahead_work >= 0 else self._compute_work
            self._order(thread, launch.op, stream, before)
            if before < 0 and not self._current:
                self._opening.add(stream)
            for earlier in self._sends_on.get(launch.collective, ()):
                self._order(thread, launch.op, stream, self._work_of.get(earlier, -1))
        elif launch.ahead:
            stream = self._stream(_AHEAD)
            self._order(thread, launch.op, stream, self._copied_out if self._copied_out >= 0 else self._compute_work)
        if graph is None or launch.collective >= 0:
            blocks = CallKind.BLOCKING_COPY if launch.blocking else CallKind.LAUNCH
            call = self._call(blocks, _LAUNCH, thread, launch.op, launch_ns=launch_ns)
        else:
            call = self._replay(thread, launch.op, graph, launch_ns)
        row = len(self._works)
        self._works.append((kind, self._name(launch.kernel), stream, call, self._step, NEVER, NEVER, 0, launch.collective))
        self._estimate.append(launch.estimate)
        self._share.append(launch.share)
        if launch.collective >= 0:
            self._work_of[launch.collective] = row
        elif launch.ahead:
            self._ahead_work = row
        else:
            self._compute_work = row
            self._given[self._current].append((launch.op, row))
            if not self._frames.get(launch.op, True):
                self._copied_out = row

    def _replay(self, thread: int, op: int, graph: int, launch_ns: float) -> int:
        """The call that launches a graph: one, and where something else comes between, one more that costs nothing."""
        key = (self._step, graph)
        last, self._replayed = self._replayed, key
        if last == key and self._last == self._replay_call and self._sections[self._last] == self._section:
            return self._last
        if last == key:
            launch_ns = 0.0
        self._replay_call = self._call(CallKind.LAUNCH, _REPLAY, thread, op, launch_ns=launch_ns)
        return self._replay_call

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, 1 + len(self._streams))

    def _order(self, thread: int, op: int, stream: int, before: int) -> None:
        """Makes a stream wait for a work that was enqueued before."""
        if before >= 0:
            self._call(CallKind.STREAM_WAIT, _WAIT, thread, op, stream=stream, awaits=before)

    def _call(
        self, kind: CallKind, api: str, thread: int, op: int, *, stream: int = -1, awaits: int = -1, launch_ns: float = 0.0
    ) -> int:
        previous = self._calls[self._last][2] if self._last >= 0 else thread
        handed = previous != thread and {previous, thread} <= self._turns
        after = self._last if handed else -1
        self._calls.append((kind, self._name(api), thread, op, self._step, NEVER, NEVER, stream, awaits, after))
        self._gap.append(self._pending[thread])
        self._pending[thread] = 0.0
        self._launch_ns.append(launch_ns)
        self._sections.append(self._section)
        self._last = len(self._calls) - 1
        return self._last

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def issued(self, device: DeviceWork, wire: Sequence[Estimate]) -> Issued:
        """What was issued, as tables."""
        program = replace(
            self._program,
            names=tuple(self._names),
            streams=tuple(Stream(number) for number in range(1 + len(self._streams))),
            calls=Calls.from_rows(self._calls),
            works=Works.from_rows(self._works),
        )
        own = sorted(stream for name, stream in self._streams.items() if name.startswith(_OWN))
        kinds = [f"collective {collective.kind}" for collective in program.collectives]
        return Issued(
            program=program,
            gap_cpu_ns=np.array(self._gap),
            call_cpu_ns=np.zeros(len(self._gap)),
            call_launch_ns=np.array(self._launch_ns),
            estimate=tuple(self._estimate),
            share=np.array(self._share),
            estimates=(*(work.estimate for work in device.works), *wire),
            groups=(*(work.group for work in device.works), *kinds),
            memory=(*(work.memory for work in device.works), *[None] * len(wire)),
            draws=tuple(work.draw for work in device.works),
            warnings=(*self._host.warnings, *device.warnings),
            own_streams=(_COMPUTE, *own) if own else (),
            sections=np.array(self._sections, dtype=np.int64) if self._starts else None,
        )


def _sends_on(program: Program) -> dict[int, list[int]]:
    """Collective -> those whose results it sends on before compute waits for them: copies of FSDP's shards are reduced so.

    The stream of the one waits for that of the others, and compute for neither.
    """
    result: dict[int, list[int]] = {}
    if len({each.group for each in program.collectives}) < 2 or not any(name.startswith(_FSDP) for name in program.names):
        return result
    recorded = {wait.collective: wait.needed_by for wait in tensor_waits(program)}
    followed = tensor_waits(program, recorded=False)
    launching = {wait.launched_by: wait.collective for wait in followed}
    for wait in followed:
        later = recorded[wait.collective] < 0 or recorded[wait.collective] >= wait.needed_by
        if wait.reason == DATA and wait.needed_by in launching and later:
            result.setdefault(launching[wait.needed_by], []).append(wait.collective)
    return result


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1


def issue(program: Program, host: HostColumns, device: DeviceWork, wire: Sequence[Estimate]) -> Issued:
    """The calls and works of a program: `host` its pieces of host time, `device` its launches, `wire` its collectives."""
    issuer = _Issuer(program, host, device.works)
    issuer.run()
    return issuer.issued(device, wire)


def _whole_ns(times_ns: Floats, name: Callable[[int], str]) -> npt.NDArray[np.int64]:
    """Whole nanoseconds, by row and scenario; what would not fit into 64 bits once it is added up is refused by its name."""
    beyond = np.flatnonzero(~(times_ns <= LONGEST_NS).all(axis=1))
    if len(beyond):
        row = int(beyond[0])
        raise InputError(
            f"{name(row)} would take {float(times_ns[row].max()):.3g} ns, more than {LONGEST_NS:.0e}: "
            "a size of the workload, or a rate of the platform or of its calibration, is far off; check their units"
        )
    return np.rint(times_ns).astype(np.int64)
