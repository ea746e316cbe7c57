"""What a process holds of a device beside what PyTorch's allocator reserves: its context, loaded kernels, NCCL's buffers.

Measured on an H200 (driver 580.159, CUDA 13.0, torch 2.11, NCCL 2.28): what nvidia-smi says of a process less what the
allocator had reserved, after twelve steps. These are the rows of the set `memory` with `outside_bytes`.
"""

from __future__ import annotations

_MIB = 1 << 20
# 518 of the context, the rest kernels as they are first called; a DLRM and a BERT alike.
_PROCESS_BYTES = 742 * _MIB
# 278 when the group begins, the rest with the first collectives of each kind; two ranks over sockets. Over NVLink NCCL keeps
# buffers for every peer on the device, which was not measured.
_GROUP_BYTES = 434 * _MIB
# Ranks on parts of one GPU, through MPS, by how many share it: context and NCCL's buffers shrink with the part. Two ranks of a
# BERT held 738.
_PART_BYTES = {2: 764 * _MIB, 4: 548 * _MIB, 8: 436 * _MIB}


def process_bytes(ranks: int, share: int = 1) -> int:
    """Of one of so many ranks, on a GPU of its own or on one of `share` parts of one."""
    if share > 1:
        # Parts of another size: as the next larger one that was measured.
        return _PART_BYTES[max((parts for parts in _PART_BYTES if parts <= share), default=min(_PART_BYTES))]
    return _PROCESS_BYTES + (_GROUP_BYTES if ranks > 1 else 0)
