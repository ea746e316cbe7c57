"""How commands read their arguments: an option that takes one value is given once."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from typer.core import TyperCommand

from steptime.errors import InputError


class SteptimeCommand(TyperCommand):
    """Refuses an option that is given twice, where the parser would take the last value and forget the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Count names of options before the parser drops all but the last; what follows `--` belongs to a script."""
        given = [argument.partition("=")[0] for argument in takewhile(lambda argument: argument != "--", args)]
        for parameter in self.params:
            single = parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
            count = sum(given.count(name) for name in parameter.opts)
            if single and count > 1 and not getattr(parameter, "multiple", False):
                several = ", several values with commas between" if ",..." in str(parameter.metavar) else ""
                raise InputError(f"{parameter.opts[0]} is given {count} times; give it once{several}")
        return super().parse_args(ctx, args)
