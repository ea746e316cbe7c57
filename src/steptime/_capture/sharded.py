"""FSDP2 and tensor parallelism (DTensor) on the pretended device.

Both are PyTorch's own code. A DTensor says where its part on this rank lies, and random numbers are drawn without asking a
device for the state of its generator. What FSDP2 calls to put parameters and gradients side by side is one kernel over blocks
of 2 KiB, to which the host first sends a table of addresses and blocks. The lengths of the tables are those of torch 2.11 in
execution traces of four sharded steps on an H200 (3 to 12 parameters, 1 to 4 ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.distributed.tensor import DTensor, _dispatch, _random, _redistribute, _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import single_dim_strategy
from torch.distributed.tensor._ops import utils as strategies
from torch.distributed.tensor.placement_types import _StridedShard

from steptime._capture.tensors import META
from steptime._hardware.device import reference_device

_BLOCK_BYTES = 2048
_BLOCK_THREADS = 128


@contextmanager
def captured_sharding() -> Iterator[None]:
    """While it lasts, modules can be sharded over meshes of pretended devices."""
    _forget_shardings()
    with ExitStack() as stack:
        stack.callback(_forget_shardings)
        for module in (_dispatch, _random):
            stack.enter_context(patch.object(module, "is_rng_supported_mesh", lambda _: False))
        # FSDP makes a mesh of it where it is given none.
        stack.enter_context(patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda")))
        # In hooks of backward no mode answers for `cuda`: FSDP asks for the streams of `meta` there.
        stack.enter_context(patch.object(torch, "meta", torch.cuda, create=True))
        stack.enter_context(patch.object(AsyncCollectiveTensor, "__new__", staticmethod(_new_result)))
        propagator = _sharding_prop.ShardingPropagator
        stack.enter_context(patch.object(propagator, _RESULT, _where_there_is_one(getattr(propagator, _RESULT))))
        flagged = getattr(_sharding_prop, _FLAG, None)
        if flagged is not None:
            stack.enter_context(patch.object(_sharding_prop, _FLAG, _looked_up_once(flagged)))
        for module, name in _PER_TENSOR:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, _asked_once(getattr(module, name))))
        if hasattr(_fsdp_param, _PARTS):
            stack.enter_context(patch.object(_fsdp_param, _PARTS, _Parts))
        yield


def _forget_shardings() -> None:
    """How results are sharded is kept with the mesh, and so with the process groups, of the rank that asked first."""
    # As torch.distributed.tensor.debug does, which imports the compiler.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
    torch._C._clear_DTensor_sharding_propagator_cache()
    for cached in vars(_redistribute).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


_RESULT = "_propagate_tensor_meta_non_cached"


def _where_there_is_one(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor calls an op on fakes for the shape of its result: a fused optimiser too, which takes thousands and gives none."""
    return lambda self, schema: propagate(self, schema) if schema.op._schema.returns else None


_FLAG = "_propagate_use_strided_shard_flag"


def _looked_up_once(propagate: Callable[..., None]) -> Callable[..., None]:
    """DTensor goes through all tensors of a call for each of them, which a fused optimiser of a large model has thousands of.

    It looks for one flag of those whose shards are strided: one tensor for either value says as much as all.
    """
    last: list[Any] = [None, None]  # the call that was asked about, and what stands for it

    def call(strategy: Any, schema: Any) -> None:
        if schema is not last[0]:
            specs = (spec for spec in schema.args_spec if any(isinstance(each, _StridedShard) for each in spec.placements))
            flags = {spec.use_strided_shard_as_shard_order: spec for spec in specs}
            last[:] = schema, SimpleNamespace(args_spec=tuple(flags.values()))
        propagate(strategy, last[1])

    return call


# How one tensor of a list may be sharded; both are given the call as it is of that tensor alone.
_PER_TENSOR = ((single_dim_strategy, "_PreparedSingleDimStrategy"), (strategies, "expand_to_full_mesh_op_strategy"))


