"""The winner as a config of ours, and plain values as TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime._build.transformer.config import Transformer
from steptime._plan.space import ModelLayout


def config_text(model: Transformer, layout: ModelLayout, comment: str) -> str:
    """The model with a layout, as `steptime predict` reads it."""
    return toml_text(layout.of(model).to_dict(), comment)


def toml_text(values: Mapping[str, Any], comment: str) -> str:
    """Plain values as TOML under a comment, tables last."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    for name, table in values.items():
        if isinstance(table, Mapping) and table:
            lines += ["", f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        if any(isinstance(each, Mapping) for each in value):  # a table to a line
            return "[\n" + "".join(f"  {_value(each)},\n" for each in value) + "]"
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, str):
        escaped = "".join(_ESCAPES.get(each, each if each.isprintable() else f"\\U{ord(each):08x}") for each in value)
        return f'"{escaped}"'
    return repr(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


_ESCAPES = {"\\": "\\\\", '"': '\\"'}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
