"""PyTorch execution traces, every schema: 1.0.0 and 1.0.1 (flat nodes) and 1.0.2-chakra to 1.1.1-chakra (nested nodes).

What the versions add: 1.0.2 nests arguments and moves the rest into `attrs`; 1.0.3 describes process groups beside naming them;
1.0.4 adds the kernel backend; 1.1.0 attributes of collectives; 1.1.1 strides. Each node says by its own form how to read it.
The writer appends node by node, so a recording that was killed is a JSON text cut short: its whole nodes are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import lt
from typing import Any

import msgspec

from steptime._program.collectives import WAIT
from steptime._program.execution import COMM_NODE, Comm, ExecutionTrace, Node, ProcessGroup
from steptime._program.formats import Format, TraceReader
from steptime._program.formats.arguments import ADDRESS, ArgumentForm, ArgumentLists, comm, integer, text
from steptime._program.formats.kineto.stream import TOO_DEEP_AT_MOST, value_end
from steptime._program.program import MOST_RANKS, Signature, Value
from steptime.errors import TraceError

_KNOWN = re.compile(r"1\.0\.[0-4]|1\.1\.[01]")
_NODE_BEGIN = re.compile(rb'\{\s*"(?:id|name)"\s*:')
_BARE_NOT_A_NUMBER = re.compile(r"(?<=[\[,])(\s*)(-?(?:inf|nan))(?=\s*[,\]])")
_GROUPS_NODE = "process_group:init"
_NO_ARGUMENTS = Signature()


def is_execution_trace(document: Any) -> bool:
    """Whether a parsed JSON document is an execution trace."""
    return isinstance(document, dict) and isinstance(document.get("schema"), str) and isinstance(document.get("nodes"), list)


def read(data: bytes, source: str, *, bare: str | None = None, around: str = "") -> ExecutionTrace:
    """Read one execution trace from the bytes of its JSON text.

    Of nodes whose names begin with `bare`, no more than names. Those that are called `around` are left out: what is inside
    them counts as inside what is around them.
    """
    warnings: list[str] = []
    try:
        document = _Document.parsed(data)
        nodes, unusable = _nodes(document, bare, around)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document, warnings = _damaged(data, source)
        nodes, unusable = _nodes(document, bare, around)
    schema = document.schema
    if not _KNOWN.match(schema):
        warnings.append(f"schema {schema} is not known; it is read like the newest known one, 1.1.1")
    if not nodes:
        raise TraceError(f"{source}: an execution trace of schema {schema} with no readable node; record it again")
    if unusable:
        warnings.append(f"{unusable} nodes have no usable id or name and are left out")
    return _assemble(schema, nodes, source, warnings)


_NOTHING = msgspec.Raw()


class _RawNode(msgspec.Struct, gc=False):
    """A node as it is written, with those parts unread that are long and often not asked for."""

    id: Any = None
    name: Any = None
    ctrl_deps: Any = msgspec.UNSET
    parent: Any = None
    rf_id: Any = None
    seq_id: Any = None
    tid: Any = None
    fw_tid: Any = None
    inputs: msgspec.Raw = _NOTHING
    input_shapes: msgspec.Raw = _NOTHING
    input_types: msgspec.Raw = _NOTHING
    input_strides: msgspec.Raw = _NOTHING
    outputs: msgspec.Raw = _NOTHING
    output_shapes: msgspec.Raw = _NOTHING
    output_types: msgspec.Raw = _NOTHING
    output_strides: msgspec.Raw = _NOTHING
    attrs: msgspec.Raw = _NOTHING


class _Document(msgspec.Struct):
    schema: str
    nodes: list[_RawNode | None]

    @classmethod
    def parsed(cls, data: bytes) -> _Document:
        """A document without damage."""
        if not data.isascii():
            data.decode()  # parts that are not read are not looked at
        return _DOCUMENT.decode(data)


class _Side(msgspec.Struct, gc=False):
    """Arguments or results, in the nested form."""

    values: Any = None
    shapes: msgspec.Raw = _NOTHING
    types: msgspec.Raw = _NOTHING
    strides: msgspec.Raw = _NOTHING


class _Attribute(msgspec.Struct, gc=False):
    name: Any = None
    value: Any = None


_DOCUMENT, _NODE = msgspec.json.Decoder(_Document), msgspec.json.Decoder(_RawNode)
_SIDE, _ATTRIBUTES = msgspec.json.Decoder(_Side), msgspec.json.Decoder(list[_Attribute])


def _damaged(data: bytes, source: str) -> tuple[_Document, list[str]]:
    """What can be read of a text that is no plain trace, and what to say of it."""
    document, warnings = _parse(data, source)
    if not is_execution_trace(document):
        raise TraceError(f'{source}: not an execution trace; expected a JSON object with a text "schema" and a list "nodes"')
    raw = [_NODE.decode(msgspec.json.encode(each)) if isinstance(each, dict) else None for each in document["nodes"]]
    return _Document(document["schema"], raw), warnings


def _parse(data: bytes, source: str) -> tuple[Any, list[str]]:
    try:
        return msgspec.json.decode(data), []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    document = data.decode("utf-8", errors="replace")
    warnings = ["the text is not UTF-8; characters were replaced"] if "\ufffd" in document else []
    document = _BARE_NOT_A_NUMBER.sub(r'\1"\2"', document)
    try:
        return msgspec.json.decode(document), warnings
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error)
    nodes, gaps = _recover(document.encode())
    schema = re.search(r'"schema"\s*:\s*"([^"]*)"', document)
    if schema is None or '"nodes"' not in document or not nodes:
        raise TraceError(f"{source}: not an execution trace, or too damaged to read ({reason}); record it again")
    warnings.append(f"the text is damaged or cut short ({reason}); {len(nodes)} whole nodes were read, {gaps} places were not")
    return {"schema": schema.group(1), "nodes": nodes}, warnings


def _recover(document: bytes) -> tuple[list[Any], int]:
    nodes: list[Any] = []
    gaps = too_deep = 0
    at = max(0, document.find(b'"nodes"'))
    while begin := _NODE_BEGIN.search(document, at):
        node = None
        at = begin.start() + 1
        try:
            end = value_end(document, begin.start())
            if end is not None:
                at = end
                node = msgspec.json.decode(document[begin.start() : end])
        except msgspec.DecodeError:
            node = None  # a number beyond every float
        except RecursionError:
            too_deep += 1
            if too_deep > TOO_DEEP_AT_MOST:
                return nodes, gaps + 1
        gaps += node is None
        # Attributes look like nodes from outside; only a node has both.
        if isinstance(node, dict) and "id" in node and "name" in node:
            nodes.append(node)
    return nodes, gaps


def _nodes(document: _Document, bare: str | None, around: str) -> tuple[list[Node], int]:
    """The nodes, and how many there are besides that cannot be used."""
    raw = [each for each in document.nodes if each is not None]
    if around:
        left_out = {each.id: _parent(each) for each in raw if each.name == around}
        raw = [each for each in raw if each.name != around]
        for each in raw:
            parent = _parent(each)
            for _ in left_out:  # in a circle at most
                if parent not in left_out:
                    break
                parent = left_out[parent]
            each.ctrl_deps = parent
    nodes = [node for each in raw if (node := _node(each, bare)) is not None]
    return nodes, len(raw) - len(nodes) + document.nodes.count(None)


def _node(raw: _RawNode, bare: str | None) -> Node | None:
    if integer(raw.id) < 0 or not isinstance(raw.name, str):
        return None
    if bare is not None and raw.name.startswith(bare):
        return Node(raw.id, raw.name, _parent(raw), signature=_NO_ARGUMENTS)
    attrs = _attributes(raw.attrs)
    signature = Signature(_arguments(raw, "input"), _arguments(raw, "output"))
    return Node(
        id=raw.id,
        name=raw.name,
        parent=_parent(raw),
        rf_id=integer(attrs.get("rf_id", raw.rf_id)),
        seq_id=integer(attrs.get("seq_id", raw.seq_id)),
        tid=integer(attrs.get("tid", raw.tid), 0),
        fw_tid=integer(attrs.get("fw_tid", raw.fw_tid), 0),
        signature=signature,
        comm=comm(_side(raw, "input"), signature, attrs) if raw.name == COMM_NODE else None,
    )


def _decoded(raw: msgspec.Raw | bytes) -> Any:
    return msgspec.json.decode(raw) if bytes(raw) else None


def _attributes(raw: msgspec.Raw) -> dict[str, Any]:
    try:
        return {each.name: each.value for each in _ATTRIBUTES.decode(raw) if isinstance(each.name, str)} if bytes(raw) else {}
    except msgspec.ValidationError:  # some are no attributes
        attrs = _decoded(raw)
    named = (each for each in (attrs if isinstance(attrs, list) else ()) if isinstance(each, dict))
    return {each["name"]: each.get("value") for each in named if isinstance(each.get("name"), str)}


def _parent(raw: _RawNode) -> int:
    parent = raw.parent if raw.ctrl_deps is msgspec.UNSET else raw.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else None
    return integer(parent, 0)


def _arguments(raw: _RawNode, side: str) -> tuple[Value, ...]:
    written = bytes(getattr(raw, f"{side}s"))
    if not written.startswith(b"{"):
        return _side(raw, side).parsed()
    nested = _SIDE.decode(written)
    if not isinstance(nested.values, list) or not nested.values:
        return ()
    shapes, types, strides = bytes(nested.shapes), bytes(nested.types), bytes(nested.strides)
    return _form(shapes, types, strides, len(nested.values)).parsed(nested.values)


@lru_cache(maxsize=4096)
def _form(shapes: bytes, types: bytes, strides: bytes, count: int) -> ArgumentForm:
    return ArgumentForm.of(_decoded(shapes), _decoded(types), _decoded(strides), count)


def _side(raw: _RawNode, side: str) -> ArgumentLists:
    nested = _decoded(getattr(raw, f"{side}s"))
    if isinstance(nested, dict):
        return ArgumentLists.of(nested.get("values"), nested.get("shapes"), nested.get("types"), nested.get("strides"))
    rest = (_decoded(getattr(raw, f"{side}_{column}")) for column in ("shapes", "types", "strides"))
    return ArgumentLists.of(nested, *rest)


def _assemble(schema: str, raw: Sequence[Node], source: str, warnings: list[str]) -> ExecutionTrace:
    nodes, parents, messages = enclosing(raw)
    groups, unread = _configured_groups(nodes)
    warnings += [*messages, *unread]
    names = _names_of_addresses(nodes)
    if len(names) > 1:
        warnings.append(f"{len(names)} process groups are known by address only; they are numbered in order of first use")
    for node in nodes:
        if node.comm and node.comm.kind != WAIT:
            _add_group(groups, names.get(node.comm.group, node.comm.group), node.comm)
    named = tuple(_renamed(node, names) for node in nodes)
    nodes, parents = _without_markers(named, parents)
    size = _world_size(groups)
    rank = _rank([node.comm for node in nodes if node.comm], groups, size)
    return ExecutionTrace(schema, nodes, parents, groups, rank, size, source, tuple(f"{source}: {each}" for each in warnings))


def enclosing(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[int, ...], tuple[str, ...]]:
    """Order nodes by id with parents first; give each the row of its parent; say which parents are missing or circular."""
    ordered = sorted(nodes, key=lambda node: node.id)
    first: dict[int, int] = {}
    for row, node in enumerate(ordered):
        first.setdefault(node.id, row)
    parents = [first.get(node.parent, -1) if node.parent != node.id else -1 for node in ordered]
    messages = [*_duplicates(ordered, first), *_dangling(ordered, first)]
    if all(map(lt, parents, range(len(parents)))):  # as they are written
        return tuple(ordered), tuple(parents), tuple(messages)
    messages += _cut_cycles(ordered, parents)
    order = _parents_first(parents)
    position = {row: at for at, row in enumerate(order)}
    rows = tuple(position[parents[row]] if parents[row] >= 0 else -1 for row in order)
    return tuple(ordered[row] for row in order), rows, tuple(messages)


def _duplicates(nodes: Sequence[Node], first: Mapping[int, int]) -> list[str]:
    again = [node for row, node in enumerate(nodes) if first[node.id] != row]
    if not again:
        return []
    return [f"{len(again)} nodes repeat an id (first: {again[0].id}, {again[0].name}); children are given to the first of each"]


def _dangling(nodes: Sequence[Node], first: Mapping[int, int]) -> list[str]:
    # A thread names the process (id 1) as its parent; a recording that was cut short lacks the process, which is no loss.
    lost = [node for node in nodes if node.parent not in first and not node.marker and node.parent not in (0, 1)]
    if not lost:
        return []
    return [
        f"{len(lost)} nodes name a parent that is not there (first: {lost[0].id}, {lost[0].name}); they become top-level ops"
    ]


def _cut_cycles(nodes: Sequence[Node], parents: list[int]) -> list[str]:
    cut = []
    done = [False] * len(parents)
    for row in range(len(parents)):
        path: dict[int, None] = {}
        at = row
        while at >= 0 and not done[at]:
            if at in path:
                cut.append(at)
                parents[at] = -1
                break
            path[at] = None
            at = parents[at]
        for seen in path:
            done[seen] = True
    if not cut:
        return []
    names = ", ".join(f"{nodes[row].id} ({nodes[row].name})" for row in cut[:3])
    return [f"{len(cut)} circles of parents were cut at node {names}; these become top-level ops"]


def _parents_first(parents: Sequence[int]) -> list[int]:
    order: list[int] = []
    placed = [False] * len(parents)
    for row in range(len(parents)):
        waiting = []
        at = row
        while at >= 0 and not placed[at]:
            waiting.append(at)
            placed[at] = True
            at = parents[at]
        order.extend(reversed(waiting))
    return order


def _configured_groups(nodes: Sequence[Node]) -> tuple[dict[str, ProcessGroup], list[str]]:
    groups: dict[str, ProcessGroup] = {}
    for node in nodes:
        if _GROUPS_NODE not in node.name or not node.signature.inputs:
            continue
        try:
            entries = msgspec.json.decode(text(node.signature.inputs[0]))
        except (msgspec.DecodeError, RecursionError) as error:
            return groups, [f"the process groups in node {node.id} cannot be read ({error}); the collectives tell them"]
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict) and "pg_name" in entry:
                ranks = entry.get("ranks")
                known = tuple(sorted({rank for rank in ranks if _plausible(rank)})) if isinstance(ranks, list) else ()
                size = max(_size(entry.get("group_size")), len(known))
                name = str(entry["pg_name"])
                # An empty list of ranks stands for everybody.
                groups[name] = ProcessGroup(name, text(entry.get("pg_desc")), known or _range(0, 1, size), size)
    return groups, []


def _plausible(rank: Any) -> bool:
    return 0 <= integer(rank) < MOST_RANKS


def _size(value: Any) -> int:
    size = integer(value, 0)
    return size if 0 < size <= MOST_RANKS else 0


def _range(start: int, stride: int, size: int) -> tuple[int, ...]:
    # Irregular groups are recorded with stride -1.
    regular = size > 0 and start >= 0 and (stride > 0 or size == 1)
    last = start + max(1, stride) * (size - 1)
    return tuple(range(start, last + 1, max(1, stride))) if regular and _plausible(last) else ()


def _names_of_addresses(nodes: Sequence[Node]) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in nodes:
        if node.comm and node.comm.group.startswith(ADDRESS) and node.comm.kind != WAIT:
            names.setdefault(node.comm.group, f"pg{len(names)}")
    return names


def _add_group(groups: dict[str, ProcessGroup], name: str, comm: Comm) -> None:
    start, stride, size = *comm.pattern[:2], _size(comm.pattern[2])
    known = groups.get(name, ProcessGroup(name))
    ranks = known.ranks or _range(start, stride, size)
    peers = max(len(comm.in_splits), len(comm.out_splits))
    groups[name] = replace(known, ranks=ranks, size=max(known.size, len(ranks), size, peers))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if node.comm is None or not node.comm.group.startswith(ADDRESS):
        return node
    return replace(node, comm=replace(node.comm, group=names.get(node.comm.group, "")))


def _without_markers(nodes: Sequence[Node], parents: Sequence[int]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    position: dict[int, int] = {}
    for row, node in enumerate(nodes):
        if not node.marker:
            position[row] = len(position)
    return tuple(nodes[row] for row in position), tuple(position.get(parents[row], -1) for row in position)


def _rank(comms: Sequence[Comm], groups: Mapping[str, ProcessGroup], world_size: int | None) -> int | None:
    votes: dict[int, int] = {}
    for each in comms:
        group = groups.get(each.group, ProcessGroup(each.group))
        # Without a list of ranks, a group says who we are only if it is everybody.
        everybody = not group.ranks and each.kind != WAIT and (len(groups) == 1 or 0 < group.size == world_size)
        members = range(each.rank + 1) if everybody else group.ranks
        if each.caller is not None and each.caller < len(members):
            rank = members[each.caller]
            votes[rank] = votes.get(rank, 0) + 1
    return max(sorted(votes), key=votes.__getitem__) if votes else None


def _world_size(groups: Mapping[str, ProcessGroup]) -> int | None:
    sizes = [max(group.size, max(group.ranks, default=-1) + 1) for group in groups.values()]
    return max(sizes, default=0) or None


def _recognises(head: bytes, _name: str) -> bool:
    # Kineto writes "schemaVersion"; a document whose keys were sorted has its schema behind the nodes.
    return b'"nodes"' in head and b'"traceEvents"' not in head and (b'"schema"' in head or b'"fw_parent"' in head)


def _read_file(reader: TraceReader) -> ExecutionTrace:
    trace = read(reader.read_all(), reader.source)
    return replace(trace, warnings=(*reader.lost(), *trace.warnings))


FORMAT = Format("execution_trace", _recognises, _read_file)
