from __future__ import annotations

from pathlib import Path

import pytest

from steptime._files import whole, write_whole


def test_a_file_appears_complete_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "a.json", "all of it")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    assert (tmp_path / "new" / "a.json").read_text() == "all of it"


def test_what_fails_half_way_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), whole(tmp_path / "a") as unfinished:
        unfinished.write_text("new, but")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"
