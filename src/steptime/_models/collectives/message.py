"""What a collective model is asked: kinds, ranks and bytes as columns, and what the splits of uneven exchanges weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

KINDS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast", "reduce", "send_recv", "barrier")
"""As the measured set `collectives` names them."""


def moved_by_ranks(sent: Floats) -> tuple[Floats, Floats]:
    """What each rank sends to others and what it receives from them, [cases, ranks], from [cases, senders, receivers]."""
    away = sent * (1.0 - np.eye(sent.shape[1]))
    return away.sum(axis=2), away.sum(axis=1)


def load_bytes(sent: Floats) -> Floats:
    """The buffer of the even exchange whose busiest rank, sent and received together, moves as much.

    On loopback sockets one thread per rank serves both directions, so that a rank's sent and received bytes add.
    """
    ranks = sent.shape[1]
    sends, receives = moved_by_ranks(sent)
    result: Floats = (sends + receives).max(axis=1) / 2 * (ranks / max(ranks - 1, 1))
    return result


def pair_bytes(sent: Floats) -> Floats:
    """The buffer of the even exchange whose pairs of ranks move as much, root mean square."""
    ranks = sent.shape[1]
    away = sent * (1.0 - np.eye(ranks))
    result: Floats = np.sqrt((away**2).sum(axis=(1, 2)) / max(ranks * (ranks - 1), 1)) * ranks
    return result


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a group. Bytes as nccl-tests counts: the larger of a rank's two buffers, its own share included.

    `splits` of an uneven all_to_all: bytes from rank to rank of the group, [sender][receiver]; `bytes` is then the largest
    send buffer.
    """

    kind: str
    ranks: int
    bytes: int
    splits: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        checks = (
            (self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}"),
            (self.ranks >= 1, "ranks", "1 or more"),
            (self.bytes >= 0, "bytes", "0 or more"),
            (self.splits is None or self.kind == "all_to_all", "splits", "none, but for all_to_all"),
        )
        for holds, name, expected in checks:
            if not holds:
                raise InputError(f"Collective {self.kind}: {name} is {getattr(self, name)!r}; expected {expected}.")
        if self.splits is not None:
            self._check_splits(self.splits)

    def _check_splits(self, splits: Sequence[Sequence[int]]) -> None:
        if len(splits) != self.ranks:
            raise InputError(f"all_to_all of {self.ranks} ranks: splits of {len(splits)} senders; expected {self.ranks}.")
        for sender, sent in enumerate(splits):
            if len(sent) != self.ranks:
                raise InputError(
                    f"all_to_all: rank {sender} has {len(sent)} splits; expected one for each of {self.ranks} ranks."
                )
            bad = next((receiver for receiver, size in enumerate(sent) if size < 0), None)
            if bad is not None:
                raise InputError(f"all_to_all: rank {sender} sends {sent[bad]} bytes to rank {bad}; expected 0 or more.")


@dataclass(frozen=True)
class Messages:
    """Many collectives as columns. `load` and `pairs` say what an exchange moves; of all else they are `bytes`."""

    kind: Places  # [messages] place in `KINDS`
    ranks: Places  # [messages]
    bytes: Floats  # [messages]
    load: Floats  # [messages] bytes of the even exchange whose busiest rank moves as much (`exchange`)
    pairs: Floats  # [messages] bytes of the even exchange whose pairs move as much, root mean square

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, places: npt.NDArray[Any]) -> Messages:
        """Some of them; `places` may be a mask."""
        return Messages(*(getattr(self, name)[places] for name in ("kind", "ranks", "bytes", "load", "pairs")))

    def scaled(self, by: float) -> Messages:
        """As if there were so many times the bytes, and no more steps."""
        return Messages(self.kind, self.ranks, self.bytes * by, self.load * by, self.pairs * by)

    @classmethod
    def even(cls, kind: str, ranks: npt.ArrayLike, size_bytes: npt.ArrayLike) -> Messages:
        """Collectives of one kind, all ranks alike."""
        sizes, counts = np.broadcast_arrays(np.asarray(size_bytes, dtype=np.float64), np.asarray(ranks, dtype=np.intp))
        return cls(np.full(sizes.shape, KINDS.index(kind), dtype=np.intp), counts, sizes, sizes, sizes)

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Messages:
        """From collectives one by one."""
        sizes = np.array([float(message.bytes) for message in messages])
        load, pairs = sizes.copy(), sizes.copy()
        for index, message in enumerate(messages):
            if message.splits is not None:
                sent = np.array([message.splits], dtype=np.float64)
                load[index], pairs[index] = load_bytes(sent)[0], pair_bytes(sent)[0]
        kinds = np.array([KINDS.index(message.kind) for message in messages], dtype=np.intp)
        return cls(kinds, np.array([message.ranks for message in messages], dtype=np.intp), sizes, load, pairs)
