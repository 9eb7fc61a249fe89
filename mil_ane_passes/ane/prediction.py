"""The entire prediction: matches rules, assigns support, cost and backend to ops, and matches plan rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from coremltools.converters.mil.mil import Block, Operation, Program

from ..ir.loop_steps import UnknownStepCount, count_steps
from ..ir.query import get_consumers, iterate_blocks
from ..passes.contract import Hit, Miss, PlanRule, Rule
from ..passes.engine import iterate_hits_and_misses
from ..passes.plan import Cost, Plan, Row, Segment
from ..passes.rule_class import RuleFailure, convert_rule_errors
from ..passes.targets import parse_target
from ..utils.errors import RuleError
from ..utils.garbage_collection import pause_garbage_collection
from .cost import estimate_cost
from .segments import find_cheapest_partition
from .sizes import Sizes, has_symbolic_shape, iterate_inputs, make_program_sizes
from .support import Support, determine_support

__all__ = ["RuleResult", "iterate_rule_results", "predict_plan", "update_unmeasured"]

_MAX_COUNTED_STEPS = 1024
"Largest number of loop steps that are counted; a longer loop, or one of unknown length, is estimated as one step."


@dataclass(slots=True)
class RuleResult:
    """One answer of one rule: a hit or a near miss, and its function.

    `fixed_by` is the pass that fixes a hit, in the spelling of `--passes`; `not_fixed_because` is the reason why no
    rewrite does.
    """

    rule: Rule
    answer: Hit | Miss
    function: str
    fixed_by: str = ""
    not_fixed_because: str = ""


def predict_plan(
    program: Program, rules: Iterable[Rule], *, target: str = "all", package: Any = None,
) -> tuple[Plan, list[RuleResult]]:
    """Predict where each op runs, and collect the findings of `rules`, in the order of rules, those on the plan last.

    The program is not changed. A rule that fails is in the plan's `failed`, and the others are complete.

    Raises InputError for an unknown target.
    """
    with pause_garbage_collection():
        generations = parse_target(target)
        rules = list(rules)
        failures: list[RuleFailure] = []
        found = list(iterate_rule_results(rules, program, target, failures))
        refusals: dict[Operation, list[tuple[Rule, Hit]]] = defaultdict(list)
        for item in found:
            if isinstance(item.answer, Hit) and item.rule.refuses:
                for op in item.answer.covers:
                    refusals[op].append((item.rule, item.answer))
        sizes = make_program_sizes(program, package)
        rows = list(_iterate_rows(program, refusals, generations, sizes))
        plan = Plan(program, generations, rows, [], package, failed=failures, sizes=sizes)
        plan.segments = list(_assign_backends(program, rows, plan))
        found += _match_plan_rules(rules, plan)
        _record_codes(rows, found)
        return plan, found


def update_unmeasured(plan: Plan, found: Iterable[RuleResult]) -> list[RuleResult]:
    """Match the rules about unmeasured ops again, after a measurement has changed `plan`; the others stay."""
    found = list(found)
    rules = dict.fromkeys(item.rule for item in found if item.rule.unmeasured)
    kept = [item for item in found if not item.rule.unmeasured]
    updated = [*kept, *_match_plan_rules(rules, plan)]
    codes = {rule.code for rule in rules}
    for row in plan.rows:
        row.codes = [code for code in row.codes if code not in codes]
    _record_codes(plan.rows, updated)
    return updated


def _match_plan_rules(rules: Iterable[Rule], plan: Plan) -> list[RuleResult]:
    """Match the plan rules among `rules` that apply to a generation of the plan."""
    where = {row.op: row.function for row in plan.rows}
    found: list[RuleResult] = []
    for rule in rules:
        if isinstance(rule, PlanRule) and any(map(rule.targets.includes, plan.generations)):
            rule._generations = tuple(plan.generations)
            found += _match_plan_rule(rule, plan, where)
    return found


def _match_plan_rule(rule: PlanRule, plan: Plan, where: Mapping[Operation, str]) -> list[RuleResult]:
    """Match `rule` against the plan. If it fails, the failure is added to the plan and no results are returned."""
    try:
        with convert_rule_errors(type(rule)):
            return [RuleResult(rule, answer, where.get(answer.op, "")) for answer in rule.match_plan(plan)]
    except RuleError as error:
        plan.failed.append(error.failure)
        return []


def iterate_rule_results(
    rules: Iterable[Rule], program: Program, target: str, failures: list[RuleFailure],
) -> Iterator[RuleResult]:
    """Yield the hits and near misses of rules in ops, blocks and programs."""
    op_index: dict[str, list[tuple[str, Operation]]] = defaultdict(list)
    blocks = list(iterate_blocks(program))
    for function, block in blocks:
        for op in block.operations:
            op_index[op.op_type].append((function, op))
    for rule in rules:
        for function, answer in iterate_hits_and_misses(rule, program, target=target, op_index=op_index, blocks=blocks,
                                                        failures=failures):
            if isinstance(answer, Hit) or answer.near:
                yield RuleResult(rule, answer, function)


def _iterate_ops_in_order(block: Block, depth: int = 0, times: int = 1) -> Iterator[tuple[Operation, int, int]]:
    """Yield the ops of `block` with their nesting depth and how often they run (as far as trip counts are known)."""
    for op in block.operations:
        if op.op_type != "const":
            yield op, depth, times
        steps = _count_steps_or_one(op) if op.op_type == "while_loop" else 1
        for inner in op.blocks:
            yield from _iterate_ops_in_order(inner, depth + 1, times * steps)


def _count_steps_or_one(op: Operation) -> int:
    try:
        return max(1, count_steps(op, _MAX_COUNTED_STEPS)[0])
    except UnknownStepCount:
        return 1


def _iterate_rows(program: Program, refusals: Any, generations: Any, sizes: Mapping[str, Sizes]) -> Iterator[Row]:
    for name, function in program.functions.items():
        fixed = not any(has_symbolic_shape(var) for var in function.inputs.values())
        for index, (op, depth, times) in enumerate(_iterate_ops_in_order(function)):
            told = determine_support(op, refusals.get(op, ()), generations)
            if depth and told.takes and not op.op_type.startswith("constexpr_"):
                told = Support(
                    "unknown", False, f"inside a {_get_outer_op_type(op)}, which runs on the CPU; not measured"
                )
            elif (
                fixed
                and told.ane == "yes"
                and any(has_symbolic_shape(var) for var in (*iterate_inputs(op), *op.outputs))
            ):
                told = Support("unknown", False, f"{op.op_type} on a shape that depends on values; not measured")
            spent = Cost(0.0, 0.0, 0.0) if op.op_type.startswith("constexpr_") else \
                estimate_cost(op, takes=told.takes, sizes=sizes[name])
            if times > 1:
                spent = spent.repeated(times)
            yield Row(name, index, op, depth, told.ane, told.takes, spent, told.reason, reported=op in refusals)


def _get_outer_op_type(op: Operation) -> str:
    return str(op.enclosing_block.outer_op.op_type)


def _assign_backends(program: Program, rows: list[Row], plan: Plan) -> Iterator[Segment]:
    """Set the backend of each row and the total of the plan, and yield the segments."""
    for name, group in groupby(rows, key=lambda row: row.function):
        mine = list(group)
        weights = [row for row in mine if row.op.op_type.startswith("constexpr_")]
        placed = [row for row in mine if not row.op.op_type.startswith("constexpr_")]
        ends = set(program.functions[name].outputs)
        made = [sum(var in ends for var in row.op.outputs) for row in placed]
        engines, spent = find_cheapest_partition([row.cost for row in placed], made)
        plan.total += spent
        where = {}
        for row, engine in zip(placed, engines):
            row.engine, row.backend = engine, "ane" if engine == "ane" else "cpu"
            where[row.op] = row
        for row in weights:
            readers = [where[reader] for var in row.op.outputs[:1] for reader in get_consumers(var) if reader in where]
            if readers:
                row.engine, row.backend = readers[0].engine, readers[0].backend
        for backend, run in groupby(placed, key=lambda row: row.backend):
            members = list(run)
            yield Segment(name, backend, members[0].index, members[-1].index,
                          sum(row.cost.of(row.engine) for row in members))


def _record_codes(rows: list[Row], found: list[RuleResult]) -> None:
    at = {row.op: row for row in rows}
    for item in found:
        for op in item.answer.covers if isinstance(item.answer, Hit) else ():
            row = at.get(op)
            if row is not None and item.rule.code not in row.codes:
                row.codes.append(item.rule.code)
