"""Pipelines of a `Transformer`: what stages run in which order, what they hand each other, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.sampling import layers_of, parts_of
from steptime._build.transformer.schedules import BACKWARD, FORWARD, Action, Move, actions, moves
from steptime._hardware.device import reference_device
from steptime._models.memory.lifetimes import storages
from steptime._platforms.platform import Platform
from steptime._program.program import CallKind
from steptime._sim.modelled.step import modelled
from steptime._sim.prediction import operations_of
from steptime.errors import InputError

GPT = Transformer(
    layers=8,
    width=64,
    heads=4,
    sequence=32,
    vocabulary=512,
    batch=16,
    gradient_accumulation=8,
    precision="bf16",
    tied_head=False,
)


def letters(parallel: Parallelism, stage: int, micro_batches: int) -> str:
    return " ".join(f"{each.way[0]}{each.chunk}.{each.micro_batch}" for each in actions(parallel, stage, micro_batches))


def test_one_forward_one_backward_runs_ahead_by_the_stages_behind() -> None:
    parallel = Parallelism(pipeline=3)
    assert letters(parallel, 0, 4) == "f0.0 f0.1 f0.2 b0.0 f0.3 b0.1 b0.2 b0.3"
    assert letters(parallel, 2, 4) == "f0.0 b0.0 f0.1 b0.1 f0.2 b0.2 f0.3 b0.3"


def test_interleaved_chunks_take_turns_in_rounds_of_the_stages() -> None:
    parallel = Parallelism(pipeline=2, chunks=2, schedule="interleaved")
    assert letters(parallel, 1, 4).startswith("f0.0 f0.1 f1.0 b1.0 f1.1 b1.1 f0.2 b0.0")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_micro_batch_goes_through_every_chunk_both_ways_and_forward_first(schedule: str, stages: int) -> None:
    parallel = Parallelism(pipeline=stages, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    for stage in range(stages):
        order = actions(parallel, stage, 2 * stages)
        wanted = {
            Action(way, chunk, number)
            for way in (FORWARD, BACKWARD)
            for chunk in range(parallel.chunks)
            for number in range(2 * stages)
        }
        assert len(order) == len(wanted)
        assert set(order) == wanted
        for each in order:
            if each.way == BACKWARD:
                assert order.index(each._replace(way=FORWARD)) < order.index(each)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_what_a_stage_sends_the_next_one_receives(schedule: str) -> None:
    parallel = Parallelism(pipeline=4, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    counts = [Counter(each for each in moves(parallel, stage, 8) if not isinstance(each, Action)) for stage in range(4)]
    for way, step in ((FORWARD, 1), (BACKWARD, -1)):
        for stage, count in enumerate(counts):
            other = counts[(stage + step) % 4]
            assert count[Move("send", way)] == other[Move("receive", way)]


def test_receives_that_are_asked_for_ahead_run_beside_the_pass_before_and_nothing_else_changes() -> None:
    parallel = Parallelism(pipeline=4, schedule="interleaved", chunks=2)
    ahead = replace(parallel, overlap_p2p_comm=True)
    for stage in range(4):
        order = list(moves(ahead, stage, 8))
        assert [each for each in order if isinstance(each, Action)] == actions(parallel, stage, 8)
        awaited = [place for place, each in enumerate(order) if isinstance(each, Move) and each.what == "await"]
        for place in awaited[1:]:
            asked = max(at for at in range(place) if order[at] == Move("ask", order[place].way))
            assert sum(isinstance(each, Action) for each in order[asked:place]) == 1
        plain = Counter(each for each in moves(parallel, stage, 8) if isinstance(each, Move))
        count = Counter(each for each in order if isinstance(each, Move))
        for way in (FORWARD, BACKWARD):
            assert count[Move("ask", way)] == count[Move("await", way)] == plain[Move("receive", way)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_hosts_that_wait_for_exchanges_have_nothing_in_the_air_while_a_pass_runs(schedule: str) -> None:
    free = Parallelism(pipeline=4, schedule=schedule)
    waiting = replace(free, batch_p2p_sync=True)
    for stage in range(4):
        assert actions(free, stage, 8) == actions(waiting, stage, 8)
        flying: Counter[str] = Counter()
        for each in moves(waiting, stage, 8):
            if isinstance(each, Action):
                assert not +flying
            else:
                flying[f"{each.way} sent"] += {"send": 1, "wait": -1}.get(each.what, 0)
                flying[f"{each.way} received"] += {"ask": 1, "await": -1}.get(each.what, 0)


def test_hosts_that_wait_for_exchanges_take_no_less_time() -> None:
    free = replace(GPT, parallel=Parallelism(pipeline=2))
    waiting = replace(free, parallel=replace(free.parallel, batch_p2p_sync=True))
    steps = [modelled(build(config), Platform.load("2xh100-nvlink")) for config in (free, waiting)]
    counts = [[int((each.program.calls.kind == CallKind.DEVICE_SYNC).sum()) for each in step.programs] for step in steps]
    assert counts == [[0, 0], [16, 16]]  # 8 micro-batches, each sent one way and received the other
    periods = [step.play().step_ns for step in steps]
    assert periods[0] < periods[1]


def test_stages_hold_all_layers_once_and_may_be_uneven() -> None:
    even = [len(each) for each in layers_of(Parallelism(pipeline=3), 8)]
    assert even == [3, 3, 2]
    config = replace(GPT, parallel=Parallelism(pipeline=2, stages=(3, 5)))
    assert [part.layers for stage in range(2) for part in parts_of(config, stage)] == [range(3), range(3, 8)]
    chunks = replace(GPT, parallel=Parallelism(pipeline=2, chunks=2, schedule="interleaved"))
    assert [part.layers for part in parts_of(chunks, 1)] == [range(2, 4), range(6, 8)]


@pytest.mark.parametrize(
    "parallel",
    [
        Parallelism(pipeline=2),
        Parallelism(pipeline=4, schedule="gpipe"),
        Parallelism(pipeline=2, chunks=2, schedule="interleaved"),
        Parallelism(pipeline=2, chunks=2, schedule="interleaved", overlap_p2p_comm=True),
        Parallelism(pipeline=2, data=2),
        Parallelism(pipeline=2, fsdp=2),
        Parallelism(pipeline=2, tensor=2),
    ],
)
def test_stages_share_the_operations_of_one_rank(parallel: Parallelism) -> None:
    alone, shared = operations_of(build(GPT)), operations_of(build(replace(GPT, parallel=parallel)))
    assert shared.model == pytest.approx(alone.model, rel=0.01)
    assert build(replace(GPT, parallel=parallel)).description.parameters == build(GPT).description.parameters


def test_both_ends_add_up_the_gradients_of_a_tied_embedding() -> None:
    workload = build(replace(GPT, tied_head=True, parallel=Parallelism(pipeline=4, data=2)))
    shared = [[each for each in program.collectives if each.group == "embedding"] for program in workload.programs]
    assert [len(each) for each in shared] == [1, 0, 0, 1]
    assert shared[0][0].ranks == shared[3][0].ranks == (0, 6)


def test_what_does_not_divide_names_what_does() -> None:
    with pytest.raises(InputError, match="at most 8"):
        replace(GPT, parallel=Parallelism(pipeline=16))
    with pytest.raises(InputError, match="multiple of 4"):
        replace(GPT, parallel=Parallelism(pipeline=4, chunks=2, schedule="interleaved"), gradient_accumulation=2)
    for parallel in (Parallelism(batch_p2p_sync=True), Parallelism(pipeline=2, chunks=2, batch_p2p_sync=True)):
        with pytest.raises(InputError, match="not interleaved"):
            replace(GPT, parallel=parallel)
    with pytest.raises(InputError, match="add up to 8"):
        replace(GPT, parallel=Parallelism(pipeline=2, stages=(3, 4)))


def test_what_a_stage_receives_takes_memory_from_then_on_and_not_before_the_step() -> None:
    hidden = 2 * 48 * 64 * 2  # bytes of a micro-batch between stages, and of no weight
    for program in build(replace(GPT, states="bf16", sequence=48, parallel=Parallelism(pipeline=2))).programs:
        same = [each for each in storages(program, reference_device()) if each.nbytes == hidden]
        assert same
        assert not any(each.stays for each in same)


def test_a_last_stage_may_be_the_head_alone_under_fsdp() -> None:
    staged = Parallelism(fsdp=2, pipeline=2, stages=(8, 0))
    built = build(replace(GPT, parallel=staged))
    assert build(replace(GPT, parallel=replace(staged, stages=()))).description.parameters == built.description.parameters
