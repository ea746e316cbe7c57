"""Ranks that wait for objects of others (`letters`) run in turn, each again until what it waits for was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from steptime.errors import InputError

_Done = TypeVar("_Done")


def in_turn(ranks: Sequence[int], run: Callable[[int], _Done | None], folder: Path, what: str) -> list[_Done]:
    """What `run` gives of every rank, None while it lacks a letter: rank after rank, until all have what they wait for."""
    done: dict[int, _Done] = {}
    while len(done) < len(ranks):
        before = len(done), len(list(folder.iterdir()))
        for rank in ranks:
            result = run(rank) if rank not in done else None
            if result is not None:
                done[rank] = result
        if before == (len(done), len(list(folder.iterdir()))):
            rank = next(rank for rank in ranks if rank not in done)
            raise InputError(f"{what}: rank {rank} receives an object (recv_object_list) that no rank sends it")
    return [done[rank] for rank in ranks]


def said_of_stages(ranks: int) -> str:
    """What is said where ranks ran in turn."""
    return f"ranks send each other objects; all {ranks} ranks were captured"


def many_stages(ranks: int, most: int) -> str:
    """Why more ranks than are captured each cannot be."""
    return (
        f"its ranks send each other objects, as stages of a pipeline do, and {ranks} ranks are too many to capture each; "
        f"capture {most} or fewer"
    )
