"""Kernels of ATen's tensor iterator: element-wise ones, copies, fills and reductions, by how it walks their tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.launches import (
    ARGUMENT,
    HOT,
    MEMCPY,
    MEMSET,
    REDUCE,
    STRIDED,
    UNROLLED,
    VECTORIZED,
    Gpu,
    GpuCall,
    Grids,
    Launch,
    Operand,
    Rule,
    floor_power,
    fresh,
)

# Bytes of an element of an output that does not exist yet: only whether its strides join matters.
_FRESH_ITEM = 4


@dataclass(frozen=True, slots=True)
class Iteration:
    """Dimensions that are left, fastest first; `strides` in bytes, one tuple per operand in the order given."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these broadcast to."""
    if len(set(shapes)) == 1:
        return shapes[0]
    result = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for index, size in enumerate(reversed(shape)):
            if size != 1:
                result[-1 - index] = size
    return tuple(result)


def iterate(shape: tuple[int, ...], operands: Sequence[Operand | None], *, reduced: bool = False) -> Iteration:
    """The walk over `shape`, outputs first; None is a new output, which takes the order of the others.

    `reduced` means that the first operand is the output of a reduction, with stride 0 along what is reduced.
    """
    byte_strides = [None if operand is None else _byte_strides(shape, operand) for operand in operands]
    order = _order(shape, byte_strides, reduced)
    sizes = [shape[axis] for axis in order]
    packed = tuple(accumulate(sizes[:-1], operator.mul, initial=_FRESH_ITEM))
    strides = [packed if item is None else tuple(item[axis] for axis in order) for item in byte_strides]
    if not sizes:
        items = tuple((_FRESH_ITEM if operand is None else operand.item_bytes,) for operand in operands)
        return Iteration((1,), items)
    joined = [(sizes[0], [stride[0] for stride in strides])]
    for size, *steps in zip(sizes[1:], *(stride[1:] for stride in strides), strict=True):
        inner, inner_steps = joined[-1]
        if inner == 1:
            joined[-1] = size, steps
        elif size == 1 or all(step * inner == outer for step, outer in zip(inner_steps, steps, strict=True)):
            joined[-1] = inner * size, inner_steps
        else:
            joined.append((size, steps))
    return Iteration(tuple(size for size, _ in joined), tuple(zip(*(steps for _, steps in joined), strict=True)))


def _byte_strides(shape: tuple[int, ...], x: Operand) -> list[int]:
    missing, item = len(shape) - len(x.shape), x.item_bytes
    strides = [0 if size == 1 and shape[missing + axis] != 1 else x.strides[axis] * item for axis, size in enumerate(x.shape)]
    return [0] * missing + strides


def _order(shape: tuple[int, ...], byte_strides: Sequence[list[int] | None], reduced: bool) -> list[int]:
    """An insertion sort of the axes that stops where two cannot be told apart, as ATen's does."""
    order = list(range(len(shape) - 1, -1, -1))
    for start in range(1, len(order)):
        later = start
        for earlier in range(start - 1, -1, -1):
            compared = _compared(order[earlier], order[later], shape, byte_strides, reduced)
            if compared > 0:
                order[earlier], order[later] = order[later], order[earlier]
                later = earlier
            elif compared < 0:
                break
    return order


def _compared(left: int, right: int, shape: tuple[int, ...], byte_strides: Sequence[list[int] | None], reduced: bool) -> int:
    """1 where two axes have to be swapped, -1 where they are in order, 0 where no operand decides."""
    for index, strides in enumerate(byte_strides):
        if strides is None:
            continue
        first, second = strides[left], strides[right]
        if reduced and index == 0 and (first == 0) != (second == 0):
            return 1 if second == 0 else -1
        if first == 0 or second == 0:
            continue
        if first != second:
            return -1 if first < second else 1
        if shape[left] > shape[right]:
            return 1
    return 0


# Bytes of a sector, the least that is moved between L2 and an SM, and of a line, for which an SM asks at once.
_SECTOR_BYTES, _LINE_BYTES = 32, 128
# Lanes of a warp, which asks at once for what they need, and how many of a walk are looked at: the others do alike.
_WARP, _LANES_SEEN = 32, 128
# Elements of a block: 128 threads of 8 each. In the strided kernel a thread takes 2 one after the other, or 4 of less than
# four bytes (ATen's launch code; the names of measured kernels say the same).
_BLOCK, _THREADS, _STRIDED_EACH, _STRIDED_EACH_SHORT, _FULL_BYTES = 1024, 128, 2, 4, 4


