"""Find models whose tensors are all tiny."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Builder, Var, types

from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_static_shape
from ..passes.contract import Example, Hit, Miss, PlanRule
from ..passes.evidence import cite_surgery_tip
from ..passes.examples import make_example
from ..passes.plan import Plan
from ..utils.text_format import format_count
from ._plan_rules import COST_MODEL


class TinyTensors(PlanRule):
    """No tensor that the model computes has as many as 64 elements, so the CPU gets it all.

    why     Where inputs and outputs are too small the work is given to the CPU. One source says to go for 64 elements
            at least. That is a lower bound that nobody measured: by the published cost model a segment must save 0.25
            ms, which takes millions of elements in a few ops.
    when    A function all of whose inputs, outputs and values between have fewer than `least` elements. A small input
            (a time step, a scale) beside large ones is ordinary and no finding. Open dimensions count as large.
    fix     None is needed: the CPU is the faster place. To use the ANE put many such inputs into one batch.
    """

    code, slug = "ANE505", "tiny-tensors"
    level, confidence = "note", "low"
    advice = "Put many inputs into one batch, or leave the model on the CPU: it is the faster place."
    evidence = (
        cite_surgery_tip(
            "if inputs and outputs are too small to be efficient, the work is delegated to the CPU; go for a "
            "total flattened size of 64 at least"
        ),
        COST_MODEL,
    )
    least: int = 64
    "Elements of the largest tensor from which it is not tiny; the source's number."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            inputs = plan.program.functions[name].inputs.values()
            sizes = []
            for size in map(_count_elements, (*inputs, *(var for row in rows for var in row.op.outputs))):
                if size is None or size >= self.least:
                    break
                sizes.append(size)
            else:
                yield Hit(rows[0].op, covers=[row.op for row in rows],
                          note=f"the largest of {format_count(len(sizes), 'tensor')} has "
                               f"{format_count(max(sizes, default=0), 'element')}, fewer than {self.least}")

    def examples(self) -> Iterable[Example]:
        yield make_example("a vector", lambda x: Builder.relu(x=x, name="y"), x=(1, 63))
        yield make_example("enough", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, 64))
        yield make_example(
            "grows inside",
            lambda x: Builder.reduce_sum(x=Builder.tile(x=x, reps=[64, 1]), name="y"),
            reason="",
            x=(1, 2),
        )
        yield make_example("open", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, None))


def _count_elements(var: Var) -> int | None:
    """Return the number of elements; None where it is unbounded or unknown."""
    if not types.is_tensor(var.sym_type):
        return 1 if types.is_scalar(var.sym_type) or types.is_str(var.sym_type) else None
    shape = get_static_shape(var)
    return None if shape is None else prod(shape)
