"""`torch.compile` while a device is pretended: PyTorch's own compiler decides what is fused, nothing is compiled for hardware.

The compiler is imported when a script first asks for it. What it cannot trace it leaves to Python, as anywhere; where it
fails, the frame runs eagerly and is named.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import flex_attention

from steptime._capture.compiled import wrapper
from steptime._capture.compiled.environment import Environment, fakes
from steptime._capture.compiled.modes import MODES, OFF, asked
from steptime._capture.log import TraceRange
from steptime._capture.tensors import is_pretended
from steptime._notices import Caveat
from steptime.errors import InputError

_TIMED = "max-autotune"
_TIMING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_HERE = str(Path(__file__).parents[1])
# What these call may have to be compiled: `called`, and what `watch` has around the step of an optimiser.
_TRANSPARENT = ("Regions.", "_reporting.")
_TORCH = str(Path(torch.__file__).parent)
_torch_compile = torch.compile
_module_call: Any = torch.nn.Module.__call__


class Traced:
    """What compiled code notes each time it runs."""

    optimizer: Any = None  # whose step it has just taken
    depth = 0  # of compiled functions under way, within whose ranges no iteration begins or ends


traced = Traced()


class Regions:
    """What is compiled in one capture."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._stack = ExitStack()
        self._ready = self._busy = False
        self._silence = ""
        self.said: dict[str, None] = {}  # what is to be said of the step
        self.mode = asked.get()
        self._by_script = False
        self.mark: Callable[[Any], None] = lambda _: None  # says that an optimiser has stepped
        self._inside = False  # a module that is compiled because it was asked for
        self._modules: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()

    def compile(self, model: Any = None, **options: Any) -> Any:
        """In place of `torch.compile`."""
        if model is None:
            return lambda function: self.compile(function, **options)
        if self.mode == OFF:
            return model
        self._by_script = True
        return self._compile(model, **options)

    def _compile(self, model: Any, **options: Any) -> Any:
        if model is flex_attention.flex_attention:
            return model  # which has a stand-in of its own
        timed = _timed(options)
        if timed:
            return saying(model, lambda: self.said.setdefault(timed))
        self.prepare()
        self._idle()
        with self._environment.compiling():
            compiled = _torch_compile(model, **options)
        return compiled if isinstance(model, torch.nn.Module | type) else self._marking(compiled)

    def _idle(self, reason: str = "") -> None:
        """Says that nothing was compiled, as long as this is so."""
        if not self._busy:
            self.said.pop(self._silence, None)
            nothing = "PyTorch's compiler found nothing that it compiles"
            self._silence = Caveat(f"torch.compile: {nothing}{reason}; taken as run eagerly")
            self.said[self._silence] = None

    def _converted(self, frame: Any, result: Any) -> None:
        """The compiler has seen a frame."""
        if result.guarded_code is not None and not self._busy:
            self._busy = True
            self.said.pop(self._silence, None)
        elif not frame.f_code.co_filename.startswith(_TORCH):
            reasons = list(torch._dynamo.utils.counters["graph_break"])
            self._idle(f" ({reasons[-1].strip().splitlines()[0][:120]})" if reasons else "")

    def _marking(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled function, which may step an optimiser: nobody sees that where its graph has all of the step."""

        @wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # another one, of which it becomes a part
                return compiled(*args, **kwargs)
            traced.depth += 1
            try:
                result = compiled(*args, **kwargs)
            finally:
                traced.depth -= 1
            if traced.optimizer is not None and not traced.depth:
                stepped, traced.optimizer = traced.optimizer, None
                self.mark(stepped)
            return result

        return run

    def called(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of `Module.__call__` where a mode is asked for: outermost modules that learn something are compiled."""
        learns = not self._by_script and not self._inside and any(True for _ in module.parameters())
        if not learns:
            return _module_call(module, *args, **kwargs)
        if module not in self._modules:
            self._modules[module] = self._compile(module, mode=self.mode)
        self._inside = True
        try:
            return self._modules[module](*args, **kwargs)
        finally:
            self._inside = False

    def replaced(self) -> Iterator[tuple[Any, str, Any]]:
        """What is replaced while a step is watched: object, attribute, and what stands in for it."""
        yield torch, "compile", self.compile
        if self.mode == OFF:
            yield torch.nn.Module, "compile", lambda *_, **__: None
        elif self.mode is not None:

            def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self.called(module, *args, **kwargs)

            yield torch.nn.Module, "__call__", call

    def prepare(self) -> None:
        """Imports the compiler and puts what it needs in place, once."""
        if self._ready:
            return
        self._ready = True
        dynamo = import_module("torch._dynamo")
        getattr(dynamo, "real", lambda: None)()  # where another stands for it
        with self._environment.put_back():
            _imported()
        for owner, name, stand_in in (*fakes(), *wrapper.replaced(), *self._frames()):
            self._stack.enter_context(patch.object(owner, name, stand_in, create=True))
        for optimizer in _optimizers():
            self._stack.enter_context(patch.object(optimizer, "_init_group", self._resuming(optimizer._init_group)))
        known = import_module("torch._dynamo.variables.optimizer").OptimizerVariable
        move, choose = self._resuming(known.move_step_if_cpu), _capturable(known._set_capturable)
        self._stack.enter_context(patch.object(known, "move_step_if_cpu", move))
        self._stack.enter_context(patch.object(known, "_set_capturable", choose))
        self._stack.callback(_forgotten)
        if "TORCH_LOGS" not in os.environ:
            self._stack.enter_context(_quiet())
        with self._environment.compiling():
            torch._dynamo.trace_rules.clear_lru_cache()  # which may hold what was pretended

    def _resuming(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Optimisers make their state while their step is traced."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._environment.resumed():
                return function(*args, **kwargs)

        return run

    def _put_back(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Code of a graph is written when it is first called: it names what PyTorch knows by identity."""

        def run(*args: Any) -> Any:
            with self._environment.put_back():
                return function(*args)

        return run

    def leave(self) -> None:
        """As if nothing had been compiled."""
        self._stack.close()

    def _frames(self) -> Iterator[tuple[Any, str, Any]]:
        from torch._dynamo import convert_frame  # noqa: PLC0415 (it takes seconds to import)

        convert = convert_frame.CatchErrorsWrapper.__call__
        types = import_module("torch._dynamo.types")
        skipped, skip = types.ConvertFrameReturn, types.FrameAction.SKIP
        left_alone = types.FrameExecStrategy(skip, skip)  # with all that it calls

        def converted(self_: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            file = frame.f_code.co_filename
            if file.startswith(_HERE):
                through = frame.f_code.co_qualname.startswith(_TRANSPARENT)
                return skipped() if through else skipped(frame_exec_strategy=left_alone)
            try:
                with self._environment.compiling(), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", module=r"torch\.")
                    result = convert(self_, frame, *args, **kwargs)
                self._converted(frame, result)
                return result
            except InputError:
                raise
            except Exception as error:
                self.said[_failed(frame.f_code, error)] = None
                return skipped(frame_exec_strategy=left_alone)

        yield convert_frame.CatchErrorsWrapper, "__call__", converted
        lazy = import_module("torch.fx._lazy_graph_module")._LazyGraphModule
        yield lazy, "_real_recompile", self._put_back(lazy._real_recompile)
        call = import_module("torch._inductor.output_code").CompiledFxGraph.__call__
        yield import_module("torch._inductor.output_code").CompiledFxGraph, "__call__", _ranged(call)


def saying(function: Any, say: Callable[[], object]) -> Any:
    """The same, which says something as soon as it is called: a function may be decorated and never be."""
    if not inspect.isfunction(function):
        say()
        return function

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        say()
        return function(*args, **kwargs)

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """While it lasts, the compiler warns of nothing: what it has to say is how to write the script."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def _optimizers() -> list[Any]:
    kinds = (each for each in vars(torch.optim).values() if isinstance(each, type))
    return [each for each in kinds if "_init_group" in vars(each)]


def _capturable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Optimisers that are compiled count their steps on the device, where their parameters are: the compiler sees to it."""

    def run(self: Any, *args: Any) -> Any:
        for group in self.value.param_groups:
            new = all(is_pretended(each) and each not in self.value.state for each in group.get("params", []))
            if "capturable" in group and new:
                group["capturable"] = True
        return function(self, *args)

    return run


def _forgotten() -> None:
    torch._dynamo.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # which may hold what was pretended


def _imported() -> None:
    """The compiler's modules, none of capture's modes asked."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), warnings.catch_warnings(action="ignore"):
        for name in ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.async_compile"):
            import_module(name)


def _ranged(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of Inductor's wrapper, as PyTorch's profiler shows it: keys are numbers in order of first call."""
    numbers = count()

    def run(self: Any, inputs: Any) -> Any:
        if "_steptime_key" not in vars(self):
            self._steptime_key = next(numbers)
        with TraceRange(f"## Call CompiledFxGraph {self._steptime_key} ##"):
            return call(self, inputs)

    return run


def _timed(options: dict[str, Any]) -> str:
    """What is said where kernels would be picked by timing them, which no capture can foresee; "" where they are not."""
    mode, more = options.get("mode"), options.get("options") or {}
    asked = f'mode="{mode}"' if isinstance(mode, str) and mode.startswith(_TIMED) else ""
    asked = asked or next((f'options={{"{name}": True}}' for name in _TIMING if more.get(name)), "")
    others = " or ".join(f'"{each}"' for each in MODES)
    return asked and Caveat(
        f"torch.compile({asked}) picks its kernels by timing them on the GPU, which no capture can foresee: what it is "
        f"given is taken as run eagerly; mode={others} is captured"
    )


def _failed(code: Any, error: Exception) -> str:
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the compiler's own words around it say less
    reason = str(error).strip().splitlines()
    first = reason[0][:160] if reason else type(error).__name__
    where = f"{Path(code.co_filename).name}:{code.co_firstlineno} ({code.co_name})"
    return Caveat(f"torch.compile of {where} failed here and is taken as run eagerly: {first}")


_current: list[Regions] = []


@contextmanager
def available(environment: Environment) -> Iterator[None]:
    """While it lasts, regions can be compiled."""
    regions = Regions(environment)
    _current.append(regions)
    try:
        yield
    finally:
        _current.pop()
        regions.leave()


def current() -> Regions:
    """Of the capture under way."""
    return _current[-1]
