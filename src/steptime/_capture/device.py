"""A CUDA device that is not there: one idle GPU like the reference device, whose tensors dispatch, autocast and train as on it.

Ops on its tensors (`tensors`) never reach a kernel of CUDA: a dispatch mode (`record`) answers each with the shapes that
PyTorch's own meta functions say.

In Python the device calls itself `cuda:0` (`DeviceNames`); in C++ it is `meta`, for which every build of PyTorch has what
autograd asks of a device. Backward therefore runs in the thread that calls it, which `assemble` puts right.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch
from weakref import ref

import torch
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, checkpoint
from torch.utils._device import DeviceContext, _device_constructors

from steptime._capture import flex, nested, questions
from steptime._capture.autocast import casting
from steptime._capture.compiled.environment import Environment
from steptime._capture.compiled.region import available
from steptime._capture.compiler import idle_compiler
from steptime._capture.cuda_choices import chosen, scaled_dot_product_attention
from steptime._capture.log import CommLog, Streams, TraceRange
from steptime._capture.pinned import is_pinned, pin
from steptime._capture.recomputed import AFTER, AGAIN, KEPT
from steptime._capture.switches import restored
from steptime._capture.tensors import CUDA, META, address, is_pretended, is_wrapper, use, wrapped
from steptime._hardware.device import reference_device
from steptime.errors import InputError

_GPU = reference_device()
assert _GPU.compute_capability is not None
_MAJOR, _MINOR = map(int, str(_GPU.compute_capability.value).split("."))
_PROPERTIES = SimpleNamespace(
    name="pretended GPU",
    major=_MAJOR,
    minor=_MINOR,
    total_memory=int(_GPU.memory_bytes.value),
    multi_processor_count=int(_GPU.sms.value),
    L2_cache_size=int(_GPU.cache_bytes.value),
    max_threads_per_multi_processor=int(_GPU.threads_per_sm.value),
    # What compilers ask of any GPU from compute capability 8.0 on (CUDA C++ Programming Guide, technical specifications).
    warp_size=32,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    gcnArchName="",
    is_integrated=0,
    is_multi_gpu_board=0,
    uuid="",
)


class _NoDevice:
    """`torch.cuda.device` and the like: a context that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = 0

    def __enter__(self) -> _NoDevice:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class _Generator(torch.Generator):
    """A source of random numbers: those of the device are never drawn, so that any serves."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        del device
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)  # seed and offset of Philox, 8 bytes each


def _nothing(*_: Any, **__: Any) -> None:
    return None


_CONSTANTS: dict[str, Any] = {
    "is_available": True,
    "current_device": 0,
    "is_bf16_supported": True,
    "is_initialized": True,
    "get_device_capability": (_MAJOR, _MINOR),
    "get_device_name": _PROPERTIES.name,
    "get_device_properties": _PROPERTIES,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "is_current_stream_capturing": False,
}
_SILENT = (
    "_lazy_init", "init", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "reset_peak_memory_stats", "reset_max_memory_allocated", "set_rng_state", "set_rng_state_all",
)  # fmt: skip
# Kernels written in Triton are launched from Python and are no ops: execution traces do not show them.
_TRITON = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))


def _replaced(streams: Streams) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced while a device is pretended: object, attribute, and what stands in for it."""
    for name, value in _CONSTANTS.items():
        yield torch.cuda, name, lambda *_, value=value, **__: value
    yield from ((torch.cuda, name, _nothing) for name in _SILENT)
    yield from ((torch.cuda, name, _NoDevice) for name in ("device", "device_of"))
    yield from ((torch.cuda, name, answer) for name, answer in streams.answers().items())
    yield torch.cuda, "get_rng_state", _state
    yield torch.cuda, "get_rng_state_all", lambda: [_state()]
    yield torch.cuda, "_initialized", True
    yield torch, "Generator", _Generator
    yield torch.Tensor, "record_stream", _nothing
    yield torch.nn.DataParallel, "__init__", _no_data_parallel
    yield from ((torch.cuda, name, _NoGraphs) for name in ("CUDAGraph", "graph", "make_graphed_callables"))
    yield DeviceContext, "__torch_function__", _by_default
    yield torch.nn.Module, "register_parameter", _register_parameter
    yield torch.nn.Module, "register_buffer", _register_buffer
    yield torch.nn.init, "_no_grad_trunc_normal_", _drawn
    # Recurrent layers ask whether to lay out their weights for cuDNN; they are refused when they run.
    yield torch.backends.cudnn, "is_acceptable", lambda *_: False
    if find_spec("triton") is not None:
        yield from ((getattr(import_module(module), name), "run", _nothing) for module, name in _TRITON)
    for module in (torch.nn.functional, torch.functional, torch._tensor, torch.nn.init, torch.autograd):
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            if hasattr(module, name):
                # Functions written in Python are not asked as a whole: what they call is.
                yield module, name, lambda *_: False
    for name in ("__enter__", "__exit__"):
        yield record_function, name, _unseen(getattr(record_function, name))
    # Lists of tensors come back grouped by what C++ calls their device; CUDA has kernels for lists.
    supported = [*_foreach_utils._get_foreach_kernels_supported_devices(), META.type]
    yield _foreach_utils, "_get_foreach_kernels_supported_devices", lambda: supported


