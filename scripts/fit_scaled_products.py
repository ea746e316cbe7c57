"""Fits what eight-bit products take beside 16-bit ones (`[features.scaled]` of a device), and says how far off that is.

    python scripts/fit_scaled_products.py [--residuals]

Constants are fitted to rows of the split `fit` of the shipped measurements; errors are of the split `test`, before and after.
`--residuals` also writes what products of few bits and of groups are off by on the split `validation` into the device's models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from steptime._hardware.device import FOLDER
from steptime._models.engine.constants import reference_constants
from steptime._models.engine.splits import FIT, TEST, VALIDATION, Residuals, group_of
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.forms.matmul.scaled import ScaledConstants, by_row_ns, is_by_row, scaled_ns
from steptime_lab.fit.kernels.fitting import with_forms
from steptime_lab.measurements.kernels import Row, of, rows_of
from steptime_lab.measurements.shipped import shipped

Numbers = npt.NDArray[np.float64]
_FAMILY, _FILE = "grouped_products", FOLDER / "h200.npz"
_BY_ROW = ("start_ns", "round_ns", "element_ns", "exact_sums", "bytes_per_ns", "odd")


def main() -> None:
    """Prints the constants and their errors."""
    models = KernelModels.load(_FILE)
    rows = rows_of(shipped("kernels"), families=[_FAMILY])
    scaled = [row for row in rows if "_scaled_mm" in row.question.call.op and row.question.share == 1]
    known = reference_constants("scaled", ScaledConstants)
    plain = {id(row): _plain_ns(models, row) for row in scaled}
    fitted = replace(known, **_fitted_whole(scaled, plain), **_fitted_by_row(scaled, known))
    for name, value in asdict(fitted).items():
        print(f"{name} = {value:.4g}")
    for kind, chosen in (("one scale", lambda row: not _by_row(row)), ("by row", _by_row)):
        members = [row for row in of(scaled, TEST) if chosen(row)]
        before = [plain[id(row)] for row in members]
        after = [scaled_ns(row.question.call, plain[id(row)], device=fitted) for row in members]
        print(f"{kind}: {len(members)} test rows, {_errors(members, before)} before, {_errors(members, after)} after")
    if "--residuals" in sys.argv:
        _write_residuals(models, of(rows, VALIDATION))


def _by_row(row: Row) -> bool:
    return is_by_row(row.question.call.args[2])


def _plain_ns(models: KernelModels, row: Row) -> float:
    """What the 16-bit product takes that it is taken for: without scales nothing is added."""
    one = replace(row.question, call=replace(row.question.call, args=(*row.question.call.args[:2], None)))
    (answered,) = models.ask([one])
    assert answered.answer is not None, answered.why
    return answered.answer.time_ns


def _fitted(measured: Numbers, start: Sequence[float], law: Callable[[Numbers], Numbers]) -> Numbers:
    result: Numbers = np.exp(
        least_squares(lambda logs: np.log(law(np.exp(logs)) / measured), np.log(start), loss="soft_l1", f_scale=0.1).x
    )
    return result


def _columns(rows: Sequence[Row]) -> tuple[Numbers, npt.NDArray[np.bool_], Numbers]:
    calls = [row.question.call for row in rows]
    tensors = [call.tensors() for call in calls]
    sizes = np.array([(left.shape[0], right.shape[1], left.shape[1]) for left, right, *_ in tensors], dtype=np.float64)
    return (
        sizes,
        np.array([len(call.args) > 7 and call.args[7] is True for call in calls]),
        np.array([row.time_ns for row in rows]),
    )


def _fitted_whole(rows: Sequence[Row], plain: dict[int, float]) -> dict[str, float]:
    members = [row for row in of(rows, FIT) if not _by_row(row)]
    _, fast, measured = _columns(members)
    before = np.array([plain[id(row)] for row in members])
    found = _fitted(measured, (1.0, 0.1, 200.0), lambda x: before * x[0] * np.where(fast, 1, 1 + x[1]) + x[2])
    return dict(zip(("factor", "exact_sums", "more_ns"), found.tolist(), strict=True))


def _fitted_by_row(rows: Sequence[Row], known: ScaledConstants) -> dict[str, float]:
    members = [row for row in of(rows, FIT) if _by_row(row)]
    sizes, fast, measured = _columns(members)
    names = [f"by_row_{name}" for name in _BY_ROW]

    def law(values: Numbers) -> Numbers:
        return by_row_ns(sizes, fast, replace(known, **dict(zip(names, values.tolist(), strict=True))))

    return dict(zip(names, _fitted(measured, (2600, 1700, 2.2, 0.1, 3000, 0.1), law).tolist(), strict=True))


def _errors(rows: Sequence[Row], predicted: Sequence[float]) -> str:
    errors = np.array(predicted) / np.array([row.time_ns for row in rows]) - 1
    gmae = np.exp(np.mean(np.log(np.abs(errors) + 4e-4)))
    return f"GMAE {gmae:.1%} (median {np.median(errors):+.1%}, p90 {np.quantile(np.abs(errors), 0.9):.1%})"


def _write_residuals(models: KernelModels, rows: Sequence[Row]) -> None:
    answered = [(row, each.answer) for row, each in zip(rows, models.ask([row.question for row in rows]), strict=True)]
    known = [(row, answer.time_ns) for row, answer in answered if answer is not None]
    groups = [group_of(row.family, row.question.share) for row, _ in known]
    times, measured = (np.array(each) for each in zip(*((time, row.time_ns) for row, time in known), strict=True))
    residuals = Residuals.of(groups, times, measured)
    with_forms(models, KernelModels({}, residuals, models.recipe)).save(_FILE)


if __name__ == "__main__":
    main()
