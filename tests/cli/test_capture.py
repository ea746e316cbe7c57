"""`steptime capture`: a function is saved as a workload, and whatever is wrong with it is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from steptime._cli.app import run
from steptime._program.load import load

SCRIPT = """
import torch
from torch import nn

NUMBER = 1

def training_step(batch: int = 8, device: str = "cuda"):
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(batch, 16, device=device)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step

def needs(batch): ...
def asks(what): ...
def without(): ...
def leaves(): raise SystemExit(3)
def graphs(): return torch.cuda.CUDAGraph()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("import nothing_like_it\n")
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.parametrize("target", ["script:training_step", "script.py:training_step"])
def test_the_saved_workload_is_the_step(script: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved = script.parent / "out.json.gz"
    assert run(["capture", target, "--batch", "32", "-o", str(saved), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    workload = load([saved])
    (program,) = workload.programs
    assert said["ops"] == len(program.ops) > 0
    assert said["ranks"] == workload.world_size == 1
    assert "aten::addmm" in program.names
    assert any(getattr(value, "shape", None) == (32, 16) for each in program.signatures for value in each.inputs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["script:leaves"], "SystemExit"),
        (["script:graphs"], "CUDA graphs: what a graph replays is not captured"),
        (["nothing:step"], "nothing: cannot be imported (no module named nothing)"),
        (["fails:step"], "fails: cannot be imported (no module named nothing_like_it)"),
        (["script:step"], "script has no step; there are asks, graphs, leaves, needs, training_step"),
        (["script:NUMBER"], "is a int, not a function"),
        (["script"], "names no function"),
        (["missing.py:step"], "missing.py: no such file"),
        (["script:needs"], "takes a batch; give one with --batch"),
        (["script:asks"], "takes an unknown argument what"),
        (["script:without", "--batch", "4"], "takes no argument batch"),
    ],
)
def test_a_wrong_target_is_one_line(script: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", *arguments, "-o", str(script.parent / "out.json")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_workload_is_one_file(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "script:training_step", "-o", str(script.parent / "folder")]) == 2
    assert ".json or .json.gz" in capsys.readouterr().err
