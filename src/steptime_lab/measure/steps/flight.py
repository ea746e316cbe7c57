"""Which case a group of ranks is at, in a file: what was in flight when the group died is not tried again at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from steptime._files import write_whole


@dataclass(frozen=True, slots=True)
class Flight:
    """The marker of one kind of group in a folder of measurements. Rank 0 writes it, the parent reads it."""

    folder: Path
    group: str  # kind and ranks, as in timed4

    @property
    def file(self) -> Path:
        """Where the marker is."""
        return self.folder / f"in_flight_{self.group}.json"

    def begin(self, case: str) -> None:
        """That case is tried from now on."""
        write_whole(self.file, json.dumps({"case": case}))

    def end(self) -> None:
        """Nothing is in flight."""
        self.file.unlink(missing_ok=True)

    def take(self) -> str:
        """The case that was in flight when a group died, once: asking again says nothing. Empty where none was."""
        try:
            case = json.loads(self.file.read_text(encoding="utf-8")).get("case", "")
        except (OSError, ValueError, AttributeError):
            case = ""
        self.end()
        return str(case)
