"""Files that are not what they seem, and the command line on bad ones: nothing hangs, nothing is executed or written."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.program.damaged import WORKS, changed, job, kernel, read, refused
from tests.program.mutations import outcome, strict_json, tar
from tests.program.small_traces import RANKS, Json, small_kineto, small_saved, small_workload

from steptime._program import formats as trace_files
from steptime._program.load import load
from steptime._program.program import WorkKind
from steptime._sim.recorded.replay import replay

# Files that are not what they seem.


def test_a_path_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    refused([tmp_path / "nowhere"], "nowhere", "no such file or folder")


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    refused([tmp_path / "loop.json"], "loop.json", "no such file or folder")
    assert load([job(tmp_path)]).ranks == tuple(range(RANKS))


def test_a_file_that_cannot_be_opened_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank0.json").write_bytes(small_kineto(0))

    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    refused([tmp_path], "rank0.json", "Permission denied")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.json")
    refused([tmp_path / "rank0.json"], "rank0.json", "neither a file nor a folder")
    refused([tmp_path], "no trace files")


@pytest.mark.parametrize("head", [b'{"schema": "1.1.1", "nodes": [', b'{"steptime_workload": 1, '])
def test_a_small_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(trace_files, "WHOLE_BYTES_AT_MOST", 1 << 22)
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(head + b" " * (1 << 23)))
    refused([tmp_path], "rank0.json.gz", "more than")


def test_an_event_without_an_end_is_refused_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime._program.formats.kineto.stream.EVENT_BYTES_AT_MOST", 1 << 22)
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X", "name": "' + b"x" * (1 << 24)))
    refused([tmp_path], "rank0.json.gz", "no end of an event")


def test_nothing_of_an_archive_is_ever_written_to_disk(tmp_path: Path) -> None:
    names = ("/rank0.json", "../../rank1.json", "a/../../rank2.json", "rank3\nodd.json")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "run.tar.gz").write_bytes(tar({name: small_kineto(rank) for rank, name in enumerate(names)}))
    assert load([inside]).ranks == tuple(range(RANKS))
    assert [p.name for p in tmp_path.rglob("*")] == ["inside", "run.tar.gz"]


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"\x80\0\0\0\x7f" + b"\xff" * 7])
def test_an_archive_with_an_absurd_size_in_it_ends_in_one_clear_line(tmp_path: Path, kind: bytes, size: bytes) -> None:
    data = bytearray(tar({"rank0.json": small_kineto(0)}, "w"))
    data[124:136], data[156:157], data[148:156] = size, kind, b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "run.tar").write_bytes(data)
    refused([tmp_path], "run.tar")


def test_members_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in (("rank8.json", tarfile.SYMTYPE), ("rank9.json", tarfile.CHRTYPE), ("dir.json", tarfile.DIRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    (tmp_path / "run.tar").write_bytes(buffer.getvalue())
    refused([tmp_path], "run.tar", "no trace files inside")


# Damage that used to take minutes.

SLOW = {
    "events that are all broken": b'{"traceEvents": [' + b'{"ph": "X", "name": tru},' * 40_000 + b'{"ph": "X"}]}',
    "one endless nest": b'{"traceEvents": [' + b'{"ph": [{},' * 100_000,
    "spaces behind the end": b'{"traceEvents": [{"ph": "X"}]' + b" " * 60_000 + b"x",
    "no event at all": b'{"traceEvents": [' + b"},{" * 300_000,
    "nodes that never end": b'{"schema": "1.1.1", "nodes": [' + b'{"id": 1, "name": "x",' * 40_000,
    "nodes in nodes": b'{"schema": "1.1.1", "nodes": [' + b'{"id": 1, "name": [' * 40_000,
}


@pytest.mark.parametrize("what", SLOW)
def test_a_megabyte_of_damage_is_one_clear_line(tmp_path: Path, what: str) -> None:
    (tmp_path / "rank0.json").write_bytes(SLOW[what])
    refused([tmp_path], "rank0.json")


def test_thousands_of_streams_are_read(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        works = [e for e in document["traceEvents"] if e.get("cat") in WORKS]
        for number, event in enumerate(works * 20):
            document["traceEvents"].append({**event, "args": {**event["args"], "stream": 100 + number, "correlation": -1}})

    workload = read(tmp_path, changed(change))
    assert len(workload.programs[0].streams) > 1_000


def test_a_group_as_large_as_the_largest_job_is_described_once(tmp_path: Path) -> None:
    def change(document: Json) -> None:
        document["distributedInfo"]["world_size"] = 10**5
        for event in document["traceEvents"]:
            if "Process Group Ranks" in event.get("args", {}):
                event["args"].update({"Process Group Ranks": "[0, 1, ...]", "Process Group Name": "all", "Group size": 10**5})

    program = read(tmp_path, changed(change)).programs[0]
    assert len({id(c.ranks) for c in program.collectives}) == 1


# The command line.

COMMANDS = ("inspect", "replay", "predict")


def steptime(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from steptime._cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip


BAD_FILES = {
    "cut.json.gz": gzip.compress(small_kineto(0), mtime=0)[:14],
    "broken.json": b'{"traceEvents": [' + b"\\\xff{" * 100,
    "saved.json": small_saved()[:-100],
    "nodes.json": b'{"schema": "1.1.1", "nodes": [{"id": "a"}]}',
    "archive.tar.gz": tar({"rank0.json": small_kineto(0)})[:500],
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_ends_every_command_with_one_line_and_exit_code_two(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BAD_FILES[name])
    command = COMMANDS[list(BAD_FILES).index(name) % len(COMMANDS)]
    done = steptime(command, str(tmp_path / name))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_trace_ends_with_exit_code_zero_and_says_what_was_lost(tmp_path: Path, command: str) -> None:
    (tmp_path / "rank0.json").write_bytes(small_kineto(0)[:-40_000])
    done = steptime(command, str(tmp_path / "rank0.json"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert any("breaks off before its end" in warning for warning in strict_json(done.stdout)["warnings"])


def test_names_from_a_trace_are_not_commands_for_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_bytes(changed(lambda d: kernel(d).update(name="evil\x1b[2J\nname", dur=20_000)))
    for command in COMMANDS:
        done = steptime(command, str(tmp_path / "rank0.json"))
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout


def test_nothing_read_is_ever_executed() -> None:
    source = Path(__file__).parents[2] / "src" / "steptime"
    reading = ("graph", "models", "sim", "validate", "report", "cli")
    forbidden = ("eval(", "exec(", "pickle", "marshal", "shelve", "yaml", "__import__", "os.system", "subprocess", "extractall")
    for file in (file for part in reading for file in (source / part).rglob("*.py")):
        # Arrays are read with what forbids it.
        text = file.read_text().replace("allow_pickle=False", "")
        assert not [word for word in forbidden if word in text], file


def test_untouched_small_traces_give_results_without_a_word() -> None:
    workload = small_workload()
    assert workload.warnings == ()
    assert all(set(WorkKind) == {WorkKind(kind) for kind in p.works.kind.tolist()} for p in workload.programs)
    assert all(abs(step.error) < 0.1 for step in replay(workload).steps)


def test_the_example_itself_gives_a_result() -> None:
    assert outcome([Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"]) == "result"
