"""What a sweep found, as Python, JSON and tables have it: variants, the best of them, and what was left out."""

from __future__ import annotations

import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from steptime._files import output, write_output
from steptime._models.memory.fit import first_with_margin
from steptime._notices import Basis, Caveat, Notices
from steptime._plan.chances import MEASURED_OWN_ERROR, OWN_ERROR, ratios
from steptime._report.answers import scalars, table_of
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.words import time_ms
from steptime.errors import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from steptime._report.answers import Prediction

Floats = npt.NDArray[np.float64]

PLATFORM, VARIANT = "platform", "variant"
_NUMBERS = re.compile(r"\d[\d.,]*")
# A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@")
# Values of a setting that a line about several variants names.
_VALUES_NAMED = 6
_DRAWS = 64
_COMPARED_AT_ONCE = 256
_RANKS = re.compile(r"^\d+x")
# Intervals hold nine of ten: so many standard deviations to either side.
_NINE_OF_TEN = 1.645


@dataclass(frozen=True)
class SweepVariant:
    """One point of a sweep: what was set, and what `predict --json` says of it."""

    settings: Mapping[str, Any]
    document: Document = field(repr=False)
    again: Callable[[], Prediction] | None = field(default=None, repr=False, compare=False)
    source: str = ""  # where it was read from

    @cached_property
    def prediction(self) -> Prediction:
        """The whole answer with its timeline. It is predicted once more when first asked for: a sweep keeps numbers alone."""
        assert self.again is not None
        return self.again()

    @property
    def step_time_ms(self) -> float:
        """Predicted."""
        return float(self.document["step_time_ms"])

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That nine of ten measured steps are expected in."""
        low, high = self.document["interval_ms"]
        return low, high

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None where the batch is not known."""
        return self.document.get("samples_per_s")

    @property
    def tokens_per_s(self) -> float | None:
        """None where batch or sequence is not known."""
        return self.document.get("tokens_per_s")

    @property
    def speed(self) -> float:
        """What variants are ranked by: samples per second, or steps where batches are not known."""
        return self.samples_per_s or 1e3 / max(self.step_time_ms, 1e-9)

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest rank; None where it is not known."""
        peak: int | None = self.document["memory"].get("peak_bytes")
        return peak

    @property
    def fits(self) -> bool | None:
        """Whether every rank has room; None where that is not known."""
        fits: bool | None = self.document["memory"].get("fits")
        return fits

    @property
    def tight(self) -> bool:
        """Whether it fits by less than what predicted peaks may be off by."""
        verdict = self.document.get("verdict")
        return self.fits is True and isinstance(verdict, Mapping) and verdict.get("tight") is True

    @property
    def notices(self) -> Iterator[str]:
        """What its answer says besides numbers."""
        verdict = self.document.get("verdict")
        yield from map(Caveat, verdict.get("caveats", ()) if isinstance(verdict, Mapping) else ())
        yield from self.document.get("warnings", ())
        yield from map(Basis, self.document.get("basis", ()))

    @property
    def cost(self) -> float | None:
        """Of so many tokens or samples, whatever is known, or of a step; None without a price."""
        keys = ("cost_per_trillion_tokens", "cost_per_million_samples", "cost_per_step")
        return next((self.document[key] for key in keys if self.document.get(key) is not None), None)

    @property
    def own_error(self) -> float:
        """What its prediction is off by for itself, beside errors that answers about one machine share; none as recorded."""
        if self.document.get("platform") is None:
            return 0.0
        verdict = self.document.get("verdict")
        certainty = verdict.get("certainty") if isinstance(verdict, Mapping) else None
        return MEASURED_OWN_ERROR if isinstance(certainty, Mapping) and certainty.get("measured") else OWN_ERROR

    def draws(self) -> Floats:
        """The time of a sample, or of a step, once per draw. Those of one machine share their errors; others have their own."""
        times = np.asarray(self.document.get("draws_ms") or (), dtype=np.float64)
        if len(times) != _DRAWS:
            low, high = np.log(self.interval_ms)
            spread = np.exp((high - low) / (2 * _NINE_OF_TEN) * self._normal())
            return np.asarray(self.step_time_ms * spread)
        machine = _RANKS.sub("", str(self.document.get("platform")))
        return times[np.random.default_rng(zlib.crc32(machine.encode())).permutation(_DRAWS)]

    def _normal(self) -> Floats:
        drawn = np.random.default_rng(zlib.crc32(f"{self.source} {self.step_time_ms}".encode())).standard_normal(_DRAWS)
        return np.asarray((drawn - drawn.mean()) / drawn.std())

    def to_dict(self) -> Document:
        """Settings and the keys of a prediction."""
        return {"settings": dict(self.settings), **self.document}


_Variant = TypeVar("_Variant", bound=SweepVariant)


@dataclass(frozen=True)
class AgainstFirst:
    """One answer against the first: how many times as long it takes for the same work, and how sure that is."""

    ratio: float
    interval: tuple[float, float]
    p_faster: float

    @property
    def certain(self) -> bool:
        """Whether nine of ten draws are on the same side."""
        low, high = self.interval
        return low > 1.0 or high < 1.0

    def to_dict(self) -> Document:
        """Plain values."""
        return {"ratio": self.ratio, "interval": list(self.interval), "p_faster": self.p_faster, "certain": self.certain}


def differences(variants: Sequence[SweepVariant], *, per_sample: bool) -> tuple[AgainstFirst, ...]:
    """Of each to the first, for the same work; errors that answers about one machine share cancel."""
    amounts = [float(each.document["batch"]) if per_sample else 1.0 for each in variants]
    times = [each.step_time_ms / amount for each, amount in zip(variants, amounts, strict=True)]
    draws = [each.draws() / amount for each, amount in zip(variants, amounts, strict=True)]
    found = ratios(times, draws, [each.own_error for each in variants])
    return tuple(
        AgainstFirst(time / times[0], (min(low, time / times[0]), max(high, time / times[0])), shorter)
        for time, (low, high, shorter) in zip(times, found, strict=True)
    )


@dataclass(frozen=True)
class LeftOutVariant:
    """A combination that cannot be predicted, and why."""

    settings: Mapping[str, Any]
    reason: str

    def to_dict(self) -> Document:
        """Plain values."""
        return {"settings": dict(self.settings), "reason": self.reason}


@dataclass(frozen=True, repr=False)
class Predictions(Sequence["Prediction"]):
    """The predictions of a sweep, in the order they were asked for."""

    variants: tuple[SweepVariant, ...]
    left_out: tuple[LeftOutVariant, ...] = ()

    def __len__(self) -> int:
        return len(self.variants)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [each.prediction for each in self.variants[index]]
        return self.variants[index].prediction

    def __iter__(self) -> Iterator[Prediction]:
        return (each.prediction for each in self.variants)

    def __repr__(self) -> str:
        if not self.variants:
            return "<Predictions: none>"
        best = self.ranked[0]
        fits = ", which does not fit" if best.fits is False else ", which barely fits" if best.tight else ""
        step = f"{time_ms(best.step_time_ms)} ms per step"
        return f"<Predictions: {len(self)} variants, most per second with {settings_words(best.settings)}: {step}{fits}>"

    @property
    def ranked(self) -> tuple[SweepVariant, ...]:
        """Most samples per second first, what does not fit behind all others; steps per second where batches are not known."""
        return tuple(sorted(self.variants, key=lambda each: (each.fits is False, -each.speed)))

    @property
    def fitting(self) -> tuple[SweepVariant, ...]:
        """Those that fit, or of which nobody knows, best first."""
        return tuple(each for each in self.ranked if each.fits is not False)

    @cached_property
    def tied(self) -> tuple[SweepVariant, ...]:
        """Those that fit and that errors do not tell from the best, best first."""
        best, others = self.fitting[:1], self.fitting[1:]
        per_sample = all(each.samples_per_s is not None for each in self.fitting)
        found: list[SweepVariant] = []
        for at in range(0, len(others), _COMPARED_AT_ONCE):
            some = others[at : at + _COMPARED_AT_ONCE]
            against = differences((*best, *some), per_sample=per_sample)[1:]
            found += [each for each, difference in zip(some, against, strict=True) if not difference.certain]
        return tuple(found)

    @property
    def with_room(self) -> SweepVariant | None:
        """The best that fits clearly, where the best of all barely does; None where there is none, or no need of one."""
        return first_with_margin(self.fitting, lambda each: each.tight)

    @property
    def best_by_platform(self) -> dict[str, SweepVariant]:
        """The best of every platform that has one which fits, in order of the best."""
        best: dict[str, SweepVariant] = {}
        for each in self.fitting:
            best.setdefault(str(each.settings.get(PLATFORM, "")), each)
        return best

    @property
    def cheapest(self) -> SweepVariant | None:
        """Of those that fit, by what samples or tokens cost; None without a price."""
        priced = [each for each in self.fitting if each.cost is not None]
        return min(priced, key=lambda each: each.cost or 0.0, default=None)

    def front(self, of: str = "memory") -> tuple[SweepVariant, ...]:
        """Variants that fit and that no other beats both in speed and in `memory`, or in `cost`; fastest first."""
        amounts = {id(each): each.peak_bytes if of == "memory" else each.cost for each in self.fitting}
        found: list[SweepVariant] = []
        least = float("inf")
        for each in sorted(self.fitting, key=lambda each: (-each.speed, amounts[id(each)] or 0)):
            amount = amounts[id(each)]
            as_good = found and each.speed == found[-1].speed and amount == least
            if amount is not None and (amount < least or as_good):
                found.append(each)
                least = amount
        return tuple(found)

    @property
    def varied(self) -> dict[str, list[Any]]:
        """Settings that differ between variants, and their values in the order in which they were given.

        Keys of named variants stand behind their name, which says enough.
        """
        values: dict[str, dict[str, Any]] = {}
        for settings in (each.settings for group in (self.variants, self.left_out) for each in group):
            for name, value in settings.items():
                values.setdefault(name, {})[repr(value)] = value
        last = list(values).index(VARIANT) if VARIANT in values else len(values)
        return {name: list(known.values()) for at, (name, known) in enumerate(values.items()) if len(known) > 1 and at <= last}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out and why, a line for every kind of reason."""
        kinds: dict[str, list[LeftOutVariant]] = {}
        for each in self.left_out:
            kinds.setdefault(_NUMBERS.sub("#", each.reason), []).append(each)
        return tuple(self._left_out_words(alike) for alike in kinds.values())

    @cached_property
    def notices(self) -> Notices:
        """What was left out, and what variants say."""
        return Notices.of((*self.warnings, *shared_notices(self.variants, self._which))).without_headline

    def _left_out_words(self, alike: Sequence[LeftOutVariant]) -> str:
        """Variants left out for one reason: which, and the reason of the first."""
        some = "" if len({each.reason for each in alike}) == 1 else "for instance, "
        return f"left out: {self._which(alike)}: {some}{alike[0].reason}"

    def _which(self, alike: Sequence[SweepVariant | LeftOutVariant]) -> str:
        """Variants by the settings that they share, and how many they are where others share these too."""
        words: list[str] = []
        those: list[SweepVariant | LeftOutVariant] = [*self.variants, *self.left_out]
        for name, known in self.varied.items():
            there = {repr(each.settings.get(name)): each.settings.get(name) for each in alike}
            those = [each for each in those if repr(each.settings.get(name)) in there]
            if len(there) < len(known):
                shown = ", ".join(value_words(value) for value in [*there.values()][:_VALUES_NAMED])
                words.append(f"{name} {shown}{', ...' * (len(there) > _VALUES_NAMED)}")
        return f"{len(alike):,} variants, " * (len(those) > len(alike) > 1) + (" and ".join(words) or "all")

    def to_dict(self) -> Document:
        """What `steptime sweep --json` writes."""
        places = {id(each): place for place, each in enumerate(self.variants)}
        fronts = {name: [places[id(each)] for each in self.front(name)] for name in ("memory", "cost")}
        cheapest = self.cheapest
        return {
            "schema_version": SCHEMA_VERSION,
            "best": places[id(self.fitting[0])] if self.fitting else None,
            "cheapest": None if cheapest is None else places[id(cheapest)],
            "tied": [places[id(each)] for each in self.tied],
            "best_by_platform": {name: places[id(each)] for name, each in self.best_by_platform.items()},
            "front": fronts,
            "variants": [each.to_dict() for each in self.variants],
            "left_out": [each.to_dict() for each in self.left_out],
            "warnings": list(self.warnings),
        }

    def to_table(self) -> pa.Table:
        """A row for every variant."""
        return table_of(self.rows())

    def rows(self) -> list[Document]:
        """A row for every variant: settings, what `predict` says in one value each, and marks of the best ones."""
        rows = []
        names = list(dict.fromkeys(name for each in self.variants for name in each.settings))
        texts = {name for name in names if not _of_one_type(each.settings.get(name) for each in self.variants)}
        fronts = {name: {id(each) for each in self.front(name)} for name in ("memory", "cost")}
        for each in self.variants:
            low, high = each.interval_ms
            values = {name: each.settings.get(name) for name in names}
            row = {name: value_words(value) if name in texts and value is not None else value for name, value in values.items()}
            more: Document = {"interval_low_ms": low, "interval_high_ms": high}
            more |= {"peak_bytes": each.peak_bytes, "fits": each.fits, "tight": each.tight}
            more["tied"] = any(each is other for other in self.tied)
            more |= {f"on_{name}_front": id(each) in known for name, known in fronts.items()}
            rows.append({**row, **{key: value for key, value in scalars(each.document).items() if key not in row}, **more})
        return rows

    def csv(self, path: str | Path) -> None:
        """Writes a table with a head, a line for every variant."""
        write_output(Path(path), csv_of(self.rows()))

    def parquet(self, path: str | Path) -> None:
        """Writes the same as a Parquet file."""
        import pyarrow.parquet as pq

        with output(Path(path)) as unfinished:
            pq.write_table(self.to_table(), unfinished)

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime sweep --html`."""
        from steptime._report.sweep_page import sweep_page

        write_output(Path(path), sweep_page(self))


def shared_notices(variants: Sequence[_Variant], which: Callable[[Sequence[_Variant]], str]) -> Iterator[str]:
    """What all say, once; what some say, with which do."""
    found: dict[tuple[type[str], str], list[_Variant]] = {}
    for each in variants:
        for text in each.notices:
            found.setdefault((type(text), text), []).append(each)
    for (kind, text), those in sorted(found.items(), key=lambda item: len(item[1]) < len(variants)):
        yield kind(text if len(those) == len(variants) else f"{which(those)}: {text}")


def csv_of(rows: Sequence[Document]) -> str:
    """Rows as CSV, a column for every key that one of them has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Keep names from being formulas in a spreadsheet or escapes on a terminal."""
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def settings_words(settings: Mapping[str, Any]) -> str:
    """Settings of a variant in one line."""
    return ", ".join(f"{name} {value_words(value)}" for name, value in settings.items()) or "as it is"


def value_words(value: Any) -> str:
    """The value of a setting."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _of_one_type(values: Iterator[Any]) -> bool:
    """Whether values can be a column: of one plain type, or not there."""
    kinds = {type(value) for value in values if value is not None}
    return len(kinds) <= 1 and kinds <= {int, float, str, bool}
