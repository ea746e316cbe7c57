"""Where PyTorch's compiler works while a device is pretended: `Environment.compiling`.

Dynamo, AOTAutograd and Inductor run as they are, on fake tensors that say they are on CUDA. Fake tensors dispatch like those of
the pretended device: in C++ they are `meta`, so that autograd asks no driver. What capture has put in PyTorch's place is put
back meanwhile, since Dynamo knows PyTorch's functions by identity, but for answers about the device, each a function of
its own: Dynamo refuses one object under two names.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor, functional_tensor, meta_utils
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from steptime._capture.compiled.modes import check_triton, spent
from steptime._capture.layouts import cudnn_format
from steptime._capture.tensors import CUDA, is_pretended

# Of Inductor's settings, those by which it would time kernels on the GPU. The last changes the sizes of blocks alone.
_UNTIMED: dict[str, Any] = dict.fromkeys(
    ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"), False
)


class _HereOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that the compiler makes for itself, to fold constants, lie on the CPU."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As PyTorch asks for it: compilation goes on."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """As PyTorch asks for it: no mode of a user's."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One op."""
        del types
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and device.type == "cuda" and not _faked():
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _faked() -> bool:
    """Whether tensors are made without data: PyTorch asks the modes of users before its own."""
    return any(isinstance(mode, fake_tensor.FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def _here(function: Callable[..., Any], *args: Any) -> Any:
    with _HereOnCpu():  # type: ignore[no-untyped-call]
        return function(*args)


class _Driver:
    """What Triton asks of a GPU's driver before it compiles anything."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415 (Triton may not be there)

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


@dataclasses.dataclass
class Environment:
    """PyTorch as the compiler is to find it: `replaced` is what capture has put in the place of what."""

    properties: SimpleNamespace  # of the device
    replaced: Sequence[tuple[Any, str, Any]]  # object, attribute, and what stands there where no device is pretended
    _inside: int = 0
    _modes: Sequence[Any] = ()  # capture's, while something is compiled
    _function_modes: Sequence[Any] = ()
    _stand_ins: tuple[tuple[Any, str, Any], ...] = ()  # the same in every compilation

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """While it lasts, what capture has replaced is back."""
        with ExitStack() as stack:
            for owner, name, original in self.replaced:
                stack.enter_context(patch.object(owner, name, original))
            yield

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """While it lasts, tensors of the pretended device can be made though something is being compiled."""
        from torch._dynamo.utils import set_torch_function_mode_stack  # noqa: PLC0415 (it takes seconds to import)

        if not self._inside:
            yield
            return
        with _disable_current_modes(), ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            set_torch_function_mode_stack(list(self._function_modes))
            try:
                yield
            finally:
                set_torch_function_mode_stack([])

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While it lasts, the compiler finds a GPU and none of capture's modes."""
        if self._inside:
            yield
            return
        from torch._dynamo.utils import set_torch_function_mode_stack  # noqa: PLC0415 (it takes seconds to import)

        self._inside += 1
        modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._modes, self._function_modes = _get_current_dispatch_mode_stack(), modes
        try:
            with ExitStack() as stack:
                stack.enter_context(spent.compiling())
                stack.enter_context(_disable_current_modes())
                stack.enter_context(_HereOnCpu())  # type: ignore[no-untyped-call]
                stack.enter_context(self.put_back())
                self._stand_ins = self._stand_ins or tuple(self._answers())
                for owner, name, stand_in in self._stand_ins:
                    stack.enter_context(patch.object(owner, name, stand_in, create=True))
                stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
                settings = {"force_disable_caches": True, "compile_threads": 1, **_UNTIMED}
                stack.enter_context(torch._inductor.config.patch(settings))
                set_torch_function_mode_stack([])
                recording = torch._C._autograd._enable_record_function
                recording(False)
                try:
                    yield
                finally:
                    recording(True)
        finally:
            set_torch_function_mode_stack(modes)
            self._inside -= 1

    def _answers(self) -> Iterator[tuple[Any, str, Any]]:
        from torch._dynamo import device_interface, guards  # noqa: PLC0415 (as above)
        from torch._inductor import constant_folding  # noqa: PLC0415 (as above)

        major, minor = self.properties.major, self.properties.minor
        answers: dict[str, Any] = {
            "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": False, "is_bf16_supported": True,
            "get_device_capability": (major, minor), "get_device_name": self.properties.name,
            "get_device_properties": self.properties, "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
            "synchronize": None, "memory_allocated": 0, "set_rng_state": None,
        }  # fmt: skip
        for name, value in answers.items():
            function = _constant(name, value)
            yield torch.cuda, name, function
            if name in vars(device_interface.CudaInterface):
                yield device_interface.CudaInterface, name, staticmethod(function)
        yield torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)
        yield device_interface.CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: self.properties)
        yield device_interface.CudaInterface.Worker, "current_device", staticmethod(lambda: 0)
        yield torch.accelerator, "is_available", _constant("is_available", False)
        yield torch._C, "_cuda_cudaCachingAllocator_is_enabled", _constant("is_enabled", True)
        yield fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda _: True)
        # Capture's own mode is there when the code runs, and is nothing that the code depends on.
        yield guards.GuardBuilder, "TORCH_FUNCTION_STATE", lambda *_: None
        # It leaves all modes to fold constants, which then are to be computed.
        fold = constant_folding.ConstantFolder.run
        yield constant_folding.ConstantFolder, "run", lambda self: _here(fold, self)
        yield torch._C, "_conv_determine_backend_memory_format", lambda input, weight, _: cudnn_format(input, weight)
        yield from _of_triton(major * 10 + minor)


