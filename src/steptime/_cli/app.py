"""The `steptime` command: its sub-commands, and how whatever goes wrong ends in one line and an exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Annotated

import typer

from steptime import __version__
from steptime._cli.calibrate import calibrate
from steptime._cli.compare import WithOwnArguments, compare
from steptime._cli.completion import VARIABLE, complete
from steptime._cli.explore import explore
from steptime._cli.parsing import SteptimeCommand
from steptime._cli.plan import plan
from steptime._cli.platforms import fabric, platforms
from steptime._cli.shard import shard
from steptime._cli.steps import capture, inspect, predict, replay
from steptime._cli.sweep import sweep
from steptime._cli.whatif import diff, whatif
from steptime._garbage import no_last_collection
from steptime.errors import InputError, SteptimeError, one_line

BAD_INPUT = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BUG = 1  # as Python leaves with a traceback
DEBUG = "STEPTIME_DEBUG"  # a variable: set, a bug ends in its traceback
LAB_COMMANDS = ("adopt", "measure", "fit", "validate")
LAB_INSTALLED = find_spec("steptime_lab") is not None

_COMPILE, _COMPILING = "--compile", ("predict", "plan")  # commands whose option needs no value
_MODE = re.compile(r"off|default|reduce-overhead|max-autotune[\w-]*")

app = typer.Typer(
    name="steptime",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=None
    if LAB_INSTALLED
    else f"{', '.join(LAB_COMMANDS)}: part of the lab, which is not installed (pip install ./lab).",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"steptime {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def steptime(
    context: typer.Context,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """How long a training step takes on a multi-GPU machine, and why: from a config, a script or traces, without a GPU."""
    if context.invoked_subcommand is None:
        print(context.get_help())


for _command in (predict, replay, inspect, capture, platforms, fabric, shard, plan, sweep, compare, explore, whatif, diff):
    app.command(cls=WithOwnArguments if _command is compare else SteptimeCommand)(_command)


def lab_commands() -> dict[str, Callable[..., None]]:
    """The lab's commands where it is installed, else a line that says how to get it."""
    if not LAB_INSTALLED:
        return {name: _absent(name) for name in LAB_COMMANDS}
    lab = import_module("steptime_lab.cli")
    return {name: getattr(lab, name) for name in LAB_COMMANDS}


def _absent(name: str) -> Callable[..., None]:
    def command(context: typer.Context) -> None:
        raise InputError(f"{context.command.name} is part of the lab, which is not installed; pip install ./lab in a clone")

    command.__doc__ = f"Part of the lab, which is not installed ({name})."
    return command


# Their options are parsed where they also work without this command line: in the measuring harness.
_OWN_OPTIONS = ("adopt", "measure")
_AS_GIVEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command(context_settings=_AS_GIVEN, add_help_option=False)(calibrate)
for _name, _command in lab_commands().items():
    if _name in _OWN_OPTIONS or not LAB_INSTALLED:
        app.command(_name, context_settings=_AS_GIVEN, add_help_option=False, hidden=not LAB_INSTALLED)(_command)
    else:
        app.command(_name)(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code. A bug of steptime ends in one line too, unless it is debugged."""
    _open_closed_streams()
    no_last_collection()
    try:
        code = run(arguments)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        frame = extract_tb(error.__traceback__)[-1]
        _fail(
            f"this is a bug in steptime: {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} ({error}); "
            f"{DEBUG}=1 shows the traceback, please report it with your input"
        )
        code = BUG
    sys.exit(code)


def _open_closed_streams() -> None:
    """Give stdout and stderr somewhere to go where the caller closed them, so that no other file gets their numbers."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - open as long as the process


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of one run. What a user can cause becomes one line on stderr."""
    if VARIABLE in os.environ:
        complete(app)
    try:
        code = app(with_modes(sys.argv[1:] if arguments is None else arguments), prog_name="steptime", standalone_mode=False)
        sys.stdout.flush()
    except SteptimeError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("out of memory; give fewer files at once, or use a machine with more of it")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # Whoever read the output has gone (Rich leaves on that by itself); what is buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        text = getattr(error, "format_message", None)  # how the parser's own errors say what was wrong with the arguments
        if text is None:
            raise
        return _fail(f"{text()} (see steptime --help)")
    return code if isinstance(code, int) else 0


def with_modes(arguments: Sequence[str]) -> list[str]:
    """Arguments in which `--compile` has a mode: the default one where none is given. A script's own follow `--`."""
    result: list[str] = []
    own = False
    for place, argument in enumerate(arguments):
        own = own or argument == "--"
        bare = argument == _COMPILE and not own and arguments[0] in _COMPILING
        followed = place + 1 < len(arguments) and _MODE.fullmatch(arguments[place + 1])
        result.append(f"{_COMPILE}=default" if bare and not followed else argument)
    return result


def _fail(message: str) -> int:
    print(f"steptime: error: {one_line(message)}", file=sys.stderr)
    return BAD_INPUT
