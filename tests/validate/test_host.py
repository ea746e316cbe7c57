"""Laws of validating the host: only steps that the host can decide count, and each is told at its own machine's speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from steptime._models.collectives.curve import Curve
from steptime._models.collectives.tier import TierModel
from steptime._models.host.model import HostModel, shipped_host
from steptime._models.host.speed import STEP, Speed
from steptime._program.program import Collective
from steptime.errors import InputError
from steptime_lab.measurements.shipped import shipped_programs
from steptime_lab.validate.host import FORMS, MIXED, HostCase, Measured, between_processes, cases, step_speed, validate_host
from steptime_lab.validate.profiled import profiled
from steptime_lab.validate.wire import Wire, factors, wire_ns

NAME = "dlrm-test-b2048-r1"


@pytest.fixture(name="model", scope="module")
def shipped_model() -> HostModel:
    return shipped_host("xeon-h200")


def step(time_ns: float = 3e6, **more: Any) -> dict[str, Any]:
    times = [time_ns * factor for factor in (0.98, 1.0, 1.02)]
    return {"name": NAME, "workload": "dlrm", "ranks": 1, "run": "a", "process": "p7", "time_ns": time_ns, "times_ns": times,
            "host_probe_ns": None, **more}  # fmt: skip


def kernels(compute_ns: int = 200_000, rank: int = 0, wire_ns: tuple[int, ...] = ()) -> dict[str, Any]:
    names = ["gemm", *["ncclDevKernel_AllReduce"] * len(wire_ns)]
    times = [[compute_ns] * 2, *([each, 2 * each] for each in wire_ns)]
    return {"name": NAME, "rank": rank, "op": ["aten::mm"] * len(names), "kernel": names, "kernel_ns": times,
            "start_ns": [10_000_000 * at for at in range(len(names))]}  # fmt: skip


def found(model: HostModel, **more: Any) -> list[HostCase]:
    return cases(model, Measured([step(**more)], [kernels()], []), shipped_programs)


@pytest.fixture(name="case", scope="module")
def one_case(model: HostModel) -> HostCase:
    return found(model)[0]


def test_a_step_counts_only_where_the_device_computes_for_less_than_60_percent(model: HostModel) -> None:
    assert not cases(model, Measured([step(ranks=2)], [kernels(1_800_000)], []), shipped_programs)
    assert not cases(model, Measured([step()], [kernels(2_900_000)], []), shipped_programs)
    assert not cases(model, Measured([step()], [], []), shipped_programs)
    assert len(found(model)) == 1


def test_a_step_is_at_least_as_long_as_its_host_and_as_its_device(case: HostCase) -> None:
    assert max(case.host_ns, case.device_ns) <= case.predicted_ns <= case.host_ns + case.device_ns
    assert case.regime == "host"


def test_a_slower_machine_is_predicted_slower(case: HostCase) -> None:
    assert replace(case, speed=Speed.of_cpu(2.6)).predicted_ns > replace(case, speed=Speed.of_cpu(1.5)).predicted_ns


def calibration(process: str, slow: float, model: HostModel) -> dict[str, Any]:
    cost = model.mechanism("calibrated", "module_call nested")
    return {"kind": "module_call", "op": "nested", "source": "calibration", "run": "a", "process": process,
            "times_ns": [cost.cpu_ns * slow] * 5, "reference_cpu_ns": None}  # fmt: skip


def test_the_speed_is_that_of_the_processes_that_timed_the_step(model: HostModel) -> None:
    others = [calibration("p7", 1.9, model), calibration("p9", 3.0, model), {**calibration("p7", 3.0, model), "run": "b"}]
    assert step_speed(model, step(), others).cpu == pytest.approx(1.9)
    assert step_speed(model, step(process="p8", ranks=2), others).cpu == pytest.approx(3.0)
    assert step_speed(model, step(process="p50"), others) == STEP


def test_a_loop_beside_the_repeats_counts_as_much_as_the_calibration(model: HostModel) -> None:
    probes = [1000 * model.reference_cpu_ns * 2.5] * 3
    assert step_speed(model, step(host_probe_ns=probes), []).cpu == pytest.approx(2.5)
    both = step_speed(model, step(host_probe_ns=probes), [calibration("p7", 1.9, model)])
    assert both.cpu == pytest.approx(2.2)


def test_of_a_collective_the_rank_that_waited_least_counts_in_the_quietest_step() -> None:
    device = profiled([kernels(rank=0, wire_ns=(900, 100)), kernels(rank=1, wire_ns=(300, 400))])
    assert device.wire_ns == 300 + 100


def test_compute_under_a_collective_is_not_exposed() -> None:
    row = kernels(1000, wire_ns=(600,))
    assert profiled([{**row, "start_ns": [0, 200]}]).exposed_ns == 200
    assert profiled([{**row, "start_ns": [0, 5000]}]).exposed_ns == 1000


def test_every_simpler_form_stands_beside_the_model_on_the_same_cases(model: HostModel, case: HostCase) -> None:
    told = validate_host(model, [case, replace(case, name="other", measured_ns=case.predicted_ns)])
    assert set(told.whole.baselines) == set(FORMS)
    assert told.whole.summary.rows == 2
    assert told.cases[1].error == pytest.approx(0.0, abs=1e-9)
    assert told.parts["1 rank"].summary.rows == told.parts["host"].summary.rows == 2
    assert told.whole.baselines["device alone"].bias < told.whole.baselines["as fast as in bursts"].bias


def test_a_single_rank_with_a_busier_device_is_a_part_of_its_own(model: HostModel, case: HostCase) -> None:
    busier = cases(model, Measured([step()], [kernels(1_900_000)], []), shipped_programs)
    told = validate_host(model, [case, *busier])
    assert told.whole.summary.rows == 1
    assert told.parts[MIXED].summary.rows == 1


def test_processes_that_timed_the_same_step_give_the_noise_floor(case: HostCase) -> None:
    other = replace(case, process="b p1", measured_ns=1.1 * case.measured_ns)
    assert sorted(between_processes([case, other])) == pytest.approx([1 / 1.1 - 1, 0.1])
    assert between_processes([case, replace(other, name="another")]) == []


def test_nothing_to_validate_is_one_clear_error(model: HostModel) -> None:
    with pytest.raises(InputError, match="60%"):
        validate_host(model, [])


def sweep(kind: str, size_bytes: int, time_ns: float, **more: Any) -> dict[str, Any]:
    return {"collective": kind, "bytes": size_bytes, "times_ns": [time_ns] * 3, "ranks": 4, "beside": "none", "splits": None,
            "host_threads": "idle", "arrival": "together", "mode": "stream", "fabric": "loopback",
            "command": "steptime measure collectives -o DIR", **more}  # fmt: skip


@pytest.fixture(name="wire", scope="module")
def measured_wire() -> Wire:
    powers = np.arange(10.0, 27.0)
    curve = Curve(powers, np.log(1e5 + 2.0**powers))
    return Wire(4, TierModel({(kind, 4): curve for kind in ("all_reduce", "all_to_all")}, 0.25, {}))


def exchange(given: tuple[int, ...], taken: tuple[int, ...]) -> Collective:
    return Collective("all_to_all", "g", (0, 1, 2, 3), 0, sum(given), sum(taken), "float32", given, taken)


def test_a_collective_takes_what_was_measured_alone_and_in_proportion_beyond(wire: Wire) -> None:
    assert wire.alone_ns("all_reduce", 2**20) == pytest.approx(1e5 + 2**20)
    assert wire.alone_ns("all_reduce", 2**28) == pytest.approx(4 * wire.alone_ns("all_reduce", 2**26), rel=0.01)


def test_an_exchange_of_equal_parts_takes_what_was_measured_and_its_mirror_image_as_long(wire: Wire) -> None:
    even = exchange((2**20,) * 4, (2**20,) * 4)
    assert wire.collective_ns(even) == pytest.approx(wire.alone_ns("all_to_all", 2**22))
    skewed, mirrored = exchange((2**20,) * 4, (2**22, 0, 0, 0)), exchange((2**22, 0, 0, 0), (2**20,) * 4)
    assert wire.collective_ns(skewed) == pytest.approx(wire.collective_ns(mirrored))
    assert wire.collective_ns(skewed) > wire.collective_ns(even)


def test_a_box_whose_calibration_is_slower_has_a_slower_wire(wire: Wire) -> None:
    calibration = [sweep("all_reduce", 2**20, 1.2 * (1e5 + 2**20), command="steptime measure steps")]
    reduce = [Collective("all_reduce", "g", (0, 1, 2, 3), 0, 2**20, 2**20)]
    found = factors(wire, calibration)
    assert wire_ns(wire, reduce, found) == pytest.approx(1.2 * wire_ns(wire, reduce, {}))


def test_a_collective_of_nothing_takes_no_exchange(wire: Wire) -> None:
    assert wire.collective_ns(exchange((0,) * 4, (0,) * 4)) == 0.0
