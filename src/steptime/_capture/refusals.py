"""What cannot be captured, said in one line with the op and the line of the user's code that calls it."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from steptime._capture.tensors import use
from steptime.errors import InputError, SteptimeError

_OWN = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_DISTRIBUTIONS = str(Path(_TORCH) / "distributions")
_SCALER = str(Path(_TORCH) / "amp" / "grad_scaler.py")


def is_scaler() -> bool:
    """Whether PyTorch's own gradient scaler is calling."""
    return any(name == _SCALER for name, _ in _frames(sys._getframe()))


def is_validation() -> bool:
    """Whether one of PyTorch's distributions checks its arguments."""
    return any(name.startswith(_DISTRIBUTIONS) for name, _ in _frames(sys._getframe()))


def user_line() -> str:
    """`file:line` of the user's code that is being run; empty where there is none."""
    return _line(_frames(sys._getframe()))


def innermost_line(frame: FrameType | None) -> str:
    """`file:line` of the user's code that a frame is in; empty where it is in none."""
    return _line(_frames(frame))


def on_two_devices(name: str, away: torch.Tensor) -> InputError:
    """What to say where an op takes a tensor of the CPU together with one of the device, and may not."""
    if not use.named:
        return no_gpu()
    return InputError(
        f"{_at_line(name)}: takes a tensor of the CPU {list(away.shape)} together with one of the GPU; "
        "move model and inputs to the device that the function is given ('cuda')"
    )


def no_gpu() -> InputError:
    """What to say of a script for the CPU alone."""
    return InputError("this script never uses a GPU; move model and data to 'cuda'")


def unknown_shape(func: Any) -> InputError:
    """What to say where the shape of a result depends on numbers that are not known, and no bound is."""
    return InputError(
        f"{_at_line(func._schema.name)}: the shape of its result depends on data, and a step is captured without; "
        "use an op with a fixed shape, as torch.where in place of indexing with truth values"
    )


def only_gradients() -> InputError:
    """What to say of sparse tensors that are no gradients of tables."""
    return InputError(
        f"{_at_line('sparse tensors')}: they are captured as gradients of embedding tables alone; use dense ones, or indices "
        "with index_add_"
    )


def line_of(error: BaseException) -> str:
    """`file:line` of the user's code that an error came from; empty where there is none."""
    results = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _line(results[::-1])


def failure(error: BaseException, what: str) -> SteptimeError:
    """An error of the user's code, or of PyTorch in it, as one line."""
    if isinstance(error, SteptimeError):
        return InputError(f"{what}: {error}")
    line = line_of(error)
    text = " ".join(str(error).split())
    if isinstance(error, NotImplementedError) and "meta" in text.lower():
        text = f"{text[:_LONGEST]}; PyTorch knows no shape of its result without running it: see torch.library.register_fake"
    if isinstance(error, TypeError) or (isinstance(error, AttributeError | ImportError) and "torch" in text):
        text = f"{text[: 2 * _LONGEST]} (PyTorch {torch.__version__} is installed)"  # the script may be of another
    return InputError(f"{what}: {type(error).__name__}{f' at {line}' if line else ''}: {text[: 3 * _LONGEST]}")


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """While it lasts, whatever fails is an error of one line about this function."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise failure(error, what) from error


_LONGEST = 200  # characters of a message that is quoted


def _at_line(name: str) -> str:
    line = user_line()
    return f"{name} at {line}" if line else name


def _frames(frame: FrameType | None) -> list[tuple[str, int]]:
    """From the innermost call outwards."""
    results = []
    while frame is not None:
        results.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return results


def _line(frames: list[tuple[str, int]]) -> str:
    """The innermost line that is the user's own, or at least nobody's of PyTorch or Python."""
    others = [each for each in frames if not each[0].startswith((_OWN, _TORCH, _PYTHON, "<"))]
    own = [each for each in others if "site-packages" not in each[0]]
    if not others:
        return ""
    name, number = (own or others)[0]
    return f"{name.removeprefix(f'{Path.cwd()}{os.sep}')}:{number}"
