"""What a kernel model is asked and what it answers: a call under its settings, the kernels it launches with their times."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._models.kernels.call import Call

# What the other parts of a shared GPU do meanwhile.
OTHERS = ("none", "idle", "same", "streaming")


@dataclass(frozen=True, slots=True)
class Question:
    """A call and what its time depends on besides: precision switches, cache state, the part of a GPU and its company."""

    call: Call
    tf32: bool = False  # whether matrix products and convolutions of fp32 may use TF32
    benchmark: bool = False  # whether cuDNN tried its algorithms and kept the fastest
    warm: bool = False  # whether the call's `written` arguments were written just before
    share: int = 1  # one of so many equal parts of the GPU
    others: str = "none"  # what the other parts do: none (there are none) | idle | same | streaming


@dataclass(frozen=True, slots=True)
class LaunchTime:
    """One kernel, copy or fill, by the short name that launch rules use, and how long it runs."""

    kernel: str
    time_ns: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call launches, in order. `inside` says whether the question lies in the range the model was fitted on."""

    launches: tuple[LaunchTime, ...]
    inside: bool = True

    @property
    def time_ns(self) -> float:
        """Device time of the whole call."""
        return sum(launch.time_ns for launch in self.launches)
