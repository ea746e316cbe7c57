"""How fast kernel models answer: many matrix products, the calls of a whole step, and loading a device.

A step's calls are those that a recorded step makes; asked again, as a search over plans does, they are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from steptime._hardware.device import FOLDER
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.question import Question
from steptime._platforms.device import Device
from steptime_lab.measurements.kernels import rows_of
from steptime_lab.measurements.shipped import shipped

PRODUCTS = 30_000
REPEATS = 3


def best_of(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def products() -> None:
    """Log-uniform sizes in single and half precision, none asked before."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(16), np.log(8192), (PRODUCTS, 3))).astype(np.int64).tolist()
    dtypes = random.choice(["float32", "float16", "bfloat16"], PRODUCTS).tolist()
    questions = [
        Question(Call("aten::mm.default", (TensorArg((m, k), dtype), TensorArg((k, n), dtype))))
        for (m, n, k), dtype in zip(sizes, dtypes, strict=True)
    ]
    device = Device.load("h200")
    begun = time.perf_counter()
    device.estimates(questions)
    print(f"{PRODUCTS:,} matrix products: {time.perf_counter() - begun:.2f} s")


def main() -> None:
    load_s = best_of(lambda: KernelModels.load(FOLDER / "h200.npz"))
    print(f"loading the models of a device: {1e3 * load_s:.1f} ms")
    products()
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
