"""Processes that work for this one, and end when it ends, whatever ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

from steptime.errors import SteptimeError

_OFTEN_S = 0.5  # how often a process looks for its parent


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def workers(
    count: int, begin: Callable[..., object] | None = None, *given: Any, advice: str = ""
) -> Iterator[ProcessPoolExecutor]:
    """Processes that wait for tasks; each calls `begin` first. An error or Ctrl-C ends them and does not wait for them.

    `advice` says what to do where the system ended one.
    """
    before = set(multiprocessing.active_children())
    kind = context()
    pool = ProcessPoolExecutor(count, mp_context=kind, initializer=_begin, initargs=(os.getpid(), begin, given))
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process, which ends its workers
        for _ in range(count):
            pool.submit(os.getpid)  # starts one, with this mask
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pool
    except BaseException as error:
        # In this order: the pool's thread fails over tasks that were taken back unless it knows that it is to end.
        pool.shutdown(wait=False, cancel_futures=True)
        children = set(multiprocessing.active_children()) - before
        for child in children:
            child.terminate()
        for child in children:
            child.join()
        if isinstance(error, BrokenProcessPool):
            guard = "" if kind.get_start_method() == "fork" else ', or a script without `if __name__ == "__main__":`'
            raise SteptimeError(f"a worker process was ended, perhaps for want of memory{guard}{advice}") from None
        raise
    pool.shutdown()


def context() -> BaseContext:
    """Forked workers have what is loaded already. A process with threads of its own cannot be forked safely, and PyTorch has
    some that Python does not count: workers waited for them without end."""
    alone = threading.active_count() == 1 and "torch" not in sys.modules
    forks = "fork" in multiprocessing.get_all_start_methods() and alone
    return multiprocessing.get_context("fork" if forks else "spawn")


def end_with_parent(parent: int) -> None:
    """From here on this process, with the group that it leads, ends soon after its parent: one that is killed ends nobody."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_OFTEN_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _begin(parent: int, begin: Callable[..., object] | None, given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    if begin is not None:
        begin(*given)
