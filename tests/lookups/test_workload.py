"""Lookups of a workload: what is saved comes back, and what is wrong in a file is one line that says where."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.platforms.counting_lookups import looked_up, steps_of

from steptime._lookups.workload import RankLookups, StepLookups, WorkloadLookups
from steptime._models.lookups.question import rank_questions
from steptime.errors import InputError

TWO_TABLES = StepLookups(tuple((looked_up(n, 4, "a"), looked_up(2 * n, 8, "b")) for n in (10, 20, 30)))
LOOKUPS = WorkloadLookups(
    {
        3: RankLookups("embedding_bag", "adagrad", TWO_TABLES, "bfloat16", weighted=True),
        0: RankLookups("table_batched", "sgd", steps_of((10, 5), (20, 5), (40, 5))),
    }
)

Change = Callable[[dict[str, Any]], object]

BAD: dict[str, tuple[Change, str]] = {
    "version": (lambda d: d.update(schema_version=9), "schema_version is 9; this release reads 1"),
    "keys": (lambda d: d.update(more=1), "expected a JSON object with schema_version and ranks"),
    "ranks": (lambda d: d.update(ranks={}), "ranks is dict; expected a list of objects"),
    "none": (lambda d: d.update(ranks=[]), "no rank; expected at least one"),
    "entry": (lambda d: d["ranks"].append(7), r"ranks\[2\]: int found"),
    "missing": (lambda d: d["ranks"][1].pop("dtype"), r"ranks\[1\]: 'dtype' is missing"),
    "unknown": (lambda d: d["ranks"][1].update(colour=1), r"ranks\[1\]: 'colour' is unknown"),
    "rank": (lambda d: d["ranks"][1].update(rank=-1), r"ranks\[1\]: rank is -1; expected a whole number"),
    "truth": (lambda d: d["ranks"][1].update(rank=True), r"ranks\[1\]: rank is True"),
    "twice": (lambda d: d["ranks"][1].update(rank=0), r"ranks\[1\]: rank 0 is there twice"),
    "list": (lambda d: d["ranks"][1].update(dtype=["float32"]), r"rank 3: dtype is \['float32'\]; expected a name"),
    "dtype": (lambda d: d["ranks"][1].update(dtype="int4"), "rank 3: Lookups of a rank: dtype is 'int4'; expected"),
    "implementation": (lambda d: d["ranks"][1].update(implementation="magic"), "rank: implementation is 'magic'"),
    "optimizer": (lambda d: d["ranks"][0].update(optimizer="lamb"), "rank 0: Lookups of a rank: optimizer is 'lamb'"),
    "weighted": (lambda d: d["ranks"][1].update(weighted=1), "rank 3: weighted is 1; expected true or false"),
    "steps": (lambda d: d["ranks"][1].update(steps=[]), "rank 3: expected a JSON object with schema_version and steps"),
    "iterations": (lambda d: d["ranks"][1]["steps"]["steps"].pop(), "rank 3 has 2 iterations where rank 0 has 3"),
    "empty": (lambda d: d["ranks"][1]["steps"].update(steps=[[], [], []]), "rank 3: Lookups of a rank: no table"),
    "tables": (lambda d: d["ranks"][1]["steps"]["steps"][2].reverse(), "rank 3: Step lookups: iteration 2 has the table"),
    "position": (
        lambda d: d["ranks"][1]["steps"]["steps"][1][0]["reuse"].__setitem__(5, -0.5),
        r"rank 3, iteration 1, table 0: reuse\[5\] is -0.5; expected a number of 0 or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["lookups.json", "lookups.json.gz"])
def test_what_is_saved_comes_back(name: str, tmp_path: Path) -> None:
    LOOKUPS.save(tmp_path / name)
    found = WorkloadLookups.load(tmp_path / name)
    assert found == LOOKUPS
    found.save(tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()
    raw = (tmp_path / name).read_bytes()
    assert json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)["schema_version"] == 1


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_one_line_that_says_where(what: str, tmp_path: Path) -> None:
    change, said = BAD[what]
    document = copy.deepcopy(LOOKUPS.to_dict())
    change(document)
    file = tmp_path / "lookups.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        WorkloadLookups.load(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(str(file)) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe"])
def test_a_file_that_holds_something_else_is_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lookups.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"lookups\.json"):
        WorkloadLookups.load(file)


def test_one_launch_is_asked_with_all_its_tables_and_bags_one_by_one() -> None:
    together = rank_questions(RankLookups("table_batched", "rowwise_adagrad", TWO_TABLES), "backward")
    assert [[len(lookup.tables) for lookup in iteration] for iteration in together] == [[2], [2], [2]]
    assert {lookup.optimizer for iteration in together for lookup in iteration} == {"rowwise_adagrad"}
    apart = rank_questions(LOOKUPS.ranks[3], "forward")
    assert [[lookup.tables[0].lookups for lookup in iteration] for iteration in apart] == [[10, 20], [20, 40], [30, 60]]
    assert {(lookup.optimizer, lookup.dtype, lookup.weighted) for one in apart for lookup in one} == {
        ("none", "bfloat16", True)
    }


def test_every_rank_has_the_same_iterations() -> None:
    with pytest.raises(InputError, match="rank 1 has 1 iterations where rank 0 has 2; expected the same"):
        WorkloadLookups({0: RankLookups("table_batched", "sgd", steps_of((1, 1), (2, 2))),
                         1: RankLookups("table_batched", "sgd", steps_of((1, 1)))})  # fmt: skip
    assert LOOKUPS.iterations == 3
