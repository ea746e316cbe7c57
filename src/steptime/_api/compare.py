"""`compare`: several answers side by side, what differs between their inputs, and which differences are more than errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._api.predict import platform_ranks, predict
from steptime._api.read import read
from steptime._build.config_values import read_json
from steptime._diff.attribute import difference
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._report.answers import Prediction
from steptime._report.compare import ComparedAnswers, Item
from steptime._report.diff import Compared
from steptime._report.json import Document
from steptime._report.sweep import Predictions
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._api.read import Source

# What an answer of `predict --json` begins with, and in how many bytes.
_LOOKED_AT = 1 << 12
_ANSWER = (b'"step_time_ms"', b'"best"', b'"variants"')
_MOST_ITEMS = 10_000
# Keys of which a config has one, and an answer none.
_CONFIG_KEYS = {"kind", "layers", "tables"}


def compare(
    *sources: Source | Prediction | Predictions | Document,
    platform: str | Path | Platform | Sequence[str | Path | Platform] | None = None,
    calibration: str | Path | Calibration | None = None,
    profiled: bool = False,
    price: float | None = None,
) -> ComparedAnswers:
    """Compare answers: predictions, sweeps, their JSON (`predict --json`, `sweep --json`), or anything that `predict` takes.

    What was not predicted yet is: as recorded, or on `platform`, on each of several. Differences are to the first; errors that
    two answers about the same machine share (its clock, its card, kernels of a kind) cancel. Two steps that were not read from
    JSON are attributed too: `ComparedAnswers.diff` is what `diff` says.
    """
    machines = [platform] if platform is None or isinstance(platform, str | Path | Platform) else list(platform)
    items: list[Item] = []
    for source in sources:
        items += _items(source, machines, calibration, profiled=profiled, price=price)
        if len(items) > _MOST_ITEMS:
            raise InputError(f"{len(items):,} answers; expected {_MOST_ITEMS:,} at most")
    if len(items) < 2:
        raise InputError("there is one answer; give two or more to compare: configs, recordings, or answers as JSON")
    steps = [each.step for each in items]
    both = None
    if len(steps) == 2 and steps[0] is not None and steps[1] is not None:
        both = Compared(difference(steps[0], steps[1]))
    return ComparedAnswers(tuple(items), both)


def _items(
    source: Source | Prediction | Predictions | Document,
    machines: Sequence[str | Path | Platform | None],
    calibration: str | Path | Calibration | None,
    *,
    profiled: bool,
    price: float | None,
) -> Iterator[Item]:
    if isinstance(source, Prediction):
        yield Item.of(source.workload.name or "prediction", source)
    elif isinstance(source, Predictions):
        yield from (Item(each.settings, each.document, source="sweep") for each in source.variants)
    elif isinstance(source, Mapping) and not _CONFIG_KEYS.intersection(source):
        yield from _of_document(source, "answer")
    elif isinstance(source, str | Path) and _is_answer(Path(source)):
        yield from _of_document(read_json(Path(source), "an answer of steptime"), str(source))
    else:
        for machine in machines:
            workload = read(source, platform_ranks=platform_ranks(machine))
            recorded = any(program.recorded for program in workload.programs)
            answer = predict(
                workload,
                machine,
                calibration=None if machine is None else calibration,
                profiled=profiled and recorded,
                price=price,
            )
            yield Item.of(_called(source, workload), answer)


def _called(source: Source, workload: Workload) -> str:
    if isinstance(source, str | Path):
        return str(source)
    if isinstance(source, Workload | Mapping) or callable(source):
        return workload.name or "workload"
    return " ".join(map(str, source))


def _is_answer(path: Path) -> bool:
    """Whether a file is an answer of `predict --json` or `sweep --json`: its first bytes say so."""
    if path.suffix != ".json":
        return False
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
    except OSError:
        return False
    return b'"schema_version"' in begin and any(key in begin for key in _ANSWER) and b'"programs"' not in begin


def _of_document(document: Any, where: str) -> Iterator[Item]:
    if isinstance(document, Mapping) and isinstance(document.get("variants"), list):
        for place, each in enumerate(document["variants"]):
            yield _checked(each, f"{where}, variants[{place}]", where)
        return
    yield _checked(document, where, where)


def _checked(document: Any, where: str, name: str) -> Item:
    """An answer that another run wrote: what is taken from it must be there and be numbers."""
    if not isinstance(document, Mapping) or document.get("schema_version") != 1:
        raise InputError(
            f"{where}: no answer of steptime with schema_version 1; expected what --json of predict or sweep writes"
        )
    interval, draws, memory = (document.get(key) for key in ("interval_ms", "draws_ms", "memory"))
    lists = isinstance(interval, list) and len(interval) == 2 and isinstance(draws or [], list)
    times = [document.get("step_time_ms"), *(interval if isinstance(interval, list) else ()), *(draws or () if lists else ())]
    if not lists or not all(_positive(each) for each in times) or not isinstance(memory, Mapping):
        raise InputError(
            f"{where}: step_time_ms, interval_ms, draws_ms or memory is missing or is no time; write the answer anew"
        )
    others = ("samples_per_s", "tokens_per_s", "batch", "mfu", "cost_per_step", "cost_per_million_samples")
    odd = next((key for key in others if document.get(key) is not None and not _number(document[key])), None)
    odd = odd or next((f"memory.{key}" for key in ("peak_bytes", "capacity_bytes") if not _number(memory.get(key) or 0)), None)
    if odd is not None or not isinstance(document.get("warnings", []), list):
        raise InputError(f"{where}: {odd or 'warnings'} is damaged; write the answer anew")
    settings = document.get("settings", {})
    inside = {key: value for key, value in document.items() if key not in ("settings", "difference")}
    return Item(settings if isinstance(settings, Mapping) else {}, inside, source=name)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _positive(value: Any) -> bool:
    return _number(value) and value > 0
