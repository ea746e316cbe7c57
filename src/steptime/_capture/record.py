"""What one step of a training function does, on a machine without a GPU: `observed` under a `Recorder`.

PyTorch's own observer writes the trace: names, nesting, autograd's nodes, optimiser ranges are those it records anywhere. Two
modes lie over the run. `steptime._capture.device` lets the code believe in a GPU; the dispatch mode here answers every op
below autograd with the shapes of PyTorch's meta functions, runs what PyTorch makes of several ops (CompositeExplicitAutograd
kernels) as PyTorch does, and notes which storages each op takes and makes, since tensors without memory have no addresses.

A collective gets in like any op: what `torch.distributed` calls is seen by the observer if it goes through the dispatcher
(`c10d::` ops), and a `record_param_comms` node is one that whatever stands for the process group records itself; nodes that the
modes do not know are kept as they are, with their arguments, and `steptime._program.formats.execution_trace` reads them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._meta_registrations  # shapes of ops whose meta functions are written in Python
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode

from steptime._capture import answers, refusals, sparse
from steptime._capture.assemble import HOST, LEAF, Note
from steptime._capture.contents import contents_of
from steptime._capture.known import TRUTHS, Known, fills, where_true
from steptime._capture.log import TraceRange
from steptime._capture.pinned import waits_for_pageable
from steptime._capture.reads import Reads
from steptime._capture.steady import LoopPart
from steptime._capture.switches import switches_at
from steptime._capture.tensors import META, address, is_dense, is_pretended, is_wrapper, tensors_in, tensors_of, unseen, wrapped
from steptime._capture.traits import OpTraits, traits_of


def observed(step: Callable[[], object]) -> bytes:
    """What PyTorch's observer writes of one call."""
    observation = Observation()
    try:
        step()
    finally:
        data = observation.end()
    return data


