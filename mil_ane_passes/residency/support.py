"""Whether the ANE takes an op: what the refusing rules find, and what somebody saw it take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..core.contract import Hit, Rule
from ..core.plan import Answer
from ..core.query import flat_inputs, is_compressed, is_const, is_opaque, kind_of
from ..core.targets import Generation, listed
from ..core.words import in_words
from .accepted import Seen, accepted_types, seen_on

__all__ = ["Support", "support"]

_GATHERS = ("gather", "gather_nd", "gather_along_axis")


@dataclass(frozen=True)
class Support:
    """The answer for one op: `takes` is what a prediction goes by, `reason` is in words."""

    ane: Answer
    takes: bool
    reason: str


def support(op: Operation, refusals: Sequence[tuple[Rule, Hit]], generations: Sequence[Generation]) -> Support:
    """The answer for `op`, given what refuses it on one of `generations`."""
    sure = [hit for _, hit in refusals if hit.sure]
    if refusals:
        hit = (sure or [hit for _, hit in refusals])[0]
        taken = not sure and all(hit.likely for _, hit in refusals)
        return Support("no" if sure else "unknown", taken, hit.note + (" (predicted: taken)" if taken else ""))
    if op.op_type.startswith("constexpr_"):
        return Support("yes", True, "a stored weight, unpacked by what reads it")
    if is_opaque(op):
        return Support("unknown", False, f"{op.op_type} is not known to this version of coremltools")
    told = _by_kind(op.op_type, tuple(generations))
    return told if told.ane != "yes" else _by_types(told, op.op_type, _types(_given(op)), _types(op.outputs))


def _given(op: Operation) -> list[Var]:
    """What is computed, and indices also where they are constant: their type decides whether a gather is taken."""
    given = [var for var in flat_inputs(op) if not is_const(var) and not is_compressed(var)]
    return [*given, op.indices] if op.op_type in _GATHERS and is_const(op.indices) else given


def _types(values: Sequence[Var]) -> frozenset[Any]:
    return frozenset(kind_of(var).dtype for var in values)


@cache
def _by_types(told: Support, kind: str, read: frozenset[Any], made: frozenset[Any]) -> Support:
    """What was seen of a kind holds for the types that it was seen with."""
    reads, makes = (sorted(map(types.builtin_to_string, each)) for each in (read, made))
    if accepted_types(kind, reads, makes):
        return told
    how = f"from {' and '.join(reads) or 'constants'} to {' and '.join(makes)}"
    return Support("unknown", True, f"{told.reason}, but {how} it was not measured (predicted: taken)")


@cache
def _by_kind(kind: str, generations: tuple[Generation, ...]) -> Support:
    """The answer for an op that no rule refuses: yes where Core ML took its kind on each generation, else unknown."""
    seen = seen_on(kind)
    silent = [generation for generation in generations if generation not in seen]
    if not silent:
        asked = [seen[generation] for generation in generations]
        if not any(one.private for one in asked):
            return Support("yes", True, f"{kind}: {_where(asked)}")
        unasked = listed([generation for generation in generations if seen[generation].private])
        beside = f"Core ML was not asked on {unasked} (predicted: taken)"
        return Support("unknown", True, f"{kind}: {_where(asked)}; {beside}")
    unmeasured = f"not measured on {listed(silent)}"
    if not seen:
        return Support("unknown", False, f"{kind}: {unmeasured}, and not known to have been seen on any ANE")
    return Support("unknown", True, f"{kind}: {_where(list(seen.values()))}; {unmeasured} (predicted: taken)")


def _where(seen: Sequence[Seen]) -> str:
    """Where it was seen, in words; what a private route showed is called that."""
    through = in_words(one.chip for one in seen if not one.private)
    beside = in_words(one.chip for one in seen if one.private)
    parts = [f"on {through}"] * bool(through) + [f"by a private route on {beside}"] * bool(beside)
    return f"seen {' and '.join(parts)}"
