"""Predicts every script of `examples/loops` as a user does, `steptime predict SCRIPT`, and says which were captured.

    python benchmarks/capture/loops.py [NAME ...] [-o FILE] [--limit SECONDS]

A script counts as captured where the command exits with 0 and less than 2 % of the device time is guessed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from models import MOST_GUESSED, Outcome, finish

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
SEVERAL_RANKS = ("ddp_imagenet", "fsdp2_decoder")  # started by torchrun


def scripts() -> dict[str, Path]:
    """By name: scripts, and the `train.py` of a folder."""
    found = [*LOOPS.glob("*.py"), *LOOPS.glob("*/train.py")]
    return {(path.parent if path.name == "train.py" else path).stem: path for path in sorted(found)}


def outcome(name: str, path: Path, limit_s: int) -> Outcome:
    """What `steptime predict` says of one script."""
    platform = "8xh200-nvlink" if name in SEVERAL_RANKS else "1xh200"
    command = [
        sys.executable,
        "-m",
        "steptime",
        "predict",
        str(path),
        "--platform",
        platform,
        "--json",
        "--limit",
        str(limit_s),
    ]
    start = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        return Outcome(f"loops/{name}", said[-1], seconds)
    answer = json.loads(run.stdout)
    guessed = answer["coverage"].get("fallback", 0.0)
    failure = f"{guessed:.1%} of the device time is guessed" if guessed >= MOST_GUESSED else ""
    return Outcome(f"loops/{name}", failure, seconds, answer["parameters"] or 0, answer["step_time_ms"], guessed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--limit", type=int, default=300)
    args = parser.parse_args()
    rows = []
    for name, path in scripts().items():
        if args.names and not name.startswith(tuple(args.names)):
            continue
        row = outcome(name, path, args.limit)
        print(f"{row.name}: {row.failure or f'{row.step_time_ms:.1f} ms'} ({row.seconds:.0f} s)", flush=True)
        rows.append(row)
    finish(rows, args.output)


if __name__ == "__main__":
    main()
