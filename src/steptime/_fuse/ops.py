"""How ops become loops and reductions, as PyTorch's compiler decomposes and lowers them (torch/_decomp, torch/_inductor).

`handler` has a rule for an op's name, or none: then the op stays a call.
"""

from __future__ import annotations

import math
from collections import Counter

from steptime._fuse.lowering import Handler, Lowering, Op, as_channels_last, key_of
from steptime._fuse.nodes import Loop, LoopKind, functions_of
from steptime._ops.table import op_table
from steptime._program.program import Phase, Program, Signature, Tensor
from steptime._program.program import Value as Argument

_POINTWISE = """
    abs acos add addcdiv addcmul asin atan atan2 avg_pool2d avg_pool2d_backward binary_cross_entropy_backward
    bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil celu clamp clamp_max clamp_min clone complex constant_pad_nd
    contiguous copy cos div elu elu_backward eq erf exp exp2 expm1 flip floor floor_divide fmod ge gelu gelu_backward
    glu glu_backward gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    huber_loss_backward im2col isinf isnan le leaky_relu leaky_relu_backward lerp log log1p log2 logical_and logical_not
    logical_or logical_xor lt masked_fill max_pool2d_with_indices max_pool2d_with_indices_backward maximum minimum mish
    mish_backward mse_loss_backward mul native_dropout_backward ne neg pow reciprocal relu relu6 remainder repeat roll
    round rsqrt rsub select_backward sgn sigmoid sigmoid_backward sign silu silu_backward sin slice_backward
    smooth_l1_loss_backward softplus softplus_backward sqrt square stack sub tan tanh tanh_backward threshold
    threshold_backward _to_copy tril triu trunc unfold_backward upsample_nearest2d upsample_nearest2d_backward view_copy
    where
"""
_CONSTANTS = """
    arange eye fill_ full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor zero_ zeros zeros_like
"""
_REDUCTIONS = "all amax amin any argmax argmin linalg_vector_norm logsumexp max mean min norm prod std sum var"
_LOSSES = "binary_cross_entropy binary_cross_entropy_with_logits huber_loss l1_loss mse_loss smooth_l1_loss"
_DRAWS = "bernoulli bernoulli_ normal_ rand rand_like randn randn_like uniform_"
_GATHERED = "embedding gather index index_select"
_SCATTERED = """
    embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl_
    scatter scatter_ scatter_add scatter_add_
"""
_COPY, _CONVOLUTION = "copy_", "aten::convolution"
_GROUPS = 8  # where a convolution takes the number of its groups
_IMAGE = 4  # dimensions
_OPS_OF_EACH, _SMALL_CHANNELS = 300, 64
_UNROLLED = 8  # elements that are summed without a loop (unroll_reductions_threshold of torch/_inductor/config.py)
_SUMS = ("sum", "mean")


def _pointwise(into: Lowering, label: str, op: Op) -> None:
    inputs, output = op.inputs[1:] if label == _COPY else list(op.inputs), op.outputs[0]
    if not label.endswith("_") and len(inputs) > 1:  # where a result is given (out=), it is not read
        inputs = [each for each in inputs if key_of(each) != key_of(output)] or inputs
    tanh = label.startswith("gelu") and "tanh" in op.args
    cost = functions_of(label.replace("gelu", "gelu_tanh") if tanh else label)
    into.loop(op, label.rstrip("_"), inputs, output, cost)
    for other in op.outputs[1:]:
        if key_of(other) != key_of(output):
            into.loop(op, label, inputs, other, cost)


def _constant(into: Lowering, label: str, op: Op) -> None:
    into.loop(op, label.rstrip("_"), [], op.outputs[0], Counter())


def _drawn(into: Lowering, label: str, op: Op) -> None:
    loop = Loop(op.outputs[0].numel, functions=Counter(rand=1), random=True)
    into.node(LoopKind.POINTWISE, op, label.rstrip("_"), [], op.outputs[:1], loop)


def _dropout(into: Lowering, label: str, op: Op) -> None:
    mask = next((each for each in op.outputs[1:] if each.dtype == "bool"), None)
    if mask is None:
        into.loop(op, label, op.inputs[:1], op.outputs[0], Counter(plain=1))
        return
    drawn = Loop(mask.numel, functions=Counter(rand=1, plain=2), random=True)
    into.node(LoopKind.POINTWISE, op, label, [], [mask], drawn)
    into.loop(op, label, [op.inputs[0], mask], op.outputs[0], Counter(plain=2))


