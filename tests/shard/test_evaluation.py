from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, Division
from steptime._models.host.model import STEP, Speed
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import ALL_LAWS, Evaluator, Exchanges, Laws, messages
from steptime._shard.lookup_times import ExactLookups, LookupCurves
from steptime.errors import InputError
from steptime_lab.workloads.drawn_tasks import sharding_tasks, step_tasks

QUARTERS = "4xh200-quarter-loopback"


@cache
def platform() -> Platform:
    return Platform.load(QUARTERS)


@cache
def evaluator(number: int = 0, laws: Laws = ALL_LAWS) -> Evaluator:
    return Evaluator(sharding_tasks()[number], platform(), 4, laws=laws)


def plans_of(count: int, tables: int, seed: int = 3, ranks: int = 4) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, ranks, (count, tables))


# Tasks and platforms on which what `shard` composes and what `predict` plays are compared: uneven plans under both laws of
# sharing, and links on which nobody measured any.
COMPARED = [
    *((QUARTERS, number) for number in (0, 1, 4, 7, 11, 16, 22, 25, 30, 33, 36, 39)),
    *(("2xh200-half-loopback", number) for number in (2, 13, 27)),
    *(("4xh200-nvlink", number) for number in (1, 9, 18, 22, 31)),
]


@pytest.mark.parametrize(("name", "number"), COMPARED)
def test_plans_composed_take_as_long_as_plans_played_under_the_laws_of_the_platform(name: str, number: int) -> None:
    model, on = sharding_tasks()[number], Platform.load(name)
    one = Evaluator(model, on, on.ranks)
    plans = plans_of(2, len(model.tables), seed=number, ranks=on.ranks)
    together, played = one.evaluate(plans, exact=True), one.simulate(plans)
    # What remains: every rank's kernels besides lookups and exchanges are as long as in the step that stands for all plans.
    np.testing.assert_allclose(together.step_ns, played.step_ns, rtol=0.005)
    # How much kernels slow an exchange down is that of the step that stands for all plans.
    np.testing.assert_allclose(together.exchange_ns, played.exchange_ns, rtol=0.02)
    # Hosts bring ranks with little to do later to an exchange than their devices would, which does not change the step but how
    # long they wait there: who waits is compared where hosts are faster.
    fast = Calibration(speed=Speed.of_cpu(0.5 * STEP.cpu))
    one = Evaluator(model, on, on.ranks, calibration=fast)
    together, played = one.evaluate(plans, exact=True), one.simulate(plans)
    device = together.device_ns == together.step_ns
    np.testing.assert_allclose(together.waiting_ns[device], played.waiting_ns[device], atol=0.04 * played.step_ns.max())


@pytest.mark.parametrize(
    "dense",
    [
        {"precision": "bf16-autocast", "dense_optimizer": "adam", "exchange_precision": "bf16"},
        {"precision": "tf32", "interaction": "dcnv2", "cross_rank": 64, "exchange_precision": "fp16"},
        {"precision": "fp16-autocast", "dense_optimizer": "adagrad"},  # its host waits for the device
        {"precision": "fp16-autocast", "dense_optimizer": "adam_fused"},
        {"prefetch": "lookups"},
    ],
    ids=lambda dense: "-".join(map(str, dense.values())),
)
def test_plans_of_any_dense_side_take_as_long_as_played(dense: dict[str, Any]) -> None:
    model, on = replace(sharding_tasks()[7], **dense), Platform.load("4xh200-nvlink")
    one, plans = Evaluator(model, on, on.ranks), plans_of(2, len(model.tables), seed=7)
    together, played = one.evaluate(plans, exact=True), one.simulate(plans)
    np.testing.assert_allclose(together.step_ns, played.step_ns, rtol=0.01)
    np.testing.assert_allclose(together.exchange_ns, played.exchange_ns, rtol=0.02)


