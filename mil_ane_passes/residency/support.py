"""Whether the ANE takes an op: what the refusing rules find, and what somebody saw it take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coremltools.converters.mil.mil import Operation

from ..core.contract import Hit, Rule
from ..core.plan import Answer
from ..core.query import is_opaque
from ..core.targets import GENERATIONS, Generation
from .accepted import accepted

__all__ = ["Support", "support"]


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
        return Support("no" if sure else "unknown", False, hit.note)
    if op.op_type.startswith("constexpr_"):
        return Support("yes", True, "a stored weight, unpacked by what reads it")
    if is_opaque(op):
        return Support("unknown", False, f"{op.op_type} is not known to this version of coremltools")
    silent = [generation for generation in generations if accepted(op.op_type, generation) is None]
    if not silent:
        return Support("yes", True, f"{op.op_type} was seen on the ANE")
    anywhere = [generation for generation in GENERATIONS if accepted(op.op_type, generation)]
    seen = f"it was seen on the ANE of {', '.join(g.chips[-1].upper() for g in anywhere)}" if anywhere else \
        "nobody saw it on any"
    where = ", ".join(generation.chips[-1].upper() for generation in silent)
    return Support("unknown", bool(anywhere), f"{op.op_type} was not measured on {where}; {seen}")
