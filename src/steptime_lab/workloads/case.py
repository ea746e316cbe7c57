"""`Case`: one training-step configuration as plain data; `Step`: the same as a PyTorch step of one rank, ready to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

from steptime.errors import InputError

if TYPE_CHECKING:
    import torch

    from steptime._lookups.statistics import Statistics

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


class GroupLike(Protocol):
    """The ranks that train together, as one of them sees it; the default process group joins them where there are several."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> int:
        """How many there are."""


class Step(Protocol):
    """One rank's training step: forward, backward, optimiser. Calling it queues the work and waits for nothing."""

    @property
    def batches(self) -> int:
        """How many different input batches the calls cycle through."""

    @property
    def spare_bytes(self) -> int:
        """Device bytes of buffers shared with other cases that this one does not use: not part of its own memory."""

    def __call__(self) -> None:
        """Runs the next step."""

    def lookups(self, iteration: int) -> list[Statistics]:
        """What this rank's tables look up in that iteration, in table order; empty without tables. Synchronises."""

    def close(self) -> None:
        """Lets go of what the step holds; buffers that later cases share stay."""


@dataclass(frozen=True)
class Case:
    """One configuration. `batch` counts the samples of all ranks; `config` is enough to build the model again."""

    workload: str
    name: str  # unique, and safe as the name of a file
    config: dict[str, Any]
    precision: str
    batch: int
    ranks: int
    plan: dict[str, Any] | None = None  # of tables, as `Plan.from_dict` takes it; None where nothing is sharded
    task: str = ""  # what the case is one plan or one batch size of
    rule: str = ""  # what made the plan

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(f"case {self.name}: precision is {self.precision!r}; expected one of {', '.join(PRECISIONS)}")
        if self.ranks < 1 or self.batch < self.ranks or self.batch % self.ranks:
            raise InputError(f"case {self.name}: a batch of {self.batch} cannot be split evenly over {self.ranks} ranks")

    @property
    def local_batch(self) -> int:
        """Samples of one rank."""
        return self.batch // self.ranks

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Case:
        """The case that `to_dict` gave."""
        return cls(**values)

    def to_json(self) -> str:
        """Compact text; the same case always gives the same text."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Workload:
    """A kind of training step. `small` is a configuration that a CPU steps through in milliseconds."""

    name: str
    build: Callable[[Case, GroupLike, torch.device], Step]
    small: Callable[[int], tuple[Case, ...]]  # by number of ranks


@cache
def workloads() -> dict[str, Workload]:
    """Every workload, by name: a file in `networks` with a `WORKLOAD`, named after it."""
    return {name: workload(name) for name in _names()}


@cache
def workload(name: str) -> Workload:
    """The workload of that name, without reading the others' files."""
    if name not in _names():
        raise InputError(f"no workload is called {name!r}; there are {', '.join(_names())}")
    result: Workload = import_module(f"steptime_lab.workloads.networks.{name}").WORKLOAD
    return result


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`, on its device; with several ranks every one builds the same cases in the same order."""
    held = workload(case.workload)
    if group.ranks != case.ranks:
        raise InputError(
            f"case {case.name} is for {case.ranks} ranks, the group has {group.ranks}; build it in a group of that size"
        )
    return held.build(case, group, device)


@cache
def _names() -> tuple[str, ...]:
    from steptime_lab.workloads import networks

    return tuple(sorted(entry.name for entry in iter_modules(networks.__path__)))
