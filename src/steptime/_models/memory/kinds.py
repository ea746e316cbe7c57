"""`Kind`: what the memory of a step is for."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """The parts of a peak, as a person asks for them."""

    PARAMETERS = "parameters"  # there before the step; forward and the optimiser take them
    OPTIMIZER_STATE = "optimizer_state"  # there before the step; only the optimiser takes it
    GRADIENTS = "gradients"  # made or added to by backward, taken by the optimiser
    INPUTS = "inputs"  # there before the step; no optimiser takes them: batches, masks, frozen weights, buffers
    ACTIVATIONS = "activations"  # made by forward, taken by backward
    TEMPORARIES = "temporaries"  # made and dropped within a phase, or by an op for itself
    COMMUNICATION = "communication"  # gradient buckets, and what collectives send and receive
    WORKSPACES = "workspaces"  # what libraries keep: cuBLAS
    ROUNDING = "rounding"  # by which the allocator's blocks are larger than what was asked for
