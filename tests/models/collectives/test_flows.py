"""When ranks are done with an exchange that they reach one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from steptime._models.collectives.flows import Flows
from steptime._platforms.fabric import Fabric
from steptime._sim.laws.departures import ExchangeDepartures
from steptime_lab.fit.sharing import fit_buffered_bytes, measured_exchanges
from steptime_lab.measurements.shipped import FOLDER

RANKS = 4
BUFFERED = 1.5e6

Floats = npt.NDArray[np.float64]


def straight(size_bytes: Floats) -> Floats:
    """A nanosecond for every two bytes, and a tenth of a millisecond for an exchange at all."""
    return 1e5 + size_bytes / 2


def forward(columns_bytes: list[float]) -> Floats:
    """Every rank sends the same to each other."""
    return np.repeat(np.array(columns_bytes)[:, None, None], len(columns_bytes), axis=1)


def departures_ns(sent: Floats, arrivals: Floats) -> Floats:
    return Flows.of(sent, BUFFERED, straight).departures_ns(arrivals)


def ends(sent: Floats, arrivals: list[float]) -> list[float]:
    return [float(end) for end in departures_ns(sent, np.array(arrivals)[:, None])[:, 0]]


def test_an_even_exchange_reached_together_ends_for_all_at_once_as_the_curve_says() -> None:
    found = ends(forward([1e6] * RANKS), [0.0] * RANKS)
    assert found == pytest.approx([straight(np.array(4e6))] * RANKS)


def test_who_has_little_to_receive_leaves_first() -> None:
    back = forward([1e6, 1e6, 2e6, 2e6]).swapaxes(0, 1)
    found = ends(back, [0.0] * RANKS)
    assert found[0] == found[1] < found[2] == found[3]


def test_who_comes_last_finds_much_of_the_work_done_and_leaves_first() -> None:
    together = ends(forward([1e6] * RANKS), [0.0] * RANKS)
    late = ends(forward([1e6] * RANKS), [0.0, 0.0, 0.0, 1e9])
    assert max(late) < max(together)
    assert late[3] == straight(np.array(0.0))  # all that it receives lies in buffers, and all that it sends fits into them
    assert late[:3] == pytest.approx([straight(np.array(2e6))] * 3)  # its sends are left: three of six flows at its thread


def test_nothing_is_left_of_two_ranks_that_wait_for_each_other_only() -> None:
    found = ends(np.array([[0.0, 1e9, 0.0], [1e9, 0.0, 0.0], [0.0, 0.0, 0.0]])[:, :, None], [0.0, 0.0, 1e12])
    assert found == [straight(np.array(0.0))] * 3


def test_waiting_longer_never_makes_the_rest_longer() -> None:
    draws = np.random.default_rng(0)
    sent = draws.uniform(0, 4e6, (RANKS, RANKS, 200))
    arrivals = draws.uniform(0, 3e6, (RANKS, 200))
    last = arrivals.argmax(axis=0)
    before = departures_ns(sent, arrivals)
    later = arrivals.copy()
    later[last, np.arange(200)] += 1e6
    after = departures_ns(sent, later)
    assert (after.max(axis=0) <= before.max(axis=0) + 1e-6).all()
    assert (before.max(axis=0) <= departures_ns(sent, np.zeros_like(arrivals)).max(axis=0) + 1e-6).all()


def test_the_numbers_of_ranks_do_not_matter() -> None:
    draws = np.random.default_rng(1)
    sent, arrivals = draws.uniform(0, 4e6, (RANKS, RANKS, 50)), draws.uniform(0, 3e6, (RANKS, 50))
    order = [2, 0, 3, 1]
    turned = departures_ns(sent[order][:, order], arrivals[order])
    np.testing.assert_allclose(turned, departures_ns(sent, arrivals)[order])


@pytest.mark.parametrize(("ranks", "most"), [(2, 0.15), (4, 0.115), (8, 0.19)])
def test_exchanges_as_measured(ranks: int, most: float) -> None:
    """Mean errors per rank, over the time of the last one. The constant was fitted on 4 ranks."""
    fabric = Fabric.load("loopback")
    law, measured = ExchangeDepartures.of(fabric), measured_exchanges(FOLDER, ranks, fabric)
    assert law is not None
    took = measured.ended_ns - measured.begun_ns.max(axis=0)
    at_once = np.abs(measured.together_ns - took) / took.max(axis=0)
    assert measured.errors(law).mean() < most < at_once.mean() / 2


def test_the_shipped_buffers_are_what_fitting_gives() -> None:
    fabric = Fabric.load("loopback")
    assert fabric.limits.buffered_bytes is not None
    measured = measured_exchanges(FOLDER, RANKS, fabric)
    assert fit_buffered_bytes(measured, fabric) == fabric.limits.buffered_bytes.value
