"""What nothing waits for."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._ops.waits import TensorWaits


def needed_by_nobody(waits: Sequence[TensorWaits]) -> tuple[int, ...]:
    """The collectives that nothing in their step waits for."""
    return tuple(each.collective for each in waits if each.needed_by < 0)
