"""`MatmulForm`: the fitted form, asked by questions or by columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.stored import stored
from steptime._models.kernels.forms.matmul.beside import PATTERNS, SmallKernels, copy_ns, launches
from steptime._models.kernels.forms.matmul.ensemble import Ensemble, FittedGroup
from steptime._models.kernels.forms.matmul.features import MatmulConstants, inputs_of, sizes_of
from steptime._models.kernels.forms.matmul.group import GROUPS, groups_of
from steptime._models.kernels.forms.matmul.product import Column, Products, of_columns, of_questions
from steptime._models.kernels.forms.matmul.shares import ProductShares
from steptime._models.kernels.question import Answer, LaunchTime, Question

_CHUNK = 4096  # products at once: what their columns take stays in a core's cache
_FILL_NS = 1000.0  # a small kernel
_SLACK = 0.01  # octaves by which a size may leave the fitted range and still count as inside


def _chunks(groups: Column) -> Iterator[tuple[int, Column]]:
    """Places of products of one group, a chunk at a time."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(GROUPS) + 1))
    for group in range(len(GROUPS)):
        for start in range(edges[group], edges[group + 1], _CHUNK):
            yield group, order[start : min(start + _CHUNK, edges[group + 1])]


@dataclass(frozen=True)
class MatmulForm:
    """Times of matrix products."""

    beside: SmallKernels
    shares: ProductShares = field(metadata=stored(prefix="parts."))
    groups: dict[str, FittedGroup] = field(metadata=stored(prefix="", names=GROUPS))
    device: MatmulConstants = field(default_factory=partial(reference_constants, "matmul", MatmulConstants))

    @cached_property
    def _ensembles(self) -> list[Ensemble]:
        return [Ensemble(group, self.groups[name], self.device.sms) for group, name in enumerate(GROUPS)]

    def times_ns(self, columns: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        """Device time of very many products, by one network: columns as `product.of_columns` takes them."""
        products = of_columns(columns)
        result = np.empty(len(products))
        for group, places in _chunks(groups_of(products)):
            some = products.take(places)
            main_ns = np.exp(self._ensembles[group].quick(inputs_of(some, group, self.shares, self.device)).log_ns)
            result[places] = main_ns + copy_ns(self.beside.curves, some, self.shares)
        return result

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each product launches and how long that takes."""
        products = of_questions(questions)
        full = (products.m * products.n * products.k * products.batch) > 0
        listed = [Answer(()) if item else self._empty(products, index) for index, item in enumerate(full)]
        places = np.flatnonzero(full)
        for position, answer in zip(places, self._answers(products.take(places)), strict=True):
            listed[position] = answer
        return listed

    def _empty(self, products: Products, index: int) -> Answer:
        """A product without elements launches nothing; one over no terms fills its result with zeros or the bias."""
        elements = int(products.m[index] * products.n[index] * products.batch[index])
        size = elements * int(products.element_bytes[index])
        return Answer((LaunchTime("fill", _FILL_NS + size / self.device.filled_bytes_per_ns),) if elements else ())

    def _answers(self, products: Products) -> list[Answer]:
        main_ns, inside = np.empty(len(products)), np.empty(len(products), dtype=bool)
        scores = np.empty((len(PATTERNS), len(products)))
        for group, places in _chunks(groups_of(products)):
            inputs = inputs_of(products.take(places), group, self.shares, self.device)
            mixed = self._ensembles[group].ask(inputs)
            main_ns[places], scores[:, places] = np.exp(mixed.log_ns), mixed.launched
            sizes, fitted = sizes_of(inputs), self._ensembles[group]
            inside[places] = ((sizes >= fitted.sizes_low - _SLACK) & (sizes <= fitted.sizes_high + _SLACK)).all(axis=0)
        listed = launches(self.beside, products, self.shares, main_ns, scores)
        return [Answer(item, bool(within)) for item, within in zip(listed, inside, strict=True)]
