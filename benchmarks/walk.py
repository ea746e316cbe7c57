"""How far one prediction walks through the package, and how long a prediction takes.

    python benchmarks/walk.py            # modules entered, changes of part, milliseconds warm, seconds cold
    python benchmarks/walk.py --modules  # besides, how often functions of each module are entered

The walk is that of `predict examples/configs/dlrm_small.toml --platform 2xh200-nvlink`: the modules whose functions run (bodies
of classes, imports and what dataclasses generate are not counted), and how often the next function lies in another part of the
package than the one before. The warm time is that of reading and predicting a DLRM of four ranks again in one process; the
cold one is that of the same prediction as a command, from its start to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import time
from collections import Counter
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples" / "configs"
WALKED = ("predict", str(CONFIGS / "dlrm_small.toml"), "--platform", "2xh200-nvlink")
TIMED = (CONFIGS / "dlrm_heavy4.toml", "4xh200-quarter-loopback")
WARM_RUNS, COLD_RUNS = 15, 5


class Walk:
    """Counts the modules that functions are entered in, one after the other."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self.changes_of_part = 0
        self._part = ""
        self._importing = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls."""
        code, name = frame.f_code, frame.f_globals.get("__name__", "")
        if code.co_name == "_find_and_load" and name.startswith("importlib"):
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        if event != "call" or self._importing or not name.startswith("steptime."):
            return
        if code.co_filename.startswith("<") or not code.co_flags & CO_NEWLOCALS:
            return
        self.entered[name] += 1
        part = name.split(".")[1]
        self.changes_of_part += part != self._part
        self._part = part


def walk() -> Walk:
    """The command in this process, watched."""
    from steptime._cli.app import main

    watched = Walk()
    sys.argv = ["steptime", *WALKED]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.setprofile(watched)
        try:
            main()
        finally:
            sys.setprofile(None)
    return watched


def warm_ms() -> float:
    """Reading and predicting again in one process: the median of several."""
    import steptime

    times = []
    for _ in range(WARM_RUNS + 1):
        started = time.perf_counter()
        steptime.predict(steptime.read(TIMED[0]), TIMED[1])
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def cold_s() -> float:
    """The command from its start to its end: the median of several."""
    command = [sys.executable, "-m", "steptime", "predict", str(TIMED[0]), "--platform", TIMED[1]]
    times = []
    for _ in range(COLD_RUNS):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Prints all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", action="store_true", help="how often functions of each module are entered")
    options = parser.parse_args()
    watched = walk()
    print(f"modules entered {len(watched.entered)}, changes of part {watched.changes_of_part}")
    if options.modules:
        for name, count in watched.entered.most_common():
            print(f"{count:8,d} {name}")
    print(f"warm {warm_ms():.1f} ms, command from cold {cold_s():.2f} s")


if __name__ == "__main__":
    main()
