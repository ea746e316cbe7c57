"""Messages and overlapping collectives on sockets, where a thread of each communicator of a rank moves its data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from tests.sim.worlds import Draft, constant_timing, jobs

from steptime._models.collectives.message import Message
from steptime._platforms.fabric import Fabric
from steptime._platforms.platform import Platform
from steptime._program.program import Collective
from steptime._program.workload import Workload
from steptime._sim import Cohort
from steptime._sim.core.meetings import Meeting
from steptime._sim.core.simulate import simulate
from steptime._sim.laws.departures import ExchangeDepartures
from steptime._sim.laws.slowdowns import CollectivesBesideCollectives, _even_shares
from steptime._sim.modelled.collective_work import collective_work
from steptime._units import MIB


def fabric() -> Fabric:
    result = Platform.load("2xh200-half-loopback").fabric
    assert result is not None
    return result


def test_overlapping_stretches_have_even_shares() -> None:
    begin, end = np.array([0, 50, 300]), np.array([100, 150, 400])
    assert _even_shares(begin, end, 1000).tolist() == [0.75, 0.75, 1.0]


def test_what_is_alone_has_all_and_a_window_meets_its_neighbour() -> None:
    assert _even_shares(np.array([0]), np.array([100]), 1000).tolist() == [1.0]
    assert _even_shares(np.array([0, 900]), np.array([100, 1100]), 1000).tolist() == [0.5, 0.75]


def test_a_message_takes_as_long_as_an_exchange_of_half_of_it_and_its_sender_leaves_first() -> None:
    nbytes = 16 * MIB
    both = fabric().estimates([Message("send_recv", 2, nbytes // 2)], (0, 1), ())[0].time_ns
    law = ExchangeDepartures.of(fabric())
    assert law is not None
    calls = {
        0: Collective("send", "0:0->1", (0, 1), 0, nbytes, nbytes),
        1: Collective("recv", "0:0->1", (0, 1), 0, nbytes, nbytes),
    }
    together = np.full((2, 1), round(both))
    found = law.durations_ns(Meeting((), ((0, 1),), ()), calls, np.zeros((2, 1), dtype=np.int64), together)
    assert found is not None
    sender, receiver = found[:, 0].tolist()
    assert 0 < sender < receiver
    assert abs(receiver / both - 1) < 0.01


NEVER = np.array([10**15])


def two_at_once(kind: str, *groups: str, took_ns: int = 1_000_000) -> Cohort:
    """On each of two ranks two collectives of these groups, on streams of their own."""
    draft = Draft(streams=2)
    for stream, group in enumerate(groups):
        draft.collective(Collective(kind, group, (0, 1), stream, 1024, 1024), stream=stream)
    program = draft.program(world_size=2)
    durations = np.full((2, 1, 1), took_ns, dtype=np.int64)
    return Cohort(program, (0, 1), replace(constant_timing(program), duration_ns=durations))


def slowest(cohort: Cohort, cores: float) -> float:
    return float(CollectivesBesideCollectives.of([cohort], cores).slowdowns(simulate([cohort]), NEVER)[0].max())


def test_collectives_of_one_communicator_share_its_thread_and_those_of_two_have_one_each() -> None:
    one, two = (slowest(two_at_once("all_gather", *groups), cores=4.0) for groups in (("g", "g"), ("g", "h")))
    assert one > 1.9
    assert 1.0 < two < 1.2
    assert slowest(two_at_once("send", "g:0->1", "g:1->0"), cores=4.0) == one


def test_on_few_cores_a_thread_that_waits_takes_turns_as_one_that_moves() -> None:
    long, cohort = 100_000_000, two_at_once("all_gather", "g", "h", took_ns=100_000_000)
    late = np.zeros((2, 2, 1), dtype=np.int64)
    late[1] = [[0], [long]]  # one rank reaches the second collective when the first would be over
    timing = replace(cohort.timing, latency_ns=np.broadcast_to(cohort.timing.latency_ns, late.shape) + late)
    assert slowest(replace(cohort, timing=timing), cores=2.0) == pytest.approx(2.0, rel=0.1)


def test_threads_without_a_core_each_wait_for_a_turn_and_all_reduces_for_two() -> None:
    alone = 100_000
    gather, reduce = (
        slowest(two_at_once(kind, "g", "h", took_ns=alone), cores=2.0) * alone for kind in ("all_gather", "all_reduce")
    )
    assert gather > 10 * alone
    assert reduce - alone == pytest.approx(2 * (gather - alone), rel=0.1)
    long = 100_000_000  # so long that turns are nothing: as one after the other
    assert slowest(two_at_once("all_gather", "g", "h", took_ns=long), cores=2.0) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("cores", [2.0, 4.0])
@given(cohorts=jobs())
@settings(max_examples=30)
def test_nothing_is_faster_beside_others(cores: float, cohorts: list[Cohort]) -> None:
    timeline = simulate(cohorts)
    never = np.repeat(NEVER, len(timeline.end_ns))
    for factors in CollectivesBesideCollectives.of(cohorts, cores).slowdowns(timeline, never):
        assert (factors >= 1.0 - 1e-12).all()


def test_pairs_of_eight_ranks_take_longer_than_two_ranks_that_have_the_box_to_themselves() -> None:
    def of_ranks(ranks: int) -> float:
        draft = Draft()
        draft.collective(Collective("all_gather", "g", (0, 1), 0, MIB, MIB))
        workload = Workload((draft.program(world_size=ranks),), ranks, owners=(0,) * ranks, groups={"g": ((0, 1),)})
        return collective_work(workload, Platform.load("8xh200-eighth-loopback").fabric).estimates[0][0].time_ns

    assert of_ranks(2) == of_ranks(4) < of_ranks(8)
