"""Every case there is, by name: those the reader's rules were made with, and those recorded afterwards."""

from __future__ import annotations

from held_out_cases import HELD_OUT
from step_cases import CASES as KNOWN

CASES = {**KNOWN, **HELD_OUT}
