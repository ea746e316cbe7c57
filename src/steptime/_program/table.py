"""A table of equal-length columns that behaves like a value: frozen, comparable, sliceable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
SmallColumn = npt.NDArray[np.int32]
KindColumn = npt.NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class Table:
    """Base of the column tables. A subclass declares its columns as fields and their types in `TYPES`."""

    TYPES: ClassVar[Mapping[str, type[np.generic]]] = {}

    def __post_init__(self) -> None:
        length = None
        for column in fields(self):
            values = np.ascontiguousarray(getattr(self, column.name), dtype=self.TYPES[column.name]).view()
            if values.ndim != 1 or (length is not None and len(values) != length):
                raise ValueError(f"{type(self).__name__}.{column.name}: {values.shape}, expected ({length},)")
            length = len(values)
            values.flags.writeable = False
            object.__setattr__(self, column.name, values)

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(getattr(self, c.name), getattr(other, c.name)) for c in fields(self))

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls.from_columns({})

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build from any sequences by column name; absent columns are an error unless all are absent."""
        if not columns:
            return cls(**{c.name: [] for c in fields(cls)})
        return cls(**{c.name: columns[c.name] for c in fields(cls)})

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, in declaration order."""
        return {c.name: getattr(self, c.name) for c in fields(self)}

    def take(self, rows: npt.NDArray[Any]) -> Self:
        """The given rows (indices or mask) as a new table."""
        return type(self)(**{name: values[rows] for name, values in self.columns().items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with some columns exchanged."""
        return type(self)(**{**self.columns(), **changes})
