"""Text: everything a person asks for is there, lines fit the terminal, plain terminals get plain characters."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from steptime.graph.load import load
from steptime.graph.workload import Workload
from steptime.report.inspection import inspect_workload
from steptime.report.inspection_text import print_inspection
from steptime.report.replayed import ReplayReport, find_measured, report_replay
from steptime.report.text import print_prediction, print_replay, print_warnings
from steptime.sim.prediction import Prediction, predict
from steptime.validate.replay import replay

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"

Answers = tuple[Workload, Prediction, ReplayReport]


@cache
def answers() -> Answers:
    workload = load([EXAMPLE])
    return workload, predict(workload), report_replay(replay(workload), find_measured([EXAMPLE]))


def console(width: int = 100, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    return Console(file=io.TextIOWrapper(raw, encoding, write_through=True), width=width, highlight=False), raw


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_report_fits_its_terminal(width: int) -> None:
    workload, prediction, report = answers()
    out, raw = console(width)
    print_prediction(out, workload, prediction)
    print_replay(out, workload, report)
    print_inspection(out, workload, inspect_workload(workload))
    lines = raw.getvalue().decode().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines if width >= 100)


def test_a_prediction_answers_how_long_where_why_and_how_sure() -> None:
    workload, prediction, _ = answers()
    out, raw = console(160)
    print_prediction(out, workload, prediction)
    text = raw.getvalue().decode()
    assert f"Step time  {prediction.step_time_ms:.3f} ms" in text
    assert "4 of 4 ranks · NVIDIA H200 · 3 steps" in text
    for title in ("Ranks", "Device busy with", "Critical path", "Straggler", "Coverage", "Bound by"):
        assert f"\n  {title}" in text
    assert prediction.bound_by in " ".join(text.split())


def test_a_replay_shows_every_step_with_its_error() -> None:
    workload, _, report = answers()
    out, raw = console()
    print_replay(out, workload, report)
    text = raw.getvalue().decode()
    for step in report.steps:
        assert f"{100 * step.error:+.2f} %" in text
    assert "measured without a profiler" in text


def test_a_terminal_without_blocks_gets_plain_bars() -> None:
    workload, prediction, _ = answers()
    out, raw = console(encoding="latin-1")
    print_prediction(out, workload, prediction)
    assert b"####" in raw.getvalue()


def test_many_ranks_are_shown_by_their_extremes() -> None:
    workload, prediction, _ = answers()
    many = tuple(replace(prediction.ranks[0], rank=rank, idle_ms=float(rank)) for rank in range(100))
    out, raw = console()
    print_prediction(out, workload, replace(prediction, ranks=many))
    text = raw.getvalue().decode()
    assert all(word in text for word in ("least", "median", "most", "99.000", "49.500"))


def test_warnings_that_differ_in_numbers_only_are_one() -> None:
    out, raw = console()
    print_warnings(out, ["rank0: 3 events lost", "rank1: 14 events lost", "something else"])
    text = raw.getvalue().decode()
    assert text.count("events lost") == 1
    assert "rank0: 3 events lost (and 1 more like this)" in text
    assert "something else" in text


def test_brackets_in_names_are_text_and_not_markup() -> None:
    out, raw = console()
    print_warnings(out, ["[bold]name[/bold] is odd"])
    assert "[bold]name[/bold] is odd" in raw.getvalue().decode()
