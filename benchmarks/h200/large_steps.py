"""Large training steps that keep a card busy for half a minute: predicted first, then measured with power and clock.

`python benchmarks/h200/large_steps.py predict FILE` captures every one and predicts it for an H200, without a GPU;
`... measure FILE [--only a,b]` runs them on a GPU one after the other: a step takes the median of the second half of its time,
and power, clock and temperature are means over that half. None of them has a part in any fit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

PLATFORM = "1xh200"
SECONDS = 25.0
# These run for longer, to bound the drift.
LONGER = {"decoder_4096": 90.0, "vision_transformer": 90.0}
# These only tell what is drawn below the cap.
SHORTER = dict.fromkeys(("decoder_small_batch", "optimizer_bound", "residual_small", "encoder_small_fp32"), 10.0)

Step = Callable[[], None]


def _decoder(width: int, layers: int, vocabulary: int, heads: int, *, gated: bool = False) -> Any:
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
            inner = 3 * width if gated else 4 * width
            self.up, self.down = nn.Linear(width, inner * (2 if gated else 1)), nn.Linear(inner, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            mixed = self.mixed(self.first(x)).view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=True)
            x = x + self.joined(attended.transpose(1, 2).reshape(batch, tokens, width))
            inner = self.up(self.second(x))
            if gated:
                gate, inner = inner.chunk(2, -1)
                inner = functional.silu(gate) * inner
            else:
                inner = functional.gelu(inner)
            return x + self.down(inner)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return Decoder()


def _language(model: Any, batch: int, tokens: int, vocabulary: int, *, dtype: str, autocast: bool) -> Step:
    import torch
    from torch.nn import functional

    model = model.to("cuda", getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    words = torch.randint(0, vocabulary, (batch, tokens), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(words)
            loss = functional.cross_entropy(logits.flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()

    return _checked(step, model)


def _checked(step: Step, model: Any) -> Step:
    """With the parameters of its model, whose values are looked at in the end."""
    step.parameters = model.parameters  # type: ignore[attr-defined]
    return step


def _supervised(model: Any, images: Any, labels: Any, *, autocast: str) -> Step:
    import torch
    from torch.nn import functional

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return _checked(step, model)


def decoder_4096() -> Step:
    """Four layers of width 4,096, 16 k tokens, all in bf16."""
    return _language(_decoder(4096, 4, 32_000, 32), 8, 2048, 32_000, dtype="bfloat16", autocast=False)


def decoder_2048_autocast() -> Step:
    """24 layers of width 2,048, 16 k tokens, autocast to bf16."""
    return _language(_decoder(2048, 24, 32_000, 16), 8, 2048, 32_000, dtype="float32", autocast=True)


def gated_decoder_5120() -> Step:
    """Three gated layers of width 5,120, 16 k tokens, all in bf16."""
    return _language(_decoder(5120, 3, 50_304, 40, gated=True), 4, 4096, 50_304, dtype="bfloat16", autocast=False)


def decoder_fp32() -> Step:
    """Eight layers of width 1,536, 8 k tokens, fp32 without TF32."""
    return _language(_decoder(1536, 8, 16_000, 12), 8, 1024, 16_000, dtype="float32", autocast=False)


def decoder_small_batch() -> Step:
    """Twelve layers of width 1,024, 1 k tokens, autocast: the host takes part."""
    return _language(_decoder(1024, 12, 32_000, 16), 1, 1024, 32_000, dtype="float32", autocast=True)


def encoder_bf16() -> Step:
    """24 encoder layers of width 1,024 as they come, autocast to bf16, 32 k tokens."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(512 * 1024, 16)).cuda()
    inputs, labels = torch.randn(64, 512, 1024, device="cuda"), torch.randint(0, 16, (64,), device="cuda")
    return _supervised(model, inputs, labels, autocast="bfloat16")


