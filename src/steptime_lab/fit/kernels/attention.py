"""The form of attention: blends that learn how far off the book is, on whole GPUs and on shares of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Blend
from steptime._models.kernels.forms import attention as form
from steptime._models.kernels.forms.attention import PARTS, WHOLE, AttentionConstants, AttentionForm, heads_of, ratios
from steptime_lab.fit.engine.regression import fit_blend
from steptime_lab.fit.kernels.book import fit_lists, short_name
from steptime_lab.measurements.kernels import Row

# Everything was chosen before; there are few rows.
LEARNS_FROM_VALIDATION = True


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> AttentionForm:
    """Fits to measured attention calls."""
    device = constants_of(limits, "attention", AttentionConstants)
    calls = [heads_of(row.question.call) for row in rows]
    questions = [row.question for row in rows]
    features, base = form.table(calls, questions, device)
    target = np.log(np.array([sum(row.kernel_ns) for row in rows]) / base)
    shared = np.asarray([question.share > 1 for question in questions])  # scatter five times as much: fitted apart
    blends: dict[str, Blend] = {}
    if not shared.all():
        blends[WHOLE] = fit_blend(features[~shared], target[~shared], seed, networks=4, weight=0.75, num_leaves=15)
    if shared.any():
        known = ratios(blends, questions, features)
        both = np.column_stack([features, known])[shared]
        blends[PARTS] = fit_blend(both, (target - known)[shared], seed, networks=0, rounds=150, num_leaves=15)
    names = [[short_name(name) for name in row.kernel_names] for row in rows]
    kinds = [form.kind_of(heads) for heads in calls]
    lists = fit_lists(kinds, form.coordinates(calls), names, [row.kernel_ns for row in rows], target)
    return AttentionForm(blends, lists, features.min(axis=0), features.max(axis=0), device)
