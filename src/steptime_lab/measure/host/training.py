"""What a step does beside single ops: graphs are recorded and walked, modules called, tables looked up, parameters updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import Optimizer

from steptime_lab.measure.host.bench import Action, HostBench, Probe, Times, less
from steptime_lab.measure.host.representative import (
    FEW,
    LINEAR,
    LONG_CHAIN,
    MANY,
    SHORT_CHAIN,
    Form,
    Unary,
    chain,
    linear,
    node_probe,
    optimizer_probe,
    parameters,
    recording_probe,
    representative_probes,
)
from steptime_lab.workloads.table_batched.lookup import OPTIMIZERS as LOOKUP_OPTIMIZERS
from steptime_lab.workloads.table_batched.lookup import TableBatchedLookup


def _plain(function: Unary) -> Callable[[torch.device], Unary]:
    return lambda _device: function


def _weights(device: torch.device, *shapes: tuple[int, ...], grads: bool = True) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, requires_grad=grads) for shape in shapes]


def _layer_norm(device: torch.device) -> Unary:
    weight, bias = _weights(device, (32,), (32,))
    return lambda x: F.layer_norm(x, (32,), weight, bias)


def _batch_norm(device: torch.device) -> Unary:
    weight, bias = _weights(device, (16,), (16,))
    mean, variance = torch.zeros(16, device=device), torch.ones(16, device=device)
    return lambda x: F.batch_norm(x, mean, variance, weight, bias, training=True)


def _group_norm(device: torch.device) -> Unary:
    weight, bias = _weights(device, (16,), (16,))
    return lambda x: F.group_norm(x, 4, weight, bias)


def _conv2d(device: torch.device) -> Unary:
    (weight,) = _weights(device, (16, 16, 3, 3))
    return lambda x: F.conv2d(x, weight, padding=1)


def _embedding(device: torch.device) -> Unary:
    (table,) = _weights(device, (32, 16))
    index = torch.zeros(32, dtype=torch.int64, device=device)
    return lambda _x: F.embedding(index, table)


def _embedding_bag(device: torch.device) -> Unary:
    (table,) = _weights(device, (32, 16))
    index = torch.zeros(64, dtype=torch.int64, device=device)
    offsets = torch.arange(0, 64, 2, device=device)
    return lambda _x: F.embedding_bag(index, table, offsets, mode="sum", sparse=True)


def _cross_entropy(device: torch.device) -> Unary:
    target = torch.zeros(32, dtype=torch.int64, device=device)
    return lambda x: F.cross_entropy(x, target)


def _loss(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.device], Unary]:
    def make(device: torch.device) -> Unary:
        target = torch.rand(32, 32, device=device)
        return lambda x: function(x, target)

    return make


def _operand(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *shape: int) -> Callable[[torch.device], Unary]:
    def make(device: torch.device) -> Unary:
        (other,) = _weights(device, shape)
        return lambda x: function(x, other)

    return make


class _Identity(torch.autograd.Function):
    """Written in Python, as exchanges and fused lookups are; its node gives the gradient on as it is."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _python_function(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Identity.apply(x)  # type: ignore[no-untyped-call]
    return result


SQUARE, CUBE, IMAGE, HEADS = (32, 32), (8, 32, 32), (8, 16, 8, 8), (2, 4, 32, 16)

