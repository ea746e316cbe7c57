"""What is known of an op whatever it is called with, asked once per op: a step has tens of thousands, of some hundred kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey

from steptime._capture import answers, sparse
from steptime._capture.contents import CONTENTS
from steptime._capture.known import INDEXED, OVERWRITES, picks, writes_numbers
from steptime._capture.reads import compares
from steptime._capture.routing import ROUTES
from steptime._capture.switches import is_switched
from steptime._ops.catalogue import op_kind

_COMPOSITES = (DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd)
# The CPU has kernels for these, CUDA makes them of views and a copy (native_functions.yaml).
_SHUFFLES = ("aten::pixel_shuffle", "aten::pixel_unshuffle")
_SHUFFLED = DispatchKey.CompositeExplicitAutogradNonFunctional


@dataclass(frozen=True, slots=True)
class OpTraits:
    """One op of PyTorch."""

    func: Any  # kept, so that no other op gets its identity
    name: str
    arguments: tuple[str, ...]  # their names, in order
    composite: DispatchKey | None  # the key of the kernel by which PyTorch makes it of others, where CUDA has none of its own
    mutable: bool
    across_devices: bool  # its tensors may lie on different devices
    namespace: str
    views: bool  # its first argument, and does nothing else
    makes_sparse: bool
    is_range: bool  # begins or ends around whatever comes, as an optimiser's step
    is_copy: bool  # to the host, it hands over values
    is_sum: bool  # autograd writes sums of gradients over their first argument
    indexed: bool
    hands_over: bool  # values of the device, to the host
    picks: bool
    routes: bool
    compares: bool
    writes_numbers: bool  # that are in its arguments
    overwrites: bool  # whatever was there before
    has_contents: bool
    switched: bool  # some switch of PyTorch concerns it
    draws: bool  # random numbers: attention if it drops anything


_known: dict[int, OpTraits] = {}  # by identity: PyTorch keeps its ops for good, and hashes them in Python


def traits_of(func: Any) -> OpTraits:
    """What is known of an op."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _traits(func)
    return found


def _traits(func: Any) -> OpTraits:
    name: str = func._schema.name
    is_copy = func is torch.ops.aten.copy_.default
    return OpTraits(
        func,
        name,
        tuple(argument.name for argument in func._schema.arguments),
        _composite(func),
        func._schema.is_mutable,
        op_kind(name).across_devices,
        func.namespace,
        views=answers.is_view(func),
        makes_sparse=sparse.makes(func),
        is_range=func.namespace == "profiler",
        is_copy=is_copy,
        is_sum=func is torch.ops.aten.add.Tensor,
        indexed=func in INDEXED,
        hands_over=not is_copy and torch.Tag.data_dependent_output in func.tags,
        picks=picks(func),
        routes=func in ROUTES,
        compares=compares(name),
        writes_numbers=writes_numbers(func),
        overwrites=func in OVERWRITES,
        has_contents=name in CONTENTS,
        switched=is_switched(name),
        draws=torch.Tag.nondeterministic_seeded in func.tags and not name.endswith("_backward"),  # which uses numbers again
    )


def _composite(func: Any) -> DispatchKey | None:
    if not torch._C._dispatch_has_kernel(func.name()) or answers.has_kernel(
        func
    ):  # sizes of tensors that wrap others are no ops
        return None
    keys = (_SHUFFLED,) if func._schema.name in _SHUFFLES else _COMPOSITES
    return next((key for key in keys if func.has_kernel_for_dispatch_key(key)), None)
