from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.measure.test_steps import Ranks, alone, dlrm_cases, plan_of

from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read
from steptime_lab.measure.restarts import Attempts
from steptime_lab.measure.steps import cases_of, work
from steptime_lab.measure.steps.timed import chunks, order_of
from steptime_lab.measure.steps.timing import FULL, LONG_S, SMALL, Pace, flat, steps_for, time_once, warm_up
from steptime_lab.measurements.sets import STEPS
from steptime_lab.workloads.case import Case


@dataclass
class Counted:
    """A step that counts its calls."""

    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session.start(tmp_path, recipe(["steptime", "measure", "steps"], need_gpu=False), 5.0)


def test_a_step_time_is_flat_when_the_last_three_agree() -> None:
    assert flat([9.0, 1.0, 1.02, 1.01])
    assert not flat([1.0, 1.0, 1.2])
    assert not flat([1.0, 1.0])


def test_a_repeat_has_the_least_number_of_steps_however_slow_they_are_and_fits_16_bits() -> None:
    assert steps_for(0.2, 0.01, 5) == 20
    assert steps_for(0.2, 3.0, 5) == 5
    assert steps_for(0.2, 1e-9, 5) <= 2**15 - 1


def test_the_slowest_rank_counts() -> None:
    assert time_once(Counted(), Ranks(0, 2, "cpu", 1, others_s=(7.0,)), 3) == 7.0


def test_warming_up_stops_when_flat_and_never_before_the_least_number_of_steps() -> None:
    step = Counted()
    assert warm_up(step, Ranks(0, 2, "cpu", 1, others_s=(0.1,)), replace(FULL, warm_s=100.0)) == 0.1
    assert step.calls == FULL.warm_least


def test_long_steps_are_timed_over_fewer_and_in_fewer_rounds() -> None:
    step = Counted()
    warm_up(step, Ranks(0, 2, "cpu", 1, others_s=(1.0,)), FULL)
    assert step.calls < FULL.warm_least
    assert FULL.steps_of(5 * LONG_S) < FULL.least_steps
    assert FULL.rounds_of(5 * LONG_S) < FULL.rounds


def test_a_case_warms_up_long_in_the_first_round_shortly_after_another_case_and_not_at_all_after_itself() -> None:
    assert FULL.warm_of(0.001, 0, hot=True) == 300
    assert FULL.warm_of(0.001, 1, hot=False) == 30
    assert FULL.warm_of(0.1, 1, hot=False) == FULL.again_least
    assert FULL.warm_of(0.001, 1, hot=True) == 0
    assert FULL.warm_of(1.0, 0, hot=True) == 0
    assert FULL.warm_of(1.0, 0, hot=False) == FULL.again_least


def test_what_the_rounds_of_a_case_cost_is_the_steps_they_make() -> None:
    assert FULL.cost_s(0.01, hot=False) == pytest.approx(0.3 + 4 * 0.03 + 5 * 0.1)
    assert FULL.cost_s(1.0, hot=True) == pytest.approx(6.0)


def test_warming_up_ends_even_where_steps_never_get_flat() -> None:
    step = Counted()
    ticks = iter(float(3**number) for number in range(99))

    @dataclass(frozen=True)
    class Slower(Ranks):
        def gather(self, value: float) -> list[float]:
            return [value, next(ticks)]

    warm_up(step, Slower(0, 2, "cpu", 1), Pace(warm_s=float("inf")))
    assert step.calls == FULL.warm_most


def test_cases_with_tables_are_timed_many_at_a_time_and_other_models_one_or_two() -> None:
    tables = [replace(dlrm_cases()[0], name=f"c{number}") for number in range(14)]
    dense = [Case("bert", f"b{number}", {}, "fp32", 4, 1) for number in range(3)]
    assert [len(each) for each in chunks([*tables, *dense], 1)] == [12, 2, 2, 1]
    assert [len(each) for each in chunks([*tables[:2], *dense, *tables[2:3]], 4)] == [2, 1, 1, 1, 1]
    assert list(chunks([], 1)) == []


