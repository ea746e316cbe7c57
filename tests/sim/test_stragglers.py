"""The slowest of many ranks counts: nothing for one, more the more there are, and nothing on parts of one GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from steptime._hardware.spread import expected_maximum, read_spread, slowest
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._shard.configs import configured_in
from steptime._sim.modelled.prediction import predict_on
from steptime._sim.modelled.stragglers import Stragglers, meeting_ranks

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@cache
def gpt2(ranks: int) -> Workload:
    """Weak scaling: as many samples on every rank."""
    return configured_in(CONFIGS / "gpt2-ddp.toml", ranks=ranks, batch=4 * ranks)


def test_the_expected_maximum_is_that_of_draws() -> None:
    draws = np.random.default_rng(1).standard_normal((20_000, 64))
    for count in (2, 8, 64):
        assert expected_maximum(count) == pytest.approx(float(draws[:, :count].max(axis=1).mean()), abs=0.02)
    assert expected_maximum(1) == 0.0
    assert expected_maximum(1024) == pytest.approx(3.248, abs=0.01)


def test_it_grows_with_ranks_and_spread_and_costs_one_rank_nothing() -> None:
    counts = [slowest(0.02, count) for count in (1, 2, 3, 8, 64, 512, 1024)]
    assert counts[0] == 1.0
    assert all(few < many for few, many in pairwise(counts))
    assert slowest(0.0, 1024) == 1.0
    assert slowest(0.01, 8) < slowest(0.03, 8)
    assert all(one.source for one in (read_spread().card, read_spread().host))


def test_ranks_meet_directly_or_through_others() -> None:
    given = gpt2(8)
    assert meeting_ranks(given) == 8
    pairs = dict.fromkeys({one.group for one in given.programs[0].collectives}, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert meeting_ranks(replace(given, groups=pairs)) == 2
    chain = dict.fromkeys(pairs, ((0, 1), (1, 2), (4, 5)))
    assert meeting_ranks(replace(given, groups=chain)) == 3


def test_separate_gpus_have_stragglers_and_parts_of_one_have_none() -> None:
    assert Stragglers.of(gpt2(2), Platform.load("2xh200-half-loopback")) == Stragglers()
    assert Stragglers.of(gpt2(1), Platform.load("1xh200")) == Stragglers()
    found = Stragglers.of(gpt2(2), Platform.load("2xh200-nvlink"))
    assert found.ranks == 2
    assert found.card == pytest.approx(slowest(read_spread().card.value, 2))


def test_more_ranks_of_equal_work_are_never_faster() -> None:
    platform = Platform.load("64xh200-ib400")
    times = [predict_on(gpt2(ranks), platform).step_time_ms for ranks in (1, 2, 8, 32)]
    assert times == sorted(times)


def test_many_ranks_say_what_waiting_for_the_slowest_costs() -> None:
    found = predict_on(gpt2(32), Platform.load("64xh200-ib400"))
    assert any("the slowest of 32 GPUs" in one for one in found.basis)
    assert not any("slowest" in one for one in predict_on(gpt2(2), Platform.load("2xh200-nvlink")).basis)
