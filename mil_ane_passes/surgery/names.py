"""Names users give: which of them Core ML takes, and what to say of one that is not there."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from ..core.errors import InputError, suggest_nearest
from ..core.option_spelling import format_option

__all__ = ["check_identifier", "format_known_names", "make_unknown_name_error", "strip_percent"]

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_@]*")
"What the model format calls an identifier."
_RESERVED_WORDS = {
    "any", "bool", "program", "func", "tensor", "list", "dict", "tuple", "true", "false", "string", "bf16", "fp16",
    "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "state",
}
"Words of MIL's text form, which Core ML compiles models to: coremltools renames values that are called so."
_MAX_NAMES_LISTED = 20


def check_identifier(name: str, who: str) -> None:
    """Raises InputError when Core ML takes no value of this name; `who` is the option with what it was given."""
    if not _IDENTIFIER.fullmatch(name):
        raise InputError(f"{who}: {name!r} is no name that Core ML takes; expected letters without accents, digits, _ "
                         "and @, and no digit or @ in front")
    if name in _RESERVED_WORDS:
        raise InputError(f"{who}: {name!r} is a word of the MIL language; expected another name, such as '{name}_'")


def strip_percent(name: str) -> str:
    """Return `name` as the package has it: reports print values as MIL text does, %x; no identifier begins with %."""
    return name.removeprefix("%") or name


def make_unknown_name_error(
    name: str, who: str, names: Iterable[str], what: str = "value", gone: Container[str] = ()
) -> InputError:
    """The error for a name that is not there; `names` are those that are, `gone` what was dropped before."""
    if name in gone:
        return InputError(
            f"{who}: '{name}' goes with what {format_option('drop_output')} takes away; expected one of the two for it"
        )
    return InputError(
        f"{who}: there is no {what} '{name}' in the "
        f"model{suggest_nearest(name, names) or format_known_names(names, what)}"
    )


def format_known_names(names: Iterable[str], what: str) -> str:
    """`"; it has the values a, b"`: what there is, as far as it is not too much to read."""
    listed = sorted(names)
    more = f" and {len(listed) - _MAX_NAMES_LISTED} more" if len(listed) > _MAX_NAMES_LISTED else ""
    return f"; its {what}s are {', '.join(listed[:_MAX_NAMES_LISTED])}{more}" if listed else f"; it has no {what}s"
