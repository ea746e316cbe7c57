"""`sweep`: the same job with other batches, ranks, platforms and values of its config, a prediction each."""

from __future__ import annotations

import gc
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from steptime._api.compiling import as_compiled
from steptime._api.predict import platform_for, platform_ranks, predict
from steptime._api.read import config_file, named_in, read, runs_code
from steptime._fuse.compiled import checked_mode
from steptime._lookups.workload import WorkloadLookups
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform, platform_parts
from steptime._program.workload import Workload
from steptime._report.answers import Prediction
from steptime._report.json import Document
from steptime._report.sweep import LeftOutVariant, Predictions, SweepVariant
from steptime._sweep import journal as journals
from steptime._sweep.axes import VARIANT, SweepPoint, points_of
from steptime._sweep.journal import Journal
from steptime._sweep.workers import run
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._api.read import Source

    Files: TypeAlias = str | Path | Sequence[str | Path] | None
    Told: TypeAlias = Callable[[int, int], None]

# Settings that are options of `predict`; all others are keys of a config.
OPTIONS = (
    "platform", "batch", "ranks", "plan_file", "device", "host", "fabric", "power_cap_w", "lookups", "calibration", "what_if",
    "compile",
)  # fmt: skip
# Of these, what a workload is built from; the others say where it is predicted.
_OF_WORKLOAD = ("batch", "ranks", "plan_file")
_MACHINE = ("platform", "device", "host", "fabric")
NOTHING = "none"
"""Of what-ifs: the step as it is."""

# Variants after which circles of garbage are looked for: each leaves some megabytes.
_COLLECTED_EVERY = 16


def sweep(
    source: Source,
    platform: str | Path | Platform | Sequence[str | Path | Platform] | None = None,
    *,
    batch: int | Iterable[int] | None = None,
    ranks: int | Iterable[int] | None = None,
    settings: Mapping[str, Any] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    plan: Files = None,
    device: Files = None,
    host: Files = None,
    fabric: Files = None,
    power_cap_w: float | Iterable[float] | None = None,
    lookups: Files | WorkloadLookups = None,
    calibration: Files | Calibration = None,
    what_if: str | Sequence[str | Sequence[str]] | None = None,
    compile: str | Sequence[str] | None = None,
    strict: bool = False,
    profiled: bool = False,
    price: float | Mapping[str, float] | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    journal: str | Path | None = None,
    progress: Told | None = None,
) -> Predictions:
    """Predict every combination of what is given: platforms, batches, ranks, values of a config's keys, options of `predict`.

    Every argument from `batch` to `compile` is a value or several, of which each is predicted with every other. `settings` are
    keys of a config, dotted, with a value or a list of values: `{"parallel.fsdp": [1, 8]}`. `variants` are named combinations
    that go together: `{"ddp": {}, "tensor": {"parallel.tensor": 8}}`. `price` is of one GPU for an hour, or one of each
    platform by its name. Combinations that cannot be built (a batch that ranks do not divide, sizes that do not make the ranks,
    a platform with fewer ranks) are left out and named; where all are, the first one's error is raised.

    `executor` runs the variants: processes, threads, or a cluster's `concurrent.futures.Executor`; without one, this process
    does, with others' help where that is faster, `workers` of them at most. `journal` is a file to which finished variants are
    written: a sweep that was ended goes on from there. `progress` is told how many of how many are done.
    """
    given: dict[str, list[Any]] = {
        "platform": _several(platform), "batch": _several(batch), "ranks": _several(ranks), "plan_file": _several(plan),
        "device": _several(device), "host": _several(host), "fabric": _several(fabric),
        "power_cap_w": _several(power_cap_w), "lookups": _several(lookups), "calibration": _several(calibration),
        "what_if": _several(what_if), "compile": [checked_mode(each) for each in _several(compile)],
    }  # fmt: skip
    axes = {name: values for name, values in given.items() if values}
    empty = (batch, ranks, power_cap_w, plan, device, host, fabric, what_if, compile)
    placed = "platform" in axes or (variants and all("platform" in each for each in variants.values()))
    if not placed or any(each is not None and not _several(each) for each in empty):
        raise InputError("a sweep needs at least one platform, and one value of every option that is given")
    objects, axes = _by_name(axes)
    axes |= {key: list(values) if isinstance(values, list | tuple) else [values] for key, values in (settings or {}).items()}
    points = points_of(axes, variants)
    platforms = list(dict.fromkeys(str(point.settings["platform"]) for point in points))
    for name in platforms:
        if ("platform", name) not in objects:
            platform_parts(name)  # one that is not there is a slip, not a variant to leave out
    job = _Job(source, objects, _prices(price, platforms), strict=strict, profiled=profiled, platforms=platforms, points=points)
    results: list[Document | str | None] = [None] * len(points)
    with _Kept(job, points, journal) as kept:
        done = [at for at in range(len(points)) if kept.found(at) is not None]
        for at in done:
            results[at] = kept.found(at)
        counted = [len(done)]

        def told(at: int, result: Document | str) -> None:
            results[at] = result
            kept.add(at, result)
            counted[0] += 1
            if progress is not None:
                progress(counted[0], len(points))

        left = [at for at in range(len(points)) if results[at] is None]
        run(job, points, _groups(job, points, left), told, executor, workers)
    return _collected(job, points, results)


