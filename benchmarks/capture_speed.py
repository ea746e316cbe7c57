"""Capture and predict from cold: ResNet-50, a decoder of 12 layers, Llama 70B with FSDP2 on 64 ranks (bars 5, 5 and 15 s).

    python benchmarks/capture_speed.py [resnet | decoder | llama ...]

CPU seconds of the command, beside those of a floor: a process that imports PyTorch, makes the same model on the meta device and
trains it for two steps, which a capture does too (the one before the captured one, and that). Seconds depend on the machine,
the ratio hardly does.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
CASES = {"resnet": ("1xh200", 1, 5), "decoder": ("1xh200", 1, 5), "llama": ("64xh100-ib400", 64, 15)}
"""Platform, ranks, bar in seconds."""


def resnet(device: str = "cuda") -> Callable[[], None]:
    """ResNet-50, 64 images, SGD."""
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.capture.resnet import resnet50

    model, images = resnet50().to(device), torch.randn(64, 3, 224, 224, device=device)
    labels = torch.randint(1000, (64,), device=device)
    return _trained(model, (images,), labels, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def decoder(device: str = "cuda") -> Callable[[], None]:
    """Twelve layers of width 768 over eight texts of 1,024 tokens, AdamW."""
    sizes = {"layers": 12, "width": 768, "heads": 12, "kv_heads": 12, "feed_forward": 3072}
    return _llama(device, {**sizes, "vocabulary": 50257, "length": 1024, "batch": 8})


def llama(device: str = "cuda") -> Callable[[], None]:
    """As in examples/llama70b_capture.py, FSDP2 alone; the floor is not sharded."""
    if device == "meta":
        return _llama(device, {})
    example = _example()
    step: Callable[[], None] = example.training_step(example.Llama(tensor_parallel=1))
    return step


def _llama(device: str, dimensions: dict[str, int]) -> Callable[[], None]:
    import torch

    example = _example()
    size = example.Llama(**dimensions)
    with torch.device("meta"):
        model = example.Transformer(size).to(torch.bfloat16)
    model = model.to_empty(device=device)
    tokens = torch.randint(size.vocabulary, (size.batch, size.length), device=device)
    angles = torch.randn(size.length, size.head_width, device=device, dtype=torch.bfloat16)
    return _trained(model, (tokens, angles, angles), tokens, torch.optim.AdamW(model.parameters(), lr=3e-4))


def _example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    return import_module("llama70b_capture")


def _trained(model: Any, inputs: tuple[Any, ...], labels: Any, optimizer: Any) -> Callable[[], None]:
    from torch.nn import functional

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = functional.cross_entropy(model(*inputs).flatten(0, -2).float(), labels.flatten())
        loss.backward()
        optimizer.step()

    return step


def floor(name: str) -> None:
    """Two plain steps on the meta device."""
    step = globals()[name]("meta")
    step()
    step()


def cpu_seconds(command: list[str]) -> tuple[float, float]:
    """The least CPU time of several runs of a command, and the wall time of that run."""
    results = []
    for _ in range(ROUNDS):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        results.append((used, time.perf_counter() - started))
    return min(results)


def main(names: list[str]) -> None:
    """Print seconds and ratios."""
    print("case       floor, CPU s   predict, CPU s   ratio   wall s   bar s")
    for name in names or list(CASES):
        platform, ranks, bar = CASES[name]
        plain, _ = cpu_seconds([sys.executable, __file__, "floor", name])
        words = f"predict {__file__}:{name} --platform {platform} --ranks {ranks} --json".split()
        used, wall = cpu_seconds([sys.executable, "-m", "steptime", *words])
        print(f"{name:10s} {plain:12.1f} {used:16.1f} {used / plain:7.1f} {wall:8.1f} {bar:7d}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["floor"]:
        floor(sys.argv[2])
    else:
        main(sys.argv[1:])
