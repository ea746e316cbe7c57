"""What kind of kernel a launch is: one that Inductor generated, by its kind, or a library's, by the family of its op.

Kernels are told apart by the op around the launch, and by their names where there is none: in a CUDA graph, which one call
launches as a whole. There what is measured and what is predicted is told apart by the same names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from steptime._ops.families import WorkFamily, kernel_family, op_family
from steptime._program.program import Program, WorkKind

# Beginnings of the names that Inductor gives the kernels it generates.
_GENERATED = {
    "triton_poi_": "pointwise", "triton_red_": "reduction", "triton_per_": "persistent reduction", "triton_for_": "foreach",
    "triton_spl_": "split scan", "triton_tem_": "template", "triton_mix_": "mixed order reduction",
}  # fmt: skip
GENERATED = "generated"
_GRAPH_LAUNCH = "cudaGraphLaunch"
# PyTorch's kernel for whatever is done to every element, in any op: of ops in C++ a profile names the innermost around it (a
# fill, a copy), a captured step the one that was called.
_PLAIN = "elementwise_kernel"
# What cuDNN's own build of CUTLASS calls every kernel; predicted works have no more of the name.
_OF_CUDNN = "Kernel"
_COPIES = re.compile(r"^(Memcpy|Memset)")
_COLLECTIVES = re.compile(r"nccl", re.IGNORECASE)


def kind_of(kernel: str, op: str = "") -> str:
    """The kind of a kernel by its name and the op around its launch."""
    for name in (kernel, op):
        for beginning, kind in _GENERATED.items():
            if name.startswith(beginning):
                return f"{GENERATED} {kind}"
        if name.startswith("triton_"):
            return f"{GENERATED} other"
    if (found := _COPIES.match(kernel)) and "embedding_bag" not in op:  # of which stages are predicted, not kernels
        return (WorkFamily.COPY if found[0] == "Memcpy" else WorkFamily.MEMSET).label
    if _COLLECTIVES.search(kernel):
        return WorkFamily.COMMUNICATION.label
    if _PLAIN in kernel:
        return WorkFamily.ELEMENTWISE.label
    by_op = op_family(op)
    return (_by_name(kernel) if by_op == WorkFamily.OTHER else by_op).label


def _by_name(kernel: str) -> WorkFamily:
    """The family of a kernel of which no op is known."""
    return WorkFamily.CONVOLUTION if kernel == _OF_CUDNN else kernel_family(kernel)


def kinds_of(kernels: Iterable[str], ops: Iterable[str]) -> Counter[str]:
    """How many of each kind a profiled step launched."""
    return Counter(kind_of(kernel, op) for kernel, op in zip(kernels, ops, strict=True))


_OF_WORK = {
    WorkKind.COPY: WorkFamily.COPY, WorkKind.MEMSET: WorkFamily.MEMSET, WorkKind.COLLECTIVE: WorkFamily.COMMUNICATION,
}  # fmt: skip


def kinds_in(program: Program) -> Counter[str]:
    """How many of each kind a predicted program launches."""
    found: Counter[str] = Counter()
    for kind, name, call in zip(program.works.kind, program.works.name, program.works.call, strict=True):
        if WorkKind(kind) in _OF_WORK:
            found[_OF_WORK[WorkKind(kind)].label] += 1
            continue
        alone = call < 0 or program.names[program.calls.api[call]] == _GRAPH_LAUNCH
        op = -1 if alone else int(program.calls.op[call])
        found[kind_of(program.names[name], _named(program, op))] += 1
    return found


def _named(program: Program, op: int) -> str:
    """The innermost op around a launch whose name says what it does."""
    while op >= 0:
        name = str(program.names[program.ops.name[op]])
        if name.startswith("triton_") or op_family(name) != WorkFamily.OTHER:
            return name
        op = int(program.ops.parent[op])
    return ""


def matched(predicted: Mapping[str, int], measured: Mapping[str, int]) -> float:
    """The share of launches that are in both lists, kind by kind: 1 where number and kinds are the same."""
    both = sum(min(predicted.get(kind, 0), count) for kind, count in measured.items())
    return both / max(sum(predicted.values()), sum(measured.values()), 1)