FORMS: tuple[Form, ...] = (
    Form("neg", SQUARE, _plain(torch.neg)),
    Form("view", SQUARE, _plain(lambda x: x.view(32, 32))),
    Form("python_function", SQUARE, _plain(_python_function)),
    Form("relu", SQUARE, _plain(F.relu)),
    Form("gelu", SQUARE, _plain(F.gelu)),
    Form("silu", SQUARE, _plain(F.silu)),
    Form("sigmoid", SQUARE, _plain(torch.sigmoid)),
    Form("tanh", SQUARE, _plain(torch.tanh)),
    Form("dropout", SQUARE, _plain(partial(F.dropout, p=0.1, training=True))),
    Form("softmax", SQUARE, _plain(partial(F.softmax, dim=-1))),
    Form("log_softmax", SQUARE, _plain(partial(F.log_softmax, dim=-1))),
    Form("add", SQUARE, _operand(torch.add, *SQUARE)),
    Form("mul", SQUARE, _operand(torch.mul, *SQUARE)),
    Form("mul_scalar", SQUARE, _plain(lambda x: x * 0.5)),
    Form("transpose", SQUARE, _plain(lambda x: x.transpose(0, 1))),
    Form("contiguous", SQUARE, _plain(lambda x: x.t().contiguous())),
    Form("to_bfloat16", SQUARE, _plain(lambda x: x.to(torch.bfloat16)), keeps_shape=False),
    Form("matmul", SQUARE, _operand(torch.matmul, *SQUARE)),
    Form("bmm", CUBE, _operand(torch.bmm, *CUBE)),
    LINEAR,
    Form("linear_frozen", SQUARE, partial(linear, grads=False)),
    Form("linear_no_bias", SQUARE, partial(linear, bias=False)),
    Form("layer_norm", SQUARE, _layer_norm),
    Form("batch_norm", IMAGE, _batch_norm),
    Form("group_norm", IMAGE, _group_norm),
    Form("conv2d", IMAGE, _conv2d),
    Form("attention", HEADS, _plain(lambda x: F.scaled_dot_product_attention(x, x, x))),
    Form("max_pool2d", IMAGE, _plain(partial(F.max_pool2d, kernel_size=3, stride=1, padding=1))),
    Form("adaptive_avg_pool2d", IMAGE, _plain(partial(F.adaptive_avg_pool2d, output_size=1)), keeps_shape=False),
    Form("cat", SQUARE, _plain(lambda x: torch.cat((x, x), 1)), keeps_shape=False),
    Form("stack", SQUARE, _plain(lambda x: torch.stack((x, x))), keeps_shape=False),
    Form("split", SQUARE, _plain(lambda x: torch.split(x, 16, 1)[0]), keeps_shape=False),
    Form("index", SQUARE, _plain(lambda x: x[:, 1]), keeps_shape=False),
    Form("sum", SQUARE, _plain(torch.sum), keeps_shape=False),
    Form("mean", SQUARE, _plain(torch.mean), keeps_shape=False),
    Form("embedding", SQUARE, _embedding, keeps_shape=False),
    Form("embedding_bag", SQUARE, _embedding_bag, keeps_shape=False),
    Form("cross_entropy", SQUARE, _cross_entropy, keeps_shape=False),
    Form("mse_loss", SQUARE, _loss(F.mse_loss), keeps_shape=False),
    Form("bce_with_logits", SQUARE, _loss(F.binary_cross_entropy_with_logits), keeps_shape=False),
)


def form_probes() -> list[Probe]:
    """Per form: recording a graph, and not."""
    return [probe for form in FORMS for probe in (recording_probe(form), _not_recording(form))]


def _not_recording(form: Form) -> Probe:
    def measure(bench: HostBench) -> Times:
        device = bench.group.device
        with torch.no_grad():
            return (bench.per_op(form.make(device), form.input(device)),)

    return Probe(("op_no_grad",), form.name, measure, phase="forward")


def autograd_probes() -> list[Probe]:
    """All that concerns the backward pass."""
    chained = [node_probe(form) for form in FORMS if form.keeps_shape]
    between = Probe(("between_backward",), "neg", _between, phase="backward")
    gathered = [Probe(("accumulate_grad",), how, partial(_accumulate, how), phase="backward") for how in ("take", "add")]
    return [*chained, between, *gathered]


def _between(bench: HostBench) -> Times:
    """What the engine spends per node apart from the node's one op, taken as much as it costs in a loop without a graph."""
    device = bench.group.device
    with torch.no_grad():
        alone = bench.per_op(torch.neg, torch.randn(32, 32, device=device))
    slopes, _ = bench.at_two_sizes(chain(_form("neg"), device), SHORT_CHAIN, LONG_CHAIN)
    return (less(slopes, alone),)


