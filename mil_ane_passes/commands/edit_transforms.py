"""Options of `edit`: how their texts are parsed, and which transforms each of them makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .options import Metadata, flag

if TYPE_CHECKING:
    from ..transforms.contract import Transform
    from .edit import EditOptions

Names = str | Sequence[str]
"A name, or several."
IoTypes = str | Mapping[str, Names] | None
"A type for all float inputs and outputs, or the names that get one."
_PAIR_EXAMPLES = {"rename": ("var_12", "logits"), "one_hot": ("ids", "rows"), "tile_output": ("logits", "4"),
                  "embedding_file": ("ids", "table.npy")}
"For error messages: an example of the pairs of each option that has them."

Maker = Callable[["EditOptions", Any], "list[Transform]"]
"What makes the transforms of an option from all options and its value."


def edit_flag(make: Maker, *, splits: bool = False, named: bool = False, **settings: Any) -> Metadata:
    """Return the metadata of an option that edits: `make` returns its transforms. Edits run in the order of the fields.

    `splits` is true for options that split a package into several, `named` for options that require a name, for which
    an empty list of names is an error.
    """
    return {**flag(**settings), "edit": make, "splits": splits, "named": named}


def list_given(options: EditOptions) -> list[Field[Any]]:
    """List the requested options that edit, in the order of the edits."""
    edits = [each for each in fields(options) if "edit" in each.metadata]
    return [each for each in edits if _is_given(getattr(options, each.name), each.metadata["named"])]


def _is_given(value: Any, named: bool) -> bool:
    """Return whether an option was requested: a flag, a text, a number, or names."""
    if isinstance(value, (str, int, float)):
        return value is not False
    return bool(value) or named and value is not None


def make_by(module: str, name: str) -> Maker:
    """Return what makes the transform `name` of a module, which gets the option's value unless that is True alone."""
    def make(options: EditOptions, given: Any) -> list[Transform]:
        transform = getattr(import_module(f"..transforms.{module}", __package__), name)
        values = () if given is True else (given,)
        return [transform(*values, function=options.function)]

    return make


def make_for_names(option: str, module: str, name: str, *, renamed: bool = False, everything: str = "") -> Maker:
    """Return what makes a transform of a list of names: as they are after `rename` if `renamed` is true, and none of
    them if `everything` is given alone."""
    def make(options: EditOptions, given: Any) -> list[Transform]:
        names = _list_names(given, option)
        if renamed and options.rename:
            changed = _check_renames(options.rename)
            names = [changed.get(each, each) for each in names]
        return make_by(module, name)(options, [] if names == [everything] else names)

    return make


def make_fixing(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.fix_shape import FixShape
    from .adapt_encoder import evaluate_values

    return [FixShape(given, options.function, evaluate_values if options.verify else None)]


def make_folding(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.fix_shape import FoldSizes
    from .adapt_encoder import evaluate_values

    return [FoldSizes(evaluate_values, options.function)]


def make_merge(options: EditOptions, given: Any) -> list[Transform]:
    names = _list_names(given, "merge_states")
    if len(names) != 1:
        raise InputError(f"{format_option_values('merge_states')}: found {names!r}; expected one name, that of the "
                         "state to make")
    return make_by("merge_states", "MergeStates")(options, names[0])


def make_one_hot(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.token_input import TokenInput

    return [TokenInput(ids, name, one_hot=True, function=options.function) for ids, name in given.items()]


def make_tables(options: EditOptions, given: Any) -> list[Transform]:
    return [table.make_transform(options.function) for table in options.tables]


def make_tiles(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.tile_head import TileHead

    return [TileHead(name, count, options.function) for name, count in given.items()]


def make_io(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.io import Io

    return [Io(dtype, names, options.function) for dtype, names in _group_names_by_type(given).items()]


def make_renames(options: EditOptions, given: Any) -> list[Transform]:
    return make_by("rename", "Rename")(options, _check_renames(given))


def make_parts(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.split_parts import SplitIntoParts

    return [SplitIntoParts(count=given, function=options.function)]


def make_sized_parts(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.split_parts import SplitIntoParts
    from ..utils.byte_size import parse_byte_size

    return [SplitIntoParts(max_bytes=parse_byte_size(given, "max_part_size"), function=options.function)]


def make_dedup(options: EditOptions, given: Any) -> list[Transform]:
    from ..transforms.dedup_weights import DedupWeights

    return [DedupWeights()]


def parse_io(texts: list[list[str]]) -> dict[str, list[str]]:
    """Group the names by type. InputError when a type is used with names and without."""
    found: dict[str, list[str]] = {}
    for dtype, *names in texts:
        if dtype in found and not (names and found[dtype]):
            raise InputError(
                f"{format_option_values('io', dtype)} is given without names more than once; expected it once"
            )
        found[dtype] = [*found.get(dtype, []), *names]
    return found


def parse_pairs(option: str, texts: list[str]) -> dict[str, str]:
    """Parse `A=B` texts to a mapping. InputError for a text that is not of that form, or for two with the same A."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            left, right = _PAIR_EXAMPLES[option]
            raise InputError(f"{format_option_values(option, text)}: expected A=B, such as "
                             f"{format_option_values(option, name or left)}={right}")
        if name in found:
            raise InputError(
                f"{format_option_values(option, text)}: '{name}' is given twice (first as {name}={found[name]})"
            )
        found[name] = value
    return found


def parse_tiles(texts: list[str]) -> dict[str, int]:
    """Parse `NAME=N` texts to a mapping."""
    found = parse_pairs("tile_output", texts)
    for name, count in found.items():
        if not count.isdecimal():
            raise InputError(f"{format_option_values('tile_output', f'{name}={count}')}: expected a number of tiles, "
                             f"such as {format_option_values('tile_output', name)}=4")
    return {name: int(count) for name, count in found.items()}


def _list_names(names: Names, option: str) -> list[str]:
    """Return `names` as a list, without the % that reports print before values. InputError for anything but names."""
    from ..transforms.names import strip_percent

    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if any(not isinstance(name, str) for name in listed):
        raise InputError(
            f"{format_option_values(option)}: found {names!r}; expected the name of a value, or a list of names"
        )
    found = [strip_percent(name) for name in listed]
    if not all(found):
        raise InputError(f"{format_option_values(option)}: found an empty name; expected the name of a value")
    return found


def _check_renames(renames: Mapping[str, str]) -> dict[str, str]:
    from ..transforms.names import strip_percent

    if not isinstance(renames, Mapping) or any(not isinstance(name, str) for pair in renames.items() for name in pair):
        raise InputError(
            f"{format_option_values('rename')}: found {renames!r}; expected a mapping from names to new names"
        )
    return {strip_percent(old): new for old, new in renames.items()}


def _group_names_by_type(io: IoTypes) -> dict[str, list[str]]:
    """Group names by their new type. InputError when two types are requested for one of them."""
    if io is not None and not isinstance(io, (str, Mapping)):
        raise InputError(
            f"{format_option_values('io')}: found {io!r}; expected 'fp16', 'fp32' or a mapping from these to names"
        )
    groups = {} if io is None else {io: []} if isinstance(io, str) else {key: _list_names(io[key], "io") for key in io}
    twice = sorted(set.intersection(*map(set, groups.values()))) if len(groups) > 1 else []
    if twice or (len(groups) > 1 and not all(groups.values())):
        raise InputError(
            f"{format_option_values('io')}: both {' and '.join(groups)} are requested for "
            f"{', '.join(twice) or 'all names'}; "
            "expected each name with one type"
        )
    return groups
