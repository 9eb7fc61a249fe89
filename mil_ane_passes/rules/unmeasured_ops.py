"""Ops without a measurement on the ANE of the target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation

from ..ane.op_support import OP_SUPPORT, find_observations, find_row
from ..passes.contract import Evidence, Example, Hit, Miss, PlanRule, Severity
from ..passes.evidence import cite_m4_study
from ..passes.examples import make_example
from ..passes.plan import Plan, Row

_KINDS = {"vendor": "Apple", "measured": "measured", "community": "reported"}


class UnmeasuredOps(PlanRule):
    """No measurement of these ops on the ANE of the target is known.

    why     The placement of such an op is predicted from the nearest evidence: another chip, or the op type with other
            dtypes. Without any, the op is predicted to be unsupported, and neighbours may fall back with it. State ops
            decide where a language model with a cache runs: for read_state and coreml_update_state one measurement
            states its chip, an M4; for slice_update two sources contradict each other.
    when    Ops for whose type, dtypes or position no measurement through Core ML is known on the target (for `all`: on
            one of the generations). Ops with other findings of unknown support are not repeated. One finding per
            reason, with the chips and sources of observations.
    fix     Measure it: `mil-ane-passes mac-script` writes a folder to run on a Mac, and `lint --measured` reads the
            result.
    """

    code, slug = "ANE299", "unmeasured-op"
    unmeasured = True
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Measure it on a Mac (with the folder written by mac-script), and pass the result to lint --measured."
    evidence = (
        cite_m4_study("276 op cases were tried through Core ML; op types without a case were not measured"),
        *dict.fromkeys(source for row in OP_SUPPORT.values() for source in row.sources),
    )

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in plan.rows:
            if row.ane == "unknown" and not row.reported:
                found[row.function, row.reason].append(row)
        for rows in sorted(found.values(), key=_rank_ops):
            op = rows[0].op
            yield Hit(op, note=f"{rows[0].reason}{_describe_sources(op)}", covers=[row.op for row in rows],
                      evidence=_collect_sources(op))

    def examples(self) -> Iterable[Example]:
        yield make_example("seen on other chips", lambda x: Builder.relu(x=x, name="y"), x=(2, 3))
        yield make_example(
            "a row of a cache",
            lambda x: Builder.slice_update(x=x, update=np.ones((1, 3), np.float16), begin=[1, 0], end=[2, 3], name="y"),
            opset=ct.target.iOS18,
            x=(4, 3),
        )
        yield make_example("no op", lambda x: x, reason="", x=(2, 3))


def _rank_ops(rows: list[Row]) -> tuple[bool, bool]:
    """Rank ops on which sources disagree first, then those that are predicted to be unsupported."""
    return not find_row(rows[0].op.op_type).sources, rows[0].takes


def _collect_sources(op: Operation) -> tuple[Evidence, ...]:
    """Collect the sources on ops of this type, for and against."""
    seen = (each.evidence for each in find_observations(op.op_type).values())
    return tuple(dict.fromkeys([*seen, *find_row(op.op_type).sources]))


def _describe_sources(op: Operation) -> str:
    """Describe both sides, where sources disagree on ops of this type."""
    if not find_row(op.op_type).sources:
        return ""
    return "; " + "; ".join(f"{_KINDS[each.kind]}{f' on {each.chip}' if each.chip else ''}: {each.says}"
                            for each in _collect_sources(op))
