"""`first_difference`: whether two ranks do the same, so that one program serves both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from steptime._capture.tensors import tensors_in

Called = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""An op with the shapes and dtypes of its tensors, and of a collective how much goes to each rank."""


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """A call as far as it tells one rank from another.

    Numbers among arguments do not: a rank of a tensor-parallel group looks for other rows of a table than the next one, in
    the same time. Nor do groups, roots and peers.
    """
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in((args, kwargs)))
    splits = tuple(tuple(each) for each in args if _is_integers(each)) if func.namespace == "c10d" else ()
    return func._schema.name, shapes, splits


def first_difference(one: Sequence[Called], other: Sequence[Called]) -> str:
    """What the first calls are that differ; empty where none do."""
    for index, (left, right) in enumerate(zip_longest(one, other)):
        if left != right:
            return f"call {index}: {_said(left)} and {_said(right)}"
    return ""


def _is_integers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, int) for each in value)


def _said(call: Called | None) -> str:
    if call is None:
        return "nothing"
    name, shapes, splits = call
    parts = [*(str(list(shape)) for shape, _ in shapes), *(str(list(split)) for split in splits)]
    return f"{name}({', '.join(parts)})"