class _Job:
    """What all variants have in common, and what those done last share with the next: their workload and machines."""

    def __init__(
        self,
        source: Source,
        objects: Mapping[tuple[str, str], Any],
        prices: Mapping[str, float | None],
        *,
        strict: bool,
        profiled: bool,
        platforms: Sequence[str],
        points: Sequence[SweepPoint],
    ) -> None:
        self.objects, self.prices, self.strict, self.profiled = objects, prices, strict, profiled
        names = [] if isinstance(source, Workload | Mapping) or callable(source) else named_in(source)
        self.config = config_file(names)  # other processes read it themselves
        first = objects.get(("platform", platforms[0]), platforms[0])
        self._last: tuple[str, Workload] | None = None
        self.workload = None if self.config is not None else self._first(source, names, points, platform_ranks(first))
        self._machines: dict[str, Platform] = {}
        self._done = 0

    def _first(self, source: Source, names: Sequence[str], points: Sequence[SweepPoint], ranks: int | None) -> Workload:
        """What others are made from. Code runs as the first point has it: some does not run as one rank, or takes no batch."""
        if not callable(source) and not (names and runs_code(names[0])):
            return read(source, platform_ranks=ranks)
        options = self.options(points[0])
        common = {name: options[name] for name in ("batch", "ranks") if all(name in point.settings for point in points)}
        keys = {key: value for point in points for key, value in point.settings.items() if key not in (*OPTIONS, VARIANT)}
        result = read(source, **common, settings=keys, platform_ranks=ranks)
        if set(common) == {name for name in _OF_WORKLOAD if name in options}:
            self._last = self.shared(points[0]), result
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Without what is shared: whoever gets the job builds their own."""
        return {**vars(self), "_last": None, "_machines": {}}

    def __call__(self, points: Sequence[SweepPoint]) -> list[Document | str]:
        """The answers, or why there is none."""
        return [self._result(point) for point in points]

    def _result(self, point: SweepPoint) -> Document | str:
        self._done += 1
        if self._done % _COLLECTED_EVERY == 0:
            gc.collect()
        try:
            answer = self.prediction(point)
        except InputError as error:
            return str(error)
        return answer.to_dict()

    def prediction(self, point: SweepPoint) -> Prediction:
        """The whole answer."""
        options = self.options(point)
        workload = self._workload(point)
        machine = self._machine(options, workload.world_size)
        if "compile" in options:
            workload = as_compiled(workload, options["compile"], machine)
        change = options.get("what_if", NOTHING)
        changes = [each.strip() for each in change.split(";")] if change != NOTHING else []
        price = self.prices.get(str(point.settings["platform"]))
        return predict(
            workload,
            machine,
            device=options.get("device"),
            host=options.get("host"),
            fabric=options.get("fabric"),
            power_cap_w=options.get("power_cap_w"),
            lookups=options.get("lookups"),
            calibration=options.get("calibration"),
            strict=self.strict,
            what_if=changes,
            profiled=self.profiled,
            price=price,
            suggest=False,
        )

    def options(self, point: SweepPoint) -> dict[str, Any]:
        """The options of `predict`, with what was given as an object in place of its name."""
        return {name: self.objects.get((name, str(value)), value) for name, value in point.settings.items() if name in OPTIONS}

    def shared(self, point: SweepPoint) -> str:
        """What a workload is built from, in one text."""
        options = self.options(point)
        keys = {key: value for key, value in point.settings.items() if key not in (*OPTIONS, VARIANT) or key in _OF_WORKLOAD}
        ranks = platform_ranks(options["platform"]) if self.config is not None and "ranks" not in keys else None
        return json.dumps([keys, ranks], sort_keys=True, default=str)

    def _workload(self, point: SweepPoint) -> Workload:
        key, last = self.shared(point), self._last
        if last is not None and last[0] == key:
            return last[1]
        options = self.options(point)
        keys = {key: value for key, value in point.settings.items() if key not in (*OPTIONS, VARIANT)}
        batch, ranks = options.get("batch"), options.get("ranks")
        if self.workload is not None:
            if "plan_file" in options:
                raise InputError("a plan of tables goes with a DLRM config or a sharding task")
            result = self.workload.varied(batch=batch, ranks=ranks, settings=keys)
        else:
            assert self.config is not None
            result = read(
                self.config,
                batch=batch,
                ranks=ranks,
                settings=keys,
                plan=options.get("plan_file"),
                platform_ranks=platform_ranks(options["platform"]),
            )
        self._last = key, result
        return result

    def _machine(self, options: Mapping[str, Any], ranks: int) -> Platform:
        parts: list[Any] = [options.get(name) for name in _MACHINE]
        key = repr([*(each.parts if isinstance(each, Platform) else each for each in parts), ranks])
        if key not in self._machines:
            self._machines[key] = platform_for(parts[0], ranks, device=parts[1], host=parts[2], fabric=parts[3])
        return self._machines[key]


class _Kept:
    """Finished variants in a journal, where there is one."""

    def __init__(self, job: _Job, points: Sequence[SweepPoint], path: str | Path | None) -> None:
        self.journal = None if path is None else Journal(Path(path))
        self.keys = [] if self.journal is None else list(_keys(job, points))

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal is not None:
            self.journal.close()

    def found(self, at: int) -> Document | str | None:
        """The result of a point that is there already."""
        return None if self.journal is None else self.journal.entries.get(self.keys[at])

    def add(self, at: int, result: Document | str) -> None:
        """One more."""
        if self.journal is not None:
            self.journal.add(self.keys[at], result)


def _keys(job: _Job, points: Sequence[SweepPoint]) -> Iterator[str]:
    """Per point a digest of all that its answer depends on."""
    if job.config is None or job.objects:
        raise InputError("a journal goes with a config and with names or files: what else a sweep is of, no file tells")
    common = [journals.version(), journals.of_files(_read_with(job.config)), job.strict, job.profiled]
    of_files: dict[str, str] = {}
    for point in points:
        named = [*_files_of(point)]
        for path in named:
            of_files.setdefault(str(path), journals.of_files([path]))
        price = job.prices.get(str(point.settings["platform"]))
        yield journals.digest(common, point.settings, price, [of_files[str(path)] for path in named])


def _files_of(point: SweepPoint) -> Iterator[Path]:
    """Files that options of a point name, those of a platform's parts too."""
    texts = [str(value) for name, value in point.settings.items() if name in OPTIONS and isinstance(value, str)]
    if Path(str(point.settings["platform"])).exists():
        parts = platform_parts(str(point.settings["platform"]))
        texts += [each for each in (parts.device, parts.host, parts.fabric, parts.calibration) if each]
    yield from (Path(text) for text in dict.fromkeys(texts) if len(text) < 4096 and Path(text).exists())


