"""The few host costs that tell how fast a host is: what a calibration measures, and what the lab's sweep builds on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import Optimizer

from steptime._calibrate.harness.session import watchdog
from steptime._models.kernels.call import Call, TensorArg
from steptime_lab.measure.host.bench import MOST_LAUNCHES, Action, HostBench, Probe, Times, burst_ns, less

Unary = Callable[[torch.Tensor], torch.Tensor]
Arguments = tuple[list[Any], dict[str, Any]]

# A call rarely launches more; those on lists of tensors are counted by their tensors.
LAUNCHES_PER_CALL = 4
# Lengths of a chain; a node launches at most 4 kernels, so that the longer one fits into the launch queue.
SHORT_CHAIN, LONG_CHAIN = 50, 200
# Parameters of an optimiser.
FEW, MANY = 10, 160
# A rank that waits longer than this for the others waits for one that failed.
WAIT_S = 30.0
COLLECTIVE_CALLS = 20


@dataclass(frozen=True)
class Form:
    """`shape` is that of its input; `make` gives the function of that input. A form that keeps the shape can be chained."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[torch.device], Unary]
    keeps_shape: bool = True

    def input(self, device: torch.device) -> torch.Tensor:
        """A fresh leaf that wants its gradient."""
        return torch.randn(self.shape, device=device, requires_grad=True)


def linear(device: torch.device, *, grads: bool = True, bias: bool = True) -> Unary:
    """A layer of 32 x 32."""
    weight, offset = (torch.randn(shape, device=device, requires_grad=grads) for shape in ((32, 32), (32,)))
    return lambda x: F.linear(x, weight, offset if bias else None)


LINEAR = Form("linear", (32, 32), linear)


def representative_probes() -> list[Probe]:
    """Most wanted first; together about a second."""
    square = TensorArg((32, 32), "float32")
    ops: Mapping[Call, Callable[[torch.Tensor], list[Any]]] = {
        Call("aten::add.Tensor", (square, square)): lambda x: [x, x.clone()],
        Call("aten::mm.default", (square, square)): lambda x: [x, x.clone()],
        Call("aten::view.default", (square, (1024,))): lambda x: [x, [1024]],
        Call("aten::cat.default", ((square, square),)): lambda x: [[x, x.clone()]],
    }
    return [
        *(op_probe("op", call, _overload, partial(_arguments, make)) for call, make in ops.items()),
        recording_probe(LINEAR),
        node_probe(LINEAR),
        optimizer_probe("adam_foreach", partial(torch.optim.Adam, lr=1e-3, foreach=True, fused=False)),
        Probe(("module_call", "module_call_fixed"), "nested", _nested, phase="forward"),
        Probe(("alloc",), "empty", _alloc),
        Probe(("launch", "op_without_launch"), "neg_out", _launch),
        Probe(("launch_to_return",), "neg_out", _launch_to_return),
        collective_probe("all_reduce", lambda whole, _part: partial(dist.all_reduce, whole)),
    ]


def _overload(name: str) -> Callable[..., Any]:
    base, _, overload = name.removeprefix("aten::").partition(".")
    result: Callable[..., Any] = getattr(getattr(torch.ops.aten, base), overload)
    return result


def _arguments(make: Callable[[torch.Tensor], list[Any]], device: torch.device) -> Arguments:
    return make(torch.randn(32, 32, device=device)), {}


def op_probe(
    kind: str,
    call: Call,
    lookup: Callable[[str], Callable[..., Any] | None],
    arguments: Callable[[torch.device], Arguments],
    *,
    source: str = "sweep",
    otherwise: Probe | None = None,
) -> Probe:
    """One call of an op that `lookup` finds by its name; arguments that are small stay alive from one pass to the next."""
    kept: list[Arguments] = []

    def measure(bench: HostBench) -> Times:
        if call.nbytes > _MOST_BYTES:
            raise MemoryError("arguments too large")
        function = lookup(call.op)
        assert function is not None
        args, kwargs = kept[0] if kept else arguments(bench.group.device)
        if not kept and call.nbytes <= _KEPT_BYTES:
            kept.append((args, kwargs))
        return (bench.per_op(function, *args, most_calls=most_calls_of(call), **kwargs),)

    return Probe((kind,), call.op, measure, call=call.to_json(), source=source, otherwise=otherwise)


# More than this is not made twice just to see what the CPU does meanwhile.
_MOST_BYTES = 512 << 20
_KEPT_BYTES = 1 << 20