@pytest.mark.parametrize("kinds", [(ROW_WISE,), (DATA_PARALLEL, DATA_PARALLEL), (COLUMN_WISE, ROW_WISE, DATA_PARALLEL)])
@pytest.mark.parametrize(("name", "number"), [(QUARTERS, 7), ("2xh200-half-loopback", 33), ("4xh200-nvlink", 1)])
def test_plans_of_any_division_composed_take_as_long_as_played(name: str, number: int, kinds: tuple[str, ...]) -> None:
    model, on = sharding_tasks()[number], Platform.load(name)
    one, division = Evaluator(model, on, on.ranks), Division.whole(len(model.tables))
    smallest = sorted(range(len(model.tables)), key=lambda index: model.tables[index].nbytes)
    for index, kind in zip(smallest, kinds, strict=False):
        division = division.with_table(index, kind, 2)
    plans = plans_of(2, len(division.shards(model.tables)), seed=number, ranks=on.ranks)
    together, played = one.evaluate(plans, division, exact=True), one.simulate(plans, division)
    np.testing.assert_allclose(together.step_ns, played.step_ns, rtol=0.005)
    # How much kernels slow an exchange down is that of the step that stands for all plans.
    np.testing.assert_allclose(together.exchange_ns, played.exchange_ns, rtol=0.02)


@pytest.mark.parametrize("tables", [6, 13])
def test_vectors_that_meet_by_dot_are_as_many_on_any_number_of_ranks(tables: int) -> None:
    """As many as there are tables, whether or not every rank has equally many."""
    model, on = sharding_tasks()[7], Platform.load("8xh200-nvlink")
    alike = tuple(
        replace(table, name=f"t{index}", dim=64) for index, table in enumerate((*model.tables, *model.tables)[:tables])
    )
    dot = replace(model, tables=alike, interaction="dot", bottom=(512, 64), top=(1024, 1024, 1), batch=65536)
    one, plans = Evaluator(dot, on, on.ranks), plans_of(2, tables, seed=7, ranks=on.ranks)
    np.testing.assert_allclose(one.evaluate(plans, exact=True).step_ns, one.simulate(plans).step_ns, rtol=0.005)


def test_a_step_that_its_host_binds_takes_as_long_as_the_host_does() -> None:
    small = step_tasks(4)[0].with_batch(64)
    one = Evaluator(small, Platform.load("4xh200-nvlink"), 4)
    plans = plans_of(3, len(small.tables))
    together, played = one.evaluate(plans), one.simulate(plans)
    np.testing.assert_allclose(together.step_ns, played.step_ns, rtol=0.03)
    assert together.host_bound.all()


def test_curves_through_some_subsets_say_what_the_models_say_of_others() -> None:
    model, device = sharding_tasks()[7], platform().device
    settings = [("forward", "idle"), ("backward", "idle")]
    plans = plans_of(50, len(model.tables))
    exact = ExactLookups.of(model, device, settings)
    curves = LookupCurves.fit(exact, 4)
    for setting, times in curves.times(plans, 4).items():
        asked = exact.times(plans, 4)[setting]
        some = asked > 0
        off = np.abs(times[some] / asked[some] - 1)
        assert np.median(off) < 0.015 and np.quantile(off, 0.95) < 0.05
        assert (times[~some] == 0).all()


def test_the_order_of_ranks_does_not_matter() -> None:
    one = evaluator(2)
    plans = plans_of(5, len(one.model.tables))
    turned = one.evaluate((plans + 1) % 4)
    np.testing.assert_allclose(turned.step_ns, one.evaluate(plans).step_ns, rtol=1e-9)
    np.testing.assert_allclose(np.roll(one.evaluate(plans).forward_ns, 1, axis=1), turned.forward_ns, rtol=1e-9)


def test_plans_do_not_depend_on_which_others_are_evaluated_with_them() -> None:
    one = evaluator(2)
    plans = plans_of(5000, len(one.model.tables))
    whole = one.evaluate(plans)
    assert len(whole) == 5000
    np.testing.assert_allclose(one.evaluate(plans[4321]).step_ns, whole.step_ns[4321:4322], rtol=1e-9)
    assert len(whole.take([1, 2])) == 2


def test_everything_on_one_rank_takes_longer_than_any_split() -> None:
    one = evaluator(0)
    tables = len(one.model.tables)
    found = one.evaluate(np.concatenate([np.zeros((1, tables), dtype=np.int64), plans_of(20, tables)]))
    assert found.step_ns[0] > found.step_ns[1:].max()
    assert found.forward_ns[0, 1:].tolist() == [0.0, 0.0, 0.0]


