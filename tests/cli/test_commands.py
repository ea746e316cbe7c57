"""Commands: answers on stdout, one line on stderr for whatever a user can get wrong, and the exit codes that go with it."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import steptime
from steptime._cli import app, output
from steptime._cli.app import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"
SOURCE = Path(steptime.__file__).parent.parent

# What is said about each thing that can be wrong; `bad` has the arguments.
BAD = (
    "no such file", "no trace files", "empty", "not a Kineto", "no platform", "was never run", "batch 64: a recording",
    "cannot be written", "cannot be read", "no device times", "Missing argument", "No such command", "No such option",
)  # fmt: skip

Captured = pytest.CaptureFixture[str]


def process(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from steptime._cli import main; main()", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE)}


@pytest.mark.parametrize("command", ["predict", "replay", "inspect"])
def test_json_is_all_there_is_on_stdout(command: str, capsys: Captured) -> None:
    assert run([command, str(EXAMPLE), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema_version"] == 1
    assert err == ""


@pytest.mark.parametrize("command", ["predict", "replay", "inspect"])
def test_text_names_what_was_read(command: str, capsys: Captured) -> None:
    assert run([command, str(EXAMPLE)]) == 0
    assert f"steptime {command} · h200_mps4_dlrm · 4 of 4 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["predict", "replay"])
def test_the_timeline_is_written_and_its_place_said_last(command: str, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "t.json"
    assert run([command, str(EXAMPLE), "--trace", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    out = capsys.readouterr().out
    assert out.rindex("Bound by") < out.rindex("Timeline")
    assert "ui.perfetto.dev" in out


@pytest.mark.parametrize("command", ["predict", "replay", "inspect"])
@pytest.mark.parametrize("columns", ["80", "100", "160", ""])
def test_what_is_piped_has_the_width_asked_for_and_no_trailing_spaces(
    command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert run([command, str(EXAMPLE)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert max(map(len, lines)) <= int(columns or 100)
    if columns != "160":
        assert max(map(len, lines)) > int(columns or 100) - 12


@pytest.mark.parametrize("command", ["predict", "replay", "inspect"])
def test_names_with_brackets_are_shown_as_they_are(command: str, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "run[" / "b]"
    folder.mkdir(parents=True)
    text = gzip.decompress((EXAMPLE / "rank0.kineto.json.gz").read_bytes()).decode()
    assert '"name": "aten::gather"' in text
    text = text.replace('"name": "aten::gather"', '"name": "[/mm] x"').replace('"name": "aten::mul"', '"name": "[param|cuda]"')
    (folder / "[red]rank0.json").write_text(text, encoding="utf-8")
    assert run([command, str(tmp_path / "run["), *["--profiled"] * (command == "predict")]) == 0
    out = capsys.readouterr().out
    shown = ["[red]rank0.json", "b]"] if command == "inspect" else ["[/mm] x", "[param|cuda]"]
    assert [name for name in shown if name not in out] == []


def bad(tmp_path: Path) -> dict[str, list[str]]:
    """What goes wrong -> the arguments that make it go wrong."""
    empty, nonsense = tmp_path / "empty.json", tmp_path / "nonsense.json"
    empty.touch()
    nonsense.write_bytes(b"\xff\xfe not json")
    (tmp_path / "folder").mkdir()
    traces = str(EXAMPLE)
    return {
        "no such file": ["predict", str(tmp_path / "nowhere")],
        "no trace files": ["inspect", str(tmp_path / "folder")],
        "empty": ["replay", str(empty)],
        "not a Kineto": ["inspect", str(nonsense)],
        "no platform": ["predict", traces, "--platform", "8xh200-nvlnk"],
        "was never run": ["predict", str(EXAMPLE / "rank0.et.json.gz")],
        "batch 64: a recording": ["predict", traces, "--batch", "64"],
        "cannot be written": ["replay", traces, "--trace", str(tmp_path / "no" / "t.json")],
        "cannot be read": ["replay", traces, "--measured", str(tmp_path / "no.json")],
        "no device times": ["replay", str(EXAMPLE / "rank0.et.json.gz")],
        "Missing argument": ["predict"],
        "No such command": ["frobnicate"],
        "No such option": ["predict", traces, "--fast"],
    }


@pytest.mark.parametrize("said", BAD)
def test_bad_input_is_one_line_and_exit_code_two(said: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(bad(tmp_path)[said]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("steptime: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("failure", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 2), (OSError(28, "disk full"), 2)])
def test_what_the_machine_does_is_no_traceback(
    failure: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(app, "app", fail)
    assert run(["predict", str(EXAMPLE)]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(ZeroDivisionError):
        run(["predict", str(EXAMPLE)])


@pytest.mark.parametrize(
    "words",
    [["predict", "--platform", "1xa100", "--platform=1xh100"], ["sweep", "--platform", "1xa100", "--platform", "1xh100"]],
)
def test_an_option_of_one_value_is_given_once(words: list[str], capsys: Captured) -> None:
    assert run([words[0], str(EXAMPLE), *words[1:]]) == 2
    assert "--platform is given 2 times; give it once" in capsys.readouterr().err


def test_a_bug_is_one_line_that_says_so_and_its_traceback_is_there_for_who_debugs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert EXAMPLE is None, "no example"

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as left:
        app.main(["predict", str(EXAMPLE)])
    assert left.value.code == app.BUG
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(part in said for part in ("a bug in steptime", "AssertionError", "test_commands.py", "no example", app.DEBUG))
    monkeypatch.setenv(app.DEBUG, "1")
    with pytest.raises(AssertionError):
        app.main(["predict", str(EXAMPLE)])


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    with subprocess.Popen(
        process("replay", str(EXAMPLE)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert started.stderr.read() == b""
        assert started.wait() == 0


@pytest.mark.parametrize(
    ("platform", "closed", "code"),
    [
        ("1xh200", "2>&-", 0),
        ("1xh200", ">&-", 0),
        ("1xh200", ">&- 2>&-", 0),
        ("nowhere", "2>&-", 2),
        ("nowhere", ">&- 2>&-", 2),
    ],
)
def test_closed_streams_change_neither_the_exit_code_nor_the_answer(platform: str, closed: str, code: int) -> None:
    command = f"{shlex.join(process('platforms', platform, '--json'))} {closed}"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (code, b"")
    assert done.stdout.startswith(b"{") == (code == 0 and closed == "2>&-")


def test_an_interrupt_is_quiet() -> None:
    script = (
        "import os, signal\nfrom steptime._cli import app\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "app.app = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, check=False)
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr == b""


def test_version_and_help_need_nothing_heavy() -> None:
    for asked in ("--version", "--help"):
        script = f"import sys\nfrom steptime._cli.app import run\nrun([{asked!r}])\nsys.stderr.write(' '.join(sys.modules))"
        done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True)
        assert "steptime" in done.stdout
        assert not {"numpy", "msgspec", "torch"} & set(done.stderr.split())


def test_without_a_command_the_commands_are_listed(capsys: Captured) -> None:
    assert run([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("predict", "replay", "inspect"))


def test_the_version_is_the_packages(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"steptime {steptime.__version__}\n"


def test_a_terminal_without_unicode_still_gets_its_report() -> None:
    done = subprocess.run(
        process("predict", str(EXAMPLE)), env={**environment(), "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"Bound by" in done.stdout


def test_a_recording_is_predicted_without_its_profiler_unless_asked_for(capsys: Captured) -> None:
    answers = []
    for options in ([], ["--profiled"], ["--platform", "4xh200-quarter-loopback", "--profiled"]):
        assert run(["predict", str(EXAMPLE), *options, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    alone, profiled, on_platform = answers
    assert [each["profiled"] for each in answers] == [False, True, True]
    assert 1.2 * alone["step_time_ms"] < profiled["step_time_ms"] == pytest.approx(on_platform["step_time_ms"], rel=0.05)
    assert 0 < alone["host_code_ms"] < profiled["host_code_ms"] == pytest.approx(on_platform["host_code_ms"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(EXAMPLE.parent / "configs" / "gpt2.toml"), "--platform", "1xh200"], "was never recorded"),
        ([str(EXAMPLE), "--platform", "4xh200-quarter-loopback", "--host", "xeon-h200"], "give one of the two"),
    ],
)
def test_what_cannot_be_predicted_as_recorded_is_said(arguments: list[str], said: str, capsys: Captured) -> None:
    assert run(["predict", *arguments, "--profiled"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_a_long_search_in_a_pipe_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.01)
    with output.working("searching layouts") as told:
        told("12 of 40")
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said and set(said) == {"steptime: searching layouts: 12 of 40"}
