"""Python's collector of garbage, held back."""

from __future__ import annotations

import gc

from steptime._garbage import little_collection, no_collection


def test_what_was_made_meanwhile_is_not_looked_at_for_being_new() -> None:
    with no_collection():
        kept = [[number] for number in range(5000)]
        assert gc.get_count()[0] >= len(kept)
    assert gc.isenabled()
    assert gc.get_count()[0] < len(kept) and not gc.get_freeze_count()


def test_what_is_left_alone_stays_so() -> None:
    with little_collection():
        count = gc.get_freeze_count()
        with no_collection():
            pass
        assert gc.get_freeze_count() == count
