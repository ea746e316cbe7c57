"""Objects that ranks send each other (`send_object_list`), as the stages of a pipeline tell each other what they exchange.

Every rank runs alone, one after the other. A rank that is sent something which nobody has sent yet stops there, and runs again
once the others had their turn: what they sent lies in a folder, pickled as `torch.distributed` sends it.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from steptime.errors import InputError


class MissingLetterError(BaseException):
    """A rank waits for an object of another, which has to run first; no `except Exception` of a script is meant."""


@contextmanager
def letters(rank: int, folder: Path | None) -> Iterator[None]:
    """While it lasts, this rank sends and receives objects through a folder; without one, none can be received."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()

    def send(objects: Sequence[Any], dst: int | None = None, group: Any = None, *_: Any, **kwargs: Any) -> None:
        to = _peer(dst, group, kwargs.get("group_dst"))
        if folder is not None:
            _letter(folder, rank, to, sent[to]).write_bytes(pickle.dumps(list(objects)))
        sent[to] += 1

    def receive(objects: list[Any], src: int | None = None, group: Any = None, *_: Any, **kwargs: Any) -> int:
        sender = _peer(src, group, kwargs.get("group_src"))
        file = None if folder is None else _letter(folder, sender, rank, received[sender])
        if file is None or not file.exists():
            raise MissingLetterError(f"rank {rank} waits for an object of rank {sender}")
        # Written by the same script as another rank: what `recv_object_list` itself unpickles.
        objects[:] = pickle.loads(file.read_bytes())  # noqa: S301
        received[sender] += 1
        return sender

    with ExitStack() as stack:
        for owner in (dist, distributed_c10d):
            stack.enter_context(patch.object(owner, "send_object_list", send))
            stack.enter_context(patch.object(owner, "recv_object_list", receive))
        stack.enter_context(patch.object(dist, "recv", _but_votes(dist.recv)))
        yield


def _letter(folder: Path, sender: int, receiver: int, number: int) -> Path:
    return folder / f"{sender}_{receiver}_{number}"


def _peer(rank: int | None, group: Any, in_group: int | None) -> int:
    if in_group is not None:
        return dist.get_global_rank(group or distributed_c10d._get_default_group(), in_group)
    if rank is None:
        raise InputError("an object without a sender cannot be captured; name the rank that it comes from (src)")
    return rank


def _but_votes(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Stages of a pipeline vote on whether all of them were told their shapes (PyTorch 2.13): here they find them out."""

    def call(tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_name in _VOTES:
            return src
        return receive(tensor, src, *args, **kwargs)

    return call


_VOTES = ("_warmup_forward_vote", "_warmup_backward_result")
