"""Whether recordings can be what happened in one run, though every event is believable by itself.

Looked for are lost step marks, one absurd duration, another unit, a file given twice, and ranks that should meet at a
collective but call another one. Nothing is mended: which of two stories is true cannot be told. What is odd is named, with what
it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from steptime._program.program import CallKind, Collective, Program
from steptime._units import NS_PER_MS, NS_PER_S

# The work of a step against the middle one's: a mark that is lost, doubled or moved takes work from a step or gives it some.
_STEP_AT_LEAST, _STEP_AT_MOST = 0.5, 1.8
# Of what ranks of one job record in a step, no rank takes this many times as long as the middle one: other units are 1,000.
_RANKS_APART = 50.0
# What does not come back in every step: longer than this many others of its kind together, and this long.
_LONGEST_SHARE, _LONGEST_AT_LEAST_NS = 1.0, 100 * NS_PER_MS
# A handful of device events of two ranks may begin and end together.
_WORKS_OF_A_COPY = 20
_BLOCKING = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC, CallKind.BLOCKING_COPY)

_Key = tuple[str, tuple[int, ...], int]  # group, members, index in its sequence


def implausible(programs: Sequence[Program]) -> Iterator[str]:
    """Warnings about recorded programs that can hardly be what happened."""
    recorded = [program for program in programs if program.recorded and program.steps]
    for program in recorded:
        yield from _marks(program)
        yield from _longest(program)
    yield from _units(recorded)
    yield from _copies(recorded)


def _where(program: Program) -> str:
    return program.source or f"rank {program.rank}"


def _marks(program: Program) -> Iterator[str]:
    """Steps whose numbers leave some out, that overlap, or that hold far more or less work than the others."""
    steps = program.steps
    if any(after != before + 1 for before, after in pairwise(steps)):
        yield (
            f"{_where(program)}: the marked steps are {', '.join(map(str, steps[:6]))}, which do not follow each other: a mark "
            f"was lost or added, and the time of all is divided by {len(steps)} steps"
        )
    began, ended = (_marked(program, kind) for kind in (CallKind.STEP_BEGIN, CallKind.STEP_END))
    late = [step for step, after in pairwise(steps) if ended[step] - began[after] > abs(began[after] - began[step]) // 10]
    if late:
        yield f"{_where(program)}: the mark of step {late[0]} ends after the next one begins; step times are not to be trusted"
    if len(steps) >= 3:
        counts = np.array([(program.works.step == step).sum() for step in steps])
        middle = float(np.median(counts))
        odd_ones = np.flatnonzero((counts < _STEP_AT_LEAST * middle) | (counts > _STEP_AT_MOST * middle))
        if len(odd_ones):
            index = int(odd_ones[0])
            yield (
                f"{_where(program)}: step {steps[index]} launches {counts[index]:,} pieces of device work, the others about "
                f"{middle:,.0f}: a mark is in the wrong place, or that step does something else; the step time is a mean"
            )


def _marked(program: Program, kind: CallKind) -> dict[int, int]:
    calls = program.calls
    rows = np.flatnonzero(calls.kind == kind)
    return dict(zip(calls.step[rows].tolist(), calls.start_ns[rows].tolist(), strict=True))


def _longest(program: Program) -> Iterator[str]:
    """A kernel or a host call that takes longer than all others together, and not once in every step."""
    works, calls = program.works, program.calls
    waits = np.isin(calls.kind, _BLOCKING)
    for what, name, durations in (
        ("kernel", works.name, works.end_ns - works.start_ns),
        ("call", calls.api, np.where(waits, 0, calls.end_ns - calls.start_ns)),
    ):
        if not len(durations):
            continue
        index = int(np.argmax(durations))
        longest, others = int(durations[index]), int(durations.sum() - durations[index])
        again = int((durations >= longest // 10).sum())
        if longest >= _LONGEST_AT_LEAST_NS and longest > _LONGEST_SHARE * others and again < max(len(program.steps), 2):
            yield (
                f"{_where(program)}: one {what} ({program.names[name[index]][:80]}) takes {longest / NS_PER_S:,.2f} s, all "
                f"others together {others / NS_PER_S:,.2f} s: a damaged duration, or a stall that other steps do not have; the "
                f"step time is up to {longest / NS_PER_MS / len(program.steps):,.0f} ms too long"
            )


def _units(programs: Sequence[Program]) -> Iterator[str]:
    """A rank whose times are of another unit than the others'."""
    if len(programs) < 2:
        return
    spans = np.array([_span_ns(program) for program in programs])
    middle = float(np.median(spans)) if len(spans) > 2 else float(np.min(spans))
    for program, span in zip(programs, spans.tolist(), strict=True):
        if span > _RANKS_APART * middle or span * _RANKS_APART < middle:
            yield (
                f"{_where(program)}: a step takes {span / NS_PER_MS:,.3f} ms there and {middle / NS_PER_MS:,.3f} ms on other "
                "ranks: its times are in another unit, or of another run; the step time is not to be trusted"
            )


