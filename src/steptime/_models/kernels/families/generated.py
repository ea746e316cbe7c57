"""Kernels that PyTorch's compiler generates: known by their names and by what is said beside them, never swept."""

from __future__ import annotations

from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import KernelSweep

FAMILY = Family(name="generated", sweep=KernelSweep(), weight=0.0, form="generated")
