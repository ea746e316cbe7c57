"""How long `steptime plan` takes from cold, its memory, layouts a minute; beside predicting one layout in the same run.

    PYTHONPATH=src python benchmarks/plan_speed.py [--model FILE] [--platform NAME]

A machine that others use makes both longer; their ratio, and the seconds of processor time, say more than the wall clock does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = "examples/configs/llama-70b.toml"
PLATFORM = "256xh200-ib400"
_GIB = 1 << 30


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--model", default=MODEL)
    given.add_argument("--platform", default=PLATFORM)
    chosen = given.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        winner = Path(folder) / "winner.toml"
        plan, took = timed("plan", chosen.model, "--platform", chosen.platform, "--save", str(winner))
        _, alone = timed("predict", str(winner), "--platform", chosen.platform)
    searched = plan["searched"]
    print(f"layouts            {searched['layouts']:,} ({searched['may_fit']:,} may fit, {searched['played']} played)")
    print(f"best               {plan['best']['name']}: {plan['best']['step_time_ms']:,.1f} ms")
    ratios = searched["played_over_closed_form"]
    print(f"played/closed form {ratios['least']:.2f} to {ratios['most']:.2f}, median {ratios['median']:.2f}")
    print(f"plan               {took['wall_s']:.1f} s wall, {took['processor_s']:.1f} s of processors ({os.cpu_count()} there)")
    print(f"predict the winner {alone['wall_s']:.1f} s wall, {alone['processor_s']:.1f} s of processors")
    print(f"ratio              {took['processor_s'] / alone['processor_s']:.1f} predictions' time")
    print(f"layouts a minute   {60 * searched['layouts'] / took['wall_s']:,.0f}")
    print(f"largest process    {took['most_bytes'] / _GIB:.2f} GiB")


def timed(*arguments: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The JSON of a command run from cold, and what it took."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "steptime", *arguments, "--json"], check=True, stdout=subprocess.PIPE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), {
        "wall_s": time.monotonic() - began,
        "processor_s": spent,
        "most_bytes": after.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
