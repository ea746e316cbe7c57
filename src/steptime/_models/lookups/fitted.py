"""The lookup models of one device: a form per implementation and direction, how far each was off, and the recipe; one file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steptime._models.engine.archive import Archive, StoredParts, write_archive
from steptime._models.engine.splits import Residuals
from steptime._models.engine.stored import pack, unpack
from steptime._models.estimate import Estimate, Source
from steptime._models.kernels.question import LaunchTime
from steptime._models.lookups.forms import FORMS, LookupForm, load_form
from steptime._models.lookups.question import Lookup, Lookups
from steptime.errors import InputError

Kind = tuple[str, str]
"""Implementation and direction."""

_RESIDUALS = "residuals"
# A lookup of tables beyond what was measured: its time is known to a factor.
_OUTSIDE = 2.0
# Requests whose answers are kept: a step makes one or two.
_KEPT = 256


@dataclass(frozen=True, slots=True)
class LookupEstimate:
    """The device time of one lookup: in all, and launch by launch."""

    estimate: Estimate
    launches: tuple[LaunchTime, ...]


@dataclass(frozen=True)
class LookupModels:
    """Fitted forms by implementation and direction."""

    forms: Mapping[Kind, LookupForm]
    residuals: Residuals
    recipe: Mapping[str, Any]
    _known: dict[tuple[Lookup, ...], list[LookupEstimate]] = field(default_factory=dict, repr=False, compare=False)

    def form(self, implementation: str, direction: str) -> LookupForm:
        """The model of one implementation and direction."""
        result = self.forms.get((implementation, direction))
        if result is None:
            known = ", ".join(" ".join(kind) for kind in self.forms)
            raise InputError(f"lookups of {implementation} {direction} have no fitted model; there are {known}")
        return result

    def estimates(self, lookups: Sequence[Lookup]) -> list[LookupEstimate]:
        """How long each takes. Answers are kept by all that is asked at once: a step that is predicted again asks the same.

        Never lookup by lookup: products of matrices round by how many rows they have, so that an answer would depend on what
        was asked before.
        """
        places: dict[Lookup, int] = {}
        order = [places.setdefault(lookup, len(places)) for lookup in lookups]
        distinct = tuple(places)
        answers = self._known.get(distinct)
        if answers is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            answers = self._known[distinct] = self._estimates(distinct)
        return [answers[place] for place in order]

    def _estimates(self, lookups: Sequence[Lookup]) -> list[LookupEstimate]:
        """Those of one implementation and direction are asked together."""
        places: dict[Kind, list[int]] = defaultdict(list)
        for index, lookup in enumerate(lookups):
            places[lookup.implementation, lookup.direction].append(index)
        result: dict[int, LookupEstimate] = {}
        for kind, item in places.items():
            times = self.form(*kind).times(Lookups.of([lookups[index] for index in item]))
            for row, index in enumerate(item):
                launches = [
                    LaunchTime(part, ns / number)
                    for part, number, ns in zip(times.parts, times.number[row], times.ns[row], strict=True)
                    for _ in range(round(number))
                ]
                total = float(times.ns[row].sum())
                result[index] = LookupEstimate(
                    self.estimate(kind, total, bool(times.inside[row]), lookups[index].share), tuple(launches)
                )
        return [result[index] for index in range(len(lookups))]

    def estimate(self, kind: Kind, time_ns: float, inside: bool, share: int) -> Estimate:
        """A predicted time with its interval, wider where the lookup lies outside what was measured."""
        low, high = self.residuals.interval_ns(group_of(kind), time_ns, share)
        wider = 1.0 if inside else _OUTSIDE
        return Estimate(time_ns, low / wider, high * wider, Source.FITTED, inside)

    def save(self, file: Path) -> None:
        """One compressed file of plain arrays."""
        parts = {group_of(kind): pack(form) for kind, form in self.forms.items()}
        write_archive(file, self.recipe, parts | {_RESIDUALS: pack(self.residuals)})

    @classmethod
    def load(cls, file: Path) -> LookupModels:
        """The models that `save` wrote. Nothing in the file is executed."""
        archive = Archive.open(file)
        try:
            residuals = unpack(Residuals, archive.part(_RESIDUALS))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: not the lookup models that this steptime reads ({error}); fit again") from error
        names = {kind: group_of(kind) for kind in FORMS if group_of(kind) in archive.parts}
        return cls(StoredParts(archive, names, load_form), residuals, archive.recipe)


def group_of(kind: Kind) -> str:
    """What an implementation and direction are called in files and tables."""
    return f"{kind[0]} {kind[1]}"


def lookups_file(folder: Path, name: str) -> Path:
    """Where the lookup models of a device are kept."""
    return folder / f"{name}-lookups.npz"
