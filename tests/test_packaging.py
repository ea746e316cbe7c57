"""The two distributions: what each holds, and what the measuring commands need where nothing is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a user downloads, at most.
WHEEL_BYTES = 12_000_000
# Of the lab, and of nobody else.
LAB_ONLY = ("torch", "scipy", "lightgbm", "transformers")
# What is not there on a machine that has torch, numpy and pyarrow alone.
ABSENT = ("msgspec", "typer", "rich", "click", "scipy", "lightgbm", "transformers", "torchvision")

BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def wheel(project: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(project)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def holds(built: Path) -> tuple[set[str], list[str]]:
    """The top-level packages in a wheel, and what it requires without extras."""
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        required = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    return packages, [line for line in required if "extra ==" not in line]


@pytest.mark.slow
def test_what_a_user_installs_is_small_and_holds_nothing_of_the_lab(tmp_path: Path) -> None:
    built = wheel(ROOT, tmp_path)
    packages, required = holds(built)
    assert packages == {"steptime"}
    assert not [line for line in required if line.startswith(LAB_ONLY)]
    assert built.stat().st_size <= WHEEL_BYTES
    with zipfile.ZipFile(built) as archive:
        assert any(name.endswith("/NOTICE") for name in archive.namelist())


@pytest.mark.slow
def test_the_lab_brings_what_it_measures_fits_and_checks_with(tmp_path: Path) -> None:
    packages, required = holds(wheel(ROOT / "lab", tmp_path))
    assert packages == {"steptime_lab"}
    assert any(line.startswith("steptime==") for line in required)


def measuring(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m ...` where only torch, numpy and pyarrow can be imported, by the command and by every rank it starts."""
    (folder / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_the_measuring_command_needs_neither_the_command_line_nor_the_readers(tmp_path: Path) -> None:
    done = measuring(tmp_path, "steptime_lab.measure", "--help")
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout


def test_the_old_name_works_and_says_the_new_one(tmp_path: Path) -> None:
    done = measuring(tmp_path, "steptime.measure", "--help")
    assert done.returncode == 0, done.stderr
    assert "python -m steptime_lab.measure" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("job", ["kernels", "lookups", "host", "collectives", "steps", "sharding", "memory", "calibrate"])
def test_every_job_measures_with_torch_numpy_and_pyarrow_alone(tmp_path: Path, job: str) -> None:
    pytest.importorskip("torch")
    options = ["-o", str(tmp_path / "rows"), "--device", "cpu", "--small", "--minutes", "3", "--ranks", "2"]
    done = measuring(tmp_path, "steptime_lab.measure", job, *options)
    assert done.returncode == 0, done.stderr
    assert "rows added" in done.stdout
    assert "no rows" not in done.stdout
