"""`captured_sharding`: FSDP2 and tensor parallelism (DTensor) on the pretended device.

Both are PyTorch's own code. A DTensor says where its part on this rank lies, FSDP's streams are those of `groups_streams`, and
random numbers are drawn without asking a device for the state of its generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, _dispatch, _random, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.overrides import TorchFunctionMode

from steptime._capture.tensors import is_pretended


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
        stack.enter_context(ShardedNames())
        yield


def _forget_shardings() -> None:
    """How results are sharded is kept with the mesh, and so with the process groups, of the rank that asked first."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    for kept in vars(_redistribute).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


_plain_new: Any = AsyncCollectiveTensor.__new__


def _new_result(kind: type[AsyncCollectiveTensor], inner: torch.Tensor) -> AsyncCollectiveTensor:
    """What a collective gives before it is waited for, on the device that C++ knows: there is no other in this build."""
    with torch._C.DisableTorchFunction():
        result: AsyncCollectiveTensor = _plain_new(kind, inner)
    return result


class ShardedNames(TorchFunctionMode):
    """Asked for its device, a DTensor answers as its part on this rank does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any function of PyTorch that Python calls."""
        del types
        if func in _PLACE and isinstance(args[0], DTensor):
            return func(args[0]._local_tensor)
        if func is torch.Tensor.__setitem__ and isinstance(args[2], int | float) and is_pretended(args[0]):
            # On CUDA a number that is put in place lies on the CPU (torch/csrc/autograd/python_variable_indexing.cpp).
            args = (args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
        return func(*args, **(kwargs or {}))


_PLACE = frozenset((
    torch.Tensor.device.__get__,
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.get_device,
))  # fmt: skip
