"""What sharded training records about memory otherwise than plain training does, put right before lifetimes are read.

A distributed tensor is recorded with the shape of the whole by the op around the one on this rank's part of it. FSDP gives the
memory of gathered parameters back and takes it again without an op: when it copies out of a gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._models.memory.tensors import Extent
from steptime._ops.table import OpTable
from steptime._program.program import Tensor

# Autograd functions of torch.distributed.tensor (_api.py, _redistribute.py): they pass wrappers on.
_OF_DISTRIBUTED_TENSORS = frozenset(("_ToTorchTensor", "_FromTorchTensor", "Redistribute"))
_COPY_OUT_FRAME, _COPY_OUT = "FSDP::all_gather_copy_out", "fsdp::split_with_sizes_copy"
Extents = list[Sequence[Extent]]


def without_wrappers(table: OpTable, taken: Extents, made: Extents) -> tuple[Extents, Extents, set[tuple[int, int]]]:
    """What ops take and make, and (storage, row) of what is made without memory.

    Of what an op around one of its own name takes, the op inside says how large it is; what it makes besides is a wrapper. So
    are tensors that only PyTorch's own functions of distributed tensors name.
    """
    kept: Extents = [
        () if name in _OF_DISTRIBUTED_TENSORS else entries for name, entries in zip(table.names, taken, strict=True)
    ]
    made = list(made)
    wrapped: set[tuple[int, int]] = set()
    for parent, rows in table.same_inside.items():
        for row in rows:
            inside = {each[0] for each in taken[row]}
            kept[parent] = tuple(each for each in kept[parent] if each[0] not in inside)
            of_row = {each[0] for each in made[row]}
            wrapped |= {(each[0], parent) for each in made[parent] if each[0] not in of_row}
    _gathered(table, kept, made)
    return kept, made, wrapped


def _gathered(table: OpTable, taken: Extents, made: Extents) -> None:
    """Parameters are there from the frame around the copy out of their gather on."""
    for row, name in enumerate(table.names):
        frame = table.parents[row]
        if name != _COPY_OUT or frame < 0 or not table.names[frame].startswith(_COPY_OUT_FRAME):
            continue
        lists = [value for value in table.signatures[row].inputs if isinstance(value, tuple)]
        out = {value.storage for values in lists for value in values if isinstance(value, Tensor)}
        made[frame] = [*made[frame], *(each for each in taken[row] if each[0] in out)]
