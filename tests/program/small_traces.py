"""The shipped traces cut down to a few hundred events of every kind, in every format, so that one is read in milliseconds."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.program.chakra_messages import COLL, COMP, node, varint

from steptime._program.formats import saved
from steptime._program.load import load
from steptime._program.program import Program, StreamOrder, Switches, WorkKind
from steptime._program.workload import Workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"
RANKS = 4
# The steps that are kept of a trace that is cut down.
STEPS = ("ProfilerStep#3", "ProfilerStep#4")
# Of everything that is neither communication, copy nor synchronisation, one in so many is kept.
ONE_OF = 10

_CALLS = ("cuda_runtime", "cuda_driver")
_READ = (*_CALLS, "cpu_op", "user_annotation")

Json = dict[str, Any]
Files = dict[str, bytes]


@cache
def shipped(name: str) -> bytes:
    """A shipped file, decompressed."""
    return gzip.decompress((EXAMPLE / f"{name}.json.gz").read_bytes())


@cache
def small_kineto(rank: int) -> bytes:
    """Two steps of a shipped trace with every kind of event in them, a few hundred in all."""
    document = json.loads(shipped(f"rank{rank}.kineto"))
    events = document["traceEvents"]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in STEPS]
    begin, end = min(m["ts"] for m in marks), max(m["ts"] + m["dur"] for m in marks)
    inside = [e for e in events if begin <= e.get("ts", begin) <= end and not _is_work(e)]
    launched = {e["args"]["correlation"] for e in inside if e.get("cat") in _CALLS}
    works = [e for e in events if _is_work(e) and e["args"]["correlation"] in launched]
    works = [e for i, e in enumerate(works) if i % ONE_OF == 0 or e["cat"] != "kernel" or _talks(e)]
    kept = {e["args"]["correlation"] for e in works}
    rest = [e for i, e in enumerate(inside) if _needed(e, kept) or (i % (2 * ONE_OF) == 0 and e.get("cat") not in _READ)]
    document["traceEvents"] = [e for e in events if e.get("ph") == "M"][:6] + works + rest
    return json.dumps(document).encode()


def _is_work(event: Json) -> bool:
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _talks(event: Json) -> bool:
    return "nccl" in event["name"] or event["name"] == "record_param_comms"


def _needed(event: Json, launches: set[int]) -> bool:
    name, category = event.get("name", ""), event.get("cat")
    if category in _CALLS:
        return event["args"]["correlation"] in launches or "Synchronize" in name or "Event" in name
    return category == "user_annotation" or (category == "cpu_op" and _chosen(event))


def _chosen(op: Json) -> bool:
    """Whether an op is kept; by name, so that the same ones are in both kinds of trace."""
    return _talks(op) or sum(op["name"].encode()) % ONE_OF == 0


@cache
def small_et(rank: int) -> bytes:
    """A shipped execution trace cut down to its collectives, one node in some, and whatever encloses them."""
    document = json.loads(shipped(f"rank{rank}.et"))
    by_id = {n["id"]: n for n in document["nodes"]}
    wanted = {n["id"] for n in document["nodes"] if _chosen(n) or n["name"].startswith(("##", "["))}
    for each in sorted(wanted):
        above = by_id[each]["ctrl_deps"]
        while above in by_id and above not in wanted:
            wanted.add(above)
            above = by_id[above]["ctrl_deps"]
    document["nodes"] = [n for n in document["nodes"] if n["id"] in wanted]
    return json.dumps(document).encode()


@cache
def small_workload() -> Workload:
    """The cut-down traces of all ranks, read."""
    return read_all({f"rank{r}.kineto.json": small_kineto(r) for r in range(RANKS)})


@cache
def small_saved() -> bytes:
    """The same, saved, some of its ops with switches, and orders of streams."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "small.json"
        workload = small_workload()
        first = workload.programs[0]
        switched = (replace(each, switches=Switches(tf32=index % 2 == 0)) for index, each in enumerate(first.signatures))
        orders = (StreamOrder(1, 0, 2), StreamOrder(3, 2, 0, 2, 3), StreamOrder(5, 5))
        first = replace(first, signatures=tuple(switched), orders=orders)
        saved.write(replace(workload, programs=(first, *workload.programs[1:])), file)
        return file.read_bytes()


@cache
def small_chakra(rank: int) -> bytes:
    """The cut-down trace of one rank as a Chakra trace."""
    return chakra_bytes(small_workload().programs[rank])


def chakra_bytes(program: Program) -> bytes:
    """The device work of a program, one node after the other per stream, as length-delimited messages."""
    works, last, nodes = program.works, dict[int, int](), [b""]
    for row in range(min(len(works), 60)):
        stream = int(works.stream[row])
        deps = (last[stream],) if stream in last else ()
        last[stream] = row + 1
        collective = works.kind[row] == WorkKind.COLLECTIVE
        start, took = int(works.start_ns[row]) // 1000 + 1, int(works.end_ns[row] - works.start_ns[row]) // 1000
        attrs: Json = {"stream": stream, "is_cpu_op": False}
        if collective:
            attrs |= {"comm_type": 0, "comm_size": program.collectives[works.collective[row]].bytes_in, "pg_name": "0"}
        name = program.names[works.name[row]][:40]
        nodes.append(node(row + 1, COLL if collective else COMP, deps, name=name, start=start, took=took, **attrs))
    return b"".join(varint(len(n)) + n for n in nodes)


def read_all(files: Files) -> Workload:
    """Load files that exist in memory only, through a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        return load([folder])
