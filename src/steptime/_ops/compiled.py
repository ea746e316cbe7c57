"""Frames that PyTorch records around what `torch.compile` made of a script, by their names."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

GENERATED = "triton_"
"""How the names of kernels begin that Inductor generates in Triton; they are ops by those names."""


class Frame(Enum):
    """What a frame stands for, and how its name begins."""

    REGION = "Torch-Compiled Region"  # a call of a compiled function or module, its guards left out
    GUARDS = "TorchDynamo Cache Lookup"  # finding which compiled code fits the arguments
    BACKWARD = "CompiledFunctionBackward"  # AOTAutograd's function, backward
    FUNCTION = "CompiledFunction"  # and forward
    WRAPPER = "## Call CompiledFxGraph"  # Inductor's wrapper: allocations, external calls, launches
    GRAPH = "cudagraph:"  # everything in it is one CUDA graph, replayed


@lru_cache(maxsize=1 << 14)
def frame_of(name: str) -> Frame | None:
    """The frame of this name; None of anything else."""
    return next((frame for frame in Frame if name.startswith(frame.value)), None)
