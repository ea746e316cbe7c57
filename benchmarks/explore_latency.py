"""From a slider to a new answer in `steptime explore`, in a real browser: wall time, and CPU time of the process that predicts.

    python benchmarks/explore_latency.py [--moves 12]

Every move goes to a value that was not asked before. "batch" builds the job anew, "power cap" only predicts it again. Wall time
is from the event of the slider to the first frame after the answer was laid out; whatever else the machine does is in it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
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


def moved(page: Browser, name: str, count: int) -> list[list[float]]:
    """What each move of a slider took: in the browser (ms), predicting on the wall and on the CPU (s)."""
    slider = f"document.querySelector('[data-name=\"{name}\"] input[type=range]')"
    last, now = (int(page.execute_script(f"return {slider}.{key}")) for key in ("max", "value"))
    places = [place for place in range(last, -1, -1) if place != now and (place or name == "batch")][:count]
    return [page.execute_async_script(MOVE, name, place) for place in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=12)
    moves = parser.parse_args().moves
    print(f"{'case':<18}{'slider':<14}{'median ms':>10}{'worst ms':>10}{'predicting, wall ms':>21}{'CPU ms':>8}")
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
                moved(page, "power_cap_w", 4)  # both processes have predicted before
                for name in ("batch", "power_cap_w"):
                    took = moved(page, name, moves + 4)[4:] if name == "power_cap_w" else moved(page, name, moves)
                    shown, wall, cpu = ([row[column] for row in took] for column in range(3))
                    row = f"{config[:-5]:<18}{name:<14}{median(shown):>10.0f}{max(shown):>10.0f}"
                    print(f"{row}{1e3 * median(wall):>21.0f}{1e3 * median(cpu):>8.0f}", flush=True)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()


if __name__ == "__main__":
    main()
