"""`Matmul`: the fitted form, asked by questions or by columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.matmul.beside import Beside, copy_ns, launches
from steptime._models.kernels.forms.matmul.ensemble import Ensemble
from steptime._models.kernels.forms.matmul.features import inputs_of, sizes_of
from steptime._models.kernels.forms.matmul.group import GROUPS, groups_of
from steptime._models.kernels.forms.matmul.names import PATTERNS
from steptime._models.kernels.forms.matmul.parts import Parts
from steptime._models.kernels.forms.matmul.product import Column, Products, of_columns, of_questions
from steptime._models.kernels.question import Answer, LaunchTime, Question

_CHUNK = 4096  # products at once: what their columns take stays in a core's cache
_FILL_NS, _FILL_BYTES_PER_NS = (
    1000.0,
    3000.0,
)  # a small kernel and memory's bandwidth: H200 datasheet, less what is never reached
_SLACK = 0.01  # octaves by which a size may leave the fitted range and still count as inside


def _chunks(groups: Column) -> Iterator[tuple[int, Column]]:
    """Places of products of one group, a chunk at a time."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(GROUPS) + 1))
    for group in range(len(GROUPS)):
        for start in range(edges[group], edges[group + 1], _CHUNK):
            yield group, order[start : min(start + _CHUNK, edges[group + 1])]


def _of(arrays: Mapping[str, npt.NDArray[Any]], group: str) -> dict[str, npt.NDArray[Any]]:
    return {name.removeprefix(f"{group}."): value for name, value in arrays.items() if name.startswith(f"{group}.")}


class Matmul:
    """Times of matrix products."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        self._beside = Beside(self._arrays["beside.lines"], self._arrays["beside.curves"])
        self._parts = Parts(self._arrays["parts.shares"], self._arrays["parts.deviations"])
        self._groups = [Ensemble(group, _of(arrays, name)) for group, name in enumerate(GROUPS)]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        return dict(self._arrays)

    def times_ns(self, columns: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        """Device time of very many products, by one network: columns as `product.of_columns` takes them."""
        products = of_columns(columns)
        found = np.empty(len(products))
        for group, places in _chunks(groups_of(products)):
            some = products.take(places)
            main_ns = np.exp(self._groups[group].quick(inputs_of(some, group, self._parts)).log_ns)
            found[places] = main_ns + copy_ns(self._beside.curves, some, self._parts)
        return found

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each product launches and how long that takes."""
        products = of_questions(questions)
        full = (products.m * products.n * products.k * products.batch) > 0
        listed = [Answer(()) if some else self._empty(products, index) for index, some in enumerate(full)]
        places = np.flatnonzero(full)
        for place, answer in zip(places, self._answers(products.take(places)), strict=True):
            listed[place] = answer
        return listed

    def _empty(self, products: Products, index: int) -> Answer:
        """A product without elements launches nothing; one over no terms fills its result with zeros or the bias."""
        elements = int(products.m[index] * products.n[index] * products.batch[index])
        size = elements * int(products.element_bytes[index])
        return Answer((LaunchTime("fill", _FILL_NS + size / _FILL_BYTES_PER_NS),) if elements else ())

    def _answers(self, products: Products) -> list[Answer]:
        main_ns, inside = np.empty(len(products)), np.empty(len(products), dtype=bool)
        scores = np.empty((len(PATTERNS), len(products)))
        for group, places in _chunks(groups_of(products)):
            inputs = inputs_of(products.take(places), group, self._parts)
            mixed = self._groups[group].ask(inputs)
            main_ns[places], scores[:, places] = np.exp(mixed.log_ns), mixed.launched
            sizes, fitted = sizes_of(inputs), self._groups[group]
            inside[places] = ((sizes >= fitted.sizes_low - _SLACK) & (sizes <= fitted.sizes_high + _SLACK)).all(axis=0)
        listed = launches(self._beside, products, self._parts, main_ns, scores)
        return [Answer(one, bool(within)) for one, within in zip(listed, inside, strict=True)]
