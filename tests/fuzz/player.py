"""Plays a case in this process, in a folder of its own, with limits of time and memory, and judges what comes of it."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.fuzz.case import Case, Content
from tests.fuzz.oracle import ANSWER, compared, document, judged

CPU_SECONDS = 30.0  # of one command
BYTES = 4 << 30
_KIB = 1024
# Commands that take minutes and say on stderr how far they are.
_REPORTING = ("fit",)


class TooLong(BaseException):
    """Raised in the middle of whatever runs; nothing but the player catches it."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `kind` is answer or refusal, or how it failed; and what it took."""

    kind: str
    message: str
    cpu_seconds: float
    peak_bytes: int

    @property
    def bad(self) -> bool:
        """Whether it is none of what may come of a case."""
        return self.kind not in ("answer", "refusal")


def played(case: Case, folder: Path) -> Outcome:
    """The outcome of a case; its folder is gone afterwards."""
    began, peak_before = time.process_time(), _peak()
    try:
        with _limited():
            kind, message = _played(case, folder), ""
    except TooLong:
        kind, message = "hang", f"more than {CPU_SECONDS} s of CPU time"
    except AssertionError as error:
        kind, message = "wrong", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        kind, message = "traceback", _traced(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peak = _peak()
    if peak > max(BYTES, peak_before) and kind in ("answer", "refusal"):
        kind, message = "memory", f"{peak / 1e9:.1f} GB"
    return Outcome(kind, message, time.process_time() - began, peak)


def _peak() -> int:
    """Memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _played(case: Case, folder: Path) -> str:
    kind, after = _ran(case, folder / "case")
    if case.before is not None and kind == ANSWER:
        before = _before(case.before)
        if before is not None:
            compared(before, after)
    return kind


_BEFORE: dict[tuple[Any, ...], Any] = {}


def _before(case: Case) -> Any:
    """The answer without the change; None where there is none. Many cases begin alike."""
    key = (case.arguments, *sorted((name, content) for name, content in case.files.items()))
    if key not in _BEFORE:
        with tempfile.TemporaryDirectory() as folder:
            kind, answer = _ran(case, Path(folder) / "before")
        _BEFORE[key] = answer if kind == ANSWER else None
    return _BEFORE[key]


def _ran(case: Case, folder: Path) -> tuple[str, Any]:
    """The command in its folder: what it said, and that it left everything else as it was."""
    write(case, folder)
    named = {*case.files, *case.outputs, *case.may}
    words = [str(folder / each) if each in named else each for each in case.arguments]
    out, err = io.StringIO(), io.StringIO()
    is_json = "--json" in words
    with _inside(folder), redirect_stdout(out), redirect_stderr(err):
        code = (case.command or _command())(words)
    kind = judged(code, out.getvalue(), err.getvalue(), is_json=is_json, reports=words[0] in _REPORTING)
    _check_folder(case, folder, written=kind == ANSWER)
    return kind, document(out.getvalue()) if kind == ANSWER and is_json else None


@cache
def _command() -> Any:
    """The command line, whose parsers are made once instead of with every command."""
    import typer.main

    import steptime._cli.app as command_line

    parser = typer.main.get_command(command_line.app)

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(command_line, "app", parser):
            return command_line.run(*args, **kwargs)

    return run


def write(case: Case, folder: Path) -> None:
    """The files of a case."""
    folder.mkdir(parents=True)
    (folder / "tmp").mkdir()
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        else:
            (folder / name).write_bytes(_bytes(content))


def _bytes(content: Content) -> bytes:
    if isinstance(content, Path):
        return content.read_bytes()
    return content.encode("utf-8", errors="surrogatepass") if isinstance(content, str) else content


def _check_folder(case: Case, folder: Path, *, written: bool) -> None:
    """Inputs are as they were, outputs are there or not, and there is nothing else."""
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    assert left >= set(case.files), f"gone: {sorted(set(case.files) - left)}"
    left -= set(case.files)
    expected = set(case.outputs if written else ())
    if written:
        left -= {name for name in left for pattern in case.may if fnmatch(name, pattern)}
    assert left == expected, f"left behind: {sorted(left - expected)}; missing: {sorted(expected - left)}"
    for name, content in case.files.items():
        if not isinstance(content, Path):
            assert (folder / name).read_bytes() == _bytes(content), f"{name} was changed"
    for name in case.outputs if written else ():
        assert (folder / name).stat().st_size, f"{name} is empty"


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In the folder, with one for temporary files, and with the environment as it was afterwards."""
    here, temporary, environment = Path.cwd(), tempfile.tempdir, dict(os.environ)
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    try:
        yield
    finally:
        os.chdir(here)
        tempfile.tempdir = temporary
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


@contextmanager
def _limited() -> Iterator[None]:
    """An end to what takes CPU time for ever, and an error for what takes memory without bound."""

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES if hard == resource.RLIM_INFINITY else min(BYTES, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def _traced(error: BaseException) -> str:
    """The error and the innermost lines of the product that it came from."""
    places, trace = [], error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if f"{os.sep}src{os.sep}steptime" in file:
            places.append(f"{file.rsplit(os.sep + 'src' + os.sep, 1)[1]}:{trace.tb_lineno} {trace.tb_frame.f_code.co_name}")
        trace = trace.tb_next
    with suppress(Exception):
        return f"{type(error).__name__}: {str(error)[:300]} at {' < '.join(reversed(places[-4:]))}"
    return f"{type(error).__name__} in {sys.exc_info()[0]}"
