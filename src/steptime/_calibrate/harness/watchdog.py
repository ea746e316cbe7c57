"""`watchdog` ends this process when something takes far too long: a rank that failed leaves the others in a collective."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from steptime._calibrate.harness.session import Session

# The exit code of a rank that gave up waiting.
GAVE_UP = 17


@contextmanager
def watchdog(seconds: float, what: str, session: Session) -> Iterator[None]:
    """Within the block, waits so long at most; then keeps the rows there are and ends the process, whatever it hangs in."""

    def give_up() -> None:
        print(f"steptime: rank {session.rank} gave up on {what} after {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            session.store.flush()
        finally:
            os._exit(GAVE_UP)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
