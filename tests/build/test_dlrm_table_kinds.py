"""Tables in fewer bits, with states, weights and sequences, looked up by FBGEMM or by our own kernel: what is built of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from steptime._build.dlrm.config import dlrm_of
from steptime._build.dlrm.model import FUSED, LOOKUPS, OPTIMIZERS, TABLE_DTYPES, Dlrm
from steptime._build.dlrm.workload import dlrm_workload
from steptime._models.estimate import Source
from steptime._models.lookups.fbgemm import lookups_in, of_question
from steptime._models.lookups.question import BACKWARD, FORWARD, rank_questions
from steptime._models.memory.peak import peak_memory
from steptime._platforms.platform import Platform
from steptime._program.one_step import one_step
from steptime._program.workload import Workload
from steptime._shard.configs import placed
from steptime._sim.modelled.device_work import device_work
from steptime._sim.modelled.issue import OpWork
from steptime.errors import InputError

H200 = Platform.load("4xh200-nvlink")
VALUES: dict[str, Any] = {"batch": 4096, "dense_features": 8, "bottom": [64, 64], "top": [64, 1], "interaction": "cat"}


def table(name: str, **changes: Any) -> dict[str, Any]:
    skew = {"kind": "zipf", "alpha": 1.05}
    return {"name": name, "rows": 100_000, "dim": 64, "pooling_factor": 8, "skew": skew, **changes}


def model(*tables: dict[str, Any], **changes: Any) -> Dlrm:
    return dlrm_of({**VALUES, "tables": list(tables) or [table("a"), table("b", rows=300_000)], **changes}).model


def lookup_works(workload: Workload) -> list[OpWork]:
    """Of the first program, in order."""
    (found,) = device_work([one_step(workload.programs[0])], H200.device, workload.lookups)
    return [work for work in found.works if work.group.startswith("lookup")]


def times(built: Dlrm) -> dict[str, float]:
    works = lookup_works(dlrm_workload(built))
    return {way: sum(work.estimate.time_ns for work in works if way in work.group) for way in (FORWARD, BACKWARD)}


@pytest.mark.parametrize(("precision", "row"), [("fp32", 256), ("fp16", 128), ("bf16", 128), ("int8", 72)])
def test_rows_take_the_bytes_of_their_precision(precision: str, row: int) -> None:
    built = model(table_precision=precision)
    assert [each.nbytes for each in built.tables] == [100_000 * row, 300_000 * row]
    assert dlrm_workload(built).unnamed[0].parameters == (400_000 * row,)


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("rowwise_adagrad", 4), ("adagrad", 256), ("adam", 512)])
def test_an_optimiser_keeps_its_state_in_fp32(optimizer: str, state: int) -> None:
    built = model(optimizer=optimizer, table_precision="fp16")
    assert [built.state_bytes(each) for each in built.tables] == [100_000 * state, 300_000 * state]
    assert dlrm_workload(built).unnamed[0].optimizer_state == ((400_000 * state,) if state else ())


@pytest.mark.parametrize("precision", TABLE_DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_of_fbgemms_tables_is_that_of_ours(precision: str, optimizer: str) -> None:
    peaks = []
    for lookup in ("table_batched", "fbgemm"):
        workload = dlrm_workload(model(lookup=lookup, optimizer=optimizer, table_precision=precision))
        unnamed = workload.unnamed.get(0)
        beside = 0 if unnamed is None else sum(unnamed.parameters) + sum(unnamed.optimizer_state)
        peaks.append(peak_memory(workload.programs[0]).allocated + beside)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)


@pytest.mark.parametrize("precision", TABLE_DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_fbgemms_ops_tell_what_the_config_says(precision: str, optimizer: str, weighted: bool) -> None:
    tables = (table("a", weighted=weighted), table("b", rows=300_000, weighted=weighted))
    workload = dlrm_workload(model(*tables, lookup="fbgemm", optimizer=optimizer, table_precision=precision))
    assert workload.lookups is not None
    (asked,) = rank_questions(workload.lookups.ranks[0], BACKWARD)[0]
    read = lookups_in(workload.programs[0])
    assert list(read.values()) == [of_question(asked)] * 2


@pytest.mark.parametrize("lookup", ["table_batched", "fbgemm"])
def test_more_bytes_never_take_less_time(lookup: str) -> None:
    by_precision = [times(model(lookup=lookup, table_precision=each)) for each in ("fp16", "int8")]
    assert all(by_precision[0][way] >= by_precision[1][way] for way in (FORWARD, BACKWARD))
    by_optimizer = [times(model(lookup=lookup, optimizer=each))[BACKWARD] for each in ("sgd", "adagrad", "adam")]
    assert by_optimizer == sorted(by_optimizer)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, Source.FITTED),
        ({"optimizer": "rowwise_adagrad"}, Source.FITTED),
        ({"table_precision": "bf16"}, Source.FITTED),
        ({"optimizer": "adam"}, Source.ANALYTIC),
        ({"table_precision": "fp16", "optimizer": "rowwise_adagrad"}, Source.ANALYTIC),
        ({"lookup": "fbgemm"}, Source.ANALYTIC),
    ],
)
def test_what_nobody_measured_is_said_to_be_analytic_and_is_wider(changes: dict[str, Any], source: Source) -> None:
    backward = next(work for work in lookup_works(dlrm_workload(model(**changes))) if work.group.endswith(BACKWARD)).estimate
    assert backward.source is source
    wide = backward.high_ns / backward.low_ns
    assert wide >= 3.9 if source is Source.ANALYTIC else wide < 2


def test_rows_that_are_not_summed_go_on_one_by_one() -> None:
    pooled, sequences = (model(table("a", pooled=pooled), table("b")) for pooled in (True, False))
    assert [each.columns for each in sequences.tables] == [8 * 64, 64]
    sent = []
    for built in (pooled, sequences):
        workload = dlrm_workload(built, 2, {"a": 0, "b": 1})
        exchange = next(comm for comm in workload.programs[0].collectives if comm.kind == "all_to_all")
        sent.append(exchange.bytes_in)
    assert sent == [4096 * 64 * 4, 8 * 4096 * 64 * 4]


def test_tables_of_several_kinds_are_looked_up_kind_by_kind() -> None:
    tables = table("a", precision="fp16"), table("b"), table("c", precision="fp16"), table("d", weighted=True)
    workload = dlrm_workload(model(*tables))
    assert workload.lookups is not None
    first = workload.lookups.ranks[0]
    groups = [(group.dtype, group.weighted, group.steps.tables) for group in (first, *first.then)]
    assert groups == [("float16", False, ("a", "c")), ("float32", False, ("b",)), ("float32", True, ("d",))]
    assert [work.group for work in lookup_works(workload)] == ["lookup forward"] * 3 + ["lookup backward"] * 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lookup", ["table_batched", "fbgemm"])
def test_copies_are_reduced_and_updated_whole(lookup: str, optimizer: str) -> None:
    built = model(lookup=lookup, optimizer=optimizer)
    workload = dlrm_workload(built, 2, {"a": {"kind": "data_parallel"}, "b": {"kind": "row_wise"}})
    reduced = [comm.bytes_in for comm in workload.programs[0].collectives if comm.kind == "all_reduce"]
    assert max(reduced) == 100_000 * 64 * 4
    assert len(lookup_works(workload)) == 4


def test_what_is_unusual_is_kept_and_what_is_usual_is_not_written() -> None:
    built = model(table("a", precision="int8", weighted=True), table("b", pooled=False))
    assert Dlrm.from_dict(json.loads(built.to_json())) == built
    usual = replace(built, tables=model().tables)
    assert all(set(each) == {"name", "dim", "generator"} for each in usual.to_dict()["tables"])


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"lookup": "embedding_bag", "table_precision": "fp16"}, 'table \'a\' has precision "fp16", which lookup "embedding_bag"'),
    ({"lookup": "embedding_bag", "optimizer": "adam"}, 'optimizer "adam" is not built with lookup "embedding_bag"'),
    ({"table_precision": "fp64"}, "table_precision is 'fp64'"),
    ({"tables": [table("a", precision=8)]}, "precision is 8"),
    ({"tables": [table("a", weighted=1)]}, "weighted is 1; expected true or false"),
    ({"tables": [table("a", pooled=False, pooling_factor=1.5)]}, "is not pooled, with 1.5 lookups a sample"),
    ({"tables": [table("a", pooled=False)], "plan": {"a": {"kind": "row_wise"}}}, "its rows are not summed"),
    (
        {"tables": [table("a", precision="int8")], "ranks": 2, "plan": {"a": {"kind": "data_parallel"}}},
        "rows in int8 have no gradient",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=[expected for _, expected in MISTAKES])
def test_a_mistake_is_one_line(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        model(**changes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_values_are_built_or_refused_in_one_line() -> None:
    draws = random.Random(5)
    odd: list[Any] = [None, 0, -1, 1.5, True, "", "fp8", [], {}, float("nan")]
    switch = [True, False]
    good: dict[str, list[Any]] = {
        "lookup": list(LOOKUPS), "optimizer": list(OPTIMIZERS), "table_precision": list(TABLE_DTYPES), "fused": switch,
        "precision": ["fp32", *FUSED], "cuda_graph": switch, "presorted": switch, "rule": ["copied_and_split", "naive"],
    }  # fmt: skip
    of_table: dict[str, list[Any]] = {"precision": list(TABLE_DTYPES), "weighted": switch, "pooled": switch}

    def drawn(known: dict[str, list[Any]]) -> dict[str, Any]:
        some = draws.sample(list(known), draws.randint(0, len(known)))
        return {key: draws.choice(odd) if draws.random() < 0.1 else draws.choice(known[key]) for key in some}

    built = 0
    for _ in range(500):
        tables = [table(name, rows=50, **drawn(of_table)) for name in "ab"]
        try:
            config = dlrm_of({**VALUES, "tables": tables, "batch": 16, **drawn(good)})
            placed(config, draws.choice([1, 2, 16]))
            built += 1
        except InputError as error:
            assert "\n" not in str(error)
    assert built > 80
