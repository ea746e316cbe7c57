"""Damaged inputs of every kind: an answer that makes sense, or one clear line; a small change moves a step by little.

The cases are the same on every run, 3,000 in all. One that fails: `python -m tests.fuzz --kind KIND --case NUMBER`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.fuzz import player
from tests.fuzz.case import Case
from tests.fuzz.kinds import KINDS, case_of
from tests.fuzz.many import play, play_many
from tests.fuzz.oracle import check_document, compared, judged

CASES = 3_000
# A step that is predicted takes three times as long as what most damaged inputs end in.
NEAR = {kind for kind in KINDS if kind.startswith("near-")}
OF_NEAR = 40
OF_A_KIND = -(-(CASES - OF_NEAR * len(NEAR)) // (len(KINDS) - len(NEAR)))
# What fitted models, captured sizes and patterns may do was read for longer than it was damaged.
OF_FITTED = {"device-models": 125, "power-model": 125, "huge-sizes": 125, "pattern": 125}
QUICK = 8


def outcomes(kind: str, numbers: range) -> list[str]:
    found = []
    for number in numbers:
        outcome = play(kind, number)
        assert not outcome.bad, f"--kind {kind} --case {number}: {outcome.kind}: {outcome.message}"
        found.append(outcome.kind)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_give_an_answer_or_one_clear_line(kind: str) -> None:
    outcomes(kind, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_inputs_give_an_answer_or_one_clear_line(kind: str) -> None:
    # Damage that always ends in an error would test little.
    count = OF_NEAR if kind in NEAR else OF_FITTED.get(kind, OF_A_KIND)
    assert outcomes(kind, range(QUICK, count)).count("answer") >= OF_A_KIND // 50


# Cases that failed once, one of each cause.
MENDED = (
    ("compile-config", 107), ("compile-value", 1), ("compiled-saved", 59), ("compiled-saved", 80), ("days", 105),
    ("fabric", 1348), ("fitted-host", 66), ("fitted-host", 193), ("measured-fabric", 580), ("near-dlrm", 1073),
    ("near-dlrm", 1142), ("options", 444), ("options", 744), ("options", 976), ("options", 1160), ("saved", 538),
    ("transformer", 1530), ("transformer", 1774), ("near-transformer", 1560),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "number"), MENDED)
def test_what_failed_once_does_not_again(kind: str, number: int) -> None:
    outcomes(kind, range(number, number + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_is_the_same_case(kind: str) -> None:
    assert case_of(kind, 7) == case_of(kind, 7)
    assert len({str(case_of(kind, number)) for number in range(5)}) > 1


def test_processes_find_what_one_process_finds() -> None:
    places = [("options", number) for number in range(6)]
    found = {each.number: each.outcome.kind for each in play_many(range(6), places, jobs=2)}
    assert found == dict(enumerate(outcomes("options", range(6))))


# What would be bad is found.


def test_numbers_that_mean_nothing_are_found() -> None:
    for answer in (
        {"a": [{"b_ms": -1}]},
        {"b": float("inf")},
        {"step_time_ms": 3.0, "interval_ms": [1.0, 2.0]},
        {"parts": {"a": 1.0}, "total_ms": 9},
    ):
        with pytest.raises(AssertionError):
            check_document(answer)
    check_document({"error": -0.5, "saves_ms": -1.0, "step_time_ms": 3.0, "interval_ms": [1.0, 4.0]})


def test_words_in_the_wrong_place_are_found() -> None:
    for code, out, err in (
        (1, "{}", ""),
        (2, "", "two\nlines"),
        (2, "", "steptime: error: \x1b[2J"),
        (0, "", ""),
        (0, "{}", "warning"),
    ):
        with pytest.raises(AssertionError):
            judged(code, out, err, is_json=True)


def test_a_step_that_jumps_without_a_word_is_found() -> None:
    with pytest.raises(AssertionError):
        compared({"step_time_ms": 1.0, "warnings": []}, {"step_time_ms": 1.1, "warnings": []})
    with pytest.raises(AssertionError):
        compared({"step_time_ms": 1.0, "warnings": ["0.2 %"]}, {"step_time_ms": 1.1, "warnings": ["0.3 %"]})
    compared({"step_time_ms": 1.0, "warnings": []}, {"step_time_ms": 1.1, "warnings": ["another tile"]})
    compared({"step_time_ms": 1.0, "warnings": []}, {"step_time_ms": 1.04, "warnings": []})


def test_what_hangs_grows_breaks_or_leaves_things_behind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(command: object) -> str:
        monkeypatch.setattr(player, "_command", lambda: command)
        return player.played(Case(("x", "--json"), {"in.json": "{}"}), tmp_path / str(random.random())).kind

    def hang(_: object) -> int:
        while True:
            pass

    def leave(_: object) -> int:
        Path("half").write_text("x")
        print("{}")
        return 0

    def answer(_: object) -> int:
        print("{}")
        return 0

    monkeypatch.setattr(player, "CPU_SECONDS", 0.2)
    assert of(hang) == "hang"
    assert of(lambda _: 1 // 0) == "traceback"
    assert of(lambda _: len(bytes(5 << 30))) == "traceback"
    assert of(leave) == "wrong"
    assert of(answer) == "answer"
