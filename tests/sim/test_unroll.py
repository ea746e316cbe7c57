"""A step laid out from a sample of it is the step written out: the same calls and works, the same time and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.slow import slow_beyond

from steptime._build.transformer import sampling
from steptime._build.transformer.build import build
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._diff.attribute import difference
from steptime._platforms.platform import Platform
from steptime._program.program import WorkKind
from steptime._program.workload import Workload
from steptime._sim.explain.activity import Window, activity
from steptime._sim.modelled.prediction import memory_of, predict_on
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._sim.prediction import operations_of
from steptime._units import NS_PER_MS

LLAMA = Transformer(
    layers=8,
    width=256,
    heads=4,
    sequence=128,
    vocabulary=1024,
    batch=32,
    gradient_accumulation=4,
    precision="bf16",
    tied_head=False,
    norm="rms_norm",
    activation="swiglu",
    positions="rotary",
    optimizer="adamw_fused",
)
LAYOUTS = {
    "accumulated": Parallelism(),
    "tensor": Parallelism(tensor=2, sequence=True),
    "copies": Parallelism(data=2),
    "fsdp": Parallelism(fsdp=2),
    "zero": Parallelism(data=2, zero=1),
    "context": Parallelism(context=2),
    "pipeline": Parallelism(pipeline=2, data=2),
    "pipeline whose hosts wait": Parallelism(pipeline=2, data=2, batch_p2p_sync=True),
    "interleaved": Parallelism(pipeline=2, chunks=4, schedule="interleaved"),
    "sharded pipeline": Parallelism(pipeline=2, fsdp=2),
}


def both(config: Transformer, monkeypatch: pytest.MonkeyPatch) -> tuple[Workload, Workload]:
    """From a sample, and written out."""
    monkeypatch.setattr(sampling, "_WRITTEN_OUT", 4)
    sampled = build(config)
    monkeypatch.setattr(sampling, "_WRITTEN_OUT", 1 << 20)
    return sampled, build(config)


def on_h100s(workload: Workload) -> ModelledStep:
    name = "1xh100" if workload.world_size == 1 else f"{workload.world_size}xh100-nvlink"
    return modelled(workload, Platform.load(name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_laid_out_is_the_step_written_out(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, whole = both(replace(LLAMA, parallel=LAYOUTS[layout]), monkeypatch)
    assert all(program.repetition is not None for program in sampled.programs)
    assert sum(len(program.ops) for program in sampled.programs) < sum(len(program.ops) for program in whole.programs)
    assert operations_of(sampled).model == pytest.approx(operations_of(whole).model, rel=1e-9)
    one, other = on_h100s(sampled), on_h100s(whole)
    for mine, theirs in zip(one.programs, other.programs, strict=True):
        names = [
            Counter(issued.program.names[work] for work in issued.program.works.name.tolist()) for issued in (mine, theirs)
        ]
        assert names[0] == names[1]
        met = [[(each.group, each.sequence, each.kind) for each in issued.program.collectives] for issued in (mine, theirs)]
        assert met[0] == met[1]
    assert one.play().step_ns == pytest.approx(other.play().step_ns, rel=0.02)
    taken = [memory_of(workload, one.platform)["allocated_bytes"] for workload in (sampled, whole)]
    assert taken[0] == pytest.approx(taken[1], rel=0.06)


@pytest.mark.parametrize("waiting", [False, True])
def test_the_first_receive_of_a_step_waits_for_all_that_the_step_before_computes(
    waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = Parallelism(pipeline=2, batch_p2p_sync=waiting)
    long = replace(LLAMA, layers=4, width=2048, heads=16, sequence=1024, gradient_accumulation=2, parallel=parallel)
    for workload in both(long, monkeypatch):
        played = on_h100s(workload).play().steady
        last = played.timeline.cohorts[1]
        works = last.cohort.program.works
        kernels, received = works.kind == WorkKind.KERNEL, np.flatnonzero(works.kind == WorkKind.COLLECTIVE)[0]
        assert last.work_start_ns[received, 0, 0] + played.period_ns[0] >= last.work_end_ns[kernels, 0, 0].max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_layers_wait_for_the_same_either_way(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So large that hosts run ahead: gathers and receives are called long before the device comes to them.
    large = replace(LLAMA, width=2048, heads=16, sequence=1024, parallel=LAYOUTS[layout])
    one, other = (on_h100s(workload).play().steady for workload in both(large, monkeypatch))
    assert one.period_ns[0] == pytest.approx(other.period_ns[0], rel=0.01)
    exposed = [activity(played.timeline, Window(1)).ranks[0].exposed_communication_ms for played in (one, other)]
    assert exposed[0] == pytest.approx(exposed[1], rel=0.05, abs=0.01 * one.period_ns[0] / NS_PER_MS)


def test_stages_of_one_kind_share_the_ops_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, _ = both(replace(LLAMA, parallel=Parallelism(pipeline=4)), monkeypatch)
    first, second, third, last = sampled.programs
    assert second.ops is third.ops
    assert first.ops is not second.ops
    assert second.repetition is not None
    assert third.repetition is not None
    assert second.repetition.order != third.repetition.order
    assert {each.group for each in third.collectives if each.kind == "send"} == {
        "pipeline forward 2->3",
        "pipeline backward 2->1",
    }
    assert last.rank == 3


@pytest.mark.parametrize("layout", slow_beyond(4, [*LAYOUTS]))
def test_counts_are_of_the_whole_step_and_its_critical_path_is_as_long(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for others counts as often as a step runs it, and no path ends where a section does."""
    workloads = both(replace(LLAMA, parallel=LAYOUTS[layout]), monkeypatch)
    name = "1xh100" if workloads[0].world_size == 1 else f"{workloads[0].world_size}xh100-nvlink"
    sampled, whole = (predict_on(workload, Platform.load(name)) for workload in workloads)
    for answer in (sampled, whole):
        assert answer.critical_path.length_ms == pytest.approx(answer.step_time_ms, rel=1e-3)
    for each in difference(sampled, whole).ops:
        if each.before.device_ms:  # others are counted where they have a call of their own, which one of several may lack
            assert each.before.count == pytest.approx(each.after.count), each.name
    ops = Counter(workloads[1].programs[0].names[op] for op in workloads[1].programs[0].ops.name.tolist())
    for entry in sampled.critical_path.top:
        assert entry.count <= len(workloads[1].running) * ops.get(entry.name, 1 << 30), entry
