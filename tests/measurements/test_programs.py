from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from steptime._program.load import load
from steptime.errors import InputError
from steptime_lab.measurements.shipped import FOLDER, pack, read_programs, shipped, shipped_programs


def a_case(folder: Path, name: str, owners: list[int], text: str = '{"schema":"x"}') -> None:
    traces = folder / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    (traces / f"{name}.programs.json").write_text(json.dumps({"ranks": len(owners), "programs": owners}))
    for owner in set(owners):
        (traces / f"{name}.rank{owner}.et.json.gz").write_bytes(gzip.compress(f"{text}{owner}".encode()))


def test_traces_come_back_for_every_rank_and_are_kept_once_per_program(tmp_path: Path) -> None:
    a_case(tmp_path / "m", "ddp", [0, 0, 0])
    a_case(tmp_path / "m", "sharded", [0, 1, 0])
    assert pack([tmp_path / "m"], tmp_path / "programs.parquet") == 2
    ddp, sharded = read_programs(tmp_path / "programs.parquet")
    assert (ddp.owners, sorted(ddp.traces)) == ((0, 0, 0), [0])
    assert (sharded.owners, sorted(sharded.traces)) == ((0, 1, 0), [0, 1])
    written = sharded.write(tmp_path / "out")
    assert [gzip.decompress(path.read_bytes()).decode()[-1] for path in written] == ["0", "1", "0"]


def test_packing_adds_cases_and_keeps_those_that_are_there(tmp_path: Path) -> None:
    a_case(tmp_path / "m", "old", [0])
    pack([tmp_path / "m"], tmp_path / "programs.parquet")
    a_case(tmp_path / "n", "old", [0], "other")
    a_case(tmp_path / "n", "new", [0])
    assert pack([tmp_path / "n"], tmp_path / "programs.parquet") == 2
    old = read_programs(tmp_path / "programs.parquet", ["old"])[0]
    assert old.traces[0].startswith('{"schema"')


def test_a_case_whose_trace_is_missing_or_torn_is_named(tmp_path: Path) -> None:
    a_case(tmp_path / "m", "torn", [0])
    trace = tmp_path / "m" / "traces" / "torn.rank0.et.json.gz"
    trace.write_bytes(trace.read_bytes()[:20])
    with pytest.raises(InputError, match="programs of torn are incomplete"):
        pack([tmp_path / "m"], tmp_path / "programs.parquet")


def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"name": ["x"]}), tmp_path / "programs.parquet")
    with pytest.raises(InputError, match="version none"):
        read_programs(tmp_path / "programs.parquet")
    (tmp_path / "programs.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_programs(tmp_path / "programs.parquet")


def test_every_shipped_program_belongs_to_a_shipped_step() -> None:
    names = set(shipped("steps")["name"].to_pylist())
    cases = read_programs(FOLDER / "programs.parquet")
    assert cases
    assert {case.name for case in cases} <= names


def test_a_shipped_program_is_a_workload_that_steptime_reads(tmp_path: Path) -> None:
    name = next(case.name for case in read_programs(FOLDER / "programs.parquet") if len(set(case.owners)) == 4)
    paths = shipped_programs(name).write(tmp_path)
    workload = load([str(path) for path in paths])
    assert len(workload.programs) == 4
    kinds = {collective.kind for program in workload.programs for collective in program.collectives}
    assert {"all_to_all", "all_reduce"} <= kinds


def test_a_case_without_programs_is_said() -> None:
    with pytest.raises(InputError, match="no programs of 'nothing'"):
        shipped_programs("nothing")
