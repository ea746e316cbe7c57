"""What the features of a form take for granted of the device its rows were measured on: rates and sizes.

They come from the device's data file when a form is fitted, and are kept with it: from its limits and its table
`[features.<form>]`, for which that of the reference device stands in where there is none.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from steptime._hardware.device import DeviceLimits, reference_device
from steptime.errors import InputError

T = TypeVar("T")


def constants_of(limits: DeviceLimits, form: str, kind: type[T]) -> T:
    """The constants of a form on a device: `kind` is a dataclass of the numbers that it needs."""
    table = limits.features.get(form) or reference_device().features[form]
    known = {
        "sms": limits.sms.value,
        "threads_per_sm": limits.threads_per_sm.value,
        "l2_bytes": limits.cache_bytes.value,
        "peak_bytes_per_ns": limits.bandwidth_bytes_per_s.value / 1e9,
        **{name: quantity.value for name, quantity in table.items()},
    }
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if missing := [name for name in names if name not in known]:
        raise InputError(f"{limits.name}: features.{form} has no {missing[0]}; add it to the device's file, with its source")
    values: dict[str, Any] = {name: known[name] for name in names}
    return kind(**values)


@cache
def reference_constants(form: str, kind: type[T]) -> T:
    """Those of the reference device: files of fitted models from before constants were kept in them are of it."""
    return constants_of(reference_device(), form, kind)