def _layout(source: Tensor, output: Tensor) -> tuple[int, int, bool]:
    """Of a reduction: results, elements that go into each, and whether these lie side by side."""
    size = max(output.numel, 1)
    reduced = max(source.numel // size, 1)
    strides = source.strides or ()
    kept = [place for place, length in enumerate(source.shape) if length > 1]
    fastest = min(kept, key=lambda place: strides[place] if place < len(strides) and strides[place] else math.inf, default=-1)
    if fastest < 0 or size == 1:
        return size, reduced, True
    shape = output.shape
    if len(shape) == len(source.shape):
        return size, reduced, shape[fastest] == 1
    # Without the dimensions that are reduced: the last of what is left has to be the fastest one.
    return size, reduced, not (bool(shape) and shape[-1] == source.shape[fastest] and size % source.shape[fastest] == 0)


def _reduction(into: Lowering, label: str, op: Op) -> None:
    source = op.inputs[0]
    size, reduced, inner = _layout(source, op.outputs[0])
    if reduced <= _UNROLLED:
        into.loop(op, label, [source], op.outputs[0], Counter(plain=reduced))
        return
    into.reduce(op, label, [source], op.outputs[:1], Loop(size, reduced, inner=inner, sums=label in _SUMS))
    for other in op.outputs[1:]:
        into.reduce(op, label, [source], [other], Loop(size, reduced, inner=inner, sums=False))


def _loss(into: Lowering, label: str, op: Op) -> None:
    output = op.outputs[0]
    if output.numel > 1:
        into.loop(op, label, op.inputs, output, Counter(plain=2))
    else:
        into.reduce(op, label, op.inputs, [output], Loop(1, op.inputs[0].numel, functions=Counter(plain=3)))


def _rows(tensor: Tensor, normalised: Argument) -> tuple[int, int]:
    lengths = normalised if isinstance(normalised, tuple) else tensor.shape[-1:]
    width = math.prod(each for each in lengths if isinstance(each, int)) or 1
    return max(tensor.numel // width, 1), width


def _norm(into: Lowering, label: str, op: Op) -> None:
    """Means and deviations of rows in one reduction, then a loop over all elements."""
    source, results = op.inputs[0], op.outputs
    rows, width = _rows(source, op.argument(1))
    statistics = results[1:] or [into.temporary(source, (rows,))]
    loop = Loop(rows, width, sums=False, functions=Counter(plain=2 if "rms" in label else 3))
    into.reduce(op, label, [source], statistics, loop)
    affine = [each for each in op.inputs[1:] if each.numel == width]
    into.loop(op, label, [source, *statistics, *affine], results[0], Counter(plain=2 + len(affine)))


def _norm_backward(into: Lowering, label: str, op: Op) -> None:
    """Sums along rows and a loop for the input's gradient; sums down columns for those of weight and bias."""
    gradient, source = op.inputs[0], op.inputs[1]
    rows, width = _rows(source, op.argument(2))
    statistics = [each for each in op.inputs[2:] if each.numel == rows and each.dtype == "float32"][:2]
    weight = [each for each in op.inputs[2:] if each.numel == width and rows != width][:1]
    sums = [into.temporary(source, (rows,)) for _ in range(1 if "rms" in label else 2)]
    read = [gradient, source, *statistics, *weight]
    whole = [each for each in op.outputs if each.numel == source.numel]
    if whole:
        into.reduce(op, label, read, sums, Loop(rows, width, functions=Counter(plain=4)))
        into.loop(op, label, [*read, *sums], whole[0], Counter(plain=6))
    columns = [each for each in op.outputs if each.numel != source.numel]
    if columns:
        down = Loop(width, rows, inner=False, functions=Counter(plain=3))
        into.reduce(op, label, [gradient, source, *statistics], columns, down)


def _along(tensor: Tensor, dim: Argument) -> tuple[int, int, bool]:
    """Rows along a dimension, how long they are, and whether their elements lie side by side."""
    place = dim % len(tensor.shape) if isinstance(dim, int) and tensor.shape else -1
    width = tensor.shape[place] if tensor.shape else 1
    return max(tensor.numel // max(width, 1), 1), max(width, 1), place in (-1, len(tensor.shape) - 1)


def _softmax(into: Lowering, label: str, op: Op) -> None:
    """The largest of each row and the sum in one reduction, then a loop over all elements."""
    source = op.inputs[0]
    rows, width, inner = _along(source, op.argument(1))
    sums = [into.temporary(source, (rows,)) for _ in range(2)]
    into.reduce(op, label, [source], sums, Loop(rows, width, inner=inner, sums=False, functions=Counter(plain=2, exp=1)))
    cost = Counter(plain=2) if "log" in label else Counter(plain=1, exp=1, div=1)
    into.loop(op, label, [source, *sums], op.outputs[0], cost)


def _softmax_backward(into: Lowering, label: str, op: Op) -> None:
    gradient, output, result = op.inputs[0], op.inputs[1], op.outputs[0]
    rows, width, inner = _along(result, op.argument(2))
    total = into.temporary(gradient, (rows,))
    into.reduce(op, label, [gradient] if "log" in label else [gradient, output], [total], Loop(rows, width, inner=inner))
    cost = Counter(plain=2, exp=1) if "log" in label else Counter(plain=2)
    into.loop(op, label, [gradient, output, total], result, cost)


def _nll(into: Lowering, label: str, op: Op) -> None:
    """The score of every target, and their sum and number."""
    scores, target = op.inputs[0], op.inputs[1]
    picked = into.temporary(scores, (target.numel,))
    reads = [into.read(scores, indirect=True), into.read(target)]
    into.node(LoopKind.POINTWISE, op, label, reads, [picked], Loop(target.numel, functions=Counter(plain=3)))
    into.reduce(op, label, [picked], op.outputs[:1], Loop(1, target.numel))
    for other in op.outputs[1:]:
        into.reduce(op, label, [target], [other], Loop(1, target.numel))


def _nll_backward(into: Lowering, label: str, op: Op) -> None:
    """Every element says whether it is the target's: scores are not read."""
    read = [each for place, each in enumerate(op.inputs) if place != 1]
    into.loop(op, label, read, op.outputs[0], Counter(plain=4))


def _gathered(into: Lowering, label: str, op: Op) -> None:
    """Elements of the first tensor at places that indices say."""
    output = op.outputs[0]
    places = [into.read(each) for each in op.inputs[1:] if key_of(each) != key_of(output)]
    reads = [into.read(op.inputs[0], indirect=True), *places]
    into.node(LoopKind.POINTWISE, op, label, reads, [output], Loop(output.numel, functions=Counter(plain=2)))


def _scattered(into: Lowering, label: str, op: Op) -> None:
    """What is there is copied or set to zero, then elements are added or put where indices say."""
    output = op.outputs[0]
    backward = label == "embedding_dense_backward"
    sources = op.inputs if backward else op.inputs[1:]
    if not label.endswith("_"):
        base = [] if backward else [into.read(op.inputs[0])]
        into.node(LoopKind.POINTWISE, op, label, base, [output], Loop(output.numel, functions=Counter(plain=1)))
    added = Loop(max((each.numel for each in sources), default=1), functions=Counter(plain=2), atomic=True)
    into.node(LoopKind.POINTWISE, op, label.rstrip("_"), [into.read(each) for each in sources], [output], added)


def _channels(tensor: Tensor) -> tuple[int, int, bool]:
    """Channels of images, elements of each, and whether those of one lie side by side."""
    count = tensor.shape[1] if len(tensor.shape) > 1 else 1
    last = len(tensor.shape) > 2 and tensor.strides is not None and tensor.strides[1] == 1
    return count, max(tensor.numel // max(count, 1), 1), not last


def _batch_norm(into: Lowering, label: str, op: Op) -> None:
    source = op.inputs[0]
    count, each, inner = _channels(source)
    statistics = [result for result in op.outputs[1:] if result.numel == count][:2] or [into.temporary(source, (count,))]
    loop = Loop(count, each, inner=inner, sums=False, functions=Counter(plain=3))
    into.reduce(op, label, [source], statistics, loop)
    affine = [given for given in op.inputs[1:] if given.numel == count]
    for running in affine[2:4]:
        into.loop(op, label, [running, *statistics[:1]], running, Counter(plain=2))
    into.loop(op, label, [source, *statistics, *affine[:2]], op.outputs[0], Counter(plain=4))


def _batch_norm_backward(into: Lowering, label: str, op: Op) -> None:
    whole = [given for given in op.inputs if len(given.shape) > 1]
    source = whole[0]
    count, each, inner = _channels(source)
    small = [given for given in op.inputs if given.numel == count]
    read = [*whole[:2], *small[-2:]]
    sums = [result for result in op.outputs if result.numel == count] or [into.temporary(source, (count,))]
    into.reduce(op, label, read, sums, Loop(count, each, inner=inner, functions=Counter(plain=3)))
    for output in op.outputs:
        if output.numel == source.numel:
            into.loop(op, label, [*read, *sums, *small[:1]], output, Counter(plain=6))


def _group_norm(into: Lowering, label: str, op: Op) -> None:
    source, results = op.inputs[0], op.outputs
    rows = max(results[1].numel if len(results) > 1 else source.shape[0], 1)
    statistics = results[1:] or [into.temporary(source, (rows,))]
    loop = Loop(rows, max(source.numel // rows, 1), sums=False, functions=Counter(plain=3))
    into.reduce(op, label, [source], statistics, loop)
    into.loop(op, label, [source, *statistics, *op.inputs[1:]], results[0], Counter(plain=4))


def _convolution(into: Lowering, label: str, op: Op) -> None:
    """The product without its bias, which a loop adds; weights and images are turned first where they lie otherwise."""
    image, weight, bias, *rest = op.args
    if not isinstance(image, Tensor) or not isinstance(weight, Tensor):
        into.call(op, label)
        return
    output = op.outputs[0]
    taken = [_turned(into, label, op, image), _turned(into, label, op, weight)]
    into.call(op, label, Signature((*taken, None, *rest), (output,), op.signature.switches))
    if isinstance(bias, Tensor):
        into.loop(op, label, [output, bias], output, Counter(plain=1))


def _turned(into: Lowering, label: str, op: Op, tensor: Tensor) -> Tensor:
    """A tensor with its channels side by side, copied where it comes from outside and lies otherwise."""
    last = as_channels_last(tensor) if into.channels_last else tensor
    if last.strides == tensor.strides or into.made_here(tensor) or math.prod(tensor.shape[2:]) == 1:
        return last if into.channels_last else tensor
    copy = as_channels_last(into.temporary(tensor, tensor.shape, tensor.dtype))
    into.loop(op, label, [tensor], copy, Counter(plain=1))
    return copy


def _convolution_backward(into: Lowering, label: str, op: Op) -> None:
    """Gradients of image and weight from the library, the bias's by a reduction."""
    gradient, mask = op.args[0], op.args[-1]
    outputs = [each for each in op.outputs if len(each.shape) > 1]
    biases = [each for each in op.outputs if len(each.shape) == 1]
    if not isinstance(gradient, Tensor) or not isinstance(mask, tuple) or not outputs:
        into.call(op, label)
        return
    placed = dict(zip(map(key_of, op.inputs), op.inputs, strict=True))
    taken = tuple(placed.get(key_of(each), each) if isinstance(each, Tensor) else each for each in op.args[:-1])
    into.call(op, label, Signature((*taken, (*mask[:2], False)), tuple(outputs), op.signature.switches))
    for bias in biases:
        count, each, inner = _channels(op.inputs[0])
        into.reduce(op, label, [op.inputs[0]], [bias], Loop(count, each, inner=inner))


def channels_last(program: Program) -> bool:
    """Whether Inductor lays images of a program with their channels side by side (`decide_layout_opt`)."""
    table = op_table(program)
    shapes, ops = [], 0
    for kind, phase, signature in zip(table.kinds, table.phases, table.signatures, strict=True):
        ops += phase == Phase.FORWARD and kind.aten
        weight = signature.inputs[1] if kind.name == _CONVOLUTION and len(signature.inputs) > _GROUPS else None
        if isinstance(weight, Tensor) and len(weight.shape) == _IMAGE and phase == Phase.FORWARD:
            shapes.append((weight.shape, signature.inputs[_GROUPS]))
    if not shapes or ops >= _OPS_OF_EACH * len(shapes):
        return False
    grouped = any(isinstance(groups, int) and groups > 1 and shape[1] > 1 for shape, groups in shapes)
    narrowing = any(2 * shape[0] <= shape[1] and shape[2] > 1 for shape, _ in shapes)
    small = all(max(shape[:2]) <= _SMALL_CHANNELS for shape, _ in shapes)
    return not (grouped or narrowing or small)


_BY_NAME: dict[str, Handler] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_dropout": _dropout,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "native_group_norm": _group_norm,
    _COPY: _pointwise,
    **dict.fromkeys(_GATHERED.split(), _gathered),
    **dict.fromkeys(_SCATTERED.split(), _scattered),
    **dict.fromkeys(_DRAWS.split(), _drawn),
    **dict.fromkeys(_LOSSES.split(), _loss),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    **dict.fromkeys(_POINTWISE.split(), _pointwise),
    **dict.fromkeys((f"{name}_" for name in _POINTWISE.split()), _pointwise),
    **dict.fromkeys(_CONSTANTS.split(), _constant),
}


def handler(plain: str) -> Handler | None:
    """What an op of this name becomes; None where it stays a call."""
    return _BY_NAME.get(plain)
