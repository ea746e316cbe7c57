"""A training step that is named on a command line: `package.module:function` or `file.py:function`.

The function makes model, optimiser and inputs, and returns the step, a callable without arguments; or it is the step itself.
It may take, by these names: `batch` (samples of all ranks), `device` ("cuda"), `rank` and `ranks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from steptime.errors import InputError

_KNOWN = ("batch", "device", "rank", "ranks")
DEVICE = "cuda"


def function_of(target: str) -> Callable[..., Any]:
    """The function that a text names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise InputError(f"{target}: names no function; expected package.module:function or file.py:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    result = getattr(module, name, None)
    if result is None:
        others = ", ".join(sorted(key for key, value in vars(module).items() if inspect.isfunction(value))[:5])
        raise InputError(f"{target}: {place} has no {name}; there are {others or 'no functions in it'}")
    if not callable(result):
        raise InputError(f"{target}: is a {type(result).__name__}, not a function; name one that makes or is a training step")
    built: Callable[..., Any] = result
    return built


def bound(function: Callable[..., Any], target: str, *, batch: int | None, rank: int, ranks: int) -> Callable[[], Any]:
    """The function with what it takes of batch, device, rank and ranks."""
    given: dict[str, Any] = {"device": DEVICE, "rank": rank, "ranks": ranks}
    if batch is not None:
        given["batch"] = batch
    taken = inspect.signature(function).parameters
    if batch is not None and "batch" not in taken:
        raise InputError(f"{target}: takes no argument batch, so that --batch {batch} would change nothing; leave it out")
    for name, parameter in taken.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and name == "batch" and batch is None:
            raise InputError(f"{target}: takes a batch; give one with --batch")
        if needed and name not in _KNOWN:
            raise InputError(f"{target}: takes an unknown argument {name}; arguments may be {', '.join(_KNOWN)}")
    chosen = {name: value for name, value in given.items() if name in taken}
    return lambda: function(**chosen)


def _imported(name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = f"no module named {error.name}"
        where = "; run where it can be imported, or name its file (file.py:function)" if error.name == name else ""
        raise InputError(f"{name}: cannot be imported ({text}){where}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{name}: fails while it is imported ({_said(error)})") from error
    finally:
        if added:
            sys.path.remove(here)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path}: no such file; name a Python file and a function in it (file.py:function)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: fails while it is imported ({_said(error)})") from error
    return module


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
