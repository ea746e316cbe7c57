"""`captured_data_parallel`: DistributedDataParallel as it is, on tensors without data, with a reducer in Python behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as parallel

from steptime._capture.parallel.ddp_reducer import Reducer

_assignment_by_size: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

# Broadcasts of buffers in flight at once (torch/csrc/distributed/c10d/reducer.cpp, broadcast_coalesced).
_IN_FLIGHT = 2


@contextmanager
def captured_data_parallel() -> Iterator[None]:
    """While it lasts, DistributedDataParallel works on tensors without data and launches what it launches on CUDA."""
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (dist, "Reducer", Reducer),
            (dist, "Logger", _Silent),
            (dist, "_broadcast_coalesced", _broadcast_coalesced),
            (dist, "_register_comm_hook", lambda reducer, state, hook: reducer.set_comm_hook(state, hook)),
            (parallel, "_verify_param_shape_across_processes", lambda *_, **__: True),
            (parallel, "_sync_module_states", lambda *_, **__: None),
            (parallel, "_to_kwargs", _to_kwargs),
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
        torch.Tensor, lambda one: one.to(device.type) if one.device.type != device.type else one, (inputs, kwargs)
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
