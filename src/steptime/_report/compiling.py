"""What compiling brings, as Python, JSON, text and the page have it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from rich.console import Console
from rich.text import Text

from steptime._files import write_output
from steptime._fuse.compiled import BY_US as FUSION_PASS
from steptime._fuse.compiled import OFF, FusedKernel
from steptime._report.answers import Prediction, plain
from steptime._report.html.page import page
from steptime._report.json import Document, prediction_document
from steptime._report.layout import body_width, grid, literal, print_body, print_line, print_section, width_of
from steptime._report.text import print_prediction
from steptime._report.words import interval_words, time_ms
from steptime._sim.prediction import PredictedStep
from steptime._units import size_words

_SHOWN = 6
_NAME_AT_LEAST = 18
BY_US, BY_TORCH = "fusion pass", "torch.compile"
"""Who decided what is fused: steptime itself, or PyTorch's compiler."""
_SAID = {BY_US: FUSION_PASS, BY_TORCH: "fused by PyTorch's own compiler, for a simulated GPU"}


@dataclass(frozen=True)
class Compiling:
    """What compiling brings: the step without it, how many times as fast it is, and what became of its kernels.

    Numbers of kernels are of one rank's step, the one with the most.
    """

    mode: str
    by: str
    eager: PredictedStep
    speedup: float
    interval: tuple[float, float]  # of the speed-up: holds nine of ten
    p_faster: float
    eager_launches: int  # ops of forward and backward that launch kernels
    kernels: int  # that are generated instead
    calls: int  # of libraries and of ops that stay
    saved_bytes: int  # that fused kernels neither read nor write
    largest: tuple[FusedKernel, ...]

    def to_dict(self) -> Document:
        """Plain values."""
        eager = self.eager
        return {
            "mode": self.mode,
            "by": self.by,
            "eager": {
                "step_time_ms": eager.step_time_ms,
                "interval_ms": list(eager.interval_ms),
                "bound_by": eager.bound_by,
                "peak_bytes": eager.memory.get("peak_bytes"),
                "fits": eager.fits,
            },
            "speedup": self.speedup,
            "speedup_interval": list(self.interval),
            "p_faster": self.p_faster,
            "eager_launches": self.eager_launches,
            "kernels": self.kernels,
            "calls": self.calls,
            "saved_bytes": self.saved_bytes,
            "fused": [
                {"kernel": each.name, "times": each.times}
                | ({"ops": each.ops, "saved_bytes": each.saved_bytes} if self.by == BY_US else {"bytes": each.saved_bytes})
                for each in self.largest
            ],
        }

    @property
    def words(self) -> str:
        """How many times as fast, in one line."""
        low, high = self.interval
        how = f"{self.speedup:.2f} times as fast"
        return f"{how} as eager (90 % interval {low:.2f} to {high:.2f}), which takes {time_ms(self.eager.step_time_ms)} ms"


@dataclass(frozen=True, repr=False)
class CompiledPrediction(Prediction):
    """A step as `torch.compile` would run it, and what that brings."""

    compiling: Compiling | None = field(default=None, compare=False)

    @classmethod
    def after(cls, step: PredictedStep, compiling: Compiling) -> CompiledPrediction:
        """The compiled step."""
        return cls(**{each.name: getattr(step, each.name) for each in fields(step)}, compiling=compiling)

    def to_dict(self) -> Document:
        """The keys of `steptime predict --json` for the compiled step, and `compile`: what that brings."""
        assert self.compiling is not None
        return plain({**prediction_document(self), "compile": self.compiling.to_dict()})

    def html(self, path: str | Path) -> None:
        """Writes the page of the compiled step, which says what compiling brings."""
        assert self.compiling is not None
        found = self.compiling
        facts = {
            "Compiled": f"{found.words}; {_SAID[found.by]}",
            "Eager": f"{time_ms(found.eager.step_time_ms)} ms, {interval_words(*found.eager.interval_ms)}",
            "Kernels": _kernel_words(found),
        }
        write_output(Path(path), page(self, facts=facts))


def _kernel_words(found: Compiling) -> str:
    launched = f"{found.eager_launches:,} ops that launch kernels in forward and backward"
    less = f", with {size_words(found.saved_bytes)} less memory traffic" if found.saved_bytes else ""
    return f"{launched} become {found.kernels:,} generated kernels and {found.calls:,} library calls{less}"


def print_compiled(console: Console, answer: CompiledPrediction) -> None:
    """The report of `steptime predict --compile`: the compiled step, and what compiling brings."""
    found = answer.compiling
    assert found is not None

    def brings() -> None:
        mode = "" if found.mode == OFF else f'(mode="{found.mode}")'
        print_section(console, "Compiling", f"torch.compile{mode}, {_SAID[found.by]}; this report is for the compiled step")
        print_line(console, "Speed-up", found.words, spaced=False)
        print_line(console, "Eager", found.eager.bound_by, spaced=False)
        print_line(console, "Kernels", _kernel_words(found), spaced=False)
        memory, before = answer.memory.get("peak_bytes"), found.eager.memory.get("peak_bytes")
        if isinstance(memory, int) and isinstance(before, int):
            print_line(console, "Peak", f"{size_words(memory)} on the fullest rank, eager {size_words(before)}", spaced=False)
        if found.largest:
            _print_fused(console, found)

    print_prediction(console, answer, brings)


def _print_fused(console: Console, found: Compiling) -> None:
    ours = found.by == BY_US
    heads = tuple(
        Text(head, "dim") for head in ("runs", "ops fused" if ours else "", "saved per step" if ours else "moved per step")
    )
    rows = [
        (Text(f"{each.times} x"), Text(str(each.ops or "")), Text(size_words(each.times * each.saved_bytes), "bold"))
        for each in found.largest[:_SHOWN]
    ]
    room = max(body_width(console) - width_of([heads, *rows]), _NAME_AT_LEAST)
    table = grid("left", "right", "right", "right")
    table.add_row(Text("largest generated kernels", "dim"), *heads)
    for each, numbers in zip(found.largest, rows, strict=False):
        name = literal(each.name)
        name.truncate(room, overflow="ellipsis")
        table.add_row(name, *numbers)
    print_body(console, table)
