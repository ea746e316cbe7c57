"""Chrome traces: valid JSON, events of a thread nested or apart, every flow with both ends inside events, exact times."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.sim.worlds import jobs

from steptime._api.predict import predict
from steptime._program.load import load
from steptime._program.program import CallKind
from steptime._report.chrome import FIRST_STREAM_LANE, TIDS_PER_RANK, events, write_chrome_trace
from steptime._sim import Cohort, Timeline
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import steady
from steptime._sim.recorded.replay import replay
from steptime.errors import InputError

QUARTERS = "4xh200-quarter-loopback"
EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"

Event = dict[str, Any]
Span = tuple[int, int]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return replay(load([EXAMPLE])).timeline


def ns(microseconds: Decimal) -> int:
    scaled = microseconds * 1000
    assert scaled == int(scaled), "a time is not a whole number of nanoseconds"
    return int(scaled)


def parsed(timeline: Timeline) -> list[Event]:
    return [json.loads(line, parse_float=Decimal) for line in events(timeline)]


def spans_of(found: list[Event]) -> dict[tuple[int, int], list[Span]]:
    lanes: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            start = ns(event["ts"])
            lanes[event["pid"], event["tid"]].append((start, start + ns(event["dur"])))
    return lanes


def assert_nested(spans: list[Span]) -> None:
    """Sorted as viewers sort them, every event lies inside the one that is open or begins after its end."""
    open_ends: list[int] = []
    for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"({start}, {end}) sticks out of an event that ends at {open_ends[-1]}"
        open_ends.append(end)


def assert_flows_pair_up(found: list[Event]) -> None:
    ends: dict[int, list[Event]] = defaultdict(list)
    for event in found:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
    lanes = spans_of(found)
    for both in ends.values():
        assert sorted(event["ph"] for event in both) == ["f", "s"]
        assert len({event["pid"] for event in both}) == 1
        for event in both:
            at = ns(event["ts"])
            assert any(start <= at <= end for start, end in lanes[event["pid"], event["tid"]])


@given(jobs(scenarios=1))
def test_any_job_can_be_drawn(cohorts: list[Cohort]) -> None:
    found = parsed(steady(cohorts, iterations_at_most=4).timeline)
    for spans in spans_of(found).values():
        assert_nested(spans)
    assert_flows_pair_up(found)


@given(jobs(scenarios=1))
def test_works_of_a_stream_never_overlap_in_the_drawing(cohorts: list[Cohort]) -> None:
    for (_, tid), spans in spans_of(parsed(simulate(cohorts))).items():
        if tid % TIDS_PER_RANK >= FIRST_STREAM_LANE:
            ordered = sorted(spans)
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))


def test_the_example_is_drawn_whole(timeline: Timeline) -> None:
    found = parsed(timeline)
    for spans in spans_of(found).values():
        assert_nested(spans)
    assert_flows_pair_up(found)
    flows = sum(event["ph"] == "s" for event in found)
    assert flows == sum(int((c.cohort.program.works.call >= 0).sum()) for c in timeline.cohorts)
    assert min(ns(event["ts"]) for event in found if event["ph"] == "X") == 0


def test_every_process_and_thread_has_a_name_and_a_place(timeline: Timeline) -> None:
    found = parsed(timeline)
    named = {(e["pid"], e["tid"]) for e in found if e["ph"] == "M" and e["name"] == "thread_name"}
    placed = {(e["pid"], e["tid"]) for e in found if e["ph"] == "M" and e["name"] == "thread_sort_index"}
    assert set(spans_of(found)) <= named == placed
    processes = [e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"]
    assert processes == [f"rank {rank} (NVIDIA H200)" for rank in range(4)]
    order = sorted((e["args"]["sort_index"], e["tid"]) for e in found if e["name"] == "thread_sort_index" and e["pid"] == 1)
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == 1}
    kinds = [names[tid].split()[0] for _, tid in order]
    assert kinds == sorted(kinds, key=["steps", "host", "stream"].index)


def test_collectives_are_drawn_as_waiting_and_moving(timeline: Timeline) -> None:
    found = [e for e in parsed(timeline) if e["ph"] == "X" and "waiting_ms" in e["args"]]
    waiting = [e for e in found if e["cat"] == "waiting"]
    assert waiting
    for event in waiting:
        assert ns(event["dur"]) == pytest.approx(float(event["args"]["waiting_ms"]) * 1e6, abs=1)
    assert {e["cat"] for e in found} == {"waiting", "communication"}


def test_every_step_of_every_rank_is_drawn(timeline: Timeline) -> None:
    steps = [e["args"]["step"] for e in parsed(timeline) if e.get("cat") == "step"]
    marks = sum(int((c.cohort.program.calls.kind == CallKind.STEP_END).sum()) for c in timeline.cohorts)
    assert len(steps) == marks
    assert set(steps) == {2, 3, 4}


def test_device_work_says_op_family_and_step(timeline: Timeline) -> None:
    found = [e for e in parsed(timeline) if e["ph"] == "X" and "family" in e["args"]]
    assert len(found) >= sum(len(c.cohort.program.works) for c in timeline.cohorts)
    assert {"op", "family", "step", "kernel"} <= set(found[0]["args"])


def test_files_are_valid_json_plain_and_compressed_and_the_same_twice(timeline: Timeline, tmp_path: Path) -> None:
    plain, packed, again = tmp_path / "a.json", tmp_path / "b.json.gz", tmp_path / "c.json.gz"
    for file in (plain, packed, again):
        write_chrome_trace(timeline, file)
    document = json.loads(plain.read_text(encoding="utf-8"))
    assert len(document["traceEvents"]) == len(parsed(timeline))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()


def test_a_file_that_cannot_be_written_is_one_clear_line(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing/a\.json: cannot be written"):
        write_chrome_trace(timeline, tmp_path / "missing" / "a.json")


@pytest.mark.parametrize(
    ("source", "platform"),
    [("prefetch_sync", None), ("h200_mps4_dlrm", None), ("gpt_compiled", "1xa100"), ("configs/dlrm_heavy4.toml", QUARTERS)],
)
def test_a_timeline_reads_back_as_the_step_it_shows(source: str, platform: str | None, tmp_path: Path) -> None:
    answer = predict(EXAMPLE.parent / source, platform)
    answer.trace(tmp_path / "timeline.json.gz")
    again = predict(tmp_path / "timeline.json.gz")
    assert again.step_time_ms == pytest.approx(answer.step_time_ms, rel=0.002)
    assert len(again.ranks) == len(answer.ranks)
    named = {program.device_name for program in again.workload.programs}
    assert named == {"NVIDIA H200" if platform is None else platform.split("x", 1)[1].removesuffix("-loopback")}
