"""Which loops `measure power` runs: each shows one thing that draws power, or a mix of them.

- products at several duty cycles: below the cap the clock is the highest there is, so that energies follow from a linear fit;
- products of other depths and precisions, memory and cache, reads and writes, multiply-adds and polling on some of the SMs;
- mixes without pauses, where the power is the cap and the clock shows how energy falls with it;
- one block again and again (`anchor`), for drift; rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._units import MIB

ANCHOR = "anchor"
_GIB = 1024 * MIB
_BF16, _FP16, _FP32, _FP8 = "bfloat16", "float16", "float32", "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Piece:
    """A call, so many times in a row; or `probe` on a number of SMs for so long."""

    call: Call | None = None
    count: int = 1
    tf32: bool = False
    resident: bool = False  # whether every run has the same operands, which then stay in L2
    probe: str = ""  # multiply | poll
    sms: float = 0.0  # of all SMs
    ns: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """What a loop repeats, for `duty` of the time; the rest of it the device pauses."""

    name: str
    kind: str  # duty | steady | mix | anchor | rest
    pieces: tuple[Piece, ...] = ()
    duty: float = 1.0
    seconds: float = 8.0


def product(
    m: int,
    n: int,
    k: int,
    dtype: str = _BF16,
    values: str = "normal",
    count: int = 1,
    *,
    tf32: bool = False,
    fixed: bool = False,
) -> Piece:
    """(m x k) times the transpose of (n x k), as a linear layer has it."""
    left, right = TensorArg((m, k), dtype, values=values), TensorArg((n, k), dtype).transposed()
    if dtype == _FP8:
        scale = TensorArg((), _FP32, values="positive")
        kwargs: tuple[tuple[str, Argument], ...] = (("out_dtype", DtypeArg(_BF16)),)
        return Piece(Call("aten::_scaled_mm.default", (left, right, scale, scale), kwargs), count)
    return Piece(Call("aten::mm.default", (left, right)), count, tf32=tf32, resident=fixed)


def copy(nbytes: int, count: int, *, resident: bool = False) -> Piece:
    """From one place to another."""
    tensor = TensorArg((nbytes // 4,))
    return Piece(Call("aten::copy_.default", (tensor, tensor)), count, resident=resident)


def total(nbytes: int, count: int, *, resident: bool = False) -> Piece:
    """A sum over so much."""
    return Piece(Call("aten::sum.default", (TensorArg((nbytes // 4,)),)), count, resident=resident)


def blocks() -> list[Block]:
    """All of them, without anchors."""
    return [
        *_duties(),
        *_depths(),
        *_precisions(),
        *_memory(),
        *_kernels(),
        *_training(),
        *_sms(),
        *_mixes(),
        Block("rest", "rest", seconds=6.0),
    ]


def anchor() -> Block:
    """What is repeated every minute: a product below the cap."""
    return replace(_duty("anchor", product(8192, 8192, 8192, count=3), 0.4), kind=ANCHOR, seconds=4.0)


def _duty(name: str, piece: Piece, duty: float) -> Block:
    return Block(f"{name} {duty:g}", "duty" if duty < 1 else "steady", (piece,), duty)


def _duties() -> list[Block]:
    square = (8192, 8192, 8192)
    results = [_duty("bf16", product(*square, count=3), duty) for duty in (0.15, 0.3, 0.5, 0.7, 1.0)]
    for values in ("half_zeros", "activations", "gradients"):
        results += [_duty(f"bf16 {values}", product(*square, values=values, count=3), duty) for duty in (0.35, 1.0)]
    return [*results, _duty("bf16 zeros", product(*square, values="zeros", count=3), 0.35)]


def _depths() -> list[Block]:
    shapes = ((8192, 8192, 128, 12), (8192, 8192, 512, 12), (8192, 8192, 2048, 8), (4096, 4096, 16384, 4))
    results = [_duty(f"bf16 {m}x{n}x{k}", product(m, n, k, count=count), 0.4) for m, n, k, count in shapes]
    small = product(2048, 2048, 2048, count=64, fixed=True)
    return [*results, _duty("bf16 small", small, 0.5), _duty("bf16 small", small, 1.0)]


def _precisions() -> list[Block]:
    return [
        _duty("fp32", product(4096, 4096, 4096, _FP32, count=2), 0.5),
        _duty("fp32", product(4096, 4096, 4096, _FP32, count=2), 1.0),
        _duty("tf32", product(8192, 8192, 8192, _FP32, tf32=True), 0.4),
        _duty("tf32", product(8192, 8192, 8192, _FP32, tf32=True), 1.0),
        _duty("fp16", product(8192, 8192, 8192, _FP16, count=3), 0.4),
        _duty("fp8", product(8192, 8192, 8192, _FP8, count=4), 0.35),
        _duty("fp8", product(8192, 8192, 8192, _FP8, count=4), 1.0),
    ]


def _memory() -> list[Block]:
    return [
        _duty("copy", copy(_GIB, 6), 0.5),
        _duty("copy", copy(_GIB, 6), 1.0),
        _duty("copy in L2", copy(8 * MIB, 200, resident=True), 0.5),
        _duty("copy in L2", copy(8 * MIB, 200, resident=True), 1.0),
        _duty("read", total(_GIB, 6), 1.0),
        _duty("read in L2", total(16 * MIB, 200, resident=True), 1.0),
        _duty("write", Piece(Call("aten::fill_.Scalar", (TensorArg((_GIB // 4,)), 1.0)), 6), 1.0),
    ]


def _kernels() -> list[Block]:
    rows = TensorArg((16384, 8192), _BF16)
    weights = TensorArg((8192,), _BF16)
    heads = TensorArg((16, 32, 2048, 128), _BF16)
    attention = Call("aten::_scaled_dot_product_flash_attention.default", (heads, heads, heads, 0.0, True, False))
    image = TensorArg((128, 256, 56, 56), _BF16).channels_last()
    kernel = TensorArg((256, 256, 3, 3), _BF16).channels_last()
    convolved = Call("aten::convolution.default", (image, kernel, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1))
    return [
        _duty("gelu", Piece(Call("aten::gelu.default", (rows,)), 10), 1.0),
        _duty("layer norm", Piece(Call("aten::native_layer_norm.default", (rows, (8192,), weights, weights, 1e-5)), 10), 1.0),
        _duty("softmax", Piece(Call("aten::_softmax.default", (rows, -1, False)), 10), 1.0),
        _duty("attention", Piece(attention, 4), 0.5),
        _duty("attention", Piece(attention, 4), 1.0),
        _duty("convolution", Piece(convolved, 4), 0.4),
        _duty("convolution", Piece(convolved, 4), 1.0),
    ]


def _training() -> list[Block]:
    """What training steps have beside products, layer norms and flash attention."""
    rows, wide = TensorArg((16384, 8192), _BF16), TensorArg((16384, 8192), _FP32)
    weights, moments = TensorArg((8192,), _BF16), TensorArg((16384, 1), _FP32, values="positive")
    heads, sums = TensorArg((16, 32, 2048, 128), _BF16), TensorArg((16, 32, 2048, 1), _FP32)
    seed = TensorArg((), "int64", high=1 << 20)
    image, channels = TensorArg((128, 256, 56, 56), _BF16), TensorArg((256,), _FP32, values="positive")
    single, kernel = TensorArg((64, 256, 56, 56), _FP32), TensorArg((256, 256, 3, 3), _FP32)
    half, small = TensorArg((128, 256, 56, 56), _FP16), TensorArg((256, 256, 3, 3), _FP16)
    none, once = TensorArg((0,), "uint8", high=2), ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    attended = Call("aten::_scaled_dot_product_cudnn_attention.default", (heads, heads, heads, None, True, 0.0, True, False))
    back = (heads, heads, heads, heads, heads, sums, seed, seed, None, None, None, 2048, 2048, 0.0, True)
    normed = (rows, rows, (8192,), moments, moments, weights, weights, (True, True, True))
    settings = (("lr", 1e-3), ("beta1", 0.9), ("beta2", 0.999), ("weight_decay", 0.01), ("eps", 1e-8))
    moved = (*((wide,) for _ in range(4)), (), (TensorArg((), _FP32, values="positive"),))
    calls = {
        "add": (Call("aten::add.Tensor", (wide, wide)), 10),
        "dropout": (Call("aten::native_dropout.default", (rows, 0.1, True)), 10),
        "layer norm backward": (Call("aten::native_layer_norm_backward.default", normed), 6),
        "batch norm": (Call("aten::cudnn_batch_norm.default", (image, *[channels] * 4, True, 0.1, 1e-5)), 6),
        "batch norm backward": (
            Call("aten::cudnn_batch_norm_backward.default", (image, image, *[channels] * 5, 1e-5, none)),
            6,
        ),
        "adamw": (
            Call("aten::_fused_adamw_.default", moved, (*settings, ("amsgrad", False), ("maximize", False))),
            4,
        ),
        "cudnn attention": (attended, 4),
        "cudnn attention backward": (Call("aten::_scaled_dot_product_cudnn_attention_backward.default", back), 2),
        "convolution tf32": (Call("aten::convolution.default", (single, kernel, None, *once)), 4),
        "convolution fp16 backward": (
            Call("aten::convolution_backward.default", (half, half, small, None, *once, (True, True, False))),
            2,
        ),
    }
    pieces = {name: Piece(call, count, tf32="tf32" in name) for name, (call, count) in calls.items()}
    return [_duty(name, piece, 1.0) for name, piece in pieces.items()] + [
        _duty("fp32 tall", product(32768, 512, 512, _FP32, count=6), 1.0)
    ]


def _sms() -> list[Block]:
    multiply = [Piece(probe="multiply", sms=sms, ns=2_000_000) for sms in (0.25, 0.5, 1.0)]
    poll = [Piece(probe="poll", sms=sms, ns=2_000_000) for sms in (0.125, 1.0)]
    return [Block(f"{piece.probe} {piece.sms:g}", "steady", (piece,)) for piece in (*multiply, *poll)]


def _mixes() -> list[Block]:
    """At the cap; none of them has a part in the fit of energies."""
    square = product(8192, 8192, 8192, count=4)
    rows = TensorArg((16384, 8192), _BF16)
    gelu = Piece(Call("aten::gelu.default", (rows,)), 6)
    layer = product(16384, 4096, 4096, values="activations", count=6)
    return [
        Block("bf16 and copies", "mix", (square, copy(_GIB, 2))),
        Block("bf16 and more copies", "mix", (replace(square, count=2), copy(_GIB, 6))),
        Block("bf16 and gelu", "mix", (layer, gelu)),
        Block("tf32 and copies", "mix", (product(8192, 8192, 8192, _FP32, tf32=True), copy(_GIB, 2))),
        Block("fp8 and bf16", "mix", (product(8192, 8192, 8192, _FP8, count=4), replace(square, count=2))),
        Block("fp32 and bf16", "mix", (product(4096, 4096, 4096, _FP32, count=2), replace(square, count=2))),
    ]
