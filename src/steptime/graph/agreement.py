"""Whether traces can be of one run: ranks that meet at a collective must call the same one, with the same amount."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from steptime.graph.program import Collective, Program

# Two sides of one call.
_PAIR = {"send", "recv"}


def disagreements(programs: Sequence[Program]) -> Iterator[str]:
    """At most one warning: how many collectives differ between ranks that should meet there, and the first of them."""
    first: dict[tuple[str, tuple[int, ...], int], tuple[Program, Collective]] = {}
    found: list[str] = []
    for program in programs:
        for here in program.collectives:
            other, there = first.setdefault((here.group, here.ranks, here.sequence), (program, here))
            if other is not program and _differ(here, there):
                found.append(
                    f"number {here.sequence} of group {here.group!r} is {_said(there)} in {other.source}, "
                    f"{_said(here)} in {program.source}"
                )
    if found:
        yield (
            f"{len(found)} collectives differ between ranks that should meet there ({found[0]}): traces of different runs, "
            "or some lost events; waiting at collectives is not to be trusted"
        )


def _differ(one: Collective, other: Collective) -> bool:
    kinds = {one.kind, other.kind}
    if "unknown" in kinds or kinds == _PAIR:
        return False
    amounts = {one.bytes_in, other.bytes_in} - {0}
    # Of the others, some move a different amount on every rank.
    return len(kinds) > 1 or (kinds == {"all_reduce"} and len(amounts) > 1)


def _said(collective: Collective) -> str:
    return f"{collective.kind} of {collective.bytes_in} bytes"
