"""Pages: one file that needs nothing else, every number of the prediction, every time exact, names never more than text."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.html_pages import HOSTILE, Page, cohort, hostile, lanes, predicted, program, unpacked
from tests.sim.worlds import jobs

from steptime._models.memory.lifetimes import MemoryKind
from steptime._notices import Notices
from steptime._program.load import load
from steptime._program.workload import Workload
from steptime._report.answers import Prediction
from steptime._report.html.markup import clean, escape, tag
from steptime._report.html.page import SCRIPTS, page
from steptime._report.html.timeline import packed, timeline_document
from steptime._report.words import time_ms
from steptime._sim import Cohort, CohortTimeline
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import steady
from steptime._sim.explain.critical_path import critical_path
from steptime._sim.prediction import Iterations, PredictedStep, predict
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def example(name: str = "h200_mps4_dlrm") -> tuple[PredictedStep, Workload]:
    workload = load([EXAMPLES / name])
    return predict(workload), workload


@pytest.mark.parametrize("name", sorted(file.parent.name for file in EXAMPLES.glob("*/measured.json")))
def test_every_example_has_a_page_that_says_what_the_prediction_says(name: str) -> None:
    prediction, workload = example(name)
    body = Page.of(page(replace(prediction, workload=workload))).body
    said = {time_ms(prediction.step_time_ms), *map(time_ms, prediction.breakdown.values())}
    for rank in prediction.ranks:
        said |= {time_ms(one) for one in (rank.compute_ms, rank.exposed_communication_ms, rank.idle_ms, rank.waiting_ms)}
    said |= {entry.name for entry in prediction.critical_path.top}
    assert said <= set(body.split()) | {name for name in said if name in body}
    assert prediction.bound_by.partition(":")[2].strip() in body


def test_the_same_prediction_gives_the_same_bytes() -> None:
    prediction, workload = example()
    assert page(replace(prediction, workload=workload)) == page(predict(workload))


def test_the_bytes_are_the_same_in_every_process(tmp_path: Path) -> None:
    command = "import sys; from steptime._cli import main; sys.argv[0] = 'steptime'; main()"
    written = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.html"
        arguments = [sys.executable, "-c", command, "predict", str(EXAMPLES / "prefetch_sync"), "--html", str(file)]
        subprocess.run(arguments, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True)
        written.append(file.read_bytes())
    assert written[0] == written[1]


def test_a_page_refers_to_nothing_outside_itself() -> None:
    found = Page.of(page(example()[0]))
    for name, attributes in found.elements:
        assert not {"src", "srcset", "action", "data", "poster", "style"} & set(attributes), name
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), name
        assert not any(key.startswith("on") for key in attributes), name
    style = "".join(found.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert not any(
        word in "".join(found.texts["script"][1:]) for word in ("fetch(", "XMLHttp", "import(", "innerHTML", "eval(")
    )


def test_the_policy_allows_this_script_and_this_style_only() -> None:
    found = Page.of(page(example()[0]))
    policy = next(a["content"] or "" for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for name, text in (("style-src", "".join(found.texts["style"])), ("script-src", "".join(found.texts["script"][1:]))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed.pop(name) == f"'sha256-{digest}'"
    assert allowed == {"default-src": "'none'", "img-src": "data:"}


def test_hostile_names_are_text_and_nothing_else() -> None:
    prediction, workload = hostile()
    text = page(replace(prediction, workload=workload))
    text.encode("utf-8")
    plainly = replace(prediction, notices=Notices(warnings=("a", "b", "c", "d", "e")), workload=workload)
    found, plain = Page.of(text), Page.of(page(plainly))
    assert sum(name == "script" for name, _ in found.elements) == 2
    assert [name for name, _ in found.elements] == [name for name, _ in plain.elements]
    assert {clean(name) for name in HOSTILE} <= set(found.data["strings"])
    assert all(" ".join(clean(name).split()) in found.body for name in HOSTILE)


@given(st.text())
def test_any_text_survives_as_text(text: str) -> None:
    shown = Page.of(tag("p", text, title=text))
    assert shown.elements == [("p", {"title": clean(text)})]
    assert "".join(shown.texts.get("p", [])) == clean(text)
    assert escape(text).encode("utf-8").decode("utf-8") == escape(text)


def test_names_that_nobody_reads_to_the_end_are_cut() -> None:
    assert len(clean("x" * 10**6)) <= 600


@given(st.lists(st.integers(-(2**62), 2**62)))
def test_columns_come_back_as_they_were(values: list[int]) -> None:
    assert unpacked(packed(values)) == values


@given(jobs(scenarios=1), st.booleans())
def test_every_time_of_any_job_is_exact(cohorts: list[Cohort], settled: bool) -> None:
    timeline = steady(cohorts, iterations_at_most=4).timeline if settled else simulate(cohorts)
    ranks = sorted(rank for one in cohorts for rank in one.ranks)
    data = timeline_document(timeline, ranks, critical_path(timeline))
    assert [rank["rank"] for rank in data["ranks"]] == ranks
    firsts: list[int] = []
    shifts: set[int] = set()
    for rank in data["ranks"]:
        here = next(one for one in timeline.cohorts if rank["rank"] in one.cohort.ranks)
        drawn = [row for lane in lanes(data, rank) for row in lane]
        firsts += [row["begin"] for row in drawn]
        ends = _ends(here, here.cohort.ranks.index(rank["rank"]))
        assert len(drawn) == len(ends)
        shifts |= {end - row["end"] for row, end in zip(drawn, ends, strict=True)}
    assert len(shifts) <= 1, "all times are moved by one and the same distance"
    assert min(firsts, default=0) == 0
    assert {data["end"]} <= {max(int(timeline.end_ns[0]) - shift, 1) for shift in shifts or {0}}


def _ends(one: CohortTimeline, place: int) -> list[int]:
    """Ends of calls by thread, then of works by stream, those that are drawn."""
    made = one.cohort.program
    length = (one.work_end_ns - one.work_start_ns)[:, :, 0]
    works = (made.works.call >= 0) | (length > 0).any(axis=1)
    ends: list[int] = []
    for thread in range(len(made.threads)):
        ends += one.call_end_ns[(made.calls.thread == thread) & (made.calls.kind < 7), place, 0].tolist()
    for stream in range(len(made.streams)):
        ends += one.work_end_ns[(made.works.stream == stream) & works, place, 0].tolist()
    return ends


@given(jobs(scenarios=1))
def test_the_critical_path_lies_on_the_lanes_it_names(cohorts: list[Cohort]) -> None:
    timeline = simulate(cohorts)
    ranks = sorted(rank for one in cohorts for rank in one.ranks)
    path = critical_path(timeline)
    data = timeline_document(timeline, ranks, path)
    columns = [unpacked(data["path"][name]) for name in ("ranks", "lanes", "lengths", "why")]
    drawn = list(zip(*columns, strict=True))
    known = [one for one in path if one.row >= 0 and one.end_ns > one.start_ns]
    assert len(drawn) <= len(known)
    for place, lane, _, why in drawn:
        assert lane < len(data["ranks"][place]["lanes"])
        assert data["path"]["reasons"][why] in {one.reason for one in known}
    assert sum(length for _, _, length, _ in drawn) <= sum(one.end_ns - one.start_ns for one in known)


def test_a_launch_is_tied_to_its_work() -> None:
    made = program()
    data = timeline_document(simulate([cohort(made, (0,))]), [0], ())
    calls, *streams = lanes(data, data["ranks"][0])
    for rows, lane in zip(streams, data["programs"][0]["lanes"][1:], strict=True):
        issued = np.cumsum(unpacked(lane["calls"])).tolist()
        assert [calls[place]["op"] for place in issued] == [row["op"] for row in rows]
        assert all(calls[place]["end"] < row["begin"] for place, row in zip(issued, rows, strict=True))


def test_ranks_that_run_one_program_share_its_labels() -> None:
    made = program()
    one, many = (
        len(str(timeline_document(simulate([cohort(made, tuple(range(ranks)))]), range(ranks), ())["programs"]))
        for ranks in (1, 8)
    )
    assert one == many


def test_what_is_not_known_is_left_out() -> None:
    made = program(names=("aten::mm",))
    bare = predicted(simulate([cohort(made, (0,))]), interval_ms=(1.0, 1.0), first_step_ms=None, straggler=None, breakdown={})
    found = Page.of(page(replace(bare, workload=Workload((replace(made, device_name=""),), 1))))
    for word in ("None", "nan", "Straggler", "range with the recorded steps", "From empty queues", "Iterations", "Memory"):
        assert word not in found.body, word
    assert not {"Device, as recorded", "Platform"} & set(found.texts["dt"])
    assert not any(attributes.get("class") == "warnings" for _, attributes in found.elements)


def test_a_prediction_for_a_platform_names_it_and_not_the_device_of_the_trace() -> None:
    prediction, workload = example()
    found = Page.of(page(replace(prediction, platform="8xh100-nvlink", workload=workload)))
    assert {"Platform"} <= set(found.texts["dt"])
    assert "8xh100-nvlink" in found.texts["dd"]
    assert "NVIDIA H200" not in found.texts["dd"]
    assert "90 % interval, ms" in found.texts["span"]


def memory(*peaks: int) -> dict[str, Any]:
    """As a prediction has it, of ranks with these peaks in GiB."""
    gib = 1 << 30
    ranks = [
        {
            "rank": rank,
            "peak_bytes": peak * gib,
            "allocated_bytes": gib,
            "reserved_bytes": 2 * gib,
            "parts": {"parameters": gib},
        }
        for rank, peak in enumerate(peaks)
    ]
    return {"peak_bytes": max(peaks) * gib, "capacity_bytes": 80 * gib, "fits": max(peaks) <= 80, "ranks": ranks}


@pytest.mark.parametrize("most", [3, 90])
def test_memory_is_said_where_it_is_known(most: int) -> None:
    prediction, workload = example()
    found = Page.of(page(replace(prediction, memory=memory(1, most), workload=workload)))
    assert f"{most} GiB of 80 GiB on rank 1" in found.texts["dd"]
    assert ("Does not fit by 10 GiB" in found.body) == (most > 80)
    assert {f"{most} GiB", "1 GiB", "2 GiB"} <= set(found.texts["td"])
    said = [attributes.get("aria-label") for name, attributes in found.elements if name == "svg"]
    assert f"rank 1: parameters 1 GiB, context, NCCL, spare blocks {most - 1} GiB" in said


def test_of_many_ranks_those_that_need_most_memory_are_listed() -> None:
    prediction, workload = example()
    found = Page.of(page(replace(prediction, memory=memory(*range(1, 80)), workload=workload)))
    assert "The 32 ranks that need most, of 79 that differ." in found.body
    assert "79 GiB" in found.texts["td"]


def test_sources_add_up_and_what_is_out_of_range_is_a_part_of_them() -> None:
    prediction, workload = example()
    shares = {"fitted": 0.7, "analytic": 0.2, "fallback": 0.1, "out_of_range": 0.25}
    body = Page.of(page(replace(prediction, coverage=shares, workload=workload))).body
    assert all(said in body for said in ("70.0 %", "20.0 %", "10.0 %", "Beyond what models were fitted on", "25.0 %", "75.0 %"))


def test_numbers_below_each_other_have_the_same_digits() -> None:
    prediction, workload = example()
    ranks = [replace(rank, idle_ms=10.0**rank.rank) for rank in prediction.ranks]
    found = Page.of(page(replace(prediction, ranks=tuple(ranks), workload=workload)))
    assert {"1.00", "10.00", "100.00", "1,000.00"} <= set(found.texts["td"])


def test_what_else_is_known_is_said_beside_it() -> None:
    prediction, workload = hostile()
    found = Page.of(page(replace(prediction, workload=workload), facts={"Recorded": "13.271 ms, error +0.50 %", "Odd": "<b>"}))
    assert {"Recorded", "Odd"} <= set(found.texts["dt"])
    assert {"13.271 ms, error +0.50 %", "<b>"} <= set(found.texts["dd"])


def test_a_step_without_device_work_has_a_page() -> None:
    made = program(works=0, names=("aten::mm",))
    found = Page.of(page(predicted(simulate([cohort(made, (0,))]))))
    assert found.data["ranks"][0]["lanes"] == []


def test_iterations_are_shown_where_they_were_asked_for() -> None:
    prediction, workload = example()
    times = tuple(float(t) for t in np.linspace(10, 20, 50))
    found = Page.of(page(replace(prediction, iterations=Iterations(times, 49, {0: 1.5, 1: 0.0}), workload=workload)))
    assert "The slowest is iteration 49; with the lookups of rank 0 alone 1.500 ms longer." in found.body
    assert {time_ms(10.0), time_ms(15.0), time_ms(20.0)} <= set(found.body.split())


def test_every_part_of_the_page_is_shipped_and_used() -> None:
    files = {entry.name for entry in resources.files("steptime._report").joinpath("page").iterdir()}
    assert files == {"page.html", "style.css", "charts.css", *SCRIPTS}


def test_every_family_and_source_has_a_colour() -> None:
    style = resources.files("steptime._report").joinpath("page", "style.css").read_text(encoding="utf-8")
    data = timeline_document(simulate([cohort(program(), (0,))]), [0], ())
    keys: Sequence[str] = [family["key"] for family in data["families"]]
    assert all(f"--{key}: light-dark(" in style and f".{key} {{" in style for key in keys)
    assert all(f".part.{kind.value.replace('_', '-')} " in style for kind in MemoryKind)
    assert all(f".source.{source}" in style for source in ("measured", "fitted", "analytic", "fallback"))


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    prediction, workload = hostile()
    with pytest.raises(InputError, match=r"missing/a\.html: cannot be written \(No such file or directory\)"):
        Prediction.of(prediction).html(tmp_path / "missing" / "a.html")
    Prediction.of(replace(prediction, workload=workload)).html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page(replace(prediction, workload=workload))
