"""Replay gives a run back: runs of our own simulator to the nanosecond, recorded ones within the bars."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.program.traces import recording
from tests.sim.worlds import Draft, constant_timing

from steptime._program.load import load
from steptime._program.program import CallKind, Collective, Program, WorkKind
from steptime._program.queues import QUEUE_DEPTH
from steptime._program.workload import Workload
from steptime._sim import LONG_AGO, Cohort, Timeline
from steptime._sim.core.simulate import simulate
from steptime._sim.recorded.replay import Replay, replay
from steptime._sim.recorded.timing import DEFAULT_LATENCY_NS, DEFAULT_RELEASE_NS, DEFAULT_RETURN_NS, DEFAULT_SPACING_NS
from steptime.errors import InputError

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "h200_mps4_dlrm"
SHARED = Path(os.environ.get("STEPTIME_SHARED", REPOSITORY.parent / "shared")) / "data" / "traces"
# The bars of the project: geometric mean of (|error| + floor), and every single step.
GEOMEAN_AT_MOST, ERROR_AT_MOST, FLOOR = 0.01, 0.03, 4e-4

LAUNCH_NS = 4_000
SYNCS = (CallKind.STREAM_SYNC, CallKind.EVENT_SYNC, CallKind.DEVICE_SYNC)
# (what, stream, a number to choose by)
KINDS = ["launch"] * 6 + ["collective"] * 2 + ["wait"] * 2 + ["copy", "event", "stream", "device", "backward"]
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=14)


def act(draft: Draft, action: tuple[str, int, int], thread: int, step: int, ranks: tuple[int, ...]) -> None:
    """Issue one action. Work is awaited only on other streams than the waiting one: a stream is in order anyway."""
    kind, stream, pick = action
    others = [w for w, work in enumerate(draft.works) if work["stream"] != stream]
    awaited = others[-1 - pick % min(4, len(others))] if others else -1
    if kind == "collective":
        sequence = len(draft.collectives)
        draft.collective(Collective("all_reduce", "0", ranks, sequence), stream, thread)
        draft.calls[-1]["step"] = draft.works[-1]["step"] = step
    elif kind == "copy":
        draft.work(stream, WorkKind.COPY, call=draft.call(CallKind.BLOCKING_COPY, thread, step=step), step=step)
    elif kind == "wait" and awaited >= 0:
        draft.call(CallKind.STREAM_WAIT, thread, stream=stream, awaits=awaited, step=step)
    elif kind == "event" and awaited >= 0:
        draft.call(CallKind.EVENT_SYNC, thread, awaits=awaited, step=step)
    elif kind == "stream" and draft.works and any(w["stream"] == stream for w in draft.works):
        draft.call(CallKind.STREAM_SYNC, thread, stream=stream, step=step)
    elif kind == "device":
        draft.call(CallKind.DEVICE_SYNC, thread, step=step)
    else:
        draft.work(stream, call=draft.call(CallKind.LAUNCH, thread, step=step), step=step)


def job(steps: list[list[tuple[str, int, int]]], ranks: tuple[int, ...]) -> Program:
    """A program of several steps; `backward` moves to autograd's thread, and back at the next one or at the end."""
    draft = Draft(threads=2, streams=3)
    for step, actions in enumerate(steps, 5):
        draft.call(CallKind.STEP_BEGIN, step=step)
        thread = 0
        for action in [("launch", 0, 0), *actions]:
            before = len(draft.calls)
            moved = action[0] == "backward"
            thread = 1 - thread if moved else thread
            act(draft, action, thread, step, ranks)
            if moved:
                draft.calls[before]["after"] = before - 1
        draft.call(CallKind.STEP_END, step=step)
        if thread == 1:
            draft.calls[-1]["after"] = len(draft.calls) - 2
    program = draft.program(world_size=len(ranks))
    return replace(program, steps=tuple(range(5, 5 + len(steps))))


