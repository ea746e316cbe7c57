"""Equal calls are answered once: a step is as where each is asked for anew, and calls that differ are not taken for equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from steptime import capture  # noqa: E402
from steptime._capture import answers  # noqa: E402
from steptime._capture.tensors import META, on_device  # noqa: E402
from steptime._program.program import Program, Tensor, tensors_in  # noqa: E402

aten: Any = torch.ops.aten


class Layers(nn.Module):
    """Pairs of layers that differ in one thing each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.biased, self.frozen = nn.Linear(16, 16, bias=False), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(16, 16, bias=False)
        self.shared.weight = self.linear.weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(16, momentum=momentum) for momentum in (0.1, 0.1))
        self.dropouts = nn.ModuleList(nn.Dropout(p) for p in (0.1, 0.2, 0.0, 1.0))
        self.convolutions = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

    def forward(self, x: Any, image: Any) -> Any:
        """Each layer on inputs that differ in their strides, their dtype, or what holds while it runs."""
        self.norms[1].eval()
        x = self.linear(x) + self.linear(x.t().contiguous().t()) + self.shared(x) + self.biased(x) + self.frozen(x)
        for layer in (*self.norms, *self.dropouts):
            x = layer(x)
        with torch.autocast("cuda", torch.bfloat16):
            x = x + self.linear(x)
        y = checkpoint(self.biased, x, use_reentrant=False)
        y.register_hook(lambda grad: grad * 2)
        x = x + y
        image = self.convolutions[0](image) + self.convolutions[1](image.contiguous(memory_format=torch.channels_last))
        with torch.backends.cudnn.flags(enabled=False):
            image = image + self.convolutions[2](image.contiguous(memory_format=torch.channels_last))
        x = torch.relu_(x + 0) + (x + 1).mul_(2).add_(x[:1])
        whole = torch.arange(4, device="cuda")
        parts = [whole / 2, whole // 2, whole[1:] / 2, whole * 2, whole * 2.0]
        return x.sum() + image.sum() + sum(part.sum() for part in parts)


def layers() -> Callable[[], None]:
    model = Layers().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, image = torch.randn(16, 16, device="cuda"), torch.randn(2, 16, 8, 8, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x, image).backward()
        optimizer.step()

    return step


def described(program: Program) -> Iterator[tuple[Any, ...]]:
    """Every op with its arguments; storages of the device numbered as they come: of the CPU, malloc decides."""
    numbers: dict[int | None, int] = {}

    def plain(tensor: Tensor) -> tuple[Any, ...]:
        storage = numbers.setdefault(tensor.storage, len(numbers)) if tensor.device == "cuda:0" else None
        return tensor.shape, tensor.strides, tensor.dtype, tensor.device, storage

    rows = zip(program.ops.name.tolist(), program.ops.parent.tolist(), program.ops.signature.tolist(), strict=True)
    for name, parent, signature in rows:
        sides = program.signatures[signature] if signature >= 0 else None
        values = (sides.inputs, sides.outputs) if sides else ((), ())
        yield program.names[name], parent, [list(map(plain, tensors_in(side))) for side in values], sides and sides.switches


def test_a_step_is_the_same_as_where_every_call_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = list(described(capture(layers).programs[0]))
    monkeypatch.setattr("steptime._capture.capture.remembered", nullcontext)
    assert remembered == list(described(capture(layers).programs[0]))


def of_device(*shape: int, dtype: Any = torch.float32, strides: tuple[int, ...] | None = None) -> Any:
    made = torch.empty(shape, dtype=dtype, device=META) if strides is None else torch.empty_strided(shape, strides, device=META)
    return on_device(made)


X = (4, 6)
DIFFERENT: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "shape": [(aten.neg.default, (of_device(*X),), {}), (aten.neg.default, (of_device(6, 4),), {})],
    "strides": [(aten.neg.default, (of_device(*X),), {}), (aten.neg.default, (of_device(*X, strides=(1, 4)),), {})],
    "dtype": [(aten.neg.default, (of_device(*X),), {}), (aten.neg.default, (of_device(*X, dtype=torch.int64),), {})],
    "kind of a number": [(aten.mul.Tensor, (of_device(2, dtype=torch.bool), n), {}) for n in (True, 1, 1.0)],
    "flag": [(aten.sum.dim_IntList, (of_device(*X), [0], keep), {}) for keep in (False, True)],
    "option": [(aten._to_copy.default, (of_device(*X),), {"dtype": dtype}) for dtype in (torch.float16, torch.float64)],
    "op": [(op, (of_device(*X), of_device(*X)), {}) for op in (aten.add.Tensor, aten.eq.Tensor)],
    "list": [(aten.cat.default, ([of_device(*X)] * count,), {}) for count in (1, 2)],
    "part of a storage": [(aten.slice.Tensor, (of_device(*X), 0, start), {}) for start in (0, 1)],
    "size": [(aten.resize_.default, (of_device(*X), [size]), {}) for size in (8, 9)],
    "what is written": [(aten.fill_.Scalar, (of_device(*shape), 0), {}) for shape in (X, (3,))],
}


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_calls_that_differ_are_not_taken_for_equal(what: str) -> None:
    with torch._C.DisableTorchFunction():
        plain = [_made(*call) for call in DIFFERENT[what]]
        assert all(one != other for one, other in pairwise(plain))
        with answers.remembered():
            for _ in range(2):
                assert [_made(*call) for call in DIFFERENT[what]] == plain


