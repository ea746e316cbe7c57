"""Text: everything a person asks for is there, lines fit the terminal, plain terminals get plain characters."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from steptime._api.predict import find_measured
from steptime._notices import Notices
from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._report.answers import Replayed
from steptime._report.inspection import inspect_workload, print_inspection
from steptime._report.layout import print_line, print_notices, print_numbers
from steptime._report.text import print_prediction, print_replay
from steptime._report.words import signed_percent, source_words, step_words, time_ms, with_unit
from steptime._sim.prediction import PredictedStep, predict
from steptime._sim.recorded.replay import replay

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"

Answers = tuple[Workload, PredictedStep, Replayed]


@cache
def answers() -> Answers:
    workload = load([EXAMPLE])
    return workload, predict(workload), Replayed.of(replay(workload), find_measured([EXAMPLE]))


def console(width: int = 100, encoding: str = "utf-8") -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    return Console(file=io.TextIOWrapper(raw, encoding, write_through=True), width=width, highlight=False), raw


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_report_fits_its_terminal(width: int) -> None:
    workload, prediction, report = answers()
    out, raw = console(width)
    print_prediction(out, prediction)
    print_replay(out, report)
    print_inspection(out, workload, inspect_workload(workload))
    lines = raw.getvalue().decode().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines if width >= 100)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize("scale", [1, 1_000])
def test_every_number_of_every_rank_is_whole_at_any_width(width: int, scale: int) -> None:
    _, prediction, _ = answers()
    times = [name for name in asdict(prediction.ranks[0]) if name.endswith("_ms")]
    ranks = [replace(r, **{name: scale * getattr(r, name) for name in times}) for r in prediction.ranks]
    out, raw = console(width)
    print_prediction(out, replace(prediction, ranks=tuple(ranks)))
    words = raw.getvalue().decode().split()
    for rank in ranks:
        shown = [getattr(rank, name) for name in times] + [rank.host_bound_fraction * rank.step_ms]
        assert {time_ms(value) for value in shown} <= set(words)


@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_every_number_of_an_inspection_is_whole_at_any_width(width: int) -> None:
    workload, *_ = answers()
    found = inspect_workload(workload)
    busy = tuple(replace(r, kernels=1_234_567_000 + r.rank, calls=7_654_321_000 + r.rank) for r in found.ranks)
    out, raw = console(width)
    print_inspection(out, workload, replace(found, ranks=busy))
    words = set(raw.getvalue().decode().split())
    assert {f"{count:,}" for r in busy for count in (r.kernels, r.calls, r.ops, r.queue_most, r.stream_waits)} <= words


def test_a_prediction_answers_how_long_where_why_and_how_sure() -> None:
    _, prediction, _ = answers()
    out, raw = console(160)
    print_prediction(out, prediction)
    text = raw.getvalue().decode()
    assert f"Step time  {prediction.step_time_ms:.3f} ms" in text
    assert "4 of 4 ranks · NVIDIA H200 · 3 steps" in text
    for title in ("Ranks", "Device busy with", "Critical path", "Straggler", "Coverage", "Bound by"):
        assert f"\n  {title}" in text
    assert prediction.bound_by in " ".join(text.split())


def test_a_replay_shows_every_step_with_its_error() -> None:
    *_, report = answers()
    out, raw = console()
    print_replay(out, report)
    text = raw.getvalue().decode()
    for step in report.steps:
        assert signed_percent(step.error) in text
    assert "measured without a profiler" in text


def test_a_terminal_without_blocks_gets_plain_bars() -> None:
    _, prediction, _ = answers()
    out, raw = console(encoding="latin-1")
    print_prediction(out, prediction)
    assert b"####" in raw.getvalue()


def test_many_ranks_are_shown_by_their_extremes() -> None:
    _, prediction, _ = answers()
    many = tuple(replace(prediction.ranks[0], rank=rank, idle_ms=float(rank)) for rank in range(100))
    out, raw = console()
    print_prediction(out, replace(prediction, ranks=many))
    text = raw.getvalue().decode()
    assert all(word in text for word in ("least", "median", "most", "99.000", "49.500"))


@pytest.mark.parametrize(
    ("step_ms", "said"),
    [(5.1664, "5.166 ms"), (9999.9, "9,999.9 ms"), (30306.6, "30.31 s"), (4e6, "4,000 s"), (4e7, "40,000 s")],
)
def test_long_steps_are_said_in_seconds(step_ms: float, said: str) -> None:
    assert step_words(step_ms) == said


@pytest.mark.parametrize(("energy_j", "said"), [(9.571, "9.57 J"), (167_540.0, "168 kJ"), (6.4e7, "64 MJ"), (0.0, "0 J")])
def test_quantities_have_the_multiple_of_their_unit_that_fits(energy_j: float, said: str) -> None:
    assert with_unit(energy_j, "J") == said


def test_ranks_of_which_the_same_is_shown_are_one_line() -> None:
    _, prediction, _ = answers()
    many = tuple(replace(prediction.ranks[0], rank=rank, idle_ms=float(rank // 50)) for rank in range(100))
    out, raw = console()
    print_prediction(out, replace(prediction, ranks=many))
    words = raw.getvalue().decode().split()
    assert {"0-49", "50-99"} <= set(words)
    assert "median" not in words


def test_warnings_that_differ_in_numbers_only_are_one() -> None:
    out, raw = console()
    print_notices(out, Notices.of(["rank0: 3 events lost", "rank1: 14 events lost", "something else"]))
    text = raw.getvalue().decode()
    assert text.count("events lost") == 1
    assert "rank0: 3 events lost (and 1 more like this)" in text
    assert "something else" in text


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/mm] x", "[param|cuda]", ":warning: x"])
def test_names_from_traces_are_text_and_not_markup(name: str) -> None:
    workload, prediction, report = answers()
    path = prediction.critical_path
    odd = replace(
        prediction,
        critical_path=replace(path, top=(replace(path.top[0], name=name),)),
        notices=Notices(warnings=(f"{name} warns",)),
    )
    found = inspect_workload(workload)
    groups = (replace(found.groups[0], group=f"{name} group"),)
    files = ({"format": "kineto", "file": f"{name} file"},)
    out, raw = console()
    print_prediction(out, replace(odd, workload=replace(workload, name=name)))
    print_replay(out, replace(report, prediction=odd))
    print_inspection(out, workload, replace(found, groups=groups, files=files))
    text = raw.getvalue().decode()
    assert text.count(name) == 1 + 2 * 2 + 2


def test_names_from_traces_cannot_steer_the_terminal() -> None:
    out, raw = console()
    print_notices(out, Notices.of(["a\x1b[31m red\nname"]))
    assert "a\ufffd[31m red name" in raw.getvalue().decode()


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0, "0.00 %"), (-1e-9, "0.00 %"), (4e-5, "0.00 %"), (-0.0123, "-1.23 %"), (0.5, "+50.00 %"), (-1.0, "-100.00 %")],
)
def test_an_error_of_nothing_has_no_sign(share: float, said: str) -> None:
    assert signed_percent(share) == said


def test_sources_of_no_share_are_not_named() -> None:
    assert source_words({"analytic": 0.9999, "fallback": 1e-4}) == "100 % analytic"
    assert source_words({"fitted": 0.6, "fallback": 0.4, "out_of_range": 0.1}) == (
        "60 % fitted, 40 % fallback; 10 % of it beyond the fitted range"
    )


@pytest.mark.parametrize("width", range(60, 80))
def test_a_number_and_its_unit_stay_on_one_line(width: int) -> None:
    out, raw = console(width)
    print_line(
        out, "Title", "so much 10 % of what there is, and again 12.345 ms of that, which is 99 % of 7.000 ms, all in all"
    )
    text = raw.getvalue().decode()
    assert all(part in text for part in ("10 %", "12.345 ms", "99 %", "7.000 ms"))


@pytest.mark.parametrize("width", [60, 100, 160])
def test_long_names_go_on_in_the_next_line_and_numbers_stay_whole(width: int) -> None:
    """A layout in words can be longer than a line; what stands beside it is what people look for."""
    name = "tensor 2 x pipeline 2 x data 2, sequence parallel, ZeRO 1, 3 chunks, micro-batch 8, recompute selective"
    out, raw = console(width)
    print_numbers(out, ("layout", "step ms", "memory"), [(name, "52.994", "18.2 GiB"), ("data 8", "3,453.193", "9.6 GiB")])
    lines = raw.getvalue().decode().splitlines()
    words = " ".join(lines).split()
    assert max(map(len, lines)) <= width
    assert all(word in words for word in (*name.split(), "52.994", "3,453.193", "18.2", "9.6", "step", "memory"))
    if width >= 100:
        assert words.count("layout") == 1  # in one table
