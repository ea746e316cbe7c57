"""Matrix products: a mixture over the kernels cuBLAS may choose, each timed by its tiles, waves and bytes.

Beside its main kernel a product launches copies, which follow rules, and small kernels, which trees tell from its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.stored import stored
from steptime._models.kernels.forms.matmul.grouped import GroupedConstants, answers_of
from steptime._models.kernels.forms.matmul.mixture import (
    FACTORS,
    Ensemble,
    FittedGroup,
    MatmulConstants,
    ProductShares,
    inputs_of,
)
from steptime._models.kernels.forms.matmul.products import (
    GROUPS,
    OPERATIONS,
    SCALED,
    SCALED_GROUPED,
    Column,
    Products,
    groups_of,
    in_groups,
    of_questions,
)
from steptime._models.kernels.forms.matmul.scaled import scaled_ns
from steptime._models.kernels.launches import base_name
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime.errors import InputError

COPY, MEMSET, REDUCE, SCALE, EPILOGUE, MAIN = "copy", "memset", "split_k_reduce", "scale", "epilogue", "gemm"
# What is launched beside copies of operands and bias: nothing, a clearing of counters, a sum over the parts of k, and single
# precision's large-k kernel with what it needs. 27,725 of 27,789 rows are one of these.
PATTERNS = ((MAIN,), (MEMSET, MAIN), (MAIN, REDUCE), (MEMSET, SCALE, MAIN, EPILOGUE))
ROLES = (MEMSET, REDUCE, SCALE, EPILOGUE)
_LEAST_MAIN = 0.3  # of what the mixture predicts: the main kernel never takes less beside its small ones
KNOTS = np.arange(6.0, 31.0)  # of curves of copies: log2 of their bytes
_CHUNK = 4096  # products at once: what their columns take stays in a core's cache
_FILL_NS = 1000.0  # a small kernel
_GRID, _ROWS_OF_BLOCK = 65_535, 16  # the longest grid along its second and third axis (CUDA C++ Programming Guide)
_MOST_TURNS = 64  # that are told apart, however large what is asked for

Lines = npt.NDArray[np.float64]  # per role: ns at no size, ns per element
Curves = npt.NDArray[np.float64]  # odd operands and kinds of bias x knots: ln(ns)


@dataclass(frozen=True)
class SmallKernels:
    """How long what is launched beside the main kernel takes."""

    lines: Lines
    curves: Curves

    def copy_ns(self, products: Products, shares: ProductShares) -> Column:
        """ns that all copies of each product take."""
        copied, total = copy_bytes(products), np.zeros(len(products))
        for kind in (1, 2, 3):
            mine = (copied > 0) & (products.bias == kind)
            total[mine] = _along(self.curves[kind], copied[mine])
        odd = products.copied > 0
        total[odd] += _along(self.curves[0], products.copied_bytes[odd])
        if (products.share > 1).any():
            total /= shares.factors(products.share, products.others)[FACTORS.index("memory")]
        return total

    def launches(
        self, products: Products, shares: ProductShares, main_ns: Column, patterns: Column
    ) -> Iterator[tuple[LaunchTime, ...]]:
        """Every product's launches: copies, then its pattern, whose kernels share `main_ns` (all but copies)."""
        elements = (products.batch * products.m * products.n).astype(float)
        small = {name: start + slope * elements for name, (start, slope) in zip(ROLES, self.lines, strict=True)}
        copies = products.bias_copied.astype(np.int64) + products.copied
        each_ns = self.copy_ns(products, shares) / np.maximum(copies, 1)
        for index, (pattern, count) in enumerate(zip(patterns, copies, strict=True)):
            total = float(main_ns[index])
            extra = {name: float(small[name][index]) for name in PATTERNS[pattern] if name != MAIN}
            shrink = min(1.0, (1 - _LEAST_MAIN) * total / max(sum(extra.values()), 1e-9))
            times = {name: time * shrink for name, time in extra.items()}
            times[MAIN] = total - sum(times.values())
            first = [LaunchTime(COPY, float(each_ns[index]))] * int(count)
            turns = {MAIN: _turns(products, index)}
            launched = ((name, share) for name in PATTERNS[pattern] for share in turns.get(name, [1.0]))
            yield (*first, *(LaunchTime(name, times[name] * share) for name, share in launched))


