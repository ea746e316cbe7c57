from __future__ import annotations

from pathlib import Path

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime_lab.measure import shares


class Alone(Group):
    """One rank of several that waits for nobody: what it sees of a flag does not depend on the others."""

    def barrier(self) -> None:
        """Nobody else is there."""


def test_a_flag_that_a_dead_group_left_does_not_end_the_others_before_they_begin(tmp_path: Path) -> None:
    session = Session.start(tmp_path, a_recipe(), minutes=5)
    flag = tmp_path / f"{session.recipe.run}-4-streaming.done"
    flag.touch()
    with shares.others(Alone(0, 4, "cpu", 4), session, "streaming") as mine:
        assert mine
        assert not flag.exists()
    assert not flag.exists()


def test_the_others_stream_until_the_first_rank_is_done_whatever_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.start(tmp_path, a_recipe(), minutes=1e-9)
    flag = tmp_path / f"{session.recipe.run}-2-streaming.done"
    copies = []

    def copy() -> None:
        copies.append(session.budget.left_s())
        if len(copies) == 3:
            flag.touch()

    monkeypatch.setattr(shares, "_copies", lambda _: copy)
    with shares.others(Alone(1, 2, "cpu", 2), session, "streaming") as mine:
        assert not mine
    assert copies == [0.0] * 3
