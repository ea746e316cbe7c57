"""Step times over iterations: known for a hand-made job, one point for equal iterations, longer only where lookups show."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.platforms.counting_lookups import Counting, counting_device, looked_up, steps_of
from tests.program.traces import AUTOGRAD, Trace, Work

from steptime._lookups.estimated import scaled
from steptime._lookups.generators import Generator
from steptime._lookups.workload import RankLookups, StepLookups, WorkloadLookups, drawn_steps
from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._sim.prediction import Iterations, PredictedStep, predict
from steptime._sim.recorded import lookup_scenarios
from steptime._sim.recorded.lookup_scenarios import lookup_works, predict_iterations
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
FORWARD_US, BACKWARD_US = 100, 200


def rank_trace(rank: int, share: float = 1.0, *, lookup: str = "TableBatchedLookupFunction", world_size: int = 2) -> Trace:
    """A step of 430 us: a lookup of 100 us and its backward pass of 200 us (or a share of both), then ranks meet for 100 us."""
    trace = Trace(rank=rank, world_size=world_size)
    trace.step(1, 0, 430_000)
    trace.op(lookup, 10_000, 20_000)
    between = 16_000 + round(1e3 * share * FORWARD_US)
    trace.launch(12_000, 14_000, Work(7, 16_000, between, "forward"))
    trace.op(f"{lookup}Backward", 20_000, 30_000)
    after = between + 1_000 + round(1e3 * share * BACKWARD_US)
    trace.launch(22_000, 24_000, Work(7, between + 1_000, after, "backward"))
    trace.collective(30_000, 36_000, Work(7, after + 1_000, 418_000, NCCL), waits=0)
    trace.call("cudaDeviceSynchronize", 40_000, 423_000)
    return trace


def two_ranks(**options: str) -> Workload:
    """Rank 1 needs half the time for its lookups, and waits 150 us for rank 0."""
    return Workload((rank_trace(0, **options).read("rank0.json"), rank_trace(1, 0.5).read("rank1.json")), 2)  # type: ignore[arg-type]


def given(**steps: StepLookups) -> WorkloadLookups:
    """Lookups of ranks `r0`, `r1`."""
    return WorkloadLookups({int(rank[1:]): RankLookups("table_batched", "sgd", found) for rank, found in steps.items()})


def iterations(prediction: PredictedStep) -> Iterations:
    assert prediction.iterations is not None
    return prediction.iterations


def test_the_hand_made_step_is_as_long_as_it_says() -> None:
    assert predict(two_ranks()).step_time_ms == pytest.approx(0.430)


def test_forward_and_backward_take_what_their_own_estimates_say() -> None:
    # Lookups 20, 10, 30 (mean 20): forward x 1, 0.5, 1.5. Distinct rows 5, 10, 15 (mean 10): backward x 0.5, 1, 1.5.
    heavy = steps_of((20, 5), (10, 10), (30, 15))
    found = predict_iterations(two_ranks(), given(r0=heavy), counting_device())
    assert found.step_time_ms == pytest.approx(0.430)
    assert iterations(found).step_ms == pytest.approx((0.330, 0.380, 0.580))
    assert iterations(found).mean_ms == pytest.approx(0.430)
    assert iterations(found).std_ms == pytest.approx(np.std([0.330, 0.380, 0.580]))
    assert iterations(found).quantile_ms(0.5) == pytest.approx(0.380)
    assert iterations(found).slowest == 2
    assert iterations(found).alone_ms == pytest.approx({0: 0.150})


def test_lookups_that_nobody_waits_for_make_no_step_longer() -> None:
    # Rank 1 has 150 us to spare and looks up for 150 us; in the last iteration, three times the mean, for 450 us.
    spare = steps_of((5, 5), (10, 10), (15, 15), (10, 10), (60, 60))
    found = iterations(predict_iterations(two_ranks(), given(r1=spare), counting_device()))
    assert found.step_ms == pytest.approx((0.430, 0.430, 0.430, 0.430, 0.580))
    assert found.slowest == 4


def test_the_rank_whose_lookups_make_the_slowest_iteration_is_found() -> None:
    lookups = given(r0=steps_of((20, 20), (20, 20), (20, 20)), r1=steps_of((10, 10), (10, 10), (70, 70)))
    found = iterations(predict_iterations(two_ranks(), lookups, counting_device()))
    assert found.slowest == 2
    assert found.alone_ms[0] == pytest.approx(0)
    assert found.alone_ms[1] == pytest.approx(found.step_ms[2] - 0.430)
    assert found.alone_ms[1] > 0


def test_equal_iterations_are_one_point_the_ordinary_prediction() -> None:
    lookups = given(r0=steps_of(*[(17, 5)] * 7), r1=steps_of(*[(9, 3)] * 7))
    found, ordinary = predict_iterations(two_ranks(), lookups, counting_device()), predict(two_ranks())
    assert iterations(found).step_ms == (ordinary.step_time_ms,) * 7
    assert iterations(found).std_ms == pytest.approx(0, abs=1e-12)
    assert found.step_time_ms == ordinary.step_time_ms
    assert found.warnings == ordinary.warnings


def test_scenarios_played_in_parts_are_those_played_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = given(r0=steps_of(*[(n, 1 + n % 4) for n in range(4, 15)]))
    together = iterations(predict_iterations(two_ranks(), lookups, counting_device()))
    monkeypatch.setattr(lookup_scenarios, "SCENARIOS_AT_ONCE", 3)
    assert iterations(predict_iterations(two_ranks(), lookups, counting_device())) == together


def test_models_are_asked_once_for_each_direction() -> None:
    form = Counting()
    lookups = given(r0=steps_of((4, 2), (5, 2), (6, 2)), r1=steps_of((4, 2), (5, 2), (6, 2)))
    predict_iterations(two_ranks(), lookups, counting_device(form=form))
    assert form.asked == [3, 3]  # both ranks look up the same


def test_lookups_without_statistics_keep_their_time_and_are_named() -> None:
    found = predict_iterations(two_ranks(), given(r0=steps_of((1, 1), (3, 3))), counting_device())
    assert [w for w in found.warnings if "statistics" in w] == [
        "rank 1 has lookups in its trace and no statistics; they take their recorded time"
    ]


def test_statistics_of_a_rank_that_looks_nothing_up_are_refused() -> None:
    with pytest.raises(InputError, match=r"rank0\.json: no lookup op launches device work here, but rank 0 has"):
        predict_iterations(two_ranks(lookup="aten::mm"), given(r0=steps_of((1, 1))), counting_device())


def test_statistics_of_ranks_the_job_does_not_have_are_refused() -> None:
    with pytest.raises(InputError, match="lookups are given for rank 2; the job has ranks 0 to 1"):
        predict_iterations(two_ranks(), given(r0=steps_of((1, 1)), r2=steps_of((1, 1))), counting_device())


def test_statistics_of_ranks_without_a_trace_are_left_out_with_a_word() -> None:
    alone = Workload((rank_trace(0).read("rank0.json"),), 2)
    found = predict_iterations(alone, given(r0=steps_of((1, 1), (3, 3)), r1=steps_of((1, 1), (3, 3))), counting_device())
    assert any("lookups of ranks without a trace are left out (rank 1)" in w for w in found.warnings)
    with pytest.raises(InputError, match="none of them has a trace here"):
        predict_iterations(alone, given(r1=steps_of((1, 1))), counting_device())


def test_another_number_of_lookups_than_the_trace_has_is_said() -> None:
    bags = StepLookups(((looked_up(3, 3, "a"), looked_up(4, 4, "b")),))
    lookups = WorkloadLookups({0: RankLookups("embedding_bag", "sgd", bags)})
    found = predict_iterations(two_ranks(), lookups, counting_device())
    assert any("rank 0 looks up 1 times forward in a recorded step, its statistics say 2" in w for w in found.warnings)


def test_lookups_beyond_what_was_measured_are_said_to_be_extrapolated() -> None:
    found = predict_iterations(two_ranks(), given(r0=steps_of((1_500_000, 9), (10, 9))), counting_device())
    assert any("2 of 4 estimated lookups are beyond what was measured on h200" in each for each in found.basis)


def test_rows_of_embeddings_are_lookups_where_statistics_say_so() -> None:
    trace = Trace()
    trace.step(1, 0, 100_000)
    trace.op("aten::embedding", 1_000, 9_000)
    trace.launch(2_000, 4_000, Work(7, 5_000, 9_000, "gather"))
    trace.op("aten::embedding_dense_backward", 10_000, 20_000, AUTOGRAD)
    trace.op("aten::zeros", 11_000, 15_000, AUTOGRAD)
    trace.launch(12_000, 14_000, Work(7, 15_000, 19_000, "fill"), tid=AUTOGRAD)
    trace.launch(16_000, 18_000, Work(7, 20_000, 29_000, "scatter"), tid=AUTOGRAD)
    program = trace.read()
    names = np.array(program.names)[program.works.name]
    found = lookup_works(program, "embedding_dense")
    assert {direction: names[rows].tolist() for direction, rows in found.rows.items()} == {
        "forward": ["gather"],
        "backward": ["fill", "scatter"],
    }
    assert found.forward_per_step == 1
    assert not any(len(rows) for rows in lookup_works(program, "embedding_bag").rows.values())


@cache
def example(name: str) -> Workload:
    return load([EXAMPLES / name])


@cache
def drawn(count: int = 3) -> WorkloadLookups:
    """What the tables of the example h200_mps4_dlrm look up, drawn anew in every iteration."""
    config = json.loads((EXAMPLES / "h200_mps4_dlrm" / "measured.json").read_text(encoding="utf-8"))["config"]
    ranks = {}
    for rank in range(4):
        tables = [table for table in config["tables"] if table["rank"] == rank]
        drawn_from = [
            Generator(table["rows"], table["pool"], "geometric", "power", table["alpha"], seed=31 * rank + place)
            for place, table in enumerate(tables)
        ]
        steps = drawn_steps(drawn_from, [config["dim"]] * len(tables), config["batch"], count)
        ranks[rank] = RankLookups("embedding_bag", "sgd", steps)
    return WorkloadLookups(ranks)


def test_the_lookups_of_a_real_trace_are_found_with_the_update_of_their_rows() -> None:
    program = example("h200_mps4_dlrm").programs[0]
    found = lookup_works(program)
    names = np.array(program.names)[program.works.name]
    assert found.forward_per_step == 6
    assert all("EmbeddingBag_updateOutputKernel" in name for name in names[found.rows["forward"]])
    backward = names[found.rows["backward"]].tolist()
    assert sum("vectorized_gather_kernel" in name for name in backward) == 18
    assert sum("indexFunc" in name for name in backward) == 18
    assert len(found.rows["forward"]) + len(backward) == 18 + 36


def test_other_rows_do_not_matter_to_a_step_that_waits_for_its_host() -> None:
    workload, ordinary = example("h200_mps4_dlrm"), predict(example("h200_mps4_dlrm"))
    assert max(ordinary.critical_path.kinds, key=lambda kind: kind.share).kind == "host"
    found = predict_iterations(workload, drawn(), counting_device("h200-quarter"))
    assert iterations(found).step_ms == pytest.approx((ordinary.step_time_ms,) * 3)
    assert found.warnings == ordinary.warnings
    assert sorted(iterations(found).alone_ms) == [0, 1, 2, 3]


def test_enough_more_lookups_matter_even_there() -> None:
    few, lookups = drawn(), {}
    for rank, one in few.ranks.items():
        steps = [*one.steps.steps] * 4
        heavy = tuple(scaled(table, 200 * table.batch) for table in steps[0])
        lookups[rank] = replace(one, steps=StepLookups((*steps, heavy)))
    found = predict_iterations(example("h200_mps4_dlrm"), WorkloadLookups(lookups), counting_device("h200-quarter"))
    assert iterations(found).slowest == 12
    assert iterations(found).step_ms[12] > 1.1 * found.step_time_ms
    assert max(iterations(found).alone_ms.values()) > 0


def test_other_rows_matter_to_a_step_that_waits_for_its_device() -> None:
    drawn_from = [Generator(200_000, 20, "geometric", seed=place) for place in range(5)]
    lookups = {
        rank: RankLookups("embedding_bag_dense", "sgd", drawn_steps(drawn_from[:tables], [64] * tables, 512, 4))
        for rank, tables in enumerate((5, 2, 3, 2))
    }
    found = predict_iterations(example("dlrm_overlap4"), WorkloadLookups(lookups), counting_device("h200-quarter"))
    seen = iterations(found)
    assert len(set(seen.step_ms)) == 4
    assert min(seen.step_ms) < found.step_time_ms < max(seen.step_ms)
    assert seen.mean_ms == pytest.approx(found.step_time_ms, rel=0.001)
    assert max(seen.alone_ms, key=lambda rank: seen.alone_ms[rank]) == 0
