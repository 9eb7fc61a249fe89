"""Options of commands: one dataclass per command, from which flags, Python keywords and batch settings are derived.

A field's name, type and default are those of the keyword in Python. `argument(...)` or `flag(...)` in its metadata adds
it to the command line, where the string below the field is the help text.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..passes.coremltools_setup import freeze_imported_objects
from ..passes.options import read_field_docs
from ..passes.targets import parse_target
from ..utils.budget import DEFAULT_MAX_STEPS
from ..utils.errors import AnePassesError, InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized
from ..utils.option_spelling import format_option_values

__all__ = [
    "DEFAULT_SEEDS",
    "FEEDS",
    "LINK",
    "MAX_MEMORY",
    "MAX_SECONDS",
    "MAX_STEPS",
    "NOT_IN_BATCH",
    "RANGES",
    "SEEDS",
    "Progress",
    "add_format_option",
    "add_options",
    "argument",
    "command",
    "flag",
    "get_batch_options",
    "ignore_progress",
    "positive_int",
    "read_options",
]

P = ParamSpec("P")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741

Progress = Callable[[str], None]
Metadata = Mapping[str, Any]

DEFAULT_SEEDS = 3
"Number of seeded random feeds, for the equivalence check and for rules that accept such feeds."
NOT_IN_BATCH: Metadata = {"batch": False}
"Metadata of a keyword that is neither a flag nor a setting of `batch`."
SEEDS: Metadata = {"count": True, "most": 10_000}
"Metadata of a number of seeds: at least 1, and no more than there is memory for their feeds."


def ignore_progress(text: str) -> None:
    """Ignore a progress message."""


@dataclass(frozen=True)
class _Flag:
    """The command line form of a field. `names` is empty for a flag that is named after its field.

    `parse` converts what argparse found, when the command runs; `check` raises InputError for a path that the command
    cannot read; `settings` are argparse's own.
    """

    names: tuple[str, ...]
    parse: Callable[[Any], Any] | None
    help: str
    check: Callable[[Path], None] | None
    settings: Mapping[str, Any]


def argument(metavar: str, *, check: Callable[[Path], None] | None = None, **settings: Any) -> Metadata:
    """Describe a field that is a positional argument on the command line.

    `check` is called with a path, in Python, too, before coremltools is imported.
    """
    return {"flag": _Flag((metavar,), None, "", check, {"metavar": metavar, **settings}), "batch": False}


def flag(
    *names: str, batch: bool = True, parse: Callable[[Any], Any] | None = None, help: str = "",
    check: Callable[[Path], None] | None = None, **settings: Any
) -> Metadata:
    """Describe a field that is a flag on the command line; `help` is for flags that several commands share, where
    the field has no text of its own; `check` as for `argument`."""
    return {"flag": _Flag(names, parse, help, check, settings), "batch": batch}


def positive_int(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number, at least 1")
    return number


def _parse_limit(name: str, kind: type[float], text: str) -> float | None:
    if text == "none":
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise InputError(
            f"{format_option_values(name, text)}: expected a number above 0, or none (no limit)"
        ) from error


def _parse_ranges(text: str) -> Any:
    from ..equivalence.user_inputs import parse_ranges

    return parse_ranges(text)


def _read_feeds(paths: list[str]) -> Any:
    from ..utils.npz import read_arrays  # imports numpy, which takes longer than most options

    return [read_arrays(path) for path in paths]


FEEDS = flag(metavar="F.npz", action="append", parse=_read_feeds,
             help="inputs by name; repeatable")
RANGES = flag(metavar="LIST", parse=_parse_ranges,
              help="value range per input, inclusive, e.g. 'image=0:1,ids=0:29999'")
MAX_SECONDS = flag(metavar="S", parse=lambda text: _parse_limit("max_seconds", float, text),
                   help="stop after S seconds of running the model, all runs together (default: none, no limit)")
MAX_MEMORY = flag(metavar="SIZE", help="memory limit of runs, such as 8GB: half of it for values, a quarter for "
                                       "cached weights (default: the memory of the machine)")
MAX_STEPS = flag(metavar="N", parse=lambda text: _parse_limit("max_steps", int, text),
                 help=f"stop a run after N loop steps, or none: no limit (default: {DEFAULT_MAX_STEPS})")
LINK = flag(help="hard-link unchanged files where they cannot be cloned: the packages then share them, so never edit "
                 "one in place")


def add_format_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format: text (default) or "
                                                                                   "json")


def add_options(parser: argparse.ArgumentParser, options: type, *, batch: bool = False) -> None:
    """Add the flags of an options dataclass to a parser; with `batch`, those that `batch` has for each package.

    An option that is not on the command line is None there, so that the default is stated once, in the dataclass.
    """
    docs = read_field_docs(options)
    for each, form in _iterate_flags(options, batch):
        settings: dict[str, Any] = {"default": None, "help": (docs.get(each.name) or form.help).replace("%", "%%")}
        names = form.names or (f"--{each.name.replace('_', '-')}",)
        if not names[0].startswith("-"):
            names = (each.name,)
        elif each.default is False:
            settings |= {"action": "store_true", "dest": each.name}
        elif each.default is True:
            settings |= {"action": argparse.BooleanOptionalAction, "dest": each.name}
        else:
            settings["dest"] = each.name
        parser.add_argument(*names, **settings, **form.settings)


def read_options(
    arguments: argparse.Namespace, options: type, *, batch: bool = False, unparsed: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options on the command line as keywords of the dataclass; those in `unparsed` stay as they are.

    `batch` as for `add_options`.
    """
    found = {}
    for each, form in _iterate_flags(options, batch):
        value = getattr(arguments, each.name, None)
        if value is not None:
            found[each.name] = value if form.parse is None or each.name in unparsed else form.parse(value)
    return found