class Observation:
    """What PyTorch's observer writes from here on."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="steptime")
        self._file = Path(self._folder.name) / "trace.json"
        self._observer = ExecutionTraceObserver()
        self._observer.register_callback(str(self._file))
        self._observer.start()

    def end(self) -> bytes:
        """What it wrote up to here."""
        self._observer.stop()
        self._observer.unregister_callback()
        with self._folder:
            return self._file.read_bytes()


_NO_STORAGE = 0  # of a sparse tensor, whose parts have one each
# PyTorch's own, without types.
_WEAK_STORAGE: Any = StorageWeakRef
_WEAK_TENSOR: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]
_apply: Any = vars(torch.autograd.Function)["apply"].__func__
_USES: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ops of the pretended device, and notes their storages while it is told to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self.reads = Reads()
        self.known = Known()
        self._digests = (0, 0, 0)  # of the calls since the last part ended: with shapes, without, and how many
        self._noting = False
        self.in_loop = True  # a loop may be under way, whose iterations are told by what they call
        self.keeps_storages = True
        self.drawn = 0  # ops so far that drew random numbers
        self._held: dict[int, Any] = {}  # keeps addresses of storages from being given again
        self._storages: dict[int, tuple[Any, int]] = {}  # storages from before the step, with their bytes
        self._weak: list[Any] = []  # the same for tensors
        # A function, not a method, which a class method would pass on without the class.
        applied = classmethod(lambda *args, **kwargs: self._applied(*args, **kwargs))  # noqa: PLW0108
        self._keeping = patch.object(torch.autograd.Function, "apply", applied)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled meanwhile; PyTorch's wrapper costs as much as a small op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As PyTorch asks for it: what is compiled does not depend on this mode."""
        return True

    def launched(self, kernel: Any, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], text: str) -> None:
        """A kernel that a compiler wrote, with what it reads and writes and what else is known of it."""
        if self.in_loop:
            self.digest(kernel, [*reads, *writes])
        if not self._noting:
            return
        with torch._C.DisableTorchFunction(), TraceRange(name, *reads, *writes, text):
            note = Note(name, reads=len(reads))
            with TraceRange(f"{LEAF}{len(self.notes)}"):
                self.notes.append(note)
                note.inputs = [self._storage(tensor) for tensor in (*reads, *writes)]

    def noting(self) -> Any:
        """While it lasts, ops are noted."""
        return _Switched(self)

    def begin(self) -> None:
        """Forgets what was noted and digested so far, and notes from here on."""
        self.notes, self._held, self._weak = [], {}, []
        self.reads.lines.clear()
        self.reads.picked.clear()
        self.known.said.clear()
        if not self._noting:
            self._keeping.start()
        self._noting = True

    def end(self) -> None:
        """Notes no longer."""
        if self._noting:
            self._keeping.stop()
        self._noting = False

    def _applied(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A function of autograd written in Python: the observer sees its arguments, which no op below autograd may take."""
        self._weak += [_WEAK_TENSOR(tensor) for tensor in tensors_in(args)]
        return _apply(function, *args, **kwargs)

    def kept(self) -> Any:
        """What else belongs to what was noted."""

    def list_calls(self) -> None:
        """Lists calls from here on, those before forgotten, where ranks are to be compared."""

    def end_calls(self) -> None:
        """Lists no more."""

    def digest(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """One more call."""
        exact, names, count = self._digests
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._digests = (hash((exact, id(func), *shapes)), hash((names, id(func))), count + 1)

    def part(self, optimizer: int) -> LoopPart:
        """What was called since the last part ended, up to the step of an optimiser."""
        digests, self._digests = self._digests, (0, 0, 0)
        return LoopPart(*digests, optimizer)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One op below autograd."""
        if not types and not self._noting and traits_of(func).views and is_dense(args[0]):
            return self._viewed(func, args, kwargs or {})
        if types and any(map(is_wrapper, types)):
            # A DTensor, a nested tensor, the result of a collective: its own class calls ops on what it wraps.
            if self._noting:
                self._note_wrapped(func, args, kwargs or {})
            return NotImplemented
        # The other mode, which knows the device by its name in Python, has nothing to say here.
        with torch._C.DisableTorchFunction():
            return self._run(func, args, dict(kwargs) if kwargs else {})

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Views before the step that is noted, in one go: what they are made of does not matter there."""
        with torch._C.DisableTorchFunction():
            if address(args[0]) not in self._storages:
                self._remember(args[:1])
            return answers.viewed(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = traits_of(func)
        if op.is_range:
            return func(*args, **kwargs)
        if op.draws:
            self.drawn += {**dict(zip(op.arguments, args, strict=False)), **kwargs}.get("dropout_p") != 0
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs["device"] = device = META
        tensors = tensors_of(args, kwargs)
        away = [each for each in tensors if not is_dense(each)]
        of_sparse = op.makes_sparse or (bool(away) and any(map(sparse.is_sparse, away)))
        away = [each for each in away if not is_pretended(each)]
        if len(away) == len(tensors) and (device is None or device.type != "meta"):
            return self._on_host(func, args, kwargs)
        # What is filled with a number is made in one go where nobody looks at what it is made of.
        filled = op.writes_numbers and not (self._noting or self.in_loop or of_sparse)
        if op.composite is not None and not filled and not (of_sparse and sparse.has_kernel(func)):
            return self._called(func._op_dk, op.composite, *args, **kwargs)
        if op.indexed and any(each.dtype in TRUTHS for each in tensors_in(args[1])) and not fills(args):
            # As PyTorch does it: where a mask is true, in whole numbers.
            args = (args[0], self._called(where_true, args[1]), *args[2:])
            tensors = tensors_of(args, kwargs)
        if self.in_loop and not op.views:
            self.digest(func, tensors)
        if away and not op.across_devices:
            args, kwargs = self._on_device(op, args, kwargs)
            tensors = tensors_of(args, kwargs)
        inside = sparse.contents_of(func, self.known) if of_sparse else contents_of(func, args) if op.has_contents else None
        if self._noting:
            return self._noted(op, args, kwargs, tensors, inside, here=not away, of_sparse=of_sparse)
        if inside:
            return self._inside(inside, op, args, kwargs)
        return self._answer(op, args, kwargs, tensors, here=not away, of_sparse=of_sparse)

    def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function gives whose ops are answered here too: as in `with self`, in a fifth of the time."""
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._pop_torch_dispatch_stack(None)

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op that has nothing to do with the device."""
        if self._noting:
            note = Note(func._schema.name)
            with TraceRange(f"{HOST}{len(self.notes)}"):
                self.notes.append(note)
                note.inputs = [self._storage(tensor) for tensor in tensors_of(args, kwargs)]
                result = func(*args, **kwargs)
            note.outputs = [self._storage(tensor) for tensor in tensors_in(result)]
            return result
        if answers.is_large(func, args, kwargs):
            # It is made before the step, so that a model is on its way to the device; the CPU may not have the memory.
            result = answers.answer(func, args, {**kwargs, "device": META})
            self._remember([result])
            return result
        return func(*args, **kwargs)

    def _on_device(self, op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an op that takes a tensor of the CPU together with one of the device, which it may not."""
        away = next((each for each in tensors_of(args, kwargs) if each.dim() and not is_pretended(each)), None)
        if away is None:
            return args, kwargs
        if away.layout is not torch.strided:
            raise refusals.only_gradients()
        if self._noting or op.mutable:
            raise refusals.on_two_devices(op.name, away)
        # A model that is tried out before it is moved: its parameters are on the device from the beginning.
        return answers.moved(args), {name: answers.moved(value) for name, value in kwargs.items()}

    def _noted(
        self,
        op: OpTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        inside: Callable[..., Any] | None,
        *,
        here: bool,
        of_sparse: bool,
    ) -> Any:
        """What an op gives, and which storages it takes and makes."""
        note = Note(op.name, pageable=op.is_copy and waits_for_pageable(op.func, args))
        if op.switched:
            note.switches = switches_at(op.func, args)
        if op.is_sum and not sparse.is_sparse(args[0]):
            note.over = _writable(args[0])
        with TraceRange(f"{LEAF}{len(self.notes)}"):
            self.notes.append(note)
            in_order = tensors_in((args, [kwargs.get(name) for name in op.arguments[len(args) :]])) if kwargs else tensors
            note.inputs = [self._storage(tensor) for tensor in in_order]
            result = None if inside else self._answer(op, args, kwargs, tensors, here=here, of_sparse=of_sparse)
        if inside:
            result = self._inside(inside, op, args, kwargs)
        note.outputs = [self._storage(tensor) for tensor in tensors_in(result)]
        return result

    def _note_wrapped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes whose memory a tensor's is that has none of its own: that of what it wraps."""
        # The observer knows a tensor by its address, which must not become another's.
        self._weak += [_WEAK_TENSOR(tensor) for tensor in tensors_of(args, kwargs)]
        op = traits_of(func)
        note = Note(op.name, wraps=True)
        with TraceRange(f"{LEAF}{len(self.notes)}"):
            self.notes.append(note)
        rest = [kwargs.get(name) for name in op.arguments[len(args) :]]
        note.inputs = [self._storage(wrapped(tensor)) for tensor in tensors_in((args, rest))]

    def _inside(self, inside: Callable[..., Any], op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op makes of others."""
        result = self._called(inside, *args, **kwargs)
        if op.routes:
            with unseen():
                self.known.route(op.func, args, kwargs, result)
        return result

    def _answer(
        self,
        op: OpTraits,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        *,
        here: bool,
        of_sparse: bool,
    ) -> Any:
        """The shapes of what an op makes, and its numbers where they are known; `here`: all its tensors are of the device."""
        func = op.func
        if of_sparse:
            return sparse.part(func, args, kwargs)
        if op.hands_over or (op.is_copy and not is_pretended(args[0])):
            told = () if refusals.is_scaler() else self.known.told(func, args, kwargs)
            return told[0] if told else self.reads.answer(func, args)
        if op.picks and kwargs.get("output_size") is None:
            result, known = self.known.picked(func, args, kwargs)
            if not known:
                self.reads.picked[refusals.user_line()] += 1
            self._remember(tensors_in(result))
            return result
        result = answers.answer(func, args, kwargs, here=here)
        self._remember([result] if isinstance(result, torch.Tensor) else tensors_in(result))
        if op.writes_numbers or op.overwrites or self.known.concerns(tensors, here=here, written=op.mutable):
            self.known.follow(func, args, kwargs, result)
        if op.routes:
            self.known.route(func, args, kwargs, result)
        if op.compares:
            self.reads.learn(op.name, args, result)
        return result

    def unnamed_bytes(self) -> tuple[int, ...]:
        """Bytes of each storage of the device that is still there and that no noted op takes or makes."""
        named = {storage for note in self.notes for storage in (*note.inputs, *note.outputs)}
        left = (item for storage, (item, nbytes) in self._storages.items() if nbytes and storage not in named)
        # Memory may have been given back since, the storage kept (FSDP).
        there = (torch.UntypedStorage._new_with_weak_ptr(item.cdata) for item in left if not item.expired())
        return tuple(storage.nbytes() for storage in there if storage.nbytes())

    def _remember(self, made: Sequence[torch.Tensor]) -> None:
        """Remembers the storages that were made."""
        for tensor in made if self.keeps_storages else ():
            if tensor.layout is not torch.strided:
                raise refusals.only_gradients()
            if address(tensor) not in self._storages and is_dense(tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (_WEAK_STORAGE(storage), storage.nbytes())

    def _storage(self, tensor: torch.Tensor) -> int:
        self._weak.append(_WEAK_TENSOR(tensor))
        if sparse.is_sparse(tensor):
            return _NO_STORAGE
        where: int = address(tensor)
        if where not in self._held:
            self._held[where] = _WEAK_STORAGE(tensor.untyped_storage())
        return where


def _writable(tensor: torch.Tensor) -> bool:
    """Whether nobody else looks at a tensor: autograd then writes a sum over it (autograd/input_buffer.cpp).

    PyTorch itself does not look where a mode is active, and adds into a new tensor. Held are: the tensor by autograd's buffer,
    by the two arguments of the call and by Python, the storage by the tensor and by Python.
    """
    alone = _USES(tensor) <= 4 and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2
    return alone and _without_gaps(tensor)


def _without_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Switched:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.begin()

    def __exit__(self, *_: object) -> None:
        self._recorder.end()
