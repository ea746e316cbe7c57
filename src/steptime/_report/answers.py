"""Answers as Python gives them: short to look at, as plain values, as a table, as a page, as a timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

from steptime._files import write_output
from steptime._notices import Notices
from steptime._platforms.platform import Platform
from steptime._program.program import CallKind
from steptime._report.cost import Cost, cost_of
from steptime._report.json import Document, prediction_document, rounded
from steptime._report.verdict import Verdict, verdict_of
from steptime._report.words import interval_words, signed_percent, span_words, time_ms
from steptime._sim.explain.activity import Window
from steptime._sim.prediction import PredictedStep, explain
from steptime._units import ms
from steptime.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from steptime._shard.days import Days
    from steptime._shard.explain import Explained
    from steptime._shard.search import Searched
    from steptime._sim.recorded.replay import Replay, StepReplay


class Prediction(PredictedStep):
    """A predicted step, and how to look at it."""

    @classmethod
    def of(cls, step: PredictedStep) -> Prediction:
        """The same step as an answer."""
        return cls(**{each.name: getattr(step, each.name) for each in fields(step)})

    @property
    def verdict(self) -> Verdict:
        """Whether it fits, what binds it, and how sure that is."""
        return verdict_of(self)

    @property
    def cost(self) -> Cost | None:
        """What steps cost at the price that was given; None without one."""
        return cost_of(self)

    def __repr__(self) -> str:
        where = ("as recorded" if self.profiled else "as run") if self.platform is None else f"on {self.platform}"
        mfu = "" if self.mfu is None else f", MFU {100 * self.mfu:.1f} %"
        name = self.workload.name or "workload"
        step = f"{'DOES NOT FIT, ' * (self.fits is False)}{time_ms(self.step_time_ms)} ms per step"
        return f"<Prediction {name} {where}: {step}, {span_words(self)}{mfu}>"

    def to_dict(self) -> Document:
        """What `steptime predict --json` writes."""
        return plain(prediction_document(self))

    def to_table(self) -> pa.Table:
        """A row for every rank, with what is known of the whole step in every row."""
        return table_of([{**scalars(self.to_dict()), **rank} for rank in self.to_dict()["ranks"]])

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime predict --html`."""
        from steptime._report.html.page import page

        write_output(Path(path), page(self))

    def trace(self, path: str | Path) -> None:
        """Writes the timeline for Perfetto, as `steptime predict --trace` does."""
        _write_trace(self, path)


@dataclass(frozen=True)
class Unprofiled:
    """The same job measured without a profiler, several times, and what the profiled recording says about it."""

    source: str
    step_ms: float  # median of the repeats
    low_ms: float
    high_ms: float
    as_recorded_ms: float  # the steady step of the recording, profiler included
    as_recorded_error: float
    deflated_ms: float  # the same with what the profiler cost taken out
    deflated_error: float

    @classmethod
    def read(cls, file: Path, played: Replay) -> Unprofiled:
        """The unprofiled step times in a file, and how the recording compares."""
        from steptime._sim.recorded.profiler import unprofiled
        from steptime._sim.recorded.replay import period_ms, read_measured

        times_ms = read_measured(file)
        step_ms, recorded_ms, deflated_ms = median(times_ms), period_ms(played.recorded), period_ms(unprofiled(played.recorded))
        errors = recorded_ms / step_ms - 1, deflated_ms / step_ms - 1
        return cls(str(file), step_ms, min(times_ms), max(times_ms), recorded_ms, errors[0], deflated_ms, errors[1])


@dataclass(frozen=True, repr=False)
class Replayed:
    """A run's own durations played again, and how far the simulator is off."""

    prediction: PredictedStep  # the replayed timeline, explained
    steps: tuple[StepReplay, ...]
    measured_step_ms: float  # mean of the recorded steps
    error: float  # of the mean step
    unprofiled: Unprofiled | None = None

    @classmethod
    def of(cls, played: Replay, measured: Path | None = None) -> Replayed:
        """Explain a replay; `measured` is a file of unprofiled step times."""
        if not played.steps:
            raise InputError("the traces have no step in common to replay; were all ranks recorded at the same time?")
        mean_ns = fmean(s.predicted_ns for s in played.steps)
        recorded_ms = [ms(s.measured_ns) for s in played.steps]
        workload = played.workload
        notices = list(workload.warnings)
        if workload.absent:
            text = f"waiting for ranks without a trace ({len(workload.absent)} of {workload.world_size}) is taken as recorded"
            notices.append(text)
        prediction = explain(
            workload,
            played.timeline,
            Window(len(played.steps), _begin_ns(played), max(sum(s.predicted_ns for s in played.steps), 1)),
            step_ns=mean_ns,
            interval_ms=(min(*recorded_ms, ms(mean_ns)), max(*recorded_ms, ms(mean_ns))),
            notices=notices,
        )
        unprofiled = None if measured is None else Unprofiled.read(measured, played)
        prediction = replace(prediction, profiled=True)
        return cls(prediction, played.steps, fmean(recorded_ms), ms(mean_ns) / fmean(recorded_ms) - 1, unprofiled)

    @property
    def verdict(self) -> Verdict:
        """What binds the replayed step, and the range of the recorded ones."""
        return verdict_of(self.prediction)

    def __repr__(self) -> str:
        name = self.prediction.workload.name or "workload"
        return f"<Replayed {name}: {time_ms(self.prediction.step_time_ms)} ms per step, recorded {self._recorded}>"

    @property
    def _recorded(self) -> str:
        return f"{time_ms(self.measured_step_ms)} ms, error {signed_percent(self.error)}"

    def to_dict(self) -> Document:
        """What `steptime replay --json` writes: the keys of `predict` and the comparison."""
        steps = [
            {"step": s.step, "predicted_ms": ms(s.predicted_ns), "measured_ms": ms(s.measured_ns), "error": s.error}
            for s in self.steps
        ]
        compared = {"steps": steps, "measured_step_ms": self.measured_step_ms, "error": self.error}
        unprofiled = None if self.unprofiled is None else asdict(self.unprofiled)
        return plain({**prediction_document(self.prediction), **compared, "unprofiled": unprofiled})

    def to_table(self) -> pa.Table:
        """A row for every step."""
        return table_of(self.to_dict()["steps"])

    def html(self, path: str | Path) -> None:
        """Writes the page of the replayed timeline."""
        from steptime._report.html.page import page

        write_output(Path(path), page(self.prediction, facts={"Recorded": self._recorded}))

    def trace(self, path: str | Path) -> None:
        """Writes the replayed timeline for Perfetto."""
        _write_trace(self.prediction, path)


