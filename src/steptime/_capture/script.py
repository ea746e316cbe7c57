"""`captured`: the workload of a training step, a function or the name of one (`package.module:function`, `file.py:function`).

The function makes model, optimiser and inputs, and returns the step, a callable without arguments; or it is the step itself.
It may take, by these names: `batch` (samples of all ranks), `device` ("cuda"), `rank` and `ranks`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from steptime._capture.compiled.modes import compiled_as
from steptime._capture.vision_ops import declared_when_imported
from steptime._garbage import no_collection
from steptime._program.workload import Description, Workload, fixed
from steptime.errors import InputError

_KNOWN = ("batch", "device", "rank", "ranks")
DEVICE = "cuda"


def captured(
    function: str | Callable[..., Any],
    *,
    arguments: tuple[str, ...] = (),
    batch: int | None = None,
    ranks: int = 1,
    compile: str | None = None,
) -> Workload:
    """The workload of a function, or of one that is named, on so many ranks. Its module finds `arguments` in `sys.argv`.

    `compile`: a mode of `torch.compile` for the outermost modules of a function that compiles nothing itself, or "off".
    """
    with _command_line(function, arguments), compiled_as(compile):
        result = _captured(function, batch, ranks)
    description = Description(batch=batch, parameters=result.programs[0].meta.get("parameters"))
    return replace(result, description=description, rebuild=CaptureAgain(function, arguments, batch, ranks, compile))


@dataclass(frozen=True)
class CaptureAgain:
    """Captures a function once more, with another batch or for other ranks."""

    function: str | Callable[..., Any]
    arguments: tuple[str, ...]
    batch: int | None
    ranks: int
    compile: str | None = None

    def compiled(self, mode: str) -> Workload:
        """The same compiled in a mode, or "off"."""
        return replace(self, compile=mode)()

    def __call__(
        self, *, batch: int | None = None, ranks: int | None = None, settings: Mapping[str, Any] | None = None
    ) -> Workload:
        if settings:
            raise InputError(f"{self.function}: {fixed(batch, ranks, settings)}")
        return captured(
            self.function,
            arguments=self.arguments,
            batch=self.batch if batch is None else batch,
            ranks=self.ranks if ranks is None else ranks,
            compile=self.compile,
        )


@contextmanager
def _command_line(function: str | Callable[..., Any], arguments: tuple[str, ...]) -> Iterator[None]:
    """While it lasts, the command line is that of a named function's module, and a file's folder the first to import from."""
    if not isinstance(function, str):
        yield
        return
    where = function.rpartition(":")[0]
    folder = [str(Path(where).resolve().parent)] if where.endswith(".py") else []
    with patch.object(sys, "argv", [where, *arguments]), patch.object(sys, "path", [*folder, *sys.path]):
        yield


def _captured(source: str | Callable[..., Any], batch: int | None, ranks: int) -> Workload:
    declared_when_imported()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch's observer says on stderr when it begins and ends
    target = source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__name__)
    with no_collection():  # both import torch, whose objects all stay
        function = function_of(source) if isinstance(source, str) else source
        importlib.import_module(f"steptime._capture.{'capture' if ranks == 1 else 'ranks'}")
    alone = bound(function, target, batch=batch, rank=0, ranks=ranks)
    name = target.rpartition(":")[2]
    if ranks == 1:
        from steptime._capture.capture import captured_step  # noqa: PLC0415 (it imports torch, whose level is set above)

        program, messages = captured_step(alone, name=target)
        return Workload((program,), 1, name, messages)
    from steptime._capture.ranks import capture_ranks  # noqa: PLC0415 (torch.distributed, which one rank does not need)
    from steptime._capture.refusals import in_one_line  # noqa: PLC0415 (the same)

    def of_this_rank() -> Any:
        # As every launcher of ranks says it, and `world` too.
        rank, count = (int(os.environ[variable]) for variable in ("RANK", "WORLD_SIZE"))
        return bound(function, target, batch=batch, rank=rank, ranks=count)()

    with in_one_line(target):
        return capture_ranks(of_this_rank, ranks=ranks, name=name)


def function_of(target: str) -> Callable[..., Any]:
    """The function that a text names."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise InputError(f"{target}: names no function; expected package.module:function or file.py:function")
    module = _from_file(Path(where)) if where.endswith(".py") else _imported(where)
    result = getattr(module, name, None)
    if result is None:
        functions = (key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_"))
        others = ", ".join(sorted(functions)[:5])
        raise InputError(f"{target}: {where} has no {name}; there are {others or 'no functions in it'}")
    if not callable(result):
        raise InputError(f"{target}: is a {type(result).__name__}, not a function; name one that makes or is a training step")
    built: Callable[..., Any] = result
    return built


def bound(function: Callable[..., Any], target: str, *, batch: int | None, rank: int, ranks: int) -> Callable[[], Any]:
    """The function with what it takes of batch, device, rank and ranks."""
    values: dict[str, Any] = {"device": DEVICE, "rank": rank, "ranks": ranks}
    if batch is not None:
        values["batch"] = batch
    parameters = inspect.signature(function).parameters
    if batch is not None and "batch" not in parameters:
        raise InputError(f"{target}: takes no argument batch, so that --batch {batch} would change nothing; leave it out")
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and name == "batch" and batch is None:
            raise InputError(f"{target}: takes a batch; give one with --batch")
        if needed and name not in _KNOWN:
            raise InputError(f"{target}: takes an unknown argument {name}; arguments may be {', '.join(_KNOWN)}")
    chosen = {name: value for name, value in values.items() if name in parameters}
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
        raise InputError(f"{name}: fails while it is imported ({_text(error)})") from error
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
        raise InputError(f"{path}: fails while it is imported ({_text(error)})") from error
    return module


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
