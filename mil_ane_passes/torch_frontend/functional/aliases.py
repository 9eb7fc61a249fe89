"""Aliases: which values of a torch graph share memory, and the current value of each after the writes so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..errors import NotConverted, describe_node_location

__all__ = ["Alias", "Aliases", "Base", "ViewStep"]


class ViewStep(Protocol):
    """The step from a parent to a view: computes the view, and writes the view's changes to the parent."""

    def replay(self, parent: Any) -> Any:
        """Compute the view of the value `parent`."""

    def scatter(self, parent: Any, new: Any) -> Any:
        """Return `parent` with the view's elements replaced by `new`."""


class Base:
    """Memory of its own.

    Has its current value, its version (a new one at each write), and the bases it may share memory with.
    """

    def __init__(self, value: Any, attribute: bool = False) -> None:
        self.value = value
        self.origin = value
        self.attribute = attribute
        self.version = 0
        self.possible_aliases: set[Base] = set()
        self.unknown_because: str | None = None
        "the reason why its value is no longer known"


class Alias:
    """One view of a base: the chain of steps that leads to it, and its value at one version of the base."""

    def __init__(self, base: Base, value: Any, parent: Alias | None = None, step: ViewStep | None = None) -> None:
        self.base, self.value, self.parent, self.step = base, value, parent, step
        self.version = base.version


class Aliases:
    """The aliases of all values seen so far; changes made inside a nested block can be undone."""

    def __init__(self) -> None:
        self._of: dict[int, Alias] = {}
        self._undo_log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._versions = itertools.count(1)
        self.depth = 0
        self.on_write: Callable[[Base, Any], Any] = lambda base, value: value
        self.on_unknown: Callable[[Base], None] = lambda base: None

    def find(self, value: Any) -> Alias | None:
        """Return the alias of a value, or None for a value that is not bound to one."""
        return self._of.get(value.unique())

    def of(self, value: Any) -> Alias:
        """Return the alias of a value; a value not seen before becomes a base of its own."""
        alias = self.find(value)
        if alias is None:
            alias = Alias(Base(value, attribute=value.node().kind() == "prim::GetAttr"), value)
            self.bind(value, alias)
        return alias

    def bind(self, value: Any, alias: Alias) -> None:
        """Bind `value` to `alias` from now on."""
        self._put_with_undo(self._of, value.unique(), alias)

    def view(self, value: Any, parent: Alias, step: ViewStep) -> None:
        """Bind `value` to a new view of `parent`."""
        self.bind(value, Alias(parent.base, value, parent, step))

    def may_share(self, value: Any, *others: Alias) -> None:
        """Record that `value` may share memory with `others`.

        After a write to one of them, the value of the other is unknown.
        """
        own = Base(value)
        self.bind(value, Alias(own, value))
        for other in others:
            self._set_with_undo(own, "possible_aliases", own.possible_aliases | {other.base})
            self._set_with_undo(other.base, "possible_aliases", other.base.possible_aliases | {own})

    def current(self, alias: Alias, reader: Any) -> Any:
        """Return the current value of an alias, recomputed where its base was written since.

        Raises NotConverted after a write that cannot be followed.
        """
        if alias.base.unknown_because is not None:
            raise NotConverted.at(reader, f"reads a tensor that {alias.base.unknown_because}",
                                  "write to a .clone(), or keep only one of the two tensors")
        if alias.version != alias.base.version:
            if alias.parent is None or alias.step is None:
                fresh = alias.base.value
            else:
                fresh = alias.step.replay(self.current(alias.parent, reader))
                fresh.setType(alias.value.type())
            self._update_alias(alias, fresh)
        return alias.value

    def write(self, alias: Alias, new: Any, writer: Any) -> None:
        """Replace the elements of `alias` by `new`, and with them those of its base and of every other view of it."""
        chain = [(alias, new)]
        while alias.parent is not None and alias.step is not None:
            new = alias.step.scatter(self.current(alias.parent, writer), new)
            alias = alias.parent
            chain.append((alias, new))
        kept = self.on_write(alias.base, new)
        self.rebase(alias.base, kept, writer)
        for link, value in chain if kept is new else [(alias, kept)]:
            self._update_alias(link, value)

    def rebase(self, base: Base, value: Any, writer: Any) -> None:
        """Set the value of an entire base; bases that may share its memory become unknown."""
        self._set_with_undo(base, "value", value)
        self._set_with_undo(base, "version", next(self._versions))
        for other in self._collect_possible_aliases(base):
            self.mark_unknown(other, f"may share memory with one that {describe_node_location(writer)} writes to")

    def mark_unknown(self, base: Base, why: str) -> None:
        """Mark the value of a base as unknown, so that reading it is an error."""
        if base.unknown_because is None:
            self._set_with_undo(base, "unknown_because", why)
            self.on_unknown(base)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Follow a nested block; undo all changes at its end."""
        start = len(self._undo_log)
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            while len(self._undo_log) > start:
                undo, arguments = self._undo_log.pop()
                undo(*arguments)

    def bases(self) -> list[Base]:
        """List all bases known here, in order of appearance."""
        return list(dict.fromkeys(alias.base for alias in self._of.values()))

    def _collect_possible_aliases(self, base: Base) -> set[Base]:
        found, waiting = {base}, [base]
        while waiting:
            for other in waiting.pop().possible_aliases - found:
                found.add(other)
                waiting.append(other)
        return found - {base}

    def _update_alias(self, alias: Alias, value: Any) -> None:
        """Set the current value of an alias, and bind that value to the alias where it is not bound yet."""
        if self.find(value) is None:
            self.bind(value, alias)
        self._set_with_undo(alias, "value", value)
        self._set_with_undo(alias, "version", alias.base.version)

    def _set_with_undo(self, holder: Any, name: str, value: Any) -> None:
        if self.depth:
            self._undo_log.append((setattr, (holder, name, getattr(holder, name))))
        setattr(holder, name, value)

    def _put_with_undo(self, table: dict[int, Alias], key: int, alias: Alias) -> None:
        if self.depth:
            undo: Callable[..., None] = table.__setitem__ if key in table else table.__delitem__
            self._undo_log.append((undo, (key, table[key]) if key in table else (key,)))
        table[key] = alias
