"""Start-up: `steptime --help` (bar 0.5 s), `import steptime` (bar 0.3 s, no torch), beside a bare interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 7
_NO_TORCH = "import steptime, sys; assert 'torch' not in sys.modules"


def best_seconds(command: list[str]) -> float:
    """The best of several runs of a command."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Print seconds and the ratio to a bare interpreter."""
    bare = best_seconds([sys.executable, "-c", "pass"])
    script = str(Path(sys.executable).with_name("steptime"))
    for name, command, bar in (
        ("steptime --help", [script, "--help"], 0.5),
        ("import steptime", [sys.executable, "-c", _NO_TORCH], 0.3),
    ):
        seconds = best_seconds(command)
        print(f"{name:16} {seconds:.3f} s (bar {bar}), {seconds / bare:.1f} x a bare interpreter ({bare:.3f} s)")


if __name__ == "__main__":
    main()
