"""Names of values: the names in a function, identifiers that Core ML accepts, and errors for unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

from coremltools.converters.mil.mil import Block, Function, Var, types

from ..package.origin import get_origin
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import format_option

__all__ = ["check_identifier", "collect_names", "find_value", "format_known_names", "get_interface_vars",
           "iterate_values", "make_unknown_name_error", "strip_percent"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_@]*")
"Identifiers as the model format defines them."
_RESERVED_WORDS = {
    "any", "bool", "program", "func", "tensor", "list", "dict", "tuple", "true", "false", "string", "bf16", "fp16",
    "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "state",
}
"Reserved words of MIL's text form, to which Core ML compiles models: coremltools renames values with such names."
_MAX_NAMES_LISTED = 20
_MAX_SIMILAR = 3
"More similar names than these are mostly numbered values, of which none is meant."


def check_identifier(name: str, who: str) -> None:
    """Raise InputError if Core ML does not accept `name` for a value; `who` is the option with its argument."""
    if not _IDENTIFIER.fullmatch(name):
        raise InputError(f"{who}: {name!r} is not a name that Core ML accepts; expected letters without accents, "
                         "digits, _ and @, and no digit or @ in front")
    if name in _RESERVED_WORDS:
        raise InputError(f"{who}: {name!r} is a reserved word of the MIL language; expected another name, such as "
                         f"'{name}_'")


def strip_percent(name: str) -> str:
    """Return `name` without a leading %, which reports print before values; no identifier begins with it."""
    return name.removeprefix("%") or name


def make_unknown_name_error(
    name: str, who: str, names: Iterable[str], what: str = "value", gone: Mapping[str, str] | None = None,
    functions: Iterable[Function] = (),
) -> InputError:
    """Make the error for an unknown name; `names` are the known names, `gone` maps names that an earlier edit removed
    to its option.

    If `names` has all values of `functions`, only inputs, outputs, states and similar names are listed: most of the
    others are constants and values that the converter has numbered.
    """
    if gone and name in gone:
        how = "removed" if gone[name] == "drop_output" else "replaced"
        return InputError(
            f"{who}: '{name}' is {how} by {format_option(gone[name])} already; expected only one of the two"
        )
    names = list(names)
    functions = list(functions)
    near = suggest_nearest(name, names) or _suggest_longer(name, names) or (
        f"{_format_interface(functions)}{_format_similar(name, names)}" if functions else
        format_known_names(names, what))
    return InputError(f"{who}: there is no {what} '{name}' in the model{near}")


def _suggest_longer(name: str, names: Iterable[str]) -> str:
    """Suggest one of `names` that begins with `name_`: coremltools appends `_cast_fp16` where it converts to fp16.

    If there is no such name, the shortest is suggested; most others are attributes of the op, such as `name_pad_0`.
    """
    longer = min((each for each in names if each.startswith(f"{name}_")),
                 key=lambda each: (not each.endswith("_cast_fp16"), len(each), each), default="")
    return f"; did you mean '{longer}'?" if longer else ""


def format_known_names(names: Iterable[str], what: str) -> str:
    """Format at most 20 known names for an error, such as `"; its values are a, b"`."""
    listed = sorted(names)
    return f"; its {what}s are {_join_names(listed)}" if listed else f"; it has no {what}s"


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    return f"{', '.join(names[:_MAX_NAMES_LISTED])}{more}"


def _format_interface(functions: Iterable[Function]) -> str:
    """Format the inputs, outputs and states of functions: `" (inputs: x; outputs: y)"`."""
    found: dict[str, dict[str, None]] = {"inputs": {}, "outputs": {}, "states": {}}
    for function in functions:
        for name, var in function.inputs.items():
            found["states" if types.is_state(var.sym_type) else "inputs"][name] = None
        found["outputs"] |= dict.fromkeys(var.name for var in function.outputs)
    return f" ({'; '.join(f'{kind}: {_join_names(list(names))}' for kind, names in found.items() if names)})"


def _format_similar(name: str, names: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, sorted(names), n=_MAX_SIMILAR)
    return f"; similar names: {', '.join(similar)}" if similar else ""


def iterate_values(block: Block) -> Iterator[Var]:
    """Yield the values of a function or block that have a name in the file, including those inside nested blocks."""
    yield from block.inputs.values() if isinstance(block, Function) else block.inputs
    for op in block.operations:
        if getattr(op, "synthetic", False):
            continue
        origin = get_origin(op)
        yield from op.outputs if origin is None else op.outputs[: len(origin.names)]
        for inner in op.blocks:
            yield from iterate_values(inner)


def collect_names(function: Function) -> set[str]:
    """Return the names of all values of a function, including those inside nested blocks."""
    return {var.name for var in iterate_values(function)}


def find_value(function: Function, name: str) -> Var | None:
    """Return the input, or the output of an op in the outermost block, that is called `name`; None if not found."""
    if name in function.inputs:
        return function.inputs[name]
    found = (var for op in function.operations if not getattr(op, "synthetic", False) for var in op.outputs)
    return next((var for var in found if var.name == name), None)


def get_interface_vars(function: Function) -> dict[str, Var]:
    """Return the inputs, states and outputs of a function by name."""
    return {**function.inputs, **{var.name: var for var in function.outputs}}