def _accumulate(how: str, bench: HostBench) -> Times:
    """Per leaf: its gradient is taken over as it is, or added to one that is there; less the node that made it."""
    node, _ = bench.at_two_sizes(chain(_form("neg"), bench.group.device), SHORT_CHAIN, LONG_CHAIN)
    leaf, _ = bench.at_two_sizes(_leaves(how, bench.group.device), SHORT_CHAIN, LONG_CHAIN)
    return (less(leaf, node),)


def _leaves(how: str, device: torch.device) -> Callable[[int], Action]:
    leaves = [torch.randn(32, 32, device=device, requires_grad=True) for _ in range(LONG_CHAIN)]
    seeds = [torch.randn(32, 32, device=device) for _ in range(LONG_CHAIN)]

    def make(count: int) -> Action:
        for leaf in leaves[:count]:
            leaf.grad = torch.zeros_like(leaf) if how == "add" else None
        return partial(torch.autograd.backward, [torch.neg(leaf) for leaf in leaves[:count]], seeds[:count])

    return make


def _form(name: str) -> Form:
    return next(form for form in FORMS if form.name == name)


def module_probes() -> list[Probe]:
    """Modules and autocast."""
    casts = ("enter_exit", "no_cast", "input_cast", "input_and_weight_cast")
    return [
        Probe(("between_forward",), "sequential_relu", _between_forward, phase="forward"),
        *(probe for probe in representative_probes() if probe.kinds[0] == "module_call"),
        *(Probe(("autocast",), what, partial(_autocast, what), phase="forward") for what in casts),
    ]


def _between_forward(bench: HostBench) -> Times:
    """From one op to the next where each is a module in a sequence: less the op itself, which records a graph."""
    x = torch.randn(32, 32, device=bench.group.device, requires_grad=True)
    alone = bench.per_op(F.relu, x)

    def make(length: int) -> Action:
        return partial(nn.Sequential(*(nn.ReLU() for _ in range(length))), x)

    slopes, _ = bench.at_two_sizes(make, 20, 200)
    return (less(slopes, alone),)


def _autocast(what: str, bench: HostBench) -> Times:
    """What autocast adds to a linear layer by the casts it has to make; a leaf weight is cast once and kept."""
    device = bench.group.device
    if what == "enter_exit":
        return (bench.per_op(_enter_exit, device.type),)
    if not bench.cuda:
        raise NotImplementedError("not every CPU multiplies in bfloat16")
    given = torch.float32 if what != "no_cast" else torch.bfloat16
    x = torch.randn(32, 32, device=device, dtype=given)
    weight = torch.randn(32, 32, device=device, dtype=given, requires_grad=what != "input_and_weight_cast")
    plain = bench.per_op(F.linear, x.bfloat16(), weight.detach().bfloat16().requires_grad_(weight.requires_grad))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return (less(bench.per_op(F.linear, x, weight), plain),)


def _enter_exit(device_type: str) -> None:
    with torch.autocast(device_type, dtype=torch.bfloat16):
        pass


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
WAYS: Mapping[str, dict[str, Any]] = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "for_loop": {"foreach": False, "fused": False},
}
# Parameters: Adam's loop launches about 12 kernels for each, which have to fit into the launch queue.
MANY_IN_A_LOOP = 40


def optimizer_probes() -> list[Probe]:
    """Every optimiser in each of its ways, then what surrounds its step."""
    steps = [
        optimizer_probe(f"{name}_{way}", partial(make, **setting), MANY_IN_A_LOOP if way == "for_loop" else MANY)
        for name, make in OPTIMIZERS.items()
        for way, setting in WAYS.items()
    ]
    clears = [
        Probe(("zero_grad", "zero_grad_fixed"), what, partial(_zero_grad, what == "to_none"), phase="optimizer")
        for what in ("to_none", "to_zero")
    ]
    clips = Probe(("clip_grad", "clip_grad_fixed"), "norm", _clip, phase="optimizer")
    return [*steps, *clears, clips]


