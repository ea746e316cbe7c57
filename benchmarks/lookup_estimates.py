"""How fast lookup models answer: 1,000 plans of 60 tables over one pool, us an estimate (bar: 50), and as a ratio to a floor.

The floor of the same run is the rule that planners use, bytes over bandwidth, asked the same. What a table costs by itself is
computed once for all plans and counted here. The machine may be shared: time is CPU time, the best of several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from steptime._hardware.device import FOLDER
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.populations import PRODUCTION_2021, PRODUCTION_2022
from steptime._lookups.table import TableColumns
from steptime._models.lookups.fitted import LookupModels, lookups_file
from steptime._models.lookups.forms import LookupForm
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, DTYPES, OPTIMIZERS, TABLE_BATCHED, Lookups, Pool
from steptime.errors import InputError
from steptime_lab.baselines.lookups import BASELINES
from steptime_lab.fit.lookups import read_lookups
from steptime_lab.measurements.shipped import FOLDER as MEASUREMENTS

PLANS, TABLES, POOL, BATCH = 1_000, 60, 160, 4096
RUNS = 7
BAR_US = 50
FLOOR = "bytes over bandwidth"


def pool_of_tables() -> Pool:
    """Like those of production recommenders; their statistics are expected ones, so that nothing is drawn."""
    streams = (*PRODUCTION_2021.tables(POOL // 2), *PRODUCTION_2022.tables(POOL // 2))
    dims = np.random.default_rng(1).choice([16, 32, 64, 128, 256], POOL)
    tables = [expected_statistics(one, BATCH, int(dim)) for one, dim in zip(streams, dims, strict=True)]
    return Pool(TableColumns.of(tables), np.full(POOL, DTYPES.index("float32")))


def plans(pool: Pool, direction: str) -> Lookups:
    """Each of other tables of the pool."""
    random = np.random.default_rng(0)
    optimizer = OPTIMIZERS.index("rowwise_adagrad" if direction == BACKWARD else "none")
    return Lookups(
        TABLE_BATCHED,
        direction,
        pool,
        member=np.concatenate([random.choice(len(pool), TABLES, replace=False) for _ in range(PLANS)]),
        starts=np.arange(PLANS + 1) * TABLES,
        optimizer=np.full(PLANS, optimizer),
        dtype=np.full(PLANS, DTYPES.index("float32")),
        weighted=np.zeros(PLANS, dtype=np.bool_),
        warm=np.zeros(PLANS, dtype=np.bool_),
        share=np.ones(PLANS),
        others=np.zeros(PLANS, dtype=np.intp),
    )


def microseconds(form: LookupForm, lookups: Lookups) -> float:
    """Of one estimate, in the fastest run."""
    times = []
    for _ in range(RUNS):
        begun = time.process_time()
        form.times(lookups)
        times.append(time.process_time() - begun)
    return 1e6 * min(times) / len(lookups)


def compared(forms: Mapping[str, LookupForm], lookups: Lookups) -> None:
    """One line per form; the floor is one of them."""
    found = {name: microseconds(form, lookups) for name, form in forms.items()}
    for name, each_us in found.items():
        print(f"{lookups.direction:9} {name:22} {each_us:8.2f} us an estimate {each_us / found[FLOOR]:8.1f} times the floor")


def main() -> None:
    """Print one line per direction and form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, default=lookups_file(FOLDER, "h200"), help="a file of lookup models")
    chosen = parser.parse_args()
    try:
        models = LookupModels.load(chosen.models)
    except InputError as error:
        raise SystemExit(str(error)) from error
    _, measured = read_lookups(MEASUREMENTS)
    pool = pool_of_tables()
    print(f"{PLANS:,} plans of {TABLES} tables over a pool of {POOL} (bar {BAR_US} us)")
    for direction in DIRECTIONS:
        kind = (TABLE_BATCHED, direction)
        compared({FLOOR: BASELINES[FLOOR].fit(measured[kind], 0), "fitted model": models.form(*kind)}, plans(pool, direction))


if __name__ == "__main__":
    main()