def _read_with(config: Path) -> list[Path]:
    """A config and the files that it names: plans, statistics of lookups."""
    found = [config]
    if config.suffix == ".toml":
        try:
            values = tomllib.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return found  # whoever reads it says what is wrong
        found += [file for text in _texts(values) if (file := config.parent / text).is_file()]
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and 0 < len(value) < 4096 and "\0" not in value:
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _several(value: Any) -> list[Any]:
    """Values of an option: several, one, or none."""
    if value is None:
        return []
    alone = isinstance(value, str | Path | Platform | Calibration | WorkloadLookups | int | float)
    return [value] if alone else list(value)


def _by_name(axes: Mapping[str, Sequence[Any]]) -> tuple[dict[tuple[str, str], Any], dict[str, list[Any]]]:
    """Objects among the values of options, by option and name, and the options with names in their place."""
    objects: dict[tuple[str, str], Any] = {}
    named: dict[str, list[Any]] = {}
    for option, values in axes.items():
        for number, value in enumerate(values):
            name = value
            if isinstance(value, Platform | Calibration | WorkloadLookups):
                name = value.name if isinstance(value, Platform) else f"{option} {number}"
                objects[option, name] = value
            elif isinstance(value, Path):
                name = str(value)
            elif option == "what_if" and not isinstance(value, str):
                name = "; ".join(value) or NOTHING
            named.setdefault(option, []).append(name)
    return objects, named


def _prices(price: float | Mapping[str, float] | None, platforms: Sequence[str]) -> dict[str, float | None]:
    """The price of a GPU of every platform."""
    if not isinstance(price, Mapping):
        return dict.fromkeys(platforms, price)
    odd = next((name for name in price if name not in platforms), None)
    if odd is not None:
        raise InputError(f"a price of {odd!r}, which is no platform of this sweep; there are {', '.join(platforms)}")
    missing = next((name for name in platforms if name not in price), None)
    if missing is not None:
        raise InputError(f"no price of {missing}: give one of every platform, or one for all")
    return {name: float(price[name]) for name in platforms}


def _groups(job: _Job, points: Sequence[SweepPoint], left: Sequence[int]) -> list[list[int]]:
    """Places of points that share a workload, together."""
    groups: dict[str, list[int]] = {}
    for at in left:
        try:
            key = job.shared(points[at])
        except InputError:  # of a platform that is not there, which is said when it is predicted
            key = f"point {at}"
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def _collected(job: _Job, points: Sequence[SweepPoint], results: Sequence[Document | str | None]) -> Predictions:
    variants: list[SweepVariant] = []
    left_out: list[LeftOutVariant] = []
    for point, result in zip(points, results, strict=True):
        if isinstance(result, dict):
            variants.append(SweepVariant(point.settings, result, _Again(job, point)))
        else:
            left_out.append(LeftOutVariant(point.settings, str(result)))
    if not variants:
        raise InputError(left_out[0].reason)
    return Predictions(tuple(variants), tuple(left_out))


@dataclass(frozen=True)
class _Again:
    """Predicts a variant once more, for its timeline."""

    job: _Job
    point: SweepPoint

    def __call__(self) -> Prediction:
        return self.job.prediction(self.point)
