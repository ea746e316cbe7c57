"""How fast kernel models answer: a million matrix products, the calls of a whole step, and loading a device.

A step's calls are those that a recorded step makes; asked again, as a search over plans does, they are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from steptime._hardware.device import FOLDER
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms.matmul.product import PRECISIONS
from steptime._platforms.device import Device
from steptime_lab.measurements.kernels import rows_of
from steptime_lab.measurements.shipped import shipped

MILLION = 1_000_000
REPEATS = 3


def best_of(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def million() -> None:
    """Log-uniform sizes in four precisions; the floor is a roofline over the same columns."""
    random = np.random.default_rng(0)
    columns: dict[str, object] = {
        side: np.exp(random.uniform(np.log(16), np.log(8192), MILLION)).astype(np.int64) for side in ("m", "n", "k")
    }
    m, n, k = (np.asarray(columns[side], dtype=np.float64) for side in ("m", "n", "k"))
    columns["precision"] = random.integers(0, len(PRECISIONS), MILLION)
    form: Any = KernelModels.load(FOLDER / "h200.npz").forms["matmul"]
    floor_s = best_of(lambda: np.maximum(2 * m * n * k / 50e3, 4 * (m * k + k * n + m * n) / 4.3e3))
    own_s = best_of(lambda: form.times_ns(columns))
    print(f"a million matrix products: {own_s:.2f} s, {own_s / floor_s:.0f} times a roofline over the same columns")


def main() -> None:
    load_s = best_of(lambda: KernelModels.load(FOLDER / "h200.npz"))
    print(f"loading the models of a device: {1e3 * load_s:.1f} ms")
    million()
    rows = [row for row in rows_of(shipped("kernels"), shares=[1]) if row.source != "sweep"]
    for source in sorted({row.source for row in rows}):
        questions = [row.question for row in rows if row.source == source]
        device = Device.load("h200")
        begun = time.perf_counter()
        device.estimates(questions)
        first_s = time.perf_counter() - begun
        again_s = best_of(lambda device=device, questions=questions: device.estimates(questions))
        print(f"{source}: {len(questions)} calls, first {1e3 * first_s:.1f} ms, again {1e3 * again_s:.2f} ms")


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