def most_calls_of(call: Call) -> int:
    """How many calls surely fit into the launch queue: one on a list of tensors may launch for each of them."""
    lists = [value for value in call.args if isinstance(value, tuple) and any(isinstance(item, TensorArg) for item in value)]
    return max(1, MOST_LAUNCHES // max([LAUNCHES_PER_CALL, *map(len, lists)]))


def recording_probe(form: Form) -> Probe:
    """`op_autograd`: a form as models call it, recording the graph."""

    def measure(bench: HostBench) -> Times:
        device = bench.group.device
        return (bench.per_op(form.make(device), form.input(device)),)

    return Probe(("op_autograd",), form.name, measure, phase="forward")


def node_probe(form: Form) -> Probe:
    """`backward_node`: per node, its ops and the gradients of its weights included; `backward_call`: once per backward."""

    def measure(bench: HostBench) -> Times:
        return bench.at_two_sizes(chain(form, bench.group.device), SHORT_CHAIN, LONG_CHAIN)

    return Probe(("backward_node", "backward_call"), form.name, measure, phase="backward")


def chain(form: Form, device: torch.device) -> Callable[[int], Action]:
    """Sets up the backward pass through so many of a form in a row."""
    function = form.make(device)
    seed = torch.randn(form.shape, device=device)

    def make(length: int) -> Action:
        end = form.input(device)
        for _ in range(length):
            end = function(end)
        return partial(torch.autograd.backward, end, seed)

    return make


def optimizer_probe(name: str, make: Callable[..., Optimizer], most: int = MANY) -> Probe:
    """`optimizer_step`: per parameter, and once per step."""

    def measure(bench: HostBench) -> Times:
        result = {size: make(parameters(size, bench.group.device)) for size in (FEW, most)}
        return bench.at_two_sizes(lambda size: result[size].step, FEW, most)

    return Probe(("optimizer_step", "optimizer_step_fixed"), name, measure, phase="optimizer")


def parameters(count: int, device: torch.device) -> list[nn.Parameter]:
    """So many of 32 x 32, each with a gradient."""
    every = [nn.Parameter(torch.randn(32, 32, device=device)) for _ in range(count)]
    for parameter in every:
        parameter.grad = torch.randn_like(parameter)
    return every


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def _nested(bench: HostBench) -> Times:
    """One more module around a module."""
    x = torch.randn(32, 32, device=bench.group.device)

    def make(depth: int) -> Action:
        module: nn.Module = nn.Identity()
        for _ in range(depth):
            module = _Around(module)
        return partial(module, x)

    return bench.at_two_sizes(make, 10, 100, times=4 * bench.bursts)


def _alloc(bench: HostBench) -> Times:
    """A small tensor from the caching allocator and back."""
    return (bench.per_op(torch.empty, (32, 32), device=bench.group.device),)


def _launch(bench: HostBench) -> Times:
    """A launch is what an op on some elements costs more than on none, which launches nothing."""
    device = bench.group.device
    some, none = torch.randn(256, device=device), torch.empty(0, device=device)
    without = bench.per_op(torch.neg, none, out=torch.empty_like(none))
    return less(bench.per_op(torch.neg, some, out=torch.empty_like(some)), without), without


def _launch_to_return(bench: HostBench) -> Times:
    """From before the smallest op on an idle device until a synchronisation returns after it."""
    x = torch.randn(256, device=bench.group.device)
    out = torch.empty_like(x)

    def there_and_back() -> None:
        torch.neg(x, out=out)
        bench.synchronize()

    return (bench.per_call(there_and_back),)


def collective_probe(name: str, call: Callable[[torch.Tensor, torch.Tensor], Action]) -> Probe:
    """`collective_call`: the host's share of a small collective that is queued and not waited for.

    `call` gets a tensor with an equal piece for every rank, and such a piece. All ranks make equally many calls.
    """

    def measure(bench: HostBench) -> Times:
        join(bench)
        device = bench.group.device
        action = call(torch.randn(64 * dist.get_world_size(), device=device), torch.randn(64, device=device))
        times = []
        with watchdog(WAIT_S, name, bench.session):
            for number in range(1 + bench.bursts):
                bench.group.barrier()
                taken = burst_ns(action, COLLECTIVE_CALLS)
                if number:
                    times.append(taken)
            bench.group.barrier()
        return (times,)

    return Probe(("collective_call",), name, measure, together=True)


def join(bench: HostBench) -> None:
    """A process without a group makes one of itself alone."""
    if dist.is_initialized():
        return
    where = bench.group.device
    backend = "nccl" if where.type == "cuda" else "gloo"
    device_id = where if where.type == "cuda" else None
    dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, device_id=device_id)


def load(bench: HostBench, probes: Iterable[Probe]) -> None:
    """What takes a process seconds, once: its first optimiser imports the compiler, its first collective connects."""
    wanted = list(probes)
    if any(probe.kinds[0] in ("optimizer_step", "zero_grad", "ddp_forward") for probe in wanted):
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    if any(probe.together for probe in wanted):
        # Where there is no such library, the probes that need it will say so.
        with suppress(RuntimeError):
            join(bench)
            dist.all_reduce(torch.zeros(1, device=bench.group.device))
    bench.synchronize()