def _zero_grad(to_none: bool, bench: HostBench) -> Times:
    result = {size: torch.optim.SGD(parameters(size, bench.group.device), lr=1e-3) for size in (FEW, MANY)}

    def make(size: int) -> Action:
        for parameter in result[size].param_groups[0]["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return partial(result[size].zero_grad, set_to_none=to_none)

    return bench.at_two_sizes(make, FEW, MANY)


def _clip(bench: HostBench) -> Times:
    result = {size: parameters(size, bench.group.device) for size in (FEW, MANY)}
    return bench.at_two_sizes(lambda size: partial(torch.nn.utils.clip_grad_norm_, result[size], 1.0), FEW, MANY)


TABLES, ROWS, DIM, BATCH = 4, 64, 16, 8
# Tables, for what a table more costs; sorting its indices takes a dozen kernels.
FEW_TABLES, MANY_TABLES = 4, 24


def lookup_probes() -> list[Probe]:
    """Both implementations, forward where a form does not say it already, backward and update."""
    return [
        *(
            Probe(("table_batched",), f"{way}_{optimizer}", partial(_table_batched, way, optimizer), phase=way)
            for optimizer in LOOKUP_OPTIMIZERS
            for way in ("forward", "backward")
        ),
        Probe(("backward_node", "backward_call"), "embedding_bag_sparse", _bags_backward, phase="backward"),
        *(
            Probe(("optimizer_step", "optimizer_step_fixed"), f"{name}_sparse", partial(_bags_update, name), phase="optimizer")
            for name in LOOKUP_OPTIMIZERS
        ),
    ]


def _table_batched(way: str, optimizer: str, bench: HostBench) -> Times:
    device = bench.group.device
    lookup = TableBatchedLookup([ROWS] * TABLES, [DIM] * TABLES, optimizer=optimizer, device=device)
    indices = torch.randint(0, ROWS, (2 * BATCH * TABLES,), device=device)
    offsets = torch.arange(0, 2 * BATCH * TABLES + 1, 2, device=device)
    if way == "forward":
        return (bench.per_op(lookup.look_up, indices, offsets),)
    gradient = torch.randn(BATCH, DIM * TABLES, device=device)
    return (bench.per_op(lookup.update, gradient, indices, offsets),)


class _Bags:
    """A bag per table; `backward` sets up a backward pass through so many of them."""

    def __init__(self, device: torch.device) -> None:
        self.tables = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, device=device) for _ in range(MANY_TABLES)]
        self.indices = torch.randint(0, ROWS, (2 * BATCH,), device=device)
        self.offsets = torch.arange(0, 2 * BATCH, 2, device=device)
        self.gradient = torch.randn(BATCH, DIM, device=device)

    def backward(self, count: int) -> Action:
        for table in self.tables:
            table.weight.grad = None
        pooled = [table(self.indices, self.offsets) for table in self.tables[:count]]
        return partial(torch.autograd.backward, pooled, [self.gradient] * count)


def _bags_backward(bench: HostBench) -> Times:
    """Per table, its sparse gradient taken over included."""
    return bench.at_two_sizes(_Bags(bench.group.device).backward, FEW_TABLES, MANY_TABLES)


def _bags_update(name: str, bench: HostBench) -> Times:
    """Per table, from sparse gradients that a backward pass has just made."""
    from steptime_lab.workloads.table_batched.rowwise_adagrad import RowwiseAdagrad

    bags = _Bags(bench.group.device)
    kind: Callable[..., Optimizer] = torch.optim.SGD if name == "sgd" else RowwiseAdagrad
    result = {count: kind([table.weight for table in bags.tables[:count]], lr=0.01) for count in (FEW_TABLES, MANY_TABLES)}

    def make(count: int) -> Action:
        bags.backward(count)()
        return result[count].step

    return bench.at_two_sizes(make, FEW_TABLES, MANY_TABLES)