def pointwise(
    inputs: Sequence[Operand], output: Operand, *, tag: str = "", casts: bool = False, existing: bool = False, kernel: str = ""
) -> Launch:
    """An element-wise kernel over `inputs` into `output`. `existing` says that the output has its memory and strides already.

    `casts` says that operands differ in dtype; `kernel` overrides the choice, where an op has its own.
    """
    walk = _walk(inputs, output, existing)
    elements = output.numel
    items = (output.item_bytes, *(entry.item_bytes for entry in inputs))
    flat = len(walk.sizes) == 1 and (
        elements == 1
        or all(
            element[0] == item or (index == 0 and not existing)
            for index, (element, item) in enumerate(zip(walk.strides, items, strict=True))
        )
    )
    kernel = kernel or ((UNROLLED if casts else VECTORIZED) if flat else STRIDED)
    facts: dict[str, float] = {
        "dimensions": len(walk.sizes),
        "size_0": walk.sizes[0],
        "size_1": walk.sizes[1] if len(walk.sizes) > 1 else 1,
        "tail": elements % (4 if max(items) >= 4 else 8) != 0,
        "ragged_block": elements % _BLOCK != 0,
        "casts": casts,
    }
    if not flat:
        facts.update(_strided_facts(walk, inputs, items, elements, existing))
    each = _STRIDED_EACH if items[0] >= _FULL_BYTES else _STRIDED_EACH_SHORT
    grids = serial_grids(elements, each) if kernel == STRIDED else ((elements / _BLOCK, 1.0),)
    return Launch(kernel, elements, tuple(inputs), (output,), facts, grids, _path(kernel, facts, output.item_bytes, tag), tag)


def fill(output: Operand, *, tag: str = "", existing: bool = False) -> Launch:
    """A constant written to every element."""
    return pointwise((), output, tag=tag or output.dtype, existing=existing)


def cleared(result: Operand) -> Launch:
    """A result set to zero before a kernel adds to it: with code of its own, since it reads nothing."""
    return replace(fill(result), path="fill")


def _walk(inputs: Sequence[Operand], output: Operand, existing: bool) -> Iteration:
    every = (output, *inputs) if existing else inputs
    first = every[0] if every else output
    # The usual case: all alike and dense, which joins to one dimension.
    if all(entry.strides == first.strides and entry.shape == output.shape for entry in every) and first.dense:
        items = (output.item_bytes, *(entry.item_bytes for entry in inputs))
        return Iteration((output.numel,), tuple((item,) for item in items))
    return iterate(output.shape, (output if existing else None, *inputs))


def _strided_facts(
    walk: Iteration, inputs: Sequence[Operand], items: Sequence[int], elements: int, existing: bool
) -> dict[str, float]:
    inner = [strides[0] / item for strides, item in zip(walk.strides, items, strict=True)]
    if not existing:
        inner[0] = 1.0
    far = [stride for stride in inner[1:] if stride > 1]
    packed = tuple(accumulate(walk.sizes[:-1], operator.mul, initial=items[0]))
    asked = walk.strides if existing else (packed, *walk.strides[1:])
    return {
        "output_stride": inner[0],
        "input_stride": max(far, default=0.0),
        "broadcast_inputs": sum(entry.distinct < elements for entry in inputs),
        "sector_bytes": elements * sum(_asked_bytes(walk.sizes, strides) for strides in asked),
        "size_2": walk.sizes[2] if len(walk.sizes) > 2 else 1,
        "next_stride_bytes": min((strides[1] for strides in walk.strides if len(strides) > 1 and strides[1] > 0), default=0),
    }


