"""`steptime validate sharding`"""

from __future__ import annotations


def validate_sharding_command(*, full: bool, json: bool) -> None:
    """The shipped sharding tasks."""
    from steptime._report.json import dumps
    from steptime_lab.validate.sharding.report import sharding_document, sharding_lines
    from steptime_lab.validate.sharding.sharding import validate_sharding

    result = validate_sharding()
    if json:
        print(dumps(sharding_document(result)), end="")
        return
    print("\n".join(sharding_lines(result, full=full)))