@contextmanager
def pretended(log: CommLog, *, devices: int = 1) -> Iterator[Streams]:
    """While it lasts, PyTorch says that there are CUDA devices, and tensors can be made on one. Gives its streams."""
    streams = Streams(log)
    _modules.clear()
    with ExitStack() as stack:
        asked = questions.replaced(streams, _PROPERTIES.total_memory, devices)
        replaced = tuple(chain(_replaced(streams), asked, nested.replaced(), flex.replaced()))
        originals = tuple((owner, name, vars(owner).get(name, getattr(owner, name))) for owner, name, _ in replaced)
        for owner, name, stand_in in replaced:
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(idle_compiler(originals))
        stack.enter_context(available(Environment(_PROPERTIES, originals)))
        stack.enter_context(restored())
        stack.enter_context(casting())
        stack.enter_context(chosen())
        # It compares what is recomputed with what was there, and asks for devices where no mode is asked.
        stack.enter_context(patch.dict(checkpoint._allowed_determinism_checks_to_fns, {"default": _shape_and_dtype}))
        stack.enter_context(patch.object(checkpoint, "_recomputation_hook", _Recomputation))
        stack.enter_context(patch.object(checkpoint._CachedTorchDispatchMode, "__torch_dispatch__", _answered))
        stack.enter_context(patch.object(DeviceNames, "streams", streams))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True to a scalar")  # it would name this file
        use.named = False
        stack.enter_context(DeviceNames())
        yield streams


class _Recomputation(checkpoint._recomputation_hook):
    """A checkpoint computes again what it did not keep: within a range of its own, and before another."""

    def __enter__(self) -> None:
        self._range = TraceRange(AGAIN)
        self._range.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._range.__exit__(*error)
        with TraceRange(AFTER):
            pass


_answer_or_call: Callable[..., Any] = checkpoint._CachedTorchDispatchMode.__torch_dispatch__


def _answered(*args: Any, **kwargs: Any) -> Any:
    """An op that a selective checkpoint kept or computes again."""
    with TraceRange(KEPT):
        return _answer_or_call(*args, **kwargs)


def translated(device: Any) -> Any:
    """What C++ calls a device: `meta` where it is CUDA, by name or number, else the same."""
    cuda = type(device) is int or (isinstance(device, str) and device.startswith("cuda"))
    if cuda or (isinstance(device, torch.device) and device.type == "cuda"):
        use.named = True
        return META
    return device


class DeviceNames(TorchFunctionMode):
    """Lets Python say `cuda` where C++ says `meta`, and takes the choices of CUDA that are made above the dispatcher."""

    streams: ClassVar[Streams | None] = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any function of PyTorch that Python calls."""
        del types
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(func, args, kwargs or {})
        return _called(func, args, kwargs) if kwargs else func(*args)


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives that is asked for a device by its name in Python."""
    if "device" in kwargs:
        kwargs = {**kwargs, "device": translated(kwargs["device"])}
    if kwargs.get("pin_memory"):
        return pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def _place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where a tensor lies."""
    del kwargs
    return _PLACES[func] if is_pretended(wrapped(args[0])) else func(*args)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    asked = questions.type_asked(*args, **kwargs)
    return _called(func, args, kwargs) if asked is None else asked


def _to_cuda(_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    use.named = True
    return args[0].to(META, non_blocking=kwargs.get("non_blocking", False))


def _put(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On CUDA a number that is put in place lies on the CPU (torch/csrc/autograd/python_variable_indexing.cpp)."""
    if isinstance(args[2], int | float) and is_pretended(args[0]):
        args = (args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))
    return func(*args, **kwargs)


def _device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which accelerator there is C++ does not know."""
    return func("cuda", *args) if args and type(args[0]) is int else _called(func, args, kwargs)


def _to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = (args[0], *map(translated, args[1:2]), *args[2:])
    streams = DeviceNames.streams
    if streams is None or not _blocks(args, kwargs):
        return _called(func, args, kwargs)
    # What it is made of where the memory is pinned (native/cuda/Copy.cu, memcpy_and_sync).
    named = {name: translated(value) if name == "device" else value for name, value in kwargs.items()}
    result = func(*args, **{**named, "non_blocking": True})
    streams.current.synchronize()
    return result


def _from_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Made on the CPU and copied, as PyTorch does it too."""
    if translated(kwargs.get("device")) != META:
        return _called(func, args, kwargs)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
    return func(*args, **rest).to(META).requires_grad_(kwargs.get("requires_grad", False))


