"""Unroll loops whose number of steps is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var

from ...ir.builder import RewriteBuilder
from ...ir.loop_steps import UnknownStepCount, count_steps
from ...ir.query import is_opaque
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_private_route
from ...passes.examples import build_program, make_example, make_weight
from ...rules.control_flow import ControlFlow
from ...utils.text_format import format_count
from ._block_inlining import BlockCopier, can_replace_value, make_replacement_outputs
from ._unrolled_size import (
    MAX_CHAIN_PRODUCTS,
    MAX_FUNCTION_OPS,
    UnrolledSize,
    measure_step_chain,
    measure_unrolled_size,
)

__all__ = ["build_counted_loop", "build_nested_loops"]


class UnrollWhileLoop(Rewrite):
    """Put the steps of a loop one behind the other where their number is known.

    why     while_loop is unsupported on the ANE: it runs on the CPU, and all that stands in its body with it. A torch
            GRU is converted to such loops.
    when    A while_loop whose condition depends only on what is known when the model is made, such as a counter that
            starts and ends at constants: condition and counter are worked out until it stops. Not more than `max_steps`
            steps, and not where the functions together would have more than `max_ops` ops: steps of a loop in a loop
            multiply, which is counted before anything is written. No random numbers and no states in the body, and no
            sizes that change. Not in a loop that is not written out itself: that runs on the CPU as a whole.
    exact   bitwise: the same ops on the same values in the same order. What depends on the counter alone is a constant
            in each step; what is the same in all steps is computed once.
    cost    The ops of the body once a step. Weights are not copied: every step reads the same ones.

    before
        %0: fp16[2, 3] = abs(x=%x)
        %1: int32, %y_1: fp16[2, 3], %y_2: fp16[2, 3] = while_loop(loop_vars=(0, %x, %0))
          (%2: int32, %3: fp16[2, 3], %4: fp16[2, 3]) {
            %5: bool = less(x=%2, y=2)
          } -> (%5)
          (%2: int32, %3: fp16[2, 3], %4: fp16[2, 3]) {
            %6: int32 = add(x=%2, y=1)
            %7: fp16 = cast(x=%2, dtype=fp16)
            %8: fp16[2, 3] = add(x=%3, y=%7)
            %9: fp16[2, 3] = mul(x=%8, y=%4)
          } -> (%6, %9, %4)
    after
        %0: fp16[2, 3] = abs(x=%x)
        %1: fp16[2, 3] = add(x=%x, y=0.0)
        %2: fp16[2, 3] = mul(x=%1, y=%0)
        %3: fp16[2, 3] = add(x=%2, y=1.0)
        %y_1: fp16[2, 3] = mul(x=%3, y=%0)
        %y_2: fp16[2, 3] = identity(x=%0)
    """

    fixes = (ControlFlow,)
    stage = "structure"
    after = ("fold_constants", "inline_constant_branch")
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("while_loop",)
    evidence = (
        cite_private_route("cond and while_loop have no form of their own on any generation"),
    )

    max_steps: int = 256
    "The most steps that are unrolled."
    max_ops: int = MAX_FUNCTION_OPS
    """The most ops that all functions together may have once their loops are unrolled: they are compiled together. The
    largest network of those at hand has 2475, and coremltools takes minutes for some 10000."""
    max_chain: int = MAX_CHAIN_PRODUCTS
    """The longest chain of products that depend on each other, through this loop and the ops before and after it in the
    function: loops in a row add up. An M6 compiles 386 convs in a row."""

    def __init__(self) -> None:
        self._expansions: WeakKeyDictionary[Operation, tuple[int, int]] = WeakKeyDictionary()

    def match(self, op: Operation) -> Hit | Miss:
        wrong = next(filter(None, map(_find_unroll_obstacle, _iterate_computing_ops(op))), None)
        if wrong is not None:
            return Miss(op, wrong)
        around = _find_enclosing_loop(op)
        if around is not None:
            outer = self.match(around)
            return Miss(op, f"it stands in a loop that is not written out: {outer.reason}") if isinstance(outer, Miss) \
                else Miss(op, "it is written out with the loop around it, a copy a step", near=False)
        try:
            steps, ops = self._measure_expansion(op)
        except UnknownStepCount as reason:
            return Miss(op, str(reason))
        nested = (
            ", with the loops in it written out,"
            if any(each.op_type == "while_loop" for each in _iterate_computing_ops(op))
            else ""
        )
        if steps * ops > self.max_ops:
            return Miss(op, f"{steps} steps of {ops} ops{nested} make {steps * ops}, more than {self.max_ops} "
                            "(max_ops)")
        beside = self._count_other_ops(op)
        if steps * ops + beside > self.max_ops:
            return Miss(op, f"{steps} steps of {ops} ops{nested} make {steps * ops}, and with the {beside} beside "
                            f"them more than {self.max_ops} (max_ops)")
        chain = measure_unrolled_size(op, self._size, UnrolledSize(self.max_chain, self.max_ops), self.functions).chain
        if chain > self.max_chain:
            return Miss(
                op,
                f"{format_count(steps, 'step')} would make {chain} products that depend on each other in the "
                f"function, more than {self.max_chain} (max_chain)",
            )
        for var, made, old in zip(op.loop_vars, op.blocks[1].outputs, op.outputs):
            if not (can_replace_value(var, old) and can_replace_value(made, old)):
                return Miss(op, f"the sizes of '{old.name}' change from step to step")
        return Hit(op, note=f"{format_count(steps, 'step')} of {format_count(ops, 'op')}", steps=steps)

    def _measure_expansion(self, op: Operation) -> tuple[int, int]:
        """Return the steps of a loop and the ops of one step, with nested loops unrolled.

        Raise UnknownStepCount as `count_steps`. A nested loop whose number of steps differs from step to step counts as
        one step.
        """
        if op not in self._expansions:
            steps, counting = count_steps(op, self.max_steps)
            self._expansions[op] = steps, self._count_block_ops(op.blocks[1], counting)
        return self._expansions[op]

    def _size(self, op: Operation) -> UnrolledSize | None:
        """Return the size of the unrolled loop; None for another op, a loop that is not unrolled, or a nested loop."""
        if op.op_type != "while_loop" or _find_enclosing_loop(op) is not None:
            return None
        try:
            steps, ops = self._measure_expansion(op)
        except UnknownStepCount:
            return None
        return UnrolledSize(steps * measure_step_chain(op.blocks[1], self._measure_nested_chain), steps * ops)

    def _measure_nested_chain(self, op: Operation) -> int:
        """Return the dependent products of a nested loop."""
        try:
            steps, _ = self._measure_expansion(op)
        except UnknownStepCount:
            return 0
        return steps * measure_step_chain(op.blocks[1], self._measure_nested_chain)

    def _count_block_ops(self, block: Block, without: Collection[Operation] = ()) -> int:
        """Count the ops that a block has once the loops in it are unrolled."""
        return sum(self._count_op(op) for op in block.operations
                   if not op.op_type.startswith("const") and op not in without)

    def _count_op(self, op: Operation) -> int:
        if op.op_type == "while_loop":
            try:
                steps, ops = self._measure_expansion(op)
            except UnknownStepCount:
                return 1 + self._count_block_ops(op.blocks[1])
            return steps * ops
        return 1 + sum(map(self._count_block_ops, op.blocks))

    def _count_other_ops(self, op: Operation) -> int:
        """Count the other ops of all functions: loops before `op`, which are rewritten first, as unrolled where
        possible, loops after it as they are."""
        top, block = op, op.enclosing_block
        while not isinstance(block, Function):
            top, block = block.outer_op, block.outer_op.enclosing_block
        total, before = 0, True
        for each in (each for function in self.functions or [block] for each in function.operations):
            before = before and each is not top
            if each.op_type.startswith("const") or each is op:
                continue
            written = self._count_op(each) if before and each.op_type == "while_loop" else 0
            plain = 1 + sum(1 for _ in _iterate_computing_ops(each)) if each.blocks else 1
            total += written if 0 < written and total + written <= self.max_ops else plain
        return total

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        copies, now = BlockCopier(mb), list(hit.op.loop_vars)
        for _ in range(hit.steps):
            now = copies.step(hit.op.blocks[1], now)
        return make_replacement_outputs(mb, hit.op, [copies.real(var) for var in now])

    def examples(self) -> Iterable[Example]:
        yield Example("counted", lambda: build_counted_loop(2))
        yield Example("with weights", _build_weighted_loop)
        yield Example("a loop in a loop", _build_dependent_loops)
        yield Example("a branch by the step", _build_alternating_loop)
        yield Example("no step", lambda: build_counted_loop(0))
        yield Example(
            "passed through", lambda: build_counted_loop(3, lambda i, x, z: (x, Builder.add(x=x, y=z)))
        )
        yield Example("decided by values", _build_data_dependent_loop,
                      reason="the number of steps depends on 'x', which is known only at run time")
        yield Example("many steps", lambda: build_counted_loop(9), options={"max_steps": 8},
                      reason="it runs more than 8 steps (max_steps)")
        yield Example("many ops", lambda: build_counted_loop(9), options={"max_ops": 8},
                      reason="9 steps of 3 ops make 27, more than 8 (max_ops)")
        yield Example("many ops in a nest", lambda: build_nested_loops(4, 5), options={"max_ops": 19},
                      reason="5 steps of 4 ops, with the loops in it written out, make 20, more than 19 (max_ops)")
        yield Example("a nest", lambda: build_nested_loops(4, 5))
        yield Example("one after the other", lambda: _build_sequential_loops(5))
        yield Example("in one that stays", lambda: build_nested_loops(4, None),
                      reason="it stands in a loop that is not written out: the number of steps depends on 'x', which "
                             "is known only at run time")
        yield Example("random numbers", lambda: build_counted_loop(3, lambda i, x, z: (Builder.add(
            x=x, y=Builder.random_normal(shape=[2, 3], mean=np.float16(0), stddev=np.float16(1))), z)),
            reason="random_normal in it makes others each time")
        yield Example(
            "growing",
            lambda: build_counted_loop(3, lambda i, x, z: (Builder.concat(values=[x, z], axis=0), z)),
            reason="the sizes of 'y_1' change from step to step",
        )
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _find_unroll_obstacle(op: Operation) -> str | None:
    if op.op_type.startswith("random_"):
        return f"{op.op_type} in it makes others each time"
    if op.op_type in ("read_state", "coreml_update_state", "write_state"):
        return f"{op.op_type} in it keeps to its place"
    return f"coremltools cannot read the {op.op_type} in it" if is_opaque(op) else None


def _iterate_computing_ops(outer: Operation | Block) -> Iterator[Operation]:
    """Yield the ops in the blocks of an op, or in a block, that compute."""
    for op in outer.operations if isinstance(outer, Block) else ():
        if not op.op_type.startswith("const"):
            yield op
        yield from _iterate_computing_ops(op)
    for block in outer.blocks if isinstance(outer, Operation) else ():
        yield from _iterate_computing_ops(block)


def _find_enclosing_loop(op: Operation) -> Operation | None:
    """Return the innermost while_loop that contains `op`, or None."""
    block = op.enclosing_block
    while not isinstance(block, Function):
        if block.outer_op.op_type == "while_loop":
            found: Operation = block.outer_op
            return found
        block = block.outer_op.enclosing_block
    return None


def build_counted_loop(steps: int, step: Any = None) -> Program:
    def ordinary(i: Var, x: Var, z: Var) -> tuple[Var, Var]:
        return Builder.mul(x=Builder.add(x=x, y=Builder.cast(x=i, dtype="fp16")), y=z), z

    def body(x: Var) -> list[Var]:
        outputs = Builder.while_loop(
            _cond=lambda i, x, z: Builder.less(x=i, y=np.int32(steps)),
            _body=lambda i, x, z: (Builder.add(x=i, y=np.int32(1)), *(step or ordinary)(i, x, z)),
            loop_vars=(np.int32(0), x, Builder.abs(x=x)), name="y")
        return list(outputs[1:])

    return build_program(body, x=(2, 3))


def _build_weighted_loop() -> Program:
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda i, x: Builder.less(x=i, y=np.int32(3)),
            _body=lambda i, x: (Builder.add(x=i, y=np.int32(1)), Builder.linear(x=x, weight=make_weight(8, 8))),
            loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_program(body, x=(2, 8))


def _build_dependent_loops() -> Program:
    def inner(i: Var, x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda j, x: Builder.less_equal(x=j, y=i),
            _body=lambda j, x: (Builder.add(x=j, y=np.int32(1)), Builder.mul(x=x, y=np.float16(0.5))),
            loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_counted_loop(3, lambda i, x, z: (inner(i, x), z))


def _build_alternating_loop() -> Program:
    def chosen(i: Var, x: Var) -> Var:
        odd = Builder.equal(x=Builder.mod(x=i, y=np.int32(2)), y=np.int32(1))
        made: Var = Builder.cond(pred=odd, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x))
        return made

    return build_counted_loop(3, lambda i, x, z: (chosen(i, x), z))


def _build_data_dependent_loop() -> Program:
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda x: Builder.less(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
            _body=lambda x: Builder.sub(x=Builder.mul(x=x, y=np.float16(2)), y=np.float16(1)), loop_vars=(x,))
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs

    return build_program(body, x=(2, 3))


def build_nested_loops(inner: int, outer: int | None) -> Program:
    """Build a loop of `inner` steps in one of `outer` steps (None: a dynamic number)."""
    def body(x: Var) -> Var:
        if outer is not None:
            outputs: tuple[Var, ...] = Builder.while_loop(
                _cond=lambda i, x: Builder.less(x=i, y=np.int32(outer)),
                _body=lambda i, x: (Builder.add(x=i, y=np.int32(1)), _build_halving_loop(inner, x)),
                loop_vars=(np.int32(0), x),
            )
            return outputs[1]
        outputs = Builder.while_loop(
            _cond=lambda x: Builder.greater(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
            _body=lambda x: _build_halving_loop(inner, x), loop_vars=(x,))
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs

    return build_program(body, x=(2, 3))


def _build_halving_loop(steps: int, x: Var) -> Var:
    """Build a loop of `steps` steps of one op."""
    outputs: tuple[Var, ...] = Builder.while_loop(
        _cond=lambda j, x: Builder.less(x=j, y=np.int32(steps)),
        _body=lambda j, x: (Builder.add(x=j, y=np.int32(1)), Builder.mul(x=x, y=np.float16(0.5))),
        loop_vars=(np.int32(0), x))
    return outputs[1]


def _build_sequential_loops(steps: int) -> Program:
    return build_program(lambda x: _build_halving_loop(steps, _build_halving_loop(steps, x)), x=(2, 3))
