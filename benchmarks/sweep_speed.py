"""How long sweeps take: 1,000 variants of DLRMs, 200 of a GPT, and a newcomer's decision.

    python benchmarks/sweep_speed.py [dlrm_small] [dlrm_heavy4] [gpt2] [decision] [--workers 2]

Wall time, CPU time of this process and all workers, and what one core would take; on a busy machine the last two say more.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import steptime

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
MACHINES = ["8xh200-nvlink", "8xh100-nvlink", "8xa100-nvlink"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # 1,000 variants each: 125 batches, ranks, machines and an optimiser.
    "dlrm_small": (
        "dlrm_small.toml",
        {"platform": MACHINES[:2], "batch": range(512, 512 * 126, 512), "ranks": [2, 4],
         "settings": {"optimizer": ["sgd", "rowwise_adagrad"]}},
    ),
    "dlrm_heavy4": (
        "dlrm_heavy4.toml",
        {"platform": MACHINES[:2], "batch": range(512, 512 * 126, 512), "ranks": [4, 8],
         "settings": {"optimizer": ["sgd", "rowwise_adagrad"]}},
    ),
    "gpt2": (
        "gpt2-ddp.toml",
        {"platform": MACHINES[:2], "batch": range(16, 16 * 26, 16), "ranks": 8,
         "settings": {"parallel.fsdp": [1, 8], "precision": ["bf16-autocast", "bf16"]}},
    ),
    # Which of 3 machines, 5 batches and 3 kinds of parallelism.
    "decision": (
        "gpt2-ddp.toml",
        {"platform": MACHINES, "batch": [64, 128, 256, 512, 1024], "ranks": 8,
         "variants": {"ddp": {}, "fsdp": {"parallel.fsdp": 8}, "tensor": {"parallel.tensor": 4}}, "price": 3.0},
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for name in options.cases:
        config, arguments = CASES[name]
        wall, cpu = time.monotonic(), _cpu_s()
        found = steptime.sweep(CONFIGS / config, **arguments, workers=options.workers)
        wall, cpu = time.monotonic() - wall, _cpu_s() - cpu
        count = len(found) + len(found.left_out)
        print(
            f"{name:12s} {count:5,} variants ({len(found.left_out)} left out): {wall:6.1f} s with {options.workers} workers, "
            f"{cpu:6.1f} CPU s, {1e3 * cpu / count:5.0f} ms of one core each"
        )


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