@lru_cache(maxsize=1 << 14)
def _asked_bytes(sizes: tuple[int, ...], strides: tuple[int, ...]) -> float:
    """Bytes of sectors per element that the first warps of a walk ask for; elements of a warp in one sector share it."""
    count = min(_LANES_SEEN, math.prod(sizes))
    touched: set[tuple[int, int]] = set()
    for element in range(count):
        place, rest = 0, element
        for size, stride in zip(sizes, strides, strict=True):
            rest, along = divmod(rest, size)
            place += along * stride
        touched.add((element // _WARP, place // _SECTOR_BYTES))
    return len(touched) * _SECTOR_BYTES / count


def asked_bytes(x: Operand) -> float:
    """Bytes of sectors that warps ask for where they walk a tensor in row-major order of its axes, whatever its strides."""
    sizes = tuple(reversed(x.shape)) or (1,)
    strides = tuple(stride * x.item_bytes for stride in reversed(x.strides)) or (x.item_bytes,)
    return x.numel * _asked_bytes(sizes, strides)


def serial_grids(elements: int, each: int) -> Grids:
    """Blocks of 128 threads whose threads take `each` elements one after the other, fewer where there are not enough."""
    blocks = elements / (_THREADS * each)
    return ((blocks, min(each, math.ceil(elements / _THREADS))), (blocks, 1.0))


def _path(kernel: str, facts: dict[str, float], item_bytes: int, tag: str) -> str:
    if kernel == UNROLLED:
        return tag
    if kernel != STRIDED:
        return ""
    apart = max(facts.get("input_stride", 0.0), facts.get("output_stride", 1.0))
    # Threads side by side that are not a whole line apart share what they ask for.
    crossed = "transposed-near" if apart * item_bytes < _LINE_BYTES else "transposed"
    way = crossed if apart > 1 else "broadcast" if facts.get("broadcast_inputs") else "sliced"
    return way + ("-cast" if facts["casts"] else "")


_COPY_BLOCK = 1024  # bytes; only the order of magnitude matters, the weight is fitted


def memcpy(source: Operand, target: Operand) -> Launch:
    """Dense bytes copied within the device. Sizes that are no multiple of 16 bytes take another kernel."""
    nbytes = source.nbytes
    facts = {"aligned_4": nbytes % 4 == 0, "aligned_16": nbytes % 16 == 0, "aligned_64": nbytes % 64 == 0}
    path = "aligned" if facts["aligned_16"] else "unaligned"
    return Launch(MEMCPY, nbytes, (source,), (target,), facts, ((nbytes / _COPY_BLOCK, 1.0),), path)


def memset(nbytes: int) -> Launch:
    """Bytes set to a value by the driver."""
    return Launch(MEMSET, nbytes, (), (fresh((nbytes,), "uint8"),), {}, ((nbytes / _COPY_BLOCK, 1.0),))


def copies(target: Operand, source: Operand) -> list[Launch]:
    """What copies `source` into `target`, both on the device, converting where dtypes differ."""
    if target.dtype == source.dtype:
        walk = iterate(target.shape, (target, source))
        dense = len(walk.sizes) == 1 and all(stride[0] == target.item_bytes for stride in walk.strides)
        if dense or target.numel == 1:
            return [memcpy(source, target)]
        return [pointwise((source,), target, tag=source.dtype, existing=True, kernel=STRIDED)]
    launch = pointwise((source,), target, tag=f"{source.dtype}>{target.dtype}", casts=True, existing=True)
    # ATen narrows float32 to either half in a vectorised kernel; no other conversion has one.
    if launch.kernel == UNROLLED and source.dtype == "float32" and target.dtype in ("bfloat16", "float16"):
        launch = replace(launch, kernel=VECTORIZED, path="narrowing")
    return [launch]


def of_contiguous(rule: Rule, *places: int) -> Rule:
    """The rule of an op that first makes the arguments at these places row-major, where they lie otherwise."""

    def launches(call: GpuCall) -> list[Launch]:
        odd = {place: x for place in places if (x := call.optional_tensor(place)) is not None and not _row_major(x)}
        if not odd:
            return rule(call)
        args = tuple(
            replace(value, strides=None) if isinstance(value, TensorArg) and place in odd else value
            for place, value in enumerate(call.args)
        )
        first = [launch for x in odd.values() for launch in copies(fresh(x.shape, x.dtype), x)]
        since_bytes = sum(2 * x.nbytes for x in odd.values())
        rest = rule(replace(call, args=args))
        return [*first, *(_just_written(launch, odd, since_bytes) for launch in rest)]

    return launches


def _row_major(x: Operand) -> bool:
    usual = contiguous(x.shape)
    return all(size == 1 or step == wanted for size, step, wanted in zip(x.shape, x.strides, usual, strict=True))


def _just_written(launch: Launch, arguments: Collection[int], since_bytes: int) -> Launch:
    """The launch with some arguments of its call written by an earlier launch of it."""
    reads = tuple(
        replace(x, origin=HOT, since_bytes=since_bytes) if x.origin == ARGUMENT and x.argument in arguments else x
        for x in launch.reads
    )
    return replace(launch, reads=reads)


def empty_like(x: Operand, dtype: str = "") -> Operand:
    """The new tensor that ATen makes to hold a copy: of the same strides where those are dense, else row-major."""
    result = fresh(x.shape, dtype or x.dtype)
    return replace(result, strides=x.strides) if x.dense else result


# ATen's reduction: threads of a block, values a thread has before blocks share an output.
_REDUCING_THREADS, _MANY_VALUES, _FEW_VALUES = 512, 256, 16
# Elements along which inputs are read as vectors.
_VECTOR_LEAST = 128
_SEMAPHORE_BYTES = 4
# Nanoseconds of one dependent load of a chain, the smallest of the multiples that are fitted (seen: 20 to 400).
_LOAD_NS = 25.0


def reduction(x: Operand, axes: Iterable[int], gpu: Gpu, *, outputs: int = 1, tag: str = "", path: str = "") -> list[Launch]:
    """What reduces `x` along `axes` into `outputs` tensors: the kernel, after a memset where several blocks share an output."""
    rank = len(x.shape)
    gone = {axis % rank for axis in axes} if rank else set()
    shape = tuple(1 if axis in gone else size for axis, size in enumerate(x.shape))
    strides = tuple(0 if axis in gone else stride for axis, stride in enumerate(contiguous(shape)))
    walk = iterate(x.shape, (replace(fresh(shape, x.dtype), strides=strides), x), reduced=True)
    count = max(1, math.prod(shape))
    reduced = len(walk.sizes) if count == 1 else sum(stride == 0 for stride in walk.strides[0])
    each = max(1, x.numel // count)
    facts = _reduction_facts(walk, reduced, count, each, x.item_bytes, gpu)
    blocks, values, held = facts["blocks"], facts["values"], facts["held"]
    grids = ((blocks, values * held), (blocks, values))
    along = "along" if reduced == 1 else "along-many"
    kind = "vector" if facts["vector"] else along if facts["along"] else f"across-{held:g}"
    kernel = Launch(REDUCE, x.numel, (x,), (fresh((count,), x.dtype),) * outputs, facts, grids, kind + path, tag)
    return [memset(_SEMAPHORE_BYTES * int(blocks // facts["split"])), kernel] if facts["split"] > 1 else [kernel]


def _reduction_facts(walk: Iteration, reduced: int, count: int, each: int, item: int, gpu: Gpu) -> dict[str, float]:
    """ATen's choice: which dimension lies along threads, which along rows of threads, and whether blocks share an output."""
    every, elements = len(walk.sizes), 8 if item == 2 else 4  # of a vector
    along = reduced == every or walk.strides[1][0] < walk.strides[1][reduced]
    across, down = (each, count) if along else (count, each)
    vector, held = False, 1
    if walk.strides[1][0 if along else reduced] == item:
        if along and across > _VECTOR_LEAST and every == 1:
            vector = True
            across //= elements
        elif not along:
            held = _held(walk, reduced, item)
            across //= held
    width, height = _block(across, down, _REDUCING_THREADS // held)
    step_in, step_out = (width, 1) if along else (1, width)
    values = -(-each // step_in)
    height_reduces = values >= height * _FEW_VALUES or values >= _MANY_VALUES
    step_in, step_out = (step_in * height, step_out) if height_reduces else (step_in, step_out * height)
    values = -(-each // step_in)
    target = gpu.sms * (gpu.threads_per_sm // (width * height))
    blocks = -(-(count // held) // step_out)
    split = 1
    if height_reduces and values >= _MANY_VALUES and blocks <= target:
        split = max(min(-(-target // blocks), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
        values = -(-each // (step_in * split))
    resident = gpu.sms * max(1.0, gpu.threads_per_sm / max(_WARP, width * height))
    waves = blocks * split / resident
    return {
        "outputs": count,
        "reduced": each,
        "along": along,
        "values": values,  # that one thread reduces, one after the other
        "block_width": width,
        "block_height": height,
        "blocks": blocks * split,
        "split": split,
        "held": held,
        "vector": vector,
        "waves": waves,
        "dimensions": every,
        "reduced_dimensions": reduced,
        "height_reduces": height_reduces,
        "size_0": walk.sizes[0],
        "tail": each % elements != 0,
        "chain_ns": max(1.0, waves) * values * _LOAD_NS,
    }


def _held(walk: Iteration, reduced: int, item: int) -> int:
    """Neighbouring outputs of one thread: 4, 2 or 1, whichever divides the size and every other stride."""
    held = 4
    others = [stride // item for index, stride in enumerate(walk.strides[1]) if index != reduced]
    for number in (walk.sizes[reduced], *others):
        while held > 1 and number % held:
            held //= 2
    return held


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    widest, tallest = min(floor_power(across), most), min(floor_power(down), most)
    width = min(widest, _WARP)
    height = min(tallest, most // width)
    return min(widest, most // height), height
