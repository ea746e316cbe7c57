"""Laws of the saved form of workloads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.platforms.counting_lookups import steps_of

from steptime._lookups.workload import RankLookups, WorkloadLookups
from steptime._notices import Basis, Caveat
from steptime._program.formats import saved
from steptime._program.load import load
from steptime._program.program import (
    Calls,
    Collective,
    ColumnTable,
    Ops,
    Program,
    Signature,
    Stream,
    Tensor,
    Thread,
    WorkKind,
    Works,
)
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime.errors import InputError

int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(max_size=6)
sizes = st.lists(st.integers(0, 2**21), max_size=3).map(tuple)  # elements that can be counted
tensors = st.builds(
    Tensor, shape=sizes, dtype=text, strides=st.none() | sizes, id=st.none() | int64, storage=st.none() | int64, offset=int64,
    device=st.none() | text,
)  # fmt: skip
scalars = st.none() | st.booleans() | int64 | st.floats(allow_nan=False) | text
values = st.recursive(tensors | scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
signatures = st.builds(Signature, st.lists(values, max_size=2).map(tuple), st.lists(values, max_size=2).map(tuple))
keys = st.one_of(text, st.just("$tuple"))
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.lists(inner, max_size=2).map(tuple), st.dictionaries(keys, inner, max_size=2)
    ),
    max_leaves=4,
)
metas = st.dictionaries(text, nested, max_size=3)
ranks = st.lists(st.integers(0, 99), max_size=3).map(tuple)
collectives = st.builds(
    Collective, text, text, ranks, int64, int64, int64, text, ranks, ranks, st.none() | st.integers(0, 9),
)  # fmt: skip

# Columns that point elsewhere: name -> which table bounds them.
POINTERS = {
    "Ops": {"name": "names", "thread": "threads", "parent": "ops?", "signature": "signatures?", "phase": "phases"},
    "Calls": {
        "kind": "kinds", "api": "names", "thread": "threads", "op": "ops?", "stream": "streams?", "awaits": "works?",
        "after": "calls?",
    },
    "Works": {"kind": "phases", "name": "names", "stream": "streams", "call": "calls?", "collective": "collectives?"},
}  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, rank: int) -> Program:
    count = {name: draw(st.integers(0, 3)) for name in ("ops", "calls", "works")}
    groups = draw(st.lists(collectives, max_size=2, unique_by=lambda each: (each.group, each.ranks, each.sequence)))
    kinds = draw(st.lists(signatures, max_size=2))
    bound = {**count, "names": 2, "threads": 1, "streams": 2, "phases": 4, "kinds": 9}
    bound |= {"collectives": len(groups), "signatures": len(kinds)}

    def filled(kind: type[ColumnTable], length: int) -> dict[str, list[int]]:
        found = {name: draw(st.lists(column(kind, name), min_size=length, max_size=length)) for name in kind.TYPES}
        found["end_ns"] = [start + draw(st.integers(0, 2**50)) for start in found["start_ns"]]
        if kind is Ops:
            found["parent"] = [min(above, row - 1) for row, above in enumerate(found["parent"])]
        if kind is Works:
            met = found["collective"]
            found["collective"] = [at if at not in met[:row] else -1 for row, at in enumerate(met)]  # each once
            described = [at >= 0 for at in found["collective"]]
            found["kind"] = [
                k if k != WorkKind.COLLECTIVE or told else 0 for k, told in zip(found["kind"], described, strict=True)
            ]
        return found

    def column(kind: type[ColumnTable], name: str) -> st.SearchStrategy[int]:
        target = POINTERS[kind.__name__].get(name, "")
        if target:
            return st.integers(-1 if target.endswith("?") else 0, bound[target.rstrip("?")] - 1)
        if name == "start_ns":
            return st.integers(-1, 2**58)
        width = np.iinfo(np.dtype(kind.TYPES[name]))
        return st.integers(int(width.min), int(width.max))

    return Program(
        rank=rank,
        world_size=draw(st.integers(rank + 1, 9)),
        names=("a", draw(text)),
        threads=(Thread(draw(int64), draw(text)),),
        streams=(Stream(7), Stream(8, 1, draw(st.none() | st.integers(0, 2**31 - 1)))),
        ops=Ops.from_columns(filled(Ops, count["ops"])),
        calls=Calls.from_columns(filled(Calls, count["calls"])),
        works=Works.from_columns(filled(Works, count["works"])),
        collectives=tuple(groups),
        signatures=tuple(kinds),
        steps=tuple(dict.fromkeys(draw(ranks))),
        origin_ns=draw(st.integers(-(2**61), 2**61)),
        device_name=draw(text),
        source=draw(text),
        warnings=tuple(draw(st.lists(text, max_size=2))),
        meta=draw(metas),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    some = sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3)))
    few = tuple(draw(programs(rank)) for rank in some)
    return Workload(few, draw(st.integers(9, 12)), draw(text), tuple(draw(st.lists(text, max_size=2))), draw(metas))


def exactly(workload: Workload) -> str:
    """Everything in it, types included: 1, 1.0 and True are told apart."""
    return repr(workload)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(workload=workloads(), form=st.sampled_from(["w.json", "w.json.gz", "folder"]))
def test_what_is_read_is_what_was_written_and_writes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload, form: str
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    first, second = folder / form, folder / f"again-{form}"
    saved.write(workload, first)
    back = load([first])
    assert back == workload
    assert exactly(back) == exactly(workload)
    saved.write(back, second)
    files = [first] if first.is_file() else sorted(first.iterdir())
    again = [second] if second.is_file() else sorted(second.iterdir())
    assert [file.read_bytes() for file in files] == [file.read_bytes() for file in again]


def test_a_workload_carries_its_lookups_unnamed_memory_and_description(tmp_path: Path) -> None:
    carried = Workload(
        (small(),),
        2,
        warnings=(Basis("on h200"), "5 tables", Caveat("runs otherwise")),
        lookups=WorkloadLookups({0: RankLookups("table_batched", "sgd", steps_of((10, 5), (20, 5)))}),
        unnamed={0: UnnamedMemory((1 << 33,), (4,))},
        description=Description(batch=64, precision="fp32", parallelism={"data": 2}, parameters=12),
    )
    saved.write(carried, tmp_path / "w.json.gz")
    back = load([tmp_path / "w.json.gz"])
    assert back == carried
    assert [type(text) for text in back.warnings] == [Basis, str, Caveat]


def test_a_workload_saved_before_it_carried_lookups_is_read() -> None:
    old = load([Path(__file__).parent / "fixtures" / "workload_version_1.json.gz"])
    assert (old.name, old.world_size, len(old.programs)) == ("tiny", 2, 2)
    assert (old.lookups, dict(old.unnamed), old.description) == (None, {}, Description())
    assert all(len(program.ops) for program in old.programs)


def small(rank: int = 0, **more: Any) -> Program:
    return Program(
        rank,
        2,
        ("a",),
        (Thread(1),),
        (Stream(7),),
        Ops.from_columns({}),
        Calls.from_columns({}),
        Works.from_columns({}),
        **more,
    )


def test_ranks_that_share_programs_are_saved_in_one_file(tmp_path: Path) -> None:
    workload = Workload((small(),), 4, owners=(0, 0, 0, 0), groups={"pairs": ((0, 1), (2, 3)), "all": ((0, 1, 2, 3),)})
    saved.write(workload, tmp_path / "w.json.gz")
    back = load([tmp_path / "w.json.gz"])
    assert exactly(back) == exactly(workload)
    with pytest.raises(InputError, match="share programs; save it as one file"):
        saved.write(workload, tmp_path / "folder")


@pytest.mark.parametrize(("key", "value"), [("owners", [0, 1]), ("owners", [7] * 4), ("groups", {"g": [[0, 4]]})])
def test_owners_and_groups_that_name_no_rank_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    file = tmp_path / "w.json"
    saved.write(Workload((small(),), 4, owners=(0, 0, 0, 0)), file)
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError):
        load([file])


def test_columns_in_meta_come_back_as_columns(tmp_path: Path) -> None:
    column = np.array([3, -1], dtype=np.int64)
    saved.write(Workload((small(meta={"external_id": column}),), 2), tmp_path / "w.json")
    back = load([tmp_path / "w.json"]).programs[0].meta["external_id"]
    assert back.dtype == column.dtype and back.tolist() == [3, -1]


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"meta\.x: a object cannot be saved"):
        saved.write(Workload((small(meta={"x": object()}),), 2), tmp_path / "w.json")


def changed(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "w.json"
    saved.write(Workload((small(),), 2), path)
    document = json.loads(path.read_bytes())
    target = document if set(changes) & {saved.KEY, "world_size", "extra", "programs"} else document["programs"][0]
    target.update(changes)
    path.write_text(json.dumps(document))
    return path


ONE_WORK = {name: [0] for name in Works.TYPES}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({saved.KEY: 9}, "version 9, this steptime reads 1 to 4"),
        ({saved.KEY: "x"}, "Expected `int`"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"world_size": "two"}, "world_size"),
        ({"programs": []}, "at least one program"),
        ({"names": [7]}, "Expected `str`"),
        ({"ops": {"name": [0]}}, "of Ops"),
        ({"works": {**ONE_WORK, "stream": [5]}}, r"works.call\[0\] is 0|works.stream\[0\] is 5"),
        ({"works": {**ONE_WORK, "name": [0, 0]}}, "Works"),
        ({"works": {**ONE_WORK, "kind": [300]}}, "damaged"),
        ({"signatures": [[[{"shape": "x", "dtype": "float32"}], []]]}, "shape"),
        ({"signatures": [[[{"shape": [10**39], "dtype": "float32"}], []]]}, "more elements than any memory holds"),
        ({"signatures": [[[{"shape": [2**33, 2**33], "dtype": "float32"}], []]]}, "more elements than any memory holds"),
        ({"signatures": [[[{"shape": [4], "dtype": "float32", "strides": [10**39]}], []]]}, "more elements than any memory"),
        ({"signatures": [[[10**39], []]]}, "a number of 40 digits"),
        ({"works": {**ONE_WORK, "call": [-1], "collective": [-1], "end_ns": [2**62]}}, "span from 0 to"),
        ({"works": {**ONE_WORK, "call": [-1], "collective": [-1], "start_ns": [5]}}, "span from 5 to 0"),
        ({"works": {**ONE_WORK, "call": [-1], "collective": [-1], "kind": [3]}}, "collective that is not described"),
        (
            {
                "works": {name: [0, 0] for name in Works.TYPES} | {"call": [-1, -1]},
                "collectives": [["all_reduce", "dp", [0, 1], 4, 8, 8, "float32", [], [], None]],
            },
            "collective 4 of group 'dp' occurs twice",
        ),
        ({"ops": {name: [0] for name in Ops.TYPES} | {"signature": [-1]}}, "enclosed by itself"),
        ({"rank": 2}, "rank is 2, expected less than 2"),
        ({"steps": [1, 1]}, "step occurs twice"),
        ({"streams": [[7, 0, 2**40]]}, "queue is 1099511627776"),
        ({"meta": {"x": {"$array": ["object", []]}}}, "column of object"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    path = changed(tmp_path, **changes)
    with pytest.raises(InputError, match=expected) as caught:
        load([path])
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_truncation_anywhere_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "w.json.gz"
    saved.write(Workload((small(),), 2), path)
    whole, plain = path.read_bytes(), gzip.decompress(path.read_bytes())
    for data in [*(whole[:cut] for cut in range(len(whole))), *(plain[:cut] for cut in range(len(plain) - 2))]:
        path.write_bytes(data)
        with pytest.raises(InputError) as caught:
            load([path])
        assert "\n" not in str(caught.value)


def test_a_folder_of_two_jobs_is_refused(tmp_path: Path) -> None:
    saved.write(Workload((small(0),), 2, "one"), tmp_path / "rank0.json.gz")
    saved.write(Workload((small(1),), 2, "two"), tmp_path / "rank1.json.gz")
    with pytest.raises(InputError, match="of another job"):
        load([tmp_path])


def test_ranks_left_from_an_earlier_workload_are_not_mixed_in(tmp_path: Path) -> None:
    saved.write(Workload((small(0), small(1)), 2), tmp_path)
    with pytest.raises(InputError, match=r"rank1\.json\.gz"):
        saved.write(Workload((small(0),), 2), tmp_path)


def test_a_place_without_a_workload_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(InputError, match=str(path)):
            load([path])


def test_saved_workloads_are_told_from_traces(tmp_path: Path) -> None:
    saved.write(Workload((small(),), 2), tmp_path / "w.json")
    assert saved.FORMAT.recognises((tmp_path / "w.json").read_bytes(), "w.json")
    assert not saved.FORMAT.recognises(b'{"schemaVersion": 1, "traceEvents": []}', "w.json")
