"""Fits forms of one-table lookups: kernels of a kind by physics with a correction, on whole GPUs and on shares of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import Floats
from steptime._models.engine.constants import constants_of
from steptime._models.lookups.caches import FORM, LookupConstants
from steptime._models.lookups.forms import Correction
from steptime._models.lookups.forms.bag_backward import BagBackward
from steptime._models.lookups.forms.bag_forward import BagForward, terms_of
from steptime._models.lookups.forms.dense_backward import DenseBackward
from steptime._models.lookups.forms.kernel_sum import KernelSizes, KernelSum, RowsForward
from steptime._models.lookups.forms.one_table import KernelTerms, OneTable, Timed, sizes_of
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import fit_correction
from steptime_lab.fit.engine.terms import fit_terms
from steptime_lab.measurements.lookups import MeasuredLookups

Sum = TypeVar("Sum", bound=KernelSum)

# Fewer rows than these teach no factors (of terms) or no trees.
_LEAST, _LEAST_TREES = 4, 60
# Rows with a larger share of what is one after the other say little about the rest.
_MOSTLY = 0.8
# So many rows have at least the skew up to which trees have a say.
_WITNESSES = 60
# Chosen on validation rows of embedding_bag and embedding_sparse: for thousands of rows, for hundreds, for shares of a GPU.
_MANY: dict[str, Any] = {"rounds": 200, "learning_rate": 0.09}
_FEW: dict[str, Any] = {"rounds": 120, "learning_rate": 0.06, "num_leaves": 8}
_SHARES: dict[str, Any] = {
    "objective": "huber",  # Beside busy others, repeats differ by several percent.
    "alpha": 0.1,
    "rounds": 200,
    "learning_rate": 0.08,
    "num_leaves": 12,
    "min_data_in_leaf": 5,
}
_MANY_ROWS = 1000


@dataclass(frozen=True)
class Growth:
    """LightGBM's settings for the whole GPU and for shares; none where physics does better by itself."""

    whole: Mapping[str, Any] | None = field(default_factory=lambda: _MANY)  # of few rows always as _FEW
    shares: Mapping[str, Any] | None = field(default_factory=lambda: _SHARES)


# A hundred and seventy rows of each kind: only sums of many small kernels gain from trees (validation rows).
_PHYSICS = Growth(None, None)
# By form and kind of kernels; a kind that is not there grows as `Growth` says. Sums of a row's gradients take one of two times
# a step, by which half of the cache is nearer: trees would learn that by heart.
_GROWTH: Mapping[type[KernelSum], Mapping[str, Growth]] = {
    BagBackward: {
        "gather": Growth(None),
        "weights": Growth(_FEW),
        "sort": Growth(_FEW, None),
        "unique": Growth(_FEW, _FEW),
        "coalesce": _PHYSICS,
        "update": Growth(_FEW, _SHARES),
    },
    DenseBackward: {**dict.fromkeys(DenseBackward.KERNELS, _PHYSICS), "unique": Growth(_FEW, None)},
    RowsForward: {"gather": Growth(_FEW)},
}
# What a kernel's name contains, first match first, and the kind it is of.
_MARKS: Mapping[type[KernelSum], Mapping[str, str]] = {
    # Before the gradients are summed; all kernels behind that are the update's.
    BagBackward: {
        "merge_sort": "sort",
        "transform_kernel": "sort",
        "Memcpy DtoD": "sort",
        "unique_by_key": "unique",
        "CompactInit": "unique",
        "Memcpy DtoH": "unique",
        "coalesceValues": "coalesce",
        "vectorized_gather": "gather",
        "elementwise_kernel<128": "weights",
        "indexFunc": "add",
    },
    DenseBackward: {
        "arange": "sort",
        "radix_sort": "sort",
        "Memset": "sort",
        "FillFunctor": "fill",
        "krn_partial_segment_offset": "offsets",
        "compute_grad_weight": "segments",
        "sum_and_scatter": "scatter",
        "embedding_backward_feature": "features",
        "multi_tensor_apply": "update",
        "unique_by_key": "unique",
        "scan::Device": "unique",
        "krn_partials_per_segment": "unique",
        "compute_num_of_partial_segments": "unique",
    },
    RowsForward: {"vectorized_gather": "gather"},
}


def fit_bag_forward(measured: MeasuredLookups, seed: int, limits: DeviceLimits) -> BagForward:
    """Fits to the rows of the split `fit`."""
    rows, device = _fit_rows(measured), constants_of(limits, FORM, LookupConstants)
    item = OneTable.of(rows.lookups, device)
    sizes = sizes_of(item)
    return BagForward(fit_timed(terms_of(item), rows.time_ns, seed, Growth()), sizes.min(axis=0), sizes.max(axis=0), device)


