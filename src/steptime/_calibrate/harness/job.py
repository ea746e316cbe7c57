"""`Job`: something to measure, as a command offers it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Job:
    """Its module has `run(session, options)` for the command, `work(group, session, plan)` for every rank it starts, and
    `names(options)` where `--only` may name something. It is imported when the job runs."""

    name: str
    about: str
    module: str
    ranks: tuple[int, ...] = (1,)  # by default
    minutes: float = 5.0  # by default
    command: str = "steptime measure"
    takes_plans: bool = False  # whether it has --plans

    @property
    def words(self) -> str:
        """The command line that runs it."""
        return f"{self.command} {self.name}"

    def load(self) -> ModuleType:
        """The module."""
        return import_module(self.module)


CALIBRATE = Job("calibrate", "this machine's host and fabric", "steptime._calibrate.calibrate", minutes=1.5, command="steptime")
