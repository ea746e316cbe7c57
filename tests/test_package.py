"""The package's public face: cheap to import, and every name it offers is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import steptime

SOURCE = Path(steptime.__file__).parent.parent
HEAVY = ("msgspec", "numpy", "pandas", "rich", "torch", "typer")


def module_of(name: str) -> str:
    return steptime._LAZY[name].partition(":")[0]


def loaded_by(statement: str) -> set[str]:
    """The modules a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys\nsys.stdout.write('\\n'.join(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_pulls_in_nothing_heavy() -> None:
    before, after = loaded_by("pass"), loaded_by("import steptime")
    assert "steptime" in after
    assert not (after - before) & set(HEAVY)


def test_nothing_public_needs_torch() -> None:
    names = [name for name in steptime._LAZY if find_spec(module_of(name))]
    after = loaded_by("import steptime\n" + "\n".join(f"steptime.{name}" for name in names))
    assert "numpy" in after
    assert not after & {"torch", "pandas"}


def test_version_has_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", steptime.__version__)


def test_public_names_are_distinct_and_hold_every_lazy_one() -> None:
    assert len(set(steptime.__all__)) == len(steptime.__all__)
    assert set(steptime._LAZY) < set(steptime.__all__)


def test_every_lazy_name_says_module_and_attribute() -> None:
    for name, place in steptime._LAZY.items():
        assert re.fullmatch(rf"steptime(\.[a-z_]+)+:{name}", place), place


def test_every_public_name_resolves() -> None:
    written = [name for name in steptime.__all__ if name not in steptime._LAZY or find_spec(module_of(name))]
    assert {"Program", "Workload", "InputError"} <= set(written)
    for name in written:
        assert getattr(steptime, name) is not None
        assert name in dir(steptime)


def test_a_lazy_name_is_the_object_itself() -> None:
    from steptime._program.workload import Workload

    assert steptime.Workload is Workload


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = steptime.nonsense
