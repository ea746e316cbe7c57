"""`steptime predict`, `replay`, `inspect` and `capture`: commands about training steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from steptime._cli.output import (
    Batch,
    CalibrationFile,
    Compile,
    ExpertSkew,
    Json,
    Limit,
    Memory,
    OnPlatform,
    Price,
    Profiled,
    Ranks,
    Set,
    Trace,
    Traces,
    announce,
    input_files,
    print_files,
    read,
    settings_of,
    show,
    skew_experts,
    working,
)
from steptime._cli.quantities import quantity
from steptime._notices import Notices
from steptime._units import POWER
from steptime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from steptime._program.workload import Workload


def predict(
    workload: Annotated[
        list[str],
        Argument(
            metavar="WORKLOAD",
            help="Traces (files, folders, archives; one or many ranks), a captured workload, a config, a sharding task, a "
            "training script or module:function, whose own arguments follow after --.",
            show_default=False,
        ),
    ],
    platform: OnPlatform = None,
    batch: Batch = None,
    ranks: Ranks = None,
    plan: Annotated[
        Path | None,
        Option("--plan", metavar="FILE", help="Where a DLRM's tables go: what `steptime shard` wrote, or TorchRec's plan."),
    ] = None,
    settings: Set = None,
    device: Annotated[str | None, Option("--device", metavar="NAME", help="Another device in the platform.")] = None,
    host: Annotated[str | None, Option("--host", metavar="NAME", help="Another host in the platform.")] = None,
    fabric: Annotated[str | None, Option("--fabric", metavar="NAME", help="Another fabric in the platform.")] = None,
    power_cap: Annotated[
        float | None,
        Option(
            "--power-cap",
            metavar="WATTS",
            parser=quantity("--power-cap", POWER),
            help="What each card may draw, as 500W or 0.5kW, if not what its data sheet says.",
        ),
    ] = None,
    memory: Memory = None,
    price: Price = None,
    lookups: Annotated[
        Path | None,
        Option("--lookups", metavar="FILE", help="What each rank looks up in its tables, for one or more iterations."),
    ] = None,
    calibration: CalibrationFile = None,
    strict: Annotated[bool, Option("--strict", help="Fail on an op without a model instead of estimating it.")] = False,
    what_if: Annotated[
        list[str] | None,
        Option(
            "--what-if",
            metavar="CHANGE",
            help="What a change saves, as 'matmul * 0.5' or 'sync remove' (docs/whatif.md); may be given several times.",
            show_default=False,
        ),
    ] = None,
    compile_mode: Compile = None,
    profiled: Profiled = False,
    limit: Limit = None,
    expert_skew: ExpertSkew = None,
    json: Json = False,
    html: Annotated[
        Path | None, Option("--html", metavar="FILE", help="Write everything as a single HTML page that works offline.")
    ] = None,
    trace: Trace = None,
) -> None:
    """Predict the steady-state step time, say how sure that is, where the time goes and why."""
    from steptime._api.predict import platform_ranks
    from steptime._api.predict import predict as predicted
    from steptime._files import check_outputs
    from steptime._fuse.compiled import checked_mode
    from steptime._report.compiling import CompiledPrediction, print_compiled
    from steptime._report.text import print_prediction
    from steptime._report.whatif import ChangedPrediction, print_changed

    skew_experts(expert_skew)
    if compile_mode is not None:
        checked_mode(compile_mode)
    outputs = {"--html": html, "--trace": trace}
    check_outputs(outputs, input_files(workload, plan, platform, device, host, fabric, lookups, calibration))
    job = read(
        workload, batch=batch, ranks=ranks, plan=plan, settings=settings_of(settings),
        platform_ranks=platform_ranks(platform), limit_s=limit, quiet=json,
    )  # fmt: skip
    with working("predicting"):
        answer = predicted(
            job,
            platform,
            device=device,
            host=host,
            fabric=fabric,
            power_cap_w=power_cap,
            lookups=lookups,
            calibration=calibration,
            strict=strict,
            what_if=what_if or (),
            profiled=profiled,
            memory_bytes=memory,
            price=price,
            compile=compile_mode,
        )
    if trace is not None:
        answer.trace(trace)
    if html is not None:
        answer.html(html)

    def text(console: Console) -> None:
        if isinstance(answer, ChangedPrediction):
            print_changed(console, answer)
        elif isinstance(answer, CompiledPrediction):
            print_compiled(console, answer)
        else:
            print_prediction(console, answer)
        print_files(console, trace, html)

    show(json, answer.to_dict, text)


def replay(
    traces: Traces,
    measured: Annotated[
        Path | None,
        Option(
            "--measured",
            metavar="FILE",
            help="Step times measured without a profiler; measured.json beside the traces if there is one.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    trace: Trace = None,
) -> None:
    """Play a run's own kernel times and host gaps through the simulator and compare with the recorded steps."""
    from steptime._api.predict import find_measured
    from steptime._api.predict import replay as replayed
    from steptime._files import check_outputs
    from steptime._report.text import print_replay

    check_outputs({"--trace": trace}, input_files(traces, measured))
    answer = replayed(read(traces), measured=measured or find_measured(traces))
    if trace is not None:
        answer.trace(trace)

    def text(console: Console) -> None:
        print_replay(console, answer)
        print_files(console, trace)

    show(json, answer.to_dict, text)


