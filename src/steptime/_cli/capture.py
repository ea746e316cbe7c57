"""`steptime capture`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steptime._cli.options import Json

if TYPE_CHECKING:
    from steptime._program.workload import Workload

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function that makes a model and returns its training step, or is the step; file.py:function too.",
        show_default=False,
    ),
]


def capture(
    function: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to save the workload (.json or .json.gz).")
    ],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks.")] = 1,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples of all ranks, if the function takes a batch.")
    ] = None,
    json: Json = False,
) -> None:
    """Save what a PyTorch training step does, without a GPU: forward, backward and optimiser, op by op."""
    from steptime._capture.command import captured
    from steptime._program.formats import saved
    from steptime._report.json import dumps
    from steptime.errors import InputError

    if not output.name.endswith((".json", ".json.gz")):
        raise InputError(f"{output}: a workload is saved as one file; give a name that ends in .json or .json.gz")
    workload = captured(function, batch=batch, ranks=ranks)
    saved.write(workload, output)
    result = _found(workload, output)
    if json:
        print(dumps(result), end="")
        return
    print(f"{function}: {ranks} rank{'s' * (ranks > 1)}, {result['ops']} ops, {result['collectives']} collectives")
    print(f"peak memory of a rank: {result['peak_bytes'] / 1e9:.2f} GB")
    for warning in workload.warnings:
        print(f"note: {warning}")
    print(f"saved in {output}; predict it with steptime predict {output} --platform NAME")


def _found(workload: Workload, output: Path) -> dict[str, Any]:
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
        "warnings": list(workload.warnings),
    }
