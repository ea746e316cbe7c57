"""Whether traces can be of one run: ranks that meet at a collective must call the same one, with the same amount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from steptime._program.program import Collective, Program

_Key = tuple[str, tuple[int, ...], int]  # group, members, place in its sequence

# Two sides of one call.
_PAIR = {"send", "recv"}


def disagreements(programs: Sequence[Program]) -> Iterator[str]:
    """Warnings: collectives that differ between ranks which should meet there, and those a rank at hand lacks."""
    attending: dict[_Key, dict[int, Collective]] = {}
    for program in programs:
        for collective in program.collectives:
            attending.setdefault((collective.group, collective.ranks, collective.sequence), {})[program.rank] = collective
    sources = {program.rank: program.source or f"rank {program.rank}" for program in programs}
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
    (first, told), *others = here.items()
    rank = next((rank for rank, other in others if _differ(told, other)), None)
    return "" if rank is None else f"{_said(told)} in {sources[first]}, {_said(here[rank])} in {sources[rank]}"


def _lacking(attending: Mapping[_Key, Mapping[int, Collective]], sources: Mapping[int, str]) -> Iterator[str]:
    members: dict[int, set[int]] = {}  # by identity: the same large group meets again and again
    for (group, ranks, sequence), here in attending.items():
        if sequence < 0 or len(here) == len(sources):
            continue  # before the first step, every window begins where it happens to
        expected = members.setdefault(id(ranks), sources.keys() & set(ranks))
        for rank in sorted(expected - here.keys()):
            yield f"{next(iter(here.values())).kind} {sequence} of group {group!r} in {sources[rank]}"


def _differ(one: Collective, other: Collective) -> bool:
    kinds = {one.kind, other.kind}
    if "unknown" in kinds or kinds == _PAIR:
        return False
    amounts = {one.bytes_in, other.bytes_in} - {0}
    # Of the others, some move a different amount on every rank.
    return len(kinds) > 1 or (kinds == {"all_reduce"} and len(amounts) > 1)


def _said(collective: Collective) -> str:
    return f"{collective.kind} of {collective.bytes_in} bytes"