def _by_default(
    context: Any, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What `torch.set_default_device` and `with torch.device` add: PyTorch does so below every mode."""
    kwargs = dict(kwargs or {})
    if func in _device_constructors() and kwargs.get("device") is None:
        kwargs["device"] = context.device
    return _NAMES.__torch_function__(func, types, args, kwargs)


_NAMES = DeviceNames()


def _blocks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `Tensor.to` is a copy from pinned memory to the device for which the host waits."""
    target = args[1] if len(args) > 1 else translated(kwargs.get("device"))
    asked = len(args) >= _PLACE_OF_FLAG or kwargs.get("non_blocking")
    return target is META and not asked and is_pinned(args[0])


_PLACE_OF_FLAG = 4  # of `non_blocking` among the arguments of `Tensor.to(device, dtype, non_blocking)`, the tensor counted
_PLACES: dict[Any, Any] = {
    torch.Tensor.device.__get__: CUDA,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}


def _attended(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sharded tensor chooses its kernel here: the choice of CUDA is not that of the device which C++ takes it to be on."""
    query = args[0] if args else kwargs.get("query")
    # Nested tensors choose in Python by themselves.
    nested = isinstance(query, torch.Tensor) and query.is_nested
    sharded = isinstance(query, torch.Tensor) and not nested and is_wrapper(type(query)) and is_pretended(wrapped(query))
    return (scaled_dot_product_attention if sharded else func)(*args, **kwargs)


ANSWERS: dict[Any, Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_PLACES, _place),
    torch.Tensor.type: _type,
    torch.Tensor.cuda: _to_cuda,
    torch.Tensor.to: _to,
    torch.device: _device,
    torch.Tensor.__setitem__: _put,
    torch.nn.functional.scaled_dot_product_attention: _attended,
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_data),
}
"""By function of PyTorch, what is done in its place; others are called as they are."""


def _no_data_parallel(*_: Any, **__: Any) -> None:
    raise InputError(
        "nn.DataParallel: one process that copies the model to every GPU in every step is not captured; wrap the model in "
        "nn.parallel.DistributedDataParallel and give --ranks, or drop the wrapper for one GPU"
    )


class _NoGraphs:
    """In place of CUDA graphs; a class, which annotations name."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise InputError("CUDA graphs: what a graph replays is not captured; capture the step without it")


def _shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """The beginning or the end of a range, no mode asked: the record of asking one would end in place of the range."""

    @wraps(method)
    def run(*args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return method(*args)

    return run


_register, _register_also = torch.nn.Module.register_parameter, torch.nn.Module.register_buffer
_trunc_normal = torch.nn.init._no_grad_trunc_normal_


def _drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Numbers of the device are never drawn: there is nothing to look at and draw again until all are within bounds."""
    if not is_pretended(tensor):
        return _trunc_normal(tensor, *args, **kwargs)
    with torch.no_grad():
        return tensor.normal_()


def _register_buffer(module: torch.nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
    """Buffers go with the parameters: some models run once while they are made."""
    if tensor is not None and not is_pretended(tensor) and tensor.device.type == "cpu":
        tensor = tensor.to(META)
    _register_also(module, name, tensor, persistent)


def _register_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    """Parameters are put on the device when a module gets them: a model made on the CPU would take its memory for nothing."""
    if param is not None and not is_pretended(param) and param.device.type == "cpu":
        moved = param.__dict__.get("_moved")
        if moved is None:
            with torch.no_grad():
                moved = torch.nn.Parameter(param.detach().to(META), requires_grad=param.requires_grad)
            param._moved = moved  # type: ignore[attr-defined]
        param = moved
    if param is not None:
        _modules[id(module)] = ref(module)
    _register(module, name, param)


_modules: dict[int, ref[torch.nn.Module]] = {}  # that were given parameters while a device was pretended, by identity


@dataclass(frozen=True)
class Parameters:
    """The parameters of a job."""

    count: int = 0  # of numbers, on all ranks that share them
    storages: frozenset[int] = frozenset()  # addresses, on this rank


def parameters_alive(optimizers: Iterable[torch.optim.Optimizer]) -> Parameters:
    """Those of modules, and those that optimisers have: copies of layers are given theirs without a word."""
    gc.collect()  # a head that was replaced may be part of a cycle
    modules = [each for each in (known() for known in _modules.values()) if each is not None]
    found = [each for module in modules for each in module._parameters.values() if each is not None]
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    found += [each for each in chain.from_iterable(groups) if isinstance(each, torch.nn.Parameter)]
    distinct = {id(each): each for each in found}.values()
    here = [each for each in map(wrapped, distinct) if is_pretended(each)]
    return Parameters(sum(map(_whole, distinct)), frozenset(map(address, here)))


def _whole(parameter: torch.nn.Parameter) -> int:
    """How many numbers a parameter has: one that FSDP made flat knows how many all ranks have."""
    return math.prod(getattr(parameter, "_unpadded_unsharded_size", parameter.shape))
