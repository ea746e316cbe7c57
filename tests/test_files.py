"""Outputs are complete or as they were, and never replace what is read."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import pytest

from steptime._cli.app import run
from steptime._files import (
    MOST_BYTES,
    check_file_name,
    check_outputs,
    output,
    read_whole,
    refuse_overwriting,
    whole,
    write_output,
)
from steptime.errors import InputError, SteptimeError, printable

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_what_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), output(file) as unfinished:
        unfinished.write_text("half of it")
        raise KeyboardInterrupt
    assert file.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(InputError, match=r"a\.json: cannot be written \(No space left on device\)"), output(file):
        raise OSError(28, "No space left on device")
    assert file.read_text() == "old"


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    write_output(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()


def test_an_output_never_replaces_an_input(tmp_path: Path) -> None:
    read = tmp_path / "run" / "rank0.json"
    read.parent.mkdir()
    read.write_text("recorded")
    with pytest.raises(InputError, match=r"--trace .*rank0\.json: would overwrite what is read"):
        refuse_overwriting({"--html": None, "--trace": tmp_path / "run" / ".." / "run" / "rank0.json"}, (None, read))
    refuse_overwriting({"--trace": tmp_path / "other.json"}, (read,))


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_commands_refuse_to_write_over_what_they_read(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = tmp_path / "run"
    shutil.copytree(EXAMPLES / "prefetch_sync", recording)
    config = tmp_path / "c.toml"
    shutil.copy(EXAMPLES / "configs" / "dlrm_small.toml", config)
    file = recording / "rank0.kineto.json.gz"
    before = file.read_bytes(), config.read_bytes()
    for words in (
        ["predict", file, option, file],
        ["predict", recording, option, file],
        ["predict", config, "--platform", "2xh200-nvlink", option, config],
    ):
        assert run(list(map(str, words))) == 2
        assert "would overwrite what is read" in capsys.readouterr().err
    assert (file.read_bytes(), config.read_bytes()) == before


def test_replay_and_shard_refuse_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.toml"
    shutil.copy(EXAMPLES / "sharding" / "task.toml", task)
    shutil.copytree(EXAMPLES / "prefetch_sync", tmp_path / "run")
    file = tmp_path / "run" / "rank0.kineto.json.gz"
    assert run(["replay", str(tmp_path / "run"), "--trace", str(file)]) == 2
    assert run(["shard", str(task), "--platform", "4xh200-nvlink", "--torchrec", str(task)]) == 2
    assert capsys.readouterr().err.count("would overwrite what is read") == 2


WRITING = (
    "predict JOB --html FILE", "predict JOB --trace FILE", "replay JOB --trace FILE", "capture JOB -o FILE.json",
    "plan JOB --platform 8xh200-nvlink --save FILE", "plan JOB --platform 8xh200-nvlink --html FILE",
    "plan JOB --platform 8xh200-nvlink --torchtitan FILE", "shard JOB --platform 4xh200-nvlink --html FILE",
    "shard JOB --platform 4xh200-nvlink --torchrec FILE", "sweep JOB --platform 1xh200 --csv FILE",
    "sweep JOB --platform 1xh200 --parquet FILE", "sweep JOB --platform 1xh200 --html FILE",
    "sweep JOB --platform 1xh200 --resume FILE", "compare JOB JOB --csv FILE", "compare JOB JOB --html FILE",
    "diff JOB JOB --html FILE",
)  # fmt: skip


@pytest.mark.parametrize("words", WRITING)
def test_where_nothing_can_be_written_is_said_before_the_job_is_read(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "not made" / "answer"
    job = tmp_path / "no job.toml"  # reading it would be an error too
    assert run([each.replace("FILE", str(file)).replace("JOB", str(job)) for each in words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"cannot be written (there is no folder {file.parent})" in error


def test_a_folder_is_no_output_and_a_device_is_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--html .*: cannot be written \(it is a folder\)"):
        check_outputs({"--html": tmp_path}, ())
    check_outputs({"--html": tmp_path / "page.html", "--trace": Path("/dev/null"), "--csv": None}, ())


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/b", "", ".hidden", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="--host"):
        check_file_name("--host", name)


def test_a_fitted_host_stays_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "-o", str(tmp_path / "out"), "--host", "../evil", "--only", "host"]) == 2
    assert "--host '../evil'" in capsys.readouterr().err
    assert not (tmp_path / "evil.json").exists()


def test_errors_do_not_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b[2Jb\tc") == "a\ufffd[2Jb c"
    assert "\x1b" not in str(SteptimeError("file: \x1b[2J is no number"))
    (tmp_path / "rank0.json").write_text('{"schema":"\\u001b[2J","nodes":[]}')
    assert run(["predict", str(tmp_path / "rank0.json"), "--platform", "1xh200"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_full_disk_names_the_file_of_whoever_writes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, whole(tmp_path / "model.json"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "model.json")


def test_two_outputs_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = str(tmp_path / "both.html")
    config = EXAMPLES / "configs" / "dlrm_small.toml"
    assert run(["predict", str(config), "--platform", "2xh200-half-loopback", "--html", both, "--trace", both]) == 2
    assert "both.html: is where --html writes; choose another name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    refuse_overwriting({"--html": Path("/dev/null"), "--trace": Path("/dev/null")}, ())


NAMES = (
    "config.toml",
    "task.json",
    "tables.csv",
    "device.toml",
    "host.json",
    "lookups.json",
    "lookups.json.gz",
    "measured.json",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_description_of_gigabytes_is_refused_before_it_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    with file.open("wb") as sparse:
        if name.endswith(".gz"):
            with gzip.GzipFile(fileobj=sparse, mode="wb", compresslevel=1) as packed:
                packed.write(b'{"tables": [' + bytes(MOST_BYTES))
        else:
            sparse.write(b'{"tables": [')
            sparse.truncate(8 << 30)
    config = str(EXAMPLES / "configs" / "dlrm_small.toml")
    platform = ["--platform", "2xh200-half-loopback"]
    trace = str(EXAMPLES / "prefetch_sync")
    commands = {
        "device.toml": ["predict", config, *platform, "--device", str(file)],
        "host.json": ["predict", config, *platform, "--host", str(file)],
        "lookups.json": ["predict", config, *platform, "--lookups", str(file)],
        "lookups.json.gz": ["predict", config, *platform, "--lookups", str(file)],
        "measured.json": ["replay", trace, "--measured", str(file)],
    }
    assert run(commands.get(name, ["predict", str(file), *platform])) == 2
    assert "more than 256 MiB" in capsys.readouterr().err


def test_a_pipe_is_no_description_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        read_whole(tmp_path / "config.toml")
