"""Memory formats go through ops as they do on CUDA; where the CPU's kernels lay out alike, they are the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor as TorchTensor  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from steptime import capture  # noqa: E402
from steptime._capture import record  # noqa: E402, F401 (meta functions that are written in Python)
from steptime._capture.layouts import laid_out  # noqa: E402
from steptime._program.program import Program, Tensor  # noqa: E402

LAST = torch.channels_last
# Kernels of the CPU that keep channels last, where CUDA has none of its own or makes a contiguous copy first.
OTHERWISE_ON_CUDA = ("reflection_pad2d", "replication_pad2d", "pixel_shuffle")


def tensors(value: Any) -> Iterator[TorchTensor]:
    if isinstance(value, TorchTensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


def as_meta(value: Any) -> Any:
    if isinstance(value, TorchTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


class Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs ops on the CPU, and compares the strides of what they make with what capture would answer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: set[str] = set()
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if any(each.dim() >= 4 and not each.is_contiguous() for each in tensors(args)):
            given, named = tree_map(as_meta, (tuple(args), dict(kwargs or {})))
            answered = laid_out(name, given, func(*given, **named))
            self.ops.add(name.removeprefix("aten::"))
            for real, meta in zip(tensors(result), tensors(answered), strict=True):
                if real.dim() >= 3 and counted(real) != counted(meta):
                    self.different.append(f"{name}: {real.stride()} on the CPU, {meta.stride()} answered")
        return result


def counted(tensor: TorchTensor) -> list[int]:
    """Strides, but of dimensions of one element, which have no say."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def compared(function: Callable[..., Any], *inputs: TorchTensor) -> Compared:
    mode = Compared()
    with mode:
        results = [each for each in tensors(function(*inputs)) if each.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])
    return mode


def image(channels: int = 16) -> TorchTensor:
    result: TorchTensor = torch.randn(2, channels, 12, 12).to(memory_format=LAST).requires_grad_()
    return result


LAYERS = [
    nn.Conv2d(16, 8, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 1, groups=4), nn.ConvTranspose2d(16, 8, 2, 2),
    nn.BatchNorm2d(16), nn.InstanceNorm2d(16), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3),
    nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(3), nn.ZeroPad2d(1), nn.SiLU(), nn.Hardswish(), nn.PReLU(16), nn.Dropout2d(),
    nn.Softmax(1), nn.LogSoftmax(1), nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.Upsample(scale_factor=2, mode="bicubic"), nn.GLU(1), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.PixelShuffle(2),
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_lays_out_its_result_and_gradients_as_kernels_do(layer: nn.Module) -> None:
    mode = compared(layer, image())
    assert mode.ops
    assert [each for each in mode.different if not any(name in each for name in OTHERWISE_ON_CUDA)] == []


TWO: dict[str, Callable[[TorchTensor, TorchTensor], Any]] = {
    "cat": lambda a, b: torch.cat([a, b], 1),
    "cat of both": lambda a, b: torch.cat([a, b.contiguous()], 1),
    "add": lambda a, b: a + b,
    "add to contiguous": lambda a, b: a.contiguous() + b,
    "gate": lambda a, b: a * b.mean((2, 3), keepdim=True).sigmoid(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "halves": lambda a, b: a.chunk(2, 1)[0] * b.chunk(2, 1)[1],
    "norm of channels": lambda a, b: F.layer_norm(a.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2) + b,
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "classes": lambda a, b: F.cross_entropy(a, b.argmax(1)),
    "cast": lambda a, b: a.bfloat16() * b.bfloat16(),
    "crop": lambda a, b: a[:, :, 1:-1, 1:-1] * b[:, :, 1:-1, 1:-1],
    "patches": lambda a, b: (a * b).flatten(2).transpose(1, 2),
    "matrices": lambda a, b: a @ b.transpose(-1, -2),
}


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_images_lay_out_as_kernels_do(name: str) -> None:
    mode = compared(TWO[name], image(), image())
    assert mode.ops
    assert mode.different == []


def of_step(make: Callable[[], Any]) -> Program:
    return capture(make).programs[0]


def formats(program: Program, name: str) -> list[tuple[bool, ...]]:
    """Of every call of an op, which of its results of four dimensions have their channels last."""
    rows = zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)
    outputs = [program.signatures[signature].outputs for at, signature in rows if program.names[at] == name]
    return [tuple(is_last(each) for each in values if isinstance(each, Tensor) and len(each.shape) == 4) for values in outputs]


