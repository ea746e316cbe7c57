"""A CUDA device that is not there: tensors without memory that dispatch, autocast and train as tensors on a GPU do.

Ops on its tensors (`steptime._capture.tensors`) never reach a kernel of CUDA: a dispatch mode (`steptime._capture.record`)
answers each with the shapes that PyTorch's own meta functions say.

In Python the device calls itself `cuda:0` (`DeviceNames`); in C++ it is `meta`, for which every build of PyTorch has what
autograd asks of a device. Backward therefore runs in the thread that calls it, which `steptime._capture.assemble` puts right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, checkpoint

from steptime._capture import cuda_answers, cuda_choices
from steptime._capture.autocast import casting
from steptime._capture.tensors import CUDA, META, is_pretended
from steptime.errors import InputError


def translated(device: Any) -> Any:
    """What C++ calls a device: `meta` where it is CUDA, else the same."""
    if isinstance(device, str) and device.startswith("cuda"):
        return META
    return META if isinstance(device, torch.device) and device.type == "cuda" else device


class DeviceNames(TorchFunctionMode):
    """Lets Python say `cuda` where C++ says `meta`, and takes the choices of CUDA that are made above the dispatcher."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any function of PyTorch that Python calls."""
        del types
        kwargs = kwargs or {}
        answer = _GETTERS.get(func)
        if answer is not None and is_pretended(args[0]):
            return answer(args[0])
        if func is torch.Tensor.cuda:
            return args[0].to(META, non_blocking=kwargs.get("non_blocking", False))
        if func is torch.Tensor.to:
            args = tuple(map(translated, args))
        if func in _FROM_DATA and translated(kwargs.get("device")) == META:
            # Made on the CPU and copied, as PyTorch does it too.
            rest = {key: value for key, value in kwargs.items() if key not in ("device", "requires_grad")}
            return func(*args, **rest).to(META).requires_grad_(kwargs.get("requires_grad", False))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": translated(kwargs["device"])}
        return func(*args, **kwargs)


_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_GETTERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.device.__get__: lambda _: CUDA,
    torch.Tensor.is_cuda.__get__: lambda _: True,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda _: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda _: 0,
    torch.Tensor.pin_memory: lambda tensor: tensor,
}


@contextmanager
def pretended() -> Iterator[None]:
    """While it lasts, PyTorch says that there is one CUDA device, and tensors can be made on it."""
    with ExitStack() as stack:
        stack.enter_context(cuda_answers.in_force())
        stack.enter_context(casting())
        stack.enter_context(cuda_choices.chosen())
        stack.enter_context(patch.object(torch.nn.Module, "register_parameter", _register_parameter))
        stack.enter_context(patch.object(torch, "compile", _not_compiled))
        for module in (torch.nn.functional, torch.functional, torch._tensor, torch.nn.init, torch.autograd):
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                if hasattr(module, name):
                    # Functions written in Python are not asked as a whole: what they call is.
                    stack.enter_context(patch.object(module, name, lambda *_: False))
        for name in ("__enter__", "__exit__"):
            stack.enter_context(patch.object(record_function, name, _unseen(getattr(record_function, name))))
        # Lists of tensors come back grouped by what C++ calls their device; CUDA has kernels for lists.
        supported = [*_foreach_utils._get_foreach_kernels_supported_devices(), META.type]
        stack.enter_context(patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: supported))
        # It compares what is recomputed with what was there, and asks for devices where no mode is asked.
        stack.enter_context(patch.dict(checkpoint._allowed_determinism_checks_to_fns, {"default": _shape_and_dtype}))
        stack.enter_context(DeviceNames())
        yield


def _not_compiled(*_: Any, **__: Any) -> Any:
    raise InputError(
        "torch.compile: what a compiled function launches is up to its compiler and is not captured; capture the step "
        "without it, or record a compiled run and predict that"
    )


def _shape_and_dtype(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    """The beginning or the end of a range, no mode asked: the record of asking one would end in place of the range."""

    @wraps(method)
    def run(*args: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return method(*args)

    return run


_register = torch.nn.Module.register_parameter


def _register_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
    """Parameters are put on the device when a module gets them: a model made on the CPU would take its memory for nothing."""
    if param is not None and not is_pretended(param) and param.device.type == "cpu":
        moved = param.__dict__.get("_moved")
        if moved is None:
            with torch.no_grad():
                moved = torch.nn.Parameter(param.detach().to(META), requires_grad=param.requires_grad)
            param._moved = moved  # type: ignore[attr-defined]
        param = moved
    _register(module, name, param)
