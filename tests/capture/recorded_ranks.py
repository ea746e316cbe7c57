"""Execution traces of rank 0 of four on an H200 (PyTorch 2.11, NCCL 2.28, ranks under MPS): fifth step, one file per step."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

from steptime._program.execution import ExecutionTrace, Node, to_program
from steptime._program.formats.execution_trace import read
from steptime._program.program import Program

FOLDER = Path(__file__).parent / "recorded"
RANKS = 4


def recorded(name: str) -> Program:
    """The program of one of them, with groups of a mesh called by what they are for."""
    data = gzip.decompress((FOLDER / f"{name}.et.json.gz").read_bytes())
    return to_program(_plain(read(data, name)), rank=0, world_size=RANKS)


def _plain(trace: ExecutionTrace) -> ExecutionTrace:
    """Without the ranges in which a class of tensors calls ops on what it wraps; modes show none."""
    nodes: list[Node] = []
    parents: list[int] = []
    place = {-1: -1}
    for row, node in enumerate(trace.nodes):
        above = place[trace.parents[row]]
        if node.name == "PythonSubclass":
            place[row] = above
            continue
        place[row] = len(nodes)
        comm = node.comm and replace(node.comm, group=_name(trace, node.comm.group))
        nodes.append(replace(node, comm=comm))
        parents.append(above)
    groups = {_name(trace, name): replace(group, name=_name(trace, name)) for name, group in trace.groups.items()}
    return replace(trace, nodes=tuple(nodes), parents=tuple(parents), groups=groups)


def _name(trace: ExecutionTrace, group: str) -> str:
    described = trace.groups[group].description if group in trace.groups else ""
    return described if described.startswith("mesh_") else group
