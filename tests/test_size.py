"""The size of the house: code tokens stay below ceilings that only fall, and a class name means one thing in a package."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Tokens of code: blank lines, comments and docstrings are free, wider lines save nothing. Lower them; never raise them.
CEILINGS = {"steptime": 720_000, "steptime_lab": 315_000}
# Class names that several modules still share. Names leave the list, none is added.
SHARED_CLASS_NAMES = {"steptime": set[str](), "steptime_lab": {"Pace"}}

_UNCOUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
_TEXT_BEGINS, _TEXT_ENDS = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / "src" / package).rglob("*.py"))


def code_tokens(source: str) -> int:
    """Count tokens other than docstrings; an f-string is one token on every Python."""
    count, text_depth, at_statement = 0, 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _UNCOUNTED and not (token.type == tokenize.STRING and at_statement):
            count += text_depth == 0
        text_depth += (token.type == _TEXT_BEGINS) - (token.type == _TEXT_ENDS)
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            at_statement = token.type in _UNCOUNTED
    return count


def repeated_class_names(package: str) -> set[str]:
    """Names of classes that several modules of a package define at their top level."""
    counts = Counter(
        node.name
        for module in modules(package)
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in counts.items() if count > 1}


def test_docstrings_and_comments_count_for_nothing() -> None:
    bare = "def f(x):\n    return x\n"
    documented = '"""A module."""\n\ndef f(x):  # why\n    """Return x."""\n\n    return x\n'
    assert code_tokens(documented) == code_tokens(bare) == 8
    assert code_tokens("x = 'text'\n") == 3


@pytest.mark.parametrize("package", CEILINGS)
def test_a_package_stays_below_its_ceiling(package: str) -> None:
    assert sum(code_tokens(module.read_text(encoding="utf-8")) for module in modules(package)) <= CEILINGS[package]


@pytest.mark.parametrize("package", SHARED_CLASS_NAMES)
def test_a_class_name_is_unique_in_its_package(package: str) -> None:
    assert repeated_class_names(package) <= SHARED_CLASS_NAMES[package]
