"""Types of arrays that are aliases, as numpy declares `NDArray` from 2.5 on, are read as arrays."""

from __future__ import annotations

from types import GenericAlias
from typing import Any, TypeVar

import numpy as np

from steptime._models.engine import stored

Element = TypeVar("Element", bound=np.generic)


class Alias:
    __value__ = np.ndarray[Any, np.dtype[Element]]


def test_an_alias_of_an_array_is_an_array_of_its_elements() -> None:
    hint = GenericAlias(Alias, (np.float64,))
    assert stored._is_array(hint)
    assert stored._leaf(hint, np.ones(3, np.float32)).dtype == np.float64
    assert not stored._is_array(tuple[int, ...])
    assert not stored._is_array(float)