def _iterate_flags(options: type, batch: bool) -> Iterator[tuple[Field[Any], _Flag]]:
    for each in fields(options):
        if "flag" in each.metadata and (each.metadata["batch"] or not batch):
            yield each, each.metadata["flag"]


def get_batch_options(options: type) -> dict[str, Any]:
    """Return the options that `batch` has for each package, with their defaults."""
    return {each.name: None if each.default is MISSING else each.default
            for each in fields(options) if each.metadata.get("batch", True)}


def command(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Make a public function of a function of an options dataclass: its parameters are the fields.

    It is synchronized, and coremltools is imported before it is called: here, as the parser of the command line needs
    the dataclass without waiting for that.
    """

    def decorate_command(function: Callable[[O], R]) -> Callable[P, R]:
        @synchronized
        @wraps(function)
        def call_command(*arguments: P.args, **named: P.kwargs) -> R:
            try:
                made = options(*arguments, **named)
            except TypeError as error:  # wrong arguments: name the function, not the dataclass
                text = _uncount_self(str(error))
                raise TypeError(text.replace(f"{options.__name__}.__init__", function.__name__)) from None
            if isinstance(target := getattr(made, "target", None), str):
                parse_target(target)  # a wrong name is reported without waiting for the import
            _check_counts(made)
            check_paths(made)
            _import_coremltools()
            try:
                return function(made)
            except AnePassesError:
                raise
            except (AttributeError, TypeError, ValueError):
                _refuse_wrong_kinds(made)
                raise

        signature = inspect.signature(options)
        hints = {name: each.annotation for name, each in signature.parameters.items()}
        returned = function.__annotations__.get("return")
        vars(call_command)["__signature__"] = signature.replace(return_annotation=returned)
        call_command.__annotations__ = {**hints, "return": returned}
        return call_command

    return decorate_command


def check_paths(options: Any) -> None:
    """Raise InputError for the first path among the options that cannot be read, without importing coremltools."""
    for each in fields(options):
        form, value = each.metadata.get("flag"), getattr(options, each.name)
        if form is not None and form.check is not None and isinstance(value, (str, PathLike)) and os.fspath(value):
            form.check(Path(value))


def _check_counts(options: Any) -> None:
    """Raise InputError for a count that is no whole number of at least 1, as `positive_int` does on the command line.
    """
    for each in fields(options):
        form, value = each.metadata.get("flag"), getattr(options, each.name)
        is_count = "count" in each.metadata or (form is not None and form.settings.get("type") is positive_int)
        most = each.metadata.get("most", math.inf)
        if is_count and value is not None and not (_KINDS["int"](value) and 1 <= value <= most):
            expected = "at least 1" if math.isinf(most) else f"from 1 to {most}"
            raise InputError(f"{each.name}: found {_shorten_repr(repr(value))}; expected a whole number, {expected}",
                             option=each.name)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool",
    "int": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value),
    "PathLike": lambda value: hasattr(value, "__fspath__"),
    "Mapping": lambda value: isinstance(value, Mapping),
    "dict": lambda value: isinstance(value, dict),
    "Sequence": lambda value: isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)) and all(
        isinstance(each, str) for each in value),
    "Progress": callable,
}
"By the name of a type in an annotation: whether a value is one. A sequence is one of texts in all options."
_SPOKEN_KINDS = {
    "str": "a text", "bool": "True or False", "int": "a whole number", "float": "a number", "PathLike": "a path",
    "Mapping": "a mapping by name", "dict": "a dict by name", "Sequence": "texts", "None": "None",
    "Progress": "a function of a text"}


_MAX_REPR = 60
"The most characters of a wrong value in a message."


def _refuse_wrong_kinds(options: Any) -> None:
    """Raise InputError for the first option whose value is of no type of its annotation.

    Called where a command failed: options are duck-typed otherwise. Annotations by an alias are not looked into.
    """
    for each in fields(options):
        kinds = [part.partition("[")[0].strip().rpartition(".")[2] for part in str(each.type).split("|")]
        value = getattr(options, each.name)
        if all(kind in _KINDS for kind in kinds) and not any(_KINDS[kind](value) for kind in kinds):
            expected = " or ".join(_SPOKEN_KINDS[kind] for kind in kinds)
            raise InputError(f"{each.name}: found {_shorten_repr(repr(value))}; expected {expected}",
                             option=each.name) from None


def _shorten_repr(text: str) -> str:
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


def _uncount_self(text: str) -> str:
    """Lower the counts of positional arguments in Python's message by the `self` of a dataclass's `__init__`."""
    if " takes " not in text:
        return text
    lowered = re.sub(r"\b\d+(?= to | positional | were | was )", lambda found: str(int(found[0]) - 1), text)
    return lowered.replace(" 1 positional arguments", " 1 positional argument")


def _import_coremltools() -> None:
    with pause_garbage_collection():
        import coremltools  # noqa: F401
    freeze_imported_objects()
