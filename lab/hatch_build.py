"""What the build asks: the version, which is steptime's, and where the sources lie, in a clone and in a source archive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

HERE = Path(__file__).parent
CLONE = HERE.parent / "src"
ARCHIVED = HERE / "src"
DEPENDENCIES = ("lightgbm>=4.3", "scipy>=1.11")


def version() -> str:
    """That of steptime: in a clone from its package, in a source archive as it was when that was made."""
    place = CLONE / "steptime" / "__init__.py"
    pattern, file = (r'^__version__ = "(.+)"$', place) if place.is_file() else (r"^Version: (.+)$", HERE / "PKG-INFO")
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, file
    return found[1]


class CustomMetadataHook(MetadataHookInterface):
    """The lab works with the steptime of its own version."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds what is required."""
        metadata["dependencies"] = [f"steptime=={version()}", *DEPENDENCIES]


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the package's sources into what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Where they lie, and where they go."""
        if version == "editable" or ARCHIVED.is_dir():  # in an archive they lie where the build looks
            return
        target = "steptime_lab" if self.target_name == "wheel" else "src/steptime_lab"
        build_data["force_include"][str(CLONE / "steptime_lab")] = target
