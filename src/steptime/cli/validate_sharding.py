"""`steptime validate sharding`"""

from __future__ import annotations


def validate_sharding_command(*, full: bool, json: bool) -> None:
    """The shipped sharding tasks."""
    from steptime.report.json import dumps
    from steptime.validate.sharding import validate_sharding
    from steptime.validate.sharding_report import sharding_document, sharding_lines

    found = validate_sharding()
    if json:
        print(dumps(sharding_document(found)), end="")
        return
    print("\n".join(sharding_lines(found, full=full)))
