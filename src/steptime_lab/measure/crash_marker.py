"""What ranks are at, in a file: what was running when a process died is known afterwards, and not tried again at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CrashMarker:
    """The marker of one rank, or of a group whose rank 0 writes it, in a folder of measurements."""

    folder: Path
    group: str  # as in timed4

    @property
    def file(self) -> Path:
        """Where the marker is."""
        return self.folder / f"running_{self.group}.txt"

    def begin(self, case: str) -> None:
        """That case is tried from now on."""
        self.file.write_text(case, encoding="utf-8")

    def end(self) -> None:
        """Nothing is tried."""
        self.file.unlink(missing_ok=True)

    def take(self) -> str:
        """The case that was tried when a group died, once: asking again says nothing. Empty where none was."""
        try:
            case = self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            case = ""
        self.end()
        return case


@dataclass(frozen=True, slots=True)
class AvoidList:
    """Cases of a job that ended a process in a folder's runs. Every rank has a marker; the parent gathers them."""

    folder: Path
    job: str

    def marker(self, rank: int) -> CrashMarker:
        """Of one rank."""
        return CrashMarker(self.folder, f"{self.job}_rank{rank}")

    def forget_markers(self) -> None:
        """What an interrupted run was trying did not end it."""
        for marker in self._markers():
            marker.end()

    def add_crashed(self) -> bool:
        """Adds the cases whose markers were left behind; whether there are any."""
        return self.add(marker.take() for marker in self._markers())

    def add(self, cases: Iterable[str]) -> bool:
        """Adds cases; whether there are any."""
        crashed = sorted(set(cases) - {""})
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(case) + "\n" for case in crashed)
        return bool(crashed)

    def cases(self) -> frozenset[str]:
        """What is not tried again."""
        if not self._file.exists():
            return frozenset()
        return frozenset(str(json.loads(line)) for line in self._file.read_text(encoding="utf-8").splitlines())

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.job}.avoid"

    def _markers(self) -> list[CrashMarker]:
        prefix = f"running_{self.job}_rank"
        ranks = sorted(int(file.stem.removeprefix(prefix)) for file in self.folder.glob(f"{prefix}*.txt"))
        return [self.marker(rank) for rank in ranks]
