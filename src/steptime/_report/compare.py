"""Several answers side by side: their numbers, what differs between their inputs, and what of that may be error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._files import write_output
from steptime._notices import Notices
from steptime._report.answers import Prediction, plain, scalars, table_of
from steptime._report.diff import Compared, unlike
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.sweep import AgainstFirst, SweepVariant, csv_of, differences, shared_notices, value_words
from steptime._sim.prediction import PredictedStep

if TYPE_CHECKING:
    import pyarrow as pa

# Keys of an answer that say what was asked.
_INPUTS = (
    "workload",
    "platform",
    "batch",
    "sequence",
    "precision",
    "numerics",
    "parallelism",
    "parameters",
    "power_cap_w",
    "profiled",
    "price",
)
_OF_JOB = ("workload", "batch", "sequence", "ranks")
_KINDS = ("transformer", "dlrm")
# What lookups of a table are drawn from, and what configs call that.
_OF_GENERATOR = {".generator.rows": ".rows", ".generator.pooling": ".pooling_factor", ".generator.": ".skew."}


@dataclass(frozen=True)
class Item(SweepVariant):
    """One of the answers, with the step itself where it is at hand."""

    step: PredictedStep | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, source: str, answer: Prediction) -> Item:
        """A prediction that is at hand."""
        return cls({}, answer.to_dict(), source=source, step=answer)

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What was asked, by key: what was set, what the answer says of it, and every key of a config."""
        asked: dict[str, Any] = {"source": self.source, **self.settings}
        asked |= {key: self.document.get(key) for key in _INPUTS}
        asked["ranks"] = len(self.document.get("ranks", []))
        if self.step is not None:
            asked |= {key: value for key, value in self._config() if key not in asked}
        return asked

    def _config(self) -> Iterator[tuple[str, Any]]:
        meta = self.step.workload.meta if self.step is not None else {}
        for kind in _KINDS:
            if isinstance(meta.get(kind), Mapping):
                yield from _as_in_files({key: value for key, value in meta[kind].items() if key not in ("kind", "name")})
        if isinstance(meta.get("plan"), Mapping):
            yield from _flat({"plan": meta["plan"]})


@dataclass(frozen=True, repr=False)
class ComparedAnswers:
    """Answers side by side; differences are to the first."""

    items: tuple[Item, ...]
    diff: Compared | None = None  # of two steps, why the second is longer

    def __repr__(self) -> str:
        fastest = max(range(len(self.items)), key=lambda at: self.items[at].speed)
        return f"<ComparedAnswers of {len(self.items)}: fastest is {self.names[fastest]}>"

    @cached_property
    def per_sample(self) -> bool:
        """Whether batches differ, so that samples are compared instead of steps."""
        batches = {each.document.get("batch") for each in self.items}
        return len(batches) > 1 and all(each.samples_per_s is not None for each in self.items)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the differences: steps of unknown batches may do different work."""
        known = [each.document.get("batch") is not None for each in self.items]
        jobs = {(each.source, repr(sorted((key, each.inputs.get(key)) for key in _OF_JOB))) for each in self.items}
        if all(known) or len(jobs) == 1:  # of one job on several machines
            return ()
        which = "batches are not known" if not any(known) else f"the batch of {self.names[known.index(False)]} is not known"
        return (f"{which}: steps are compared, and may do different amounts of work",)

    @cached_property
    def notices(self) -> Notices:
        """That two have little in common, and what answers say; the verdict has what is to be known of the differences."""

        def which(those: Sequence[Item]) -> str:
            return ", ".join(name for name, each in zip(self.names, self.items, strict=True) if each in those)

        alone = () if self.diff is None else unlike(self.diff.difference)
        return Notices.of((*alone, *shared_notices(self.items, which))).without_headline

    @cached_property
    def differs(self) -> dict[str, list[Any]]:
        """Inputs that are not the same for all, and the value of each; None where one has no such input."""
        keys = list(dict.fromkeys(key for each in self.items for key in each.inputs))
        values = {key: [each.inputs.get(key) for each in self.items] for key in keys}
        return {key: known for key, known in values.items() if len({repr(value) for value in known}) > 1}

    @cached_property
    def names(self) -> list[str]:
        """What tells items apart: the file's name, and what was set."""
        settings = dict.fromkeys(key for each in self.items for key in each.settings)
        shown = [key for key in dict.fromkeys(("source", "platform", *settings)) if key in self.differs]
        names = [
            ", ".join(_name_words(key, each.inputs.get(key)) for key in shown if each.inputs.get(key) is not None)
            for each in self.items
        ]
        names = [name or str(each.source) for name, each in zip(names, self.items, strict=True)]
        return [f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)]

    @cached_property
    def differences(self) -> tuple[AgainstFirst, ...]:
        """Of each item to the first."""
        return differences(self.items, per_sample=self.per_sample)

    def to_dict(self) -> Document:
        """What `steptime compare --json` writes."""
        variants = [
            {**each.to_dict(), "settings": {"source": each.source, **each.settings}, "difference": found.to_dict()}
            for each, found in zip(self.items, self.differences, strict=True)
        ]
        return plain({
            "schema_version": SCHEMA_VERSION,
            "compared": "sample" if self.per_sample else "step",
            "differs": self.differs,
            "variants": variants,
            "diff": None if self.diff is None else self.diff.to_dict(),
            "warnings": list(self.warnings),
        })  # fmt: skip

    def rows(self) -> list[Document]:
        """A row for every answer."""
        rows = []
        for name, each, found in zip(self.names, self.items, self.differences, strict=True):
            low, high = each.interval_ms
            row: Document = {
                "name": name,
                "source": each.source,
                **{key: value_words(value) for key, value in each.settings.items()},
            }
            row |= {key: value for key, value in scalars(each.document).items() if key not in row}
            row |= {"interval_low_ms": low, "interval_high_ms": high, "peak_bytes": each.peak_bytes, "fits": each.fits}
            row |= {"ratio": found.ratio, "ratio_low": found.interval[0], "ratio_high": found.interval[1]}
            rows.append({**row, "p_faster": found.p_faster, "certain": found.certain})
        return rows

    def to_table(self) -> pa.Table:
        """A row for every answer."""
        return table_of(self.rows())

    def csv(self, path: str | Path) -> None:
        """Writes the same as a table with a head."""
        write_output(Path(path), csv_of(self.rows()))

    def html(self, path: str | Path) -> None:
        """Writes the page of `steptime compare --html`."""
        from steptime._report.compare_text import compare_page

        write_output(Path(path), compare_page(self))


def _name_words(key: str, value: Any) -> str:
    if key == "source":
        file, space, own = str(value).partition(" ")
        return f"{Path(file).stem} {own}" if space and file.endswith(".py") else Path(str(value)).stem
    return value_words(value) if key in ("platform", "variant") else f"{key} {value_words(value)}"


def _as_in_files(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of a config by the keys that files have for them."""
    for key, value in _flat(values):
        inside = next((each for each in _OF_GENERATOR if each in key), "")
        yield key.replace(inside, _OF_GENERATOR[inside]) if inside else key, value


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """All values inside of tables by dotted keys; tables of a list by their names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, Mapping) and "name" in each for each in value):
            for each in value:
                yield from _flat(
                    {str(each["name"]): {name: item for name, item in each.items() if name != "name"}}, f"{before}{key}."
                )
        else:
            yield f"{before}{key}", value
