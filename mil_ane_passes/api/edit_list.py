"""Conversion of the arguments of `edit` to edits, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..transforms.contract import Edit
from ..transforms.dedup_weights import DedupWeights
from ..transforms.drop_output import DropOutput
from ..transforms.expose import Expose
from ..transforms.fix_shape import FixShape
from ..transforms.io import Io
from ..transforms.names import strip_percent
from ..transforms.rename import Rename
from ..transforms.split_at import SplitAt
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values

__all__ = ["FixShapes", "IoTypes", "Names", "make_edits"]

_EDIT_OPTIONS = ("fix_shape", "expose", "drop_output", "io", "rename", "split_at", "dedup_weights")
Names = str | Sequence[str]
"A name, or several."
IoTypes = str | Mapping[str, Names] | None
"A type for all float inputs and outputs, or the names that get one."

Shapes = Mapping[str, Sequence[int]]
"New shapes of inputs, by input name."
FixShapes = str | Sequence[str] | Shapes | Sequence[Shapes] | Mapping[str, Shapes]
"Texts in the command's syntax, one set of shapes, one set for each function to make, or sets by function name."


def make_edits(
    function: str | None, *, fix_shape: FixShapes | None = None, expose: Names = (), drop_output: Names = (),
    io: IoTypes = None, rename: Mapping[str, str] | None = None, split_at: Names = (), dedup_weights: bool = False,
) -> list[Edit]:
    """Make the requested edits. Raises InputError if there are none, or if two contradict each other.

    Names are those of the source. Edits that make functions come first, then those that change outputs and types, then
    renames, and last the edits of the entire package.
    """
    edits: list[Edit] = []
    if fix_shape:
        edits.append(FixShape(fix_shape, function))
    if expose:
        edits.append(Expose(_list_names(expose, "expose"), function))
    if drop_output:
        edits.append(DropOutput(_list_names(drop_output, "drop_output"), function))
    edits += [Io(dtype, names, function) for dtype, names in _group_names_by_type(io).items()]
    renamed = _check_renames(rename) if rename else {}
    if renamed:
        edits.append(Rename(renamed, function))
    if split_at:
        edits.append(SplitAt([renamed.get(name, name) for name in _list_names(split_at, "split_at")], function))
    if dedup_weights:
        edits.append(DedupWeights())
    if not edits:
        raise InputError(
            "nothing to edit was asked for; expected at least one of "
            f"{', '.join(map(format_option_values, _EDIT_OPTIONS[:-1]))} and {format_option_values(_EDIT_OPTIONS[-1])}"
        )
    return edits


def _list_names(given: Names, option: str) -> list[str]:
    """Return `given` as a list, without the % that reports print before values. InputError for anything but names."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if any(not isinstance(name, str) for name in names):
        raise InputError(
            f"{format_option_values(option)}: found {given!r}; expected the name of a value, or a list of names"
        )
    return [strip_percent(name) for name in names]


def _check_renames(given: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(given, Mapping) or any(not isinstance(name, str) for pair in given.items() for name in pair):
        raise InputError(
            f"{format_option_values('rename')}: found {given!r}; expected a mapping from names to new names"
        )
    return {strip_percent(old): new for old, new in given.items()}


def _group_names_by_type(io: IoTypes) -> dict[str, list[str]]:
    """Group names by their new type. InputError when two types are requested for one of them."""
    if io is not None and not isinstance(io, (str, Mapping)):
        raise InputError(
            f"{format_option_values('io')}: found {io!r}; expected 'fp16', 'fp32' or a mapping from these to names"
        )
    given = {} if io is None else {io: []} if isinstance(io, str) else {key: _list_names(io[key], "io") for key in io}
    twice = sorted(set.intersection(*map(set, given.values()))) if len(given) > 1 else []
    if twice or (len(given) > 1 and not all(given.values())):
        raise InputError(
            f"{format_option_values('io')}: both {' and '.join(given)} are asked for "
            f"{', '.join(twice) or 'all names'}; "
            "expected each name with one type"
        )
    return given
