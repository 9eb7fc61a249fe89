"""Plans put together by hand: each op with the costs that a test gives it."""

from __future__ import annotations

from itertools import groupby

from coremltools.converters.mil.mil import Builder, types

from mil_ane_passes.ane.segments import find_cheapest_partition
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.plan import Cost, Plan, Row, Segment
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.targets import parse_target


def chained(count, shape=(1, 4, 8, 8), body=Builder.tanh):
    """A program of `count` ops in a row, named op0, op1, ..."""
    def build(x):
        for number in range(count):
            x = body(x=x, name=f"op{number}")
        return x

    return build_program(build, dtype=types.fp16, x=shape)


def planned(*costs, built=None):
    """The plan of a chain of ops of 10 ms on the CPU: `costs` is what the ANE saves on each (None: it rejects it)."""
    built = built or chained(len(costs))
    ops = [op for op in built.functions["main"].operations if op.op_type != "const"]
    each = [Cost(None if saves is None else 10.0 - saves, 10.0, 10.0) for saves in costs]
    ends = set(built.functions["main"].outputs)
    engines, _ = find_cheapest_partition(each, [sum(var in ends for var in op.outputs) for op in ops])
    rows = [Row("main", at, op, 0, "no" if cost.ane is None else "yes", cost.ane is not None, cost,
                backend="ane" if engine == "ane" else "cpu", engine=engine)
            for at, (op, cost, engine) in enumerate(zip(ops, each, engines))]
    segments = []
    for backend, run in groupby(rows, key=lambda row: row.backend):
        members = list(run)
        segments.append(Segment("main", backend, members[0].index, members[-1].index, 0.0))
    return Plan(built, parse_target("m4"), rows, segments)


def found(name, plan, **options):
    """What rule `name` finds in `plan`: hits."""
    return [
        answer for answer in get_all_rules()[name].configured(**options).match_plan(plan) if hasattr(answer, "note")
    ]


def places(plan):
    """`ACCA`: the backends, op by op."""
    return "".join(row.backend[0].upper() for row in plan.rows)
