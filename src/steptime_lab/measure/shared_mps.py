"""The MPS daemon that the groups of a job share, and a fresh one after ranks died in it."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager

from steptime._calibrate.harness.mps import mps
from steptime._calibrate.harness.options import Options
from steptime._calibrate.harness.session import Session


class SharedMps:
    """Starting one takes seconds, so that groups share it; clients that were killed can leave it useless."""

    def __init__(self, session: Session, options: Options) -> None:
        self._session = session
        self._needed = options.share_gpu and options.device == "cuda" and max(options.ranks) > 1
        self._running: AbstractContextManager[dict[str, str]] | None = None
        self._environment: dict[str, str] | None = None

    def __enter__(self) -> SharedMps:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def environment(self, ranks: int) -> dict[str, str] | None:
        """What a group of so many ranks needs to find it; None where it needs none."""
        return self._environment if ranks > 1 else None

    def renew(self) -> None:
        """Ends it and starts another."""
        self._stop()
        self._start()

    def _start(self) -> None:
        if self._needed:
            self._running = mps()
            self._environment = self._running.__enter__()

    def _stop(self) -> None:
        running, self._running, self._environment = self._running, None, None
        if running is None:
            return
        try:
            running.__exit__(None, None, None)
        except (subprocess.TimeoutExpired, OSError) as error:
            self._session.warn(f"the CUDA MPS daemon did not end ({error}); another one is started beside it")
