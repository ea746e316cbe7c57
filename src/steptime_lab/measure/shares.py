"""What the other parts of a GPU do while the first one is measured: nothing, or stream memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._units import MIB

_STREAMED_BYTES = 1024 * MIB
# Copies queued at a time: about 30 ms, so that the queue never runs dry and the end is noticed soon.
_COPIES = 8


@contextmanager
def others(group: Group, session: Session, what: str) -> Iterator[bool]:
    """True on the first rank, which works inside; the others do `what` until it is done."""
    flag = session.folder / f"{session.recipe.run}-{group.share}-{what}.done"
    copy = _copies(group) if what == "streaming" and group.rank else None
    if group.rank == 0:
        # A group of this run that died left its flag: with it there, the others would stop before the first one has begun.
        flag.unlink(missing_ok=True)
    group.barrier()
    if group.rank == 0:
        try:
            yield True
        finally:
            flag.touch()
    else:
        if copy is not None:
            _stream(copy, flag, cuda=group.device.type == "cuda")
        yield False
    group.barrier()
    if group.rank == 0:
        flag.unlink(missing_ok=True)


def _copies(group: Group) -> Callable[[], None]:
    """A few copies of memory, queued."""
    import torch

    if group.device.type == "cuda":
        torch.cuda.empty_cache()
    size = (_STREAMED_BYTES if group.device.type == "cuda" else MIB) // 4
    source = torch.randn(size, device=group.device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(_COPIES):
            target.copy_(source)

    copy()
    return copy


def _stream(copy: Callable[[], None], flag: Path, *, cuda: bool) -> None:
    """Copies memory until the flag is there, always with copies queued; whatever the time, for the first rank's last batch
    may end after it. Were that rank to die, the parent would end this one."""
    import torch

    waiting: list[torch.cuda.Event] = []
    while not flag.exists():
        copy()
        if cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            waiting.append(done)
            if len(waiting) > 1:
                waiting.pop(0).synchronize()