def _asked_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor finds out for every tensor of a list how it may be sharded: alike for those of equal layers."""
    known: dict[Any, tuple[Any, Any]] = {}  # answers, and what was asked: identities stay what they are

    def call(*args: Any, **kwargs: Any) -> Any:
        key = tuple([_sharding(each) for each in (*args, *kwargs.values())])
        if key not in known:
            known[key] = function(*args, **kwargs), (args, kwargs)
        return known[key][0]

    return call


def _sharding(value: Any) -> Any:
    """What an answer depends on: how the tensors of a call are sharded, and its other arguments."""
    if not isinstance(value, OpSchema):
        return id(value)
    arguments = (
        tuple(each.output_spec for each in argument.strategies) if isinstance(argument, OpStrategy) else id(argument)
        for argument in value.args_schema
    )
    return (id(value.op), id(value.kwargs_schema), *arguments)


_PARTS = "_chunk_with_empty"


class _Parts:
    """A weight cut into as many parts as there are ranks, when it is sharded: FSDP asks for this rank's and the first."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = max(1, -(tensor.shape[dim] // -num_chunks))

    def __getitem__(self, rank: int) -> torch.Tensor:
        begin, whole = rank * self._length, self._tensor.shape[self._dim]
        if begin >= max(whole, 1):
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._length, whole - begin))


_plain_new: Any = AsyncCollectiveTensor.__new__


def _new_result(kind: type[AsyncCollectiveTensor], inner: torch.Tensor) -> AsyncCollectiveTensor:
    """What a collective gives before it is waited for, on the device that C++ knows: there is no other in this build."""
    with torch._C.DisableTorchFunction():
        result: AsyncCollectiveTensor = _plain_new(kind, inner)
    return result


def _blocks(sizes: Sequence[int]) -> int:
    """Blocks for parts of these many bytes."""
    whole = sum(-(size // -_BLOCK_BYTES) for size in sizes)
    # More blocks than run at once take several turns.
    gpu = reference_device()
    at_once = int(gpu.sms.value * gpu.threads_per_sm.value) // _BLOCK_THREADS
    turns = max(1, -(whole // -at_once))
    return sum(-(size // (-_BLOCK_BYTES * turns)) for size in sizes)


def _send_table(length: int) -> None:
    table = torch.empty(length, dtype=torch.int64, device="cpu")
    torch.ops.aten.to.dtype_layout(table, device=META, non_blocking=True)


def send_table_of_split(source: torch.Tensor, sizes: Sequence[int], *_: Any, **__: Any) -> None:
    """Four numbers per part, one more, and the part of every block (`split_with_sizes_copy`)."""
    _send_table(_blocks([size * source.element_size() for size in sizes]) + 4 * len(sizes) + 1)


def send_table_of_cat(tensors: Sequence[torch.Tensor], dim: int, chunks: int, *, out: torch.Tensor) -> None:
    """Six numbers per tensor, two more, and the tensor of every block (`_chunk_cat`)."""
    del dim
    sizes = [-(tensor.numel() // -chunks) * out.element_size() for tensor in tensors]
    _send_table(_blocks(sizes) + 6 * len(tensors) + 2)


SENDS_TABLE: dict[str, Callable[..., None]] = {
    "aten::split_with_sizes_copy": send_table_of_split,
    "aten::_chunk_cat": send_table_of_cat,
}
"""By op, what the host sends before the kernel starts."""

IN_PYTHON: dict[str, Callable[..., Any]] = {
    "fsdp::all_gather_copy_in": _fsdp_collectives.all_gather_copy_in_cuda,
    "fsdp::split_with_sizes_copy": _fsdp_collectives.split_with_sizes_copy,
    "fsdp::chunk_cat": _fsdp_collectives.chunk_cat,
}
"""FSDP's own ops, which are Python on CUDA."""
