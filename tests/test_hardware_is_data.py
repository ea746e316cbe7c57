"""Numbers of a GPU are in its data file, and nowhere else: SM counts, sizes of memory and caches, rates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import steptime
from steptime._hardware.device import DeviceLimits, device_names, read_device

SOURCE = Path(steptime.__file__).parents[1]

# Below, sizes are everybody's: tiles, blocks, rows.
LEAST = 1e6
# Numbers that happen to be those of some GPU, with what they are.
INNOCENT = {
    ("steptime/_lookups/populations.py", 50_000_000): "rows of a table",
    ("steptime/_models/kernels/families/elementwise.py", 40_000_000): "elements of a drawn table",
    ("steptime/_models/kernels/families/reduction.py", 40_000_000): "elements of a drawn table",
    ("steptime/_models/lookups/forms/bag_backward.py", 3e7): "where a piecewise line has a knot, one of three",
    ("steptime_lab/measure/lookups/groups.py", 30_000_000): "lookups of a drawn case, and bytes of rows that a sweep touches",
    ("steptime_lab/measure/lookups/prepared.py", 30_000_000): "lookups of a drawn case",
    ("steptime/_models/kernels/families/attention.py", 6e11): "operations of the largest drawn call",
    ("steptime/_models/kernels/families/convolution.py", 6e11): "operations of the largest drawn call",
    ("steptime/_models/kernels/families/matmul.py", 2e12): "operations of the largest drawn call",
}


def numbers_of(device: DeviceLimits) -> Iterator[float]:
    """What would give a device away: memory and rates per second; of one that models were fitted on, SMs and caches too."""
    if not device.analytic:  # the SM counts and caches of twenty GPUs are numbers that code has for a hundred reasons
        yield from (device.sms.value, device.cache_bytes.value, device.bandwidth_bytes_per_s.value / 1e9)
    yield from (device.memory_bytes.value, device.clock_hz.value, device.bandwidth_bytes_per_s.value)
    yield from (peak.value for peak in device.peak_flop_per_s.values())
    for table in device.features.values():
        sizes = (constant.value for name, constant in table.items() if name.endswith(("_bytes", "_flop_per_s")))
        yield from (size for size in sizes if size >= LEAST)


def literals(file: Path) -> Iterator[tuple[int, float]]:
    """Line and value of every number written in a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            yield node.lineno, float(node.value)


def gpu_literals() -> Iterator[tuple[str, int, float]]:
    """Module, line and value of every number in the source that is one of a shipped device's."""
    known = {number for name in device_names() for number in numbers_of(read_device(name))}
    for file in sorted(SOURCE.rglob("*.py")):
        module = file.relative_to(SOURCE).as_posix()
        yield from ((module, line, value) for line, value in literals(file) if value in known)


def test_no_module_holds_numbers_of_a_gpu() -> None:
    assert [one for one in gpu_literals() if (one[0], one[2]) not in INNOCENT] == []


def test_every_exception_is_still_there() -> None:
    assert set(INNOCENT) <= {(module, value) for module, _, value in gpu_literals()}
