"""Laws of host costs: everything the host did is in exactly one cost, waiting is in none, and pooling forgets nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime.errors import InputError
from steptime.graph.formats import kineto
from steptime.graph.formats.files import TolerantReader, TraceFile, open_stream
from steptime.graph.program import CallKind, Calls, Ops, Phase, Program, Stream, Thread, Works
from steptime.models.host.blocking import blocked_calls
from steptime.models.host.costs import KINDS, PHASES, HostCosts, Key, host_costs, load, pool, save, summarise
from steptime.models.host.segments import Spent, segments

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("STEPTIME_SHARED", ROOT.parent / "shared"))
EXAMPLES = sorted((ROOT / "examples").glob("*/rank*.kineto.json.gz"))
PUBLIC = [
    "data/traces/h200_resnet50/rank0.kineto.json.gz",
    "data/traces/meta_ranking_2xV100/rank1.json.gz",
    "data/traces/megatron_tp8_8xA100/megatron_kineto_0.json.gz",
    "data/traces/variety/mi300_resnet_act_checkpoint.json.gz",
]
NAMES = ("main::wrapper", "aten::add", "aten::t", "cudaLaunchKernel", "cudaStreamSynchronize", "kernel", "## label ##")
WRAPPER, ADD, VIEW, LAUNCH, SYNC, KERNEL, LABEL = range(len(NAMES))


def recorded(path: Path) -> Program:
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with open_stream(TraceFile(path)) as stream:
        return kineto.read(TolerantReader(stream), str(path))


def program(
    ops: list[tuple[int, int, int, int, int]],
    calls: list[tuple[int, int, int, int, int]],
    works: list[tuple[int, int, int]] = (),  # type: ignore[assignment]
    after: dict[int, int] | None = None,
) -> Program:
    """ops: (name, thread, start, end, parent); calls: (kind, thread, op, start, end); works: (call, start, end)."""
    name, thread, start, end, parent = zip(*ops, strict=True) if ops else ((),) * 5
    kind, call_thread, op, begin, finish = zip(*calls, strict=True)
    count = len(calls)
    work = [(0, 1, 2), *works]  # a program counts as recorded once it holds device work
    return Program(
        rank=0, world_size=1, names=NAMES, threads=(Thread(1, "main"), Thread(2, "backward")), streams=(Stream(7),),
        ops=Ops.from_columns({
            "name": name, "thread": thread, "start_ns": start, "end_ns": end, "parent": parent, "step": np.zeros(len(ops)),
            "phase": np.full(len(ops), Phase.FORWARD), "sequence": np.full(len(ops), -1),
            "signature": np.full(len(ops), -1), "node": np.full(len(ops), -1),
        }),
        calls=Calls.from_columns({
            "kind": kind, "api": [LAUNCH if k == CallKind.LAUNCH else SYNC for k in kind], "thread": call_thread, "op": op,
            "step": np.zeros(count), "start_ns": begin, "end_ns": finish, "stream": np.zeros(count),
            "awaits": np.full(count, -1), "after": [(after or {}).get(i, -1) for i in range(count)],
        }),
        works=Works.from_columns({
            "kind": np.zeros(len(work)), "name": np.full(len(work), KERNEL), "stream": np.zeros(len(work)),
            "call": [w[0] for w in work], "step": np.zeros(len(work)), "start_ns": [w[1] for w in work],
            "end_ns": [w[2] for w in work], "bytes": np.zeros(len(work)), "collective": np.full(len(work), -1),
        }),
        steps=(0,),
    )  # fmt: skip


def launch(op: int, start: int, end: int, thread: int = 0) -> tuple[int, int, int, int, int]:
    return (int(CallKind.LAUNCH), thread, op, start, end)


def spent(costs: HostCosts, kind: str) -> dict[str, tuple[int, ...]]:
    return {key.name: samples for key, samples in costs.samples_ns.items() if key.kind == kind}


def test_each_kind_of_cost_is_read_where_it_lies() -> None:
    ops = [
        (ADD, 0, 100, 200, -1),
        (VIEW, 0, 210, 225, -1),
        (WRAPPER, 0, 240, 400, -1),
        (ADD, 0, 250, 300, 2),
        (VIEW, 0, 310, 330, 2),
    ]
    costs = host_costs(program(ops, [launch(0, 120, 130), launch(0, 150, 155), launch(3, 255, 265)]))
    assert spent(costs, "before_first_launch") == {"aten::add": (5, 20)}
    assert spent(costs, "launch") == {"cudaLaunchKernel": (5, 10, 10)}
    assert spent(costs, "between_launches") == {"aten::add": (20,)}
    assert spent(costs, "after_last_launch") == {"aten::add": (35, 45)}
    assert spent(costs, "host_only") == {"aten::t": (15, 20)}
    assert spent(costs, "between_ops") == {"aten::t": (10, 10)}
    assert spent(costs, "around_ops") == {"aten::add": (25,)}, "the wrapper's own time before the op that follows"


def test_a_synchronisation_that_waits_costs_nothing_and_one_that_does_not_costs_its_call() -> None:
    calls = [launch(-1, 10, 20), (int(CallKind.STREAM_SYNC), 0, -1, 30, 500), (int(CallKind.STREAM_SYNC), 0, -1, 510, 515)]
    costs = host_costs(program([], calls, [(0, 25, 490)]))
    assert spent(costs, "launch") == {"cudaLaunchKernel": (10,), "cudaStreamSynchronize": (5,)}
    assert costs.total_ns == 10 + 10 + 10 + 5


def test_a_launch_into_a_full_queue_is_in_no_cost() -> None:
    calls = [launch(-1, 10 * i, 10 * i + 5) for i in range(1024)] + [launch(-1, 10_240, 90_000)]
    costs = host_costs(program([], calls, [(i, 80_000 + i, 80_001 + i) for i in range(1, 1025)]))
    assert max(spent(costs, "launch")["cudaLaunchKernel"]) == 5
    assert costs.total_ns < 10_240


def test_launches_into_a_queue_with_places_left_are_costs() -> None:
    calls = [launch(-1, 10 * i, 10 * i + 5) for i in range(900)]
    busy = [(i, 80_000 + i, 80_001 + i) for i in range(1, 900)]
    assert spent(host_costs(program([], calls, busy)), "launch") == {"cudaLaunchKernel": (5,) * 900}


def test_a_label_around_backward_is_waiting_and_not_host_only() -> None:
    ops = [(ADD, 0, 0, 100, -1), (LABEL, 0, 110, 1100, -1), (ADD, 1, 150, 1000, -1), (ADD, 0, 1200, 1300, -1)]
    calls = [launch(0, 10, 20), launch(2, 200, 210, thread=1), launch(3, 1250, 1260)]
    pieces = segments(program(ops, calls, after={1: 0, 2: 1}))
    waiting = pieces.take(pieces.spent == Spent.WAITING)
    assert (waiting.start_ns.tolist(), waiting.end_ns.tolist()) == ([100], [1000])
    assert not (pieces.spent == Spent.HOST_ONLY).any()


def test_a_driver_call_inside_a_runtime_call_is_counted_once() -> None:
    costs = host_costs(program([(ADD, 0, 0, 100, -1)], [launch(0, 10, 50), launch(0, 20, 30)]))
    assert spent(costs, "launch") == {"cudaLaunchKernel": (40,)}
    assert costs.total_ns == 100


@pytest.mark.parametrize("path", [*EXAMPLES, *(SHARED / name for name in PUBLIC)], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_costs_and_waiting_tile_the_time_of_every_thread(path: Path) -> None:
    source = recorded(path)
    pieces = segments(source)
    span = 0
    for thread in np.unique(pieces.thread):
        own = pieces.take(pieces.thread == thread)
        assert (own.start_ns[1:] == own.end_ns[:-1]).all()
        ops, calls = source.ops, source.calls
        mine, called = (ops.thread == thread) & (ops.step >= 0), (calls.thread == thread) & (calls.step >= 0)
        assert own.start_ns[0] >= min(ops.start_ns[mine].min(), calls.start_ns[called].min())
        assert own.end_ns[-1] <= max(ops.end_ns[mine].max(), calls.end_ns[called].max())
        span += int(own.end_ns[-1] - own.start_ns[0])
    blocked = blocked_calls(source) & (source.calls.step >= 0)
    blocked_ns = int((source.calls.end_ns - source.calls.start_ns)[blocked].sum())
    waiting = pieces.take(pieces.spent == Spent.WAITING)
    waiting_ns = int((waiting.end_ns - waiting.start_ns).sum())
    # Pieces that overlap by a clock's rounding are cut, so blocked calls may lose a little.
    assert host_costs(source).total_ns == pytest.approx(span - blocked_ns - waiting_ns, rel=1e-4)


def test_ops_of_a_program_without_calls_are_all_host_only() -> None:
    source = program([(ADD, 0, 0, 100, -1), (VIEW, 0, 10, 20, 0), (VIEW, 0, 130, 150, -1)], [launch(-1, 0, 0)])
    works = source.works.replace(call=np.full(len(source.works), -1))
    costs = host_costs(replace(source, calls=Calls.empty(), works=works))
    assert spent(costs, "host_only") == {"aten::add": (100,), "aten::t": (20,)}
    assert spent(costs, "between_ops") == {"aten::t": (30,)}


SAMPLES = st.lists(st.integers(0, 10**9), min_size=1, max_size=20).map(lambda s: tuple(sorted(s)))
KEYS = st.builds(Key, st.sampled_from(KINDS), st.sampled_from(("aten::a", "b\n", "ü")), st.sampled_from(PHASES))
COSTS = st.builds(HostCosts, st.dictionaries(KEYS, SAMPLES, max_size=4), st.integers(0, 5))


@given(COSTS, COSTS, COSTS)
def test_pooling_does_not_depend_on_order_or_grouping(a: HostCosts, b: HostCosts, c: HostCosts) -> None:
    whole = pool([a, b, c])
    assert pool([pool([a, b]), c]) == pool([a, pool([b, c])]) == pool([c, a, b]) == whole
    assert list(whole.samples_ns) == list(pool([c, b, a]).samples_ns)
    assert whole.total_ns == a.total_ns + b.total_ns + c.total_ns


@given(COSTS)
def test_saved_costs_come_back_exactly(costs: HostCosts) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        save(costs, path)
        assert load(path) == costs
        written = path.read_bytes()
        save(load(path), path)
        assert path.read_bytes() == written


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"schema_version": 99}', '{"schema_version":1,"programs":1,"costs":[{"kind":"x"}]}',
        '{"schema_version":1,"programs":1,"costs":[{"kind":"x","name":"a","phase":"forward","samples_ns":[1]}]}',
        '{"schema_version":1,"programs":1,"costs":[{"kind":"launch","name":"a","phase":"forward","samples_ns":["1"]}]}', "\xff",
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"costs\.json") as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


def test_a_program_without_times_is_refused() -> None:
    with pytest.raises(InputError, match="no times"):
        host_costs(Program(0, 1, (), (), (), Ops.empty(), Calls.empty(), Works.empty()))


def test_trimming_drops_what_lies_far_outside_and_says_how_many() -> None:
    cost = summarise([10, 11, 12, 11, 10, 12, 11, 5_000])
    assert (cost.count, cost.dropped, cost.median_ns) == (7, 1, 11)
    assert cost.mean_ns == pytest.approx(11)
    assert cost.total_ns == 77 + 5_000


def test_negative_samples_count_as_nothing() -> None:
    assert summarise([-5, -5, -5]).mean_ns == 0


def test_phases_of_a_real_step_are_told_apart() -> None:
    costs = pool(host_costs(recorded(path)) for path in EXAMPLES[:2])
    if not EXAMPLES:
        pytest.skip("no examples")
    assert costs.programs == 2
    assert {key.phase for key in costs.samples_ns} >= {"forward", "backward", "optimizer"}
    linear = costs.cost("before_first_launch", "aten::addmm", "forward")
    assert linear is not None and 1_000 < linear.mean_ns < 200_000