def _constant(name: str, value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return value

    answer.__name__ = name
    return answer


def _of_triton(capability: int) -> Iterator[tuple[Any, str, Any]]:
    check_triton()
    from triton.runtime import driver  # noqa: PLC0415 (Triton may not be there)

    yield driver, "_active", _Driver(capability)
    # Keys of caches that are not used, of which the second hashes all of PyTorch; modules have names of their own for them.
    for name, module in list(sys.modules.items()):
        if name.startswith("torch."):
            if "triton_hash_with_backend" in vars(module):
                yield module, "triton_hash_with_backend", lambda *_: "pretended"
            if "torch_key" in vars(module):
                yield module, "torch_key", lambda: b"pretended"


_make_subclass = torch.Tensor._make_subclass
_describe = meta_utils.MetaTensorDescriber.describe_tensor


def _made(*args: Any, **kwargs: Any) -> Any:
    """A tensor of a class of Python's: one on CUDA says so in Python alone."""
    device = kwargs.get("device_for_backend_keys")
    if kwargs.get("dispatch_device") and device is not None and torch.device(device).type == "cuda":
        kwargs["dispatch_device"] = False
    return _make_subclass(*args, **kwargs)


def _described(self: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    """What a fake tensor is made from: tensors of the pretended device are on CUDA."""
    result = _describe(self, tensor, **kwargs)
    if result.device.type == "meta" and is_pretended(tensor):
        result = dataclasses.replace(result, device=CUDA)
    return result


# Those that trace: the one that records the graph, the one that takes writing in place away, and that of fake tensors.
_TRACING = (proxy_tensor.ProxyTorchDispatchMode, functional_tensor.FunctionalTensorMode, fake_tensor.FakeTensorMode)


def _dispatching(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """An op while something is traced: what C++ makes beside a tensor on CUDA is on CUDA, though C++ says `meta`."""

    def run(self: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if kwargs and (device := kwargs.get("device")) is not None and device.type == "meta":
            kwargs = {**kwargs, "device": CUDA}
        return dispatch(self, func, types, args, kwargs)

    return run


_functional = functional_tensor.FunctionalTensor.__new__
_device = torch.Tensor.device


def _functionalised(cls: Any, elem: torch.Tensor, mode: Any) -> Any:
    """A tensor that AOTAutograd traces with: with the keys of CUDA where it stands for one there."""
    result = _functional(cls, elem, mode)
    if not is_pretended(elem):
        return result
    with torch._C._DisableTorchDispatch():
        again = _make_subclass(cls, result, elem.requires_grad, device_for_backend_keys=CUDA)
    again.__dict__.update(result.__dict__)
    torch._C._set_throw_on_mutable_data_ptr(again)
    return again


def fakes() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced so that fake tensors are like tensors of the pretended device."""
    yield torch.Tensor, "_make_subclass", staticmethod(_made)
    yield meta_utils.MetaTensorDescriber, "describe_tensor", _described
    yield from ((mode, "__torch_dispatch__", _dispatching(mode.__torch_dispatch__)) for mode in _TRACING)
    yield functional_tensor.FunctionalTensor, "__new__", _functionalised
    on_cuda = property(lambda self: CUDA if is_pretended(self) else _device.__get__(self))
    yield functional_tensor.FunctionalTensor, "device", on_cuda
    yield fake_tensor.FakeTensor, "is_meta", property(lambda self: self.device.type == "meta")
    yield fake_tensor, "init_gpu_context", lambda *_: None  # there is no driver to wake
