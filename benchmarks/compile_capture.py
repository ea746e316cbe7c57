"""Capture of a compiled step from cold: a decoder of 12 layers, 768 wide, 8 texts of 1,024 tokens, AdamW (bar: 30 s).

    python benchmarks/compile_capture.py [LAYERS ...]

Seconds of a process that captures the step, beside a floor of the same process: importing PyTorch and its compiler, and what
the compiler takes for the frames that it converts (tracing, dividing, lowering, writing code). Seconds depend on the machine,
the ratio hardly does: it is what capture adds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BAR_S = 30
LAYERS = 12


def decoder(layers: int) -> Callable[[], Callable[[], None]]:
    """What makes the step."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        """Pre-norm attention and a feed-forward of four times the width."""

        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads, self.before, self.after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """One layer."""
            query, key, value = (
                each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.mixed(self.before(x)).chunk(3, -1)
            )
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.wide(self.after(x))

    def make() -> Callable[[], None]:
        width, heads, words, length, batch = 768, 12, 50304, 1024, 8
        blocks = [Block(width, heads) for _ in range(layers)]
        model = nn.Sequential(nn.Embedding(words, width), *blocks, nn.LayerNorm(width), nn.Linear(width, words)).to("cuda")
        optimizer, compiled = torch.optim.AdamW(model.parameters()), torch.compile(model)
        tokens = torch.randint(words, (batch, length), device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def one(layers: int) -> dict[str, Any]:
    """One capture, in this process."""
    began_s = time.perf_counter()
    import torch
    import torch._dynamo.convert_frame
    import torch._inductor.async_compile
    import torch._inductor.compile_fx

    imported_s = time.perf_counter() - began_s
    from steptime import capture
    from steptime._capture.compiled.modes import spent

    workload = capture(decoder(layers))
    (program,) = workload.programs
    names = [program.names[name] for name in program.ops.name]
    seconds = time.perf_counter() - began_s
    return {
        "torch": torch.__version__, "seconds": seconds, "cpu": time.process_time(), "imports": imported_s,
        "compiler": spent.seconds(),
        "ops": len(names), "generated": sum(name.startswith("triton_") for name in names),
    }  # fmt: skip


def main() -> None:
    """Prints a line for each number of layers."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(int(sys.argv[2]))))
        return
    for layers in map(int, sys.argv[1:] or [str(LAYERS)]):
        command = [sys.executable, str(Path(__file__)), "--one", str(layers)]
        done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        floor_s = done["imports"] + done["compiler"]
        print(
            f"{layers:3d} layers, torch {done['torch']}: {done['seconds']:.1f} s ({done['cpu']:.1f} CPU s, bar {BAR_S}), "
            f"{done['ops']:,} ops, {done['generated']} generated; imports {done['imports']:.1f} s and compiler "
            f"{done['compiler']:.1f} s: {done['seconds'] / floor_s:.2f} times the floor"
        )


if __name__ == "__main__":
    main()
