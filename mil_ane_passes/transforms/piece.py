"""A part of a model file that keeps its own bytes; it is parsed on access, and never changed in place."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from ..package import wire

__all__ = ["NAME_FIELD", "Named", "Piece"]

NAME_FIELD = 1
_P = TypeVar("_P", bound="Piece")
_N = TypeVar("_N", bound="Named")


class Piece:
    """Bytes, and the message of `KIND` in them. An edit replaces the piece by another."""

    __slots__ = ("_message", "data")
    KIND: ClassVar[Any]

    def __init__(self, data: bytes, message: Any = None) -> None:
        self.data = data
        self._message = message

    @classmethod
    def of(cls: type[_P], message: Any) -> _P:
        """Make a new piece of a message."""
        return cls(message.SerializeToString(deterministic=True))

    @property
    def message(self) -> Any:
        """The message; do not change it (copy it for `of`)."""
        if self._message is None:
            self._message = self.KIND.FromString(self.data)
        return self._message


class Named(Piece):
    """A piece that has a name, in the field `NAME_FIELD`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self.message.name)

    def named(self: _N, name: str) -> _N:
        """Return the piece under another name, the rest byte for byte."""
        return self if name == self.name else type(self)(wire.replace_fields(self.data, NAME_FIELD, [name.encode()]))
