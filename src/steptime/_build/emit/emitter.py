"""`Emitter`: a `Writer` of the ops that others are made of, without a node of autograd: views, reservations, copies, casts.

Ops that other ops call say all options (dtype, layout, device); the same ops called from Python leave most of them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.writer import Writer, contiguous_strides, strides_of
from steptime._program.program import Tensor, Value

# c10::ScalarType by name, as execution traces write it.
DTYPE_NUMBERS = {
    "uint8": 0, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bool": 11, "bfloat16": 15, "float8": 24,
    "float4x2": 45,
}  # fmt: skip
STRIDED, SPARSE = 0, 1  # c10::Layout
CONTIGUOUS = 0  # c10::MemoryFormat


def view_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same memory in another shape, or None where that takes a copy (ATen/TensorUtils.cpp, computeStride)."""
    if 0 in shape:
        return contiguous_strides(wanted)
    result = [1] * len(wanted)
    at = len(wanted) - 1
    if not shape:
        return tuple(result)
    base, of_tensor, of_view = strides[-1], 1, 1
    for index in range(len(shape) - 1, -1, -1):
        of_tensor *= shape[index]
        if index and (shape[index - 1] == 1 or strides[index - 1] == of_tensor * base):
            continue
        while at >= 0 and (of_view < of_tensor or wanted[at] == 1):
            result[at] = of_view * base
            of_view *= wanted[at]
            at -= 1
        if of_view != of_tensor:
            return None
        if index:
            base, of_tensor, of_view = strides[index - 1], 1, 1
    return tuple(result) if at == -1 else None


def compact_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of an elementwise result: its dimensions lie in the order of the argument's, without gaps."""
    strides, result, step = strides_of(x), [0] * len(x.shape), 1
    for index in sorted(range(len(x.shape)), key=lambda at: (strides[at], -at)):
        result[index] = step
        step *= x.shape[index]
    return tuple(result)


