"""`Subject`: what is explored, the controls it has, and a prediction with any values of them.

One object answers everything about a variant, so that what the page shows, what it exports and what the command line it prints
gives are the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from steptime._api.predict import platform_for, predict
from steptime._api.read import runs_code
from steptime._api.whatif import whatif
from steptime._build.config import Config, read_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import DlrmConfig
from steptime._build.transformer.config import Transformer
from steptime._diff.attribute import difference
from steptime._explore.controls import SET, Control, WrongValueError
from steptime._explore.keys import key_controls
from steptime._explore.machine import AS_RECORDED, job_controls, machine_controls, what_if_controls
from steptime._models.memory.fit import Remedy
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._report.answers import Prediction
from steptime._report.compare import ComparedAnswers, Item
from steptime._report.diff import Compared
from steptime._report.whatif import Suggestions
from steptime._shard.configs import BuildConfig
from steptime.errors import InputError

Values = Mapping[str, Any]
# Whatever a person goes back and forth between.
_REMEMBERED = 16
MOST_COMPARED = 12
"""Variants that a person compares, and that are predicted for it."""

_RULE = f"{SET}rule"
_REPLICAS = (f"{SET}parallel.data", f"{SET}parallel.fsdp")
_SIZES = tuple(f"{SET}parallel.{each}" for each in ("tensor", "context", "pipeline"))


@dataclass(frozen=True)
class Subject:
    """A workload with what the command line said beside it."""

    workload: Workload
    arguments: tuple[str, ...]  # as the command line named the workload
    platform: str | None = None
    plan: str | None = None
    calibration: str | None = None
    _built: dict[tuple[Any, ...], Workload] = field(default_factory=dict, compare=False, repr=False)
    _machines: dict[tuple[Any, ...], Platform] = field(default_factory=dict, compare=False, repr=False)
    _last: dict[tuple[Any, ...], Prediction] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": {}, "_machines": {}, "_last": {}}

    @cached_property
    def config(self) -> Config | None:
        """What its file says; None where it was not made from a config."""
        build = self.workload.rebuild
        if not isinstance(build, BuildConfig):
            return None
        return read_config(build.source, Overrides(platform_ranks=build.platform_ranks or 1))

    @cached_property
    def controls(self) -> dict[str, Control]:
        """All of them by name, in the order in which a page shows them."""
        keys = [] if self.config is None else key_controls(self.config)
        machine = machine_controls(self.workload, self.platform)
        found = [*job_controls(self.workload, self.plan), *machine, *keys, *what_if_controls()]
        if self.plan is not None:
            by_plan = f"the plan {self.plan}"
            found = [replace(each, value=None, empty=by_plan) if each.name == _RULE else each for each in found]
        why = self._no_keys()
        found = [replace(each, disabled=why) if why and each.name.startswith(SET) else each for each in found]
        return {control.name: control for control in found}

    @cached_property
    def _open_ranks(self) -> bool:
        """Whether its file leaves the ranks to the platform, which may be changed."""
        build = self.workload.rebuild
        if not isinstance(self.config, DlrmConfig) or not isinstance(build, BuildConfig) or build.plan is not None:
            return False
        others = [read_config(build.source, Overrides(platform_ranks=count)) for count in (1, 2)]
        first, second = (each.ranks for each in others if isinstance(each, DlrmConfig))
        return first is None or first != second

    def _no_keys(self) -> str:
        """Why the keys of a file cannot be set: a list of tables has none."""
        build = self.workload.rebuild
        if not isinstance(build, BuildConfig) or _has_keys(build):
            return ""
        try:
            read_config(build.source, Overrides(platform_ranks=build.platform_ranks or 1, settings={"loss": "bce"}))
        except InputError:
            return "a list of tables has no keys to change; give a config"
        return ""

    def checked(self, values: Values) -> dict[str, Any]:
        """Values of all controls: those given, if the controls can have them, and the others as they are."""
        unknown = next((name for name in values if name not in self.controls), None)
        if unknown is not None:
            raise WrongValueError(unknown[:40], f"there is no control {unknown[:40]!r} here")
        return {name: control.checked(values.get(name, control.value)) for name, control in self.controls.items()}

    def changed(self, values: Values) -> dict[str, Any]:
        """The values that differ from those to begin with."""
        return {name: value for name, value in values.items() if value != self.controls[name].value}

    def predicted(self, given: Values, *, helps: bool = True) -> Prediction:
        """The prediction with these values; `InputError` where there is none. The last ones are kept, to compare and export.

        Without `helps`, what would make a step fit that does not is not tried, which takes several times as long as predicting.
        """
        values = self.checked(given)
        key, quick = ((repr(values), each) for each in (helps, False))
        if quick in self._last and self._last[quick].fits is not False:
            return self._last[quick]
        if key not in self._last:
            prediction = self._predicted(values, helps=helps)
            _forget(self._last)
            self._last[key] = prediction
        return self._last[key]

    def _predicted(self, values: Values, *, helps: bool) -> Prediction:
        workload = self.built(values)
        options: dict[str, Any] = {"what_if": changes_of(values), "price": values["price"], "host": values["host"]}
        options |= {"power_cap_w": values["power_cap_w"], "calibration": self.calibration, "suggest": helps}
        if values["platform"] == AS_RECORDED:
            return predict(workload, device=values["device"], fabric=values["fabric"], **options)
        return predict(workload, self._machine(values, workload.world_size), **options)

    def remedied(self, given: Values, remedy: Remedy) -> Values | None:
        """Return the values with a remedy; None where controls cannot make it."""
        changed = {f"{SET}{key}": value for key, value in remedy.settings.items()}
        changed |= {name: value for name, value in (("batch", remedy.batch), ("ranks", remedy.ranks)) if value is not None}
        if not changed or any(name not in self.controls or self.controls[name].disabled for name in changed):
            return None
        try:
            self.checked({**given, **changed})
        except WrongValueError:
            return None
        return {**given, **changed}

    def suggested(self, given: Values) -> Suggestions:
        """The changes that would save most of a variant, whatever changes it has already."""
        values = self.checked(given)
        workload = self.built(values)
        if values["platform"] == AS_RECORDED:
            return whatif(workload)
        machine, power_w = self._machine(values, workload.world_size), values["power_cap_w"]
        if power_w is not None:
            machine = replace(machine, device=machine.device.capped(power_w))
        return whatif(workload, machine, calibration=self.calibration)

    def compared(self, variants: Sequence[Values]) -> ComparedAnswers:
        """Variants side by side, as `steptime compare` has them; of two, what the second takes longer for."""
        if not 2 <= len(variants) <= MOST_COMPARED:
            raise InputError(f"{len(variants)} variants; expected 2 to {MOST_COMPARED} to compare")
        items = []
        for given in variants:
            prediction = self.predicted(given, helps=False)
            settings = {name.removeprefix(SET): value for name, value in self.changed(self.checked(given)).items()}
            items.append(Item(settings, prediction.to_dict(), source=self.workload.name or "workload", step=prediction))
        steps = [each.step for each in items if each.step is not None]
        both = Compared(difference(*steps)) if len(steps) == 2 else None
        return ComparedAnswers(tuple(items), both)

    def built(self, values: Values) -> Workload:
        """The workload with checked values."""
        batch, ranks, settings = self._asked(values)
        key = (batch, ranks, repr(sorted(settings.items())))
        if key not in self._built:
            _forget(self._built)
            job, build = self.workload, self.workload.rebuild
            if self._by_rule(values) and isinstance(build, BuildConfig):
                job = replace(job, rebuild=replace(build, plan=None))
            self._built[key] = job.varied(batch=batch, ranks=ranks, settings=settings)
        return self._built[key]

    def _by_rule(self, values: Values) -> bool:
        """Whether a rule was chosen instead of a plan."""
        return self.plan is not None and values.get(_RULE) is not None

    def _asked(self, values: Values) -> tuple[int | None, int | None, dict[str, Any]]:
        """Another batch, other ranks and other keys, None and nothing where they are as they were.

        Ranks stay as many where sizes of groups change, unless the number of replicas is chosen too.
        """
        changed = self.changed(values)
        settings = {name.removeprefix(SET): value for name, value in changed.items() if name.startswith(SET)}
        resized = any(name in changed for name in _SIZES) and not any(name in changed for name in _REPLICAS)
        if settings.get("rule") and isinstance(self.config, DlrmConfig) and self.config.plan is not None:
            settings["plan"] = None  # of the file, which would go before the rule
        ranks = values["ranks"] if "ranks" in changed or resized or self._open_ranks else None
        return changed.get("batch"), ranks, settings

    def _machine(self, values: Values, ranks: int) -> Platform:
        platform = self._platform_name(values, ranks)
        key = (platform, ranks, values["device"], values["host"], values["fabric"])
        if key not in self._machines:
            _forget(self._machines)
            parts = {"device": values["device"], "host": values["host"], "fabric": values["fabric"]}
            self._machines[key] = platform_for(platform, ranks, **parts)
        return self._machines[key]

    def _platform_name(self, values: Values, ranks: int | None) -> str:
        """By the name it was given where it is the same machine; the control has that of all its ranks."""
        same = "platform" not in self.changed(values) and ranks in (None, self.workload.world_size)
        return self.platform if self.platform and same else str(values["platform"])

    def command(self, given: Values) -> str:
        """The command line that predicts the same."""
        values = self.checked(given)
        batch, ranks, settings = self._asked(values)
        options: list[str] = []
        if values["platform"] != AS_RECORDED:
            options += ["--platform", self._platform_name(values, ranks)]
        named = {
            "--batch": batch,
            "--ranks": ranks,
            "--plan": None if self._by_rule(values) else self.plan,
            "--device": values["device"],
        }
        named |= {
            "--host": values["host"],
            "--fabric": values["fabric"],
            "--power-cap": values["power_cap_w"],
            "--price": values["price"],
        }
        for option, value in {**named, "--calibration": self.calibration}.items():
            options += [] if value is None else [option, f"{value:g}" if isinstance(value, float) else str(value)]
        for key, value in settings.items():
            options += ["--set", f"{key}={_written(value)}"]
        for change in changes_of(values):
            options += ["--what-if", change]
        script = self.arguments[1:] if runs_code(self.arguments[0]) else ()
        paths = self.arguments[: len(self.arguments) - len(script)]
        return shlex.join(["steptime", "predict", *paths, *options, *(["--", *script] if script else ())])

    def derived(self, prediction: Prediction) -> dict[str, Any]:
        """What controls that were left alone came out as: ranks, and how they are divided."""
        job = prediction.workload
        result: dict[str, Any] = {"ranks": job.world_size}
        if isinstance(self.config, Transformer):
            sizes = job.description.parallelism or {}
            result |= {f"{SET}parallel.{name}": size for name, size in sizes.items()}
            result |= {name: sizes.get(name.rpartition(".")[2], 1) for name in (*_REPLICAS, *_SIZES)}
        return {name: value for name, value in result.items() if name in self.controls}


def changes_of(values: Values) -> list[str]:
    """All changes in the words of `--what-if`: those written, and those that sliders stand for."""
    factors = {"host": values["host_factor"], "communication": values["wire_factor"]}
    sliders = [f"{what} * {factor:g}" for what, factor in factors.items() if factor != 1]
    return [*sliders, *values["what_if"]]


def _written(value: object) -> str:
    """A value as `--set` takes it."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _has_keys(build: BuildConfig) -> bool:
    return isinstance(build.source, Mapping) or build.source.suffix == ".toml"


def _forget(remembered: dict[tuple[Any, ...], Any]) -> None:
    """Makes room for one more: the oldest goes."""
    if len(remembered) >= _REMEMBERED:
        del remembered[next(iter(remembered))]
