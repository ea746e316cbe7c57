"""What Inductor's wrapper code calls when it runs: memory, kernels, CUDA graphs; each noted, none run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from steptime._capture import answers
from steptime._capture.log import TraceRange
from steptime._capture.tensors import CUDA, is_pretended, unseen
from steptime._ops.generated import GeneratedKernel
from steptime._ops.triton_source import described

GRAPH = "cudagraph:"
"""Begins the name of the range in which is what a CUDA graph replays."""

_READ, _WRITTEN, _BOTH = "in_ptr", "out_ptr", "in_out_ptr"


def recorder() -> Any:
    """The mode that notes what the step does."""
    return next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if hasattr(mode, "launched"))


class PretendedKernel:
    """A kernel that Inductor wrote, in place of what Triton would compile from it."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self._source = name, source
        self._known: dict[tuple[tuple[str, int], ...], GeneratedKernel] = {}
        self._names: tuple[str, ...] = ()

    def run(self, *args: Any, stream: Any = None, grid: Any = None, **kwargs: Any) -> None:
        """One launch."""
        del stream, grid
        mode = recorder()
        values = self._values(args, kwargs)
        numbers = tuple((name, value) for name, value in values.items() if type(value) is int)
        kernel = self._known.get(numbers)
        if kernel is None:
            kernel = self._known[numbers] = described(self._source, dict(numbers))
        reads, writes = _divided(values)
        mode.launched(self, self.name, reads, writes, kernel.text())

    __call__ = run

    def _values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if not self._names:
            self._names = argument_names(self._source, self.name)
        return {**dict(zip(self._names, args, strict=False)), **kwargs}


def argument_names(source: str, name: str) -> tuple[str, ...]:
    """The arguments of a kernel, in order, those left out that Triton's compiler is told."""
    start = source.index(f"def {name}(") + len(f"def {name}(")
    given = source[start : source.index(")", start)].split(",")
    return tuple(each.strip() for each in given if ":" not in each)


def _divided(values: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that are read, and those that are written."""
    reads, writes = [], []
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and is_pretended(value):
            if not name.startswith(_WRITTEN):
                reads.append(value)
            if name.startswith((_WRITTEN, _BOTH)) or not name.startswith(_READ):
                writes.append(value)
    return reads, writes


def _kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> PretendedKernel:
    del device_str
    return PretendedKernel(name, source)


def _no_wait(_: Any, scope: dict[str, Any]) -> None:
    del scope


def _taken(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CUDA)


def _reinterpreted(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Another view of the same memory, which no trace shows."""
    if not is_pretended(tensor):
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
    modes = torch._C._DisableTorchDispatch, torch._C.DisableTorchFunction
    with unseen(), modes[0](), modes[1]():
        viewed: torch.Tensor = answers.viewed(
            torch.ops.aten.as_strided.default, (tensor.detach(), size, stride, tensor.storage_offset() + offset), {}
        )
    return viewed


class _NoGuard:
    """`torch.cuda._DeviceGuard`."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _SeededGenerator(torch.Generator):
    """The random generator of the device, of which the compiler keeps states: they are nobody's concern."""

    device = CUDA

    def clone_state(self) -> torch.Generator:
        return self

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, *_: Any) -> torch.Generator:
        return self


