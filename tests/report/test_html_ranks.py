"""Which ranks a page draws: all while they fit, else those that stand for the others, and the page says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.report.html_pages import Page, apart, cohort, predicted, program

from steptime._program.workload import Workload
from steptime._report.alike import ranges
from steptime._report.html.page import RANKS_AT_MOST, drawn, page
from steptime._report.html.timeline import timeline_document
from steptime._sim.core.simulate import simulate
from steptime._sim.explain.bound import Straggler
from steptime._sim.explain.critical_path import PathRank, critical_path
from steptime._sim.prediction import PredictedStep

EVENTS = 14  # calls and works of a rank: see `program`


def many(ranks: int) -> PredictedStep:
    """Ranks of two programs: the first four, and all others."""
    made = [program(0, ranks, names=("aten::mm",)), program(4, ranks, names=("aten::add",))]
    found = predicted(simulate([apart(made[0], (0, 1, 2, 3)), apart(made[1], tuple(range(4, ranks)))]))
    compute = {7: 9.0, 8: 0.5}
    summaries = tuple(
        replace(one, compute_ms=compute.get(one.rank, 1.0), host_blocked_ms=float(one.rank)) for one in found.ranks
    )
    path = replace(found.critical_path, ranks=(PathRank(6, 1.0, 1.0),))
    return replace(found, ranks=summaries, straggler=Straggler(5, 1.0, 0.9), critical_path=path)


def test_all_ranks_are_drawn_while_they_fit() -> None:
    found = drawn(many(RANKS_AT_MOST))
    assert found.ranks == tuple(range(RANKS_AT_MOST))
    assert not found.note


def test_ranks_that_do_the_same_at_the_same_times_are_drawn_once() -> None:
    made = [program(0, 8), program(4, 8)]
    prediction = predicted(simulate([cohort(made[0], (0, 1, 2, 3)), apart(made[1], (4, 5, 6, 7))]))
    chosen = drawn(prediction)
    assert chosen.titles == {0: "0-3", 4: "4", 5: "5", 6: "6", 7: "7"}
    assert chosen.note == "Ranks that do the same at the same times are drawn once."
    found = Page.of(page(prediction))
    assert [rank["title"] for rank in found.data["ranks"]] == ["0-3", "4", "5", "6", "7"]
    assert "0-3" in found.texts["th"]


def test_a_page_of_many_equal_ranks_is_as_small_as_that_of_few() -> None:
    few, many = (len(page(predicted(simulate([cohort(program(0, ranks), tuple(range(ranks)))])))) for ranks in (8, 1024))
    assert many < 1.02 * few


def test_the_critical_path_of_a_rank_lies_on_the_one_that_is_drawn_for_it() -> None:
    timeline = simulate([cohort(program(0, 2), (0, 1))])
    path = critical_path(timeline)
    moved = [replace(segment, rank=1) for segment in path]
    on_drawn, on_other = (timeline_document(timeline, (0,), each, {0: (0, 1)})["path"] for each in (path, moved))
    assert on_drawn == on_other
    assert on_drawn["ranks"]
    assert not timeline_document(timeline, (0,), moved)["path"]["ranks"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0,), "0"), (range(8), "0-7"), ((0, 2, 3), "0, 2-3"), (range(0, 1024, 8), "0, ... (128)"), ((3, 1, 2), "1-3"),
        ((0, 2, 4, 6), "0, 2, 4, 6"), (range(1024), "0-1023"),
    ],
)  # fmt: skip
def test_neighbours_are_written_as_a_range(ranks: Sequence[int], text: str) -> None:
    assert ranges(tuple(ranks)) == text


def test_too_many_ranks_are_stood_for_by_the_telling_ones() -> None:
    found = drawn(many(RANKS_AT_MOST + 1))
    assert found.ranks == (0, 5, 6, 7, 8)
    assert found.reasons == {
        0: "one of 4 that run the same program",
        5: "the straggler",
        6: "most of the critical path",
        7: "computes longest",
        8: "computes shortest",
    }


@pytest.mark.parametrize(("events", "ranks"), [(0, (5,)), (2 * EVENTS, (5, 6)), (16 * EVENTS - 1, (0, 5, 6, 7, 8))])
def test_too_many_events_leave_room_for_the_most_telling_first(events: int, ranks: tuple[int, ...]) -> None:
    assert drawn(many(16), events_at_most=events).ranks == ranks
    assert drawn(many(16), events_at_most=16 * EVENTS).ranks == tuple(range(16))


def test_a_rank_that_is_several_things_is_drawn_once_and_says_all() -> None:
    found = drawn(replace(many(100), straggler=Straggler(7, 1.0, 0.9)))
    assert found.reasons[7] == "the straggler, computes longest"


def test_ranks_drawn_for_the_same_reason_are_said_together() -> None:
    made = [program(rank, 80) for rank in range(80)]
    found = drawn(predicted(simulate([cohort(one, (one.rank,)) for one in made]), straggler=None))
    assert len(found.ranks) == RANKS_AT_MOST
    assert found.note.count("a program of its own") == 1
    assert len(found.note) < 300


def test_the_page_says_which_ranks_stand_for_the_others_and_keeps_their_numbers() -> None:
    prediction = many(100)
    text = page(replace(prediction, workload=Workload((prediction.timeline.cohorts[0].cohort.program,), 100)))
    found = Page.of(text)
    assert (
        "5 of 100 ranks are drawn. rank 5: the straggler; rank 6: most of the critical path; rank 7: computes longest;"
        in found.body
    )
    assert [rank["rank"] for rank in found.data["ranks"]] == [0, 5, 6, 7, 8]
    rows = [attributes for name, attributes in found.elements if name == "th" and attributes.get("scope") == "row"]
    assert len(rows) >= 100


def test_more_ranks_than_anyone_reads_are_shown_by_their_extremes() -> None:
    prediction = many(300)
    body = Page.of(page(replace(prediction, workload=Workload((prediction.timeline.cohorts[0].cohort.program,), 300)))).body
    assert all(word in body for word in ("least", "median", "most", "9.000", "0.500"))
