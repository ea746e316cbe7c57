"""PyTorch's compiler, `torch._dynamo`, which takes longer to import than a step to capture and is not needed for one.

Optimisers, checkpoints and the hooks of FSDP ask it to leave them alone. While a device is pretended, a module in its place
does as they ask, unless somebody has imported the real one. Its settings, which PyTorch's fake tensors look at, are the
real ones. Whatever else is asked of it is asked of the real one, imported then as on a machine without a pretended device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_SETTINGS = f"{_NAME}.config"  # which imports none of the others
_KEPT = "__dynamo_disable"  # by which torch._compile remembers what the compiler made of a function


@contextmanager
def idle_compiler(really: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """While it lasts, the compiler stays away; `really`: object, attribute, and what stands there if no device is pretended."""
    if _NAME in sys.modules:
        yield
        return
    idle = IdleCompiler(really)
    finder = _CompilerFinder(idle)
    sys.modules[_NAME] = torch._dynamo = idle
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        idle.leave()


class IdleCompiler(ModuleType):
    """Stands for the compiler until more is asked of it than to stay away."""

    def __init__(self, really: Sequence[tuple[Any, str, Any]]) -> None:
        super().__init__(_NAME, __doc__)
        self.__spec__ = PathFinder.find_spec(_NAME, torch.__path__)
        self.__path__: list[str] = []  # its modules are found by `_CompilerFinder`
        self.folders = list(getattr(self.__spec__, "submodule_search_locations", None) or ())
        self._really = really
        self._left_alone: list[Any] = []
        self.trace_rules = IdleCompiler._Part(self, "trace_rules", clear_lru_cache=lambda: None)

    class _Part:
        """One of its modules, as far as it is asked for by everybody."""

        def __init__(self, whole: IdleCompiler, name: str, **known: Any) -> None:
            self.__dict__.update(known, _whole=whole, _name=name)

        def __getattr__(self, name: str) -> Any:
            return getattr(getattr(self._whole.real(), self._name), name)

    def disable(self, fn: Any = None, *_: Any, **options: Any) -> Any:
        """The function itself."""
        if fn is None:
            return lambda function: self.disable(function, **options)
        self._left_alone.append(fn)
        return fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        """There is no graph."""

    def is_compiling(self) -> bool:
        """Never."""
        return False

    def is_dynamo_supported(self) -> bool:
        """As on every machine that has it."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return import_module(_SETTINGS) if name == "config" else getattr(self.real(), name)

    def real(self) -> ModuleType:
        """The compiler, which takes its place."""
        if sys.modules.get(_NAME) is self:
            self._forget()
            pretended = [(owner, name, vars(owner).get(name, getattr(owner, name))) for owner, name, _ in self._really]
            _put(self._really)
            try:
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    import_module(_NAME)
            finally:
                _put(pretended)
        return sys.modules[_NAME]

    def leave(self) -> None:
        """As if it had never been there."""
        for function in self._left_alone:
            getattr(function, "__dict__", {}).pop(_KEPT, None)
        if sys.modules.get(_NAME) is self:
            self._forget()
        else:
            torch._dynamo.trace_rules.clear_lru_cache()  # which may hold what was pretended

    def _forget(self) -> None:
        del sys.modules[_NAME]
        sys.modules.pop(_SETTINGS, None)
        vars(torch).pop("_dynamo", None)


def _put(values: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        setattr(owner, name, value)


class _CompilerFinder:
    """Finds modules of the compiler once it is there."""

    def __init__(self, idle: IdleCompiler) -> None:
        self._idle = idle

    def find_spec(self, name: str, path: Any, _: Any = None) -> ModuleSpec | None:
        """As `sys.meta_path` asks for it."""
        del path
        if not name.startswith(f"{_NAME}.") or sys.modules.get(_NAME) is not self._idle:
            return None
        if name == _SETTINGS:
            return PathFinder.find_spec(name, self._idle.folders)
        real = self._idle.real()
        known = sys.modules.get(name)
        return PathFinder.find_spec(name, real.__path__) if known is None else spec_from_loader(name, _LoadedBefore(known))


class _LoadedBefore(Loader):
    """Loads a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """As `importlib` asks for it."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do but to say where it came from."""
        module.__spec__ = self._spec
