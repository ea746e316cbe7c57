"""Fourier transforms as ATen asks cuFFT for them (native/cuda/SpectralOps.cpp): passes over the data, one for every axis.

A pass reads and writes everything once. Which lengths take one kernel, and which planes one for both axes, is as measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.launches import FFT, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.iterator import copies, memcpy, pointwise
from steptime.errors import InputError

_SMALL_PRIMES = (2, 3, 5, 7, 11, 13)
_LARGEST_PRIME = 127
# Planes from which one kernel goes along both axes (seen between 320 and 608), and sides up to which: powers of two, others.
_MANY_PLANES, _PLANE, _MIXED_PLANE = 512, 128, 64
_LINES = 8  # that a block takes, about; the weight is fitted


def transformed(call: GpuCall) -> list[Launch]:
    """`_fft_r2c`, `_fft_c2c` and `_fft_c2r`: copies where cuFFT would overwrite its input, passes, a scaled result."""
    x, axes, to_real = call.tensor(0), call.integers(1), call.name == "_fft_c2r"
    axes = tuple(axis % len(x.shape) for axis in axes)
    if not axes or x.numel == 0:
        raise InputError(f"{call.op}: no axis of {x.shape} is transformed")
    last = axes[-1]
    shape = list(x.shape)
    if to_real:
        shape[last] = call.integer(3)
    elif call.name == "_fft_r2c" and call.flag(3):
        shape[last] = shape[last] // 2 + 1
    result = fresh(tuple(shape), "float32" if to_real else "complex64")
    copied = _copied(x, axes, to_real)
    source = hot(x.shape, x.dtype, 2 * x.nbytes) if copied else x
    results = [*copied, *_passes(call.name, source, result, axes)]
    if call.integer(2):
        results.append(pointwise((hot(result.shape, result.dtype, 2 * result.nbytes),), result, tag="scaled", existing=True))
    return results


def _copied(x: Operand, axes: tuple[int, ...], to_real: bool) -> list[Launch]:
    """A transform to real numbers writes over its input; a single axis is brought next to each other in memory."""
    if to_real:
        return [memcpy(x, fresh(x.shape, x.dtype))] if x.dense else copies(fresh(x.shape, x.dtype), x)
    if len(axes) == 1 and x.strides[axes[0]] != 1:
        order = [axis for axis in range(len(x.shape)) if axis != axes[0]] + [axes[0]]
        turned = replace(x, shape=tuple(x.shape[axis] for axis in order), strides=tuple(x.strides[axis] for axis in order))
        return copies(fresh(turned.shape, x.dtype), turned)
    return [] if x.dense else copies(fresh(x.shape, x.dtype), x)


def _passes(name: str, x: Operand, result: Operand, axes: tuple[int, ...]) -> list[Launch]:
    lengths = {axis: max(x.shape[axis], result.shape[axis]) for axis in axes}
    area = math.prod(lengths.values())
    if name == "_fft_c2c" and len(axes) == 2 and x.numel >= _MANY_PLANES * area and _is_plane(*sorted(lengths.values())):
        return [_kernel("plane", x, result, area, across=True)]
    # Real data become complex along the last axis, first; complex data become real along it, last.
    order = [*axes[:-1], axes[-1]] if name == "_fft_c2r" else [axes[-1], *reversed(axes[:-1])]
    complex_shape = x.shape if name == "_fft_c2r" else result.shape
    results, source = [], x
    for place, axis in enumerate(order):
        final = place == len(order) - 1
        target = result if final else fresh(complex_shape, "complex64")
        kind = name.removeprefix("_fft_") if "float" in source.dtype + target.dtype else "c2c"
        results.append(_kernel(kind, source, target, lengths[axis], across=axis != axes[-1]))
        source = hot(target.shape, target.dtype, 2 * target.nbytes)
    return results


def _kernel(kind: str, x: Operand, result: Operand, length: int, *, across: bool) -> Launch:
    elements = max(x.numel, result.numel)
    lines = elements / length
    facts: dict[str, float] = {"columns": length, "rows": lines, "size_0": length}
    stages = math.log2(max(2, length))
    grids = ((lines / _LINES, length * stages), (lines, length * stages))
    path = f"{_primes(length) if kind != 'plane' else kind} {'across' if across else 'along'}"
    return Launch(FFT, elements, (x,), (result,), facts, grids, path, kind)


def _is_power(length: int) -> bool:
    return length & (length - 1) == 0


def _is_plane(short: int, long: int) -> bool:
    if _is_power(short) and _is_power(long):
        return long <= _PLANE and long <= 2 * short
    return short == long <= _MIXED_PLANE and _primes(long) == "mixed"


def _primes(length: int) -> str:
    """What a length is made of, as far as cuFFT's kernels differ."""
    if _is_power(length):
        return "power"
    for prime in _SMALL_PRIMES:
        while length % prime == 0:
            length //= prime
    if length > _LARGEST_PRIME:
        raise InputError(f"no rule says what transforms launch whose length has a factor {length}, only up to {_LARGEST_PRIME}")
    return "mixed" if length == 1 else "prime"
