"""The rewrite engine, the only graph walk: matches rules, applies fixes, checks invariants, and writes the trace.

The invariants are those of `contract`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types

from ..ir.block_editor import BlockEditor, check_op_order
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.clone import Rollback
from ..ir.query import (
    count_ops,
    get_flat_inputs,
    get_function_name,
    is_opaque,
    is_symbolic,
    iterate_blocks,
    iterate_ops,
    iterate_weights,
)
from ..ir.type_inference import propagate_symbols
from ..ir.value_ranges import Measure
from ..utils.errors import RuleError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.mapped_files import check_files_of
from .contract import ANY_OP, BlockRewrite, BlockRule, Hit, Miss, PlanRule, ProgramRewrite, Rewrite, Rule
from .pass_trace import PassTrace, record_result
from .rule_class import (
    Position,
    RuleFailure,
    check_answer,
    convert_rule_errors,
    format_rule_location,
    is_rule_fault,
    make_rule_error,
)
from .targets import is_applicable, parse_target

__all__ = [
    "MAX_ROUNDS",
    "FunctionBlocks",
    "OpIndex",
    "PassTrace",
    "RunSettings",
    "append_repeated",
    "apply_rewrite",
    "find_matches",
    "iterate_hits_and_misses",
    "run_rewrites",
    "try_rewrite",
]

OpIndex = Mapping[str, Sequence[tuple[str, Operation]]]
"""The ops of a program by type, each with the name of its function."""
FunctionBlocks = Sequence[tuple[str, Block]]
"""The blocks of a program, each with the name of its function."""
MAX_ROUNDS = 16
"Limit on how often the same rule may rewrite its own result before the engine reports endless rewriting."


def find_matches(rule: Rule, program: Program, *, target: str = "all", measure: Measure | None = None) -> PassTrace:
    """Find every hit and near miss of `rule` without changing the program. `measure` as for `apply_rewrite`.

    A `PlanRule` matches a prediction, not a program, and finds nothing here.
    """
    trace = PassTrace(rule.name)
    for function, answer in iterate_hits_and_misses(rule, program, target=target, measure=measure):
        record_result(trace, rule, function, answer)
    return trace


def iterate_hits_and_misses(
    rule: Rule, program: Program, *, target: str = "all", measure: Measure | None = None,
    op_index: OpIndex | None = None, blocks: FunctionBlocks | None = None, failures: list[RuleFailure] | None = None,
) -> Iterator[tuple[str, Hit | Miss]]:
    """Yield (function name, answer) for each op or block that `rule` visits, without changes; see `find_matches`.

    `op_index` has the ops of `program` by type and `blocks` its blocks, so that the program is walked once for all
    rules. If the rule fails, the failure is added to `failures` (one per rule) and the walk continues; without such a
    list, RuleError is raised.
    """
    if isinstance(rule, PlanRule) or not is_applicable(rule.targets, target):
        return
    _prepare_rule(rule, program, target, measure)
    found: RuleFailure | None = None
    try:
        for at, ask in _iterate_match_calls(rule, program, op_index, blocks):
            try:
                for answer in ask():
                    check_answer(rule, answer)
                    yield at.function or get_function_name(program, answer.op), answer
            except Exception as error:
                if not is_rule_fault(error):
                    raise
                raised = make_rule_error(type(rule), error, at)
                if failures is None:
                    raise raised from error
                found = raised.failure if found is None else replace(found, places=found.places + 1)
    finally:
        rule._computed = None
    if found is not None and failures is not None:
        failures.append(found)


def _iterate_match_calls(
    rule: Rule, program: Program, op_index: OpIndex | None, blocks: FunctionBlocks | None,
) -> Iterator[tuple[Position, Callable[[], Iterable[Hit | Miss]]]]:
    """Yield the position of each op or block that `rule` visits, or of the program, and the call that matches it."""
    if isinstance(rule, ProgramRewrite):
        yield Position(), partial(rule.match_program, program)
    elif isinstance(rule, BlockRule):
        if op_index is None or not rule.roots or not op_index.keys().isdisjoint(rule.roots):
            for function, block in iterate_blocks(program) if blocks is None else blocks:
                yield Position(function), partial(rule.match_block, block)
    else:
        ops = iterate_ops(program) if op_index is None or ANY_OP in rule.roots else (
            op for root in rule.roots for op in op_index.get(root, ()))
        for function, op in ops:
            if _is_candidate(rule, op):
                yield Position(function, op), partial(_match_op, rule, op)


def _match_op(rule: Rule, op: Operation) -> tuple[Hit | Miss]:
    return (rule.match(op),)


def _is_candidate(rule: Rule, op: Operation) -> bool:
    """Return whether `rule.match` is called for `op`."""
    return (op.op_type in rule.roots or (ANY_OP in rule.roots and op.op_type != "const")) and not is_opaque(op)


def apply_rewrite(rule: Rewrite, program: Program, *, target: str = "all", measure: Measure | None = None) -> PassTrace:
    """Apply `rule` to every match, in place.

    `measure` runs the program on the available feeds; it is used when the rule `measures`. Raises RuleError when the
    rule raises or breaks the contract. On any exception the program is restored: functions are copied before they are
    changed.
    """
    started = time.perf_counter()
    trace = PassTrace(rule.name, ops_before=count_ops(program))
    if is_applicable(rule.targets, target):
        _prepare_rule(rule, program, target, measure)
        at, rollback = Position(), Rollback(program)
        try:
            with pause_garbage_collection(), convert_rule_errors(type(rule), at):
                if isinstance(rule, ProgramRewrite):
                    _apply_to_program(rule, program, trace, rollback)
                else:
                    for name, function in program.functions.items():
                        _FunctionRewriter(rule, name, function, trace, at, rollback).go()
        except BaseException:
            rollback.restore()
            raise
        finally:
            rule._computed = None
    trace.ops_after = count_ops(program) if trace.fired else trace.ops_before
    trace.seconds = time.perf_counter() - started
    return trace


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run of several rewrites.

    `measure` runs a program on the user's feeds, `draw` on random feeds, for rules that accept them. A rule that fails
    leaves the program unchanged; with `strict` it raises RuleError, and with `stops_at_requested` it does so if it was
    requested by name.
    """

    target: str = "all"
    measure: Measure | None = None
    draw: Measure | None = None
    strict: bool = False
    stops_at_requested: bool = True

    def stops_at(self, rule: Rewrite) -> bool:
        return self.strict or (self.stops_at_requested and rule.asked)


