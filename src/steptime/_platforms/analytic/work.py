"""What each launch of a call has to do, wherever it runs: operations, and bytes from memory, from the cache and from the host.

For times that are carried from one device to another. Families that go by rules say it launch by launch; of products,
convolutions and attention the whole call is known, and each launch has its share of it by its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime._hardware.device import DeviceLimits, Reached
from steptime._models.engine.constants import constants_of
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import families, launches_of
from steptime._models.kernels.forms.launched.columns import LaunchColumns
from steptime._models.kernels.forms.launched.shares import LaunchShares
from steptime._models.kernels.forms.launched.terms import LaunchConstants, traffic
from steptime._models.kernels.forms.matmul.product import of_questions
from steptime._models.kernels.launches import Launch
from steptime._models.kernels.question import LaunchTime, Question
from steptime._models.kernels.work import base_of, flop_of, moved_bytes, precision_of
from steptime._ops.operations import PRODUCTS
from steptime.errors import InputError

_SIZES_ONLY = LaunchColumns(())
_ATTENTION = ("flash", "cudnn", "efficient")


@dataclass(frozen=True, slots=True)
class Product:
    """(m x k) times (k x n), `batch` of them; a launch may do a `share` of it."""

    m: int
    n: int
    k: int
    batch: int
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does."""

    flop: float = 0.0
    product: Product | None = None  # what the operations are, where they are a matrix product
    precision: str = "float32"
    flop_per_s: float = 0.0  # that such a kernel reaches, where that is known and no peak
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    host_bytes: float = 0.0


def works_of(
    question: Question, family: str, launches: Sequence[LaunchTime], timed_on: DeviceLimits, cache: float, reached: Reached
) -> list[Work]:
    """Of every launch, on a device whose cache is `cache` times the one that the launches were timed on."""
    if family and families()[family].rules is not None:
        device = constants_of(timed_on, "launched", LaunchConstants)
        try:
            by_rule = launches_of(question.call, device.gpu)
        except InputError:
            by_rule = ()
        if len(by_rule) == len(launches):
            return _by_rule(question, by_rule, device, cache)
    return _shared(question, launches, reached)


def _by_rule(question: Question, launches: Sequence[Launch], device: LaunchConstants, cache: float) -> list[Work]:
    if not launches:
        return []
    rows = np.asarray(_SIZES_ONLY.rows(question.call, launches, question.warm), dtype=np.float64)
    same = np.ones(len(launches))
    moved = traffic(rows, device, LaunchShares(same, same, same, same, same, same, same, cache * same))
    return [
        Work(
            memory_bytes=float(memory + written),
            cache_bytes=float(kept),
            host_bytes=float(launch.facts.get("host_bytes", 0.0)),
        )
        for launch, memory, written, kept in zip(
            launches, moved.memory_bytes, moved.written_bytes, moved.cache_bytes, strict=True
        )
    ]


def _shared(question: Question, launches: Sequence[LaunchTime], reached: Reached) -> list[Work]:
    """The call's work, in proportion to the times of its launches."""
    call = question.call
    kind, direction = attention_of(call)
    kept = float(_written_bytes(call)) if question.warm else 0.0
    total = Work(
        flop=flop_of(call),
        product=_product(question) if base_of(call.op) in PRODUCTS else None,
        precision=precision_of(call, question.tf32),
        flop_per_s=reached.attention_flop_per_s[kind][direction].value if kind and call.dtype != "float32" else 0.0,
        memory_bytes=max(moved_bytes(call) - kept, 0.0),
        cache_bytes=kept,
    )
    time_ns = sum(launch.time_ns for launch in launches)
    shares = [launch.time_ns / time_ns if time_ns else 0.0 for launch in launches]
    return [
        replace(
            total,
            flop=total.flop * share,
            product=None if total.product is None else replace(total.product, share=share),
            memory_bytes=total.memory_bytes * share,
            cache_bytes=total.cache_bytes * share,
        )
        for share in shares
    ]


def _product(question: Question) -> Product | None:
    try:
        result = of_questions([question])
    except InputError:
        return None
    return Product(int(result.m[0]), int(result.n[0]), int(result.k[0]), int(result.batch[0]))


def _written_bytes(call: Call) -> int:
    given = [call.args[index] for index in call.written if index < len(call.args)]
    return sum(item.nbytes for item in given if isinstance(item, TensorArg) and item.device == "device")


def attention_of(call: Call) -> tuple[str, str]:
    """Kind and direction of attention in one kernel, or nothing."""
    base = base_of(call.op)
    kind = next((kind for kind in _ATTENTION if f"{kind}_attention" in base), "")
    return kind, ("" if not kind else "backward" if base.endswith("backward") else "forward")
