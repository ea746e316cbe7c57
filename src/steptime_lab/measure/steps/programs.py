"""Execution traces as they are kept: without what no reader needs, and one for all ranks that run the same program."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steptime._files import whole

# The observer's counter at record time is no part of a program, and schemas repeat what the name says.
_KEPT_ATTRIBUTES = ("seq_id", "tid", "fw_tid")
# What a reader takes for an attribute that is not there.
_DEFAULTS = {"seq_id": -1, "fw_tid": 0}
_COLLECTIVE = "record_param_comms"
# PyTorch writes infinities bare, which is not JSON.
_BARE_NOT_A_NUMBER = re.compile(r"(?<=[\[,])(\s*)(-?(?:inf|nan))(?=\s*[,\]])")

Document = dict[str, Any]


def parse(text: str) -> Document:
    """An execution trace as PyTorch wrote it."""
    try:
        document: Document = json.loads(text)
    except ValueError:
        document = json.loads(_BARE_NOT_A_NUMBER.sub(r'\1"\2"', text))
    return document


def stripped(document: Document) -> Document:
    """The same trace with nodes in order of start, less attributes that repeat a default or say nothing of the program."""
    nodes = [_stripped_node(node) for node in sorted(document["nodes"], key=lambda node: node["id"])]
    # Process, date and clock of the recording are in the recipe; without them the same program gives the same file.
    return {"schema": document["schema"], "pid": 0, "time": "", "start_ts": 0, "nodes": nodes, "finish_ts": 0}


def _stripped_node(node: Document) -> Document:
    attributes = node.get("attrs", ())
    own = [entry for entry in attributes if entry["name"] in _KEPT_ATTRIBUTES or node["name"] == _COLLECTIVE]
    telling = [entry for entry in own if entry["value"] not in ("", _DEFAULTS.get(entry["name"], ""))]
    return {**node, "attrs": telling}


def digest(document: Document) -> str:
    """The same for two ranks whose ops have the same names, shapes and types in the same order; 16 hexadecimal digits."""
    seen = hashlib.sha256()
    for node in document["nodes"]:
        inputs, outputs = node["inputs"], node["outputs"]
        told = [node["name"], inputs["shapes"], inputs["types"], outputs["shapes"], outputs["types"]]
        if node["name"] == _COLLECTIVE:
            told.append(_splits(inputs))
        seen.update(json.dumps(told, separators=(",", ":")).encode())
    return seen.hexdigest()[:16]


def _splits(inputs: Document) -> list[Any]:
    """Lists of numbers among the arguments: how an uneven exchange is split."""
    pairs = zip(inputs["values"], inputs["types"], strict=False)
    return [value for value, kind in pairs if isinstance(value, list) and str(kind).startswith("GenericList[Int")]


def owners(digests: Sequence[str]) -> list[int]:
    """Per rank the first rank that runs the same program."""
    return [digests.index(digest) for digest in digests]


def write_packed(file: Path, document: Document) -> None:
    """Compact and compressed, whole or not at all; the same content gives the same bytes."""
    with whole(file) as unfinished, unfinished.open("wb") as target, gzip.GzipFile("", "wb", 9, target, mtime=0) as packed:
        packed.write(json.dumps(document, separators=(",", ":")).encode())
