"""One place each decides what binds a step, whether it fits, what would help and how it is played; all others ask it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from steptime._models.memory.fit import Remedy

SOURCE = Path(__file__).parents[1] / "src"
PRODUCT, LAB = "steptime", "steptime_lab"

# What a rank has or may use, and what it needs: the words that a comparison of the two has to name.
_LIMITS = {"capacity_bytes", "limit_bytes", "memory_limit_bytes", "rank_memory_bytes", "limit", "capacity"}
_NEEDS = {"peak_bytes", "needed_bytes", "used_bytes", "peaks", "used", "needed", "peak"}
FIT = "_models/memory/fit.py"
REMEDIES = {"_remedies.py", "_shard/shortage.py"}
# Modules that may play cohorts: the core and its laws, a modelled step, a recorded one and the iterations of one.
PLAYERS = {
    "_sim/__init__.py",  # names them for tests and benchmarks
    "_sim/core/steady.py",
    "_sim/laws/slowdowns.py",
    "_sim/modelled/step.py",
    "_sim/modelled/prediction.py",  # the draws of an interval
    "_sim/recorded/replay.py",
    "_sim/recorded/lookup_scenarios.py",
}
_PLAYING = {"steady", "steady_settled", "steady_period", "simulate", "Playback"}


Nodes = list[ast.Compare | ast.Call | ast.ImportFrom | ast.Attribute]


@cache
def modules(package: str) -> dict[str, Nodes]:
    """Return what decides in a package, by path: comparisons, calls, imports and attributes. Paths of the lab have its name."""
    found = {}
    for file in sorted((SOURCE / package).rglob("*.py")):
        path = file.relative_to(SOURCE / package if package == PRODUCT else SOURCE)
        found[path.as_posix()] = nodes_of(file.read_text(encoding="utf-8"))
    return found


def nodes_of(text: str) -> Nodes:
    """Return comparisons, calls, imports and attributes of a source text."""
    kinds = (ast.Compare, ast.Call, ast.ImportFrom, ast.Attribute)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def everywhere() -> dict[str, Nodes]:
    """Return the modules of the product and the lab."""
    return modules(PRODUCT) | modules(LAB)


def named(node: ast.AST) -> set[str]:
    """Return all names, attributes and keys inside an expression."""
    result = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            result.add(each.id)
        elif isinstance(each, ast.Attribute):
            result.add(each.attr)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            result.add(each.value)
    return result


def deciding_on_room(nodes: Nodes) -> Iterator[int]:
    """Yield the lines in which a peak is compared with a limit."""
    for node in nodes:
        if isinstance(node, ast.Compare) and any(isinstance(each, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for each in node.ops):
            sides = [named(each) for each in (node.left, *node.comparators)]
            if any(side & _LIMITS for side in sides) and any(side & _NEEDS for side in sides):
                yield node.lineno


def imported(nodes: Nodes, module: str) -> set[str]:
    """Return the names that are imported from a module or from below it."""
    imports = (each for each in nodes if isinstance(each, ast.ImportFrom) and f"{each.module}.".startswith(f"{module}."))
    return {name.name for each in imports for name in each.names}


def makes(nodes: Nodes, name: str) -> bool:
    """Return whether a class is made, by its own name or by one of its class methods."""
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    classes = (each.value if isinstance(each, ast.Attribute) else each for each in calls)
    return any(isinstance(each, ast.Name) and each.id == name for each in classes)


def test_one_module_compares_peaks_with_limits() -> None:
    found = {path: lines for path, nodes in modules(PRODUCT).items() if (lines := list(deciding_on_room(nodes)))}
    assert set(found) <= {FIT}, found


def test_one_module_reads_how_much_memory_a_rank_has() -> None:
    attributes = {
        path: {each.attr for each in nodes if isinstance(each, ast.Attribute)} for path, nodes in everywhere().items()
    }
    assert {path for path, names in attributes.items() if "rank_memory_bytes" in names} == {FIT}


def test_one_function_makes_what_binds_a_step() -> None:
    assert {path for path, nodes in everywhere().items() if makes(nodes, "StepBound")} == {"_sim/prediction.py"}
    bound = "steptime._sim.explain.bound"
    assert not {path for path, nodes in modules(PRODUCT).items() if imported(nodes, bound) & _THRESHOLDS}


_THRESHOLDS = {"GPU_BOUND", "HOST_BOUND", "WIRE_BOUND"}


def test_remedies_are_made_where_they_are_tried() -> None:
    """A remedy has what the fullest rank needs with it, so that nobody can name one without trying it."""
    assert {path for path, nodes in everywhere().items() if makes(nodes, "Remedy")} == REMEDIES
    named = {
        path for path, nodes in modules(PRODUCT).items() if imported(nodes, "steptime._remedies") & {"OversizedJob", "sentence"}
    }
    assert named == {"_api/predict.py", "_plan/shortage.py", "_shard/shortage.py"}
    with pytest.raises(TypeError):
        Remedy("a smaller batch")  # type: ignore[call-arg]


def test_few_modules_play_cohorts_and_none_outside_the_simulator() -> None:
    players = {path for path, nodes in everywhere().items() if imported(nodes, "steptime._sim") & _PLAYING}
    assert players <= PLAYERS


@pytest.mark.parametrize(
    "text",
    [
        "fits = memory['peak_bytes'] <= memory['capacity_bytes']",
        "ok = [each for each in played if each.peak_bytes <= limit]",
        "low = layout.peaks[0] > self.limit",
    ],
)
def test_a_second_place_that_decides_would_be_found(text: str) -> None:
    assert list(deciding_on_room(nodes_of(text)))


def test_what_decides_nothing_is_not_found() -> None:
    assert not list(deciding_on_room(nodes_of("a = x.peak_bytes < y.peak_bytes; b = memory_bytes < 1; c = memory.limit")))
