"""`Recipe`: on what, with what, when and by which command something was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Recipe:
    """Stored with every row. Empty or zero where the machine would not say."""

    run: str  # one invocation of a measuring command; rows of one run share machine state
    machine: str  # a short digest of what identifies the box, so that repeats on another one can be told apart
    device: str
    gpus: int
    driver: str
    cuda_of_driver: str
    power_limit_w: float
    cpu: str
    cpu_cores: int
    os_kernel: str
    python: str
    torch: str
    cuda: str
    cudnn: str
    nccl: str
    triton: str
    date: str
    command: str
    steptime: str

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The recipe that `to_dict` gave."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for columns."""
        return asdict(self)


_ARROW = {"str": pa.dictionary(pa.int32(), pa.string()), "int": pa.int32(), "float": pa.float32()}

# The columns a recipe becomes; strings are dictionaries, so repeating them in every row costs next to nothing.
RECIPE_COLUMNS: tuple[pa.Field, ...] = tuple(pa.field(field.name, _ARROW[str(field.type)]) for field in fields(Recipe))
