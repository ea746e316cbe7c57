"""Training scripts as they are: what is found in them, and that whatever is wrong with one is said in one line of its own."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

import torch

import steptime
from steptime._capture.child import Child
from steptime._capture.outcome import PROGRAM, Outcome, ScriptTask
from steptime._capture.watch import FoundError
from steptime._notices import Caveat
from steptime._program.load import load
from steptime._program.program import Program

LOOP = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 3, (64,)))
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True, num_workers=2, pin_memory=True)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for epoch in range(args.steps):
        for number, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if number % 3 == 0:
                print("loss", loss.item())
        scheduler.step()
        torch.save(model.state_dict(), "checkpoint.pt")

if __name__ == "__main__":
    main()
"""
TRAINING = """
import torch
from torch import nn
device = torch.device("cuda")
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8, device=device)
def train():
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss
"""


class EndedError(FoundError):
    """In place of the end of the process."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class InProcess(Child):
    """A run within the test's own process."""

    def end(self, outcome: Outcome) -> NoReturn:
        raise EndedError(outcome)


Run = Callable[..., tuple[Outcome, Program | None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")

    def run_text(text: str | bytes, *arguments: str, **task: Any) -> tuple[Outcome, Program | None]:
        script = tmp_path / "train.py"
        script.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.setattr(sys, "path", ["", *sys.path])
        (tmp_path / PROGRAM).unlink(missing_ok=True)
        child = InProcess(ScriptTask("train.py", arguments, "train.py", 60.0, **task), tmp_path)
        with pytest.raises(EndedError) as ended:
            child.run()
        program = load([tmp_path / PROGRAM]).programs[0] if (tmp_path / PROGRAM).exists() else None
        return ended.value.outcome, program

    return run_text


def names(program: Program | None) -> list[str]:
    assert program is not None
    return [program.names[row] for row in program.ops.name]


def test_one_iteration_of_an_ordinary_script_is_found(run: Run, tmp_path: Path) -> None:
    outcome, program = run(LOOP, "--batch", "8")
    calls = names(program)
    assert calls.count("aten::cross_entropy_loss") == 1
    assert "aten::_local_scalar_dense" not in calls  # of every third iteration
    assert "aten::stack" not in calls  # loading
    assert sum(name == "aten::copy_" for name in calls) == 2  # the batch goes to the device
    assert any("making the model and loading data are not part" in said for said in outcome.messages)
    assert any("workers of a data loader (num_workers=2)" in said for said in outcome.messages)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_function_that_trains_is_a_loop_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trains.py").write_text(LOOP)
    workload = steptime.capture("trains.py:main", arguments=["--batch", "8"])
    assert names(workload.programs[0]).count("aten::cross_entropy_loss") == 1
    assert workload.description.parameters == 16 * 8 + 8 + 8 * 3 + 3
    assert any("making the model and loading data are not part" in said for said in workload.warnings)


def test_arguments_are_those_of_the_script(run: Run) -> None:
    outcome, program = run(LOOP, "--batch", "x")
    assert program is None
    seen = "0 optimiser steps and 0 backward passes were seen"
    assert outcome.error == f"train.py: left with exit code 2; {seen}: no training step ran with these arguments"


@pytest.mark.parametrize(
    ("loop", "backward", "optimizers"),
    [
        ("for _ in range(9):\n    train()", 1, 1),
        ("for step in range(30):\n    model(x).sum().backward()\n    if step % 4 == 3:\n        optimizer.step()", 4, 1),
        (
            "other = torch.optim.Adam(model.parameters())\n"
            "for _ in range(20):\n    train()\n    model(x).mean().backward()\n    other.step()",
            2,
            2,
        ),
        (
            "for step in range(9):\n    train()\n    if step % 5 == 0:\n        with torch.no_grad():\n            model(x)",
            1,
            1,
        ),
        ("for step in range(9):\n    train()\n    if torch.isnan(train()):\n        raise SystemExit(3)", 1, 1),
        ("scaler = torch.amp.GradScaler()\nfor _ in range(9):\n    scaler.scale(model(x).sum()).backward()\n"
         "    scaler.step(optimizer)\n    scaler.update()", 1, 1),
        ("train()\ntrain()\nraise SystemExit(0)", 1, 1),
        ("train()\ntrain()\ntrain()\nraise ValueError('afterwards')", 1, 1),
    ],
)  # fmt: skip
def test_an_iteration_holds_what_repeats(run: Run, loop: str, backward: int, optimizers: int) -> None:
    outcome, program = run(TRAINING + loop)
    if outcome.again:
        outcome, program = run(TRAINING + loop, early=outcome.again == "early")
    assert not outcome.error
    calls = names(program)
    assert sum(name.startswith("Optimizer.step") for name in calls) == optimizers
    assert sum(name.endswith("evaluate_function: AddmmBackward0") for name in calls) == backward


def test_updates_by_hand_are_told_by_backward_passes(run: Run) -> None:
    by_hand = """
import torch
from beside import WIDTH
weight = torch.randn(WIDTH, WIDTH, device=0, requires_grad=True)
for _ in range(9):
    (torch.randn(4, WIDTH, device="cuda:0") @ weight).sum().backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad = None
"""
    outcome, program = run(by_hand)
    assert not outcome.error
    assert names(program).count("aten::mm") == 2


def test_a_model_may_be_tried_out_before_it_is_moved(run: Run) -> None:
    tried = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(self.features(torch.zeros(1, 1, 28, 28)).shape[1], 10)
    def forward(self, x):
        return self.head(self.features(x))
model = Net().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    x = torch.randn(2, 1, 28, 28)
    model({}).sum().backward()
    optimizer.step()
"""
    outcome, program = run(tried.replace("{}", "x.cuda()"))
    assert outcome.error == ""
    assert names(program).count("aten::addmm") == 1
    outcome, _ = run(tried.replace("{}", "x"))
    assert "takes a tensor of the CPU" in outcome.error


def test_what_scripts_ask_is_answered(run: Run) -> None:
    asks = """
import torch
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
assert torch.device(0) == torch.device("cuda:0") and isinstance(torch.device("cpu"), torch.device)
free, total = torch.cuda.mem_get_info()
torch.cuda.nvtx.range_push("x"); torch.cuda.nvtx.range_pop()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record(); end.record(); torch.cuda.synchronize(); begin.elapsed_time(end)
torch.cuda.set_device(0); torch.cuda.max_memory_allocated(); torch.cuda.memory_summary()
assert torch.cuda.get_device_properties(0).total_memory == total
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
assert Tensor(2, 3).fill_(1.0).shape == (2, 3) and isinstance(torch.randn(2).type(Tensor), Tensor)
assert Tensor([1.0]).type() == "torch.cuda.FloatTensor" and torch.ones(2).type("torch.cuda.LongTensor").is_cuda
torch.distributions.Categorical(torch.softmax(torch.randn(3, device=0), 0)).sample().item()
with torch.device("cuda"):
    assert torch.zeros(2).is_cuda and torch.tensor([1.0]).is_cuda
assert torch.empty(3, pin_memory=True).to("cuda", non_blocking=True).is_cuda
model = torch.nn.Linear(4, 4).to(0)
assert torch.randn(4).pin_memory().to(0, non_blocking=True).device.type == "cuda"
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.randn(2, 4).to(0)).sum().backward()
    optimizer.step()
    print(model.weight, [each.cpu() for each in model.parameters()])
"""
    outcome, _ = run(asks)
    assert outcome.error == ""


BESIDE = """
import reading
@torch.jit.script
def never(x):
    return x + 1
@torch.jit.script
def always(x):
    return x + 1
@torch.compile(mode="max-autotune")
def neither(x):
    return x + 1
labels = torch.arange(4).to(device)
for _ in range(8):
    loss = model(always(x)).sum()
    reading.read(loss)
    correct = (model(x).topk(2, dim=1)[1][:, 0] == labels).sum()
    correct.item()
    optimizer.step()
"""


def test_what_is_told_is_of_what_ran(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reading.py").write_text("def read(x):\n    return float(x)\n")
    outcome, _ = run(TRAINING + BESIDE)
    assert outcome.error == ""
    assert Caveat("no backward pass: nothing is trained") in outcome.messages
    assert any(said.startswith("reading.py:2 reads") for said in outcome.messages)  # as the script's own lines
    assert sum("torch.jit is not honoured" in said for said in outcome.messages) == 1
    assert not any("max-autotune" in said or "--expert-skew" in said for said in outcome.messages)


UNSEEDED = (
    TRAINING
    + """
import random
import numpy as np
for number in range(8):
    held = [torch.zeros(random.randrange(1, 99)) + 1 for _ in range(random.randrange(9))]
    x = x + 1 if np.random.rand() < 0.5 else x
    train()
"""
)


def test_two_captures_of_a_script_are_the_same_bytes(run: Run, tmp_path: Path) -> None:
    files = []
    for allocated in (0, 100):  # memory lies elsewhere
        held = [torch.zeros(each) for each in range(allocated)]
        run(UNSEEDED)
        files.append((tmp_path / PROGRAM).read_bytes())
        del held
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("open('data.csv')", "train.py: FileNotFoundError at train.py:1: .*data.csv"),
        ("import nothing_like_it", "train.py: ModuleNotFoundError at train.py:1"),
        ("x = (", "train.py: SyntaxError: .* line 1"),
        ("def f():\n    raise ValueError('of mine')\nf()", "train.py: ValueError at train.py:2: of mine"),
        ("print('nothing')", "train.py: ended; 0 optimiser steps and 0 backward passes were seen: no training step ran"),
        ("raise SystemExit('no GPU')", "train.py: left with exit code no GPU"),
        (TRAINING + "train()", "train.py: ended; 1 optimiser step and 1 backward pass were seen: an iteration is known"),
        (b"\xff\xfe\x00", "train.py: SyntaxError"),
        ("len(3)", f"train.py: TypeError at train.py:1: .*PyTorch {re.escape(torch.__version__)} is installed"),
        (TRAINING.replace('torch.device("cuda")', "'cpu'") + "[train() for _ in range(6)]", ".*this script never uses a GPU"),
        ("input()", "train.py: (EOFError|OSError) at train.py:1"),
    ],
)
def test_what_is_wrong_is_the_users_own_line(run: Run, text: str | bytes, said: str) -> None:
    outcome, program = run(text)
    assert program is None
    assert outcome.error

    assert re.match(said, outcome.error), outcome.error


def test_a_launched_script_asks_for_ranks(run: Run) -> None:
    assert run("import os; os.environ['LOCAL_RANK']")[0].again == "world"
    assert run("import torch.distributed as dist; dist.init_process_group('nccl')")[0].again == "world"
    spawned = "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=4)"
    assert run(spawned)[0] == Outcome(again="world", processes=4)


LINES = [line for line in TRAINING.splitlines() if line]
PIECES = [
    "loss.item()", "print(loss)", "torch.save(model, 'x')", "raise KeyError(1)", "import sys; sys.exit(4)", "loss = train()",
    "for _ in range(5): train()", "model.eval()", "x = x.cpu()", "x = x.to('cuda')", "del optimizer", "1 / 0", "break", "\tx",
    "assert loss.item() > 2", "open('missing')", "optimizer = None", "torch.nonexistent()", "exit()", "x = x[x > 0]", "(",
    "import beside", "model = model.to('meta')", "loss = model(x[:, :3])", "'\\0'", "os.environ['RANK']", "sys.argv[3]",
    "raise BaseException", "train = 3", "torch.manual_seed(0)", "with torch.no_grad(): train()", "torch.cuda.synchronize()",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_broken_scripts_end_in_one_line(run: Run, seed: int) -> None:
    """Twenty scripts each: lines left out, exchanged or put in, characters changed, odd arguments."""
    draw = random.Random(seed)
    for _ in range(20):
        lines = [*LINES, *["train()"] * draw.randint(0, 5)]
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(lines))
            change = draw.random()
            if change < 0.3:
                del lines[at]
            elif change < 0.7:
                lines.insert(at, draw.choice(PIECES))
            elif change < 0.85:
                other = draw.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            elif lines[at]:
                place = draw.randrange(len(lines[at]))
                lines[at] = lines[at][:place] + chr(draw.choice((0, 9, 40, 41, 58, 255, 0x2028))) + lines[at][place + 1 :]
        odd = draw.choice(((), ("--",), ("-h",), ("",), ("\ud800",), ("x" * 5000,)))
        outcome, program = run("\n".join(lines), *odd)
        assert bool(outcome.error) + bool(outcome.again) + (program is not None) == 1
        assert "\n" not in outcome.error
        assert "_capture" not in outcome.error