def timed(program: Program, rank: int, rng: np.random.Generator) -> Cohort:
    """A rank with costs of its own: gaps and durations at random, dispatch distances as a recording takes them by default."""
    calls, works = program.calls, program.works
    cost = np.where(np.isin(calls.kind, (CallKind.STEP_BEGIN, CallKind.STEP_END)), 0, LAUNCH_NS)
    cost = np.where(np.isin(calls.kind, SYNCS), DEFAULT_RETURN_NS, cost)
    copying = calls.kind[works.call] == CallKind.BLOCKING_COPY
    columns: dict[str, Any] = {
        "gap_ns": rng.integers(1, 30_000, len(calls)),
        "call_ns": cost,
        "duration_ns": rng.integers(1_000, 80_000, len(works)),
        # A copy's latency counts from the beginning of its call, the others' from the end.
        "latency_ns": np.where(copying, DEFAULT_LATENCY_NS + LAUNCH_NS, DEFAULT_LATENCY_NS),
    }
    timing = replace(
        constant_timing(
            program,
            return_ns=DEFAULT_RETURN_NS,
            spacing_ns=DEFAULT_SPACING_NS,
            release_ns=DEFAULT_RELEASE_NS,
            stream_start_ns=LONG_AGO,
        ),
        **{name: values.astype(np.int64).reshape(-1, 1, 1) for name, values in columns.items()},
    )
    return Cohort(replace(program, rank=rank), (rank,), timing)


def recorded_job(timeline: Timeline, folder: Path, ahead: tuple[int, ...] = (), *, sync_records: bool = True) -> Workload:
    """What is read back after all ranks of a simulation have been written as traces, some with clocks that are ahead."""
    for index, cohort in enumerate(timeline.cohorts):
        skew = ahead[index] if ahead else 0
        recording(cohort, clock_ahead_ns=skew, sync_records=sync_records).write(folder / f"rank{index}.json")
    return load([folder])


def ends(timeline: Timeline, step: int) -> int:
    """E(k): the latest, over ranks, of the host's end of a step and the end of the work it launched."""
    found: list[int] = []
    for cohort in timeline.cohorts:
        calls, works = cohort.cohort.program.calls, cohort.cohort.program.works
        found += cohort.call_end_ns[(calls.kind == CallKind.STEP_END) & (calls.step == step), 0, 0].tolist()
        found += cohort.work_end_ns[works.step == step, 0, 0].tolist()
    return max(found)


def step_times(timeline: Timeline, steps: tuple[int, ...]) -> dict[int, int]:
    """T(k) of the steps that end later than those before them; device work of a step may outlast the whole next one."""
    begin = int(min(c.call_start_ns[0, 0, 0] for c in timeline.cohorts))
    reached = np.maximum.accumulate([begin, *(ends(timeline, step) for step in steps)])
    return {step: took for step, took in zip(steps, np.diff(reached).tolist(), strict=True) if took}


def predicted(replayed: Replay) -> dict[int, int]:
    return {s.step: s.predicted_ns for s in replayed.steps}


def measured(replayed: Replay) -> dict[int, int]:
    return {s.step: s.measured_ns for s in replayed.steps}


@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_simulated_run_written_as_traces_is_replayed_to_the_nanosecond(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[str, int, int]]], ranks: int, seed: int
) -> None:
    program = job(steps, tuple(range(ranks)))
    rng = np.random.default_rng(seed)
    run = simulate([timed(program, rank, rng) for rank in range(ranks)])
    replayed = replay(recorded_job(run, tmp_path_factory.mktemp("job")))
    assert measured(replayed) == step_times(run, program.steps)
    assert predicted(replayed) == step_times(run, program.steps)


def test_work_held_up_by_a_full_queue_is_replayed_to_the_nanosecond(tmp_path: Path) -> None:
    program = job([[("launch", 0, 0)] * 1_400, [("launch", 0, 0)] * 300], (0,))
    cohort = timed(program, 0, np.random.default_rng(7))
    quick = replace(cohort.timing, gap_ns=np.ones_like(cohort.timing.gap_ns))
    run = simulate([replace(cohort, timing=quick)])
    blocked = run.cohorts[0].call_end_ns - run.cohorts[0].call_start_ns > LAUNCH_NS
    assert blocked.sum() > 300
    replayed = replay(recorded_job(run, tmp_path))
    assert replayed.recorded.queue_depth == QUEUE_DEPTH
    assert predicted(replayed) == step_times(run, program.steps)


