"""Why a plan is as fast as it is: on the real evaluation, small."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.additive import model_of

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, KINDS, ROW_WISE, TABLE_WISE, Plan
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.platform import Platform
from steptime._report.answers import Sharding
from steptime._report.shard.document import evaluated_document, shard_document
from steptime._report.shard.html import shard_page
from steptime._shard.evaluator import Evaluator
from steptime._shard.explain import DENSE, EXCHANGES, HOST, LOOKUPS, Explained, PlacedShards, explain, why_of
from steptime._shard.given_plans import evaluated
from steptime._shard.search import Searched, search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime._sim.modelled.prediction import predict_on
from steptime._units import ms

PLATFORM = Platform.load("4xh200-quarter-loopback")
TASK = Task(model_of(9, batch=8192), 4, Constraints(kinds=(TABLE_WISE,), pinned={"t000": 2}))


@cache
def answered() -> tuple[Searched, Explained]:
    found = search(TASK, PLATFORM, SearchBudget(600))
    return found, explain(found, Evaluator(TASK.model, PLATFORM, 4))


def test_moving_a_large_table_makes_the_best_step_no_shorter() -> None:
    _, why = answered()
    moved = [reason.moved_ns for reason in why.best.reasons if reason.moved_ns is not None]
    assert moved
    assert min(moved) >= 0


def test_a_pinned_table_says_so() -> None:
    _, why = answered()
    reason = next(reason for reason in why.best.reasons if reason.table == "t000")
    assert (reason.ranks, reason.elsewhere, reason.said) == ((2,), None, "pinned by the task")


def test_ranks_hold_every_column_once() -> None:
    found, why = answered()
    assert sum(rank.columns for rank in why.ranks) == sum(table.dim for table in found.task.tables)
    assert sum(rank.shards for rank in why.ranks) == len(found.task.tables)
    assert all(rank.used_bytes <= rank.limit_bytes for rank in why.ranks)


def test_the_interval_holds_the_step_and_the_gain_its_share() -> None:
    _, why = answered()
    assert why.interval[0] <= 1 <= why.interval[1]
    assert why.gain is not None
    assert why.gain.interval[0] <= why.gain.share <= why.gain.interval[1]


def test_the_document_has_the_stable_keys() -> None:
    found, why = answered()
    document = shard_document(Sharding(found, why, PLATFORM))
    assert {"schema_version", "warnings", "best", "alternatives", "rules", "searched_plans", "seconds"} <= set(document)
    assert set(document["best"]) >= {"plan", "step_time_ms", "interval_ms"}
    assert document["best"]["plan"]["t000"] == [2]
    assert document["rules"]["naive"] >= document["best"]["step_time_ms"]
    assert document["verdict"]["fits"] is True
    assert document["samples_per_s"] == pytest.approx(1e3 * TASK.model.batch / document["best"]["step_time_ms"])


def test_given_plans_come_fastest_first_with_the_searched_steps() -> None:
    found, _ = answered()
    naive = found.rules["naive"]
    assert naive is not None
    plans = evaluated(TASK, PLATFORM, {"naive": naive.plan, "best": found.best.plan})
    assert [plan.name for plan in plans] == ["best", "naive"]
    assert plans[0].step_ns == pytest.approx(found.best.step_ns)
    assert plans[1].step_ns == pytest.approx(naive.step_ns)
    assert evaluated_document(TASK, plans)["plans"][0]["name"] == "best"


def test_given_plans_that_do_not_fit_come_last() -> None:
    found, _ = answered()
    together = Plan.from_dict({table.name: [0] for table in TASK.tables}, TASK.tables, 4)
    given = {"together": together, "best": found.best.plan}

    def limited(nbytes: int) -> Task:
        return replace(TASK, constraints=replace(TASK.constraints, memory_bytes=nbytes))

    used = {plan.name: plan.fit.needed_bytes for plan in evaluated(limited(1 << 40), PLATFORM, given)}
    assert used["best"] < used["together"]
    tight = limited(sum(used.values()) // 2)
    plans = evaluated(tight, PLATFORM, given)
    assert [(plan.name, plan.fit.fits) for plan in plans] == [("best", True), ("together", False)]
    assert evaluated_document(tight, plans)["plans"][1]["verdict"]["short_bytes"] > 0


def test_the_page_escapes_names_and_needs_no_network() -> None:
    found, why = answered()
    named = replace(PLATFORM, parts=replace(PLATFORM.parts, name="<script>alert(1)</script>"))
    text = shard_page(Sharding(found, why, named))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "http://" not in text
    assert "https://" not in text
    assert text.count("<svg") >= len(why.ranks)


def with_kind(name: str, kind: str) -> Plan:
    """The tables dealt round, one of them by this kind."""
    ranks = {table.name: index % 4 for index, table in enumerate(TASK.tables)}
    return Plan.from_dict({**ranks, name: {"kind": kind}}, TASK.tables, 4)


def test_copies_of_a_large_table_cost_more_than_its_rows_divided() -> None:
    table = max(TASK.tables, key=lambda one: one.rows * one.dim)
    plans = {kind: with_kind(table.name, kind) for kind in (ROW_WISE, DATA_PARALLEL)}
    assert [item.name for item in evaluated(TASK, PLATFORM, plans)] == [ROW_WISE, DATA_PARALLEL]


def test_searched_plans_have_the_step_that_predict_says() -> None:
    smallest = min(TASK.tables, key=lambda one: one.nbytes).name
    widest = max((table for table in TASK.tables if table.name != smallest), key=lambda one: one.dim).name
    kinds_of = {smallest: (DATA_PARALLEL,), widest: (COLUMN_WISE,)}
    found = search(Task(TASK.model, 4, Constraints(kinds=(TABLE_WISE,), kinds_of=kinds_of)), PLATFORM, SearchBudget(200))
    for option in (*found.options, *filter(None, found.rules.values())):
        assert {DATA_PARALLEL, COLUMN_WISE} < set(option.plan.kinds().values())
        step_ms = predict_on(dlrm_workload(TASK.model, 4, option.plan), PLATFORM).step_time_ms
        assert option.played and ms(option.step_ns) == step_ms
    why = explain(found, Evaluator(TASK.model, PLATFORM, 4))
    alone = predict_on(dlrm_workload(TASK.model, 4, found.best.plan), PLATFORM)
    assert {rank.rank: rank.used_bytes for rank in why.ranks} == {
        one["rank"]: one["peak_bytes"] for one in alone.memory["ranks"]
    }
    assert (why.best.predicted.interval_ms, why.best.predicted.bound) == (alone.interval_ms, alone.bound)
    assert why.interval[0] < 1.0 < why.interval[1]
    assert why.every_rank_tables_ns > 0


@pytest.mark.slow
def test_kinds_on_every_rank_are_chosen_only_where_allowed() -> None:
    allowed = Task(TASK.model, 4, Constraints(kinds=KINDS))
    found = search(allowed, PLATFORM, SearchBudget(800))
    # As many plans of whole tables as the search above asks for before it divides any.
    whole = search(Task(TASK.model, 4, Constraints(kinds=(TABLE_WISE,))), PLATFORM, SearchBudget(400))
    assert found.best.step_ns <= 1.001 * whole.best.step_ns


def test_given_plans_say_what_their_ranks_do_and_why() -> None:
    found, why = answered()
    rule = next(rule for rule in found.rules.values() if rule is not None and rule.plan != found.best.plan)
    best, other = sorted(evaluated(TASK, PLATFORM, {"rule": rule.plan, "best": found.best.plan}), key=lambda given: given.name)
    assert best.why is not None and other.why is not None
    assert best.why == why.best
    assert any(reason.said == "pinned by the task" for reason in best.why.reasons)
    assert other.why.reasons and other.why.ranks != best.why.ranks
    entry = evaluated_document(TASK, [best, other])["plans"][0]
    assert {"bound", "bound_by", "ranks", "reasons", "interval_ms"} <= set(entry)
    assert len(entry["ranks"]) == 4


REGIMES = {"host": {HOST}, "wire": {EXCHANGES, DENSE}, "peers": {HOST, LOOKUPS}}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_what_bounds_a_step_is_part_of_what_the_sentence_says(seed: int) -> None:
    draws = Random(seed)
    on = Platform.load(draws.choice(("4xh200-quarter-loopback", "4xh200-nvlink", "4xh100-nvlink")))
    model = model_of(draws.randint(1, 6), batch=4 * 2 ** draws.randint(4, 14))
    model = replace(model, bottom=(2 ** draws.randint(2, 12),), top=(2 ** draws.randint(2, 12), 1))
    kinds = [draws.choice((draws.randrange(4), {"kind": ROW_WISE}, {"kind": DATA_PARALLEL})) for _ in model.tables]
    plan = Plan.from_dict(dict(zip((table.name for table in model.tables), kinds, strict=True)), model.tables, 4)
    task = Task(model, 4, Constraints(kinds=KINDS))
    why = why_of(PlacedShards(task, Evaluator(model, on, 4), plan))
    assert why.bound in REGIMES.get(why.predicted.bound.kind, {LOOKUPS, DENSE})
    if why.predicted.bound.kind == "peers":
        assert (why.bound == HOST) == ("itself is host-bound" in why.predicted.bound.text)