def is_last(tensor: Tensor) -> bool:
    assert tensor.strides is not None
    return tensor.strides[1] == 1 and tensor.shape[1] > 1 and tensor.strides[3] == tensor.shape[1]


def block(layout: Any, *, images: Any = None, dtype: Any = torch.float32, depthwise: bool = False) -> Program:
    def make() -> Callable[[], None]:
        middle = nn.Conv2d(8, 8, 3, padding=1, groups=8 if depthwise else 1)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), middle, nn.BatchNorm2d(8), nn.SiLU())
        options: Any = {"memory_format": layout}
        model = model.to("cuda", dtype).to(**options)
        x = torch.randn(2, 4, 16, 16, device="cuda", dtype=dtype).to(memory_format=images or layout)
        return lambda: model(x).sum().backward()

    return of_step(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depthwise", [False, True])
def test_channels_last_stays_so_through_a_block_and_back(dtype: Any, depthwise: bool) -> None:
    program = block(LAST, dtype=dtype, depthwise=depthwise)
    norm = "aten::cudnn_batch_norm" if dtype == torch.float32 else "aten::native_batch_norm"
    for name in ("aten::convolution", norm, "aten::relu", "aten::silu", f"{norm}_backward"):
        found = formats(program, name)
        assert found and all(all(each) for each in found), name
    of_input, of_first = formats(program, "aten::convolution_backward")
    assert of_input[0] and of_first  # the image needs no gradient


def test_one_of_input_and_weight_is_enough_for_cudnn() -> None:
    assert formats(block(LAST, images=torch.contiguous_format), "aten::convolution") == [(True,), (True,)]
    assert formats(block(torch.contiguous_format, images=LAST), "aten::convolution") == [(True,), (True,)]
    assert formats(block(torch.contiguous_format), "aten::convolution") == [(False,), (False,)]


def test_gradients_of_a_convolution_are_as_its_input_is_whatever_the_gradient_of_its_output() -> None:
    def make() -> Callable[[], None]:
        layer, x = nn.Conv2d(8, 16, 3).to("cuda"), torch.randn(2, 8, 8, 8, device="cuda", requires_grad=True)
        return lambda: layer(x).flatten(2).transpose(1, 2).contiguous().sum().backward()  # as patches of an image become tokens

    ((of_input, of_weight, *_),) = formats(of_step(make), "aten::convolution_backward")
    assert not of_input and not of_weight


def test_float64_and_convolutions_without_cudnn_have_channels_first() -> None:
    assert formats(block(LAST, dtype=torch.float64), "aten::convolution") == [(False,), (False,)]
    with torch.backends.cudnn.flags(enabled=False, benchmark=False, deterministic=False, allow_tf32=True):
        assert formats(block(LAST), "aten::convolution") == [(False,), (False,)]


def test_a_permuted_sequence_is_convolved_in_the_order_of_its_shape() -> None:
    def make() -> Callable[[], None]:
        layer = nn.Conv1d(8, 16, 3).to("cuda")
        x = torch.randn(2, 32, 8, device="cuda").transpose(1, 2)
        return lambda: layer(x).sum().backward()

    program = of_step(make)
    rows = zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)
    (made,) = (program.signatures[row].outputs[0] for at, row in rows if program.names[at] == "aten::convolution")
    assert isinstance(made, Tensor) and made.strides == (16 * 30, 30, 1)


def test_pixels_are_shuffled_by_a_copy() -> None:
    def make() -> Callable[[], None]:
        x = torch.randn(2, 16, 8, 8, device="cuda", requires_grad=True)
        return lambda: nn.PixelShuffle(2)(x).sum().backward()

    program = of_step(make)
    (row,) = (row for row, at in enumerate(program.ops.name.tolist()) if program.names[at] == "aten::pixel_shuffle")
    inside = [at for at, parent in enumerate(program.ops.parent.tolist()) if parent == row]
    assert "aten::clone" in {program.names[int(program.ops.name[at])] for at in inside}
