"""Find tensors with nearly all elements on one axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Builder, Var, types

from ..ane.limits import find_limit
from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_static_shape
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.evidence import cite_m4_study, cite_surgery_tip
from ..passes.examples import make_example
from ..passes.plan import Plan
from ..utils.text_format import format_count
from ._plan_rules import format_list, map_inputs_to_ops

_SUPPORTED_TYPES = (types.fp16, types.int8, types.uint8)


class Lopsided(PlanRule):
    """A large tensor has nearly all its elements on one axis.

    why     One source says to chunk or parallelise what has "some inexcusable shape like (50000,)". It gives no limit
            and no measurement. Against it: a vector of 65536 was accepted on an M4, so such shapes are supported there.
    when    An fp16 or 8-bit input, output or value with more than `longest` elements on one axis and not more than
            `others` on all others together. One finding for each function, the longest first. What is longer than an
            axis may be (16384 up to M3, 65536 from M4 on) is unsupported, and left to the rule on dimension limits.
    fix     Reshape elementwise work from [n] to [k, n / k]; cut a long signal into chunks that go into the batch, with
            as much overlap as the kernels reach.
    """

    code, slug = "ANE506", "lopsided"
    level, confidence = "note", "low"
    advice = "Reshape long vectors to two axes, or cut them into chunks that go into the batch."
    evidence = (
        cite_surgery_tip("tensors lopsided to a shape like (50000,): chunk or parallelise"),
        cite_m4_study("contradicts it: a relu of (65536,) is accepted", rows=True),
        Community("a width of 16384 passes, 17920 fails", chip="M3 Ultra", os="macOS 26.3.1", date="2026-03-20",
                  source="https://github.com/ncdrone/rustane/issues/13"),
    )
    longest: int = 8192
    "Most elements on the long axis that are not reported; the number is ours, half of the limit of M1 to M3."
    others: int = 1
    "Most elements on all other axes together; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            made = {var: row.op for row in rows for var in row.op.outputs}
            read = map_inputs_to_ops(plan.program.functions[name].inputs.values(), rows)
            found = [var for var in (*read, *made) if self._is_lopsided(var)]
            if found:
                found.sort(key=lambda var: max(var.shape), reverse=True)
                at = [(made | read)[var] for var in found]
                yield Hit(at[0], covers=list(dict.fromkeys(at)), note=_format_note(found))

    def _is_lopsided(self, var: Var) -> bool:
        if not types.is_tensor(var.sym_type) or var.dtype not in _SUPPORTED_TYPES:
            return False
        shape = get_static_shape(var)
        return bool(shape and self.longest < max(shape) <= self._limit and prod(shape) <= max(shape) * self.others)

    @property
    def _limit(self) -> int:
        """Return the largest extent of an axis that every requested generation supports."""
        strictest = find_limit("spatial", self.generations)
        return strictest.most if strictest else 0

    def examples(self) -> Iterable[Example]:
        yield make_example("a signal", lambda x: Builder.tanh(x=x, name="y"), x=(16000,))
        yield make_example("padded with ones", lambda x: Builder.tanh(x=x, name="y"), x=(1, 1, 10000, 1))
        yield make_example("short", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(8192,))
        yield make_example("folded", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(4, 4000))
        yield make_example("refused", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(50000,))


def _format_note(found: list[Var]) -> str:
    shown = [f"%{var.name} {tuple(int(extent) for extent in var.shape)}" for var in found]
    return f"{format_count(len(found), 'tensor')} on one axis: {format_list(shown)}"