def _span_ns(program: Program) -> float:
    """From the first to the last call of a step, per step."""
    inside = program.calls.step >= 0
    if not inside.any():
        return 0.0
    return float(program.calls.end_ns[inside].max() - program.calls.start_ns[inside].min()) / len(program.steps)


def _copies(programs: Sequence[Program]) -> Iterator[str]:
    """Two ranks whose device work begins and ends at the same nanoseconds are one file given twice."""
    known: dict[bytes, Program] = {}
    for program in programs:
        if len(program.works) < _WORKS_OF_A_COPY:
            continue
        times = program.works.start_ns.tobytes() + program.works.end_ns.tobytes()
        twin = known.setdefault(times, program)
        if twin is not program:
            yield (
                f"{_where(program)}: has the same device work at the same times as {_where(twin)}: one recording given twice; "
                f"as ranks {twin.rank} and {program.rank} they wait for each other nowhere, and the step is too short"
            )


def disagreements(programs: Sequence[Program]) -> Iterator[str]:
    """Warnings: collectives that differ between ranks which should meet there, and those that a rank with a program lacks."""
    attending: dict[_Key, dict[int, Collective]] = {}
    for program in programs:
        for collective in program.collectives:
            attending.setdefault((collective.group, collective.ranks, collective.sequence), {})[program.rank] = collective
    sources = {program.rank: _where(program) for program in programs}
    different = [
        f"{key[2]} of group {key[0]!r} is {text}" for key, here in attending.items() if (text := _different(here, sources))
    ]
    if different:
        yield (
            f"{len(different)} collectives differ between ranks that should meet there (number {different[0]}): traces of "
            "different runs, or lost events; waiting at collectives is not to be trusted"
        )
    lacking = list(_lacking(attending, sources))
    if lacking:
        yield (
            f"{len(lacking)} collectives are missing on a rank that takes part (first: {lacking[0]}): lost events, or another "
            "run; the others do not wait for it there"
        )


def _different(here: Mapping[int, Collective], sources: Mapping[int, str]) -> str:
    (first, collective), *others = here.items()
    for rank, other in others:
        kinds, amounts = {collective.kind, other.kind}, {collective.bytes_in, other.bytes_in} - {0}
        if "unknown" in kinds or kinds == {"send", "recv"}:
            continue
        # Of the other kinds, some move a different amount on every rank.
        if len(kinds) > 1 or (kinds == {"all_reduce"} and len(amounts) > 1):
            sides = ((collective, first), (other, rank))
            return ", ".join(f"{each.kind} of {each.bytes_in} bytes in {sources[at]}" for each, at in sides)
    return ""


def _lacking(attending: Mapping[_Key, Mapping[int, Collective]], sources: Mapping[int, str]) -> Iterator[str]:
    members: dict[int, set[int]] = {}  # by identity: the same large group meets again and again
    for (group, ranks, sequence), here in attending.items():
        if sequence < 0 or len(here) == len(sources):
            continue  # before the first step, every window begins where it happens to
        expected = members.setdefault(id(ranks), sources.keys() & set(ranks))
        for rank in sorted(expected - here.keys()):
            yield f"{next(iter(here.values())).kind} {sequence} of group {group!r} in {sources[rank]}"
