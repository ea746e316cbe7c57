"""Measured collectives as columns, and the models fitted to them.

`Points` come from the measured set, through `reduced`, or from any table of kinds, ranks, bytes and times. Which of them a fit
may see goes by kind, ranks, bytes and splits alone, so that a message is on one side in all its dtypes and processes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.curve import Curve
from steptime._models.collectives.message import KINDS, Floats, Message, Messages, Places
from steptime._models.collectives.tier import CollectiveTimes, TierModel, groups, ragged_parts, saved
from steptime._models.collectives.unmeasured import MIRRORED, Curves, extended, ratio_along, scaled_curve
from steptime._models.engine.splits import FIT, VALIDATION, split_of
from steptime._models.error import gmae
from steptime.errors import InputError

Row = Mapping[str, Any]

# Fewer sizes make no curve.
_LEAST_SIZES = 3
# How much a change of slope costs against a row that is off, with a knot per octave: .01 to .3 do as well on loopback rows left
# out in turn (5.2 to 5.4 % over 21 curves). Where there are two rows per octave or more, two knots for them, at a lower cost,
# follow the switches of all_reduce more closely: 3.3, 4.3 and 3.3 % instead of 4.0, 4.8 and 4.3 for 2, 4 and 8 ranks.
_PENALTY, _DENSE_PENALTY = 0.1, 0.03
_DENSE = 2.0
_ROUNDS = 4
# A row off by so many times the usual distance counts less, and one off by less than a percent does not count as off.
_USUAL, _CLOSE = 1.5, 0.01
_FOLDS = 5
# Where rows of all_gather or reduce_scatter are few and noisy, each serves the other's curve as well (`MIRRORED`): on loopback
# rows left out in turn, all_gather is off by 3.7, 4.0 and 4.4 % for 2, 4 and 8 ranks instead of 4.6, 4.2 and 5.7,
# reduce_scatter by 3.1, 3.3 and 5.2 instead of 3.5, 5.2 and 5.4. Broadcast and reduce gain nothing.
_TURNS = 4
# A run that has fewer than this of another's messages says less than that one, however steady it is.
_ENOUGH = 0.5
# How much less the repeats of another box must differ before a rank count comes from there.
_STEADIER = 0.6
# What idle peers may save (`TierModel.idle_power`), tried on the rows that are fitted.
_USUAL_POWER = 0.25  # while other things are tried
_IDLE_POWERS = tuple(round(0.05 * step, 2) for step in range(13))
# What ragged parts cost is seen in so many exchanges of each sort, large enough to have parts; the curve follows in few rounds.
_LEAST_RAGGED, _RAGGED_FROM, _RAGGED_ROUNDS = 10, 256, 3
_PLAIN = {"mode": "stream", "beside": "none", "host_threads": "idle", "arrival": "together"}
_SWEEP = "measure collectives"


@dataclass(frozen=True)
class Points:
    """Measured collectives with a time each; `repeats` where it was made from several."""

    rows: Sequence[Message]
    ns: Floats
    repeats: Sequence[tuple[float, ...]] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.rows), len(self.ns), len(self.repeats or self.rows)}
        if len(lengths) > 1:
            raise InputError(f"columns of collectives have {' and '.join(map(str, sorted(lengths)))} rows; expected as many")
        if len(self) and not (np.min(self.ns) > 0 and np.all(np.isfinite(self.ns))):
            raise InputError("a collective took no time, or no number; expected nanoseconds above 0")

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def messages(self) -> Messages:
        """As questions."""
        return Messages.of(self.rows)

    @property
    def kind(self) -> list[str]:
        """Of each collective."""
        return [row.kind for row in self.rows]

    @property
    def ranks(self) -> Places:
        """Of each collective."""
        return self.messages.ranks

    @property
    def bytes(self) -> Floats:
        """Of each collective."""
        return self.messages.bytes

    @cached_property
    def split(self) -> npt.NDArray[np.str_]:
        """fit, validation or test, per row."""
        return np.array([split_of(_question(row)) for row in self.rows], dtype="U10")

    @cached_property
    def uneven(self) -> npt.NDArray[np.bool_]:
        """Which exchanges have splits."""
        return np.array([row.splits is not None for row in self.rows], dtype=np.bool_)

    def sent(self, place: int) -> Floats:
        """The matrix of an uneven exchange, [1, senders, receivers]."""
        return np.array([self.rows[place].splits], dtype=np.float64)

    def take(self, places: npt.NDArray[Any]) -> Points:
        """Some of them; `places` may be a mask."""
        chosen = np.arange(len(self))[places].tolist()
        repeats = [self.repeats[index] for index in chosen] if self.repeats else ()
        return Points([self.rows[index] for index in chosen], np.asarray(self.ns)[chosen], repeats)

    def of(self, *splits: str) -> Points:
        """Those of some splits."""
        return self.take(np.isin(self.split, splits))

    def with_curves(self, model: TierModel) -> Points:
        """Those whose kind and rank count have a curve."""
        return self.take(np.array([(row.kind, row.ranks) in model.curves for row in self.rows], dtype=np.bool_))

    def folds(self) -> list[npt.NDArray[np.bool_]]:
        """Fifths of the messages, by their digests and not by their splits."""
        digests = [hashlib.sha256(f"fold {_question(row)}".encode()).hexdigest() for row in self.rows]
        fold = np.array([int(digest[:8], 16) % _FOLDS for digest in digests], dtype=np.intp)
        return [fold == number for number in range(_FOLDS)]


def _question(message: Message) -> str:
    """What was asked, the same for all dtypes."""
    splits = () if message.splits is None else (message.splits,)
    return json.dumps([message.kind, message.ranks, message.bytes, *splits], separators=(",", ":"))


# --- the measured set ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swept:
    """One measured message with its repeats."""

    message: Message
    run: str
    process: str
    times_ns: tuple[float, ...]
    reference_ns: tuple[float, ...] = ()  # of an all_reduce of 1 MiB in the block of each repeat; empty: not known
    sweep: bool = True  # and not a few sizes that say how fast a box is today


@dataclass(frozen=True, slots=True)
class Reduction:
    """How repeats become one time: at a quantile, perhaps with each at the speed its block's reference has in the middle."""

    quantile: float
    corrected: bool = False

    def __str__(self) -> str:
        names = {0.0: "the fastest repeat", 0.25: "the lower quartile of repeats", 0.5: "the median of repeats"}
        return names.get(self.quantile, f"quantile {self.quantile:g} of repeats") + (
            ", each over its block's reference" if self.corrected else ""
        )


