"""The command `mil-ane-passes`: finds the command's file, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import logging
import os
import pkgutil
import sys
from collections.abc import Sequence

from .. import cli
from .._version import __version__
from ..core.errors import AnePassesError, NotSupported
from ..core.host import quiet
from ..core.spelling import by_command
from .parsing import Parser
from .stopping import said, stoppable

__all__ = ["main"]

_NO_READER = 128 + 13
"What a shell sees of a program that SIGPIPE ends; there is no such signal on Windows."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 findings or not proved, 2 could not run, 128+n stopped."""
    if argv is not None:
        return _run(_parser().parse_args(argv))
    with stoppable():
        return _own_process()


def _own_process() -> int:
    try:
        arguments = _parser().parse_args()
        atexit.register(gc.freeze)  # to look for garbage among a model's ops as the process ends takes long
        if getattr(arguments, "keeps_all", False):
            gc.disable()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the locale has no letters for
        return _run(arguments)
    except KeyboardInterrupt as stopped:
        return said(stopped)


def _run(arguments: argparse.Namespace) -> int:
    try:
        with quiet(), by_command():
            code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except NotSupported as error:
        proving = getattr(arguments, "proves", False)
        print(f"mil-ane-passes: {'not proved: ' if proving else ''}{error}", file=sys.stderr)
        return 1 if proving else 2
    except AnePassesError as error:
        print(f"mil-ane-passes: {error}", file=sys.stderr)
    except BrokenPipeError:  # who reads has what they wanted, as after `| head`: ended as that signal ends others
        _say_no_more()
        return _NO_READER
    except OSError as error:
        print(f"mil-ane-passes: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
        _say_no_more()
    except RecursionError:
        print("mil-ane-passes: the model's blocks are nested too deep for this machine's Python", file=sys.stderr)
    except KeyboardInterrupt as stopped:  # also for a caller who gave the arguments
        return said(stopped)
    except Exception as error:  # the last resort: a fault of ours must not look like the user's, nor show a traceback
        logging.getLogger("mil_ane_passes").debug("internal error", exc_info=True)
        print(f"mil-ane-passes: internal error ({type(error).__name__}: {error}); nothing was written; please report "
              "it with the package or the line that leads to it", file=sys.stderr)
    return 2


def _say_no_more() -> None:
    """What is still to be printed goes nowhere if it cannot be printed: not a second error as the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    from .output import example  # here, where a signal that comes meanwhile is answered

    parser = Parser(
        prog="mil-ane-passes",
        description="Make Core ML ML Programs run correctly, whole and fast on the Apple Neural Engine.",
        epilog="Exit codes: 0 done (or nothing to do), 1 findings or not proved equal, 2 could not run, 128 + its "
               "number when a signal stopped it. A command's --help has an example.",
    )
    parser.add_argument("--version", action="version", version=f"mil-ane-passes {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in pkgutil.iter_modules(cli.__path__):
        if module.name.startswith("cmd_"):
            command = importlib.import_module(f"{cli.__name__}.{module.name}")
            command.add(commands.add_parser(
                module.name.removeprefix("cmd_").replace("_", "-"), help=command.HELP, description=command.__doc__,
                epilog=example(command.EXAMPLE)))
    return parser