def inspect(traces: Traces, json: Json = False) -> None:
    """Say what is in the files, what is missing or broken, and what that costs."""
    from steptime._report.inspection import inspect_workload, print_inspection

    workload = read(traces)
    result = inspect_workload(workload)
    show(json, result.to_dict, lambda console: print_inspection(console, workload, result))


def capture(
    function: Annotated[
        str,
        Argument(
            metavar="SCRIPT",
            help="A training script, or MODULE:FUNCTION or FILE.py:FUNCTION: one that makes a model and returns its training "
            "step, is the step, or trains.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="Where to save the workload (.json or .json.gz).")],
    arguments: Annotated[
        list[str] | None, Argument(metavar="[-- ARGS]", help="What the script finds as its arguments.")
    ] = None,
    ranks: Annotated[int | None, Option("--ranks", min=1, help="Number of ranks.", show_default=False)] = None,
    batch: Annotated[int | None, Option("--batch", min=1, help="Samples of all ranks, if the function takes a batch.")] = None,
    limit: Limit = None,
    expert_skew: ExpertSkew = None,
    json: Json = False,
) -> None:
    """Save what a PyTorch training step does, without a GPU: forward, backward and optimiser, op by op."""
    from steptime._api.read import capture as captured
    from steptime._files import check_outputs
    from steptime._program.formats import saved
    from steptime._report.json import dumps
    from steptime._units import size_words

    if not output.name.endswith((".json", ".json.gz")):
        raise InputError(f"{output}: a workload is saved as one file; give a name that ends in .json or .json.gz")
    check_outputs({"-o": output}, ())
    skew_experts(expert_skew)
    announce(function, quiet=json)
    workload = captured(function, arguments=arguments or (), batch=batch, ranks=ranks, limit_s=limit)
    saved.write(workload, output)
    result = _captured_document(workload, output)
    if json:
        print(dumps(result), end="")
        return
    count = workload.world_size
    print(f"{function}: {count} rank{'s' * (count > 1)}, {result['ops']:,} ops, {result['collectives']:,} collectives")
    print(f"peak memory of a rank: {size_words(result['peak_bytes'])}")
    for warning in workload.warnings:
        print(f"note: {warning}")
    print(f"saved in {output}; predict it with steptime predict {output} --platform NAME")


def _captured_document(workload: Workload, output: Path) -> dict[str, Any]:
    from steptime._models.memory.peak import peak_memory

    programs = workload.programs
    peaks = (peak_memory(program, outside_bytes=program.meta.get("outside_bytes", ())) for program in programs)
    return {
        "schema_version": 1,
        "file": str(output),
        "ranks": workload.world_size,
        "programs": len(programs),
        "ops": max(len(program.ops) for program in programs),
        "collectives": max(len(program.collectives) for program in programs),
        "peak_bytes": max(peak.allocated for peak in peaks),
        **Notices.of(workload.warnings).without_headline.to_dict(),
    }