REDUCTIONS = tuple(Reduction(quantile, corrected) for corrected in (False, True) for quantile in (0.5, 0.25, 0.0))


def swept(rows: Iterable[Row], fabric: str) -> list[Swept]:
    """Rows of the set `collectives` on one fabric: queued calls on idle hosts, all ranks at once, nothing beside them."""
    results = []
    for row in rows:
        plain = all(row[name] == value for name, value in _PLAIN.items())
        if plain and row["fabric"] == fabric and row["collective"] in KINDS:
            ranks, flat = row["ranks"], row["splits"]
            splits = tuple(tuple(flat[start : start + ranks]) for start in range(0, len(flat), max(ranks, 1))) if flat else None
            message = Message(row["collective"], ranks, row["bytes"], splits)
            times, references = tuple(row["times_ns"]), tuple(row["reference_ns"] or ())
            results.append(Swept(message, row["run"], row["process"], times, references, _SWEEP in row["command"]))
    return results


def steadiest(rows: Sequence[Swept]) -> list[Swept]:
    """The sweep with the most messages, so that rank counts come from one box; for a count at which another one that has enough
    messages is far steadier, that one.
    """
    runs: dict[int, dict[str, list[Swept]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.sweep:
            runs[row.message.ranks][row.run].append(row)
    sizes = Counter(row.run for row in rows if row.sweep)
    results: list[Swept] = []
    for per_run in runs.values():
        most = max(map(len, per_run.values()))
        enough = {run: item for run, item in per_run.items() if len(item) >= _ENOUGH * most}
        main = max(enough, key=lambda run: (sizes[run], run))
        best = min(enough, key=lambda run: (_unsteady(enough[run]), run))
        results += enough[best if _unsteady(enough[best]) < _STEADIER * _unsteady(enough[main]) else main]
    return results


def _unsteady(rows: Sequence[Swept]) -> float:
    return median(float(np.ptp(np.quantile(row.times_ns, [0.25, 0.75]))) / median(row.times_ns) for row in rows)


def reduced(rows: Sequence[Swept], how: Reduction, *, joined: bool = True) -> Points:
    """One time per message and run, or per row."""
    rows = _joined(rows) if joined else rows
    usual = _usual(rows) if how.corrected else {}
    times = [_corrected(row, usual) for row in rows]
    ns = np.array([float(np.quantile(time, how.quantile)) for time in times])
    return Points([row.message for row in rows], ns, times)


def _joined(rows: Sequence[Swept]) -> list[Swept]:
    """Rows of one message in one run as one, so that what was asked often does not count more than the rest."""
    alike: dict[tuple[Message, str], list[Swept]] = defaultdict(list)
    for row in rows:
        alike[row.message, row.run].append(row)
    results = []
    for item in alike.values():
        times = tuple(time for row in item for time in row.times_ns)
        references = tuple(reference for row in item for reference in row.reference_ns)
        results.append(replace(item[0], times_ns=times, reference_ns=references if len(references) == len(times) else ()))
    return results


def _usual(rows: Sequence[Swept]) -> dict[int, float]:
    references: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        references[row.message.ranks] += row.reference_ns
    return {ranks: median(item) for ranks, item in references.items() if item}


def _corrected(row: Swept, usual: Mapping[int, float]) -> tuple[float, ...]:
    if row.message.ranks not in usual or len(row.reference_ns) != len(row.times_ns):
        return row.times_ns
    return tuple(
        time * usual[row.message.ranks] / reference for time, reference in zip(row.times_ns, row.reference_ns, strict=True)
    )


# --- fits ------------------------------------------------------------------------------------------------------------------


def best_points(rows: Sequence[Swept]) -> tuple[Points, Reduction]:
    """From the steadiest sweeps of each rank count, with repeats reduced as does best on validation rows."""
    chosen = steadiest(rows)
    if not chosen:
        raise InputError("no sweep of collectives on this fabric; measure one with `steptime measure collectives`")
    best = min(REDUCTIONS, key=lambda how: _tried(reduced(chosen, how)))
    return reduced(chosen, best), best


def _tried(points: Points) -> float:
    """GMAE on validation rows, fitted to fit rows."""
    errors = unseen_logs(fit_curves(points.of(FIT), idle_power=_USUAL_POWER, ragged=0.0), points.of(VALIDATION))
    if not errors:
        return 0.0
    return gmae(np.abs(np.expm1(np.concatenate(list(errors.values())))))


def left_out(points: Points, model: TierModel) -> Iterator[tuple[Points, CollectiveTimes]]:
    """Each fifth of the messages, with what curves through the others say of those that they have a curve for."""
    for fold in points.folds():
        try:
            without = fit_curves(points.take(~fold), idle_power=model.idle_power, ragged=model.ragged, like=model.like)
        except InputError:  # too few rows to leave any out
            continue
        tested = points.take(fold).with_curves(without)
        yield tested, without.times(tested.messages)


def interval_ends(errors: Mapping[str, Sequence[float] | Floats]) -> dict[str, tuple[float, float]]:
    """5th and 95th percentile by kind, of ln(measured / fitted)."""
    return {kind: (float(np.quantile(logs, 0.05)), float(np.quantile(logs, 0.95))) for kind, logs in errors.items()}


def fit_curves(
    points: Points, *, idle_power: float | None = None, ragged: float | None = None, like: Curves | None = None
) -> TierModel:
    """One curve per kind and rank count with enough sizes, all rows seen; what exchanges differ by is tried unless given.

    `like` has the curves of a fabric with such links: sparse rows take their shape from there where that meets rows left out
    more closely, and what was not measured, sizes or kinds and rank counts, is carried from there.
    """
    if idle_power is None:
        idle_power = _idle_power(points)
    if ragged is None:
        ragged = _ragged(points, idle_power)
    columns: dict[tuple[str, int], _Rows] = {}
    messages = points.messages
    for kind, ranks, places in groups(messages):
        alike = messages.take(places)
        sizes, times = alike.bytes, points.ns[places]
        if kind == "all_to_all":
            sizes = alike.load
            times = times / saved(alike) ** idle_power / np.exp(ragged * ragged_parts(alike, ranks))
        sized = sizes >= 1
        if ranks > 1 and len(np.unique(sizes[sized])) >= _LEAST_SIZES:
            columns[kind, ranks] = sizes[sized], times[sized]
    if not columns:
        raise InputError(f"no kind and rank count with {_LEAST_SIZES} sizes or more among {len(points)} measured collectives")
    like = {} if like is None else like
    curves = {pair: _best_curve(rows, _other_ways(pair, columns, like)) for pair, rows in columns.items()}
    curves |= {pair: extended(curve, like[pair]) for pair, curve in curves.items() if pair in like}
    return TierModel(curves, idle_power, {}, ragged, like)


_Rows = tuple[Floats, Floats]  # bytes and nanoseconds
_Way = Callable[[_Rows], Curve]


def _other_ways(
    pair: tuple[str, int], columns: Mapping[tuple[str, int], _Rows], like: Curves
) -> list[Callable[[_Rows], Curve]]:
    """How rows may become a curve with the help of others."""
    mirrored, base = columns.get((MIRRORED.get(pair[0], ""), pair[1])), like.get(pair)
    results: list[_Way] = []
    if mirrored is not None:
        results.append(lambda rows: _with_mirrored(rows, mirrored))
    if base is not None:
        results.append(lambda rows: _with_shape(rows, base))
    return results


def _with_mirrored(rows: _Rows, mirrored: _Rows) -> Curve:
    """A curve through a kind's rows and those of its mirror image, at the distance that lies between them."""
    apart = np.exp(np.median(np.log(mirrored[1] / fit_curve(*rows).ns(mirrored[0]))))
    return fit_curve(np.append(rows[0], mirrored[0]), np.append(rows[1], mirrored[1] / apart))


def _with_shape(rows: _Rows, base: Curve) -> Curve:
    """Another fabric's curve at the distance that the rows have from it."""
    return scaled_curve(base, ratio_along(base.knots, np.log2(rows[0]), np.log(rows[1] / base.ns(rows[0]))))


def _best_curve(rows: _Rows, others: Sequence[_Way]) -> Curve:
    """Through the rows alone, or that of the other ways which meets rows left out in turns more closely."""
    ways: list[_Way] = [lambda seen: fit_curve(*seen), *others]
    turns = np.empty(len(rows[0]), dtype=np.intp)
    turns[np.argsort(rows[0], kind="stable")] = np.arange(len(turns)) % _TURNS
    off = [0.0] * len(ways)
    for turn in range(_TURNS) if others else ():
        tested, left = turns == turn, turns != turn
        seen = rows[0][left], rows[1][left]
        if len(np.unique(seen[0])) < _LEAST_SIZES:
            return ways[0](rows)
        for number, way in enumerate(ways):
            off[number] += float(np.abs(np.log(rows[1][tested] / way(seen).ns(rows[0][tested]))).sum())
    return ways[int(np.argmin(off))](rows)


def _exchanges(points: Points) -> Points:
    return points.take(np.array([kind == "all_to_all" for kind in points.kind], dtype=np.bool_))


def _idle_power(points: Points) -> float:
    """As fits the uneven rows best; 0 without any, for nothing says that idle peers help."""
    if not points.uneven.any():
        return 0.0
    exchanges = _exchanges(points)
    off = {}
    for power in _IDLE_POWERS:
        try:
            errors = unseen_logs(fit_curves(exchanges, idle_power=power, ragged=0.0), exchanges)
        except InputError:
            return 0.0
        off[power] = float(np.mean(np.abs(errors["all_to_all"])))
    return min(off, key=lambda power: off[power])


def _ragged(points: Points, idle_power: float) -> float:
    """How much more even exchanges with ragged parts take than those with whole ones; 0 where too few say."""
    exchanges = _exchanges(points)
    exchanges = exchanges.take(exchanges.bytes >= _RAGGED_FROM)
    messages = exchanges.messages
    ragged = np.zeros(len(exchanges), dtype=np.bool_)
    for _, ranks, places in groups(messages):
        ragged[places] = ragged_parts(messages.take(places), ranks)
    whole = ~ragged & ~exchanges.uneven
    if min(ragged.sum(), whole.sum()) < _LEAST_RAGGED:
        return 0.0
    result = 0.0
    for _ in range(_RAGGED_ROUNDS):
        try:
            model = fit_curves(exchanges, idle_power=idle_power, ragged=result)
        except InputError:
            return 0.0
        logs = unseen_logs(model, exchanges)["all_to_all"]
        if len(logs) != len(exchanges):
            return 0.0
        result = max(result + float(np.median(logs[ragged]) - np.median(logs[whole])), 0.0)
    return result


def unseen_logs(model: TierModel, points: Points) -> dict[str, Floats]:
    """ln(measured / fitted) by kind, of rows whose kind and rank count have a curve."""
    known = points.with_curves(model)
    return by_kind(known, np.log(known.ns / model.times(known.messages).ns))


def by_kind(points: Points, values: Floats) -> dict[str, Floats]:
    """One value of each row, by the kind of collective."""
    kinds = np.array(points.kind)
    return {str(kind): values[kinds == kind] for kind in sorted(set(points.kind))}


def fit_curve(size_bytes: npt.ArrayLike, time_ns: npt.ArrayLike, *, penalty: float | None = None) -> Curve:
    """The curve through measured times, a knot or two per octave, with slopes that change as little as the rows allow.

    Few rows that are far off count less. Sizes need not be distinct.
    """
    sizes, times = (np.asarray(values, dtype=np.float64) for values in (size_bytes, time_ns))
    if len(sizes) < _LEAST_SIZES or len(set(sizes.tolist())) < _LEAST_SIZES or sizes.min() < 1 or times.min() <= 0:
        raise InputError(f"a curve over bytes needs {_LEAST_SIZES} sizes of a byte or more with times above 0")
    try:
        optimize: Any = import_module("scipy.optimize")
    except ImportError as error:
        raise InputError("fitting collectives needs SciPy: install steptime[fit]") from error
    places, logs = np.log2(sizes), np.log(times)
    octaves = float(np.ptp(places))
    dense = len(set(sizes.tolist())) >= _DENSE * octaves
    knots = np.linspace(places.min(), places.max(), max(_LEAST_SIZES, round((2 if dense else 1) * octaves) + 1))
    if penalty is None:
        penalty = _DENSE_PENALTY if dense else _PENALTY
    width = np.diff(knots)
    basis = np.clip(places[:, None] - knots[:-1], 0.0, width)
    bends = np.sqrt(penalty) * np.diff(np.eye(len(width)), axis=0)
    still = np.zeros((len(bends), 2))  # the level, above and below nothing, bends nothing
    weight = np.ones(len(places))
    level, slopes = 0.0, np.zeros(len(width))
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)[:, None]
        rows = np.concatenate([np.concatenate([root, -root, basis * root], axis=1), np.concatenate([still, bends], axis=1)])
        result, _ = optimize.nnls(rows, np.concatenate([logs * root[:, 0], np.zeros(len(bends))]))
        level, slopes = float(result[0] - result[1]), result[2:]
        off = np.abs(logs - level - basis @ slopes)
        weight = 1.0 / np.maximum(1.0, off / max(_USUAL * float(np.median(off)), _CLOSE))
    return Curve(knots, level + np.concatenate([[0.0], np.cumsum(slopes * width)]))
