"""How a result was made, and the file it is kept in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from steptime._calibrate.harness.conditions import completed
from steptime._calibrate.harness.conditions import recipe as recipe_of


def recipe() -> dict[str, Any]:
    """Machine, versions, date and command of this run. Imports torch: call it in a process that measures nothing."""
    return completed(recipe_of(["python3", Path(sys.argv[0]).name, *sys.argv[1:]])).to_dict()


def store(path: Path, content: Any) -> None:
    """Writes JSON that reads well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
