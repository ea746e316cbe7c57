"""What sharded training records about memory otherwise than plain training does, put right before lifetimes are read.

A distributed tensor is recorded with the shape of the whole by the op around the one on this rank's part of it. FSDP gives the
memory of gathered parameters back and takes it again without an op: when it copies out of a gather.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._models.memory.tensors import Extent
from steptime._program.program import Program, Tensor

# Autograd functions of torch.distributed.tensor (_api.py, _redistribute.py): they pass wrappers on.
_OF_DISTRIBUTED_TENSORS = frozenset(("_ToTorchTensor", "_FromTorchTensor", "Redistribute"))
_COPY_OUT_FRAME, _COPY_OUT = "FSDP::all_gather_copy_out", "fsdp::split_with_sizes_copy"
Extents = list[Sequence[Extent]]


def without_wrappers(program: Program, taken: Extents, made: Extents) -> tuple[Extents, Extents, set[tuple[int, int]]]:
    """What ops take and make, and (storage, row) of what is made without memory.

    Of what an op around one of its own name takes, the op inside says how large it is; what it makes besides is a wrapper. So
    are tensors that only PyTorch's own functions of distributed tensors name.
    """
    parents, names = program.ops.parent.tolist(), program.ops.name.tolist()
    functions = {number for number, name in enumerate(program.names) if name in _OF_DISTRIBUTED_TENSORS}
    found: Extents = [() if name in functions else entries for name, entries in zip(names, taken, strict=True)]
    made = list(made)
    wrapped: set[tuple[int, int]] = set()
    for row, parent in enumerate(parents):
        if parent >= 0 and names[parent] == names[row]:
            inside = {each[0] for each in taken[row]}
            found[parent] = tuple(each for each in found[parent] if each[0] not in inside)
            own = {each[0] for each in made[row]}
            wrapped |= {(each[0], parent) for each in made[parent] if each[0] not in own}
    _gathered(program, found, made)
    return found, made, wrapped


def _gathered(program: Program, taken: Extents, made: Extents) -> None:
    """Parameters are there from the frame around the copy out of their gather on."""
    copies = {number for number, name in enumerate(program.names) if name == _COPY_OUT}
    if not copies:
        return
    parents = program.ops.parent.tolist()
    for row, (name, signature) in enumerate(zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True)):
        frame = parents[row]
        if name not in copies or signature < 0 or frame < 0 or not _is_frame(program, frame):
            continue
        lists = [value for value in program.signatures[signature].inputs if isinstance(value, tuple)]
        out = {value.storage for some in lists for value in some if isinstance(value, Tensor)}
        made[frame] = [*made[frame], *(each for each in taken[row] if each[0] in out)]


def _is_frame(program: Program, row: int) -> bool:
    return program.names[int(program.ops.name[row])].startswith(_COPY_OUT_FRAME)
