"""The file of calls in the folder of a run: those that workloads make, and how often."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from steptime._files import write_whole
from steptime._models.kernels.call import Call
from steptime.errors import InputError

FILE_NAME = "workload_calls.json"


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