def vision_transformer() -> Step:
    """Width 1,280, 16 layers, 128 images, autocast to bf16."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(1280, 16, 5120, 0.0, "gelu", batch_first=True, norm_first=True)

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.head = nn.Conv2d(3, 1280, 14, stride=14), nn.Linear(1280, 1000)
            self.encoder = nn.TransformerEncoder(layer, 16, enable_nested_tensor=False)

        def forward(self, images: Any) -> Any:
            return self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))

    images, labels = torch.randn(128, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (128,), device="cuda")
    return _supervised(Vision().cuda(), images, labels, autocast="bfloat16")


def products() -> Step:
    """Eight linear layers of 8,192 with ReLU, 16 k rows, all in bf16."""
    import torch
    from torch import nn

    layers = [layer for _ in range(8) for layer in (nn.Linear(8192, 8192), nn.ReLU())]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    rows = torch.randn(16384, 8192, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(rows).square().mean().backward()
        optimizer.step()

    return _checked(step, model)


def mixer_bf16() -> Step:
    """An MLP mixer of 16 layers, width 1,536, 196 patches, 192 images, autocast."""
    import torch
    from torch import nn

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(1536) for _ in range(32))
            self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(196, 768), nn.GELU(), nn.Linear(768, 196)) for _ in range(16))
            self.widths = nn.ModuleList(
                nn.Sequential(nn.Linear(1536, 6144), nn.GELU(), nn.Linear(6144, 1536)) for _ in range(16)
            )
            self.head = nn.Linear(1536, 1000)

        def forward(self, x: Any) -> Any:
            for index in range(16):
                x = x + self.tokens[index](self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
                x = x + self.widths[index](self.norms[2 * index + 1](x))
            return self.head(x.mean(1))

    patches, labels = torch.randn(192, 196, 1536, device="cuda"), torch.randint(0, 1000, (192,), device="cuda")
    return _supervised(Mixer().cuda(), patches, labels, autocast="bfloat16")


def _residual(width: int, *, blocks: int) -> Any:
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, first: int, second: int, stride: int) -> None:
            super().__init__()
            self.one, self.two = (
                nn.Conv2d(first, second, 3, stride, 1, bias=False),
                nn.Conv2d(second, second, 3, 1, 1, bias=False),
            )
            self.norms = nn.ModuleList(nn.BatchNorm2d(second) for _ in range(2))
            self.side = nn.Conv2d(first, second, 1, stride, bias=False) if first != second else nn.Identity()

        def forward(self, x: Any) -> Any:
            inner = functional.relu(self.norms[0](self.one(x)))
            return functional.relu(self.norms[1](self.two(inner)) + self.side(x))

    stages, first = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], width
    for stage in range(4):
        for index in range(blocks):
            stages.append(Block(first, width << stage, 2 if stage and not index else 1))
            first = width << stage
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, 1000))


def residual_tf32() -> Step:
    """A wide residual network in fp32, its convolutions in TF32 as PyTorch defaults them, 128 images."""
    import torch

    images, labels = torch.randn(128, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (128,), device="cuda")
    return _supervised(_residual(128, blocks=2).cuda(), images, labels, autocast="")


def residual_bf16() -> Step:
    """The same twice as deep, autocast to bf16, 256 images."""
    import torch

    images, labels = torch.randn(256, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (256,), device="cuda")
    return _supervised(_residual(128, blocks=4).cuda(), images, labels, autocast="bfloat16")


def wide_mlp_fp32() -> Step:
    """Six linear layers of 4,096, 8 k rows, fp32 without TF32, AdamW."""
    import torch
    from torch import nn

    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4096, 4096), nn.SiLU()))).cuda()
    optimizer, rows = torch.optim.AdamW(model.parameters(), fused=True), torch.randn(8192, 4096, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(rows).square().mean().backward()
        optimizer.step()

    return _checked(step, model)


def attention_long() -> Step:
    """Two decoder layers of width 2,048 over 32 k tokens of one text, all in bf16: attention."""
    return _language(_decoder(2048, 2, 8_000, 16), 1, 32_768, 8_000, dtype="bfloat16", autocast=False)


def optimizer_bound() -> Step:
    """A decoder of 16 layers of width 2,048 and 512 tokens, fp32: AdamW moves more than the layers do."""
    return _language(_decoder(2048, 16, 32_000, 16), 1, 512, 32_000, dtype="float32", autocast=True)


def residual_small() -> Step:
    """A residual network of half the width, 64 images, convolutions in TF32."""
    import torch

    images, labels = torch.randn(64, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (64,), device="cuda")
    return _supervised(_residual(64, blocks=2).cuda(), images, labels, autocast="")


def encoder_small_fp32() -> Step:
    """Six encoder layers of width 512 as they come, 4 k tokens, fp32 without TF32."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.1, "gelu", batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(65_536, 16)
    ).cuda()
    inputs, labels = torch.randn(32, 128, 512, device="cuda"), torch.randint(0, 16, (32,), device="cuda")
    return _supervised(model, inputs, labels, autocast="")


