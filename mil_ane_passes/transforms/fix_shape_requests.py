"""Arguments of `--fix-shape`: shapes for inputs, in one function or in several that are made of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, format_option_values
from .names import check_identifier, strip_percent

__all__ = ["Shape", "Variant", "format_shape", "make_request_error", "name_variants", "parse_variants"]

Shape = tuple[int, ...]


def make_request_error(words: str) -> InputError:
    """Make the error for a request that cannot be fulfilled."""
    return InputError(f"{format_option_values('fix_shape')}: {words}")


@dataclass
class Variant:
    """One function to make: its name, None if the user gave none, and the shapes of inputs by name."""

    name: str | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)


def parse_variants(given: Any) -> list[Variant]:
    """Parse the requested functions, in order.

    `given` is a list of texts in the command's format; a mapping from input to shape; a list of such mappings (a
    function for each); or a mapping from a function's name to such a mapping. Raises InputError for anything else, and
    where it is ambiguous which inputs of a function are to be fixed.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        inner = [value for value in given.values() if isinstance(value, Mapping)]
        if not inner:
            return [Variant(None, _parse_shapes(given))]
        return [Variant(_check_function_name(name), _parse_shapes(shapes)) for name, shapes in given.items()]
    if not isinstance(given, Sequence) or not given:
        raise make_request_error(f"found {given!r}; {_format_expected()}")
    if all(isinstance(each, Mapping) for each in given):
        return [Variant(None, _parse_shapes(each)) for each in given]
    return _group_variants([_parse_text(text) for text in given])


def _group_variants(parsed: Sequence[tuple[str | None, str, Shape]]) -> list[Variant]:
    """Group shapes by function: a repeated input starts another function, as does another function's name."""
    if any(name is None for name, _, _ in parsed) and any(name is not None for name, _, _ in parsed):
        raise make_request_error("some shapes are given with a function's name and some without; "
                                 "expected all of them as FUNCTION:NAME=SHAPE, or none")
    found: list[Variant] = []
    for function, name, shape in parsed:
        if function is not None:
            variant = next((each for each in found if each.name == function), None)
            if variant is not None and name in variant.shapes:
                raise make_request_error(f"input '{name}' of function '{function}' is given twice; expected one "
                                         "shape; give the other function a name of its own")
        else:
            variant = found[-1] if found and name not in found[-1].shapes else None
        if variant is None:
            variant = Variant(function)
            found.append(variant)
        variant.shapes[name] = shape
    _check_same_inputs(found)
    return found


def _check_same_inputs(variants: Sequence[Variant]) -> None:
    """Check that functions without names fix the same inputs: otherwise a slip would leave one flexible."""
    first = variants[0]
    for other in variants[1:]:
        lacking = sorted(first.shapes.keys() ^ other.shapes.keys())
        if first.name is None and lacking:
            raise make_request_error(
                f"input '{lacking[0]}' has a shape for some of the {len(variants)} functions "
                "asked for and none for others; expected one for each, or FUNCTION:NAME=SHAPE for all, "
                "which may leave inputs flexible"
            )


def _parse_text(text: Any) -> tuple[str | None, str, Shape]:
    if not isinstance(text, str) or "=" not in text:
        raise make_request_error(f"found {text!r}; {_format_expected()}")
    who, _, sizes = text.rpartition("=")
    function, colon, name = who.rpartition(":")
    if not name.strip():
        raise make_request_error(f"'{text}' names no input; {_format_expected()}")
    name = strip_percent(name.strip())
    return (_check_function_name(function) if colon else None), name, _parse_shape(name, sizes.split(","))


def _format_expected() -> str:
    texts = "NAME=1,3,224,224 or FUNCTION:NAME=1,3,224,224"
    return f"expected {choose_spelling(texts, 'a mapping from an input to its shape, or texts ' + texts)}"


def _check_function_name(name: Any) -> str:
    text = name.strip() if isinstance(name, str) else repr(name)
    check_identifier(text, f"{format_option_values('fix_shape')}: function")
    return text


def _parse_shapes(given: Any) -> dict[str, Shape]:
    if not isinstance(given, Mapping) or not given:
        raise make_request_error(f"found {given!r}; expected a mapping from an input's name to its shape")
    found = {}
    for name, sizes in given.items():
        if not isinstance(name, str) or isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
            raise make_request_error(f"found {name!r}: {sizes!r}; expected a name and a shape as (1, 3, 8, 8)")
        found[name] = _parse_shape(name, list(sizes))
    return found


def _parse_shape(name: str, sizes: Sequence[Any]) -> Shape:
    try:
        shape = tuple(int(size) for size in sizes)
        whole = all(isinstance(size, str) or size == number for size, number in zip(sizes, shape, strict=True))
    except (TypeError, ValueError):
        shape, whole = (), False
    if not whole or not shape or any(not 0 < size < 1 << 31 for size in shape):
        raise make_request_error(f"the shape of '{name}' is {','.join(map(str, sizes))}; expected whole numbers "
                                 "of 1 or more, such as 1,3,224,224")
    return shape


def name_variants(variants: Sequence[Variant], source: str, taken: set[str]) -> list[str]:
    """Return a name for each function made of `source`: the user's name, or one that contains its shapes.

    Raises InputError if two have one name, or one has the name of another function (`taken`).
    """
    if len(variants) == 1:
        names = [variants[0].name or source]
    else:
        differing = [name for name in variants[0].shapes
                     if len({variant.shapes.get(name) for variant in variants}) > 1]
        names = [variant.name or "_".join([source, *("x".join(map(str, variant.shapes[name])) for name in differing)])
                 for variant in variants]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise make_request_error(f"two functions of the same shapes would be called '{twice}'; expected shapes "
                                 "that differ")
    held = next((name for name in names if name in taken), None)
    if held is not None:
        raise make_request_error(f"the model has another function '{held}'; expected a free name: give one as "
                                 "FUNCTION:NAME=SHAPE")
    return names


def format_shape(shape: Sequence[int | None]) -> str:
    """Format a shape; `?` for flexible sizes."""
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"