def run_rewrites(rules: Iterable[Rewrite], program: Program, settings: RunSettings) -> list[PassTrace]:
    """Apply configured rewrites in order, in place; returns one trace each."""
    traces: dict[str, PassTrace] = {}
    op_index: Counter[str] | None = None
    last_fired = ""
    for rule in append_repeated(rules):
        if rule.name in traces and last_fired in ("", rule.name):
            continue
        if op_index is None:
            op_index = Counter(op.op_type for _, op in iterate_ops(program))
        if rule.roots and op_index.keys().isdisjoint(rule.roots):  # no op of its root types: skip the rule
            ops = op_index.total() - op_index["const"]
            trace = PassTrace(rule.name, ops_before=ops, ops_after=ops)
        else:
            measure_ranges = settings.measure or (settings.draw if rule.accepts_sampled else None)
            trace = try_rewrite(rule, program, settings.target, measure_ranges, settings.stops_at(rule))
        if trace.fired:
            op_index, last_fired = None, rule.name
        if rule.name in traces:
            traces[rule.name].extend(trace)
        else:
            traces[rule.name] = trace
    return list(traces.values())


def append_repeated(rules: Iterable[Rewrite]) -> list[Rewrite]:
    """Return `rules`, followed by those that repeat at the end."""
    listed = list(rules)
    return listed + ([rule for rule in listed if rule.repeats] if len(listed) > 1 else [])


def try_rewrite(
    rule: Rewrite, program: Program, target: str, measure: Measure | None, strict: bool,
) -> PassTrace:
    """Apply `rule` and return its trace.

    If it fails, `apply_rewrite` has restored the program; the error is raised only if `strict`.
    """
    try:
        return apply_rewrite(rule, program, target=target, measure=measure)
    except RuleError as error:
        if strict or error.failure is None:
            raise
        ops = count_ops(program)
        return PassTrace(rule.name, ops_before=ops, ops_after=ops, failed=error.failure)


def _prepare_rule(rule: Rule, program: Program, target: str, measure: Measure | None) -> None:
    check_files_of(iterate_weights(program))
    rule._generations, rule._program, rule._computed = parse_target(target), ref(program), {}
    rule._measured = measure(program) if measure is not None and rule.measures else None


def _apply_to_program(rule: ProgramRewrite, program: Program, trace: PassTrace, rollback: Rollback) -> None:
    """Apply one rule to the entire program."""
    before = {name: _get_signature(function) for name, function in program.functions.items()}
    found = list(rule.match_program(program))
    for answer in found:
        record_result(trace, rule, get_function_name(program, answer.op), answer)
    hits = [answer for answer in found if isinstance(answer, Hit)]
    if not hits:
        return
    rollback.save_all_functions()
    rule.rewrite_program(hits, program)
    trace.rounds = 1
    for name, function in program.functions.items():
        _check_op_order(rule, function)
        _check_signature(rule, name, before.get(name), function)


