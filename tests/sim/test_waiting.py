from __future__ import annotations

import pytest

from steptime._sim.explain.activity import RankSummary
from steptime._sim.explain.bound import Straggler, Waiting


def rank(number: int, compute_ms: float, host: float = 0.0) -> RankSummary:
    return RankSummary(number, 10.0, 9.0, compute_ms, 3.0, 2.0, 1.0, 1.0, host, 0.0)


@pytest.mark.parametrize(
    ("compute_ms", "host", "named"),
    [
        ((5.0, 5.0, 5.0, 5.05), (0.0,) * 4, False),  # the last to arrive, with as much to do as any other
        ((5.0, 5.0, 5.0, 6.0), (0.0,) * 4, True),
        ((5.0, 5.0, 6.0, 6.0), (0.0,) * 4, True),  # with one other
        ((5.0, 5.0, 5.0, 5.0), (0.0, 0.0, 0.0, 0.2), True),  # its host is late
    ],
)
def test_a_straggler_is_named_only_where_its_own_work_takes_longer(
    compute_ms: tuple[float, ...], host: tuple[float, ...], named: bool
) -> None:
    ranks = [rank(number, took, late) for number, (took, late) in enumerate(zip(compute_ms, host, strict=True))]
    found = Waiting(Straggler(3, 6.0, 1.0), 0.25).with_reason(ranks)
    assert (found.straggler is not None) == named
    assert found.absent_share == 0.25
