"""The reference of commands, from the functions and parsers that the command line is made of."""

from __future__ import annotations

import argparse
import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from steptime._calibrate.harness.command import CALIBRATE
from steptime._calibrate.harness.command import parser as measuring_parser
from steptime._cli.app import app
from steptime._cli.calibrate import _parser as from_run_parser
from steptime_lab.adopt.command import parser as adopt_parser
from steptime_lab.measure.command import JOBS

# Commands that parse their own options, because they also run without this command line.
OWN_PARSERS: dict[str, tuple[tuple[str, Callable[[], argparse.ArgumentParser]], ...]] = {
    "calibrate": (
        ("steptime calibrate -o DIR", lambda: measuring_parser(CALIBRATE)),
        ("steptime calibrate --from-run RECORDING -o FILE", from_run_parser),
    ),
    "adopt": (("steptime adopt NAME -o DIR", adopt_parser),),
    "measure": tuple(
        (f"steptime measure {name} -o DIR", lambda job=job: measuring_parser(job))  # type: ignore[misc]
        for name, job in JOBS.items()
        if job is not CALIBRATE
    ),
}
LAB = ("adopt", "measure", "fit", "validate")
TYPES = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}

PAGE = """# Commands

Every command exits with 0 on success, 2 after one line on stderr if the input cannot be used, and 130 if it was interrupted.
Answers go to stdout and progress to stderr. `steptime COMMAND --help` prints the same text.
[Shell completion](../install.md#shell-completion) knows the options, the platforms and the fabrics.

Commands marked *lab* need the second package, `steptime-lab` ([installing](../install.md)).

"""


def page() -> str:
    """The whole page."""
    commands = {info.name or info.callback.__name__: info.callback for info in app.registered_commands if info.callback}
    listed = "\n".join(
        f"| [`{name}`](#{name}) | {_first_sentence(call)}{' *lab*' if name in LAB else ''} |" for name, call in commands.items()
    )
    sections = "\n".join(_section(name, call) for name, call in commands.items())
    return f"{PAGE}| command | does |\n|---|---|\n{listed}\n\n{sections}"


def _first_sentence(call: Callable[..., Any]) -> str:
    return cell(inspect.getdoc(call) or "")


def _section(name: str, call: Callable[..., Any]) -> str:
    text = f"## {name}\n\n{inspect.getdoc(call)}\n\n"
    if name in OWN_PARSERS:
        return text + "\n".join(_of_parser(usage, made()) for usage, made in OWN_PARSERS[name])
    parameters = list(_parameters(call))
    words = [info.metavar or key.upper() for key, kind, info, default in parameters if isinstance(info, ArgumentInfo)]
    shown = " ".join(("steptime", name, *words, "[OPTIONS]"))
    rows = "\n".join(_row(*each) for each in parameters)
    return f"{text}```text\n{shown}\n```\n\n| argument or option | default | meaning |\n|---|---|---|\n{rows}\n"


def _parameters(call: Callable[..., Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, type, what typer knows of it and default of every parameter that is shown."""
    hints = get_type_hints(call, include_extras=True)
    for key, parameter in inspect.signature(call).parameters.items():
        kind, *extras = get_args(hints[key]) if hasattr(hints[key], "__metadata__") else (hints[key],)
        info = next((each for each in extras if isinstance(each, OptionInfo | ArgumentInfo)), None)
        if info is not None and not info.hidden:
            yield key, kind, info, parameter.default


def _row(key: str, kind: Any, info: OptionInfo | ArgumentInfo, default: Any) -> str:
    plain = _plain(kind)
    if isinstance(info, ArgumentInfo):
        name = f"`{info.metavar or key.upper()}`"
    else:
        words = ", ".join(f"`{each}`" for each in spellings(info))
        value = "" if plain is bool else info.metavar or TYPES.get(plain, "VALUE")
        name = f"{words} `{value}`" if value else words
    required = default is inspect.Parameter.empty
    shown = "required" if required else "" if default in (None, False, "") else f"`{default}`"
    return f"| {name} | {shown} | {cell(info.help or '')} |"


def spellings(info: OptionInfo) -> list[str]:
    """How an option may be written; inside `Annotated` its first spelling stands where a default would."""
    return [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str) and each.startswith("-")]


def _plain(kind: Any) -> Any:
    """The type itself, of one that may be missing or be given several times."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return get_args(kind)[0] if get_origin(kind) is list else kind


def _of_parser(usage: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        words = ", ".join(f"`{each}`" for each in action.option_strings) or f"`{action.metavar or action.dest}`"
        value = f" `{action.metavar or action.dest.upper()}`" if action.option_strings and action.nargs != 0 else ""
        default = action.default
        empty = default in (None, False, (), "", argparse.SUPPRESS)
        given = "required" if action.required else "" if empty else f"`{_shown(default)}`"
        rows.append(f"| {words}{value} | {given} | {cell((action.help or '') % _values(action, parser))} |")
    about = f"{parser.description.strip()}\n\n" if parser.description else ""
    table = "\n".join(rows)
    return f"```text\n{usage}\n```\n\n{about}| argument or option | default | meaning |\n|---|---|---|\n{table}\n"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _values(action: argparse.Action, parser: argparse.ArgumentParser) -> dict[str, Any]:
    return {**vars(action), "prog": parser.prog, "default": _shown(action.default)}


def cell(text: str) -> str:
    """Text that fits into a cell of a table; a word in angle brackets is not markup."""
    text = re.sub(r"\s+", " ", text.replace("\\[", "[")).strip()
    return re.sub(r"<(?=\w)", "&lt;", text).replace("|", "\\|")
