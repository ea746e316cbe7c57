"""Answers of every command on the shipped examples, to compare before and after a change that must not move them.

    python scripts/golden_answers.py record DIR            # runs every command with the `steptime` of this environment
    python scripts/golden_answers.py compare BEFORE AFTER  # differing values, one line each; exit code 1 where there are any

Keys that only AFTER has are no difference: answers may say more than they did.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
E = "examples"
QUARTERS = "4xh200-quarter-loopback"
COMMANDS = {
    "dlrm-small": f"predict {E}/configs/dlrm_small.toml --platform 2xh200-nvlink",
    "dlrm-heavy": f"predict {E}/configs/dlrm_heavy4.toml --ranks 8 --platform 8xh200-nvlink",
    "dlrm-heavy-loopback": f"predict {E}/configs/dlrm_heavy4.toml --platform {QUARTERS}",
    "dlrm-heavy-a100": f"predict {E}/configs/dlrm_heavy4.toml --platform 8xa100-nvlink",
    "bert": f"predict {E}/configs/bert.toml --platform 1xh200",
    "gpt2-ddp": f"predict {E}/configs/gpt2-ddp.toml --ranks 4 --batch 64 --platform 8xh100-nvlink",
    "trace-dlrm": f"predict {E}/h200_mps4_dlrm",
    "trace-dlrm-platform": f"predict {E}/h200_mps4_dlrm --platform {QUARTERS}",
    "et-dlrm": f"predict {E}/h200_mps4_dlrm/rank0.et.json.gz --platform {QUARTERS}",
    "trace-overlap": f"predict {E}/dlrm_overlap4",
    "trace-fsdp": f"predict {E}/gpt_fsdp2_small",
    "trace-graph": f"predict {E}/gpt_graph",
    "trace-compiled": f"predict {E}/gpt_compiled",
    "replay-dlrm": f"replay {E}/h200_mps4_dlrm",
    "replay-prefetch": f"replay {E}/prefetch_sync",
    "inspect-dlrm": f"inspect {E}/h200_mps4_dlrm",
    "inspect-fsdp": f"inspect {E}/gpt_fsdp2_small",
    "platforms": "platforms",
    "platform": "platforms 8xh200-nvlink",
    "shard": f"shard {E}/sharding/task.toml --platform {QUARTERS}",
    "shard-nvlink": f"shard {E}/sharding/task.toml --platform 4xh200-nvlink",
}
# Of a search: how long it took.
_PASSING = {"seconds"}


def record(folder: Path) -> None:
    """One JSON file for each command, and how long each took beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = {}
    for name, words in COMMANDS.items():
        started = time.perf_counter()
        command = [sys.executable, "-m", "steptime", *words.split(), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds[name] = round(time.perf_counter() - started, 2)
        (folder / f"{name}.json").write_text(done.stdout if done.returncode == 0 else json.dumps({"failed": done.stderr}))
        print(f"{name:22s} {seconds[name]:6.1f} s  exit {done.returncode}", flush=True)
    (folder / "seconds.txt").write_text(json.dumps(seconds, indent=1))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Values of `before` that are missing or others in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - _PASSING:
            if key in after:
                yield from differences(before[key], after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: missing"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {str(before)[:120]} -> {str(after)[:120]}"


def compare(before: Path, after: Path) -> int:
    """Prints what differs, a few lines for each command."""
    changed = 0
    for file in sorted(before.glob("*.json")):
        lines = list(differences(json.loads(file.read_text()), json.loads((after / file.name).read_text())))
        changed += bool(lines)
        for line in sorted(lines)[:12]:
            print(f"{file.stem}{line}")
        if len(lines) > 12:
            print(f"{file.stem}: and {len(lines) - 12} more")
    print(f"{changed} commands answer differently")
    return int(changed > 0)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", folder]:
            record(Path(folder))
        case ["compare", before, after]:
            sys.exit(compare(Path(before), Path(after)))
        case _:
            sys.exit(__doc__)
