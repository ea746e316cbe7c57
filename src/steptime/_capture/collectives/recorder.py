"""`GroupRecorder`: the recorder of one rank among many: collectives, sharded tensors and FSDP's copies beside plain ops."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from steptime._capture import answers
from steptime._capture.assemble import LEAF, Note
from steptime._capture.collectives.collectives import Collectives
from steptime._capture.collectives.ranges import Range
from steptime._capture.collectives.same import Called, called
from steptime._capture.parallel.sharded_copies import IN_PYTHON, SENDS_TABLE
from steptime._capture.record import Recorder
from steptime._capture.tensors import is_pretended, tensors_in

# Before the step that is noted, answered at once: FSDP cuts every weight into as many parts as there are ranks.
_CUTS = (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default)
_ASIDE = ("prim", "profiler")  # no work of a step
_PLAIN = torch._C._disabled_torch_dispatch_impl


class GroupRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Answers what one rank of a job calls."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self._wrappers: list[Any] = []
        self.listing = False
        self.calls: list[Called] = []  # by which ranks are compared

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op below autograd."""
        kwargs = kwargs or {}
        namespace = func.namespace
        if namespace in _ASIDE or any(issubclass(kind, FakeTensor) for kind in types):
            # With tensors that are PyTorch's own fakes, DTensor finds out how results are sharded: once, in the first step.
            return func(*args, **kwargs)
        if self.listing:
            self.calls.append(called(func, args, kwargs))
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            # A DTensor, or the result of a collective: its own class calls ops on what it wraps.
            if self._noting:
                self._note_wrapped(func, args, kwargs)
            return NotImplemented
        if namespace == "c10d":
            with self:
                return self._collectives.answer(func, args, kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self._collectives.waited(args[0])
            return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if namespace == "fsdp" and func._schema.name in IN_PYTHON:
            with self:
                return IN_PYTHON[func._schema.name](*args, **kwargs)
        if "out" in kwargs and func._schema.name in SENDS_TABLE:
            with self:
                SENDS_TABLE[func._schema.name](*args, **kwargs)
        if func in _CUTS and not self._noting and is_pretended(args[0]):
            return answers.answer(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_wrapped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes whose memory a tensor's is that has none of its own: that of its part on this rank."""
        # The observer knows a tensor by its address, which must not become another's.
        self._wrappers += [torch._C._WeakTensorRef(tensor) for tensor in tensors_in((args, kwargs))]  # type: ignore[attr-defined]
        note = Note(func._schema.name)
        with Range(f"{LEAF}{len(self.notes)}"):
            self.notes.append(note)
        rest = [kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]]
        note.inputs = [self._storage(_wrapped(tensor)) for tensor in tensors_in((args, rest))]


def _wrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside."""
    while type(tensor).__torch_dispatch__ is not _PLAIN:
        inside = tensor._local_tensor if isinstance(tensor, DTensor) else getattr(tensor, "elem", None)
        if not isinstance(inside, torch.Tensor):
            return tensor
        tensor = inside
    return tensor
