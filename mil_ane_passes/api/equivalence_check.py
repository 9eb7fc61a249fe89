"""The equivalence check of a rewrite, within the combined guarantees of its passes."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..equivalence.comparison import Strictness
from ..equivalence.equivalence import VerifyReport, compare_programs
from ..equivalence.user_inputs import UserInputs
from ..passes.contract import Exactness
from ..passes.engine import PassTrace
from ..utils.errors import InputError, NotSupported
from ..utils.option_spelling import format_no_verify_option
from .source import OpenedSource, Progress

__all__ = ["CHECK_PRECISIONS", "EquivalenceChecker", "RewrittenCopy", "require_torch"]

CHECK_PRECISIONS = ("float64", "float16")
"""Precisions at which `rewrite` verifies: float64 checks the algebra, float16 the rounding to stored dtypes."""


@dataclass(frozen=True)
class RewrittenCopy:
    """A rewritten copy of the source, and the trace of each rule."""

    copy: OpenedSource
    traces: list[PassTrace]


@dataclass(frozen=True)
class EquivalenceChecker:
    """Equivalence check against `before`. `widths` allows inputs and outputs of other widths."""

    before: OpenedSource
    given: UserInputs
    seeds: int
    widths: bool
    progress: Progress

    def __call__(
        self,
        made: RewrittenCopy,
        *,
        like: RewrittenCopy | None = None,
        only: tuple[str, str] | None = None,
        locate: bool = True,
    ) -> VerifyReport:
        """Check that `made` is equivalent within the guarantees of its passes (or of those of `like`).

        `only` and `locate` as for `compare_programs`.
        """
        promised = _combine_promises((like or made).traces)
        require_torch(
            "the equivalence check", f", or {format_no_verify_option()} to write without an equivalence check"
        )
        before = self.before
        try:
            return compare_programs(
                before.program, made.copy.program, seeds=self.seeds, precisions=CHECK_PRECISIONS, exactness=promised,
                describe=before.describe, progress=self.progress, mapping=_map_replaced_values(made.traces),
                further=self.given.plans(before.program, before.describe), widths=self.widths, only=only,
                locate=locate, ranges=self.given.ranges)
        except NotSupported as lacking:
            reason = f"{lacking}; {format_no_verify_option()} writes without an equivalence check"
            return VerifyReport("not verified", promised.exactness, reason=reason)


def require_torch(who: str, otherwise: str = "") -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{who} runs on PyTorch, which is not installed: pip install 'mil-ane-passes[verify]'"
                         f"{otherwise}")


def _map_replaced_values(traces: Sequence[PassTrace]) -> dict[str, str]:
    """Map each removed value to the value that replaces it after all passes."""
    found: dict[str, str] = {}
    for trace in reversed(traces):  # last first: a replacement may itself have been replaced
        for gone, other in reversed(trace.replaced.items()):
            found[gone] = found.get(other, other)
    return found


def _combine_promises(traces: Sequence[PassTrace]) -> Strictness:
    """Combine the guarantees of all rewrites that fired."""
    fired = [trace for trace in traces if trace.strength is not None]
    weakest = max((trace.strength for trace in fired if trace.strength), key=list(Exactness).index,
                  default=Exactness.BITWISE)
    return Strictness(
        weakest, any(trace.fixes_nonfinite for trace in fired), sum(trace.moves for trace in fired),
        ulps=sum(trace.ulps for trace in fired), keeps_nonfinite=all(trace.keeps_nonfinite for trace in fired),
        changes=tuple(change for trace in fired for change in trace.changes),
        smallest_size=max((trace.smallest_size for trace in fired), default=1),
        largest_size=min((trace.largest_size for trace in fired), default=math.inf),
        within=(max((trace.within[0] for trace in fired), default=0.0),
                min((trace.within[1] for trace in fired), default=math.inf)))
