"""JSON: the keys others rely on, numbers that are numbers, and the same bytes for the same input."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from steptime._api.predict import find_measured
from steptime._program.load import load
from steptime._report.answers import Replayed
from steptime._report.inspection import inspect_workload
from steptime._report.json import dumps, prediction_document
from steptime._sim.prediction import predict
from steptime._sim.recorded.replay import replay

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"

PREDICT_KEYS = {
    "schema_version", "step_time_ms", "interval_ms", "first_step_ms", "recorded_step_ms", "bound_by", "ranks", "breakdown",
    "critical_path",
    "straggler", "memory", "coverage", "warnings", "platform", "workload", "batch", "sequence", "precision", "parallelism",
    "numerics",
    "parameters", "active_parameters", "samples_per_s", "tokens_per_s", "flop", "mfu", "hfu", "power_w", "clock_hz", "energy_j",
    "basis", "power_cap_w", "power_capped", "situation", "profiled", "host_code_ms", "verdict", "price", "cost_per_step",
    "cost_per_million_samples", "cost_per_trillion_tokens", "draws_ms",
}  # fmt: skip
REPLAY_KEYS = PREDICT_KEYS | {"steps", "measured_step_ms", "error", "unprofiled"}
RANK_KEYS = {
    "rank", "step_ms", "device_busy_ms", "compute_ms", "communication_ms", "exposed_communication_ms", "waiting_ms", "idle_ms",
    "host_bound_fraction", "host_blocked_ms",
}  # fmt: skip
INSPECT_KEYS = {
    "schema_version",
    "name",
    "files",
    "world_size",
    "ranks",
    "absent",
    "steps",
    "groups",
    "findings",
    "warnings",
    "basis",
}


@cache
def documents() -> dict[str, str]:
    workload = load([EXAMPLE])
    return {
        "predict": dumps(prediction_document(predict(workload))),
        "replay": dumps(Replayed.of(replay(workload), find_measured([EXAMPLE])).to_dict()),
        "inspect": dumps(inspect_workload(workload).to_dict()),
    }


def document(command: str) -> dict[str, Any]:
    found = json.loads(documents()[command])
    assert isinstance(found, dict)
    return found


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize(("command", "keys"), [("predict", PREDICT_KEYS), ("replay", REPLAY_KEYS), ("inspect", INSPECT_KEYS)])
def test_keys_are_stable(command: str, keys: set[str]) -> None:
    assert set(document(command)) == keys
    assert document(command)["schema_version"] == 1


def test_keys_inside_are_stable() -> None:
    found = document("replay")
    assert {frozenset(rank) for rank in found["ranks"]} == {frozenset(RANK_KEYS)}
    assert {frozenset(step) for step in found["steps"]} == {frozenset({"step", "predicted_ms", "measured_ms", "error"})}
    assert set(found["critical_path"]) == {"length_ms", "kinds", "ranks", "top"}
    assert set(found["critical_path"]["top"][0]) == {"name", "kind", "ms", "share", "count"}
    assert set(found["straggler"]) == {"rank", "caused_ms", "share"}
    assert set(found["memory"]) == {"peak_bytes"}
    assert found["coverage"] == {"measured": 1.0}
    assert len(found["interval_ms"]) == 2


@pytest.mark.parametrize("command", ["predict", "replay", "inspect"])
def test_every_number_is_finite(command: str) -> None:
    assert all(math.isfinite(number) for number in numbers(document(command)))


def test_a_number_that_is_none_is_refused_rather_than_written() -> None:
    broken = replace(predict(load([EXAMPLE])), step_time_ms=math.nan)
    with pytest.raises(ValueError, match="JSON"):
        dumps(prediction_document(broken))


def test_the_same_input_gives_the_same_bytes() -> None:
    workload = load([EXAMPLE])
    assert dumps(prediction_document(predict(workload))) == documents()["predict"]


def test_errors_follow_from_the_times_beside_them() -> None:
    found = document("replay")
    for step in found["steps"]:
        assert step["error"] == pytest.approx(step["predicted_ms"] / step["measured_ms"] - 1, abs=1e-6)
    assert found["error"] == pytest.approx(found["step_time_ms"] / found["measured_step_ms"] - 1, abs=1e-6)
    assert found["step_time_ms"] == pytest.approx(sum(s["predicted_ms"] for s in found["steps"]) / len(found["steps"]))
