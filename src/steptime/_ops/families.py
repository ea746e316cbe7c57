"""Op families: what kind of computation a piece of device work is, for people who read a breakdown.

Decided by what is known best: the kind of the work (copies, memsets, collectives), the ops around its launch, the kernel's
name. An op that is made of other ops (an optimizer step, an embedding lookup, attention) claims everything inside it; below
those, the innermost op decides.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._program.program import KindColumn, Program, WorkKind


class WorkFamily(IntEnum):
    """The families, in the order in which an enclosing op claims what is inside it."""

    OPTIMIZER = 0
    EMBEDDING = 1
    ATTENTION = 2
    SOFTMAX_LOSS = 3
    CONVOLUTION = 4
    NORMALIZATION = 5
    MATMUL = 6
    REDUCTION = 7
    INDEXING = 8
    ELEMENTWISE = 9
    COPY = 10
    MEMSET = 11
    COMMUNICATION = 12
    OTHER = 13

    @property
    def label(self) -> str:
        """The family's name in reports and JSON."""
        return self.name.lower()


# The last family that claims the ops inside its own.
_LAST_ENCLOSING = WorkFamily.NORMALIZATION

# Names that users choose (annotations, module names) hold spaces or "#" and say nothing certain; the engine's wrapper around
# a backward node also holds the accumulation of gradients, which is not the node's own computation.
_CHOSEN_BY_USERS = re.compile(r"[ #]|^autograd::engine::")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")

# WorkFamily -> what the names of its ops, autograd nodes and autograd functions look like. The first that fits wins.
_OPS: tuple[tuple[WorkFamily, str], ...] = (
    (WorkFamily.OPTIMIZER, r"_fused_(?:adam|adamw|sgd|adagrad)_"),
    (WorkFamily.EMBEDDING, r"embedding|splitlookup|table_?batched|bounds_check_indices|jagged"),
    (WorkFamily.ATTENTION, r"scaled_dot_product|(?:flash|efficient|cudnn)_attention|flash_?attn|fusedattn|fmha"),
    (WorkFamily.SOFTMAX_LOSS, r"soft_?max|_loss|lossbackward|cross_?entropy"),
    (WorkFamily.CONVOLUTION, r"conv(?:_|\d|olution)"),
    (WorkFamily.NORMALIZATION, r"(?:batch|layer|group|instance|rms)_?norm"),
    (WorkFamily.MATMUL, r"^aten::\w*mm(?:_\w+)?$|^aten::_?linear|linearwithgrad|^triton_(?:tem|mm)_"),
    (WorkFamily.REDUCTION, r"pool(?:\d|ing)|^triton_(?:red|per)_"),
    (
        WorkFamily.INDEXING,
        r"^aten::_?(?:index|gather|scatter|take|put|masked_s|cat|unique|pad|upsample|cum|split|segment|tri[lu])",
    ),
    (WorkFamily.INDEXING, r"^fbgemm::(?:permute|expand|asynchronous|block_bucketize|offsets|recat|segment|pack)|permutepooled"),
    (WorkFamily.ELEMENTWISE, r"^aten::(?:bitwise_|logical_|log|rand|_amp_)|^fbgemm::\w*(?:quantized|tofloat)|^triton_poi_"),
)

# WorkFamily -> the other aten ops by name, without "_foreach_", "_backward" and leading or trailing underscores.
_ATEN: dict[WorkFamily, str] = {
    WorkFamily.MATMUL: "matmul mv addmv dot vdot addr ger outer einsum bilinear",
    WorkFamily.REDUCTION: """
        sum mean prod std var amax amin max min argmax argmin any all norm linalg_vector_norm logsumexp nansum
        count_nonzero median aminmax dist renorm std_mean var_mean
    """,
    WorkFamily.INDEXING: """
        nonzero where stack repeat tile roll flip sort topk searchsorted bucketize histc bincount constant_pad_nd
        reflection_pad1d reflection_pad2d replication_pad2d im2col col2im unfold pixel_shuffle slice select msort
        kthvalue
    """,
    WorkFamily.COPY: "copy to_copy clone contiguous to local_scalar_dense copy_from copy_from_and_resize detach",
    WorkFamily.ELEMENTWISE: """
        add sub rsub mul div true_divide floor_divide pow sqrt rsqrt exp exp2 neg abs sign sin cos tanh sigmoid silu
        gelu relu relu6 elu selu celu mish leaky_relu hardtanh hardswish hardsigmoid prelu softplus threshold clamp
        clamp_min clamp_max clip maximum minimum lerp addcmul addcdiv reciprocal square erf erfc fill zero zeros ones
        full masked_fill eq ne lt le gt ge isnan isinf isfinite remainder fmod floor ceil round trunc frac arange
        linspace range eye normal uniform bernoulli exponential native_dropout dropout fused_dropout masked_scale
        complex conj angle atan2 nan_to_num glu polar
    """,
}

