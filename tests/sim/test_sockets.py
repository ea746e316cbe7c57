"""Messages and overlapping collectives on sockets, where one thread of a rank moves all its data."""

from __future__ import annotations

import numpy as np

from steptime._models.collectives.message import Message
from steptime._platforms.fabric import Fabric
from steptime._platforms.platform import Platform
from steptime._program.program import Collective
from steptime._sim.core.meetings import Meeting
from steptime._sim.laws.departures import ExchangeDepartures
from steptime._sim.laws.slowdowns import _even_shares
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