class Emitter(Writer):
    """Writes ops with the ops inside them."""

    # Views

    def viewed(self, x: Tensor, shape: Sequence[int], call_shape: Sequence[int] | None = None, *, node: bool = False) -> Tensor:
        """`x.view(shape)`; `call_shape` is the shape as the call has it, where it holds a -1."""
        laid = view_strides(x.shape, strides_of(x), shape)
        assert laid is not None
        y = self.view(x, shape, laid)
        self.op("view", (x, tuple(shape if call_shape is None else call_shape)), (y,), node=node)
        return y

    def reshaped(self, x: Tensor, shape: Sequence[int], call_shape: Sequence[int] | None = None) -> Tensor:
        """`x.reshape(shape)`: a view where the memory allows one, else a copy."""
        call, laid = tuple(shape if call_shape is None else call_shape), view_strides(x.shape, strides_of(x), shape)
        if laid is not None:
            y = self.view(x, shape, laid)
            with self.op("reshape", (x, call), (y,)):
                self.op("view", (x, call), (y,))
            return y
        copy = self.tensor(x.shape, x.dtype)
        y = self.view(copy, shape)
        with self.op("reshape", (x, call), (y,)):
            self.cloned(x, copy)
            self.op("_unsafe_view", (copy, tuple(shape)), (y,))
        return y

    def transposed(self, x: Tensor, first: int, second: int, *, node: bool = False) -> Tensor:
        """`x.transpose(first, second)`."""
        order = list(range(len(x.shape)))
        order[first], order[second] = second, first
        return self._reordered(x, order, ("transpose", (first, second)), node=node)

    def turned(self, x: Tensor, *, node: bool = False) -> Tensor:
        """`x.t()` of a matrix."""
        return self._reordered(x, (1, 0), ("t", ()), ("transpose", (0, 1)), node=node)

    def permuted(self, x: Tensor, order: tuple[int, ...], *, node: bool = False) -> Tensor:
        """`x.permute(order)`."""
        return self._reordered(x, order, ("permute", (order,)), node=node)

    def _reordered(self, x: Tensor, order: Sequence[int], *calls: tuple[str, tuple[Value, ...]], node: bool = False) -> Tensor:
        shape, strides = x.shape, strides_of(x)
        return self.strided(x, [shape[at] for at in order], [strides[at] for at in order], *calls, node=node)

    def expanded(self, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """`x.expand(shape)`."""
        return self.strided(x, shape, strides, ("expand", (shape, False)))

    def unsqueezed(self, x: Tensor, dimension: int) -> Tensor:
        """`x.unsqueeze(dimension)` of a row-major tensor."""
        shape = (*x.shape[:dimension], 1, *x.shape[dimension:])
        return self.strided(x, shape, contiguous_strides(shape), ("unsqueeze", (dimension,)))

    def sliced(self, x: Tensor, dimension: int, start: int, end: int, *, narrow: bool = False, node: bool = False) -> Tensor:
        """`x[..., start:end]` along one dimension, or `x.narrow`, which calls it."""
        shape, strides = (*x.shape[:dimension], end - start, *x.shape[dimension + 1 :]), strides_of(x)
        calls: list[tuple[str, tuple[Value, ...]]] = [("narrow", (dimension, start, end - start))] if narrow else []
        calls.append(("slice", (dimension, start, end, 1)))
        return self.strided(x, shape, strides, *calls, offset=x.offset + start * strides[dimension], node=node)

    def detached(self, x: Tensor) -> Tensor:
        """`x.detach()`."""
        y = self.view(x)
        with self.op("detach", (x,), (y,)):
            self.write("detach", (x,))
        return y

    # Reservations

    def number(self, dtype: str = "float64") -> Tensor:
        """A number that an op wrapped into a tensor of the host."""
        return self.tensor((), dtype, device="cpu")

    def options(self, x: Tensor) -> tuple[int, int, str]:
        """dtype, layout and device as ops say them to each other."""
        return DTYPE_NUMBERS[x.dtype], STRIDED, self.device

    def empty(
        self, y: Tensor, *, layout: int | None = STRIDED, pinned: bool | None = None, memory_format: int | None = None
    ) -> Tensor:
        """`torch.empty` that gives `y`."""
        self.op("empty", (y.shape, DTYPE_NUMBERS[y.dtype], layout, self.device, pinned, memory_format), (y,))
        return y

    def empty_from_python(self, shape: Sequence[int], dtype: str) -> Tensor:
        """`torch.empty` as a user calls it."""
        return self.empty(self.tensor(shape, dtype), layout=None, pinned=False)

    def empty_strided(self, y: Tensor, *, pinned: bool | None = None) -> None:
        """`torch.empty_strided` that gives `y`."""
        self.op("empty_strided", (y.shape, y.strides, *self.options(y), pinned), (y,))

    def empty_like(
        self,
        x: Tensor,
        y: Tensor,
        options: tuple[Value, Value, Value] = (None, None, None),
        memory_format: int | None = None,
    ) -> None:
        """`torch.empty_like` that gives `y`, with dtype, layout and device as `options`."""
        with self.op("empty_like", (x, *options, None, memory_format), (y,)):
            if memory_format is None:
                self.empty_strided(y)
            else:
                self.empty(y, memory_format=memory_format)

    def new_empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`like.new_empty(shape)`."""
        y = self.tensor(shape, like.dtype)
        with self.op("new_empty", (like, shape, None, None, None, False), (y,)):
            self.empty(y, pinned=False)
        return y

    def resized(self, y: Tensor) -> None:
        """An output that begins as nothing and takes the size of its result."""
        nothing = self.empty(self.tensor((0,), y.dtype))
        self.op("resize_", (nothing, y.shape, None), (y,))

    def zero(self, x: Tensor) -> None:
        """`x.zero_()`."""
        with self.op("zero_", (x,), (x,)):
            self.op("fill_", (x, 0), (x,))

    def zeros(self, y: Tensor, *, from_python: bool = False) -> Tensor:
        """`torch.zeros` that gives `y`."""
        layout, pinned = (None, False) if from_python else (STRIDED, None)
        with self.op("zeros", (y.shape, DTYPE_NUMBERS[y.dtype], layout, self.device, pinned), (y,)):
            self.empty(y, layout=layout, pinned=pinned)
            self.zero(y)
        return y

    def new_zeros(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`like.new_zeros(shape)`."""
        y = self.tensor(shape, like.dtype)
        call = (like, shape, *self.options(like), None)
        with self.op("new_zeros", call, (y,)):
            with self.op("new_empty", call, (y,)):
                self.empty(y)
            self.zero(y)
        return y

    def scalar_tensor(self, y: Tensor, value: Value, layout: int | None) -> None:
        """`torch.scalar_tensor` on the device that gives `y`."""
        with self.op("scalar_tensor", (value, DTYPE_NUMBERS[y.dtype], layout, self.device, None), (y,)):
            self.empty(y, layout=layout)
            self.op("fill_", (y, value), (y,))

    def arange(self, count: int, *, from_python: bool = False) -> Tensor:
        """`torch.arange(count)`: an empty tensor that is grown."""
        y, nothing = self.tensor((count,), "int64"), self.tensor((0,), "int64")
        layout, pinned = (None, False) if from_python else (STRIDED, None)
        with self.op("arange", (count, None if from_python else DTYPE_NUMBERS["int64"], layout, self.device, pinned), (y,)):
            self.empty(nothing, layout=layout, pinned=pinned)
            with self.op("arange", (0, count, 1, nothing), (y,)):
                self.op("resize_", (nothing, (count,), None), (y,))
        return y

    # Copies

    def cloned(self, x: Tensor, y: Tensor | None = None, *, node: bool = False) -> Tensor:
        """`x.clone()`, row-major."""
        y = self.tensor(x.shape, x.dtype) if y is None else y
        with self.op("clone", (x, CONTIGUOUS), (y,), node=node):
            self.empty_like(x, y, self.options(x), CONTIGUOUS)
            self.op("copy_", (y, x, False), (y,))
        return y

    def contiguous(self, x: Tensor, *, node: bool = False) -> Tensor:
        """`x.contiguous()` of a tensor that is not: a copy."""
        y = self.tensor(x.shape, x.dtype)
        with self.op("contiguous", (x, CONTIGUOUS), (y,), node=node):
            return self.cloned(x, y, node=node)

    def cast(self, x: Tensor, dtype: str, *, placed: bool = False) -> Tensor:
        """`x.to(dtype)`; `placed` says the device too, as autograd's own casts do."""
        y = self.tensor(x.shape, dtype, strides=compact_strides(x))
        options = self.options(y) if placed else (DTYPE_NUMBERS[dtype], None, None)
        call = (*options, None, False, False, None) if placed else (DTYPE_NUMBERS[dtype], False, False, None)
        with self.op("to", (x, *call), (y,)), self.op("_to_copy", (x, *options, None, False, None), (y,), node=True):
            self.empty_strided(y, pinned=False)
            self.op("copy_", (y, x, False), (y,))
        return y

    def same_dtype(self, x: Tensor, *, node: bool = False) -> None:
        """`x.to(dtype)` of a tensor that has it."""
        self.op("to", (x, DTYPE_NUMBERS[x.dtype], False, False, None), (x,), node=node)

    def placed(self, x: Tensor, *, non_blocking: bool = True) -> None:
        """`x.to(device, non_blocking=True)` of a tensor that is there."""
        self.op("to", (x, *self.options(x), None, non_blocking, False, None), (x,))

    def placed_copy(self, x: Tensor) -> Tensor:
        """`x.to(device, non_blocking=True, copy=True)`."""
        y = self.tensor(x.shape, x.dtype)
        with (
            self.op("to", (x, *self.options(x), None, True, True, None), (y,)),
            self.op("_to_copy", (x, *self.options(x), None, True, None), (y,)),
        ):
            self.empty_strided(y, pinned=False)
            self.op("copy_", (y, x, True), (y,))
        return y

    def read_back(self, x: Tensor) -> None:
        """`x.to("cpu")`: the host waits for it."""
        y = self.tensor(x.shape, x.dtype, device="cpu")
        options = (DTYPE_NUMBERS[x.dtype], STRIDED, "cpu", None, False)
        with self.op("to", (x, *options, False, None), (y,)), self.op("_to_copy", (x, *options, None), (y,)):
            self.op("empty_strided", (y.shape, y.strides, *options[:3], False), (y,))
            self.op("copy_", (y, x, False), (y,))

    def index_select(self, x: Tensor, index: Tensor, y: Tensor | None = None) -> Tensor:
        """`x.index_select(0, index)`: on a GPU a gather along an index that is spread over the columns."""
        (count,), rest = index.shape, x.shape[1:]
        y = self.tensor((count, *rest), x.dtype) if y is None else y
        with self.op("index_select", (x, 0, index), (y,)):
            self.resized(y)
            column = self.viewed(index, (count, *(1 for _ in rest)))
            wide = self.expanded(column, y.shape, (1, *(0 for _ in rest)))
            with self.op("gather", (x, 0, wide, False, y), (y,)):
                self.strided(y, y.shape, strides_of(y))
                self.strided(x, y.shape, (0, *strides_of(x)[1:]))
        return y

    def power(self, x: Tensor, exponent: float, y: Tensor | None = None, *, node: bool = False) -> Tensor:
        """`x ** exponent`."""
        y = self.tensor(x.shape, x.dtype) if y is None else y
        with self.op("pow", (x, exponent), (y,), node=node):
            self.op("result_type", (x, exponent), (DTYPE_NUMBERS["float32"],))
            self.op("to", (x, DTYPE_NUMBERS["float32"], False, False, None), (x,))
        return y
