"""Cuts of a function into two parts: the ops that the first part needs, the remaining ops, and the crossing values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..utils.errors import suggest_nearest
from .program_parts import Function, Op
from .uses import get_read_names, is_pure

__all__ = ["Cut", "CutError", "FunctionGraph"]


class CutError(Exception):
    """The reason why a function cannot be cut somewhere.

    `elsewhere` is set if another cut of the function may be possible.
    """

    def __init__(self, reason: str, elsewhere: bool = False) -> None:
        super().__init__(reason)
        self.elsewhere = elsewhere


@dataclass(frozen=True)
class Cut:
    """Two parts of a function, as indices into its list of ops; ops that depend on consts only may be in both.

    `crossing` are the values that the second part reads from the first: the requested ones, in that order, then the
    others in program order. `inside` were requested and do not cross. `unneeded` counts the ops in neither part,
    without consts.
    """

    first: frozenset[int]
    second: frozenset[int]
    crossing: tuple[str, ...]
    inside: tuple[str, ...]
    unneeded: int


class FunctionGraph:
    """The ops of a function's top level, with their dependencies.

    Building it takes one walk; each cut takes one more.
    """

    def __init__(self, function: Function) -> None:
        self.ops: list[Op] = function.block.ops
        self.outputs = list(function.block.outputs)
        self.states = {each.name for each in function.inputs if each.message.type.HasField("stateType")}
        self.inputs = {each.name for each in function.inputs} - self.states
        self.reads = [get_read_names(op) for op in self.ops]
        self.makes = [op.outputs for op in self.ops]
        self.maker = {name: place for place, names in enumerate(self.makes) for name in names}
        given = self.inputs | self.states
        twice = sum(map(len, self.makes)) != len(self.maker) or not given.isdisjoint(self.maker)
        self.refusal = "two of its values have one name" if twice else ""
        self.constant = self._constant()
        self.state_users = {state: [place for place, names in enumerate(self.reads) if state in names]
                            for state in sorted(self.states)}
        self.flows, self.needs = self._build_edges()

    def _constant(self) -> list[bool]:
        """Return for each op whether it depends on consts only and computes the same each time."""
        found: list[bool] = []
        for op, names in zip(self.ops, self.reads, strict=True):
            compressed = op.type.startswith("constexpr_")
            makers = [self.maker.get(name, len(found)) for name in names]
            found.append((compressed or is_pure(op)) and all(m < len(found) and found[m] for m in makers))
        return found

    def _build_edges(self) -> tuple[list[set[int]], list[set[int]]]:
        """Return for each op those whose results reach it, by name or by a state, and those that must run before it."""
        flows = [{self.maker[name] for name in names if name in self.maker} for names in self.reads]
        needs = [set(makers) for makers in flows]
        for places in self.state_users.values():
            written: set[int] = set()
            for before, place in pairwise(places):
                needs[place].add(before)
                written |= {before} if self.ops[before].type != "read_state" else set()
                flows[place] |= written
        return flows, needs

    def values(self) -> list[str]:
        """Return the values that may be requested as a cut: outputs of ops that depend on inputs, in order."""
        return [name for place, names in enumerate(self.makes) if not self.constant[place] for name in names]

    def cut(self, named: Sequence[str]) -> Cut:
        """Return the cut after the values `named`. Raises CutError with the reason when it is not possible."""
        if self.refusal:
            raise CutError(self.refusal)
        for name in named:
            self._check(name)
        first = self._collect_required(self.maker[name] for name in named)
        first = self._include_state_users(first, [self.maker[name] for name in named])
        made = {name for place in first for name in self.makes[place]}
        left = [name for name in self.outputs if name not in made]
        if not left:
            raise CutError(
                f"all outputs of the model ({', '.join(self.outputs)}) are made for {_format_names(named)}: nothing "
                "is left for a second part",
                elsewhere=True,
            )
        effects = [place for place, op in enumerate(self.ops)
                   if place not in first and not self.constant[place] and not is_pure(op)]
        second = self._collect_required([*(self.maker[name] for name in left if name in self.maker), *effects]) - first
        if all(self.constant[place] for place in second):
            raise CutError(f"nothing that depends on {_format_names(named)} or on an input is left for a second part",
                           elsewhere=True)
        return self._cut(named, first, second)

    def _cut(self, named: Sequence[str], first: set[int], second: set[int]) -> Cut:
        wanted = {name for place in second for name in self.reads[place]}
        crosses = [name for place in sorted(first) if not self.constant[place]
                   for name in self.makes[place] if name in wanted]
        asked = [name for name in dict.fromkeys(named) if name in crosses]
        consts = {place for place in first if self.constant[place]}
        second |= self._collect_required(need for place in second for need in self.needs[place] if need in consts)
        inside = tuple(name for name in dict.fromkeys(named) if name not in crosses and name not in self.outputs)
        either = first | second
        unneeded = sum(op.type != "const" for place, op in enumerate(self.ops) if place not in either)
        others = (name for name in crosses if name not in asked)
        return Cut(frozenset(first), frozenset(second), (*asked, *others), inside, unneeded)

    def _check(self, name: str) -> None:
        """Raise CutError when `name` is not a value to cut at."""
        if name in self.states:
            raise CutError(f"'{name}' is a state: states are no values that cross; name a value that is read from it")
        if name in self.inputs:
            raise CutError(
                f"'{name}' is an input: nothing would be left for a first part; name a value that an op makes"
            )
        if name not in self.maker:
            outer = next((op for op in self.ops if name in _collect_inner_names(op)), None)
            if outer is not None:
                raise CutError(f"'{name}' is inside a block of a {outer.type} op, which runs as a whole; the op itself "
                               f"makes {_format_names(outer.outputs)}")
            raise CutError(f"no value '{name}'{suggest_nearest(name, self.values())}")
        if self.constant[self.maker[name]]:
            raise CutError(
                f"'{name}' depends on consts only: nothing would be left for a first part; name a value that "
                "depends on an input"
            )
        if name not in self.outputs and not any(name in names for names in self.reads):
            raise CutError(f"nothing uses '{name}'", elsewhere=True)

    def _collect_required(self, start: Iterable[int]) -> set[int]:
        """Return `start` and all ops that must run before it."""
        found: set[int] = set()
        stack = list(start)
        while stack:
            place = stack.pop()
            if place not in found:
                found.add(place)
                stack.extend(self.needs[place] - found)
        return found

    def _include_state_users(self, first: set[int], named: list[int]) -> set[int]:
        """Return `first` with all users of the states it uses.

        Raises CutError if some of these need the cut's values.
        """
        while True:
            torn = {state: places for state, places in self.state_users.items()
                    if not first.isdisjoint(places) and not first.issuperset(places)}
            if not torn:
                return first
            behind = self._collect_reached(named)
            for state, places in torn.items():
                late = [place for place in places if place in behind and place not in first]
                if late:
                    name = next(iter(self.makes[late[0]]), "")
                    raise CutError(f"the state '{state}' is used before the cut and behind it ({self.ops[late[0]].type}"
                                   f"{f' {name!r}' if name else ''}); a state lives in one part", elsewhere=True)
            first = first | self._collect_required(place for places in torn.values() for place in places)

    def _collect_reached(self, start: Iterable[int]) -> set[int]:
        """Return all ops that results of `start` reach."""
        found: set[int] = set()
        begun = set(start)
        for place, sources in enumerate(self.flows):
            if not sources.isdisjoint(begun) or not sources.isdisjoint(found):
                found.add(place)
        return found


def _collect_inner_names(op: Op) -> set[str]:
    """Return the names of values inside an op's blocks."""
    found: set[str] = set()
    for block in op.blocks:
        found.update(declared.name for declared in block.inputs)
        for inner in block.ops:
            found.update(inner.outputs)
            found |= _collect_inner_names(inner)
    return found


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