def _check_op_order(rule: Rewrite, function: Function) -> None:
    try:
        check_op_order(function)
    except RuleError as error:  # formatting the location reads and tokenizes a file, so it is done for errors only
        raise RuleError(f"{format_rule_location(type(rule))}: {error}") from error


def _check_signature(rule: Rewrite, name: str, before: Any, function: Function) -> None:
    if not rule.interface and _get_signature(function) != before:
        raise RuleError(f"{format_rule_location(type(rule))} changed the inputs or outputs of function '{name}': "
                        f"found {_get_signature(function)}, expected {before}")


class _FunctionRewriter:
    """Application of one rule to one function and its nested blocks."""

    def __init__(
        self, rule: Rewrite, name: str, function: Function, trace: PassTrace, at: Position, rollback: Rollback,
    ) -> None:
        self.rule, self.name, self.function, self.trace = rule, name, function, trace
        self.at, self.rollback = at, rollback
        self.signature = _get_signature(function)
        self._names: UniqueNames | None = None
        self._other_symbols: set[Var] = set()

    def go(self) -> None:
        pending: list[Block] = [self.function]
        self.at.function, self.at.op = self.name, None
        while pending:
            block = pending.pop()
            if isinstance(self.rule, BlockRewrite):
                self._rewrite_block(self.rule, block)
            else:
                self._rewrite_ops(block)
            pending.extend(inner for op in block.operations for inner in op.blocks)
        self.at.op = None
        self._check_inferred_types()
        if self.trace.fired:
            _check_op_order(self.rule, self.function)
        _check_signature(self.rule, self.name, self.signature, self.function)

    def _check_inferred_types(self) -> None:
        """Raise RuleError if coremltools could not read the result, as an op needs sizes that it infers to be equal."""
        if not self._other_symbols:
            return
        with self.function:  # coremltools' inference of a conv asks for the opset of the current block
            op = propagate_symbols(self.function, self._other_symbols)
        if op is not None:
            self.at.op = op
            raise RuleError(f"{format_rule_location(type(self.rule))} gives an operand of '{op.name}' a size that "
                            f"coremltools does not infer to be equal to that of another operand; expected a result "
                            f"that coremltools can read")

    @property
    def names(self) -> UniqueNames:
        if self._names is None:
            self._names = UniqueNames(self.function)
        return self._names

    def _rewrite_ops(self, block: Block) -> None:
        work = deque((op, 0) for op in block.operations
                     if op.op_type in self.rule.roots and not is_opaque(op))
        with ExitStack() as stack:
            editor = stack.enter_context(BlockEditor())
            mb: RewriteBuilder | None = None
            added: list[Operation] = []
            while work:
                op, depth = work.popleft()
                if op.enclosing_block is not block:
                    continue
                self.at.op = op
                answer = self.rule.match(op)
                # Near misses are reported for original ops only, not for ops that the rule has just built.
                if isinstance(answer, Hit) or not depth:
                    record_result(self.trace, self.rule, self.name, answer)
                if isinstance(answer, Miss):
                    continue
                self.rollback.keep(self.name)
                if mb is None:  # entering a block walks over it, so it is done once, and only if the rule matches
                    stack.enter_context(block)
                    mb = RewriteBuilder(block, self.names)
                built = self._apply_hit(answer, mb, editor)
                self._check_round_limit(depth + 1, op)
                added += built
                # Ops moved here out of a nested block are not new: their number is finite at any depth.
                work.extend((new, depth if new in mb.moved_ops else depth + 1) for new in built
                            if new.op_type in self.rule.roots)
            _remove_unused_ops(added, mb, editor)

    def _apply_hit(self, hit: Hit, mb: RewriteBuilder, editor: BlockEditor) -> list[Operation]:
        op = hit.op
        old = list(op.outputs)
        with mb.at(op):
            built = self.rule.rewrite(hit, mb)
        self.rule._computed = {}
        new = list(built) if isinstance(built, (list, tuple)) else [built]
        if not all(isinstance(var, Var) for var in new):
            raise RuleError(
                f"{format_rule_location(type(self.rule))} returned {built!r} for '{op.name}', expected a Var for each "
                "output"
            )
        if len(new) != len(old):
            raise RuleError(
                f"{format_rule_location(type(self.rule))} returned {len(new)} values for '{op.name}', expected "
                f"{len(old)}"
            )
        result = mb.adopt_scopes(op.scopes)
        self._check_no_cycle(result, old)
        for before, after in zip(old, new):
            self._replace_output(before, after, mb, result, editor)
        editor.remove_if_unused([op])
        if op.enclosing_block is not None:
            raise RuleError(
                f"{format_rule_location(type(self.rule))} left '{op.name}' in use although its outputs were replaced"
            )
        return result

    def _rewrite_block(self, rule: BlockRewrite, block: Block) -> None:
        for depth in range(MAX_ROUNDS + 1):
            self.at.op = None
            found = list(rule.match_block(block))
            hits = [answer for answer in found if isinstance(answer, Hit)]
            for answer in found:
                if isinstance(answer, Hit) or not hits:
                    record_result(self.trace, rule, self.name, answer)
            if not hits:
                return
            self._check_round_limit(depth + 1, hits[0].op)
            self.rollback.keep(self.name)
            with BlockEditor() as editor, block:
                mb = RewriteBuilder(block, self.names)
                added = [op for hit in hits for op in self._apply_block(rule, hit, mb, editor)]
                _remove_unused_ops(added, mb, editor)

    def _apply_block(
        self, rule: BlockRewrite, hit: Hit, mb: RewriteBuilder, editor: BlockEditor,
    ) -> list[Operation]:
        self.at.op, scopes = hit.op, hit.op.scopes
        with mb.at(hit.op):
            replaced = rule.rewrite_block(hit, mb)
        built = mb.adopt_scopes(scopes)
        self._check_no_cycle(built, replaced)
        for old, new in replaced.items():
            self._replace_output(old, new, mb, built, editor)
        editor.remove_if_unused([old.op for old in replaced])
        return built

    def _check_no_cycle(self, built: list[Operation], replaced: Iterable[Var]) -> None:
        old = set(replaced)
        for op in built:
            for var in get_flat_inputs(op):
                if var in old:
                    raise RuleError(
                        f"{format_rule_location(type(self.rule))} built '{op.name}', which reads '{var.name}', the "
                        f"value that it replaces, so it would read its own output; expected it to read the inputs of "
                        f"the old op"
                    )

    def _replace_output(
        self, old: Var, new: Var, mb: RewriteBuilder, built: list[Operation], editor: BlockEditor
    ) -> None:
        """Replace `old` by `new`, which takes over its name, after checking that both have the same type."""
        if new.sym_type is not old.sym_type and not _is_same_type(new, old):
            raise RuleError(
                f"{format_rule_location(type(self.rule))} replaced {old} by {new}; expected the same dtype and shape"
            )
        if new.op not in built:
            if not any(isinstance(block, Function) for block in old.consuming_blocks):
                self.trace.replaced[old.name] = new.name
                self._replace_value(old, new, editor)
                return
            with mb.at(old.op):  # an existing value keeps its name, so it cannot take over that of an output
                new = mb.identity(x=new)
            built.extend(mb.adopt_scopes(old.op.scopes))
        name, op_name = old.name, old.op.name
        self._replace_value(old, new, editor)
        new.name = name
        if len(new.op.outputs) == 1:
            new.op.name = op_name
        old.name = f"{name}_replaced"

    def _replace_value(self, old: Var, new: Var, editor: BlockEditor) -> None:
        editor.replace(old, new)
        is_symbolic_value = old.sym_val is not None and old.val is None
        if new.sym_type is not old.sym_type or is_symbolic_value:
            self._other_symbols.add(new)

    def _check_round_limit(self, rounds: int, op: Operation) -> None:
        self.trace.rounds = max(self.trace.rounds, rounds)
        if rounds > MAX_ROUNDS:
            raise RuleError(
                f"{format_rule_location(type(self.rule))} still matches at '{op.name}' after {MAX_ROUNDS} rounds"
            )


def _remove_unused_ops(added: Sequence[Operation], mb: RewriteBuilder | None, editor: BlockEditor) -> None:
    """Remove ops that a rewrite added and that have no users, such as those of a loop's last step."""
    if mb is not None:
        editor.remove_if_unused(op for op in added if op.op_type != "const" and op not in mb.moved_ops)


def _get_signature(function: Function) -> tuple[Any, ...]:
    ins = tuple((name, str(var.dtype), tuple(map(str, var.shape))) for name, var in function.inputs.items())
    outs = tuple(
        (var.name, str(var.sym_type) if types.is_list(var.sym_type) else (str(var.dtype), var.rank))
        for var in function.outputs
    )
    return ins, outs


def _is_same_type(new: Var, old: Var) -> bool:
    """Return whether dtype and shape are the same.

    A symbolic dimension may get another symbol, but symbolic and fixed dimensions must not change into one another.
    """
    if not types.is_compatible_type(new.sym_type, old.sym_type):
        return False
    if not types.is_tensor(new.sym_type) or not types.is_tensor(old.sym_type):
        return True
    return all(is_symbolic(one) == is_symbolic(other) for one, other in zip(new.shape, old.shape))
