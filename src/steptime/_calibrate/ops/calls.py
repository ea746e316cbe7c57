"""Files of calls in the folder of a run: those that workloads make and how often, and those that are not tried again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from steptime._files import write_whole
from steptime._models.kernels.call import Call
from steptime.errors import InputError

FILE_NAME = "workload_calls.json"
_AVOIDED = "kernels.avoid"
_TRYING = "kernels.trying"


def read_calls(path: Path) -> dict[str, dict[Call, int]]:
    """What `write_calls` wrote: workload to calls to counts."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(name): {Call.from_json(text): int(count) for text, count in calls} for name, calls in sorted(content.items())
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a file of recorded calls ({error}); record them again or remove it") from error


def write_calls(path: Path, name: str, calls: Mapping[Call, int]) -> None:
    """Adds a workload's calls to the file, in place of those it had; the file is whole at every moment."""
    known = read_calls(path) if path.exists() else {}
    known[name] = dict(calls)
    content = {
        workload: [[call.to_json(), count] for call, count in sorted(held.items(), key=lambda item: item[0].to_json())]
        for workload, held in sorted(known.items())
    }
    write_whole(path, json.dumps(content, indent=0))


class Trial:
    """Notes which call a rank tries for the first time, so that a call which ends the process is known afterwards."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"{_TRYING}.{rank}"

    def note(self, text: str) -> None:
        """The call that comes next; empty: none that was not tried."""
        self._file.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """The process ends well."""
        self._file.unlink(missing_ok=True)


def forget_tried(folder: Path) -> None:
    """Nothing is being tried."""
    for file in folder.glob(f"{_TRYING}.*"):
        file.unlink(missing_ok=True)


def avoid_tried(folder: Path) -> bool:
    """Lets the calls that ended their processes be avoided; whether there are any."""
    texts = set()
    for file in folder.glob(f"{_TRYING}.*"):
        texts.add(file.read_text(encoding="utf-8"))
        file.unlink()
    with (folder / _AVOIDED).open("a", encoding="utf-8") as avoid:
        avoid.writelines(json.dumps(text) + "\n" for text in sorted(texts - {""}))
    return bool(texts - {""})


def avoided(folder: Path) -> set[str]:
    """The texts of the calls that ended a process in this folder's runs."""
    file = folder / _AVOIDED
    return {str(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()} if file.exists() else set()