class _Replayed:
    """A graph as torch/_inductor/cudagraph_trees.py replays it: one call; before it, copies of inputs that are in no place of
    their own, and the random generator's seed and offset where it draws.

    What a graph made lies in the pool that all share, and is not copied for another.
    """

    def __init__(self, graphs: _Graphs, model: Callable[..., Any], static: Sequence[int]) -> None:
        self._graphs, self._model, self._static = graphs, model, frozenset(static)
        self._name = f"{GRAPH}{graphs.next()}"
        self._kept: dict[int, torch.Tensor] = {}
        self._state: tuple[torch.Tensor, ...] | None = None  # of the generator; None: not known yet

    def __call__(self, inputs: list[Any]) -> Any:
        """One replay."""
        moving = [place for place, each in enumerate(inputs) if place not in self._static and self._is_moving(each)]
        for place in moving:
            each = inputs[place]
            if place not in self._kept or self._kept[place].shape != each.shape:
                self._kept[place] = _taken(each.shape, each.stride(), each.dtype)
        with torch.no_grad():
            if moving:
                torch._foreach_copy_([self._kept[place] for place in moving], [inputs[place].detach() for place in moving])
        self._seed()
        given = [self._kept[place] if place in moving else each for place, each in enumerate(inputs)]
        inputs.clear()
        drawn = recorder().drawn
        with TraceRange(self._name):
            result = self._model(given)
        if self._state is None:
            self._state = tuple(_taken((), (), torch.int64) for _ in range(2)) if recorder().drawn > drawn else ()
            self._seed()  # a step is noted that is the first with this graph: better late than never
        self._graphs.made(self._name, result)
        return result

    def _seed(self) -> None:
        with torch.no_grad():
            for number in self._state or ():
                number.fill_(0)

    def _is_moving(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_pretended(value) and not self._graphs.hold(value)


class _Graphs:
    """The graphs of a process, and what they made last."""

    def __init__(self) -> None:
        self._count = 0
        self._made: dict[str, dict[int, StorageWeakRef]] = {}

    def next(self) -> int:
        """The number of a new one."""
        self._count += 1
        return self._count - 1

    def graphed(self, model: Callable[..., Any], static_input_idxs: Sequence[int] = (), **_: Any) -> Callable[..., Any]:
        """In place of Inductor's CUDA graphs."""
        return _Replayed(self, model, static_input_idxs)

    def made(self, name: str, values: Any) -> None:
        """Remembers what one made; references keep addresses of storages from being given again."""
        storages = [each.untyped_storage() for each in values or () if isinstance(each, torch.Tensor) and is_pretended(each)]
        self._made[name] = {each._cdata: StorageWeakRef(each) for each in storages}  # type: ignore[no-untyped-call]

    def hold(self, value: torch.Tensor) -> bool:
        """Whether a graph made this."""
        address = value.untyped_storage()._cdata
        return any(address in each for each in self._made.values())

    def of_backend(self, model: Callable[..., Any], _: Any, static_input_idxs: Sequence[int], **options: Any) -> Any:
        """The same as `backend="cudagraphs"` asks for it."""
        return self.graphed(model, static_input_idxs, **options)


def _with_state(op: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """An op that draws from a state that was kept: what it draws is nobody's concern."""
    del rng_state
    return op(*args, **kwargs)


def _with_given_state(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _keeping_state(op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.zeros(16, dtype=torch.uint8), op(*args, **kwargs)


# Ops that keep the state of the random generator for what is recomputed.
_RANDOM = {
    "graphsafe_run_with_rng_state": _with_state, "run_with_rng_state": _with_given_state,
    "run_and_save_rng_state": _keeping_state,
}  # fmt: skip


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while compiled code may run: object, attribute, and what stands in for it."""
    from torch._inductor import async_compile, compile_fx  # noqa: PLC0415 (it takes seconds to import)

    guards = torch._C._dynamo.guards
    yield async_compile.AsyncCompile, "triton", _kernel
    yield async_compile.AsyncCompile, "wait", _no_wait
    yield guards, "_empty_strided_cuda", _taken
    yield guards, "_reinterpret_tensor", _reinterpreted
    yield torch._C, "_cuda_getCurrentRawStream", lambda *_: 0
    yield torch.cuda, "_DeviceGuard", _NoGuard
    import_module("torch._prims.rng_prims")  # which makes them
    yield from ((torch.ops.higher_order, name, stand_in) for name, stand_in in _RANDOM.items())
    yield torch.cuda, "default_generators", (_SeededGenerator(),)
    graphs = _Graphs()
    yield compile_fx, "cudagraphify", graphs.graphed
    yield import_module("torch._inductor.cudagraph_trees"), "cudagraphify_impl", graphs.of_backend
