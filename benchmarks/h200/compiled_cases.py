"""Compiled and graphed training steps to record (`record_compiled.py`): a decoder, a convnet, a recommender, own kernels."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CPU = "--cpu" in sys.argv


def device():
    return torch.device("cpu" if CPU else "cuda:0")


def blocks_model(size, break_at=-1):
    width, heads, length, vocabulary = size.width, size.heads, size.length, size.vocabulary

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
            return x + self.down(functional.gelu(self.up(self.n2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(size.layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, tokens, labels):
            x = self.token(tokens) + self.place.weight
            for i, block in enumerate(self.blocks):
                if i == break_at:
                    torch._dynamo.graph_break()
                x = block(x)
            return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())

    return Model()


@dataclass(frozen=True)
class Size:
    """Of a decoder."""

    batch: int = 8
    layers: int = 4
    width: int = 768
    heads: int = 12
    length: int = 512
    vocabulary: int = 16384


USUAL = Size()


def gpt(size=USUAL, *, compile=None, regional=False, break_at=-1, optimiser="eager", graph=False, callables=False):
    size = Size(2, 2, 64, 4, 32, 128) if CPU else size
    batch, length, width = size.batch, size.length, size.width
    d = device()
    model = blocks_model(size, break_at).to(d, torch.bfloat16)
    tokens = torch.randint(0, size.vocabulary, (batch, length), device=d)
    labels = torch.randint(0, size.vocabulary, (batch, length), device=d)
    opt = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=optimiser == "eager", foreach=optimiser != "eager", capturable=graph and not CPU
    )
    if compile and not regional:
        model.compile(**compile)
    if regional:
        for block in model.blocks:
            block.compile(**(compile or {}))
    if callables and not CPU:
        x = torch.randn(batch, length, width, device=d, dtype=torch.bfloat16, requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(
            tuple(model.blocks), tuple((torch.randn_like(x, requires_grad=True),) for _ in model.blocks)
        )
        model.blocks = torch.nn.ModuleList(graphed)
    opt_step = torch.compile(opt.step) if optimiser == "compiled" else opt.step
    return training_step(
        lambda: model(tokens, labels), opt, opt_step, graph, clip=model.parameters() if optimiser == "clip" else None
    )


def training_step(loss_of, opt, opt_step, graph=False, clip=None):
    def plain():
        loss = loss_of()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(clip, 1.0)
        opt_step()
        opt.zero_grad(set_to_none=True)
        return loss

    if not graph or CPU:
        return plain
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            plain()
    torch.cuda.current_stream().wait_stream(side)
    opt.zero_grad(set_to_none=True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        plain()
    return captured.replay


def conv(batch=64, *, compile=None, graph=False):
    d = device()
    widths, size = ((64, 128, 256, 512), 112) if not CPU else ((8, 16), 16)

    class Residual(nn.Module):
        def __init__(self, i, o, stride):
            super().__init__()
            self.c1, self.b1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
            self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
            self.short = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

        def forward(self, x):
            y = functional.relu(self.b1(self.c1(x)))
            return functional.relu(self.b2(self.c2(y)) + self.short(x))

    layers = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = widths[0]
    for i, width in enumerate(widths):
        layers += [Residual(before, width, 1 if i == 0 else 2), Residual(width, width, 1)]
        before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))
    model = model.to(d, memory_format=torch.channels_last)
    if compile:
        model.compile(**compile)
    images = torch.randn(batch if not CPU else 2, 3, size, size, device=d).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (images.shape[0],), device=d)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss():
        with torch.autocast(d.type, torch.bfloat16):
            return functional.cross_entropy(model(images), labels)

    return training_step(loss, opt, opt.step, graph)


def dlrm(batch=8192, *, compile=None, dynamic_items=False, optimiser="eager", graph=False):
    d = device()
    tables, rows, width = (12, 100_000, 64) if not CPU else (3, 100, 8)
    batch = batch if not CPU else 16

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
            self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
            n = tables + 1
            self.top = nn.Sequential(
                nn.Linear(width + n * (n - 1) // 2, 512),
                nn.ReLU(),
                nn.Linear(512, 256),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(256, 1),
            )
            self.register_buffer("pairs", torch.tril_indices(n, n, -1))

        def forward(self, dense, ids):
            x = self.bottom(dense)
            all_ = torch.stack([x, *(t(i) for t, i in zip(self.tables, ids, strict=True))], 1)
            crossed = torch.bmm(all_, all_.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            return self.top(torch.cat([x, crossed], 1)).squeeze(1)

    model = Model().to(d)
    if compile:
        model.compile(**compile)
    dense = torch.randn(batch, 13, device=d)
    ids = [torch.randint(0, rows, (batch, 4), device=d) for _ in range(tables)]
    target = torch.rand(batch, device=d)
    opt = (
        torch.optim.SGD(model.parameters(), lr=0.01) if optimiser == "eager" else torch.optim.Adam(model.parameters(), lr=1e-3)
    )
    opt_step = torch.compile(opt.step) if optimiser == "compiled" else opt.step
    step = training_step(lambda: functional.binary_cross_entropy_with_logits(model(dense, ids), target), opt, opt_step, graph)
    if not dynamic_items:
        return step
    return lambda: float(step())


def own_kernels(rows=16384, width=2048):
    """A user's Triton kernels in eager code, forward and backward."""
    d = device()
    if CPU:
        return gpt()
    import triton

    source = """
import triton
import triton.language as tl

@triton.jit
def swish_forward(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    tl.store(y + at, v * tl.sigmoid(v), at < n)

@triton.jit
def swish_backward(x, g, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n).to(tl.float32)
    s = tl.sigmoid(v)
    tl.store(y + at, tl.load(g + at, at < n) * (s + v * s * (1 - s)), at < n)
"""
    folder = Path(tempfile.mkdtemp())
    (folder / "swish_kernels.py").write_text(source)
    sys.path.insert(0, str(folder))
    import swish_kernels as k

    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            y = torch.empty_like(x)
            k.swish_forward[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
            return y

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            g, y = g.contiguous(), torch.empty_like(x)
            k.swish_backward[(triton.cdiv(x.numel(), 1024),)](x, g, y, x.numel(), BLOCK=1024)
            return y

    a, b, c = (nn.Linear(width, width, device=d, dtype=torch.bfloat16) for _ in range(3))
    x = torch.randn(rows, width, device=d, dtype=torch.bfloat16)
    opt = torch.optim.AdamW([*a.parameters(), *b.parameters(), *c.parameters()], lr=1e-4, fused=True)
    return training_step(lambda: c(Swish.apply(b(Swish.apply(a(x))))).float().square().mean(), opt, opt.step)


DEFAULT, REDUCE = {"mode": "default"}, {"mode": "reduce-overhead"}
# name: (builder, arguments); most wanted first.
CASES = {
    "gpt_default": (gpt, {"compile": DEFAULT}),
    "gpt_reduce": (gpt, {"compile": REDUCE}),
    "gpt_small_reduce": (gpt, {"compile": REDUCE, "size": Size(2, 4, 256, 4, 128, 4096)}),
    "conv_default": (conv, {"compile": DEFAULT}),
    "dlrm_default": (dlrm, {"compile": DEFAULT, "optimiser": "compiled"}),
    "gpt_eager": (gpt, {}),
    "gpt_break": (gpt, {"compile": DEFAULT, "break_at": 2, "optimiser": "clip", "size": Size(4)}),
    "gpt_regional": (gpt, {"compile": DEFAULT, "regional": True, "optimiser": "compiled"}),
    "conv_whole_graph": (conv, {"graph": True}),
    "gpt_compiled_whole_graph": (gpt, {"compile": DEFAULT, "graph": True}),
    "gpt_graphed_callables": (gpt, {"callables": True}),
    "dlrm_reduce_item": (dlrm, {"compile": REDUCE, "dynamic_items": True}),
    "conv_reduce": (conv, {"compile": REDUCE, "batch": 16}),
    "own_triton": (own_kernels, {}),
    "gpt_dynamic": (gpt, {"compile": {"dynamic": True}, "size": Size(4)}),
}