def data_parallel(steps: int, layers: int, buckets: int, ranks: tuple[int, ...]) -> Program:
    """Steps as DDP issues them: forward, backward with buckets reduced on a stream of their own, waits, optimiser."""
    draft = Draft(threads=2, streams=2)
    for step in range(5, 5 + steps):
        draft.call(CallKind.STEP_BEGIN, step=step)
        for _ in range(layers):
            draft.work(0, call=draft.call(CallKind.LAUNCH, step=step), step=step)
        backward, reduced = len(draft.calls), []
        for layer in range(layers):
            draft.work(0, call=draft.call(CallKind.LAUNCH, 1, step=step), step=step)
            if (layer + 1) % (layers // buckets) == 0:
                draft.call(CallKind.STREAM_WAIT, 1, stream=1, awaits=len(draft.works) - 1, step=step)
                act(draft, ("collective", 1, 0), 1, step, ranks)
                reduced.append(len(draft.works) - 1)
        for work in reduced:
            draft.call(CallKind.STREAM_WAIT, 1, stream=0, awaits=work, step=step)
        draft.calls[backward]["after"] = backward - 1
        optimiser = len(draft.calls)
        for _ in range(layers):
            draft.work(0, call=draft.call(CallKind.LAUNCH, step=step), step=step)
        draft.calls[optimiser]["after"] = optimiser - 1
        draft.call(CallKind.STEP_END, step=step)
    return replace(draft.program(world_size=len(ranks)), steps=tuple(range(5, 5 + steps)))


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_waits_of_data_parallel_runs_are_found_where_no_record_tells_them(
    tmp_path_factory: pytest.TempPathFactory, steps: int, buckets: int, layers: int, ranks: int, seed: int
) -> None:
    program = data_parallel(steps, layers * buckets, buckets, tuple(range(ranks)))
    rng = np.random.default_rng(seed)
    run = simulate([timed(program, rank, rng) for rank in range(ranks)])
    replayed = replay(recorded_job(run, tmp_path_factory.mktemp("job"), sync_records=False))
    assert predicted(replayed) == step_times(run, program.steps)


def test_runs_of_any_structure_without_records_are_replayed_within_the_bar_on_the_whole(tmp_path: Path) -> None:
    """What a wait refers to cannot always be told when it held nothing up; what it held up can."""
    rng, errors = np.random.default_rng(0), []
    for number in range(25):
        steps = [[(str(rng.choice(KINDS)), int(rng.integers(3)), int(rng.integers(10))) for _ in range(14)] for _ in range(3)]
        ranks = int(rng.integers(1, 4))
        run = simulate([timed(job(steps, tuple(range(ranks))), rank, rng) for rank in range(ranks)])
        folder = tmp_path / str(number)
        folder.mkdir()
        errors += [abs(s.error) for s in replay(recorded_job(run, folder, sync_records=False)).steps]
    assert np.exp(np.log(np.array(errors) + FLOOR).mean()) <= GEOMEAN_AT_MOST
    assert np.quantile(errors, 0.9) <= ERROR_AT_MOST


COMMON = [
    [("launch", 0, 1), ("collective", 1, 0), ("launch", 0, 0), ("collective", 2, 0), ("wait", 0, 1), ("launch", 0, 0)]
] * 3


@pytest.mark.parametrize("ahead", [300_000, 1_500_000, -40_000_000, 7_000_000_000])
def test_a_clock_that_is_ahead_on_one_rank_changes_nothing(tmp_path: Path, ahead: int) -> None:
    rng = np.random.default_rng(3)
    run = simulate([timed(job(COMMON, (0, 1, 2)), rank, rng) for rank in range(3)])
    # All leave a collective together, so that the clocks can be told exactly.
    together = [c.cohort.timing for c in run.cohorts]
    same = [replace(t, duration_ns=together[0].duration_ns) for t in together]
    run = simulate([replace(c.cohort, timing=t) for c, t in zip(run.cohorts, same, strict=True)])
    replayed = replay(recorded_job(run, tmp_path, (0, ahead, 0)))
    offsets = replayed.recorded.offsets_ns
    starts = [c.call_start_ns[0, 0, 0] for c in run.cohorts]
    assert [o - s for o, s in zip(offsets, starts, strict=True)] == [offsets[0] - starts[0]] * 3
    assert predicted(replayed) == step_times(run, (5, 6, 7))
    assert measured(replayed) == step_times(run, (5, 6, 7))


# Not the first of its stream: without its launch, that could not be told from backlog.
@pytest.mark.parametrize("lost", range(2, 6))
def test_a_collective_whose_launch_was_lost_on_one_rank_still_meets_the_others(tmp_path: Path, lost: int) -> None:
    rng = np.random.default_rng(5)
    run = simulate([timed(job(COMMON, (0, 1)), rank, rng) for rank in range(2)])
    whole, lossy = (recording(cohort) for cohort in run.cohorts)
    launches = [e["args"]["correlation"] for e in lossy.events if e["name"].startswith("nccl")]
    lossy.events = [e for e in lossy.events if e["cat"] != "cuda_runtime" or e["args"]["correlation"] != launches[lost]]
    whole.write(tmp_path / "rank0.json")
    lossy.write(tmp_path / "rank1.json")
    workload = load([tmp_path])
    assert [sorted(c.sequence for c in program.collectives) for program in workload.programs] == [list(range(6))] * 2
    replayed = replay(workload)
    assert measured(replayed) == step_times(run, (5, 6, 7))
    assert all(abs(s.error) < ERROR_AT_MOST for s in replayed.steps)


def test_traces_that_share_no_step_are_one_clear_line(tmp_path: Path) -> None:
    runs = [simulate([timed(job(COMMON, (rank,)), rank, np.random.default_rng(rank))]) for rank in range(2)]
    early, late = (recording(run.cohorts[0]) for run in runs)
    for event in late.events:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#9")
    early.world_size = late.world_size = 2
    early.write(tmp_path / "rank0.json")
    late.write(tmp_path / "rank1.json")
    with pytest.raises(InputError, match="share no step"):
        replay(load([tmp_path]))


def test_the_first_shared_step_is_counted_from_its_own_beginning(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    run = simulate([timed(job(COMMON, (0, 1)), rank, rng) for rank in range(2)])
    whole, shorter = (recording(cohort) for cohort in run.cohorts)
    cut = run.cohorts[1].call_start_ns[next(iter(np.flatnonzero(run.cohorts[1].cohort.program.calls.step == 6))), 0, 0]
    shorter.events = [e for e in shorter.events if e["start"] >= cut or e["cat"] in ("kernel", "gpu_memcpy")]
    whole.write(tmp_path / "rank0.json")
    shorter.write(tmp_path / "rank1.json")
    replayed = replay(load([tmp_path]))
    assert [s.step for s in replayed.steps] == [6, 7]
    assert replayed.steps[0].measured_ns < step_times(run, (6,))[6]
    assert all(abs(s.error) < ERROR_AT_MOST for s in replayed.steps)


def geomean(replayed: Replay) -> float:
    errors = np.array([abs(s.error) for s in replayed.steps])
    return float(np.exp(np.log(errors + FLOOR).mean()))


def within_bars(paths: list[Path]) -> Replay:
    """Replay recorded files and hold them to the bars."""
    replayed = replay(load(paths))
    assert replayed.steps
    assert max(abs(s.error) for s in replayed.steps) <= ERROR_AT_MOST
    assert geomean(replayed) <= GEOMEAN_AT_MOST
    return replayed


@pytest.mark.parametrize(
    ("name", "ranks", "steps"), [("h200_mps4_dlrm", 4, 3), ("gpt_fsdp2_small", 2, 3), ("prefetch_sync", 1, 3)]
)
def test_shipped_runs_are_replayed_within_the_bars(name: str, ranks: int, steps: int) -> None:
    replayed = within_bars([REPOSITORY / "examples" / name])
    assert len(replayed.recorded.cohorts) == ranks
    assert len(replayed.steps) == steps


def test_waiting_of_recorded_ranks_is_simulated_not_copied() -> None:
    """Make one rank's kernels slower: the others' collectives get longer by waiting, though nothing of theirs changed."""
    inputs = replay(load([EXAMPLE])).recorded
    slow = inputs.cohorts[2]
    kernels = np.where(slow.program.works.kind == WorkKind.KERNEL, 4, 1).reshape(-1, 1, 1)
    slower = replace(slow, timing=replace(slow.timing, duration_ns=slow.timing.duration_ns * kernels))
    before = simulate(inputs.cohorts, queue_depth=inputs.queue_depth)
    after = simulate((*inputs.cohorts[:2], slower, inputs.cohorts[3]), queue_depth=inputs.queue_depth)
    for rank in (0, 1, 3):
        waited = [(t.cohorts[rank].moving_ns - t.cohorts[rank].work_start_ns).sum() for t in (before, after)]
        assert waited[1] > waited[0]


CASES = {
    "dlrm_8xV100/dlrm_kineto.tar.gz": (8, 1),
    "h200_resnet50": (1, 3),
    "meta_ranking_2xV100": (1, 6),
    "megatron_tp8_8xA100": (4, 1),
    "variety/h100_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": (1, 1),
    "variety/mi300_resnet_act_checkpoint.json.gz": (1, 3),
    "variety/nccl_parser_config__nccl_data.json.gz": (1, 3),
    "variety/ns_resolution_trace__rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": (1, 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_published_runs_are_replayed_within_the_bars(case: str) -> None:
    path = SHARED / case
    if not path.exists():
        pytest.skip(f"needs {case}, which is not shipped")
    replayed = within_bars([path])
    assert (len(replayed.recorded.cohorts), len(replayed.steps)) == CASES[case]