def test_lookups_that_share_a_memory_are_never_faster_than_alone() -> None:
    one = evaluator(1)
    plans = plans_of(20, len(one.model.tables))
    found, alone = one.evaluate(plans, exact=True), ExactLookups.of(one.model, platform().device, [("backward", "idle")])
    assert (found.backward_ns >= alone.times(plans, 4)["backward", "idle"] - 1.0).all()


def test_columns_of_exchanges_say_what_splits_say_one_by_one() -> None:
    from steptime._models.collectives.message import Message, Messages

    sent = np.array([[4096.0, 0.0, 8192.0, 1024.0], [512.0, 512.0, 512.0, 512.0]])
    splits = [tuple(tuple(int(size) for _ in row) for size in row) for row in sent]
    single = Messages.of([Message("all_to_all", 4, max(sum(row) for row in one), one) for one in splits])
    found = messages(sent, 4)
    for name in ("bytes", "load", "pairs"):
        np.testing.assert_allclose(getattr(found, name), getattr(single, name), rtol=1e-9)


def test_ranks_that_leave_exchanges_one_by_one_are_never_later() -> None:
    plans = plans_of(20, len(sharding_tasks()[0].tables))
    at_once, one_by_one = (evaluator(0, Laws(contention=False, one_by_one=one)).evaluate(plans) for one in (False, True))
    assert np.ptp(one_by_one.exchange_ns, axis=1).min() > 0 == np.ptp(at_once.exchange_ns, axis=1).max()
    assert (one_by_one.step_ns <= 1.001 * at_once.step_ns).all()
    assert one_by_one.step_ns.mean() < 0.99 * at_once.step_ns.mean()


def test_ranks_leave_at_once_where_nobody_measured_how_they_do() -> None:
    links = Platform.load("4xh200-nvlink").fabric
    assert links is not None
    one = Exchanges.of(sharding_tasks()[0], links, 4)
    sent, arrivals = np.array([[1e6, 2e6, 3e6, 4e6]]), np.array([[0.0, 1e6, 0.0, 0.0]])
    for number in range(2):
        assert one.ends(sent, (1.0, 1.0))(number, arrivals).tolist() == [one.times(sent).tolist() * 4]


def test_one_rank_exchanges_nothing_and_waits_for_nobody() -> None:
    model = sharding_tasks()[0]
    one = Evaluator(model, Platform.load("1xh200"), 1)
    plans = np.zeros((1, len(model.tables)), dtype=np.int64)
    found = one.evaluate(plans)
    assert found.exchange_ns.tolist() == [[0.0]] and found.waiting_ns.tolist() == [[0.0]]
    np.testing.assert_allclose(found.step_ns, one.simulate(plans).step_ns, rtol=0.01)


def test_tables_looked_up_one_by_one_are_played() -> None:
    model = next(task for task in step_tasks(2) if task.lookup == "embedding_bag")
    one = Evaluator(model, Platform.load("2xh200-half-loopback"), 2)
    plans = plans_of(1, len(model.tables), ranks=2)
    assert one.evaluate(plans).step_ns.tolist() == one.simulate(plans).step_ns.tolist()


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        (np.zeros((1, 3), dtype=np.int64), "one for each of"),
        (np.full((1, 12), 4), "expected 0 to 3"),
        (np.zeros((1, 12)), "expected whole numbers"),
    ],
)
def test_plans_of_other_tables_or_ranks_are_refused(plans: np.ndarray[tuple[int, int], np.dtype[np.int64]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        evaluator(0).evaluate(plans)


def test_more_ranks_than_the_platform_has_are_refused() -> None:
    with pytest.raises(InputError, match="platform 4xh200-quarter-loopback has 4"):
        Evaluator(sharding_tasks()[0], platform(), 8)


def test_the_last_step_that_is_played_takes_as_long_as_any_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = evaluator(1)
    plans = plans_of(50, len(one.model.tables))
    last = one.evaluate(plans).step_ns
    monkeypatch.setattr("steptime._sim.composed._SETTLING_STEPS", 12)
    np.testing.assert_allclose(one.evaluate(plans).step_ns, last, rtol=1e-4)
