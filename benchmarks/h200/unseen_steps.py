"""Training steps that had no part in making any model: captured and predicted here, then measured on a GPU.

`python benchmarks/h200/unseen_steps.py predict FILE` captures every one, predicts it for an H200 and writes the file, without a
GPU; `... measure FILE` times them on a GPU, unprofiled, many steps between two synchronisations. `steptime validate committed`
puts what was committed beside what was measured.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

PLATFORM = "1xh200"
WARM_UP, REPEATS, LEAST_S = 8, 5, 0.25


def encoder_decoder(batch: int = 32) -> Any:
    """`nn.Transformer` as it comes, fp32."""
    import torch

    model = torch.nn.Transformer(batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    source, target = (torch.randn(batch, 128, 512, device="cuda") for _ in range(2))

    def step() -> None:
        optimizer.zero_grad()
        model(source, target).square().mean().backward()
        optimizer.step()

    return step


def _decoder(width: int, heads: int, layers: int, vocabulary: int, *, gated: bool) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
            self.query_key_value, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            inner = 8 * width // 3 if gated else 4 * width
            self.up, self.down = nn.Linear(width, inner * (1 + gated), bias=False), nn.Linear(inner, width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, sequence, _ = x.shape
            parts = self.query_key_value(self.first(x)).view(batch, sequence, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
            inner = self.up(self.second(x))
            if gated:
                gate, inner = inner.chunk(2, dim=-1)
                inner = functional.silu(gate) * inner
            else:
                inner = functional.gelu(inner)
            return x + self.down(inner)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Decoder().to("cuda", dtype=torch.float32)


def _language_step(model: Any, batch: int, sequence: int, vocabulary: int, *, autocast: bool) -> Any:
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, vocabulary, (batch, sequence), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(tokens)
        functional.cross_entropy(logits.float().view(-1, vocabulary), tokens.view(-1)).backward()
        optimizer.step()

    return step


def decoder_bf16(batch: int = 8) -> Any:
    """A decoder of 300 M parameters, autocast to bf16, causal attention, fused AdamW."""
    return _language_step(_decoder(1024, 16, 16, 32_000, gated=False), batch, 1024, 32_000, autocast=True)


def gated_decoder_fp32(batch: int = 4) -> Any:
    """A gated decoder in fp32."""
    return _language_step(_decoder(768, 12, 8, 16_000, gated=True), batch, 512, 16_000, autocast=False)


def vision_transformer(batch: int = 64) -> Any:
    """Patches by a convolution, twelve encoder layers, fp32, SGD with momentum."""
    import torch
    from torch import nn

    patches = nn.Conv2d(3, 384, 16, stride=16).cuda()
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, norm_first=True, activation="gelu")
    encoder, head = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda(), nn.Linear(384, 1000).cuda()
    parameters = [*patches.parameters(), *encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    images, labels = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        tokens = encoder(patches(images).flatten(2).transpose(1, 2))
        nn.functional.cross_entropy(head(tokens.mean(dim=1)), labels).backward()
        optimizer.step()

    return step


def wide_network(batch: int = 8192) -> Any:
    """Wide linear layers in fp32 with Adam: nothing but large products."""
    import torch
    from torch import nn

    widths = (1024, 4096, 4096, 2048, 1)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(batch, 1024, device="cuda"), torch.randn(batch, 1, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


def small_network(batch: int = 256) -> Any:
    """Small layers: the host decides."""
    import torch
    from torch import nn

    model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(batch, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


STEPS = {
    one.__name__: one
    for one in (encoder_decoder, decoder_bf16, gated_decoder_fp32, vision_transformer, wide_network, small_network)
}


def predict(file: Path) -> None:
    from steptime._capture.capture import capture
    from steptime._platforms.platform import Platform
    from steptime._program.workload import Workload
    from steptime._sim.modelled.prediction import predict_on

    platform, found = Platform.load(PLATFORM), {}
    for name, function in STEPS.items():
        said = predict_on(Workload((capture(function, name=name),), 1, name), platform)
        found[name] = {
            "step_time_ms": round(said.step_time_ms, 4),
            "interval_ms": [round(end, 4) for end in said.interval_ms],
            "device_busy_ms": round(said.ranks[0].device_busy_ms, 4),
            "allocated_bytes": said.memory["allocated_bytes"],
            "reserved_bytes": said.memory["reserved_bytes"],
            "bound_by": said.bound_by.partition(":")[0],
            "fitted": round(said.coverage.get("fitted", 0.0), 4),
        }
        print(name, found[name], flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(file: Path) -> None:
    import torch

    found: dict[str, Any] = {}
    for name, function in STEPS.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = function()
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        steps = max(5, round(LEAST_S / (time.perf_counter() - began)))
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began) / steps)
        found[name] = {"step_ms": times, "allocated_bytes": allocated, "reserved_bytes": reserved, "steps": steps}
        found["recipe"] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        print(name, statistics.median(times), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        del step


if __name__ == "__main__":
    what, file = sys.argv[1:]
    {"predict": predict, "measure": measure}[what](Path(file))
