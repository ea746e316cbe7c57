"""DistributedDataParallel as it is, on tensors without data, with a reducer in Python behind it.

PyTorch's reducer (torch/csrc/distributed/c10d/reducer.cpp) needs tensors with data. The one here does the same in the same
order on tensors without: it divides every gradient into its bucket as it becomes ready, reduces full buckets in order, and
after backward copies them back. Buckets are assigned by PyTorch's own function, anew in the order of readiness after the first
backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import distributed as parallel

from steptime._capture.log import TraceRange
from steptime.errors import InputError

Hook = Callable[[Any, Any], Any]

_assignment_by_size: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

# Broadcasts of buffers in flight at once (torch/csrc/distributed/c10d/reducer.cpp, broadcast_coalesced).
_IN_FLIGHT = 2


_NCCL, _CUDA = (2, 27, 3), "12.8"  # of builds with CUDA of these days


@contextmanager
def captured_data_parallel() -> Iterator[None]:
    """While it lasts, DistributedDataParallel works on tensors without data and launches what it launches on CUDA."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (dist, "Reducer", PythonReducer),
            (dist, "Logger", _Silent),
            (dist, "_broadcast_coalesced", _broadcast_coalesced),
            (dist, "_register_comm_hook", lambda reducer, state, hook: reducer.set_comm_hook(state, hook)),
            (parallel, "_verify_param_shape_across_processes", lambda *_, **__: True),
            (parallel, "_sync_module_states", lambda *_, **__: None),
            (parallel, "_to_kwargs", _to_kwargs),
            # Hooks that send bfloat16 ask for the versions of CUDA and NCCL.
            (dist, "is_nccl_available", lambda: True),
            (torch.cuda.nccl, "version", lambda: _NCCL),
            (torch.version, "cuda", _CUDA),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


class _Silent:
    """Stands for PyTorch's logger of DistributedDataParallel."""

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _to_kwargs(inputs: Any, kwargs: Any, device: torch.device, side_stream: bool) -> tuple[Any, Any]:
    """Inputs on the device of the module: those that are not go there, the others stay as they are."""
    del side_stream
    moved = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device.type) if tensor.device.type != device.type else tensor, (inputs, kwargs)
    )
    return (moved[0],), (moved[1],)


def _broadcast_coalesced(group: Any, tensors: Sequence[torch.Tensor], size: int, root: int = 0) -> None:
    """Tensors of one kind side by side, sent from the root, and back to where they were."""
    assignment, _ = _assignment_by_size(list(tensors), [size])
    flying: deque[tuple[Any, torch.Tensor, list[torch.Tensor]]] = deque()
    with torch.no_grad():
        for indices in assignment:
            if len(flying) >= _IN_FLIGHT:
                _finish(*flying.popleft())
            chosen = [tensors[index] for index in indices]
            flat = torch._C._nn.flatten_dense_tensors(chosen)
            flying.append((dist.broadcast(flat, group=group, group_src=root, async_op=True), flat, chosen))
        for each in flying:
            _finish(*each)


