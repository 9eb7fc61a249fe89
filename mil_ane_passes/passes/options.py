"""Options of a rule, declared as annotated fields.

The field `axis: Literal[-1, 2] = -1` is set by `{axis=2}` in `--passes`, or by PassOption("axis", "2").
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..utils.errors import InputError, suggest_nearest

__all__ = ["Option", "get_options", "make_with_options", "parse_passes", "read_field_docs"]

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One option: its name, type (int, float, bool, str or a Literal of those), default and doc line."""

    name: str
    type: Any
    default: Any
    doc: str = ""

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values if the type is a Literal, else empty."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def parse(self, value: Any, owner: str) -> Any:
        """Parse `value` (a string or already typed) as this option's type. Raises InputError with what was expected."""
        kinds = {type(c) for c in self.choices} or {self.type}
        for kind in kinds:
            parsed = _convert_value(value, kind)
            if parsed is not None and (not self.choices or parsed in self.choices):
                return parsed
        expected = " or ".join(map(str, self.choices)) if self.choices else f"a value of type {self.type.__name__}"
        raise InputError(f"{owner}: option '{self.name}' is {value!r}; expected {expected}")


def _convert_value(value: Any, kind: type) -> Any:
    if kind is bool:
        word = str(value).strip().lower()
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(word)
    if isinstance(value, bool):
        return None
    try:
        parsed = kind(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    if kind is int and isinstance(value, float) and parsed != value:
        return None
    return parsed


def get_options(cls: type) -> dict[str, Option]:
    """Collect the options that a rule class and its bases declare, by name."""
    return {name: Option(name, hint, getattr(cls, name), doc) for name, (hint, doc) in _read_declarations(cls).items()}


@functools.cache
def _read_declarations(cls: type) -> dict[str, tuple[Any, str]]:
    """Read type and doc line of each option. Evaluating annotations takes milliseconds, and each pipeline asks."""
    hints = {name: hint for name, hint in get_type_hints(cls).items()
             if get_origin(hint) is not ClassVar and hint is not ClassVar and not name.startswith("_")}
    declaring = [base for base in reversed(cls.__mro__) if not hints.keys().isdisjoint(inspect.get_annotations(base))]
    # Reading the source of a class is slow, and most classes declare no option.
    docs = {name: doc for base in declaring for name, doc in read_field_docs(base).items()}
    return {name: (hint, docs.get(name, "")) for name, hint in hints.items()}


@functools.cache
def read_field_docs(cls: type) -> dict[str, str]:
    """Read the string literal under each field, which is that option's documentation."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, SyntaxError, TypeError):  # no source: a built-in base, or made in an interpreter
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr) \
                and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def make_with_options(cls: type[T], values: Mapping[str, Any]) -> T:
    """Create an instance of `cls` with the options in `values`.

    Unknown names raise InputError with the nearest known name.
    """
    if not values:
        return cls()
    known = get_options(cls)
    owner = f"ane::{getattr(cls, 'name', '') or cls.__name__}"
    rule = cls()
    for name, value in values.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"{owner}: no option '{name}'; {has}{suggest_nearest(name, known)}")
        setattr(rule, name, known[name].parse(value, owner))
    return rule


_PASS_ITEM = re.compile(r"\s*(?P<name>[A-Za-z_][\w:-]*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?:,|$)")


def parse_passes(text: str) -> dict[str, dict[str, str]]:
    """Parse `'a,ane::b{axis=2 limit=9}'` into {'a': {}, 'b': {'axis': '2', 'limit': '9'}}.

    Raises InputError with the part that cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    position = 0
    while position < len(text):
        item = _PASS_ITEM.match(text, position)
        if item is None or item.end() == position:
            raise InputError(f"passes: cannot read {text[position:]!r}; expected names like 'a,b{{option=value}}'")
        options = {}
        for pair in re.split(r"[\s,;]+", (item["options"] or "").strip()):
            key, equals, value = pair.partition("=")
            if pair and not (key and equals and value):
                raise InputError(f"passes: cannot read option {pair!r} of '{item['name']}'; expected option=value")
            if pair:
                options[key] = value
        found.setdefault(item["name"].removeprefix("ane::"), {}).update(options)
        position = item.end()
    return found
