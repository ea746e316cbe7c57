"""`Matmul`: the fitted form, asked by questions or by columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.models.kernels.forms.matmul.beside import copy_ns, launches
from steptime.models.kernels.forms.matmul.features import Inputs, inputs_of
from steptime.models.kernels.forms.matmul.group import GROUPS, groups_of
from steptime.models.kernels.forms.matmul.mixture import Mixture
from steptime.models.kernels.forms.matmul.names import PATTERNS
from steptime.models.kernels.forms.matmul.product import Column, Products, of_columns, of_questions
from steptime.models.kernels.question import Answer, LaunchTime, Question

_CHUNK = 4096  # products at once: what their columns take stays in a core's cache
_SLACK = 0.01  # octaves by which a size may leave the fitted range and still count as inside


def sizes_of(inputs: Inputs) -> Column:
    """log2 of m, n, k, batch, elements of the result and products: what `inside` goes by."""
    result = inputs.m * inputs.n * inputs.batch
    found: Column = np.log2(np.stack([inputs.m, inputs.n, inputs.k, inputs.batch, result, result * inputs.k]))
    return found


def _chunks(groups: Column) -> Iterator[tuple[int, Column]]:
    """Places of products of one group, a chunk at a time."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(len(GROUPS) + 1))
    for group in range(len(GROUPS)):
        for start in range(edges[group], edges[group + 1], _CHUNK):
            yield group, order[start : min(start + _CHUNK, edges[group + 1])]


class Matmul:
    """Times of matrix products."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        self._lines = self._arrays["lines"]
        self._mixtures = []
        for group, name in enumerate(GROUPS):
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            self._mixtures.append(Mixture(group, own))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        return dict(self._arrays)

    def times_ns(self, columns: Mapping[str, Any]) -> npt.NDArray[np.float64]:
        """Device time of many products at once: columns as `product.of_columns` takes them."""
        products = of_columns(columns)
        found = np.empty(len(products))
        for group, places in _chunks(groups_of(products)):
            some = products.take(places)
            found[places] = np.exp(self._mixtures[group].ask(inputs_of(some, group)).log_ns) + copy_ns(self._lines, some)
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
        start, per_byte = self._lines[0]
        return Answer((LaunchTime("fill", float(start + size * per_byte)),) if elements else ())

    def _answers(self, products: Products) -> list[Answer]:
        main_ns, inside = np.empty(len(products)), np.empty(len(products), dtype=bool)
        scores = np.empty((len(PATTERNS), len(products)))
        for group, places in _chunks(groups_of(products)):
            inputs = inputs_of(products.take(places), group)
            mixed = self._mixtures[group].ask(inputs)
            main_ns[places], scores[:, places] = np.exp(mixed.log_ns), mixed.launched
            low, high = self._arrays[f"{GROUPS[group]}.sizes_low"], self._arrays[f"{GROUPS[group]}.sizes_high"]
            sizes = sizes_of(inputs)
            inside[places] = ((sizes >= low[:, None] - _SLACK) & (sizes <= high[:, None] + _SLACK)).all(axis=0)
        listed = launches(self._lines, products, main_ns, scores)
        return [Answer(one, bool(within)) for one, within in zip(listed, inside, strict=True)]
