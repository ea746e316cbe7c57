"""Lookups on a device: asked as the part it is, refused where nothing was fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.platforms.counting_lookups import MOST_LOOKUPS, RESIDUALS, Counting, counting_device, looked_up

from steptime._hardware.device import FOLDER
from steptime._models.lookups.fitted import LookupModels
from steptime._models.lookups.question import Lookup
from steptime._platforms.device import Device
from steptime.errors import InputError

FORWARD = Lookup("table_batched", "forward", (looked_up(40, 10, "a"), looked_up(60, 10, "b")))
BACKWARD = Lookup("table_batched", "backward", FORWARD.tables, "sgd")


def test_a_lookup_is_asked_as_this_part_beside_others_that_do_the_same() -> None:
    whole, quarter = counting_device("h200"), counting_device("h200-quarter")
    assert [one.estimate.time_ns for one in whole.lookup_estimates([FORWARD, BACKWARD])] == [100e3, 20e3]
    assert [one.estimate.time_ns for one in quarter.lookup_estimates([FORWARD, BACKWARD])] == [800e3, 160e3]
    alone = quarter.lookup_estimates([replace(FORWARD, others="idle")])[0]
    assert alone.estimate.time_ns == 400e3


def test_lookups_of_one_kind_are_asked_together() -> None:
    form = Counting()
    counting_device("h200", form).lookup_estimates([FORWARD, BACKWARD, replace(FORWARD, warm=True), FORWARD])
    assert form.asked == [2, 1]  # equal ones once


def test_strict_refuses_what_is_beyond_the_measured_lookups() -> None:
    huge = Lookup("embedding_bag", "forward", (looked_up(MOST_LOOKUPS + 1, 10, "huge"),))
    device = counting_device()
    assert not device.lookup_estimates([huge])[0].estimate.inside
    assert device.lookup_estimates([FORWARD], strict=True)
    with pytest.raises(
        InputError, match=r"lookup 1 \(embedding_bag forward of table huge\) is beyond what was measured on h200"
    ):
        device.lookup_estimates([FORWARD, huge], strict=True)


def test_a_device_without_lookup_models_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^h200 has no fitted lookup models; `steptime fit` writes them$"):
        replace(counting_device(), lookups=None).lookup_estimates([FORWARD])
    (tmp_path / "mine.toml").write_text((FOLDER / "h200.toml").read_text().replace('models = "h200"', 'models = "mine"'))
    (tmp_path / "mine.npz").write_bytes((FOLDER / "h200.npz").read_bytes())
    mine = Device.load(str(tmp_path / "mine.toml"))
    with pytest.raises(InputError, match=r"no fitted lookup models \(.*mine-lookups\.npz is not there\)"):
        mine.lookup_estimates([FORWARD])
    (tmp_path / "mine-lookups.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"mine-lookups\.npz"):
        mine.lookup_estimates([FORWARD])


def test_what_the_own_models_do_not_know_is_asked_of_whoever_stands_in() -> None:
    bags, here, there = Lookup("embedding_bag", "forward", FORWARD.tables[:1]), Counting(), Counting()
    own, other = counting_device("h200", here), counting_device("h200", there)
    models = LookupModels({("embedding_bag", "forward"): here}, RESIDUALS, {})
    device = replace(own, lookups=models, stand_in=other)
    times = [item.estimate.time_ns for item in device.lookup_estimates([FORWARD, bags, BACKWARD])]
    assert times == [100e3, 40e3, 20e3]
    assert (here.asked, there.asked) == ([1], [1, 1])
    nothing = replace(own, lookups=None, stand_in=other)
    assert len(nothing.lookup_estimates([bags, FORWARD])) == 2
    assert here.asked == [1]
