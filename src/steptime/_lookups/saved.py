"""Lookup statistics as JSON: one small object per table. What a file holds is checked before it is believed."""

from __future__ import annotations

import gzip
import json
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

from steptime._files import read_whole, write_output
from steptime._lookups.generators import MOST_ROWS
from steptime._lookups.spectrum import HOTTEST, Footprint, Spectrum, grid
from steptime._lookups.statistics import QUANTILES, REUSE_BINS, Lengths, Statistics
from steptime._lookups.table import TableStatistics
from steptime.errors import InputError

SCHEMA_VERSION = 1

_NUMBERS = ("dim", "rows", "batch", "lookups", "unique", "pooling_spread")
_WHOLE = _NUMBERS[:-1]
_LISTS = {"reuse": REUSE_BINS, "lengths": len(QUANTILES), "hottest": len(HOTTEST)}  # with so many entries each
_ANY_LENGTH = ("spectrum_rows", "spectrum_lookups", "footprint")
_FIELDS = {"schema_version", "table", *_NUMBERS, *_LISTS, *_ANY_LENGTH}
# What a number may be: rows as generators have them, width and batch as configs, all else as many lookups as 2^24 samples
# of a million each come to.
_MOST = {"rows": MOST_ROWS, "dim": 1 << 20, "batch": 1 << 24}
_MOST_LOOKUPS = 1 << 44
_ROUNDED = 0.02  # by which totals may differ from the sum of their parts


def to_dict(statistics: TableStatistics) -> dict[str, Any]:
    """Plain values; the windows of the footprint follow from the lookups (`footprint.grid`)."""
    counted = statistics.counted
    return {
        "schema_version": SCHEMA_VERSION,
        "table": statistics.table,
        "dim": statistics.dim,
        "rows": counted.rows,
        "batch": counted.batch,
        "lookups": counted.lookups,
        "unique": counted.unique,
        "pooling_spread": counted.pooling_spread,
        "reuse": list(counted.reuse),
        "lengths": _short(statistics.lengths.quantiles),
        "hottest": list(statistics.hottest),
        "spectrum_rows": _short(statistics.spectrum.rows),
        "spectrum_lookups": _short(statistics.spectrum.lookups),
        "footprint": _short(statistics.footprint.rows),
    }


def _short(values: tuple[float, ...]) -> list[float]:
    """Whole numbers without a point."""
    return [int(value) if value == int(value) else value for value in values]


def from_dict(values: Any, where: str = "Lookup statistics") -> TableStatistics:
    """The statistics that `to_dict` gave; `where` is said in errors."""
    if not isinstance(values, dict):
        raise InputError(f"{where}: {type(values).__name__} found; expected a JSON object of lookup statistics.")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{where}: schema_version is {version!r}; this release reads {SCHEMA_VERSION}.")
    if set(values) != _FIELDS:
        odd = sorted(set(values) ^ _FIELDS)[0]
        raise InputError(f"{where}: {odd!r} is {'missing' if odd in _FIELDS else 'unknown'}; expected {sorted(_FIELDS)}.")
    _check(values, where)
    lookups = values["lookups"]
    windows = tuple(grid(lookups).tolist())
    if len(values["footprint"]) != len(windows) or len(values["spectrum_rows"]) != len(values["spectrum_lookups"]):
        raise InputError(
            f"{where}: {len(values['footprint'])} footprint entries and {len(values['spectrum_rows'])} and "
            f"{len(values['spectrum_lookups'])} of the spectrum; expected {len(windows)}, and two lists of one length."
        )
    _check_sums(values, where)
    lists = {name: tuple(map(float, values[name])) for name in (*_LISTS, *_ANY_LENGTH)}
    return TableStatistics(
        table=values["table"],
        dim=values["dim"],
        counted=Statistics(
            rows=values["rows"],
            batch=values["batch"],
            lookups=lookups,
            unique=values["unique"],
            pooling_spread=float(values["pooling_spread"]),
            reuse=lists["reuse"],
        ),
        lengths=Lengths(lists["lengths"]),
        hottest=tuple(map(int, lists["hottest"])),
        spectrum=Spectrum(lists["spectrum_rows"], lists["spectrum_lookups"]),
        footprint=Footprint(windows, lists["footprint"]),
    )


