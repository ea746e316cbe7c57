"""Ops as models call them in Python, with inputs that want gradients: recording the graph is part of the cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from steptime._calibrate.host.bench import HostBench
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.representative import LINEAR, Form, Unary, linear, recording_probe


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
