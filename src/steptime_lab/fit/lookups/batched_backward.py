"""Fits the backward pass of the table-batched lookup: its stages to the whole GPU, then shares of GPUs on top."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import Floats
from steptime._models.engine.constants import constants_of
from steptime._models.lookups.caches import FORM, LookupConstants
from steptime._models.lookups.forms.backward_sizes import sizes_of
from steptime._models.lookups.forms.batched_backward import (
    STAGES,
    BackwardStage,
    BatchedBackward,
    OnShares,
    StageTerms,
    extent,
    features_of,
    share_terms,
    stage_times,
    terms_of,
)
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import fit_correction
from steptime_lab.fit.engine.terms import fit_terms
from steptime_lab.measurements.lookups import MeasuredLookups

# Trees of each stage: the more, the more of the time it is (validation rows, whole GPU).
_ROUNDS = (25, 25, 30, 25, 100, 60)
# With fewer rows of shares of GPUs nothing is fitted to them.
_FEWEST = 60
# Trees of the correction of shares of a GPU: 30, 60 and 120 are equally good on validation rows.
_SHARE_ROUNDS = 40
# Of 16, 24 and 31 leaves the best on validation rows, and on rows of more tables or more skew than were fitted; at a rate of
# 0.15 as good as with a third more trees at 0.1.
_TREES = {"num_leaves": 31, "max_depth": 8, "learning_rate": 0.15}

# What kernels of a stage have in their names, first match first; all other kernels are around the passes of the sort.
_WORDS = (
    ("table_batched_linearize", "linearize"),
    ("table_batched_update", "update"),
    ("_scatter_gather_elementwise_kernel", "gather"),
    ("DeviceRadixSortOnesweepKernel", "sort_passes"),
    ("radixSortKVInPlace", "sort_passes"),
)


def fit(measured: MeasuredLookups, seed: int, limits: DeviceLimits) -> BatchedBackward:
    """Fits to the rows of the split `fit`."""
    device = constants_of(limits, FORM, LookupConstants)
    rows = measured.of("fit")
    whole = rows.take(rows.lookups.share == 1)
    if not len(whole):
        raise InputError("table_batched backward: no row of the split fit on a whole GPU; expected hundreds.")
    sizes = sizes_of(whole.lookups, device)
    features, times = features_of(sizes), measured_stages(whole)
    stages = {
        name: _stage(terms, features, taken, seed, rounds)
        for name, terms, taken, rounds in zip(STAGES, terms_of(sizes, whole.lookups.share), times.T, _ROUNDS, strict=True)
    }
    seen = extent(sizes)
    return BatchedBackward(stages, _on_shares(rows, stages, seed, device), seen.min(axis=0), seen.max(axis=0), device)


def _stage(terms: StageTerms, features: Floats, times: Floats, seed: int, rounds: int) -> BackwardStage:
    """From rows of the whole GPU; those without a kernel of this stage say nothing."""
    there = times > 0
    every = terms.whole[there]
    factors = fit_terms(every, times[there])
    physics = np.maximum(every @ factors, 1.0)
    return BackwardStage(factors, fit_correction(features[there], physics, times[there], seed, rounds=rounds, **_TREES))


def _on_shares(rows: MeasuredLookups, stages: Mapping[str, BackwardStage], seed: int, device: LookupConstants) -> OnShares:
    """From rows of shares of GPUs and what the whole GPU would take."""
    shared = rows.take(rows.lookups.share > 1)
    if len(shared) < _FEWEST:
        return OnShares.unfitted()
    sizes = sizes_of(shared.lookups, device)
    features, times, shares = features_of(sizes), measured_stages(shared), shared.lookups.shares
    terms = [share_terms(shares, stage) for stage in stage_times(stages, sizes, features, shares.count)]
    factors = np.stack([fit_terms(term[taken > 0], taken[taken > 0]) for term, taken in zip(terms, times.T, strict=True)])
    whole = sum(term @ weights for term, weights in zip(terms, factors, strict=True))
    inputs = np.column_stack([features, shares.columns()])
    return OnShares(factors, fit_correction(inputs, np.asarray(whole), times.sum(axis=1), seed, rounds=_SHARE_ROUNDS))


def stage_of(name: str) -> str:
    """The stage of a kernel; that of the update kernel is its first level's."""
    return next((stage for word, stage in _WORDS if word in name), "sort_prepare")


def measured_stages(measured: MeasuredLookups) -> Floats:
    """Time of each stage, ns, [lookups, stages]; stages without a kernel have 0.

    Kernels are measured by their medians, which add up to the median of the whole but for a percent: here they do.
    """
    taken = np.zeros((len(measured), len(STAGES)))
    known: dict[str, str] = {}
    for row, names, times in zip(taken, measured.kernel_names, measured.kernel_ns, strict=True):
        walked = False
        for name, time in zip(names, times, strict=True):
            stage = known.setdefault(name, stage_of(name))
            row[STAGES.index("update_levels" if stage == "update" and walked else stage)] += time
            walked = walked or stage == "update"
    scaled: Floats = taken * (measured.time_ns / np.maximum(taken.sum(axis=1), 1.0))[:, None]
    return scaled
