"""What memory the arguments of ops name: per op, the storages on the device that it takes and returns, how far into them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from steptime._ops.catalogue import FLAT_GATHER
from steptime._ops.table import Arguments, OpTable, op_table
from steptime._program.program import Program, Signature, Tensor
from steptime._units import dtype_bytes

# The name of a storage, bytes from its begin to the end of a tensor in it, and whether that holds fractions.
Extent = tuple[int, int, bool]

_UNKNOWN_ITEM_BYTES = 4
_WHOLE = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))
# Autograd functions of torch.distributed.tensor (_api.py, _redistribute.py): they pass wrappers on.
_OF_DISTRIBUTED_TENSORS = frozenset(("_ToTorchTensor", "_FromTorchTensor", "Redistribute"))
_COPY_OUT_FRAME, _COPY_OUT = "FSDP::all_gather_copy_out", "fsdp::split_with_sizes_copy"
_FILLS = (
    "aten::copy_",
    "c10d::_allgather_base_",
)  # what is filled comes first: a part in the precision that is sent, the whole
Extents = list[Sequence[Extent]]


def extents(table: OpTable) -> tuple[list[Sequence[Extent]], list[Sequence[Extent]]]:
    """Per op what it takes, and per op what it returns. Ops called alike share the answer."""
    each = list(map(_extents_of, table.signatures, table.arguments))
    return [inputs for inputs, _ in each], [outputs for _, outputs in each]


def _extents_of(signature: Signature, arguments: Arguments) -> tuple[Sequence[Extent], Sequence[Extent]]:
    known: tuple[Sequence[Extent], Sequence[Extent]] | None = signature.derived.get(extents)
    if known is None:
        known = signature.derived[extents] = (_extents(arguments.inputs), _extents(arguments.outputs))
    return known


def names_tensors(program: Program) -> bool:
    """Whether any op says which storage on a device its tensors lie in: without that nothing is known of a step's memory."""
    return any(any(found) for each in extents(op_table(program)) for found in each)


def extent_bytes(tensor: Tensor) -> int:
    """From the begin of the storage to the end of the tensor."""
    if 0 in tensor.shape:
        return 0
    if tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return (tensor.offset + tensor.numel) * item_bytes(tensor)
    # The last element lies at the sum of (size - 1) * stride.
    last: int = sum(map(mul, tensor.shape, tensor.strides)) - sum(tensor.strides)
    return (tensor.offset + 1 + last) * item_bytes(tensor)


def item_bytes(tensor: Tensor) -> int:
    """Of one element."""
    return dtype_bytes(tensor.dtype) or _UNKNOWN_ITEM_BYTES


def _extents(tensors: Sequence[Tensor]) -> list[Extent]:
    results: list[Extent] = []
    for tensor in tensors:
        if tensor.storage is not None and tensor.device is not None and tensor.device.startswith("cuda"):
            nbytes = extent_bytes(tensor)
            if nbytes:
                results.append((tensor.storage, nbytes, tensor.dtype not in _WHOLE))
    return results


def without_wrappers(table: OpTable, inputs: Extents, outputs: Extents) -> tuple[Extents, Extents, set[tuple[int, int]]]:
    """What ops take and make, and (storage, row) of what is made without memory: sharded training records it otherwise.

    A distributed tensor is recorded with the shape of the whole by the op around the one on this rank's part of it. FSDP gives
    the memory of gathered parameters back and takes it again without an op: when it copies out of a gather. Of what an op
    around one of its own name takes, the op inside says how large it is; what it makes besides is a wrapper. So are tensors
    that only PyTorch's own functions of distributed tensors name.
    """
    inputs, outputs = _without(table, _wrappers(table), list(inputs), list(outputs))
    unwrapped: Extents = [
        () if name in _OF_DISTRIBUTED_TENSORS else entries for name, entries in zip(table.names, inputs, strict=True)
    ]
    wrapped: set[tuple[int, int]] = set()
    for parent, rows in table.same_inside.items():
        for row in rows:
            inside = {each[0] for each in inputs[row]}
            unwrapped[parent] = tuple(each for each in unwrapped[parent] if each[0] not in inside)
            of_row = {each[0] for each in outputs[row]}
            wrapped |= {(each[0], parent) for each in outputs[parent] if each[0] not in of_row}
    _gathered(table, unwrapped, outputs)
    return unwrapped, outputs, wrapped


def _wrappers(table: OpTable) -> set[int | None]:
    """Ids of distributed tensors that were recorded with the storage of this rank's part, but with the shape of the whole.

    The op on the part is inside one of its own name on the whole, in the same storage under another id.
    """
    found: set[int | None] = set()
    if _OF_DISTRIBUTED_TENSORS.isdisjoint(table.names):
        return found
    for parent, rows in table.same_inside.items():
        parts = {(part.storage, len(part.shape)) for row in rows for part in _mentioned(table, row)}
        ids = {part.id for row in rows for part in _mentioned(table, row)}
        for whole in _mentioned(table, parent):
            if (whole.storage, len(whole.shape)) in parts and whole.id not in ids:
                found.add(whole.id)
    return found


def _mentioned(table: OpTable, row: int) -> Sequence[Tensor]:
    return (*table.arguments[row].inputs, *table.arguments[row].outputs)


def _without(table: OpTable, ids: set[int | None], inputs: Extents, outputs: Extents) -> tuple[Extents, Extents]:
    """What ops take and make, less tensors of these ids."""
    for row in range(len(table)) if ids else ():
        arguments = table.arguments[row]
        for entries, tensors in ((inputs, arguments.inputs), (outputs, arguments.outputs)):
            if any(tensor.id in ids for tensor in tensors):
                entries[row] = _extents([tensor for tensor in tensors if tensor.id not in ids])
    return inputs, outputs


def _gathered(table: OpTable, inputs: Extents, outputs: Extents) -> None:
    """Parameters are there from the frame around the copy out of their gather on, flat ones from that around the gather."""
    for row, name in enumerate(table.names):
        frame = table.parents[row]
        if name == FLAT_GATHER:
            inside = range(row + 1, table.last[row] + 1)
            filled = [inputs[at][0] for at in inside if table.names[at] in _FILLS and inputs[at]]
            names = {each[0] for each in filled}
            for entries in (inputs, outputs):
                entries[row + 1 : table.last[row] + 1] = [
                    [each for each in entries[at] if each[0] not in names] for at in inside
                ]
            outputs[row] = [*outputs[row], *filled]
        if name != _COPY_OUT or frame < 0 or not table.names[frame].startswith(_COPY_OUT_FRAME):
            continue
        lists = [value for value in table.signatures[row].inputs if isinstance(value, tuple)]
        out = {value.storage for values in lists for value in values if isinstance(value, Tensor)}
        outputs[frame] = [*outputs[frame], *(each for each in inputs[row] if each[0] in out)]
