"""`value_class`: frozen dataclasses of which a step has thousands.

Type checkers see a frozen dataclass. When the program runs it is a plain one that compares and hashes the same, because Python
takes three times as long to make a frozen one, and making such objects was a tenth of a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True)
def value_class(cls: Class) -> Class:
    """A class with these fields and slots for them."""
    return dataclass(slots=True, unsafe_hash=True)(cls)  # type: ignore[return-value]
