"""Names of ops: those of a program, and those that PyTorch calls in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from steptime._program.program import Program

_ENGINE = "autograd::engine::evaluate_function: "


def names_of(program: Program) -> list[str]:
    """In the order in which they are called."""
    return [program.names[row] for row in program.ops.name.tolist()]


def called_names(step: Callable[[], object]) -> list[str]:
    """Of what PyTorch calls in the second of two steps."""
    torch = pytest.importorskip("torch")
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: (event.start_ns(), -event.duration_ns()))
    return [event.name() for event in events]


def backward_nodes(names: Sequence[str]) -> list[str]:
    """The nodes of the backward pass in order; the kernels of attention have another name on a CPU."""
    found = [name.removeprefix(_ENGINE) for name in names if name.startswith(_ENGINE)]
    return ["Attention" if name.startswith("ScaledDotProduct") else name for name in found]