def grouped_query_decoder() -> Step:
    """Six layers of width 3,072 with RMSNorm, rotary positions, 24 heads on 8 keys and gated MLPs, 16 k tokens, in bf16."""
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads, keys, size, tokens = 3072, 24, 8, 128, 2048
    angles = torch.outer(torch.arange(tokens).float(), 10_000.0 ** (-torch.arange(0, size, 2).float() / size))
    cosine, sine = (table.to("cuda", torch.bfloat16) for table in (angles.cos(), angles.sin()))

    def turned(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
            self.query, self.joined = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.key, self.value = (nn.Linear(width, keys * size, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(width, 8192, bias=False) for _ in range(2))
            self.down = nn.Linear(8192, width, bias=False)

        def forward(self, x: Any) -> Any:
            inner = self.norms[0](x)
            query, key, value = (
                layer(inner).view(*x.shape[:2], -1, size).transpose(1, 2) for layer in (self.query, self.key, self.value)
            )
            key, value = (each.repeat_interleave(heads // keys, 1) for each in (turned(key), value))
            attended = functional.scaled_dot_product_attention(turned(query), key, value, is_causal=True)
            x = x + self.joined(attended.transpose(1, 2).reshape(x.shape))
            inner = self.norms[1](x)
            return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    model = nn.Sequential(
        nn.Embedding(32_000, width), *(Layer() for _ in range(6)), nn.RMSNorm(width), nn.Linear(width, 32_000, bias=False)
    )
    return _language(model, 8, tokens, 32_000, dtype="bfloat16", autocast=False)


def masked_language_encoder() -> Step:
    """24 encoder layers of width 1,024, 128 texts of 256 tokens, a head over 30,522 words, autocast to bf16, AdamW."""
    from torch import nn

    layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.1, "gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(30_522, 1024), nn.LayerNorm(1024), encoder, nn.Linear(1024, 30_522))
    return _language(model, 128, 256, 30_522, dtype="float32", autocast=True)


def experts_bf16() -> Step:
    """Six layers of eight experts of 2,048 by 8,192, each with 4,096 rows, as batched products in bf16, AdamW."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(8, 2048, 8192) * 0.02)
            self.down = nn.Parameter(torch.randn(8, 8192, 2048) * 0.01)
            self.norm = nn.LayerNorm(2048)

        def forward(self, x: Any) -> Any:
            return x + torch.bmm(functional.gelu(torch.bmm(self.norm(x), self.up)), self.down)

    model = nn.Sequential(*(Experts() for _ in range(6))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.randn(8, 4096, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(rows).square().mean().backward()
        optimizer.step()

    return _checked(step, model)


def bottleneck_fp16() -> Step:
    """A residual network of wide bottlenecks, 14 of them, 192 images of 256 pixels, autocast to fp16."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Bottleneck(nn.Module):
        def __init__(self, first: int, inner: int, stride: int) -> None:
            super().__init__()
            sizes = ((first, inner, 1, 1), (inner, inner, 3, stride), (inner, 4 * inner, 1, 1))
            self.layers = nn.Sequential(
                *(
                    nn.Sequential(nn.Conv2d(a, b, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(b))
                    for a, b, kernel, step in sizes
                )
            )
            self.side = nn.Conv2d(first, 4 * inner, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            inner = functional.relu(self.layers[1](functional.relu(self.layers[0](x))))
            return functional.relu(self.layers[2](inner) + self.side(x))

    stages: list[Any] = [nn.Conv2d(3, 128, 4, 4)]
    first = 128
    for inner, blocks in ((128, 3), (256, 4), (512, 5), (768, 2)):
        for index in range(blocks):
            stages.append(Bottleneck(first, inner, 2 if inner > 128 and not index else 1))
            first = 4 * inner
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, 1000)).cuda()
    images, labels = torch.randn(192, 3, 256, 256, device="cuda"), torch.randint(0, 1000, (192,), device="cuda")
    return _supervised(model, images, labels, autocast="float16")


CASES: dict[str, Callable[[], Step]] = {
    build.__name__: build
    for build in (
        decoder_4096, decoder_2048_autocast, gated_decoder_5120, encoder_bf16, vision_transformer, products, mixer_bf16,
        residual_bf16, attention_long, residual_tf32, decoder_fp32, wide_mlp_fp32, decoder_small_batch, optimizer_bound,
        residual_small, encoder_small_fp32, grouped_query_decoder, masked_language_encoder, experts_bf16, bottleneck_fp16,
    )
}  # fmt: skip


def predict(file: Path) -> None:
    """Captures every case and writes what is predicted."""
    import steptime

    results = {}
    for name, build in CASES.items():
        answer = steptime.predict(steptime.capture(build), PLATFORM)
        power = answer.power
        assert power is not None
        results[name] = {
            "step_ms": round(answer.step_time_ms, 4),
            "interval_ms": [round(end, 4) for end in answer.interval_ms],
            "power_w": round(power.power_w, 1),
            "clock_mhz": round(power.clock_hz / 1e6, 1),
            "energy_j": round(power.energy_j, 3),
            "capped": power.capped,
            "bound_by": answer.bound_by,
        }
        print(f"{name:24s} {answer.step_time_ms:9.2f} ms  {power.power_w:5.0f} W  {power.clock_hz / 1e6:5.0f} MHz", flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(file: Path, only: list[str], seconds: float | None) -> None:
    """Runs the cases for their seconds and writes step, power, clock and temperature of the second half."""
    import torch

    from steptime._calibrate.device.meter import Meter

    meter = Meter()
    results: dict[str, Any] = {"uuid": meter.uuid, "limit_w": meter.limit_w, "torch": torch.__version__, "cases": {}}
    for name, build in CASES.items():
        if only and name not in only:
            continue
        try:
            results["cases"][name] = _measured(build, seconds or LONGER.get(name) or SHORTER.get(name) or SECONDS, meter)
        except RuntimeError as error:
            results["cases"][name] = {"failed": str(error)[:300]}
        gc.collect()
        torch.cuda.empty_cache()
        print(name, {key: value for key, value in results["cases"][name].items() if key != "times_ms"}, flush=True)
        file.write_text(json.dumps(results) + "\n", encoding="utf-8")


def _measured(build: Callable[[], Step], seconds: float, meter: Any) -> dict[str, Any]:
    import torch

    step = build()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    marks: list[tuple[float, Any]] = []
    with meter.watching() as watch:
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            step()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((time.perf_counter(), event))
            if len(marks) > 8:
                marks[-8][1].synchronize()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        half = begun + (ended - begun) / 2
        drawn, early = watch.between(half, ended), watch.between(begun + 1.0, begun + 4.0)
    events = [event for _, event in marks]
    times = [first.elapsed_time(second) for first, second in pairwise(events)]
    later = times[len(times) // 2 :]
    # Of short steps, several together: the host queues them in bursts.
    block = max(1, round(50.0 / statistics.median(later)))
    blocks = [statistics.fmean(later[at : at + block]) for at in range(0, len(later) - block + 1, block)]
    return {
        "step_ms": statistics.median(blocks),
        "first_ms": statistics.median(times[:10]),
        "power_w": drawn.power_w,
        "reading_w": drawn.reading_w,
        "clock_mhz": None if drawn.clock_hz is None else drawn.clock_hz / 1e6,
        "temperature_c": drawn.temperature_c,
        "capped": drawn.capped,
        "early_clock_mhz": None if early.clock_hz is None else early.clock_hz / 1e6,
        "early_temperature_c": early.temperature_c,
        "seconds": ended - begun,
        # Operands that are not finite draw less power than those of training.
        "finite": all(bool(torch.isfinite(each).all()) for each in step.parameters()),  # type: ignore[attr-defined]
        "times_ms": [round(value, 4) for value in blocks[:: max(1, len(blocks) // 60)]],
    }


def main() -> None:
    """`predict FILE` or `measure FILE`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="names of cases with commas between")
    parser.add_argument("--seconds", type=float, help="for every case, instead of its own")
    given = parser.parse_args()
    if given.what == "predict":
        predict(given.file)
    else:
        measure(given.file, [name for name in given.only.split(",") if name], given.seconds)


if __name__ == "__main__":
    main()
