"""What the names of recorded kernels say of the ops that launched them, where a recording of ops does not.

Kineto writes neither the switches of PyTorch nor the types of tensors in lists. Libraries name what a product computes in
(`sm80_xmma_gemm_f32f32_tf32f32`, `s1688gemm`), PyTorch's kernels are templates of their types.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache

import numpy as np

from steptime._program.program import Program, Signature, Tensor, Value, WorkKind, tensors_in

# Tensor cores multiply float32 as TF32 alone; 1688 and 16816 are the shapes of their instructions, "s" is single precision.
_TF32 = re.compile(r"tf32|(?<![a-z])s1688(?:gemm|fprop|dgrad|wgrad|cudnn)", re.IGNORECASE)
_NO_TF32 = re.compile(r"sgemm|f32f32_f32f32|simt_s|scudnn|gemmSN_|gemv|ffma", re.IGNORECASE)
# Types of a template, as compilers write them.
_TYPES = (
    (re.compile(r"c10::BFloat16|bfloat16", re.IGNORECASE), "bfloat16"),
    (re.compile(r"c10::Half|__half"), "float16"),
    (re.compile(r"(?<![\w])float(?![\w])"), "float32"),
    (re.compile(r"(?<![\w])double(?![\w])"), "float64"),
    (re.compile(r"(?<![\w])long(?![\w])"), "int64"),
)
# The kernels that concatenate know their elements by size alone.
_OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")
_OF_SIZE = {"1": "uint8", "2": "float16", "4": "float32", "8": "int64"}


def described_by_kernels(program: Program) -> Program:
    """The program with what the names of its kernels tell in the signatures of its ops."""
    usual = _usual_dtype(program)
    changed: dict[tuple[int, bool | None, str], int] = {}
    signatures, column = list(program.signatures), program.ops.signature.copy()
    for op, kernels in _launched(program).items():
        number = int(column[op])
        if number < 0:
            continue
        signature = program.signatures[number]
        tf32 = _tf32(kernels) if _is_float32(signature) else None
        dtype = _listed_dtype(kernels, usual) if _untyped(signature) else ""
        if tf32 is None and not dtype:
            continue
        key = number, tf32, dtype
        if key not in changed:
            changed[key] = len(signatures)
            signatures.append(_described(signature, tf32, dtype))
        column[op] = changed[key]
    if not changed:
        return program
    return replace(program, signatures=tuple(signatures), ops=program.ops.replace(signature=column))


def _launched(program: Program) -> dict[int, tuple[str, ...]]:
    """Per op, and per op around it, the distinct kernels that it launches."""
    found: dict[int, set[int]] = defaultdict(set)
    works = program.works
    rows = np.flatnonzero((works.kind == WorkKind.KERNEL) & (works.call >= 0))
    parents = program.ops.parent.tolist()
    for op, name in zip(program.calls.op[works.call[rows]].tolist(), works.name[rows].tolist(), strict=True):
        at = op
        while at >= 0 and name not in found[at]:
            found[at].add(name)
            at = parents[at]
    return {op: tuple(program.names[name] for name in sorted(names)) for op, names in found.items()}


def _is_float32(signature: Signature) -> bool:
    first = next((value for value in signature.inputs if isinstance(value, Tensor) and value.shape), None)
    return first is not None and first.dtype == "float32"


def _untyped(signature: Signature) -> bool:
    return any(isinstance(value, tuple) and any(not tensor.dtype for tensor in tensors_in(value)) for value in signature.inputs)


@lru_cache(maxsize=1 << 14)
def _tf32(kernels: tuple[str, ...]) -> bool | None:
    """Whether products are of TF32; None where no kernel is a product."""
    if any(_TF32.search(name) for name in kernels):
        return True
    return False if any(_NO_TF32.search(name) for name in kernels) else None


@lru_cache(maxsize=1 << 14)
def _listed_dtype(kernels: tuple[str, ...], usual: str) -> str:
    for name in kernels:
        opaque = _OPAQUE.search(name)
        if opaque:
            found = _OF_SIZE.get(opaque[1], usual)
            return usual if _OF_SIZE.get(opaque[1]) == "float16" and usual == "bfloat16" else found
        known = next((dtype for pattern, dtype in _TYPES if pattern.search(name)), None)
        if known:
            return known
    return usual


def _usual_dtype(program: Program) -> str:
    """What most ops with typed tensors take."""
    counts: Counter[str] = Counter()
    numbers, calls = np.unique(program.ops.signature[program.ops.signature >= 0], return_counts=True)
    for number, count in zip(numbers.tolist(), calls.tolist(), strict=True):
        for tensor in tensors_in(program.signatures[number].inputs):
            if "float" in tensor.dtype:
                counts[tensor.dtype] += count
    return counts.most_common(1)[0][0] if counts else "float32"


def _described(signature: Signature, tf32: bool | None, dtype: str) -> Signature:
    switches = signature.switches if tf32 is None else replace(signature.switches, tf32=tf32)
    inputs = tuple(_typed(value, dtype) for value in signature.inputs) if dtype else signature.inputs
    return Signature(inputs, signature.outputs, switches)


def _typed(value: Value, dtype: str) -> Value:
    """Tensors in lists with a type; one that stands alone has its own."""
    if not isinstance(value, tuple):
        return value
    return tuple(
        replace(each, dtype=dtype) if isinstance(each, Tensor) and not each.dtype else _typed(each, dtype) for each in value
    )
