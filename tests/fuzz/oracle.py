"""What may come of a case: an answer of numbers that make sense, or one line. Anything else is an AssertionError."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

ANSWER, REFUSAL = "answer", "refusal"
LONGEST_MESSAGE = 2000
BAD_INPUT = 2
# What an answer may give as less than nothing: errors, savings and differences, and what a table would gain elsewhere.
SIGNED = {
    "errors", "saves_ms", "saved_ms", "saves", "moved_ms", "parts", "total_ms", "total_interval_ms", "changes",
    "clock_offset_ns", "gain", "off", "second", "together",
}  # fmt: skip
_SIGNED = "error"  # what so ends is one
# One number of an input changed by up to so much may move the step by so much without a word.
NEARBY, MOVES = 0.02, 0.05
_LONGEST_STEP_MS = 1e12
_NUMBER = re.compile(r"-?\d[\d.,]*")


def judged(code: int, out: str, err: str, *, is_json: bool, reports: bool = False) -> str:
    """Whether a command answered or refused, as it should; some report on stderr how far they are."""
    for line in err.splitlines():
        assert line.isprintable(), f"stderr: {line!r}"
    if code == BAD_INPUT:
        return _refusal(out, err, reports=reports)
    assert code == 0, f"exit code {code}: {err}"
    assert reports or not err, f"an answer with words on stderr: {err[:500]}"
    assert out.strip(), "an answer without a word"
    assert all(character.isprintable() or character == "\n" for character in out), "stdout has what steers a terminal"
    if is_json:
        check_document(document(out))
    return ANSWER


def _refusal(out: str, err: str, *, reports: bool) -> str:
    lines = err.splitlines()[-1:] if reports else err.splitlines()
    assert not out, f"a refusal with words on stdout: {out[:500]}"
    assert len(lines) == 1, f"{len(lines)} lines: {err[:1000]}"
    assert lines[0].startswith("steptime: error: "), err[:500]
    assert len(lines[0]) <= LONGEST_MESSAGE, f"{len(lines[0])} characters: {lines[0][:300]}"
    assert "out of memory" not in lines[0], lines[0]
    return REFUSAL


def document(out: str) -> Any:
    """What other tools read: JSON without NaN or infinities."""
    return json.loads(out, parse_constant=_not_a_number)


def _not_a_number(text: str) -> None:
    raise AssertionError(f"{text} in an answer")


def check_document(value: Any, where: str = "", *, signed: bool = False) -> None:
    """Every number of an answer is finite and none is negative where that means nothing; intervals hold their steps."""
    if isinstance(value, dict):
        _check_interval(value, where)
        _check_parts(value, where)
        for name, each in value.items():
            check_document(each, f"{where}.{name}", signed=signed or name in SIGNED or name.endswith(_SIGNED))
    elif isinstance(value, list):
        for each in value:
            check_document(each, where, signed=signed)
    elif isinstance(value, int | float):
        assert math.isfinite(value), where
        assert signed or value >= 0, f"{where} is {value}"


def _check_parts(value: dict[str, Any], where: str) -> None:
    """What a difference is made of adds up to it."""
    parts, total = value.get("parts"), value.get("total_ms")
    if isinstance(parts, dict) and isinstance(total, int | float):
        longest = max(abs(total), *map(abs, parts.values()), 1.0)
        assert abs(sum(parts.values()) - total) <= 1e-3 * longest, f"{where}: parts do not add up to {total}"


def _check_interval(value: dict[str, Any], where: str) -> None:
    step, interval = value.get("step_time_ms"), value.get("interval_ms")
    if step is not None:
        assert 0 <= step < _LONGEST_STEP_MS, f"{where}.step_time_ms is {step}"
    of_step = "saves_ms" not in value and "measured_step_ms" not in value  # else of savings, or the range of recorded steps
    if step is not None and interval is not None and of_step:
        assert interval[0] <= step <= interval[1], f"{where}: {step} outside {interval}"


def steps(answer: Any) -> Iterator[float]:
    """The step times that an answer is about."""
    if "step_time_ms" in answer:
        yield answer["step_time_ms"]
    for each in (*answer.get("plans", ()), *(answer[name] for name in ("best",) if isinstance(answer.get(name), dict))):
        if "step_time_ms" in each:
            yield each["step_time_ms"]


def _said(answer: Any) -> set[str]:
    """What an answer warns of, whatever numbers it gives."""
    return {_NUMBER.sub("", warning) for warning in answer.get("warnings", ())}


def compared(before: Any, after: Any) -> None:
    """A small change moves a step by little, or a warning that was not there before says why."""
    if _said(before) != _said(after):
        return
    for old, new in zip(steps(before), steps(after), strict=True):
        ratio = new / old if old else 1.0
        assert abs(ratio - 1) <= MOVES, f"the step moves from {old:.6g} to {new:.6g} ms ({ratio - 1:+.1%}) without a word"
