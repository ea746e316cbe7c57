"""How many launches may be outstanding before a launch call blocks, what takes a slot, and what frees one.

python3 launch_queue.py --out DIR        everything, each group in a process of its own; writes DIR/launch_queue.json
python3 launch_queue.py --group NAME --file FILE [--start-at EPOCH]   one group (what the first form calls)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver import Gpu
from processes import pin, together
from queue_capacity import capacity, sharing, streams
from queue_costs import copies, latency, synchronisation
from queue_freeing import freeing
from results_file import recipe, store

from steptime._calibrate.harness.ranks import mps, share

JSON = dict[str, Any]

GROUPS: dict[str, Callable[[Gpu], JSON]] = {
    "capacity": capacity,
    "streams": streams,
    "sharing": sharing,
    "freeing": freeing,
    "latency": latency,
    "synchronisation": synchronisation,
    "copies": copies,
}


def one_group(name: str, file: Path, schedule: int, start_at: float) -> None:
    """Runs groups (names joined by commas) in this process; a group that fails leaves its error in the file."""
    pin()
    gpu = Gpu(schedule)
    gpu.spin(gpu.stream(), 1000)()
    gpu.synchronize()
    time.sleep(max(0.0, start_at - time.time()))
    found: JSON = {}
    for group in name.split(","):
        try:
            found[group] = GROUPS[group](gpu)
        except Exception as error:
            found[group] = {"error": repr(error)}
        store(file, found)


def child(group: str, file: Path, schedule: int = 0, start_at: float = 0.0) -> list[str]:
    """Command that runs a group in a fresh process."""
    options = ["--group", group, "--file", str(file), "--schedule", str(schedule), "--start-at", str(start_at)]
    return [sys.executable, __file__, *options]


def everything(out: Path) -> None:
    """All groups, plain, with other numbers of hardware queues, with other ways to wait, and under MPS."""
    results: JSON = {"recipe": recipe()}
    folder = Path(tempfile.mkdtemp())

    def run(label: str, *clients: list[str], environments: list[dict[str, str]]) -> None:
        begun = time.monotonic()
        try:
            together(clients, environments, limit_s=90)
            found = [json.loads(Path(client[client.index("--file") + 1]).read_text()) for client in clients]
            results[label] = found[0] if len(found) == 1 else found
        except (RuntimeError, TimeoutError, OSError) as error:
            results[label] = {"error": repr(error)}
        print(f"{label}: {time.monotonic() - begun:.1f} s", flush=True)
        store(out / "launch_queue.json", results)

    run("plain", child("capacity,streams,sharing,freeing,latency,copies", folder / "plain.json"), environments=[{}])
    for connections in ("1", "32"):
        label = f"max_connections_{connections}"
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        run(label, child("streams,sharing", folder / f"{label}.json"), environments=[environment])
    for schedule, label in ((0, "auto"), (1, "spin"), (2, "yield"), (4, "block")):
        run(f"sync_{label}", child("synchronisation", folder / f"sync_{label}.json", schedule), environments=[{}])
    for clients in (1, 2, 4):
        with mps() as places:
            start_at = time.time() + 3
            commands = [
                child("capacity,streams,sharing,freeing,latency", folder / f"mps{clients}_{i}.json", 0, start_at)
                for i in range(clients)
            ]
            run(f"mps_{clients}", *commands, environments=[{**places, **share(i, clients)} for i in range(clients)])
    torch_part = [sys.executable, str(Path(__file__).with_name("launch_latency.py"))]
    with mps() as places:
        under_mps = [*torch_part, "--unprofiled", "--file", str(folder / "torch_mps.json")]
        run("mps_1_torch", under_mps, environments=[{**places, **share(0, 2)}])
    subprocess.run([*torch_part, "--file", str(out / "launch_latency.json")], check=False)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Measures the launch queue of one GPU.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--group")
    parser.add_argument("--file", type=Path)
    parser.add_argument("--schedule", type=int, default=0)
    parser.add_argument("--start-at", type=float, default=0.0)
    options = parser.parse_args()
    if options.group:
        one_group(options.group, options.file, options.schedule, options.start_at)
    else:
        everything(options.out)


if __name__ == "__main__":
    main()
