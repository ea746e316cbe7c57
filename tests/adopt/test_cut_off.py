"""An adoption that is ended from outside keeps its rows and goes on from them; on a CPU, with the smallest sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steptime._measurements.store import devices_of_rows
from steptime_lab.adopt.jobs import Spent

ROOT = Path(__file__).parents[2]
# A process that was started in the background of a shell ignores interrupts, and so do those that it starts.
SCRIPT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from steptime._calibrate.harness.command import Options, measured
from steptime_lab.adopt.job import ADOPT

options = Options(device="cpu", small=True)
print(measured(ADOPT, Path(sys.argv[1]), 1.0, options, ["steptime", "adopt", "x", "-o", "DIR"]).added)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], env=environment, stdout=subprocess.PIPE)


def counted(folder: Path) -> dict[str, int]:
    return {name: len(rows) for name, rows in devices_of_rows(folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_cut_off_loses_nothing_and_goes_on(tmp_path: Path, ended_by: signal.Signals) -> None:
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not counted(tmp_path).get("kernels") and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(ended_by)
    process.communicate(timeout=60)
    assert process.returncode != 0
    before = counted(tmp_path)
    assert before["kernels"] > 0
    # A killed one could not write how long it took; then its share is its own again.
    assert ("kernels" in Spent.read(tmp_path).seconds) == (ended_by is signal.SIGINT)
    again = start(tmp_path)
    again.communicate(timeout=240)
    assert again.returncode == 0
    after = counted(tmp_path)
    assert all(after[name] >= count for name, count in before.items())
    assert set(Spent.read(tmp_path).seconds) == {"kernels", "lookups", "calibrate"}
    # Nothing was measured twice.
    assert after["kernels"] < 2 * before["kernels"]