# WorkFamily -> what kernel names look like, where no op says. The first that fits wins.
_KERNELS: tuple[tuple[WorkFamily, str], ...] = (
    (WorkFamily.COMMUNICATION, r"^(?:void )?(?:nccl|rccl|msccl)"),
    (WorkFamily.EMBEDDING, r"embedding|linearize_index|table_batched|bounds_check_indices|jagged"),
    (WorkFamily.OPTIMIZER, r"adamw?_|lamb_|(?:adam|sgd|adagrad|lamb)functor"),
    (WorkFamily.ATTENTION, r"flash|fmha|attention|attn"),
    (WorkFamily.SOFTMAX_LOSS, r"soft_?max|nll_?loss|cross_?entropy|_loss_"),
    (WorkFamily.CONVOLUTION, r"conv|cudnn_(?:infer|train)|fprop|dgrad|wgrad|winograd|nchwtonhwc|nhwctonchw|subtensorop"),
    (WorkFamily.NORMALIZATION, r"bn_(?:fw|bw)|(?:batch|layer|group|rms)_?norm|gammabeta"),
    (WorkFamily.MATMUL, r"gemm|gemv|splitk|cutlass|cublas|nvjet|matmul|cijk_|_mm_|epilogue::impl|triton_tem_"),
    (WorkFamily.REDUCTION, r"reduce|triton_(?:red|per)_|pool|argm(?:ax|in)|welford"),
    (WorkFamily.OPTIMIZER, r"multi_tensor_apply"),
    (WorkFamily.INDEXING, r"index|gather|scatter|sort|scan|unique|catarray|permute|transpose|recat|radix|histogram|bucketize"),
    (WorkFamily.INDEXING, r"where_kernel|triu_tril|select|topk|segment|runlength|upsample"),
    (WorkFamily.COPY, r"copy_?kernel|memcpy|copyfunctor"),
    (WorkFamily.MEMSET, r"memset"),
    (WorkFamily.ELEMENTWISE, r"elementwise|pointwise|triton_poi_|fill|functor|distribution_|dropout|quantize|fp8|cast|fused_"),
)

_ATEN_NAME = re.compile(r"^aten::(?:_foreach)?_*(\w+?)(?:_backward)?_*$")
_ATEN_FAMILY = {name: family for family, names in _ATEN.items() for name in names.split()}
_OP_PATTERNS = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _OPS)
_KERNEL_PATTERNS = tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in _KERNELS)
_OF_KIND = {WorkKind.COPY: WorkFamily.COPY, WorkKind.MEMSET: WorkFamily.MEMSET, WorkKind.COLLECTIVE: WorkFamily.COMMUNICATION}

_Families = npt.NDArray[np.int64]


def work_families(program: Program) -> KindColumn:
    """The family of every row of `Program.works`."""
    works, calls = program.works, program.calls
    kernels = np.array([kernel_family(name) for name in program.names] or [WorkFamily.OTHER], dtype=np.int64)
    result = kernels[works.name]
    ops = _op_families(program)
    if len(calls) and len(ops):
        op = np.where(works.call >= 0, calls.op[np.maximum(works.call, 0)], -1)
        text = np.where(op >= 0, ops[np.maximum(op, 0)], WorkFamily.OTHER)
        result = np.where(text != WorkFamily.OTHER, text, result)
    for kind, family in _OF_KIND.items():
        result = np.where(works.kind == kind, family, result)
    return result.astype(np.int8)


@lru_cache(maxsize=1 << 14)
def op_family(name: str) -> WorkFamily:
    """The family of an op by its own name; OTHER for names that say nothing."""
    if _OPTIMIZER_STEP.match(name):
        return WorkFamily.OPTIMIZER
    if _CHOSEN_BY_USERS.search(name):
        return WorkFamily.OTHER
    plain = _ATEN_NAME.match(name)
    if plain and plain.group(1) in _ATEN_FAMILY:
        return _ATEN_FAMILY[plain.group(1)]
    return next((family for family, pattern in _OP_PATTERNS if pattern.search(name)), WorkFamily.OTHER)


@lru_cache(maxsize=1 << 14)
def kernel_family(name: str) -> WorkFamily:
    """The family of a kernel by its name; OTHER for names that say nothing."""
    return next((family for family, pattern in _KERNEL_PATTERNS if pattern.search(name)), WorkFamily.OTHER)


def _op_families(program: Program) -> _Families:
    """Per op: the strongest enclosing family, else that of the innermost op with one."""
    by_name = np.array([op_family(name) for name in program.names] or [WorkFamily.OTHER], dtype=np.int64)
    own = by_name[program.ops.name]
    parent = program.ops.parent.astype(np.int64)
    rows = np.arange(len(own))
    strongest, up = np.where(own <= _LAST_ENCLOSING, own, WorkFamily.OTHER), np.where(parent >= 0, parent, rows)
    nearest = np.where(own != WorkFamily.OTHER, rows, up)
    # Pointer doubling: every round looks twice as far up, so that depth costs its logarithm.
    for _ in range(64):
        further, nearer = up[up], nearest[nearest]
        strongest = np.minimum(strongest, strongest[up])
        if np.array_equal(further, up) and np.array_equal(nearer, nearest):
            break
        up, nearest = further, nearer
    return np.where(strongest != WorkFamily.OTHER, strongest, own[nearest])