def _turns(products: Products, index: int) -> list[float]:
    """Shares of a product that one launch after the other makes: a grid is no longer than `_GRID` along a batch.

    Of 1,048,576 rows the last 16 were a launch of their own where no bias is added, on an H200.
    """
    batch, rows = int(products.batch[index]), int(products.m[index])
    plain = products.operation[index] == OPERATIONS.index("mm")
    length, most = (batch, _GRID) if batch > _GRID else (rows, _ROWS_OF_BLOCK * _GRID) if plain else (1, 1)
    most = max(most, -(-length // _MOST_TURNS))
    return [min(most, length - start) / length for start in range(0, length, most)]


def copy_bytes(products: Products) -> Column:
    """Bytes that a copy of the bias into the result moves; 0 where there is none."""
    size = products.element_bytes
    result = products.batch * products.m * products.n * size
    bias = np.select([products.bias == 1, products.bias == 2], [products.n * size, products.m * products.n * size], result)
    return np.where(products.bias_copied, result + bias, 0)


def _along(curve: Column, copied: Column) -> Column:
    """ns at so many bytes: between knots by powers, beyond the last one in proportion."""
    place = np.log2(np.maximum(copied, 1))
    beyond = np.maximum(place - KNOTS[-1], 0) * np.log(2)
    times: Column = np.exp(np.interp(place, KNOTS, curve) + beyond)
    return times


@dataclass(frozen=True)
class MatmulForm:
    """Times of matrix products."""

    beside: SmallKernels
    shares: ProductShares = field(metadata=stored(prefix="parts."))
    groups: dict[str, FittedGroup] = field(metadata=stored(prefix="", names=GROUPS))
    device: MatmulConstants = field(default_factory=partial(reference_constants, "matmul", MatmulConstants))
    in_groups: GroupedConstants = field(default_factory=partial(reference_constants, "grouped", GroupedConstants))

    @cached_property
    def ensembles(self) -> dict[int, Ensemble]:
        """The mixtures of each group that was fitted, by its place."""
        places = {group: name for group, name in enumerate(GROUPS) if name in self.groups}
        return {group: Ensemble(group, self.groups[name], self.device.sms) for group, name in places.items()}

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each product launches and how long that takes."""
        products = of_questions(questions)
        full = (products.m * products.n * products.k * products.batch) > 0
        grouped = full & in_groups(questions)
        timed = iter(self._answers(products.take(np.flatnonzero(full & ~grouped))))
        by_groups = iter(answers_of(products.take(np.flatnonzero(grouped)), self.in_groups))
        answers = (
            self._empty(products, index) if not full[index] else next(by_groups) if grouped[index] else next(timed)
            for index in range(len(products))
        )
        return [_scaled(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def _empty(self, products: Products, index: int) -> Answer:
        """A product without elements launches nothing; one over no terms fills its result with zeros or the bias."""
        elements = int(products.m[index] * products.n[index] * products.batch[index])
        size = elements * int(products.element_bytes[index])
        return Answer((LaunchTime("fill", _FILL_NS + size / self.device.filled_bytes_per_ns),) if elements else ())

    def _answers(self, products: Products) -> list[Answer]:
        main_ns, inside = np.empty(len(products)), np.empty(len(products), dtype=bool)
        patterns = np.empty(len(products), dtype=int)
        for group, places in _chunks(groups_of(products)):
            if group not in self.ensembles:
                raise InputError(f"products of the group {GROUPS[group]} are not fitted")
            inputs = inputs_of(products.take(places), group, self.shares, self.device)
            ensemble = self.ensembles[group]
            main_ns[places], patterns[places] = np.exp(ensemble.ask(inputs).log_ns), ensemble.patterns(inputs)
            inside[places] = ensemble.inside(inputs)
        launches = self.beside.launches(products, self.shares, main_ns, patterns)
        return [Answer(item, bool(within)) for item, within in zip(launches, inside, strict=True)]


def _scaled(question: Question, answer: Answer) -> Answer:
    """What a product of few bits launches, whose answer so far is the 16-bit product's that it was taken for."""
    if base_name(question.call.op) not in (SCALED, SCALED_GROUPED) or not answer.launches:
        return answer
    factor = scaled_ns(question.call, answer.time_ns, question.share) / answer.time_ns
    return replace(answer, launches=tuple(LaunchTime(each.kernel, each.time_ns * factor) for each in answer.launches))


def _chunks(groups: Column) -> Iterator[tuple[int, Column]]:
    """Places of products of one group, a chunk at a time."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(GROUPS) + 1))
    for group in range(len(GROUPS)):
        for start in range(edges[group], edges[group + 1], _CHUNK):
            yield group, order[start : min(start + _CHUNK, edges[group + 1])]


FORM = MatmulForm
