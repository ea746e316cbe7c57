"""What the shell offers where a name is typed: platforms, fabrics, devices, hosts and keys of configs.

One table for all commands, by the option's name; files are left to the shell. Nothing here loads a model, so that a key press
takes a moment.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from inspect import signature
from pathlib import Path
from typing import get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

import steptime

VARIABLE = "_STEPTIME_COMPLETE"
"""The environment variable by which a shell asks."""

_DATA = Path(steptime.__file__).parent / "data"
_TABLES = {"dlrm": "", "transformer": "", "dlrm_constraints": "constraints."}
_NAMED_TABLES = "transformer_"


def platforms(incomplete: str) -> list[str]:
    """Names of platforms; the last one of a list with commas. A path is left to the shell."""
    from steptime._platforms.names import named, shipped

    before, comma, _ = incomplete.rpartition(",")
    return [] if "/" in incomplete else _beginning(incomplete, (f"{before}{comma}{named(*each)}" for each in shipped()))


def fabrics(incomplete: str) -> list[str]:
    """Names of fabrics."""
    return _files("fabrics", ".toml", incomplete)


def devices(incomplete: str) -> list[str]:
    """Names of devices."""
    return _files("devices", ".toml", incomplete)


def hosts(incomplete: str) -> list[str]:
    """Names of hosts."""
    return _files("hosts", ".json", incomplete)


def settings(incomplete: str) -> list[str]:
    """Keys of configs, dotted, with the sign that a value follows."""
    tables = tomllib.loads((_DATA / "config_keys.toml").read_text(encoding="utf-8"))
    keys = {
        f"{_TABLES[table] if table in _TABLES else table.removeprefix(_NAMED_TABLES) + '.'}{key}="
        for table, known in tables.items()
        if table in _TABLES or table.startswith(_NAMED_TABLES)
        for key in known
    }
    return _beginning(incomplete, sorted(keys))


def objectives(incomplete: str) -> list[str]:
    """What a plan for several days is chosen by."""
    return _beginning(incomplete, ("worst", "mean"))


BY_OPTION: dict[str, Callable[[str], list[str]]] = {
    "--platform": platforms,
    "--fabric": fabrics,
    "--like": fabrics,
    "--device": devices,
    "--host": hosts,
    "--set": settings,
    "--objective": objectives,
    "--before": platforms,
    "--after": platforms,
}
BY_ARGUMENT: dict[tuple[str, str], Callable[[str], list[str]]] = {("platforms", "name"): platforms}


def complete(app: typer.Typer) -> None:
    """Tells every command what to offer for its options."""
    for info in app.registered_commands:
        assert info.callback is not None
        hints = get_type_hints(info.callback, include_extras=True)
        info.callback.__annotations__ = hints  # else they are made anew, without what is added here, when typer asks
        for key in signature(info.callback).parameters:
            for each in get_args(hints.get(key))[1:]:
                if isinstance(each, OptionInfo):
                    spelled = (each.default, *(each.param_decls or ()))
                    each.autocompletion = next((BY_OPTION[name] for name in spelled if name in BY_OPTION), None)
                elif isinstance(each, ArgumentInfo):
                    each.autocompletion = BY_ARGUMENT.get((info.name or info.callback.__name__, key))


def _files(folder: str, suffix: str, incomplete: str) -> list[str]:
    return _beginning(incomplete, sorted(file.stem for file in (_DATA / folder).glob(f"*{suffix}")))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
