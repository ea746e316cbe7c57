"""Worker processes end when the one that they work for ends, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steptime import _processes
from steptime.errors import SteptimeError

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
SWEEP = ["sweep", str(CONFIGS / "gpt2-ddp.toml"), "--platform", "8xh200-nvlink", "--batch", "8:8192:8", "--workers", "2"]
PLAN = ["plan", str(CONFIGS / "llama-8b.toml"), "--platform", "8xh200-nvlink", "--batch", "64"]


def children_of(parent: int) -> set[int]:
    """Processes that a process has started and that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if int(ppid) == parent and state != "Z":
            found.add(int(stat.parent.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc for children")
@pytest.mark.parametrize("words", [SWEEP, PLAN], ids=["sweep", "plan"])
def test_a_killed_command_leaves_no_worker_and_its_reader_sees_the_end(words: list[str]) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "steptime", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(children := children_of(started.pid)) < min(2, _processes.cores()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children
    time.sleep(1.0)  # until they are at work
    os.kill(started.pid, signal.SIGKILL)
    try:
        assert started.communicate(timeout=20)[0] == b""  # to its end: nobody holds the pipe any more
        while any(map(alive, children)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(alive, children))
    finally:
        for child in filter(alive, children):
            os.kill(child, signal.SIGKILL)


def test_a_worker_that_the_system_ends_is_said() -> None:
    with (
        pytest.raises(SteptimeError, match=r"a worker process was ended, perhaps for want of memory.*; give less"),
        _processes.workers(1, advice="; give less") as pool,
    ):
        pool.submit(os._exit, 1).result()
