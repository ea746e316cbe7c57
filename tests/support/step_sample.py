"""A few of the shipped steps that stand for all: some of every workload, chosen by a hash of their names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import sha256

from steptime_lab.measurements.shipped import shipped

# Cases of a workload and so many ranks. Together they take about 30 s on one core.
_COUNTS: Mapping[tuple[str, int], int] = {
    ("dlrm", 1): 1, ("dlrm", 2): 6, ("dlrm", 4): 6,
    ("bert", 1): 1, ("bert", 2): 1, ("bert", 4): 1, ("gpt2", 1): 1, ("gpt2", 2): 1, ("gpt2", 4): 1,
    ("xlnet", 1): 1,
    ("resnet50", 1): 1, ("inception_v3", 1): 1,
}  # fmt: skip


def sample_names() -> list[str]:
    """The names of the sample's cases."""
    table = shipped("steps").select(["name", "workload", "ranks"])
    return sample_of((row["name"], row["workload"], row["ranks"]) for row in table.to_pylist())


def sample_of(cases: Iterable[tuple[str, str, int]]) -> list[str]:
    """Of (name, workload, ranks), those whose names have the smallest hashes."""
    groups: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name, workload, ranks in cases:
        groups[workload, ranks].add(name)
    return sorted(
        name
        for key, count in _COUNTS.items()
        for name in sorted(groups[key], key=lambda name: sha256(name.encode()).hexdigest())[:count]
    )