def test_every_round_has_an_order_of_its_own_that_ranks_and_runs_agree_on() -> None:
    names = [f"c{number}" for number in range(12)]
    orders = [order_of(names, turn, 0, 0) for turn in range(5)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert orders == [order_of(names, turn, 0, 0) for turn in range(5)]
    assert orders[0] != order_of(names, 0, 0, 1)


@dataclass
class Watched:
    """A step that writes down when it runs, and may fail late."""

    name: str
    log: list[str]
    fails_after: int = 10**9
    calls: int = 0
    batches: int = 1
    spare_bytes: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls > self.fails_after:
            raise RuntimeError("lost")
        self.log.append(self.name)

    def lookups(self, iteration: int) -> list[Any]:
        del iteration
        return []

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


@dataclass
class Builds:
    """Builds watched steps, with room for so many at a time."""

    log: list[str] = field(default_factory=list)
    room: int = 99
    fails_after: dict[str, int] = field(default_factory=dict)

    def __call__(self, case: Case, *_: object) -> Watched:
        held = sum(word.endswith(" built") for word in self.log) - sum(word.endswith(" closed") for word in self.log)
        if held >= self.room:
            raise RuntimeError("CUDA out of memory")
        self.log.append(f"{case.name} built")
        return Watched(case.name, self.log, self.fails_after.get(case.name, 10**9))


def watched_cases(monkeypatch: pytest.MonkeyPatch, builds: Builds, count: int) -> list[Case]:
    cases = [replace(dlrm_cases()[0], name=f"c{number}", batch=8 + number) for number in range(count)]
    monkeypatch.setattr("steptime_lab.workloads.case.build", builds)
    monkeypatch.setattr("steptime_lab.workloads.cases.small_cases", lambda _ranks: tuple(cases))
    return cases


def test_repeats_of_a_case_are_spread_over_rounds_after_each_case_ran_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds()
    cases = watched_cases(monkeypatch, builds, 4)
    work(alone(), session, plan_of("timed", cases))
    together = builds.log.index("c0 built", 1 + builds.log.index("c0 closed"))
    before, after = builds.log[:together], builds.log[together:]
    # One at a time, so that memory is each case's own.
    assert [word for word in before if " " in word] == [f"c{n} {did}" for n in range(4) for did in ("built", "closed")]
    assert after[:4] == [f"c{number} built" for number in range(4)]
    runs = [word for word in after if " " not in word]
    visits = runs[:: SMALL.again_least + SMALL.least_steps]
    rounds = [visits[at : at + 4] for at in range(0, len(visits), 4)]
    assert len(rounds) == SMALL.rounds
    assert all(sorted(each) == ["c0", "c1", "c2", "c3"] for each in rounds)
    assert read(session.folder, STEPS)["name"].to_pylist() == ["c0", "c1", "c2", "c3"]


def test_cases_that_do_not_fit_beside_others_are_timed_in_smaller_chunks(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(room=2)
    cases = watched_cases(monkeypatch, builds, 5)
    work(alone(), session, plan_of("timed", cases))
    assert read(session.folder, STEPS)["name"].to_pylist() == [case.name for case in cases]
    assert builds.log.count("c4 built") == builds.log.count("c4 closed") == 2


def test_a_case_that_fails_in_a_round_costs_only_itself(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(fails_after={"c1": 6})
    cases = watched_cases(monkeypatch, builds, 3)
    work(alone(), session, plan_of("timed", cases))
    rows = read(session.folder, STEPS).to_pylist()
    assert [row["name"] for row in rows] == ["c0", "c2"]
    assert all(len(row["times_ns"]) == SMALL.rounds for row in rows)
    assert builds.log.count("c1 closed") == 2


def test_a_case_whose_rounds_would_not_end_in_time_is_not_begun(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = watched_cases(monkeypatch, Builds(), 3)
    monkeypatch.setattr(Pace, "cost_s", lambda *_, **__: 120.0)
    work(alone(), session, plan_of("timed", cases))
    assert read(session.folder, STEPS)["name"].to_pylist() == ["c0", "c1"]


def test_a_case_that_is_timed_alone_is_built_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds()
    cases = watched_cases(monkeypatch, builds, 1)
    work(alone(), session, plan_of("timed", cases))
    assert [word for word in builds.log if " " in word] == ["c0 built", "c0 closed"]
    assert len(read(session.folder, STEPS)["times_ns"][0]) == SMALL.rounds


def test_rounds_stop_when_time_is_up_but_not_before_the_third(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = watched_cases(monkeypatch, Builds(), 2)
    monkeypatch.setattr("steptime_lab.measure.steps.timed.SMALL", replace(SMALL, rounds=9))
    monkeypatch.setattr(Attempts, "time_left", lambda _, need_s=1.0: need_s > 0)
    work(alone(), session, plan_of("timed", cases))
    assert [len(times) for times in read(session.folder, STEPS)["times_ns"].to_pylist()] == [3, 3]


def test_a_group_settles_with_its_first_case_before_anything_is_timed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds()
    cases = watched_cases(monkeypatch, builds, 2)
    monkeypatch.setattr("steptime_lab.measure.steps.timed.SMALL", replace(SMALL, settle_s=1.0))
    work(alone(), session, plan_of("timed", cases))
    first, second = builds.log.index("c0 closed"), builds.log.index("c1 closed")
    assert builds.log[:first].count("c0") > 100 > builds.log[first:second].count("c1")


def test_buffers_that_tables_left_are_no_memory_of_a_model_without_tables() -> None:
    pytest.importorskip("transformers")
    from steptime_lab.workloads.case import build
    from steptime_lab.workloads.shared_buffers import shared_buffers

    group = alone()
    build(dlrm_cases()[0], group, group.device).close()
    (case,) = cases_of(1, small=True, only=("bert",))
    step = build(case, group, group.device)
    assert step.spare_bytes == shared_buffers(group.device).nbytes() > 0
    step.close()