def _check(values: dict[str, Any], where: str) -> None:
    if not isinstance(values["table"], str):
        raise InputError(f"{where}: table is {values['table']!r}; expected a name.")
    for name in _NUMBERS:
        most = _MOST.get(name, _MOST_LOOKUPS)
        if not _is_number(values[name], most) or (name in _WHOLE and not isinstance(values[name], int)):
            raise InputError(f"{where}: {name} is {_shown(values[name])}; expected a number of 0 or more, at most {most}.")
    for name in (*_LISTS, *_ANY_LENGTH):
        entries = values[name]
        if not isinstance(entries, list) or len(entries) != _LISTS.get(name, len(entries)):
            raise InputError(f"{where}: {name} is not a list of {_LISTS.get(name, 'numbers')}; expected what steptime saved.")
        bad = next((index for index, entry in enumerate(entries) if not _is_number(entry)), None)
        if bad is not None:
            found = _shown(entries[bad])
            raise InputError(f"{where}: {name}[{bad}] is {found}; expected a number of 0 or more, at most {_MOST_LOOKUPS}.")
    if values["rows"] < 1 or values["batch"] < 1 or values["dim"] < 1 or values["unique"] > values["lookups"]:
        raise InputError(
            f"{where}: rows {values['rows']}, dim {values['dim']}, batch {values['batch']}, lookups {values['lookups']}, "
            f"unique {values['unique']}; expected at least one row, element and sample, and no more distinct rows than lookups."
        )


def _check_sums(values: dict[str, Any], where: str) -> None:
    """What is counted in parts adds up to what was counted in all: times are computed from either."""
    rows, lookups, footprint = (values[name] for name in _ANY_LENGTH)
    for name, parts, total in (("unique", rows, values["unique"]), ("lookups", lookups, values["lookups"])):
        if abs(sum(parts) - total) > max(1.0, _ROUNDED * total):
            raise InputError(f"{where}: {name} is {total}, its spectrum adds up to {sum(parts):g}; expected the same.")
    if any(row <= 0 or row > lookup * (1 + _ROUNDED) for row, lookup in zip(rows, lookups, strict=True)):
        raise InputError(f"{where}: a part of the spectrum has no rows, or fewer lookups than rows; expected one or more each.")
    rising = all(before <= after for before, after in pairwise(footprint))
    if footprint and not (footprint[0] > 0 and rising and footprint[-1] <= max(1.0, values["unique"]) * (1 + _ROUNDED)):
        raise InputError(f"{where}: footprint is no rising list from one row to unique, which is {values['unique']}.")
    if sum(values["reuse"]) > 1 + _ROUNDED:
        raise InputError(f"{where}: the shares of reuse add up to {sum(values['reuse']):g}; expected at most 1.")
    if max(values["lengths"], default=0) > max(1, values["lookups"]) or max(values["hottest"], default=0) > values["lookups"]:
        raise InputError(
            f"{where}: a bag or a row has more lookups than there are, {values['lookups']}; expected at most those."
        )


def _is_number(value: Any, most: int = _MOST_LOOKUPS) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _shown(value: Any) -> str:
    text = (
        repr(value) if not isinstance(value, int) or abs(value) <= _MOST_LOOKUPS else f"a number of {value.bit_length()} bits"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def save(path: Path, statistics: TableStatistics) -> None:
    """Writes one table's statistics; compressed where the name ends in .gz."""
    write_json(path, to_dict(statistics))


def load(path: Path) -> TableStatistics:
    """What `save` wrote."""
    return from_dict(read_json(path), str(path))


def write_json(path: Path, values: Any) -> None:
    """The same values always give the same bytes."""
    text = json.dumps(values, separators=(",", ":"), sort_keys=True).encode()
    write_output(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def read_json(path: Path) -> Any:
    """Values of a file that may be anything."""
    try:
        return json.loads(read_whole(path, unpack=path.suffix == ".gz"))
    except (OSError, ValueError, EOFError, RecursionError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{path}: cannot be read as JSON ({why}); expected lookup statistics saved by steptime") from None
