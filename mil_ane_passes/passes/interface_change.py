"""Changes of a function's interface, with the mapping of feeds, states and results between old and new.

A transform declares what it changes; a check across the change then compares `old(feeds)` with
`unmap_results(new(map_feeds(feeds)))`, over several steps where there is state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

__all__ = ["CarriedState", "InterfaceChange", "InterfaceMapping", "change_dtype"]

Array = np.ndarray[Any, Any]


def _return_unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class CarriedState:
    """A state that the caller of the new form carries: it goes in as `input`, and `output` is what comes out.

    `update` computes what the next call gets, from the value, the output, and the feeds of the new form. Without
    `output`, it stays as it is.
    """

    input: str
    output: str | None
    update: Callable[[Any, Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class InterfaceChange:
    """One change of an input, output or state.

    `old` is its name before, None if it is new; `new` is its name after, None if it is gone. `map` converts an array of
    the old form to the new one, `unmap` converts it back: `unmap(map(value))` is what both forms can hold of a value.
    `make` computes a new input from the feeds of before, in the form that steps before it gave them, or the initial
    value of a new state from the feeds of before and the states; without it, a new input
    comes from a part of the model that runs earlier. `shape` is the only shape of the old form that the new one
    accepts, where the old one accepted others. `unmap_with` converts back what depends on the feeds of before, which
    are its second argument. `shapes` are shapes of inputs of before, by name, that go together and are to be tried in
    turn. `carried` says how the caller carries a state that is gone. `tiles` are the new outputs that are parts, along
    the last axis, of an output that is gone.
    """

    kind: Literal["input", "output", "state"]
    old: str | None
    new: str | None
    action: Literal["added", "removed", "renamed", "retyped", "reshaped"]
    map: Callable[[Any], Any] = _return_unchanged
    unmap: Callable[[Any], Any] = _return_unchanged
    make: Callable[[Mapping[str, Any]], Any] | None = None
    shape: tuple[int, ...] | None = None
    unmap_with: Callable[[Any, Mapping[str, Any]], Any] | None = None
    shapes: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    carried: CarriedState | None = None
    tiles: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, str | None]:
        """Return the change as in JSON, without the functions that convert arrays."""
        return {"kind": self.kind, "old": self.old, "new": self.new, "action": self.action}


def change_dtype(kind: Literal["input", "output", "state"], name: str, old: Any, new: Any) -> InterfaceChange:
    """Declare that an input, output or state has the numpy dtype `new` instead of `old`.

    Results at full precision, float64, keep it: they are not what a device returns.
    """
    def make_converter(dtype: Any) -> Callable[[Any], Any]:
        return lambda value: value if np.asarray(value).dtype == np.float64 else np.asarray(value).astype(dtype)

    return InterfaceChange(kind, name, name, "retyped", make_converter(new), make_converter(old))


@dataclass(frozen=True)
class InterfaceMapping:
    """The mapping between `function` of the source and a function made of it, over several changes in order.

    Changes within one step of `steps` are made at once, so that names can be swapped.
    """

    function: str
    steps: tuple[tuple[InterfaceChange, ...], ...] = ()

    def followed_by(self, *changes: InterfaceChange) -> InterfaceMapping:
        """Return the mapping with one more step."""
        return replace(self, steps=(*self.steps, changes)) if changes else self

    @property
    def changes(self) -> tuple[InterfaceChange, ...]:
        """All changes in order."""
        return tuple(change for step in self.steps for change in step)

    def map_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert feeds of the old function to feeds of the new one."""
        return self._map_values("input", feeds, feeds)

    def map_state(self, state: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert states of the old function to states of the new one; `feeds` are those of the old function."""
        return self._map_values("state", state, feeds)

    def unmap_results(self, results: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert outputs of the new function to those of the old one; outputs that it did not have are left out.

        `feeds` are those of the old function, as for all that is converted back.
        """
        return self._unmap_values("output", results, feeds)

    def unmap_state(self, state: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert states of the new function to those of the old one."""
        return self._unmap_values("state", state, feeds)

    def round_feeds(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Limit feeds of the old function to values that the new one can be fed with."""
        return {**feeds, **self._unmap_values("input", self._map_values("input", feeds, feeds), feeds)}

    def round_results(self, results: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Limit results of the old function to what the new one returns, in its precision."""
        return self._unmap_values("output", self._map_values("output", results, feeds), feeds)

    def start_carried(self, state: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the initial values of states that the caller of the new function carries, by their former names."""
        found: dict[str, Any] = {}
        for place, name, _ in self._iterate_carried():
            before = replace(self, steps=self.steps[:place]).map_state(state, feeds)
            if name in before:
                found[name] = before[name]
        return found

    def feed_carried(self, carried: Mapping[str, Any]) -> dict[str, Any]:
        """Return the feeds of the new function that hold carried states."""
        found: dict[str, Any] = {}
        for place, name, each in self._iterate_carried():
            if name in carried:
                rest = replace(self, steps=self.steps[place + 1:])
                found |= rest._map_values("input", {each.input: carried[name]}, None)
        return found

    def update_carried(
        self, carried: Mapping[str, Any], results: Mapping[str, Any], feeds: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return carried states after a call with the old function's `feeds` that returned `results`."""
        found = dict(carried)
        for place, name, each in self._iterate_carried():
            made = replace(self, steps=self.steps[place + 1:])._unmap_values("output", results, feeds)
            read = replace(self, steps=self.steps[:place]).map_feeds(feeds)
            if name in carried and each.output in made:
                found[name] = each.update(carried[name], made[each.output], read)
        return found

    def unmap_carried(self, carried: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Convert carried states to those of the old function."""
        found: dict[str, Any] = {}
        for place, name, _ in self._iterate_carried():
            if name in carried:
                found |= replace(self, steps=self.steps[:place])._unmap_values("state", {name: carried[name]}, feeds)
        return found

    def _iterate_carried(self) -> Iterator[tuple[int, str, CarriedState]]:
        for place, step in enumerate(self.steps):
            yield from ((place, str(change.old), change.carried) for change in step if change.carried is not None)

    def _map_values(self, kind: str, values: Mapping[str, Any], feeds: Mapping[str, Any] | None) -> dict[str, Any]:
        """Convert values to the new form; without feeds nothing is made of them."""
        found = dict(values)
        for step in self.steps:
            changes = [change for change in step if change.kind == kind]
            kept = {name: value for name, value in found.items() if name not in {each.old for each in changes}}
            moved = {each.new: each.map(found[each.old]) for each in changes
                     if each.new is not None and each.old is not None and each.old in found}
            made = {} if feeds is None else {
                each.new: each.make({**feeds, **found}) for each in changes
                if each.old is None and each.new is not None and each.make is not None}
            found = {**kept, **moved, **made}
        return found

    def _unmap_values(self, kind: str, values: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(values)
        for step in reversed(self.steps):
            changes = [change for change in step if change.kind == kind]
            kept = {name: value for name, value in found.items() if name not in {each.new for each in changes}}
            moved = {each.old: each.unmap(found[each.new]) if each.unmap_with is None else each.unmap_with(
                         found[each.new], feeds) for each in changes
                     if each.new is not None and each.old is not None and each.new in found}
            joined = {each.old: np.concatenate([found[tile] for tile in each.tiles], -1) for each in changes
                      if each.tiles and each.old is not None and all(tile in found for tile in each.tiles)}
            found = {**kept, **moved, **joined}
        return found