def fit_kernel_sum(form: type[Sum], measured: MeasuredLookups, seed: int, limits: DeviceLimits) -> Sum:
    """Fits each kind to its kernels in the rows of the split `fit`."""
    rows, device = _fit_rows(measured), constants_of(limits, FORM, LookupConstants)
    sizes = KernelSizes.of(rows.lookups, device)
    features, times = sizes.features(), _times_by_kind(form, rows)
    timed = {}
    for column, (name, kind) in enumerate(form.KERNELS.items()):
        has = (kind.number(sizes) > 0) & (times[:, column] > 0)
        if has.any():
            growth = _GROWTH[form].get(name, Growth())
            timed[name] = fit_timed(kind.of(sizes, features).take(has), times[has, column], seed, growth)
    bounds = sizes_of(sizes.one)
    return form(timed, bounds.min(axis=0), bounds.max(axis=0), device)


def fit_timed(terms: KernelTerms, times: Floats, seed: int, growth: Growth) -> Timed:
    """From fitted rows. Without rows of shares, shares have the whole GPU's factors, on as many fewer SMs."""
    whole = terms.whole
    known = whole if whole.sum() >= _LEAST else np.ones(len(times), dtype=np.bool_)
    base = terms.take(known)
    factors = _factors(base, base.terms, times[known])
    correction = _correction(base.features, base.physics(base.terms, factors), times[known], seed, growth.whole)
    skew = float(np.sort(base.skew)[-min(_WITNESSES, len(base.skew))])
    timed = Timed(factors, correction, np.zeros(0), Correction.none(), skew)
    shares, of_shares = terms.take(~whole), times[~whole]
    if len(of_shares) < _LEAST_TREES:
        return timed
    timed = replace(timed, share_factors=_factors(shares, shares.joined, of_shares))
    physics, features = timed.of_shares(shares)
    return replace(timed, share_correction=_correction(features, physics, of_shares, seed, growth.shares))


def kinds_of(form: type[KernelSum], names: Sequence[str]) -> list[str]:
    """The kinds of a lookup's kernels, in launch order."""
    kinds: list[str] = []
    for name in names:
        kinds.append("update" if form is BagBackward and "coalesce" in kinds else _first_match(name, _MARKS[form]))
    return kinds


def _first_match(name: str, marks: Mapping[str, str]) -> str:
    for mark, kind in marks.items():
        if mark in name:
            return kind
    raise InputError(f"kernel {name[:80]!r} is of no kind that lookups are known to launch")


def _times_by_kind(form: type[KernelSum], rows: MeasuredLookups) -> Floats:
    """[rows, kinds], scaled so that a row's are its time: medians of kernels add up to a little more or less."""
    taken = np.zeros((len(rows), len(form.KERNELS)))
    column = {name: index for index, name in enumerate(form.KERNELS)}
    for row, (names, times) in enumerate(zip(rows.kernel_names, rows.kernel_ns, strict=True)):
        for kind, time in zip(kinds_of(form, names), times, strict=True):
            taken[row, column[kind]] += time
    scaled: Floats = taken * (rows.time_ns / taken.sum(axis=1))[:, None]
    return scaled


def _factors(rows: KernelTerms, terms: Floats, times: Floats) -> Floats:
    """Fitted to rows of which not most is one after the other, and to what of these is not."""
    side = rows.serial < _MOSTLY * times
    if side.sum() < _LEAST:
        return np.ones(terms.shape[1])
    return fit_terms(terms[side], np.sqrt(times[side] ** 2 - rows.serial[side] ** 2))


def _correction(features: Floats, physics: Floats, times: Floats, seed: int, settings: Mapping[str, Any] | None) -> Correction:
    if settings is None or len(times) < _LEAST_TREES:
        return Correction.none()
    fitting = _FEW if settings is _MANY and len(times) < _MANY_ROWS else settings
    return fit_correction(features, physics, times, seed, **fitting)


def _fit_rows(measured: MeasuredLookups) -> MeasuredLookups:
    """Those of the split `fit`, of which there must be some."""
    rows = measured.of("fit")
    if not len(rows):
        kind = f"{measured.lookups.implementation} {measured.lookups.direction}"
        raise InputError(f"no row of {kind} is of the split fit: nothing to fit to")
    return rows
