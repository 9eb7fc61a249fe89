"""ANE support of an op, from the rules that find unsupported ops and from published observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..ir.query import get_flat_inputs, get_type_info, is_compressed, is_const, is_opaque
from ..passes.contract import Hit, Rule
from ..passes.plan import SupportStatus
from ..passes.targets import Generation, format_generations
from ..utils.text_format import join_names
from .op_support import Observation, find_observations, is_dtype_form_supported

__all__ = ["Support", "determine_support"]

_GATHER_OPS = ("gather", "gather_nd", "gather_along_axis")


@dataclass(frozen=True)
class Support:
    """Support of one op: `takes` is the answer that a prediction uses, `reason` is a text."""

    ane: SupportStatus
    takes: bool
    reason: str


def determine_support(
    op: Operation, refusals: Sequence[tuple[Rule, Hit]], generations: Sequence[Generation]
) -> Support:
    """Determine the support of `op`, given the hits of rules that find it unsupported on one of `generations`."""
    sure = [hit for _, hit in refusals if hit.sure]
    if refusals:
        hit = (sure or [hit for _, hit in refusals])[0]
        taken = not sure and all(hit.likely for _, hit in refusals)
        return Support("no" if sure else "unknown", taken, hit.note + (" (predicted: supported)" if taken else ""))
    if op.op_type.startswith("constexpr_"):
        return Support("yes", True, "a compressed weight, decompressed by its users")
    if is_opaque(op):
        return Support("unknown", False, f"{op.op_type} is unknown to this version of coremltools")
    told = _determine_op_type_support(op.op_type, tuple(generations))
    return (
        told
        if told.ane != "yes"
        else _limit_to_seen_dtypes(
            told, op.op_type, _collect_dtypes(_get_computed_inputs(op)), _collect_dtypes(op.outputs)
        )
    )


def _get_computed_inputs(op: Operation) -> list[Var]:
    """Return the computed inputs of `op`, and constant indices: their type decides the support of a gather."""
    given = [var for var in get_flat_inputs(op) if not is_const(var) and not is_compressed(var)]
    return [*given, op.indices] if op.op_type in _GATHER_OPS and is_const(op.indices) else given


def _collect_dtypes(values: Sequence[Var]) -> frozenset[Any]:
    return frozenset(get_type_info(var).dtype for var in values)


@cache
def _limit_to_seen_dtypes(told: Support, kind: str, read: frozenset[Any], made: frozenset[Any]) -> Support:
    """Limit observed support to the dtypes that the op type was observed with."""
    reads, makes = (sorted(map(types.builtin_to_string, each)) for each in (read, made))
    if is_dtype_form_supported(kind, reads, makes):
        return told
    how = f"from {' and '.join(reads) or 'constants'} to {' and '.join(makes)}"
    return Support("unknown", True, f"{told.reason}, but {how} it was not measured (predicted: supported)")


@cache
def _determine_op_type_support(kind: str, generations: tuple[Generation, ...]) -> Support:
    """Determine the support of an op that no rule matches: yes if its type was observed through Core ML on
    each generation, else unknown."""
    seen = find_observations(kind)
    silent = [generation for generation in generations if generation not in seen]
    if not silent:
        asked = [seen[generation] for generation in generations]
        if not any(one.without_core_ml for one in asked):
            return Support("yes", True, f"{kind}: {_format_observations(asked)}")
        unasked = format_generations([generation for generation in generations if seen[generation].without_core_ml])
        beside = f"not measured through Core ML on {unasked} (predicted: supported)"
        return Support("unknown", True, f"{kind}: {_format_observations(asked)}; {beside}")
    unmeasured = f"not measured on {format_generations(silent)}"
    if not seen:
        return Support("unknown", False, f"{kind}: {unmeasured}, and not observed on any ANE")
    return Support(
        "unknown", True, f"{kind}: {_format_observations(list(seen.values()))}; {unmeasured} (predicted: supported)"
    )


def _format_observations(seen: Sequence[Observation]) -> str:
    """Format where an op type was observed; observations without Core ML are named as such."""
    through = join_names(one.chip for one in seen if not one.without_core_ml)
    beside = join_names(one.chip for one in seen if one.without_core_ml)
    parts = [f"on {through}"] * bool(through) + [f"without Core ML on {beside}"] * bool(beside)
    return f"seen {' and '.join(parts)}"
