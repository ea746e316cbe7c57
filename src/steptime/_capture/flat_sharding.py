"""`FullyShardedDataParallel` (FSDP1) on the pretended device.

It is PyTorch's own code: parameters of a module lie one after the other in a flat one, of which every rank keeps a part.
Patched is what asks for addresses. Gathering a flat parameter gets the frame that FSDP2 has around a gather: what is in it goes
ahead of compute on streams of its own, and takes memory that was given back without an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp import _common_utils, _flat_param, _runtime_utils, _unshard_param_utils

from steptime._capture.log import TraceRange
from steptime._ops.catalogue import FLAT_GATHER


@contextmanager
def captured_flat_sharding() -> Iterator[None]:
    """While it lasts, modules can be wrapped."""
    with ExitStack() as stack:
        for module in (_common_utils, _flat_param, _runtime_utils, _unshard_param_utils):
            for name, stand_in in _STAND_INS.items():
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, stand_in))
        yield


def _framed(unshard: Callable[..., None]) -> Callable[..., None]:
    def run(state: Any, handle: Any, *streams: Any) -> None:
        if handle is None or not handle.needs_unshard():
            unshard(state, handle, *streams)
            return
        with TraceRange(FLAT_GATHER):
            unshard(state, handle, *streams)

    return run


_STAND_INS: dict[str, Callable[..., Any]] = {
    "_no_dispatch_record_stream": lambda *_: None,
    "_data_ptr_allocated": lambda tensor: tensor.untyped_storage().nbytes() > 0,
    "_same_storage": lambda one, other: one.untyped_storage()._cdata == other.untyped_storage()._cdata,
    "_unshard": _framed(_runtime_utils._unshard),
}