@dataclass(frozen=True, repr=False)
class Sharding:
    """The fastest plan of a sharding task, its runners-up, and why."""

    searched: Searched
    explained: Explained
    platform: Platform
    days: Days | None = None  # where the lookups of several days were given
    price: float | None = None  # of one GPU for an hour

    @property
    def plan(self) -> dict[str, list[int]]:
        """The best plan: table to the ranks of its shards."""
        return self.searched.best.plan.to_dict()

    @property
    def step_time_ms(self) -> float:
        """Of the best plan."""
        return ms(self.searched.best.step_ns)

    @property
    def interval_ms(self) -> tuple[float, float]:
        """That nine of ten measured steps of the best plan are expected in."""
        return self.explained.best.predicted.interval_ms

    @property
    def verdict(self) -> Verdict:
        """That the best plan fits, what binds it, and how sure that is."""
        return verdict_of(self.explained.best.predicted)

    @property
    def notices(self) -> Notices:
        """What the task leaves open, and what the step of the best plan says."""
        return self.explained.best.predicted.notices.after(*self.searched.task.notes, *self.explained.doubts)

    @property
    def samples_per_s(self) -> float:
        """That all ranks together train on with the best plan."""
        return 1e3 * self.searched.task.model.batch / self.step_time_ms

    @property
    def cost(self) -> Cost | None:
        """What steps of the best plan cost at the price that was given; None without one."""
        if self.price is None:
            return None
        model, gpus = self.searched.task.model, self.searched.task.ranks / self.platform.device.limits.share
        return Cost(self.price, gpus, self.step_time_ms / 1e3, model.batch)

    def __repr__(self) -> str:
        task = self.searched.task
        what = f"{task.model.name}: {len(task.tables)} tables on {task.ranks} ranks of {self.platform.name}"
        return f"<Sharding {what}, {time_ms(self.step_time_ms)} ms per step, {interval_words(*self.interval_ms)}>"

    def to_dict(self) -> Document:
        """What `steptime shard --json` writes."""
        from steptime._report.shard.document import shard_document

        return plain(shard_document(self))

    def to_table(self) -> pa.Table:
        """A row for every plan: the best, its runners-up and the usual rules."""
        result = self.to_dict()
        plans = [
            {"plan": name, "step_time_ms": item["step_time_ms"], "strategy": item["strategy"]}
            for name, item in zip(("best", *map(str, range(2, 99))), (result["best"], *result["alternatives"]), strict=False)
        ]
        rules = [{"plan": name, "step_time_ms": step, "strategy": "rule"} for name, step in result["rules"].items()]
        return table_of([*plans, *rules])

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime shard --html`."""
        from steptime._report.shard.html import shard_page

        write_output(Path(path), shard_page(self))

    def torchrec(self) -> Document:
        """The best plan as TorchRec's ShardingPlan, plain values."""
        from steptime._build.dlrm.plan_files import torchrec_document

        return plain(torchrec_document(self.searched.best.plan, self.searched.task.tables))


def _begin_ns(played: Replay) -> int:
    """The earliest start of a step in the replay."""
    begins = [(each, each.cohort.program.calls.kind == CallKind.STEP_BEGIN) for each in played.timeline.cohorts]
    return int(min(each.call_start_ns[begin].min() for each, begin in begins if begin.any()))


def plain(document: Document) -> Document:
    """As reading the JSON back would give it."""
    plain: Document = json.loads(json.dumps(rounded(document), allow_nan=False))
    return plain


def scalars(document: Document) -> Document:
    """What of an answer is one value."""
    return {key: value for key, value in document.items() if not isinstance(value, dict | list)}


def table_of(rows: Sequence[Document]) -> pa.Table:
    """Rows as a table."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows))


def _write_trace(step: PredictedStep, path: str | Path) -> None:
    from steptime._report.chrome import write_chrome_trace

    write_chrome_trace(step.timeline, Path(path), step.workload, profiled=step.profiled)
