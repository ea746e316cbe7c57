"""`steptime platforms`: a line for each, one in detail with sources, and one line for what is none."""

from __future__ import annotations

import json

import pytest

from steptime._cli.app import run
from steptime._platforms.platform import shipped_platforms

Captured = pytest.CaptureFixture[str]


def test_all_are_listed_with_the_fabrics_that_have_no_device(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["platforms"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    for parts in shipped_platforms():
        assert any(line.split()[:2] == [parts.name, parts.device] for line in lines)
    assert "h100-2-nodes" in out
    eight = next(line for line in lines if line.split()[:1] == ["8xh200-nvlink"])
    assert eight.endswith("fitted")


def test_the_list_says_the_same_to_programs(capsys: Captured) -> None:
    assert run(["platforms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1
    assert [one["name"] for one in found["platforms"]] == [parts.name for parts in shipped_platforms()]
    by_name = {one["name"]: one for one in found["platforms"]}
    assert by_name["2xh200-nvlink"]["collectives"]["all_reduce"] == "fitted"
    assert by_name["8xh200-nvlink"]["collectives"]["all_reduce"] == "fitted"
    assert by_name["1xh200"]["fabric"] is None
    assert by_name["1xh200"]["kernels"] == "fitted"
    assert by_name["8xa100-nvlink"]["kernels"] == by_name["8xh100-nvlink"]["kernels"] == "analytic"
    assert "a40-pairwise-nvlink" in found["fabrics_without_device"]


def test_one_is_shown_with_every_number_and_its_source(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["platforms", "4xh200-quarter-loopback"]) == 0
    out = capsys.readouterr().out
    # Device, its models, host, fabric: a number, its source and its date.
    for said in (
        "4.8 TB/s",
        "data sheet: 4.8 TB/s",
        "models of kernels",
        "measured 2026-11-15",
        "a launch",
        "steptime measure host",
    ):
        assert said in out
    assert "loopback (loopback, 8 ranks)" in out
    assert "measured rows: send_recv" in out
    assert "steptime's measured set collectives" in out
    assert "2, 4, 8" in out


def test_the_details_say_the_same_to_programs(capsys: Captured) -> None:
    assert run(["platforms", "8xh200-nvlink", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"schema_version", "name", "ranks", "device", "host", "fabric", "overlap", "warnings"}
    assert all(one["source"] for one in found["device"]["limits"].values())
    assert found["device"]["models"]["kernels"]["measured"]
    assert found["host"]["launch_ns"] > 0
    assert "2026" in found["host"]["source"]
    assert "aten::mm" in found["host"]["ops"]
    fabric = found["fabric"]
    assert all(tier["bandwidth_bytes_per_s"]["source"] and tier["latency_ns"]["source"] for tier in fabric["tiers"])
    assert {one["kind"]: one["ranks"] for one in fabric["fitted"]}["all_reduce"] == [2, 4, 8]
    assert fabric["collectives"]["all_reduce"] == "fitted"
    assert fabric["collectives"]["send_recv"] == "from a fabric like it"
    assert fabric["collectives"]["broadcast"] == "not known"
    assert found["overlap"]["source"].startswith("analytic")
    assert set(fabric["estimates_us"]) == {kind for kind, origin in fabric["collectives"].items() if origin != "not known"}
    assert all(one["license"] and one["date"] for one in fabric["published"])


def test_an_analytic_device_says_whose_models_it_takes(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["platforms", "8xa100-nvlink"]) == 0
    assert "Analytic: the models of h200, scaled by limits" in capsys.readouterr().out
    assert run(["platforms", "8xa100-nvlink", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["device"]
    assert (device["source"], device["transfer"]["from"]) == ("analytic", "h200")
    assert all(one["source"] for one in device["limits"].values())


def test_one_rank_has_no_fabric(capsys: Captured) -> None:
    assert run(["platforms", "1xh200"]) == 0
    assert "one rank exchanges nothing" in capsys.readouterr().out


def test_a_fabric_without_a_device_is_shown_alone(capsys: Captured) -> None:
    assert run(["platforms", "h100-2-nodes"]) == 0
    out = capsys.readouterr().out
    assert "from its tiers" in out
    assert "xxrjun/nccl-tests-cluster" in out
    assert run(["platforms", "h100-2-nodes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collectives"]["all_to_all"] == "from its tiers"


def test_parts_can_be_swapped_to_look_at(capsys: Captured) -> None:
    assert run(["platforms", "8xh200-nvlink", "--fabric", "h100-nvlink", "--ranks", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["ranks"], found["fabric"]["name"]) == ("4xh200-h100-nvlink", 4, "h100-nvlink")
    assert found["fabric"]["collectives"]["all_reduce"] == "fitted"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["8xh200-nvlnk"], "did you mean 8xh200-nvlink?"),
        (["8xH100-NVLink"], "did you mean 8xh100-nvlink?"),
        (["h100x8"], "did you mean 8xh100-nvlink?"),
        (["H200x16-ib400"], "did you mean 16xh200-ib400?"),
        (["16xh200-nvlink"], "joins 8; did you mean 16xh200-ib400?"),
        (["4xa40-pairwise-nvlink"], "no models of device a40"),
        (["1xh200", "--host", "nobody"], "no host 'nobody'"),
        (["1xh200", "--device", "h900"], "no device 'h900'"),
        (["8xh200-nvlink", "--fabric", "rope"], "no fabric 'rope'"),
        (["1xh200", "--fabric", "rope"], "no fabric 'rope'"),
        (["--fabric", "loopback"], "give the platform's name too"),
        (["loopback", "--ranks", "2"], "give the platform's name too"),
        (["nowhere.toml"], "cannot be read"),
    ],
)
def test_what_is_none_is_one_line(words: list[str], said: str, capsys: Captured) -> None:
    assert run(["platforms", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
