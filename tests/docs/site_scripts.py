"""The scripts that make the site, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "scripts" / "site"


def script(name: str) -> ModuleType:
    """A script of scripts/site by its name; its neighbours are found as when it runs."""
    found = importlib.util.spec_from_file_location(f"site_{name}", FOLDER / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look for their module
    before = sys.path[:]
    sys.path.insert(0, str(FOLDER))
    try:
        found.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
