"""The reference of the Python package, from its public names, their signatures and docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import steptime

PAGE = """# Python API

Everything public is a name of the package `steptime`; modules whose names begin with an underscore are private.
[steptime in Python](../python.md) shows how they are used and what is promised about them.

"""


def page() -> str:
    """The whole page."""
    public = {name: getattr(steptime, name) for name in steptime.__all__ if name != "__version__"}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    errors = {name: value for name, value in public.items() if _is_error(value)}
    classes = {name: value for name, value in public.items() if name not in functions and name not in errors}
    return "".join(
        (
            PAGE,
            "## Functions\n\n",
            *(_function(f"steptime.{name}", value, "###") for name, value in functions.items()),
            "## Classes\n\n",
            *(_class(name, value) for name, value in classes.items()),
            "## Errors\n\n",
            "| error | is a | raised when |\n|---|---|---|\n",
            *(f"| `{name}` | `{value.__base__.__name__}` | {_one_line(value)} |\n" for name, value in errors.items()),
        )
    )


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _one_line(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split())


def _function(name: str, call: Callable[..., Any], level: str) -> str:
    parameters = inspect.signature(call).parameters.values()
    shown = [str(each.replace(annotation=inspect.Parameter.empty)).replace("PosixPath", "Path") for each in parameters]
    for index, each in enumerate(parameters):  # a star before the first that has to be named
        named = each.kind is inspect.Parameter.KEYWORD_ONLY
        if named and not any(str(other).startswith("*") for other in list(parameters)[:index]):
            shown.insert(index, "*")
            break
    text = f"{name}({', '.join(each for each in shown if each != 'self')})"
    rows = "".join(
        f"| `{each.name}` | `{_annotation(each.annotation)}` | {_default(each.default)} |\n"
        for each in parameters
        if each.name != "self"
    )
    table = f"| parameter | type | default |\n|---|---|---|\n{rows}\n" if rows else ""
    returned = _annotation(inspect.signature(call).return_annotation)
    doc = inspect.getdoc(call) or ""
    return f"{level} `{name}`\n\n```text\n{text}\n```\n\n{doc}\n\n{table}Returns `{returned}`.\n\n"


def _annotation(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return "None"
    return str(getattr(annotation, "__name__", annotation)).replace("|", "\\|") if annotation is not None else "None"


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else f"`{value!r}`"


def _class(name: str, made: type) -> str:
    rows, methods = [], []
    for key in sorted(_public(made)):
        value = inspect.getattr_static(made, key)
        call = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(call):
            methods.append(f"| `{key}({_short(call)})` | {_one_line(call)} |\n")
        elif isinstance(value, property):
            rows.append(f"| `{key}` | {_one_line(value)} |\n")
    table = "".join((*rows, *methods))
    listed = f"| attribute or method | |\n|---|---|\n{table}\n" if table else ""
    return f"### `steptime.{name}`\n\n{inspect.getdoc(made) or ''}\n\n{listed}"


def _public(made: type) -> set[str]:
    """Names that the class and what it is made of define; not those of tuples, mappings and the like."""
    own = [base for base in made.__mro__ if base.__module__.startswith("steptime")]
    return {key for base in own for key in vars(base) if not key.startswith("_")}


def _short(call: Callable[..., Any]) -> str:
    return ", ".join(
        str(each.replace(annotation=inspect.Parameter.empty))
        for key, each in inspect.signature(call).parameters.items()
        if key not in ("self", "cls")
    )