def _made(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    result = answers.answer(func, args, kwargs)
    return func, result.shape, result.stride(), result.dtype, result.storage_offset()


def test_an_answer_depends_on_the_default_dtype() -> None:
    whole = of_device(2, dtype=torch.int64)
    with torch._C.DisableTorchFunction(), answers.remembered():
        assert answers.answer(aten.div.Tensor, (whole, whole), {}).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert answers.answer(aten.div.Tensor, (whole, whole), {}).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(2, 2, 3), lambda x: x.as_strided((2, 3), (1, 4), 1), lambda x: x.detach(), aten.alias,
        lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x.split(2)[1], lambda x: x.unbind(1)[0], lambda x: x.expand(2, 4, 3),
    ],
)  # fmt: skip
def test_views_lie_where_they_do_elsewhere_and_stay_on_the_device(view: Callable[[Any], Any]) -> None:
    truth = view(torch.empty(4, 3))

    def step() -> None:
        whole = torch.empty(4, 3, device="cuda", requires_grad=True)
        found = view(whole)
        assert (found.shape, found.stride(), found.storage_offset()) == (truth.shape, truth.stride(), truth.storage_offset())
        assert found.device.type == "cuda" and found.untyped_storage()._cdata == whole.untyped_storage()._cdata
        if found.requires_grad:
            (found * 2).sum().backward()

    capture(step)


def test_what_is_written_to_is_given_back_and_nothing_new_shares_memory() -> None:
    with torch._C.DisableTorchFunction(), answers.remembered():
        for _ in range(2):
            x, y = of_device(*X), of_device(*X)
            assert answers.answer(aten.add_.Tensor, (x, y), {}) is x
            assert answers.answer(aten.add.out, (x, y), {"out": y}) is y
            one, other = (answers.answer(aten.add.Tensor, (x, y), {}) for _ in range(2))
            assert len({each.untyped_storage()._cdata for each in (x, y, one, other)}) == 4
            assert answers.answer(aten.view.default, (x, [24]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata


def clipped() -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 16, device="cuda", dtype=torch.bfloat16)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def test_numbers_promote_tensors_of_the_device_as_they_do_those_of_the_host() -> None:
    seen: list[Any] = []

    def results(device: str) -> list[Any]:
        found = []
        dtypes, shapes = (torch.bfloat16, torch.float16, torch.int32, torch.float64), ((), (3,))
        for dtype, shape, number in product(dtypes, shapes, (2, 2.0, True)):
            x = torch.ones(shape, dtype=dtype, device=device)
            made = (x + number, number * x, x / number, x**number, torch.where(x > 0, x, number), torch.add(x, number, alpha=2))
            found += [each.dtype for each in made]
        return found

    def make() -> Callable[[], None]:
        step = clipped()

        def both() -> None:
            seen.append(results("cuda"))
            step()

        return both

    capture(make)
    assert seen
    assert all(each == results("cpu") for each in seen)


def test_gradients_of_bf16_are_scaled_by_a_factor_of_bf16_so_that_one_kernel_clips_them_all() -> None:
    (inputs, _), *others = [sides for name, _, sides, _ in described(capture(clipped).programs[0]) if "foreach_mul" in name]
    assert not others
    assert {dtype for _, _, dtype, _, _ in inputs} == {"bfloat16"}
