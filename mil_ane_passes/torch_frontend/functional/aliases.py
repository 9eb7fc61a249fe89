"""Which values of a torch graph share memory, and what each of them is worth after the writes so far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..errors import NotConverted, describe_node_location

__all__ = ["Alias", "Aliases", "Base", "ViewStep"]


class ViewStep(Protocol):
    """How a view is made of its parent, and how a write to the view changes the parent."""

    def replay(self, parent: Any) -> Any:
        """The view of the value `parent`."""

    def scatter(self, parent: Any, new: Any) -> Any:
        """`parent` with the view's elements replaced by `new`."""


class Base:
    """Memory of its own: its present value, how often it was written, and what it may share memory with."""

    def __init__(self, value: Any, attribute: bool = False) -> None:
        self.value = value
        self.origin = value
        self.attribute = attribute
        self.version = 0
        self.possible_aliases: set[Base] = set()
        self.unknown_because: str | None = None
        "why its value is no longer known"


class Alias:
    """One view of a base: the chain of steps that leads to it, and its value as of a version of the base."""

    def __init__(self, base: Base, value: Any, parent: Alias | None = None, step: ViewStep | None = None) -> None:
        self.base, self.value, self.parent, self.step = base, value, parent, step
        self.version = base.version


class Aliases:
    """The aliases of all values seen so far; changes made inside a nested block can be taken back."""

    def __init__(self) -> None:
        self._of: dict[int, Alias] = {}
        self._undo_log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._versions = itertools.count(1)
        self.depth = 0
        self.on_write: Callable[[Base, Any], Any] = lambda base, value: value
        self.on_unknown: Callable[[Base], None] = lambda base: None

    def find(self, value: Any) -> Alias | None:
        """The alias a value stands for, if it shares memory with anything known."""
        return self._of.get(value.unique())

    def of(self, value: Any) -> Alias:
        """The alias a value stands for; a value not seen before is a base of its own."""
        alias = self.find(value)
        if alias is None:
            alias = Alias(Base(value, attribute=value.node().kind() == "prim::GetAttr"), value)
            self.bind(value, alias)
        return alias

    def bind(self, value: Any, alias: Alias) -> None:
        """From now on `value` stands for `alias`."""
        self._put(self._of, value.unique(), alias)

    def view(self, value: Any, parent: Alias, step: ViewStep) -> None:
        """`value` is a view of `parent`, made just now."""
        self.bind(value, Alias(parent.base, value, parent, step))

    def may_share(self, value: Any, *others: Alias) -> None:
        """`value` may or may not share memory with `others`: after a write to one side, the other is not known."""
        own = Base(value)
        self.bind(value, Alias(own, value))
        for other in others:
            self._set(own, "possible_aliases", own.possible_aliases | {other.base})
            self._set(other.base, "possible_aliases", other.base.possible_aliases | {own})

    def current(self, alias: Alias, reader: Any) -> Any:
        """The present value of an alias, made again where its base was written since.

        Raises NotConverted where a write that cannot be followed came between.
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
        """The elements of `alias` become `new`: so do those of its base, and of every other view of it."""
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
        """The value of a whole base from now on."""
        self._set(base, "value", value)
        self._set(base, "version", next(self._versions))
        for other in self._collect_possible_aliases(base):
            self.mark_unknown(other, f"may share memory with one that {describe_node_location(writer)} writes to")

    def mark_unknown(self, base: Base, why: str) -> None:
        """The value of a base is not known any more; reading it is an error."""
        if base.unknown_because is None:
            self._set(base, "unknown_because", why)
            self.on_unknown(base)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Inside, a nested block is followed; after, everything is as before."""
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
        """Every base known here, in order of appearance."""
        return list(dict.fromkeys(alias.base for alias in self._of.values()))

    def _collect_possible_aliases(self, base: Base) -> set[Base]:
        found, waiting = {base}, [base]
        while waiting:
            for other in waiting.pop().possible_aliases - found:
                found.add(other)
                waiting.append(other)
        return found - {base}

    def _update_alias(self, alias: Alias, value: Any) -> None:
        """Whoever meets `value` from now on knows whose it is."""
        if self.find(value) is None:
            self.bind(value, alias)
        self._set(alias, "value", value)
        self._set(alias, "version", alias.base.version)

    def _set(self, holder: Any, name: str, value: Any) -> None:
        if self.depth:
            self._undo_log.append((setattr, (holder, name, getattr(holder, name))))
        setattr(holder, name, value)

    def _put(self, table: dict[int, Alias], key: int, alias: Alias) -> None:
        if self.depth:
            undo: Callable[..., None] = table.__setitem__ if key in table else table.__delitem__
            self._undo_log.append((undo, (key, table[key]) if key in table else (key,)))
        table[key] = alias
