"""One rank of a measuring job, as `ranks.run_ranks` starts it: `python -m steptime._calibrate.harness.worker MODULE PLAN`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

# prctl's PR_SET_PDEATHSIG (linux/prctl.h).
_PARENT_DEATH_SIGNAL = 1


def main(module: str, file: str) -> None:
    """Joins the group and does the rank's work for the job in a module. Flushed rows survive whatever happens next."""
    # A rank without its parent would go on measuring, in the way of the next run.
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # Ctrl-C reaches every process of a terminal; the parent hears it and asks its ranks to end, which flushes their rows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cores = {int(core) for core in os.environ.get("STEPTIME_CORES", "").split(",") if core}
    if cores:
        os.sched_setaffinity(0, cores)
    from steptime._calibrate.harness.group import join, leave
    from steptime._calibrate.harness.session import Session

    plan = json.loads(Path(file).read_text(encoding="utf-8"))
    group = join()
    session = Session.from_plan(plan, group.rank)
    try:
        import_module(module).work(group, session, plan)
    finally:
        session.store.flush()
    leave()


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2])
    except KeyboardInterrupt:
        sys.exit(130)
