"""`steptime inspect`"""

from __future__ import annotations

from steptime._cli.options import Json, Traces
from steptime._cli.output import print_end, read, stdout


def inspect(traces: Traces, json: Json = False) -> None:
    """Say what is in the files, what is missing or broken, and what that costs."""
    from steptime._report.inspection.inspection import inspect_workload
    from steptime._report.inspection.text import print_inspection
    from steptime._report.json import dumps, inspection_document

    workload = read(traces)
    result = inspect_workload(workload)
    if json:
        print(dumps(inspection_document(result)), end="")
        return
    with stdout() as console:
        print_inspection(console, workload, result)
        print_end(console, None)
