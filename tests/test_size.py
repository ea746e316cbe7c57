"""The size of the house: lines per part stay within their budget, and a class name means one thing in a package."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = tomllib.loads((ROOT / "tests" / "size_budget.toml").read_text(encoding="utf-8"))


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def lines_per_part() -> dict[str, int]:
    """Lines of every sub-package, and of the modules beside them, as `package/part`."""
    counts: Counter[str] = Counter()
    for package in sorted(path for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()):
        for module in modules(package):
            parts = module.relative_to(package).parts
            part = f"{package.name}/{parts[0]}" if len(parts) > 1 else package.name
            counts[part] += len(module.read_text(encoding="utf-8").splitlines())
    return dict(counts)


def repeated_class_names(package: Path) -> set[str]:
    """Names of classes that several modules of a package define at their top level."""
    counts = Counter(
        node.name
        for module in modules(package)
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in counts.items() if count > 1}


def test_every_part_stays_within_its_lines() -> None:
    budget, lines = BUDGET["lines"], lines_per_part()
    beyond = {
        part: f"{count} lines, budget {budget.get(part, 0)}" for part, count in lines.items() if count > budget.get(part, 0)
    }
    assert not beyond, "make it smaller, or raise tests/size_budget.toml in a commit that says why"


def test_packages_stay_within_their_lines() -> None:
    lines = lines_per_part()
    totals = {
        package: sum(count for part, count in lines.items() if part.split("/")[0] == package) for package in BUDGET["total"]
    }
    assert {package: count for package, count in totals.items() if count > BUDGET["total"][package]} == {}


@pytest.mark.parametrize("package", ["steptime", "steptime_lab"])
def test_a_class_name_is_unique_in_its_package(package: str) -> None:
    allowed = set(BUDGET["repeated_class_names"][package])
    assert repeated_class_names(ROOT / "src" / package) - allowed == set()
