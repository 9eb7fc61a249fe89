"""The command `mil-ane-passes`: finds the command's file, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .._version import __version__
from ..passes.coremltools_setup import hide_folders_named_as_packages, hide_optional_packages, silence_coremltools
from ..utils.errors import InputError, NotSupported, suggest_nearest
from ..utils.option_spelling import use_command_spelling
from ..utils.text_format import escape_text
from .signals import handle_stop_signals, report_stopped

__all__ = ["main"]

COMMANDS = ("adapt", "batch", "calibrate", "calibrate_plan", "config", "edit", "explain", "lint", "mac_script",
            "passes", "patches", "rewrite", "run", "upgrade", "verify")
"""The modules of the commands. Each has `HELP`, `EXAMPLE`, `add(parser)` and `run(arguments)`, and its docstring is
the description; none of them imports coremltools before it runs. Parsers of commands that may need coremltools' torch
frontend have `uses_frontend`, which says whether they do with given arguments."""
_INVALID_CHOICE = re.compile(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)
_OTHER_NAMES = {"trace": "run --trace", "convert": "mil_ane_passes.convert in Python", "fix": "lint --fix"}
"What to use for words that are functions or options, and no commands."
_SIGPIPE_EXIT_CODE = 128 + 13
"Exit code that a shell sees of a program ended by SIGPIPE; Windows has no such signal."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 findings or not verified, 2 could not run, 128+n stopped."""
    if argv is not None:
        return _run_command(_build_parser(argv).parse_args(argv))
    with handle_stop_signals():
        return _run_as_process()


_SPIN_COUNT = "1000"
"""Turns for which a thread of torch waits actively, in place of 300,000: what libgomp itself uses if a program has more
threads than processors. Beside one other busy process on two processors, a call of a vocoder took 0.08 s instead of
2.4 s; on an idle machine 0.039 s instead of 0.034 s."""


def _keep_threads_from_spinning() -> None:
    """Set libgomp's `GOMP_SPINCOUNT`, unless the user has set how threads wait; it is read when torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def _run_as_process() -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us, as with `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        arguments = _build_parser(sys.argv[1:]).parse_args()
        _keep_threads_from_spinning()
        atexit.register(gc.freeze)  # a garbage collection of a model's ops at exit is slow
        if getattr(arguments, "keeps_all", False):
            gc.disable()
        if getattr(arguments, "uses_frontend", lambda arguments: False)(arguments):
            hide_folders_named_as_packages()
        else:
            hide_optional_packages()
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the locale cannot encode
        return _run_command(arguments)
    except KeyboardInterrupt as stopped:
        return report_stopped(stopped)


def _run_command(arguments: argparse.Namespace) -> int:
    try:
        _check_working_folder()
        with silence_coremltools(), use_command_spelling():
            code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except NotSupported as error:
        proving = getattr(arguments, "proves", False)
        _print_error(f"{'not verified: ' if proving else ''}{error}")
        return 1 if proving else 2
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does: exit as if ended by SIGPIPE
        _discard_output()
        return _SIGPIPE_EXIT_CODE
    except KeyboardInterrupt as stopped:  # also for callers of main(argv)
        return report_stopped(stopped)
    except Exception as error:
        from .output import format_error

        _print_error(format_error(error))
        if isinstance(error, OSError):
            _discard_output()
    return 2


def _check_working_folder() -> None:
    """Raise InputError if the working directory of this process was deleted: libraries of torch would end the process
    without a message, and relative paths would no longer resolve."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the working directory of this process was deleted; change to another (cd) and run "
                         "again") from None


def _print_error(words: str) -> None:
    """Print an error on stderr, in one line; the exit code alone has to tell if stderr cannot be written."""
    try:
        print(f"mil-ane-passes: {escape_text(words)}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _discard_output() -> None:
    """Discard output that cannot be printed, so that it does not cause a second error at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """Argument parser that names the nearest option or choice, and has its options added when it is used.

    An option that a command lacks is reported with the command's usage.
    """

    fill: Callable[[argparse.ArgumentParser], None] | None = None
    "Adds the options."

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self.fill is not None:
            self.fill(self)
            self.fill = None
        found, rest = super().parse_known_args(args, namespace)
        unknown = next((each for each in rest if each.startswith("-")), None)
        if unknown is not None:
            name = unknown.partition("=")[0]
            super().error(
                escape_text(f"no option {name}; {self.prog} --help lists the options{self._suggest_option(name)}"))
        rest = self._take_positionals(found, rest)
        if rest:  # here, with the usage of the command; argparse would print that of the program
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _suggest_option(self, name: str) -> str:
        """Return the text that suggests an option: one that has `name` as a value (`--html`), or the nearest."""
        for action in self._actions:
            if action.option_strings and action.choices is not None and name.lstrip("-") in action.choices:
                return f"; did you mean '{action.option_strings[0]} {name.lstrip('-')}'?"
        # Dashes, which all options have in common, do not count as similar.
        known = {option.lstrip("-"): option for action in self._actions for option in action.option_strings}
        return suggest_nearest(name.lstrip("-"), known, known.__getitem__)

    def _take_positionals(self, found: argparse.Namespace, rest: list[str]) -> list[str]:
        """Add arguments after options to the last positional argument, which argparse closes at the first option:
        `lint a --target m4 b`. Returns what is left."""
        last = next((action for action in reversed(self._actions) if not action.option_strings), None)
        if last is None or not rest or last.type is not None:
            return rest
        if last.nargs == "+":
            setattr(found, last.dest, [*getattr(found, last.dest), *rest])
            return []
        if last.nargs == "?" and getattr(found, last.dest) is None:
            setattr(found, last.dest, rest[0])
            return rest[1:]
        return rest

    def error(self, message: str) -> NoReturn:
        if message.endswith(" required: COMMAND"):
            self.print_help(sys.stderr)
            self.exit(2)
        chosen = _INVALID_CHOICE.fullmatch(message)
        near = suggest_nearest(chosen[1], re.findall(r"[\w-]+", chosen[2])) if chosen else ""
        if chosen and chosen[0].startswith("argument COMMAND") and chosen[1] in _OTHER_NAMES:
            near = f"; did you mean '{_OTHER_NAMES[chosen[1]]}'?"
        super().error(escape_text(f"{message}; {self.prog} --help tells more{near}"))


def _build_parser(argv: Sequence[str] = ()) -> Parser:
    """Build the parser; of one command alone where `argv` begins with it, as the import of all takes long."""
    from .output import format_example  # imported here, where stop signals are handled

    parser = Parser(
        prog="mil-ane-passes",
        description="Make Core ML ML Programs run correctly, entirely and fast on the Apple Neural Engine.",
        epilog="Exit codes: 0 done (or nothing to do), 1 findings or not verified equivalent, 2 could not run, 128 + "
               "N stopped by signal N. The --help of each command has an example.",
    )
    parser.add_argument("--version", action="version", version=f"mil-ane-passes {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    called = argv[0].replace("-", "_") if argv and "_" not in argv[0] else ""
    for name in [called] if called in COMMANDS else COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        commands.add_parser(name.replace("_", "-"), help=module.HELP, description=module.__doc__,
                            epilog=format_example(module.EXAMPLE)).fill = module.add
    return parser
