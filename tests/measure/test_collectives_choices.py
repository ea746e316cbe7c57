from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.collectives.cases import CollectiveCase, Place
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.ranks import Layout, RanksError, run_ranks
from steptime._calibrate.harness.session import Session
from steptime_lab.measure import collectives
from steptime_lab.measure.collectives.choices import Log, learn, parse
from steptime_lab.measurements.collectives import Asked, Choice, choices_of, write_choices

RING = Choice("RING", "LL", 2)


@pytest.mark.parametrize(
    ("line", "choice"),
    [
        ("h:1:1 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}", Choice("TREE", "LL", 1)),
        ("NCCL INFO AllGather: 4096 Bytes -> Algo Ring proto Simple channel{Lo..Hi}={0..3}", Choice("RING", "SIMPLE", 4)),
        ("[0] NCCL INFO AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008", Choice("RING", "SIMPLE", None)),
        ("NCCL INFO 8 Bytes -> Algo 0 proto 0 time 9.1", Choice("TREE", "LL", None)),
        ("NCCL INFO 8 Bytes -> Algo 99 proto 2 time 9.1", Choice("", "SIMPLE", None)),
        ("NCCL INFO AllReduce [Symmetric]: 8 Bytes -> Kernel AGxLL_R nchannels 3", Choice("SYMMETRIC", "AGXLL_R", 3)),
        ("NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0", Choice()),
        ("NCCL INFO something new -> proto", Choice()),
        ("", Choice()),
    ],
)  # fmt: skip
def test_what_nccl_says_about_a_collective_is_read_from_its_line(line: str, choice: Choice) -> None:
    assert parse(line) == choice


def test_the_last_of_several_choices_counts_and_the_lines_between_do_not() -> None:
    text = "\n".join(
        [
            "NCCL INFO AllReduce: 8 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}",
            "NCCL INFO AllReduce: 8388608 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}",
            "NCCL INFO Launch mode Parallel",
        ]
    )
    assert parse(text) == Choice("RING", "SIMPLE", 2)


def test_a_log_gives_what_is_new_in_the_file_of_its_own_process(tmp_path: Path) -> None:
    log = Log(tmp_path)
    assert log.news() == ""
    (tmp_path / "nccl.host.1").write_text("somebody else's\n")
    own = tmp_path / f"nccl.host.{os.getpid()}"
    own.write_text("first\n")
    assert log.news() == "first\n"
    with own.open("a") as file:
        file.write("second\n")
    assert log.news() == "second\n"
    assert log.news() == ""


@pytest.mark.slow
def test_where_nccl_says_nothing_the_table_is_empty_and_whole(tmp_path: Path) -> None:
    file = tmp_path / "choices" / "none.json"
    session = Session.start(tmp_path / "out", a_recipe(), minutes=2)
    asked = [[8, "all_reduce"], [64, "all_gather"], [64, "broadcast"]]
    plan = session.to_plan(asked=asked, fabric="gloo", debug=str(tmp_path), file=str(file))
    run_ranks("steptime_lab.measure.collectives.choices", Layout(2, device="cpu"), plan, limit_s=120)
    assert json.loads(file.read_text())["choices"] == []
    assert not list(file.parent.glob("*.unfinished"))


def test_nccl_is_asked_once_per_folder_and_not_again_after_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fake(_job: str, layout: Layout, plan: Mapping[str, Any], **more: Any) -> None:
        asked.append(more["environment"]["NCCL_DEBUG"])
        if layout.ranks == 2:
            raise RanksError("planted")
        found = {Asked("2.28", layout.ranks, plan["fabric"], "all_reduce", 8): RING}
        write_choices(Path(plan["file"]), found, nccl="2.28", ranks=layout.ranks, fabric=plan["fabric"])

    monkeypatch.setattr("steptime_lab.measure.collectives.choices.run_ranks", fake)
    session = Session.start(tmp_path, a_recipe(), minutes=2)
    four, two, eight = (Place(ranks, "default", 1) for ranks in (4, 2, 8))
    cases = [CollectiveCase("all_reduce", 8)]
    learn(session, {four: cases, two: cases, eight: cases}, "cuda")
    assert choices_of([tmp_path]) == {Asked("2.28", 4, "default", "all_reduce", 8): RING}
    assert asked == ["INFO", "INFO"]
    learn(session, {four: cases}, "cuda")
    assert len(asked) == 2
    # Another torch brings another NCCL, which may choose otherwise.
    learn(replace(session, recipe=replace(session.recipe, torch="99.0")), {four: cases}, "cuda")
    assert len(asked) == 3


def test_choices_can_be_asked_for_alone_and_nothing_is_timed_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Place] = []
    monkeypatch.setattr(collectives, "learn", lambda _session, wanted, _device: asked.extend(wanted))
    monkeypatch.setattr(collectives, "run_ranks", lambda *_, **__: pytest.fail("timed"))
    session = Session.start(tmp_path, a_recipe(), minutes=1)
    collectives.run(session, Options(ranks=(2, 4), share_gpu=True, only=(collectives.CHOICES,)))
    assert [(place.ranks, place.fabric) for place in asked] == [(n, f) for f in ("loopback", "loopback-2x2") for n in (4, 2)]


def test_choices_without_a_gpu_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session.start(tmp_path, a_recipe(), minutes=1)
    collectives.run(session, Options(ranks=(2,), device="cpu", only=(collectives.CHOICES,)))
    assert "--only choices asks NCCL, which needs GPUs" in capsys.readouterr().err


def test_a_run_with_little_time_spends_it_on_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    monkeypatch.setattr(collectives, "learn", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(collectives, "run_ranks", lambda _job, _layout, plan, **_: timed.append(plan["place"]["fabric"]))
    collectives.run(Session.start(tmp_path, a_recipe(), minutes=1), Options(ranks=(2,), share_gpu=True))
    assert timed == ["loopback", "loopback-2x2"]
