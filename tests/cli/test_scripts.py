"""`steptime predict train.py -- ARGS`: a training script runs in a process of its own, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from steptime._cli.app import run

TRAIN = """
import sys
import torch
from torch import nn

batch = int(sys.argv[sys.argv.index("--batch") + 1]) if "--batch" in sys.argv else 4
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    print("step", step)
    optimizer.zero_grad()
    model(torch.randn(batch, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
RANKS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(64, 64).to(int(os.environ["LOCAL_RANK"])), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 64, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(loss.item())
dist.destroy_process_group()
"""
HANGS = """
import os, subprocess, sys, time
import torch
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open("pids", "w") as file:
    print(os.getpid(), child.pid, file=file)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def gone(pids: list[int]) -> bool:
    for _ in range(100):
        if not any(_is_running(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_script_is_predicted(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text(TRAIN)
    assert run(["predict", "train.py", "--platform", "1xh200", "--json", "--", "--batch", "8"]) == 0
    printed = capfd.readouterr()
    answer = json.loads(printed.out)
    assert answer["step_time_ms"] > 0
    assert any("making the model and loading data are not part" in said for said in answer["basis"])
    assert printed.err.startswith("train.py runs here")
    assert "what it downloads, logs or writes is real" in printed.err.splitlines()[0]
    assert "step 2" in printed.err
    assert "step 9" not in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.py", "--platform", "1xh200"], "absent.py: no such file"),
        (["train.py", "--platform", "1xh200", "--batch", "4"], "pass the batch to the script itself, after --"),
        (["train.py", "--platform", "1xh200", "--limit", "0"], "--limit 0: expected seconds"),
        (["train.py", "--platform", "1xh200", "--ranks", "999999999"], "ranks cannot be captured"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    script: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    script.write_text("raise SystemExit('it ran')")
    assert run(["predict", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_a_script_that_hangs_ends_at_the_limit_with_all_that_it_started(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(HANGS)
    assert run(["capture", "train.py", "-o", "step.json", "--limit", "12"]) == 2
    error = capfd.readouterr().err
    assert "train.py: had no iteration that repeats after 12 s; 0 optimiser steps and 0 backward passes were seen" in error
    assert "it was last at train.py:8" in error
    assert gone([int(pid) for pid in Path("pids").read_text().split()])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_command_is_ended(script: Path, how: signal.Signals) -> None:
    script.write_text(HANGS)
    command = [sys.executable, "-m", "steptime", "capture", "train.py", "-o", "step.json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        if Path("pids").exists() and len(Path("pids").read_text().split()) == 2:
            break
        time.sleep(0.1)
    os.kill(process.pid, how)
    process.wait()
    assert gone([int(pid) for pid in Path("pids").read_text().split()])


@pytest.mark.slow
@pytest.mark.parametrize(("text", "ranks"), [(RANKS, 8), (TRAIN, 1)], ids=["joins a process group", "joins none"])
def test_ranks_are_what_script_and_platform_say(script: Path, capfd: pytest.CaptureFixture[str], text: str, ranks: int) -> None:
    script.write_text(text)
    assert run(["predict", "train.py", "--platform", "8xh200-nvlink", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert len(answer["ranks"]) == ranks


def test_arguments_reach_all_scripts_that_are_compared(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needs = TRAIN.replace('if "--batch" in sys.argv else 4', "")
    script.write_text(needs)
    assert run(["compare", "train.py", "--platform", "1xh200,1xh100", "--json", "--", "--batch", "8"]) == 0
    assert len(json.loads(capfd.readouterr().out)["variants"]) == 2
    script.with_name("a.json").write_text("{}")
    script.with_name("b.json").write_text("{}")
    assert run(["compare", "--platform", "1xh200", "--", "a.json", "b.json"]) == 2  # files, which are none
    assert "a.json" in capfd.readouterr().err


def test_a_sweep_refuses_the_batch_of_a_script_before_it_runs(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text("open('ran', 'w')\n" + TRAIN)
    assert run(["sweep", "train.py", "--platform", "1xh200", "--batch", "4,8"]) == 2
    assert "after --" in capfd.readouterr().err
    assert not script.with_name("ran").exists()


def test_functions_that_join_a_group_have_the_ranks_that_are_given_or_the_platforms(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begin, loop = RANKS.replace("print(loss.item())", "loss.item()").split("dist.init_process_group")
    indented = "".join(f"    {line}\n" for line in f"dist.init_process_group{loop}".splitlines())
    script.write_text(
        f"{begin}\ndef train(batch=4):\n{indented}\ndef alone():\n    return lambda: torch.ones(8, device='cuda').mul(2)\n"
    )
    asked = ["sweep", "train.py:train", "--platform", "4xh200-nvlink", "--ranks", "2", "--batch", "8,16", "--json"]
    assert run(asked) == 0
    variants = json.loads(capfd.readouterr().out)["variants"]
    assert [len(each["ranks"]) for each in variants] == [2, 2]
    assert run(["predict", "train.py:train", "--platform", "4xh200-nvlink", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["ranks"]) == 4
    assert run(["predict", "train.py:alone", "--platform", "4xh200-nvlink", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert len(answer["ranks"]) == 1
    assert any("--ranks 4" in caveat for caveat in answer["verdict"]["caveats"])


@pytest.mark.parametrize("source", ["train.py", "train.py:training_step"])
def test_without_pytorch_a_script_is_refused_in_one_line(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("def training_step(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steptime._api.read.find_spec", lambda _: None)
    assert run(["predict", source, "--platform", "1xh200"]) == 2
    assert "capturing needs PyTorch" in capsys.readouterr().err
