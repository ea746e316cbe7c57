"""`steptime fabric`: a fabric of one's own from nccl-tests, from measured rows and from a data sheet, in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from steptime._cli.app import run
from steptime._measurements.sets import COLLECTIVES, NAME, RECIPE_COLUMNS
from steptime._measurements.store import write_part
from steptime._models.collectives.message import Message
from steptime._models.estimate import Source
from steptime._platforms.fabric import Fabric

Captured = pytest.CaptureFixture[str]

MIB = 1 << 20
SIZES = [1 << power for power in range(10, 28)]


def text_log(hosts: int, per_host: int, program: str, byte_ns: float, sizes: list[int] | None = None) -> str:
    """What nccl-tests prints of links of 10 us and so many ns a byte."""
    lines = ["# nccl-tests version 2.17.9 nccl-headers=22902 nccl-library=22902", f"# Collective test starting: {program}_perf"]
    lines += [
        f"#  Rank {rank} Group 0 Pid 1 on host{rank // per_host} device {rank % per_host} [0000:01:00] NVIDIA H100"
        for rank in range(hosts * per_host)
    ]
    lines.append("# size count type redop root time algbw busbw #wrong time algbw busbw #wrong")
    for size in sizes or SIZES:
        us = 10 + byte_ns * size / 1e3
        lines.append(f"{size} {size} int8 none -1 {us:.2f} 1 1 0 {us:.2f} 1 1 0")
    return "\n".join(lines) + "\n"


def json_log(ranks: int, program: str, byte_ns: float) -> str:
    devices = [{"hostname": "host0", "device_info": "NVIDIA H100"} for _ in range(ranks)]
    results = [{"size": size, "out_of_place": {"time": 10 + byte_ns * size / 1e3}} for size in SIZES]
    return json.dumps(
        {
            "args": [f"build/{program}_perf"],
            "nccl_version": 22902,
            "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
            "results": results,
        }
    )


def measured_folder(folder: Path, fabrics: tuple[str, ...] = ("default",)) -> Path:
    """What `steptime measure collectives` leaves of links of 20 us and half a ns a byte."""
    measured = COLLECTIVES
    said: dict[str, Any] = {column.name: "" if column.type == NAME else 0 for column in RECIPE_COLUMNS}
    said |= {"mode": "stream", "beside": "none", "host_threads": "idle", "arrival": "together", "share": 1}
    said |= {"device": "NVIDIA H100", "nccl": "2.28.9", "date": "2026-11-15", "command": "steptime measure collectives -o DIR"}
    said |= {"run": "r", "process": "p", "settings": "{}", "dtype": "float32"}
    rows = [
        {**said, "fabric": fabric, "collective": kind, "ranks": ranks, "bytes": size, "times_ns": [2e4 + 0.5 * size] * 3}
        for fabric in fabrics
        for kind in ("all_reduce", "all_to_all")
        for ranks in (2, 4)
        for size in SIZES
    ]
    write_part(folder / "collectives" / "r-p-0000.parquet", pa.Table.from_pylist(rows, schema=measured.schema))
    return folder


def test_text_and_json_of_nccl_tests_become_a_fabric_of_several_nodes(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "inside.log").write_text(text_log(1, 4, "alltoall", 0.003) + "4096 cut off\n")
    (tmp_path / "inside.json").write_text(json_log(4, "all_reduce", 0.008))
    (tmp_path / "across.log").write_text(text_log(2, 1, "sendrecv", 0.025))
    files = [str(tmp_path / name) for name in ("inside.log", "inside.json", "across.log")]
    out = tmp_path / "own"
    assert run(["fabric", *files, "-o", str(out), "--name", "mine", "--gpus-per-node", "8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(out / "mine.toml")
    assert (said["gpus_per_node"], said["nodes"]) == (8, 2)
    assert {(one["kind"], one["tier"]) for one in said["errors"]} == {
        ("all_to_all", "node"),
        ("all_reduce", "node"),
        ("send_recv", "network"),
    }
    # The rows are a law without noise, of which curves are off by little where they did not see it.
    assert all(0 < one["gmae"] <= one["max"] < 0.05 and one["rows"] >= 10 for one in said["errors"])
    assert "1 rows were damaged" in said["warnings"][0]
    fabric = Fabric.load(said["file"])
    (found,) = fabric.estimates([Message("all_to_all", 4, 64 * MIB)])
    assert found.source is Source.FITTED
    assert found.time_ns == pytest.approx(1e4 + 0.003 * 64 * MIB, rel=0.03)
    assert found.low_ns < found.time_ns < found.high_ns
    (spanning,) = fabric.estimates([Message("all_to_all", 16, 64 * MIB)])
    assert spanning.time_ns == pytest.approx(1e4 + 0.025 * 32 * MIB, rel=0.1)


def test_errors_of_the_fit_are_printed_by_collective(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "a.log"
    file.write_text(text_log(1, 8, "all_reduce", 0.01) + text_log(1, 8, "all_gather", 0.01))
    assert run(["fabric", str(file), "-o", str(tmp_path), "--name", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind in ("all_reduce", "all_gather"):
        (line,) = [line.split() for line in lines if line.split()[:1] == [kind]]
        assert line[1:3] == ["node", "8"]
        assert line[5] == "%"
    assert any("mine.toml" in line for line in lines)


def test_a_measured_folder_becomes_a_fabric(tmp_path: Path, capsys: Captured) -> None:
    folder = measured_folder(tmp_path / "rows")
    words = ["fabric", str(folder), "-o", str(tmp_path), "--name", "box", "--gpus-per-node", "8"]
    assert run(words) == 0
    assert "all_to_all" in capsys.readouterr().out
    fabric = Fabric.load(str(tmp_path / "box.toml"))
    assert (fabric.limits.ranks, fabric.limits.tiers[0].kind) == (8, "nvswitch")
    assert "steptime measure collectives" in fabric.limits.published[0].source
    assert fabric.limits.published[0].date == "2026-11-15"
    (found,) = fabric.estimates([Message("all_reduce", 4, MIB)])
    assert found.time_ns == pytest.approx(2e4 + 0.5 * MIB, rel=0.05)
    assert not fabric.estimates([Message("all_reduce", 8, MIB)])[0].inside


def test_a_folder_with_several_fabrics_needs_to_know_which(tmp_path: Path, capsys: Captured) -> None:
    folder = str(measured_folder(tmp_path / "rows", ("loopback", "loopback-2x2")))
    assert run(["fabric", folder, "-o", str(tmp_path), "--name", "box"]) == 2
    assert "rows of the fabrics loopback, loopback-2x2; say which one with --of" in capsys.readouterr().err
    assert run(["fabric", folder, "-o", str(tmp_path), "--name", "box", "--of", "rope"]) == 2
    assert "no rows of fabric 'rope'" in capsys.readouterr().err
    assert run(["fabric", folder, "-o", str(tmp_path), "--name", "box", "--of", "loopback-2x2", "--links", "loopback"]) == 0
    assert Fabric.load(str(tmp_path / "box.toml")).limits.tiers[0].kind == "loopback"


def test_kinds_that_were_not_timed_come_from_a_fabric_like_it(tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "all_gather.log"
    log.write_text(text_log(1, 4, "all_gather", 0.004), encoding="utf-8")
    words = ["fabric", str(log), "-o", str(tmp_path), "--name", "mine"]
    assert run([*words, "--like", "h100-nvlink"]) == 0
    capsys.readouterr()
    mine, like = Fabric.load(tmp_path / "mine.toml"), Fabric.load("h100-nvlink")
    assert mine.limits.like == "h100-nvlink"
    asked = [Message(kind, 4, 64 * MIB) for kind in ("all_gather", "all_reduce", "send_recv")]
    own, other = mine.estimates(asked), like.estimates(asked)
    # As much faster or slower as what was timed.
    assert own[1].time_ns / other[1].time_ns == pytest.approx(own[0].time_ns / other[0].time_ns, rel=0.1)
    assert own[0].inside
    assert not own[1].inside
    assert run([*words, "--like", "h300-nvlink"]) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    sheet = ["--bandwidth", "450", "--latency", "8", "--ranks", "8", "-o", str(tmp_path), "--name", "paper"]
    assert run(["fabric", *sheet, "--like", "h100-nvlink"]) != 0
    assert "--like" in capsys.readouterr().err


def test_a_data_sheet_becomes_a_labelled_fabric(tmp_path: Path, capsys: Captured) -> None:
    words = ["fabric", "--bandwidth", "450", "--latency", "8", "--ranks", "8", "-o", str(tmp_path), "--name", "paper"]
    assert run(words) == 0
    assert "nothing was measured" in capsys.readouterr().out
    fabric = Fabric.load(str(tmp_path / "paper.toml"))
    tier = fabric.limits.tiers[0]
    assert (tier.bandwidth_bytes_per_s.value, tier.latency_ns.value, tier.ranks) == (450e9, 8e3, 8)
    (ours,) = fabric.estimates([Message("all_reduce", 8, 256 * MIB)])
    (known,) = Fabric.load("h100-nvlink").estimates([Message("all_reduce", 8, 256 * MIB)])
    assert ours.source is Source.ANALYTIC
    assert ours.low_ns < known.time_ns < ours.high_ns


def test_a_data_sheet_of_several_nodes_has_a_network(tmp_path: Path) -> None:
    words = ["fabric", "--bandwidth", "450", "--latency", "8", "--ranks", "32", "--gpus-per-node", "8"]
    words += ["--network-bandwidth", "50", "--network-latency", "20", "-o", str(tmp_path), "--name", "paper"]
    assert run(words) == 0
    fabric = Fabric.load(str(tmp_path / "paper.toml"))
    assert (fabric.limits.nodes, fabric.limits.rails, fabric.limits.ranks) == (4, 8, 32)
    inside, across = (fabric.estimates([Message("all_to_all", ranks, 256 * MIB)])[0].time_ns for ranks in (8, 32))
    assert across > 3 * inside


BAD: tuple[tuple[list[str], str], ...] = (
    ([], "--name is missing"),
    (["--name", "x"], "nothing to make a fabric from"),
    (["--name", "a/b", "LOG"], "--name 'a/b'"),
    (["--name", "x", "nowhere.log"], "nowhere.log: no such file or folder"),
    (["--name", "x", "EMPTY"], "nothing that nccl-tests printed is in it"),
    (["--name", "x", "FOLDER"], "no rows of `steptime measure collectives`"),
    (["--name", "x", "LOG", "FOLDER"], "is a folder; give one folder"),
    (["--name", "x", "FEW"], "with 3 sizes or more"),
    (["--name", "x", "LOG", "--ranks", "8"], "--ranks: is for a fabric from a data sheet"),
    (["--name", "x", "LOG", "--of", "loopback"], "--of: is for a folder"),
    (["--name", "x", "LOG", "--links", "rope"], "--links rope: expected one of nvlink, nvswitch, pcie, loopback"),
    (["--name", "x", "LOG", "--gpus-per-node", "0"], "--gpus-per-node 0"),
    (["--name", "x", "LOG", "--gpus-per-node", "4"], "nothing timed within one"),
    (["--name", "x", "LOG", "-o", "LOG"], "is a file; expected a folder"),
    (["--name", "x", "--bandwidth", "450"], "--latency is missing"),
    (["--name", "x", "--bandwidth", "0", "--latency", "8", "--ranks", "8"], "--bandwidth is 0, expected 0.001 to 1e+06 GB/s"),
    (["--name", "x", "--bandwidth", "450", "--latency", "nan", "--ranks", "8"], "--latency 'nan': expected a time"),
    (["--name", "x", "--bandwidth", "450", "--latency", "8", "--ranks", "1"], "--ranks 1: a fabric joins 2 to 131,072"),
    (["--name", "x", "--bandwidth", "1", "--latency", "8", "--ranks", "8", "--gpus-per-node", "3"], "whole nodes of 3"),
    (["--name", "x", "--bandwidth", "1", "--latency", "8", "--ranks", "8", "--gpus-per-node", "0"], "--gpus-per-node 0"),
    (["--name", "x", "--bandwidth", "1", "--latency", "8", "--ranks", "0"], "--ranks 0: a fabric joins 2 to 131,072"),
    (["--name", "x", "--bandwidth", "1", "--latency", "8", "--ranks", "8", "--gpus-per-node", "4"], "--network-bandwidth"),
)


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("LOG").write_text(text_log(1, 8, "all_reduce", 0.01))
    Path("FEW").write_text(text_log(1, 8, "all_reduce", 0.01, sizes=[1024, 2048]))
    Path("EMPTY").touch()
    Path("FOLDER").mkdir()
    assert run(["fabric", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not Path("x.toml").exists()
