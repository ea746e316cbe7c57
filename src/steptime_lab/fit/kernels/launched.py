"""The form of kernels whose launches follow from rules: weights of terms, scales of shares of a GPU, trees on the rest."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Trees
from steptime._models.engine.splits import FIT, VALIDATION
from steptime._models.engine.stored import Longs
from steptime._models.error import GMAE_FLOOR
from steptime._models.kernels.family import family_of, launches_of
from steptime._models.kernels.forms import launched as form
from steptime._models.kernels.forms.launched import MOST, Batch, LaunchedForm, LaunchedModel, LaunchRows, base_ns
from steptime._models.kernels.forms.launched.terms import (
    SCALED,
    LaunchColumns,
    LaunchConstants,
    Numbers,
    shares_of,
    terms,
    traffic,
)
from steptime._models.kernels.launches import FACTS, Gpu, Launch, short_name
from steptime._models.kernels.question import OTHERS
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import grow_trees
from steptime_lab.fit.engine.terms import fit_group_weights
from steptime_lab.measurements.kernels import Row, of

# Levels of a group, coarse to fine: least launches that make one, and how strongly it is drawn towards the level above,
# both chosen on validation rows.
_LEAST = (1, 3, 6, 8, 10)
_PULL = (0.0, 0.3, 6.0, 6.0, 9.0)
# A launch counts by its share of its call's time, but never as nothing.
_LEAST_IMPORTANCE = 0.02
# Calls of real steps beside swept ones: they are what will be asked.
_STEP_IMPORTANCE, _SWEPT = 3.0, "sweep"
# Rows on whole GPUs where there are rows on parts as well: they steady what the few of those leave open.
_WHOLE_IMPORTANCE = 0.15
# Folds that the sum of terms is fitted without, so that trees see errors as on new rows.
_FOLDS = 4
# Rows that a mean of a text's residuals is drawn to zero by.
_SMOOTHING = 10.0
# Steps in which scales of parts are looked for, coarse and fine, and what the loss has to fall to for one to be taken.
_STEPS, _WORTH = ((0.3, 0.1), (0.1, 0.03)), 0.9995
# Launches that are looked at for that, of every company.
_LOOKED_AT = 3000
# Trees: chosen on validation rows. Fewer with parts: repeats beside busy ones differ by 7 to 10 %, and more learn that noise.
_ROUNDS, _ROUNDS_PARTS = 400, 150
_SETTINGS = {"learning_rate": 0.07, "num_leaves": 31, "max_depth": 8, "min_data_in_leaf": 10, "feature_fraction": 0.5}


# Powers where the fit starts: bandwidth is nearly what the SMs can draw; L2 is free beside idle parts, else shared evenly.
_IDLE = (0.1, 0.9, 0.9, 0.9, 1.0, 0.0, 0.0)
_BUSY = (0.3, 0.9, 0.9, 0.9, 1.0, 0.0, -1.0)


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> LaunchedForm:
    """Fits to the rows of the split `fit`; families that the trees make worse on `validation` rows go without them."""
    device = constants_of(limits, "launched", LaunchConstants)
    whole = [row for row in rows if row.question.share == 1]
    shared = [row for row in rows if row.question.share > 1]
    if not whole or not shared:
        return LaunchedForm(_chosen(rows, rows, seed, device))
    return LaunchedForm(_chosen(whole, whole, seed, device), _chosen(rows, shared, seed, device))


def _chosen(rows: Sequence[Row], validated: Sequence[Row], seed: int, device: LaunchConstants) -> LaunchedModel:
    model = fit_model(rows, seed, device)
    return replace(model, uncorrected=_uncorrected(model, of(validated, VALIDATION)))


def _uncorrected(model: LaunchedModel, rows: Sequence[Row]) -> frozenset[str]:
    rows = [row for row in rows if _by_rule(row, model.device.gpu)]
    every = frozenset(family_of(row.question.call.op) for row in rows)
    if not rows:
        return every
    errors = []
    for fitted in (LaunchedForm(model), LaunchedForm(replace(model, uncorrected=every))):
        answers = fitted.answers([row.question for row in rows])
        errors.append([abs(answer.time_ns / row.time_ns - 1) for answer, row in zip(answers, rows, strict=True)])
    family = np.asarray([family_of(row.question.call.op) for row in rows])
    with_trees, without = (np.log(np.asarray(error) + GMAE_FLOOR) for error in errors)
    return frozenset(name for name in every if with_trees[family == name].mean() > without[family == name].mean())


@dataclass(frozen=True)
class MeasuredLaunches(LaunchRows):
    """Launches of measured questions, those whose rules agree with what was seen."""

    row: Longs  # of which measured row
    time_ns: Numbers  # of the launch


def measured_launches(rows: Sequence[Row], gpu: Gpu) -> MeasuredLaunches:
    """The launches of measured rows; rows whose launches are not those of the rules are left out."""
    agreed = []
    for index, row in enumerate(rows):
        launches = _by_rule(row, gpu)
        if [launch.kernel for launch in launches] == [short_name(name) for name in row.kernel_names]:
            agreed.append((index, launches))
    facts = {name for _, launches in agreed for launch in launches for name in launch.facts}
    columns = LaunchColumns((*FACTS, *sorted(facts - set(FACTS))))
    launched = form.launch_rows(columns, [rows[index].question for index, _ in agreed], [launches for _, launches in agreed])
    owner = np.repeat([index for index, _ in agreed], [len(launches) for _, launches in agreed])
    time_ns = [time_ns for index, _ in agreed for time_ns in rows[index].kernel_ns]
    return MeasuredLaunches(**vars(launched), row=owner, time_ns=np.asarray(time_ns))


def _by_rule(row: Row, gpu: Gpu) -> tuple[Launch, ...]:
    """What a row launches by the rules; nothing where they know no such call."""
    try:
        return launches_of(row.question.call, gpu)
    except InputError:
        return ()


def fit_model(rows: Sequence[Row], seed: int, device: LaunchConstants) -> LaunchedModel:
    """The model of the rows of the split `fit`."""
    fitted = of(rows, FIT)
    table = measured_launches(fitted, device.gpu)
    if not len(table.time_ns):
        raise InputError("no measured row launches what the rules of its family say")
    importance = _importance(table, fitted)
    scales = _fit_scales(table, importance, device)
    summed = _summed(table, importance, scales, device)
    crossed = _crossed(table, fitted, importance, scales, device)
    left = np.clip(np.log(table.time_ns / crossed), -MOST, MOST)
    codes, ranges = _codes(table, left), _ranges(table)
    model = replace(
        summed,
        code_names=tuple(codes),
        codes=np.asarray(list(codes.values())),
        range_names=tuple(ranges),
        ranges=np.asarray(list(ranges.values())).reshape(-1, 2),
    )
    batch = model.batch(table)
    moved = traffic(batch.numbers, device, shares_of(device.sms, batch.share, batch.others, scales))
    seen = form.features(table.columns, batch, moved, crossed)
    rounds = _ROUNDS_PARTS if (table.share > 1).any() else _ROUNDS
    return replace(model, trees=grow_trees(seen, left, importance, seed, rounds, **_SETTINGS))


def with_kernels(model: LaunchedModel, rows: Sequence[Row], kernels: Collection[str]) -> LaunchedModel:
    """The model with the weights of some kernels fitted anew, as rules launch them now; scales and trees stay."""
    fitted = [row for row in of(rows, FIT) if any(short_name(name) in kernels for name in row.kernel_names)]
    table = measured_launches(fitted, model.device.gpu)
    used = np.asarray([names[0] in kernels for names in table.groups])
    summed = _summed(table, _importance(table, fitted), model.scales, model.device, used)
    ranges = {name: each for name, each in _ranges(table).items() if _kernel(name) in kernels}
    kept = [row for row, name in enumerate(model.groups) if _kernel(name) not in kernels]
    ranged = [row for row, name in enumerate(model.range_names) if _kernel(name) not in kernels]
    return replace(
        model,
        groups=(*(model.groups[row] for row in kept), *summed.groups),
        weights=np.concatenate([model.weights[kept], summed.weights]),
        least_ns=np.concatenate([model.least_ns[kept], summed.least_ns]),
        range_names=(*(model.range_names[row] for row in ranged), *ranges),
        ranges=np.concatenate([model.ranges[ranged], np.asarray(list(ranges.values())).reshape(-1, 2)]),
    )


def _kernel(group: str) -> str:
    return group.partition(form.JOIN)[0]


def _importance(table: MeasuredLaunches, rows: Sequence[Row]) -> Numbers:
    call_ns = np.asarray([row.time_ns for row in rows])[table.row]
    whole = _WHOLE_IMPORTANCE if (table.share > 1).any() else 1.0
    step = np.asarray([1.0 if row.source == _SWEPT else _STEP_IMPORTANCE for row in rows])[table.row]
    result: Numbers = np.clip(table.time_ns / call_ns, _LEAST_IMPORTANCE, 1.0) * step * np.where(table.share > 1, 1.0, whole)
    return result


def _summed(
    table: MeasuredLaunches,
    importance: Numbers,
    scales: Numbers,
    device: LaunchConstants,
    used: npt.NDArray[np.bool_] | slice = slice(None),
) -> LaunchedModel:
    """A model that is the sum of terms alone, of some of the launches."""
    shares = shares_of(device.sms, table.share[used], table.others[used], scales)
    numbers = table.numbers[used]
    worked = terms(table.columns, numbers, traffic(numbers, device, shares), device, shares)
    groups = table.groups if isinstance(used, slice) else [table.groups[row] for row in np.flatnonzero(used)]
    weights = fit_group_weights(worked, table.time_ns[used], groups, importance[used], _LEAST, _PULL)
    return LaunchedModel(
        facts=table.columns.facts,
        groups=weights.names,
        weights=weights.values,
        least_ns=weights.least_ns,
        scales=scales,
        code_names=(),
        codes=np.zeros(0),
        uncorrected=frozenset(),
        range_names=(),
        ranges=np.zeros((0, 2)),
        trees=Trees.constant(0.0),
        device=device,
    )


def starting_scales() -> Numbers:
    """Step and power of every company and kind where a fit begins (companies x kinds x 2)."""
    result = np.zeros((len(OTHERS), len(SCALED), 2))
    result[1:, :, 1] = (_IDLE, _BUSY, _BUSY)
    return result


def _fit_scales(table: MeasuredLaunches, importance: Numbers, device: LaunchConstants) -> Numbers:
    """Scales under which weights of all rows fit the rows on shares of a GPU best."""
    scales = starting_scales()
    shared = table.share > 1
    if not shared.any():
        return scales
    for steps in _STEPS:
        model = _summed(table, importance, scales, device)
        batch = model.batch(table)
        for company in range(1, len(OTHERS)):
            used = np.flatnonzero(shared & (table.others == company))
            used = used[:: max(1, len(used) // _LOOKED_AT)]
            if len(used):
                scales = _descended(scales, company, steps, _loss(table, model, batch, used, importance))
    return scales


def _loss(
    table: MeasuredLaunches, model: LaunchedModel, batch: Batch, used: Longs, importance: Numbers
) -> Callable[[Numbers], float]:
    sample = batch.take(used)
    truth, weight = np.log(table.time_ns[used]), importance[used]

    def loss(scales: Numbers) -> float:
        summed, _ = base_ns(replace(model, scales=scales), sample)
        return float(np.average(np.abs(np.log(summed) - truth), weights=weight))

    return loss


def _descended(scales: Numbers, company: int, steps: Sequence[float], loss: Callable[[Numbers], float]) -> Numbers:
    """One number after the other moved for as long as that helps."""
    best = loss(scales)
    for step in steps:
        for index in np.ndindex(scales.shape[1:]):
            for way in (step, -step):
                moving = True
                while moving:
                    tried = scales.copy()
                    tried[company, *index] += way
                    result = loss(tried)
                    moving = result < best * _WORTH
                    if moving:
                        scales, best = tried, result
    return scales


def _crossed(
    table: MeasuredLaunches, rows: Sequence[Row], importance: Numbers, scales: Numbers, device: LaunchConstants
) -> Numbers:
    """The sum of terms for every launch by weights that have not seen its call."""
    folds = np.asarray([_fold(row.question.call.to_json()) for row in rows])[table.row]
    crossed = np.empty(len(table.time_ns))
    for fold in range(_FOLDS):
        model = _summed(table, importance, scales, device, folds != fold)
        crossed[folds == fold] = base_ns(model, model.batch(table))[0][folds == fold]
    return crossed


def _fold(text: str) -> int:
    return int(hashlib.sha256(f"fold {text}".encode()).hexdigest()[:8], 16) % _FOLDS


def _codes(table: MeasuredLaunches, left: Numbers) -> dict[str, float]:
    """By path, op and tag, how far the sum of terms is off on average."""
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for names, off in zip(table.groups, left.tolist(), strict=True):
        for name in form.coded(names):
            sums[name] += off
            counts[name] += 1
    return {name: sums[name] / (counts[name] + _SMOOTHING) for name in sorted(sums)}


def _ranges(table: MeasuredLaunches) -> dict[str, tuple[float, float]]:
    """By group of a path, the least and most elements measured."""
    ranges: dict[str, tuple[float, float]] = {}
    for names, elements in zip(table.groups, table.numbers[:, 0].tolist(), strict=True):
        low, high = ranges.get(names[1], (np.inf, 0.0))
        ranges[names[1]] = (min(low, elements), max(high, elements))
    return ranges
