"""Execution traces of the cases, one per distinct program, and the op calls the workloads make; in processes of their own."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._calibrate.harness.group import Group, no_collector
from steptime._files import whole, write_whole
from steptime_lab.measure.kernels.cases import FILE_NAME, read_calls, write_calls
from steptime_lab.measure.restarts import Attempts, free

if TYPE_CHECKING:
    from steptime_lab.workloads.case import Case, Step

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


_WARM_UP = 2


def programs_file(folder: Path, case: str) -> Path:
    """Says whose execution trace stands for which rank; written when they are all there."""
    return folder / "traces" / f"{case}.programs.json"


def work(attempts: Attempts, cases: list[Case], plan: Mapping[str, Any]) -> None:
    """Records every case; of the first of each kind also the op calls it makes."""
    called = set(plan["called"])
    with no_collector():
        for case in cases:
            if not attempts.time_left():
                break
            kind = kind_of(case)
            call = partial(_record, case, attempts, calls_of="" if kind in called else kind)
            if attempts.attempt(case.name, call) is not None:
                attempts.progress.step()
                called.add(kind)


def kind_of(case: Case) -> str:
    """Cases of one kind make the same ops, at other sizes."""
    return "-".join(filter(None, (case.workload, case.config.get("lookup"), case.precision)))


def _record(case: Case, attempts: Attempts, *, calls_of: str) -> bool:
    from steptime_lab.workloads.case import build

    group, folder = attempts.group, attempts.session.folder
    step = build(case, group, group.device)
    try:
        for _ in range(_WARM_UP):
            step()
        group.barrier()
        document = stripped(observed(step, group))
        owner = owners(group.gather_text(digest(document)))
        if owner[group.rank] == group.rank:
            write_packed(folder / "traces" / f"{case.name}.rank{group.rank}.et.json.gz", document)
        if calls_of:
            record_op_calls(calls_of, step, attempts)
        # Only after every file is in its place: this one says that the case is done.
        if group.all_agree(True) and group.rank == 0:
            write_whole(programs_file(folder, case.name), json.dumps({"ranks": case.ranks, "programs": owner}))
    finally:
        step.close()
        del step
        free(group)
    return True


def observed(step: Step, group: Group) -> dict[str, Any]:
    """The execution trace of one step."""
    from steptime_lab.measure.device_profile import execution_trace

    with tempfile.TemporaryDirectory(prefix="steptime") as folder:
        file = Path(folder) / "et.json"
        with execution_trace(file):
            step()
            group.synchronize()
        return parse(file.read_text(encoding="utf-8", errors="replace"))


def record_op_calls(kind: str, step: Step, attempts: Attempts) -> None:
    """Adds the distinct op calls of a step to those that `measure kernels` and `measure host` ask.

    Every rank records, though rank 0 alone keeps its calls: what fails then fails on all of them, and none waits for another.
    """
    from steptime_lab.measure.kernels.record import record_calls

    calls = record_calls(step)
    attempts.group.synchronize()
    if attempts.group.rank == 0:
        write_calls(attempts.session.folder / FILE_NAME, kind, calls)


def recorded_kinds(folder: Path) -> list[str]:
    """The kinds of cases whose op calls are kept already."""
    return sorted(read_calls(folder / FILE_NAME)) if (folder / FILE_NAME).exists() else []
