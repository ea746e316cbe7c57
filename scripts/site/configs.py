"""The reference of config keys: which there are, their defaults and what they accept, asked of the readers themselves.

What a key accepts is what the reader says it expected when it is given something else, so the page and the error message of a
wrong value never differ. Meanings are in data/config_keys.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from typing import Any

from steptime._build.dlrm import config as dlrm
from steptime._build.dlrm import constraints
from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.transformer.config import _REQUIRED as TRANSFORMER_REQUIRED
from steptime._build.transformer.config import Transformer
from steptime._build.transformer.parallelism import Parallelism
from steptime._build.transformer.parts import Experts, LatentAttention, Lora, Mamba
from steptime._lookups.generators import Generator
from steptime.errors import InputError

PAGE = """# Config keys

A config is a `.toml` file; [configs](../configs.md) explains how the keys work together. Unknown keys, wrong types and sizes
that do not go together are rejected with one line. *Accepts* is what that line says: the tables are made by asking the readers.

"""
TABLE = {"name": "t", "rows": 100, "dim": 16, "pooling_factor": 1, "skew": {"kind": "uniform"}}
DLRM = {"batch": 8, "dense_features": 4, "bottom": [16], "top": [1], "tables": [TABLE]}
TRANSFORMER = {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "vocabulary": 128, "batch": 8}
WRONG: tuple[Any, ...] = (-7, "?", ["?"])  # no key takes all of these


@dataclass(frozen=True)
class Section:
    """A table of a config: its keys as its reader knows them, and a way to read one with a wrong value."""

    name: str  # in data/config_keys.toml
    title: str
    keys: Sequence[str]
    required: Sequence[str]
    defaults: Mapping[str, Any]
    read: Callable[[str, Any], object]


def sections() -> list[Section]:
    """All tables of both kinds of config."""

    def of_dlrm(key: str, value: Any) -> object:
        cross = {"interaction": "dcnv2"} if key.startswith("cross_") else {}
        return dlrm.dlrm_of({**DLRM, **cross, key: value})

    def of_transformer(key: str, value: Any) -> object:
        return Transformer.from_dict({**TRANSFORMER, key: value})

    def inside(table: str, around: Mapping[str, Any] | None = None) -> Callable[[str, Any], object]:
        return lambda key, value: Transformer.from_dict({**TRANSFORMER, **(around or {}), table: {key: value}})

    skew = {"kind": "uniform"}
    return [
        Section("dlrm", "DLRM", dlrm._KEYS, dlrm._REQUIRED, _defaults(Dlrm), of_dlrm),
        Section(
            "dlrm_tables", "`[[tables]]` of a DLRM", dlrm._TABLE_KEYS, dlrm._TABLE_REQUIRED, _defaults(Table),
            lambda key, value: dlrm.dlrm_of({**DLRM, "tables": [{**TABLE, key: value}]}),
        ),
        Section(
            "dlrm_skew", "`skew` of a table", tuple(dlrm._SKEW_TYPES), ("kind",), _defaults(Generator),
            lambda key, value: dlrm.dlrm_of({**DLRM, "tables": [{**TABLE, "skew": {**skew, key: value}}]}),
        ),
        Section(
            "dlrm_constraints", "`[constraints]` of a DLRM", constraints.KEYS, (), _defaults(constraints.Constraints),
            lambda key, value: dlrm.dlrm_of({**DLRM, "constraints": {key: value}}),
        ),
        Section(
            "transformer", "Transformer", ("kind", *(each.name for each in fields(Transformer)), "ranks"), TRANSFORMER_REQUIRED,
            _defaults(Transformer), of_transformer,
        ),
        *(
            Section(
                f"transformer_{name}", f"`[{name}]` of a Transformer", tuple(_defaults(made)), (), _defaults(made), inside(name)
            )
            for name, made in (
                ("parallel", Parallelism), ("experts", Experts), ("latent_attention", LatentAttention), ("lora", Lora),
                ("mamba", Mamba),
            )
        ),
    ]  # fmt: skip


def meanings() -> dict[str, dict[str, dict[str, str]]]:
    """What every key means, by table."""
    return tomllib.loads(resources.files("steptime").joinpath("data", "config_keys.toml").read_text(encoding="utf-8"))


def page() -> str:
    """The whole page."""
    said = meanings()
    return PAGE + "\n".join(_section(each, said[each.name]) for each in sections())


def _section(section: Section, said: Mapping[str, Mapping[str, str]]) -> str:
    rows = "\n".join(_rows(section, said))
    return f"## {section.title}\n\n| key | accepts | default | meaning |\n|---|---|---|---|\n{rows}\n"


def _rows(section: Section, said: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for key in section.keys:
        given = said[key].get("default")
        default = "required" if key in section.required and given is None else given or _toml(section.defaults.get(key))
        accepted = said[key].get("accepts") or accepts(section, key)
        yield f"| `{key}` | {accepted} | {default} | {said[key]['meaning']} |"


def accepts(section: Section, key: str) -> str:
    """What a reader says that it expected of a key; of several messages the one that says most."""
    messages = [""]
    for wrong in WRONG:
        try:
            section.read(key, wrong)
        except InputError as error:
            messages.append(str(error).partition("; expected ")[2])
    longest = max(messages, key=len).removesuffix(".").replace("'", '"').replace("|", "\\|")
    return re.sub(r"\d{5,}", lambda number: f"{int(number[0]):,}", longest)


def _defaults(made: type) -> dict[str, Any]:
    return {each.name: None if each.default is MISSING else each.default for each in fields(made)}  # type: ignore[arg-type]


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(chr(34) + each + chr(34) for each in value)}]`" if value else "none"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
