"""Which probes there are, and in which order: any pass may be cut off, so that what is worth most comes first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steptime._calibrate.harness.session import watchdog
from steptime_lab.measure.host.bench import Action, HostBench, Probe, Times, burst_ns, less, line
from steptime_lab.measure.host.issued import Issued
from steptime_lab.measure.host.launches import launch_probes
from steptime_lab.measure.host.ops import op_probes, python_probes
from steptime_lab.measure.host.representative import WAIT_S, collective_probe, join
from steptime_lab.measure.host.training import autograd_probes, form_probes, lookup_probes, module_probes, optimizer_probes

# Layers of one parameter each, 16 x 16. Every bucket is a collective, and they have to fit into the launch queue.
FEW, MANY = 8, 64
# Megabytes: all gradients in one bucket, or one for every parameter (256 floats are 0.001 MB).
ONE_BUCKET, MANY_BUCKETS = 25.0, 0.0005
DDP_KINDS = ("ddp_forward", "ddp_forward_fixed", "ddp_backward", "ddp_backward_fixed", "ddp_bucket")

COLLECTIVES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], Action]] = {
    "all_reduce": lambda whole, _part: partial(dist.all_reduce, whole),
    "all_to_all_single": lambda whole, _part: partial(dist.all_to_all_single, torch.empty_like(whole), whole),
    "all_gather_into_tensor": lambda whole, part: partial(dist.all_gather_into_tensor, whole, part),
    "reduce_scatter_tensor": lambda whole, part: partial(dist.reduce_scatter_tensor, part, whole),
    "broadcast": lambda whole, _part: partial(dist.broadcast, whole, 0),
}


def _data_parallel(bench: HostBench) -> Times:
    """Forward and backward, each against the bare module; slopes are per parameter."""
    join(bench)
    device = bench.group.device
    with watchdog(WAIT_S, "DDP", bench.session):
        bare = {count: _passes(bench, _layers(count, device)) for count in (FEW, MANY)}
        item = {count: _passes(bench, _wrapped(count, device, ONE_BUCKET)) for count in (FEW, MANY)}
        many = _passes(bench, _wrapped(MANY, device, MANY_BUCKETS))
    extra = {(count, way): less(item[count][way], bare[count][way]) for count in (FEW, MANY) for way in (0, 1)}
    forward = line(FEW, extra[FEW, 0], MANY, extra[MANY, 0])
    backward = line(FEW, extra[FEW, 1], MANY, extra[MANY, 1])
    # The first bucket is there either way.
    bucket = [value / (MANY - 1) for value in less(many[1], item[MANY][1])]
    return (*forward, *backward, bucket)


def _passes(bench: HostBench, module: nn.Module) -> tuple[list[float], list[float]]:
    """Times of forward and of backward, from a drained device each."""
    x = torch.randn(8, 16, device=bench.group.device)
    seed = torch.randn(8, 16, device=bench.group.device)
    forward, backward = [], []
    # DDP rebuilds its buckets after the first pass.
    for number in range(4 + 2 * bench.bursts):
        for parameter in module.parameters():
            parameter.grad = None
        kept: list[torch.Tensor] = []
        ahead: Action = partial(_keep, kept, module, x)
        bench.group.barrier()
        first = burst_ns(ahead, 1)
        bench.synchronize()
        second = burst_ns(partial(torch.autograd.backward, kept[0], seed), 1)
        bench.synchronize()
        if number >= 4:
            forward.append(first)
            backward.append(second)
    return forward, backward


def _keep(kept: list[torch.Tensor], module: nn.Module, x: torch.Tensor) -> None:
    kept.append(module(x))


def _layers(count: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(count))).to(device)


def _wrapped(count: int, device: torch.device, bucket_mb: float) -> nn.Module:
    module = _layers(count, device)
    where = [device] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=where, bucket_cap_mb=bucket_mb)


# Forms and optimisers of the short lists.
SHORT = ("neg", "relu", "add", "linear", "layer_norm", "softmax", "dropout", "conv2d", "embedding_bag", "take",
         "sgd_foreach", "adam_foreach", "adamw_fused", "sgd_for_loop")  # fmt: skip
THINNED = ("op_autograd", "op_no_grad", "backward_node", "accumulate_grad", "optimizer_step")


# What lies between ops is two fifths of the host's time in a step of DLRM and of BERT; launching comes next.
BETWEEN_OPS = (
    "between_backward", "accumulate_grad", "ddp_forward", "module_call", "between_forward", "launch", "optimizer_step",
    "zero_grad", "backward_node",
)  # fmt: skip
# Ops that make up nearly all calls of a step.
OFTEN = 150
# Ops of the short lists: after a profiler, under an execution trace, on parts of a GPU.
SHORT_OPS = 150


def probes(issued: Sequence[Issued], *, short: bool = False, python: bool = True) -> list[Probe]:
    """What lies between ops, the ops that workloads issue most, lookups and collectives, then the rest."""
    asked = issued[:SHORT_OPS] if short else issued
    alone = [*launch_probes(), *module_probes(), *optimizer_probes(), *form_probes(), *autograd_probes()]
    around = [
        *(probe for probe in alone if not short or probe.kinds[0] not in THINNED or probe.op in SHORT),
        # All ranks take part; with a single one the group is of that one.
        *(collective_probe(name, call) for name, call in COLLECTIVES.items()),
        Probe(DDP_KINDS, "ddp", _data_parallel, phase="backward", together=True),
    ]
    first = [probe for kind in BETWEEN_OPS for probe in around if probe.kinds[0] == kind]
    exchanges = [probe for probe in around if probe.kinds[0] == "collective_call"]
    others = [probe for probe in around if probe.kinds[0] not in (*BETWEEN_OPS, "collective_call")]
    return [
        *first, *op_probes(asked[:OFTEN]), *exchanges, *lookup_probes(), *others,
        *(python_probes(asked[:OFTEN]) if python else ()), *op_probes(asked[OFTEN:]),
        *(python_probes(asked[OFTEN:]) if python else ()),
    ]  # fmt: skip


def handful(chosen: Sequence[Probe], each: int = 2) -> list[Probe]:
    """The first few of every kind."""
    kept: dict[tuple[str, ...], list[Probe]] = {}
    for probe in chosen:
        kept.setdefault(probe.kinds, []).append(probe)
    return [probe for item in kept.values() for probe in item[:each]]
