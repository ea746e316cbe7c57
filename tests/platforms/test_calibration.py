"""Laws of a calibration: usual costs change nothing, slower machines are slower, and the same rows give the same speeds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime._models.collectives.message import Message
from steptime._models.host.model import STEP, HostCost, HostModel, read_host
from steptime._platforms.calibration import UNCALIBRATED, Calibration, host_factors
from steptime._platforms.machine_costs import HostBurst, MachineCosts, WireCost
from steptime._platforms.platform import Platform
from steptime.errors import InputError

BEFORE = Path(__file__).parent / "before" / "calibration.json"
ONE, TWO, FOUR = "1xh200", "2xh200-half-loopback", "4xh200-quarter-loopback"


def bursts(times: float, host: HostModel) -> tuple[HostBurst, ...]:
    """Every cost that the host knows, so many times as long on the CPU as usual."""
    return tuple(
        HostBurst(
            kind=name.partition(" ")[0],
            op=name.partition(" ")[2],
            time_ns=0.73 * usual.launch_ns + times * (usual.time_ns - 0.73 * usual.launch_ns),
        )
        for name, usual in host.usual_bursts.items()
    )


def wire(platform: Platform, times: float, kind: str = "all_reduce", **more: Any) -> WireCost:
    assert platform.fabric is not None
    (expected,) = platform.fabric.estimates([Message(kind, platform.ranks, 1 << 20)])
    return replace(WireCost(kind, 1 << 20, platform.ranks, times * expected.time_ns, "stream"), **more)


def test_a_usual_machine_of_one_rank_is_predicted_as_uncalibrated() -> None:
    platform = Platform.load(ONE)
    found = Calibration.of(MachineCosts(bursts(1.0, platform.host), ()), platform)
    assert found.speed.cpu == pytest.approx(STEP.cpu)
    assert found.wire == {}
    assert found.host_error < UNCALIBRATED.host_error
    assert found.wire_error == UNCALIBRATED.wire_error


@pytest.mark.parametrize("name", [ONE, FOUR])
def test_a_slower_machine_is_slower_but_by_less_than_its_bursts_show(name: str) -> None:
    platform = Platform.load(name)
    speeds = [Calibration.of(MachineCosts(bursts(times, platform.host), ()), platform).speed for times in (0.8, 1.0, 1.3)]
    assert speeds[0].cpu < speeds[1].cpu < speeds[2].cpu < 1.3 * speeds[1].cpu
    assert 1.0 < speeds[2].launch < speeds[2].cpu


def test_reference_steps_are_believed_the_more_the_less_they_scatter_and_the_less_is_known_of_such_hosts() -> None:
    platform = Platform.load(ONE)
    every = [replace(burst, spread=0.6, repeats=2) for burst in bursts(1.3, platform.host)]
    steps = tuple(burst for burst in every if burst.kind == "step")
    repeated = MachineCosts(tuple(replace(step, repeats=200) for step in steps), ())
    scattered, steady = (Calibration.of(costs, platform) for costs in (MachineCosts(steps, ()), repeated))
    assert STEP.cpu < scattered.speed.cpu < steady.speed.cpu < 1.3 * STEP.cpu
    assert steady.host_error < scattered.host_error < UNCALIBRATED.host_error
    # Bursts beside them say nothing more.
    others = tuple(replace(burst, time_ns=1.0) for burst in every if burst.kind != "step")
    assert Calibration.of(MachineCosts(steps + others, ()), platform).speed == scattered.speed
    unknown = Calibration.of(repeated, Platform.load("1xa100"))
    assert unknown.speed.cpu > steady.speed.cpu
    assert unknown.speed.cpu == pytest.approx(1.3 * STEP.cpu, rel=0.03)


def test_every_kind_of_collective_has_the_factor_of_its_own_rows() -> None:
    platform = Platform.load(TWO)
    found = Calibration.of(MachineCosts((), (wire(platform, 1.4), wire(platform, 0.9, "all_to_all"))), platform)
    assert found.wire.keys() == {"all_reduce", "all_to_all"}
    assert 0.9 < found.wire["all_to_all"] < found.wire["all_reduce"] < 1.4
    assert found.speed == STEP
    assert found.wire_error < UNCALIBRATED.wire_error
    # A kind that nobody timed goes over the same links.
    assert found.wire_of("all_reduce") == found.wire["all_reduce"]
    assert found.wire["all_to_all"] < found.wire_of("all_gather") < found.wire["all_reduce"]
    assert UNCALIBRATED.wire_of("all_gather") == 1.0


@pytest.mark.parametrize("more", [{"bytes": 1024}, {"mode": "single"}, {"ranks": 4}, {"collective": "unheard_of"}])
def test_latencies_single_calls_other_groups_and_unknown_kinds_say_nothing_of_the_wire(more: dict[str, Any]) -> None:
    platform = Platform.load(TWO)
    assert Calibration.of(MachineCosts((), (wire(platform, 2.0, **more),)), platform) == UNCALIBRATED


def test_a_file_of_before_is_read_and_says_about_what_it_said() -> None:
    found = Calibration.read(BEFORE, Platform.load(FOUR))
    # What the release that wrote it made of it.
    assert found.speed.cpu == pytest.approx(2.26, rel=0.3)
    assert found.wire == pytest.approx({"all_reduce": 1.045, "all_to_all": 0.969}, rel=0.1)


def test_rows_and_the_file_made_of_them_give_the_same_speeds() -> None:
    platform, costs = Platform.load(FOUR), MachineCosts.read(BEFORE)
    host = [{**vars_of(burst), "times_ns": [burst.time_ns]} for burst in costs.host]
    plain = {"beside": "none", "host_threads": "idle", "arrival": "together", "splits": None}
    fabric = [{**vars_of(one), **plain, "times_ns": [one.time_ns]} for one in costs.fabric]
    crowded = [{**row, "beside": "gemm", "times_ns": [1e9]} for row in fabric]
    assert Calibration.of(MachineCosts.of_rows(host, [*fabric, *crowded]), platform) == Calibration.read(BEFORE, platform)


def vars_of(entry: HostBurst | WireCost) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__slots__}


def test_a_host_fitted_before_bursts_were_kept_is_calibrated_by_its_costs() -> None:
    host = read_host("xeon-h200")
    cost = HostCost(1500.0)
    old = replace(host, bursts={}, around={**host.around, "calibrated module_call nested": cost})
    burst = HostBurst("module_call", "nested", 1.1 * STEP.time_ns(cost))
    assert host_factors([burst], old.usual_bursts) == {("module_call", "nested"): pytest.approx(1.1)}


def test_costs_that_come_out_below_zero_or_that_nobody_knows_say_nothing() -> None:
    host = read_host("xeon-h200")
    assert not host_factors(
        [HostBurst("module_call", "nested", -3.0), HostBurst("op", "aten::unheard_of", 9.0)], host.usual_bursts
    )


def test_medians_are_over_all_ranks_and_bursts() -> None:
    asked = {"kind": "op", "op": "aten::add.Tensor", "call": "", "phase": "other"}
    costs = MachineCosts.of_rows([{**asked, "times_ns": [1.0, 2.0]}, {**asked, "times_ns": [9.0]}], [])
    assert [(one.time_ns, one.repeats) for one in costs.host] == [(2.0, 3)]


def written(folder: Path, **changed: object) -> Path:
    file = folder / "calibration.json"
    file.write_text(json.dumps({**json.loads(BEFORE.read_text()), **changed}))
    return file


HOST = {"kind": "op", "op": "x", "time_ns": 1.0, "spread": 0.0}
WIRE = {"collective": "all_reduce", "bytes": 1 << 20, "ranks": 4, "mode": "stream", "time_ns": 1e6, "spread": 0.1}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema_version": 9}, "a calibration of version 9"),
        ({"host": "many"}, r"Expected `array`, got `str` - at `\$.host`"),
        ({"host": [HOST]}, "none of its host costs is known"),
        ({"host": [{**HOST, "time_ns": "long"}]}, r"Expected `float`, got `str` - at `\$.host\[0\].time_ns`"),
        ({"host": [{**HOST, "time_ns": math.inf}]}, "not a calibration"),
        ({"fabric": [{**WIRE, "time_ns": 1e18}]}, r"time_ns is 1e\+18; expected 0 to 1e\+12"),
        ({"fabric": [{**WIRE, "time_ns": -1.0}]}, "time_ns is -1.0; expected 0 to"),
        ({"fabric": [{**WIRE, "bytes": 10**30}]}, "not a calibration"),
        ({"fabric": [{**WIRE, "ranks": 0}]}, "ranks is 0; expected 1 to"),
    ],
)
def test_a_broken_calibration_is_one_clear_line(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    refused(written(tmp_path, **changed), said)


@pytest.mark.parametrize("text", ["9" * 4400, "1e400", "[" * 100_000, "\xff"])
def test_a_file_that_no_reader_can_hold_is_one_clear_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(f'{{"schema_version": 1, "fabric": [], "host": [{{"kind": "op", "op": "x", "time_ns": {text}')
    refused(file, "not a calibration")


def refused(file: Path, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        Calibration.read(file, Platform.load(TWO))
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)