def _finish(work: Any, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    work.wait()
    for tensor, sent in zip(tensors, torch._C._nn.unflatten_dense_tensors(flat, list(tensors)), strict=True):
        tensor.copy_(sent, non_blocking=True)


@dataclass
class Bucket:
    """Gradients that are reduced together, one after another in `buffer`. Comm hooks see it as PyTorch's `GradBucket`."""

    number: int
    indices: list[int]
    variables: list[torch.Tensor]
    buffer_: torch.Tensor
    last: bool
    views: list[torch.Tensor] = field(default_factory=list)
    pending: int = 0
    result: Any = None

    def __post_init__(self) -> None:
        self.views = list(self.views_of(self.buffer_))

    def views_of(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """One view per variable, laid out as the variable is."""
        offset = 0
        for variable in self.variables:
            yield flat.as_strided(variable.shape, variable.stride(), offset)
            offset += variable.numel()

    def index(self) -> int:
        """Its place among the buckets."""
        return self.number

    def buffer(self) -> torch.Tensor:
        """All gradients as one tensor."""
        return self.buffer_

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Another tensor in place of the buffer, as comm hooks may set it."""
        self.buffer_ = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of the buffer."""
        return list(self.views)

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients they are."""
        return list(self.variables)

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self.last


class PythonReducer:
    """Stands where `torch.distributed.Reducer` does. Arguments as PyTorch gives them, from 2.11 to 2.13."""

    def __init__(self, params: Sequence[torch.Tensor], assignment: Sequence[Sequence[int]], *rest: Any) -> None:
        # Limits per bucket, group, which gradients are sparse, largest bucket, whether to look for unused parameters, whether
        # gradients are views of buckets, names of parameters, first bucket; of the others none changes what is launched.
        _, process_group, sparse, bucket_bytes_cap, find_unused, as_view, _, first_bucket_bytes_cap, *_ = rest
        if any(sparse):
            raise InputError(
                "DistributedDataParallel over a module with sparse gradients cannot be captured; make the embedding dense, "
                "or leave it out with _ddp_params_and_buffers_to_ignore"
            )
        self._params = list(params)
        self._group = process_group
        self._caps = (first_bucket_bytes_cap, bucket_bytes_cap)
        self._find_unused = bool(find_unused)
        self._as_view = bool(as_view)
        self._static = False
        self._ready: list[int] | None = []  # order of the first backward pass; None once buckets follow it
        self._hook: tuple[Any, Hook] | None = None
        self._expecting = False
        self._first_static_pass = False
        # A number that PyTorch wraps in a double of the CPU for every gradient.
        self._factor = torch.tensor(1.0 / dist.get_world_size(process_group), dtype=torch.float64, device="cpu")
        self._used = torch.zeros(len(self._params), dtype=torch.int32, device="cpu")
        self._used_on_device = torch.zeros(len(self._params), dtype=torch.int32, device=self._params[0].device)
        self._unused: list[int] = []
        self._buckets: list[Bucket] = []
        self._assign(assignment)
        self._nodes = [self._watch(index, param) for index, param in enumerate(self._params)]

    def _watch(self, index: int, param: torch.Tensor) -> Any:
        with torch.enable_grad():
            function = param.expand_as(param).grad_fn
        assert function is not None
        node = function.next_functions[0][0]
        assert node is not None
        # Behind the node that accumulates, where PyTorch's reducer has its own hook.
        node.register_hook(lambda *_: self._on_gradient(index))
        return node

    def _assign(self, assignment: Sequence[Sequence[int]]) -> None:
        self._buckets = []
        self._position_of: dict[int, tuple[Bucket, int]] = {}
        for number, indices in enumerate(assignment):
            variables = [self._params[index] for index in indices]
            item = variables[0]
            flat = torch.empty(sum(each.numel() for each in variables), dtype=item.dtype, device=item.device)
            bucket = Bucket(number, list(indices), variables, flat, number == len(assignment) - 1)
            self._buckets.append(bucket)
            self._position_of.update({index: (bucket, position) for position, index in enumerate(indices)})

    def _follow_readiness(self) -> None:
        """Once, after the first backward pass: buckets in the order in which gradients became ready."""
        if not self._ready or (self._find_unused and not self._static):
            return
        order = self._ready
        self._ready = None
        limits = list(dict.fromkeys(self._caps))
        chosen = [self._params[index] for index in order]
        assignment, _ = _assignment_by_size(chosen, limits, [False] * len(chosen), order)
        self._assign(assignment)

    def _rebuild_buckets(self) -> bool:
        """Whether buckets are made anew before this forward pass: they are after backward."""
        return False

    def prepare_for_forward(self) -> None:
        """Nothing to do without timers."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect every gradient once; with outputs, those that they do not depend on never come."""
        self._expecting = True
        self._next = 0
        for bucket in self._buckets:
            bucket.pending = len(bucket.indices)
        self._unused = []
        if outputs:
            with TraceRange("torch.distributed.ddp.reducer::search_unused_parameters"):
                reached = _leaves(outputs)
            self._unused = [index for index, node in enumerate(self._nodes) if node not in reached]
        self._first_static_pass = self._static and self._ready is not None

    def _on_gradient(self, index: int) -> None:
        if not self._expecting:
            return
        if self._ready is not None:
            self._ready.append(index)
        if self._first_static_pass:
            return
        if self._find_unused:
            self._used[index].fill_(1)
        for unused in self._unused:
            self._mark(unused)
        self._unused = []
        self._mark(index)

    def _mark(self, index: int) -> None:
        bucket, position = self._position_of[index]
        self._fill(self._params[index], bucket.views[position])
        bucket.pending -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._reduce(self._buckets[self._next])
            self._next += 1
        if self._next == len(self._buckets):
            self._finish_soon()

    def _fill(self, param: torch.Tensor, view: torch.Tensor) -> None:
        gradient = param.grad
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif gradient.untyped_storage()._cdata == view.untyped_storage()._cdata:
                if self._hook is None:
                    view.div_(1.0 / float(self._factor))
            else:
                self._copy_in(gradient, view)
                if self._as_view:
                    param.grad = view

    def _copy_in(self, gradient: torch.Tensor, view: torch.Tensor) -> None:
        if self._hook is None:
            with TraceRange("torch::distributed::reducer::mul_out", view):
                torch.mul(gradient, self._factor, out=view)
        else:
            with TraceRange("torch::distributed::reducer::copy_", view):
                view.copy_(gradient)

    def _reduce(self, bucket: Bucket) -> None:
        if self._hook is None:
            dist.all_reduce(bucket.buffer_, group=self._group, async_op=True)
        else:
            bucket.result = self._hook[1](self._hook[0], bucket)

    def _finish_soon(self) -> None:
        if self._find_unused:
            # The map of used parameters goes to the device through pinned memory and is reduced beside the gradients.
            staged = torch.empty_strided(self._used.shape, self._used.stride(), dtype=torch.int32, device="cpu")
            staged.copy_(self._used)
            self._used_on_device.copy_(staged, non_blocking=True)
            dist.all_reduce(self._used_on_device, group=self._group, async_op=True)
        Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._expecting = False
        self._empty_buckets()
        # PyTorch does it when the next forward pass begins, once in the life of a model: no part of a step that repeats.
        self._follow_readiness()

    def _empty_buckets(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                flat = bucket.buffer_ if bucket.result is None else _value(bucket.result)
                views = list(bucket.views_of(flat))
                self._copy_out(bucket, views)
                bucket.result = None

    def _copy_out(self, bucket: Bucket, views: Sequence[torch.Tensor]) -> None:
        for variable, view in zip(bucket.variables, views, strict=True):
            gradient = variable.grad
            if gradient is None or (self._as_view and self._hook is None):
                continue
            with TraceRange("torch.distributed.ddp.reducer::copy_bucket_to_grad", variable):
                gradient.copy_(view)

    def _delay_all_reduce(self) -> None:
        """The first pass of a static graph: everything is reduced at the end of backward."""
        self._first_static_pass = False
        for index in range(len(self._params)):
            self._mark(index)

    def _set_static_graph(self) -> None:
        self._static = True

    def set_comm_hook(self, state: Any, hook: Hook) -> None:
        """What reduces a bucket in place of an all_reduce."""
        self._hook = (state, hook)

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Timers, logs and what joins uneven inputs: nothing of it is part of a step.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _value(future: Any) -> torch.Tensor:
    value = future.wait() if hasattr(future, "wait") else future
    flat: torch.Tensor = value[0] if isinstance(value, list | tuple) else value
    return flat


def _leaves(outputs: Sequence[torch.Tensor]) -> set[Any]:
    """The nodes of the graph behind these tensors."""
    open_nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set(open_nodes)
    while open_nodes:
        for node, _ in open_nodes.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                open_nodes.append(node)
    return seen
