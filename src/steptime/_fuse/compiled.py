"""`compiled`: a program as `torch.compile` would run it, by our own fusion pass; `compiled_workload`: of all ranks."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from steptime._fuse.inlining import Inlining
from steptime._fuse.kernels import FusedOp, KernelWriter
from steptime._fuse.lowering import Lowering
from steptime._fuse.nodes import LoopNode
from steptime._fuse.ops import channels_last, handler
from steptime._fuse.regions import COMPILED_PHASES, Compiles, Stays, regions
from steptime._fuse.schedule import FusedGroup, scheduled
from steptime._fuse.splits import Processors
from steptime._hardware.device import DeviceLimits
from steptime._models.kernels.from_ops import COLLECTIVE, COMPUTE, questions_of
from steptime._notices import Basis
from steptime._ops.catalogue import ADDS_TO_KEPT
from steptime._ops.compiled import Frame, frame_of
from steptime._ops.generated import NAMES
from steptime._ops.table import OpTable, op_table
from steptime._program.program import NEVER, Ops, Phase, Program, Signature, Tensor, Value, tensors_in
from steptime._program.workload import COMPILE, Workload
from steptime._units import dtype_bytes
from steptime.errors import InputError

DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"
MODES = (DEFAULT, REDUCE_OVERHEAD)
OFF = "off"
BY_US = "fused by steptime itself, not by PyTorch's compiler"
_TUNED = "max-autotune"
_SIGNATURE = list(Ops.TYPES).index("signature")  # where a row of ops has it
_LARGEST = 12  # kernels that are told about


def checked_mode(mode: object, where: str = "--compile") -> str:
    """A mode that is known; `off` is one too."""
    if isinstance(mode, str) and mode.startswith(_TUNED):
        raise InputError(
            f"{where} {mode}: this mode picks kernels by timing them on the GPU while it compiles, which cannot be predicted; "
            f"use {' or '.join(MODES)}"
        )
    if not isinstance(mode, str) or mode not in (*MODES, OFF):
        raise InputError(f"{where} {mode!r}: expected {', '.join(MODES)} or {OFF}")
    return mode


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """One generated kernel: how many eager ops went into it, how often a step runs it, and the bytes that one run saves."""

    name: str
    ops: int
    times: int
    saved_bytes: int


@dataclass(frozen=True)
class CompiledProgram:
    """A program with what our fusion pass did to it; numbers are of one step."""

    program: Program
    eager_ops: int  # of what is compiled: ops that launched kernels
    kernels: int  # generated
    calls: int  # of libraries, and of ops that stay
    saved_bytes: int
    largest: tuple[FusedKernel, ...]  # by what they save


def is_compiled(program: Program) -> bool:
    """Whether a program has compiled parts already."""
    return any(frame_of(name) is Frame.REGION or NAMES.fullmatch(name) for name in program.names)


def compiled(program: Program, processors: Processors, mode: str = DEFAULT) -> CompiledProgram:
    """The program as `torch.compile(model, mode=mode)` would run it on a device with these processors."""
    key = (CompiledProgram, processors, mode)
    if key not in program.derived:
        program.derived[key] = _compiled(program, processors, mode)
    result: CompiledProgram = program.derived[key]
    return result


def compiled_workload(workload: Workload, limits: DeviceLimits) -> Workload:
    """A workload whose `meta` asks for it as it would be compiled; any other as it is."""
    mode = workload.meta.get(COMPILE, OFF)
    if mode == OFF or any(is_compiled(program) for program in workload.programs):
        return workload
    checked_mode(mode, "compile")
    if any(program.recorded for program in workload.programs):
        raise InputError(
            f"{workload.name or 'the workload'}: a recording has the kernels that ran; give the training script, a config or "
            "an execution trace to see what compiling would bring"
        )
    found = compiled_programs(workload, limits)
    done = [each.program for each in found]
    return replace(workload, programs=tuple(done), warnings=(*workload.warnings, Basis(f"compile = {mode}: {BY_US}")))


def compiled_programs(workload: Workload, limits: DeviceLimits) -> list[CompiledProgram]:
    """What became of every program. Programs that share what was derived from them are compiled once."""
    processors = Processors(round(limits.sms.value), round(limits.threads_per_sm.value))
    mode = workload.meta.get(COMPILE, DEFAULT)
    result = []
    for program in workload.programs:
        found = compiled(program, processors, mode)
        same = found.program.rank == program.rank and found.program.collectives == program.collectives
        if not same:  # of another rank, whose groups and order differ
            moved = replace(found.program, rank=program.rank, collectives=program.collectives)
            if program.repetition is not None and moved.repetition is not None:
                moved = replace(moved, repetition=replace(moved.repetition, order=program.repetition.order))
            found = replace(found, program=moved)
        result.append(found)
    return result


def _compiled(program: Program, processors: Processors, mode: str) -> CompiledProgram:
    table = op_table(program)
    works = {work.op: work for work in questions_of(program)}
    items = list(regions(program, table, works))
    lowering = Lowering(program, handler, channels_last=channels_last(program))
    for item in items:
        if isinstance(item, Compiles):
            lowering.add(item.work.op, item.segment, backward=item.backward, known=item.work.kind == COMPUTE)
        else:
            for row in range(item.row, table.last[item.row] + 1 if item.whole else item.row + 1):
                lowering.touch(row)
    inlining = Inlining(lowering.nodes, lowering.values)
    nodes = inlining.run()
    fresh = itertools.count(max((value.tensor.storage or 0 for value in lowering.values), default=0) + (1 << 20))
    writer = KernelWriter(nodes, lowering.values, inlining.ops, processors, fresh)
    by_segment: dict[int, dict[int, LoopNode]] = defaultdict(dict)
    for number, node in nodes.items():
        by_segment[node.segment][number] = node
    groups = {segment: scheduled(inside, lowering.values, processors) for segment, inside in by_segment.items()}
    emitter = _Emitter(program, table, mode, nodes, groups, writer, fresh)
    emitter.run(items)
    eager = [item.work.op for item in items if isinstance(item, Compiles) and item.work.kind == COMPUTE]
    return emitter.result(eager)


class _Emitter:
    """Writes the ops of the compiled program."""

    def __init__(
        self,
        program: Program,
        table: OpTable,
        mode: str,
        nodes: Mapping[int, LoopNode],
        groups: Mapping[int, Sequence[FusedGroup]],
        writer: KernelWriter,
        fresh: Iterator[int],
    ) -> None:
        self._program, self._table, self._mode = program, table, mode
        self._nodes, self._groups, self._writer = nodes, groups, writer
        self._names = {name: number for number, name in enumerate(program.names)}
        self._signatures = list(program.signatures)
        self._rows: list[tuple[int, ...]] = []  # of Ops
        self._moved: dict[int, int] = {}  # rows of ops, and of kernels that they went into
        self._graphs = 0
        self._fused: list[tuple[FusedOp, int]] = []  # and its row
        self._called: list[int] = []  # rows of calls
        self._fresh, self._made = fresh, {value for node in nodes.values() for value in node.writes}
        self._static: set[int | None] = set()  # storages that ops make or optimisers read
        for arguments, phase in zip(table.arguments, table.phases, strict=True):
            given = {tensor.storage for tensor in arguments.inputs}
            self._static |= given if phase == Phase.OPTIMIZER else {each.storage for each in arguments.outputs} - given

    def run(self, items: Iterable[Stays | Compiles]) -> None:
        """Everything, graph by graph."""
        for _, of_graph in itertools.groupby(items, key=lambda item: item.graph):
            self._graph(list(of_graph))

    def _graph(self, items: Sequence[Stays | Compiles]) -> None:
        call, done = -1, set[int]()
        deferred: list[Stays] = []
        for item in items:
            if isinstance(item, Stays):
                if item.deferred:
                    deferred.append(item)
                else:
                    self._stay(item.row, call if item.inside else -1, whole=item.whole)
                continue
            if item.segment in done or not self._groups.get(item.segment):
                continue
            done.add(item.segment)
            call = self._enter(item, items) if call < 0 else call
            for group in self._groups[item.segment]:
                self._group(group, call)
        for item in deferred:
            self._stay(item.row, -1, whole=True)

    def _enter(self, first: Compiles, items: Sequence[Stays | Compiles]) -> int:
        """The frames of one call of a compiled graph; the row of the innermost. CUDA graphs read copies of what comes in."""
        number, like = self._graphs, first.work.op
        self._graphs += 1
        if first.backward:
            node = self._write(f"autograd::engine::evaluate_function: {Frame.BACKWARD.value}", like, -1)
            around, graph = self._write(Frame.BACKWARD.value, like, node), f"b{number}"
        else:
            self._write(Frame.GUARDS.value, like, -1)
            region = self._write(f"{Frame.REGION.value}: {number}/0", like, -1)
            around, graph = self._write(Frame.FUNCTION.value, like, region), f"f{number}"
        call = self._write(f"{Frame.WRAPPER.value} {graph} ##", like, around)
        if self._mode != REDUCE_OVERHEAD:
            return call
        for tensor in self._batches(items):
            copy = replace(tensor, storage=next(self._fresh), id=next(self._fresh))
            self._write("aten::copy_", like, call, self._signature((copy, tensor, True), (copy,)))
        return self._write(f"{Frame.GRAPH.value}{graph}", like, call)

    def _batches(self, items: Sequence[Stays | Compiles]) -> list[Tensor]:
        """What comes into a graph anew in every step: read by it, written by no op, and no parameter of the optimiser's."""
        segments = {item.segment for item in items if isinstance(item, Compiles)}
        groups = [group for segment in sorted(segments) for group in self._groups.get(segment, ())]
        found: dict[int | None, Tensor] = {}
        for node in (self._nodes[number] for group in groups for number in (*group.nodes, *group.columns)):
            for read in node.reads:
                if read.value not in self._made and read.tensor.storage not in self._static:
                    found.setdefault(read.tensor.storage, read.tensor)
        return list(found.values())

    def _write(self, name: str, like: int, parent: int, signature: int = -1, sequence: int = -1) -> int:
        ops = self._program.ops
        number = self._names.setdefault(name, len(self._names))
        thread, step, phase, node = (int(column[like]) for column in (ops.thread, ops.step, ops.phase, ops.node))
        self._rows.append((number, thread, NEVER, NEVER, parent, step, phase, sequence, signature, node))
        return len(self._rows) - 1

    def _stay(self, row: int, parent: int, *, whole: bool) -> None:
        """Writes an op as it was, with what is inside it."""
        ops = self._program.ops
        for each in range(row, self._table.last[row] + 1 if whole else row + 1):
            above = int(ops.parent[each])
            inside = parent if above < 0 or (each == row and whole) else self._moved.get(above, parent)
            signature, sequence = int(ops.signature[each]), int(ops.sequence[each])
            self._moved[each] = self._write(self._program.names[int(ops.name[each])], each, inside, signature, sequence)

    def _kept(self, row: int, parent: int) -> int:
        """What a call is inside: of a product that adds to what is kept, the op that says so, or else the frame around."""
        ops, arguments = self._program.ops, self._table.arguments
        around = int(ops.parent[row])
        if around < 0 or self._table.names[around] != ADDS_TO_KEPT:
            return parent
        kept = {tensor.storage for tensor in arguments[around].outputs}
        if kept.isdisjoint(tensor.storage for tensor in arguments[row].outputs):  # layers that are computed again
            return parent
        return self._write(ADDS_TO_KEPT, around, parent, int(ops.signature[around]), int(ops.sequence[around]))

    def _group(self, group: FusedGroup, parent: int) -> None:
        numbers = (*group.nodes, *group.columns)
        if group.calls:
            node = self._nodes[group.nodes[0]]
            parent, row = self._kept(node.row, parent), len(self._rows)
            self._called.append(row)
            self._stay(node.row, parent, whole=True)
            if node.signature is not None:
                self._signatures.append(node.signature)
                self._rows[row] = (*self._rows[row][:_SIGNATURE], len(self._signatures) - 1, *self._rows[row][_SIGNATURE + 1 :])
            return
        like = min(self._nodes[number].row for number in numbers)
        for op in self._writer.written(group):
            given = {tensor.storage for tensor in tensors_in(op.signature.inputs[:1])}
            for tensor in tensors_in(op.signature.outputs):
                if tensor.storage not in given:
                    self._reserve(tensor, like, parent)
            row = self._write(op.name, like, parent, self._signature(op.signature.inputs, op.signature.outputs))
            self._fused.append((op, row))
            for each in op.rows:
                self._moved.setdefault(each, row)

    def _reserve(self, tensor: Tensor, like: int, parent: int) -> None:
        """Memory of a result, as Inductor's wrapper takes it."""
        taken: tuple[Value, ...] = (tensor.shape, tensor.strides, None, None, tensor.device, None)
        self._write("aten::empty_strided", like, parent, self._signature(taken, (tensor,)))

    def _signature(self, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> int:
        self._signatures.append(Signature(inputs, outputs))
        return len(self._signatures) - 1

    def result(self, eager: Sequence[int]) -> CompiledProgram:
        """The program, and what became of ops that launched."""
        program, later = self._program, self._later()
        calls, repetition = program.calls, program.repetition
        if len(calls):
            calls = calls.replace(op=[later[op] if op >= 0 else -1 for op in calls.op.tolist()])
        if repetition is not None:
            repetition = replace(repetition, starts=(0, *(later[start] for start in repetition.starts[1:])))
        result = replace(
            program,
            names=tuple(self._names),
            ops=Ops.from_rows(self._rows),
            calls=calls,
            signatures=tuple(self._signatures),
            orders=tuple(replace(each, op=later[each.op], before=later[each.before]) for each in program.orders),
            repetition=repetition,
        )
        counts, before = result.op_counts.tolist(), program.op_counts.tolist()
        generated = [(op, row) for op, row in self._fused if op.generated]
        own = [(op, counts[row], self._eager_bytes(op.rows) - _bytes(op)) for op, row in generated if op.leads]
        times, ops, saved = Counter[str](), dict[str, int](), dict[str, int]()
        for op, count, nbytes in own:
            times[op.name] += count
            ops[op.name], saved[op.name] = len(op.rows), nbytes
        largest = sorted((name for name in ops if saved[name] > 0), key=lambda name: (-saved[name] * times[name], name))
        return CompiledProgram(
            program=result,
            eager_ops=sum(before[row] for row in eager),
            kernels=sum(counts[row] for _, row in generated),
            calls=sum(counts[row] for row in self._called) + sum(counts[row] for op, row in self._fused if not op.generated),
            saved_bytes=max(sum(count * nbytes for _, count, nbytes in own), 0),
            largest=tuple(FusedKernel(name, ops[name], times[name], saved[name]) for name in largest[:_LARGEST]),
        )

    def _eager_bytes(self, rows: Iterable[int]) -> int:
        """What eager ops read and write."""
        arguments = [self._table.arguments[row] for row in rows]
        return sum(_nbytes((*each.inputs, *each.outputs)) for each in arguments)

    def _later(self) -> list[int]:
        """Per old row (and one behind the last), the new row of the op, or of the next that is there."""
        count = len(self._program.ops)
        result = [len(self._rows)] * (count + 1)
        for row in range(count - 1, -1, -1):
            result[row] = self._moved.get(row, result[row + 1])
        return result


def moved_bytes(program: Program) -> tuple[dict[str, tuple[int, bool, int]], int]:
    """Of forward and backward: how often a step launches each op, whether it is generated, and bytes; and bytes of all."""
    table, counts = op_table(program), program.op_counts.tolist()
    found: dict[str, tuple[int, bool, int]] = {}
    for work in questions_of(program):
        if Phase(table.phases[work.op]) not in COMPILED_PHASES or work.kind == COLLECTIVE:
            continue
        signature, generated = table.signatures[work.op], NAMES.fullmatch(work.name) is not None
        taken = tensors_in(signature.inputs[:1]) if generated else table.arguments[work.op].inputs
        nbytes = counts[work.op] * _nbytes((*taken, *tensors_in(signature.outputs)))
        times, _, before = found.get(work.name, (0, generated, 0))
        found[work.name] = (times + counts[work.op], generated, before + nbytes)
    return found, sum(nbytes for _, _, nbytes in found.values())


def _bytes(op: FusedOp) -> int:
    return _nbytes((*tensors_in(op.signature.inputs[:1]), *tensors_in(op.signature.outputs)))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    seen: Iterator[Tensor] = iter({(each.storage, each.offset, each.shape): each for each in tensors}.values())
    return sum(each.numel * dtype_bytes(each.dtype) for each in seen)
