"""What a script's process is told and what it leaves: plain files in a folder of its parent's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steptime._notices import restored, saved

TASK, OUTCOME, PROGRAM, CALLS = "task.json", "outcome.json", "program.json", "calls.txt"
COMPILING = "compiling"
"""A file that is there once PyTorch's compiler has been at work, which takes none of a script's time."""

LONGEST_COMPILING = 4
"""So many times its own limit the compiler may take."""

LETTER = "letter"
"""Why a rank has to be run again: it waits for an object that another one sends."""

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher of ranks sets."""


@dataclass(frozen=True)
class ScriptTask:
    """A script to run, as which rank."""

    script: str
    arguments: tuple[str, ...]
    name: str  # in messages
    limit_s: float
    rank: int = 0
    ranks: int = 1
    devices: int = 1  # that the script sees
    world: bool = False  # a launcher's variables, and a process group to join
    early: bool = False  # observe the second iteration, there is no third
    compile: str | None = None  # a mode of torch.compile, where the script compiles nothing itself, or "off"
    letters: str = ""  # the folder of objects that ranks send each other

    def write(self, folder: Path) -> None:
        """For the process to read."""
        (folder / TASK).write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> ScriptTask:
        """As it was written."""
        document = json.loads((folder / TASK).read_text())
        return ScriptTask(**{**document, "arguments": tuple(document["arguments"])})


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a program, an error of one line, or the wish to be run `again` in another way."""

    error: str = ""
    again: str = ""  # world, early, LETTER
    processes: int = 0  # that the script starts itself
    joined: bool = False  # it is one rank of a process group
    messages: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "messages": saved(self.messages)}

    @staticmethod
    def read(folder: Path) -> Outcome | None:
        """What a process left; None where it left nothing."""
        try:
            document = json.loads((folder / OUTCOME).read_text())
        except (OSError, ValueError):
            return None
        return Outcome(**{**document, "messages": restored(document["messages"])})
