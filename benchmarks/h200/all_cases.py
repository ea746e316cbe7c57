"""Every case there is, by name: those the readers' rules were made with, those recorded later, and pairs with one change."""

from __future__ import annotations

from changed_again_cases import CHANGED_AGAIN
from changed_cases import CHANGED
from held_out_cases import HELD_OUT
from step_cases import CASES as KNOWN

CASES = {**KNOWN, **HELD_OUT, **CHANGED, **CHANGED_AGAIN}
