"""`predict` and `replay`: how long a step takes, on a platform or as it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime._api.compiling import as_compiled, compared_with_eager
from steptime._api.read import read
from steptime._fuse.compiled import OFF, checked_mode
from steptime._lookups.workload import WorkloadLookups
from steptime._models.memory.fit import checked_memory, usable_bytes
from steptime._notices import Caveat
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.device import Device
from steptime._platforms.platform import Platform, platform_parts
from steptime._program.workload import Workload
from steptime._report.answers import Prediction, Replayed
from steptime._report.cost import checked_price
from steptime._sim.modelled.prediction import predict_on, within
from steptime._whatif.grammar import parse_all
from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._api.read import Source
    from steptime._sim.prediction import PredictedStep
    from steptime._whatif.grammar import Change

# Whose models say how iterations of a recording differ that names no device.
DEVICE = "h200"


def predict(
    source: Source,
    platform: str | Path | Platform | None = None,
    *,
    batch: int | None = None,
    ranks: int | None = None,
    plan: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | Path | None = None,
    host: str | Path | None = None,
    fabric: str | Path | None = None,
    power_cap_w: float | None = None,
    lookups: str | Path | WorkloadLookups | None = None,
    calibration: str | Path | Calibration | None = None,
    strict: bool = False,
    what_if: Sequence[str] = (),
    profiled: bool = False,
    memory_bytes: int | None = None,
    price: float | None = None,
    suggest: bool = True,
    compile: str | None = None,
) -> Prediction:
    """Predict the steady-state step of a workload, or of anything `read` takes.

    `platform` is a name (`8xh200-nvlink`), the path of a platform's TOML file or a `Platform`; without one the step is
    predicted with the run's own durations, as recorded. `device`, `host` and `fabric` replace a component of it, `power_cap_w`
    is what each card may draw if not what its data sheet says. `batch`, `ranks`, `plan` and `settings` are as for `read`.
    `lookups` says what ranks look up in their tables, `calibration` how fast the machine is (`steptime calibrate` writes it).
    `strict`: an op without a model raises `UnsupportedError` instead of being a labelled guess. `what_if` are changes, as
    "matmul * 0.5": the answer is the step with all of them, and its `what_if` says what each saves. `profiled`: a recorded run
    with what its profiler cost, as recorded, instead of as it runs without one. `memory_bytes` is what a rank may
    use of its device. `price` is what one GPU costs for an hour: the answer then says what steps cost.
    `suggest`: of a step that does not fit, find what would make it fit, which takes seconds. `compile` is a mode of
    `torch.compile` ("default", "reduce-overhead"): the answer is the compiled step, with what compiling brings (`compiling`).
    """
    checked_price(price)
    checked_memory(memory_bytes)
    mode = None if compile is None else checked_mode(compile)
    changes = parse_all(what_if)
    workload = read(source, batch=batch, ranks=ranks, plan=plan, settings=settings, platform_ranks=platform_ranks(platform))
    if lookups is not None:
        looked_up = lookups if isinstance(lookups, WorkloadLookups) else WorkloadLookups.load(Path(lookups))
        workload = replace(workload, lookups=looked_up)
    before = workload
    if mode is not None:
        workload = as_compiled(workload, mode, platform)
    if platform is None:
        options = {"host": host, "fabric": fabric, "power-cap": power_cap_w, "memory": memory_bytes}
        options["device"] = device if workload.lookups is None else None
        _check_recorded(workload, {**options, "calibration": calibration, "strict": strict or None})
        if workload.lookups is None:
            from steptime._sim.prediction import predict as predict_recorded

            return _answered(replace(predict_recorded(workload, profiled=profiled), price=price), changes)
        from steptime._sim.recorded.lookup_scenarios import predict_iterations

        table_device = Device.load(str(device or DEVICE))
        step = predict_iterations(workload, workload.lookups, table_device, profiled=profiled)
        return _answered(replace(step, price=price), changes)
    machine = platform_for(platform, workload.world_size, device=device, host=host, fabric=fabric)
    speed = calibration_for(calibration, machine)
    if power_cap_w is not None:
        # It goes before the one that the calibration found.
        machine, speed = replace(machine, device=machine.device.capped(power_cap_w)), replace(speed, power_cap_w=None)
    _check_profiled(workload, host, profiled=profiled)
    limit = usable_bytes(machine.device.limits, memory_bytes)

    def predicted(job: Workload) -> PredictedStep:
        step = predict_on(job, machine, calibration=speed, strict=strict, profiled=profiled, other_host=host is not None)
        step = replace(step, notices=step.notices.after(*idle_gpus(job, machine)))
        return replace(within(step, limit), price=price)

    step = predicted(workload)
    if mode is not None and mode != OFF:
        if changes:
            raise InputError(f"--compile {mode} with --what-if: one of the two at a time; save the answer of each")
        return compared_with_eager(step, before, predicted, machine)
    if suggest and step.fits is False:
        from steptime._remedies import OversizedJob, remedies

        step = replace(step, helps=remedies(OversizedJob(step.workload, machine, step.memory)))
    return _answered(step, changes, machine, predicted)


def _answered(
    step: PredictedStep,
    changes: Sequence[Change],
    platform: Platform | None = None,
    predicted: Callable[[Workload], PredictedStep] | None = None,
) -> Prediction:
    """The answer about a step, or about the step with changes."""
    if not changes:
        return Prediction.of(step)
    from steptime._api.whatif import changed

    return changed(step, changes, platform, predicted)


def replay(source: Source, *, measured: str | Path | None = None) -> Replayed:
    """Play a run's own kernel times and host gaps through the simulator and compare with its recorded steps.

    `measured` is a file of step times measured without a profiler; `measured.json` beside the recordings if there is one.
    """
    from steptime._sim.recorded.replay import replay as replay_recorded

    played = replay_recorded(read(source))
    if measured is None and not isinstance(source, Workload) and not callable(source):
        paths = [source] if isinstance(source, str | Path) else source
        measured = find_measured([Path(each) for each in paths])
    return Replayed.of(played, None if measured is None else Path(measured))


def find_measured(paths: Sequence[Path]) -> Path | None:
    """The file of unprofiled step times that lies beside the traces, if there is one."""
    from steptime._sim.recorded.replay import MEASURED_FILE

    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    return next((folder / MEASURED_FILE for folder in folders if (folder / MEASURED_FILE).is_file()), None)


def platform_for(
    platform: str | Path | Platform,
    ranks: int | None = None,
    *,
    device: str | Path | None = None,
    host: str | Path | None = None,
    fabric: str | Path | None = None,
) -> Platform:
    """A platform for so many ranks: fewer than it has leave the others idle; more are joined by a fabric named for them."""
    parts = platform.parts if isinstance(platform, Platform) else platform_parts(str(platform))
    fits = ranks is not None and (ranks < parts.ranks or fabric is not None)
    named = [None if each is None else str(each) for each in (device, host, fabric)]
    chosen = parts.swapped(ranks=ranks if fits else None, device=named[0], host=named[1], fabric=named[2])
    before = platform if isinstance(platform, Platform) else None
    if before is not None and chosen == parts:
        return before
    part_of = parts if chosen.ranks < parts.ranks else None if before is None else before.part_of
    return replace(Platform.of(chosen), part_of=part_of)


def platform_ranks(platform: str | Path | Platform | None) -> int | None:
    """How many ranks a platform has; None where there is none."""
    if platform is None:
        return None
    return platform.ranks if isinstance(platform, Platform) else platform_parts(str(platform)).ranks


def calibration_for(calibration: str | Path | Calibration | None, platform: Platform) -> Calibration:
    """What is known of the machine's own speed: as given, or as the platform's own file says."""
    calibration = calibration or platform.parts.calibration
    if calibration is None:
        return UNCALIBRATED
    return calibration if isinstance(calibration, Calibration) else Calibration.read(Path(calibration), platform)


def _check_recorded(workload: Workload, options: dict[str, object]) -> None:
    """Without a platform there must be a run, and nothing may be asked about models."""
    if not any(program.recorded for program in workload.programs):
        hosts = any(bool((program.ops.start_ns >= 0).any()) for program in workload.programs)
        why = "was recorded without GPU events (ProfilerActivity.CUDA records them)" if hosts else "was never run"
        raise InputError(
            f"{workload.name or 'the workload'} {why}: give the machine to predict for, as in "
            f"--platform {_suggested(workload.world_size)}"
        )
    for name, value in options.items():
        if value is not None:
            what = "is about models" if name in ("strict", "calibration", "memory") else "is a component of a platform"
            also = ", or --lookups FILE" if name == "device" else ""
            shown = "" if value is True else f" {value}"
            raise InputError(f"--{name}{shown}: {what}; give --platform NAME too{also}")


def _check_profiled(workload: Workload, host: str | Path | None, *, profiled: bool) -> None:
    """Only a run can be predicted as it was recorded, and only on its own host."""
    if profiled and not any(program.recorded for program in workload.programs):
        raise InputError(f"--profiled: {workload.name or 'the workload'} was never recorded; it goes with traces of a run")
    if profiled and host is not None:
        raise InputError(f"--profiled --host {host}: host times are those that were recorded; give one of the two")


def idle_gpus(workload: Workload, machine: Platform) -> Iterator[str]:
    """That a run which cannot be made anew leaves GPUs of the platform alone."""
    whole = machine.part_of
    if workload.rebuild is None and whole is not None:
        yield Caveat(
            f"{whole.name} is for {whole.ranks} ranks and {workload.name or 'the workload'} has {machine.ranks}: predicted on "
            f"{machine.name}, the others idle; for another number of ranks give a config or the training script"
        )


def _suggested(ranks: int) -> str:
    """A platform that has so many ranks; no shipped one has more than a few nodes."""
    if ranks == 1:
        return "1xh200"
    most = 8  # of the fabric h200-nvlink
    return f"{ranks}xh200-nvlink" if ranks <= most else "8xh200-nvlink --fabric FILE, a fabric of yours (`steptime fabric`)"
