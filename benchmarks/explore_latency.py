"""From a slider to a new answer in `steptime explore`, in a real browser: wall time, and CPU time of the process that predicts.

    python benchmarks/explore_latency.py [--moves 12] [--pause 3]

Every move goes to a value that was not asked before. "batch" builds the job anew, "power cap" only predicts it again. Wall time
is from the event of the slider to the first frame after the answer was laid out; whatever else the machine does is in it: see
its load. "at once": a move follows the answer to the last one, so that nothing is predicted ahead. "paused": a person looks
for some seconds in between, in which the neighbours of the slider's place are predicted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.browser.browsers import Browser, browser  # noqa: E402 (the path is set above)

CASES = (
    ("dlrm_heavy4.toml", "4xh200-nvlink"),
    ("gpt2-ddp.toml", "8xh200-nvlink"),
)
MOVE = """
const [name, place, done] = arguments;
const slider = document.querySelector(`[data-name="${name}"] input[type=range]`);
performance.clearMeasures();
slider.value = place;
slider.dispatchEvent(new Event("input", { bubbles: true }));
const look = () => {
  const [found] = performance.getEntriesByName("answered");
  if (found) done([found.duration, found.detail.wall_s, found.detail.cpu_s]);
  else setTimeout(look, 5);
};
look();
"""
READY = "return document.getElementById('answer').getAttribute('aria-busy') === 'false'"


def moved(page: Browser, name: str, places: Sequence[int], pause_s: float = 0.0) -> list[list[float]]:
    """What each move of a slider took: in the browser (ms), predicting on the wall and on the CPU (s)."""
    results = []
    for place in places:
        results.append(page.execute_async_script(MOVE, name, place))
        time.sleep(pause_s)
    return results


def places_of(page: Browser, name: str) -> list[int]:
    """The places of a slider from the highest down, less where it stands and, of power, no cap."""
    slider = f"document.querySelector('[data-name=\"{name}\"] input[type=range]')"
    last, now = (int(page.execute_script(f"return {slider}.{key}")) for key in ("max", "value"))
    return [place for place in range(last, -1, -1) if place != now and (place or name == "batch")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=12)
    parser.add_argument("--pause", type=float, default=3.0)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'case':<14}{'slider':<14}{'moves':<10}{'median ms':>10}{'worst ms':>10}{'predicting, wall ms':>21}{'CPU ms':>8}")
    for config, platform in CASES:
        command = [sys.executable, "-m", "steptime", "explore", str(ROOT / "examples/configs" / config)]
        server = subprocess.Popen([*command, "--platform", platform, "--no-browser"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            with browser() as page:
                page.set_script_timeout(60)
                page.get(server.stdout.readline().strip())
                while not page.execute_script(READY):
                    time.sleep(0.1)
                timed(page, config.removesuffix(".toml"), options.moves, options.pause)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


def timed(page: Browser, case: str, moves: int, pause_s: float) -> None:
    """Prints what moves of both sliders took."""
    power = places_of(page, "power_cap_w")
    moved(page, "power_cap_w", power[:4])  # both processes have predicted before
    batch = places_of(page, "batch")
    for name, how, places in (
        ("batch", "at once", batch[:6]),
        ("batch", "paused", batch[6 : 6 + moves]),
        ("power_cap_w", "at once", power[4 : 4 + moves]),
        ("power_cap_w", "paused", power[4 + moves : 4 + 2 * moves]),
    ):
        took = moved(page, name, places, pause_s if how == "paused" else 0.0)[how == "paused" :]
        shown, wall, cpu = ([row[column] for row in took] for column in range(3))
        row = f"{case:<14}{name:<14}{how:<10}{median(shown):>10.0f}{max(shown):>10.0f}"
        print(f"{row}{1e3 * median(wall):>21.0f}{1e3 * median(cpu):>8.0f}", flush=True)


if __name__ == "__main__":
    main()
