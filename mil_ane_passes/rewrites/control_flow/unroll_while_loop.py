"""Unroll loops with a constant trip count."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.utils import CacheDoublyLinkedList

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs, map_inputs
from ...ir.coremltools_internals import clear_block_copy, clear_users, set_input_var
from ...ir.loop_steps import UnknownStepCount, count_steps
from ...ir.query import is_opaque
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import build_program, make_example, make_weight
from ...rules.control_flow import ControlFlow
from ...utils.text_format import format_count
from ..constants._compile_time_constants import Float64Values, is_compile_time_constant
from ._block_inlining import can_replace_value, make_replacement_outputs
from ._unrolled_size import (
    MAX_CHAIN_PRODUCTS,
    MAX_FUNCTION_OPS,
    UnrolledSize,
    measure_step_chain,
    measure_unrolled_size,
)

__all__ = ["build_counted_loop", "build_nested_loops"]

_LOSSLESS_CASTS = frozenset({(types.fp16, types.fp32), *((small, types.int32) for small in (
    types.int8, types.uint8, types.int16, types.uint16)), (types.int8, types.int16), (types.uint8, types.uint16)})
"Pairs of dtypes of which the second can represent every value of the first."
_MAX_FOLDED_BYTES = 1 << 12
"Largest size in bytes of a compile-time constant that a copy stores as a const."
_LoopStep = Callable[[Var, Var, Var], "tuple[Var, Var]"]
"(counter, x, z) of a step: x and z of the next one."


class UnrollWhileLoop(Rewrite):
    """Unroll a while_loop with a constant trip count.

    why     while_loop is unsupported on the ANE: it runs on the CPU, including all ops in its body. A torch GRU is
            converted to such loops.
    when    A while_loop whose condition depends on compile-time constants only, such as a counter with constant start
            and end: condition and counter are evaluated until the loop ends. At most `max_steps` steps, and at most
            `max_ops` ops in all functions together; steps of nested loops multiply, which is checked before anything is
            built. No random numbers, states or changing shapes in the body. Not inside a loop that is not unrolled,
            which runs entirely on the CPU.
    exact   bitwise: the same ops on the same values in the same order. Values that depend only on the counter are
            constants in each step; loop-invariant values are computed once.
    cost    the ops of the body once per step. Weights are not copied: all steps share them.

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
        cite_ane_compiler("cond and while_loop have no equivalent on any generation"),
    )

    max_steps: int = 256
    "Maximum number of steps to unroll."
    max_ops: int = MAX_FUNCTION_OPS
    """Maximum number of ops of all functions after unrolling: they are compiled together. The largest network in our
    records has 2475, and coremltools takes minutes for about 10000."""
    max_chain: int = MAX_CHAIN_PRODUCTS
    """Maximum length of a chain of dependent products through this loop and the ops before and after it in the
    function: loops in sequence add up. An M6 compiles 386 convs in sequence."""

    def __init__(self) -> None:
        self._expansions: WeakKeyDictionary[Operation, tuple[int, int]] = WeakKeyDictionary()

    def match(self, op: Operation) -> Hit | Miss:
        reason = next(filter(None, map(_find_unroll_obstacle, _iterate_computing_ops(op))), None)
        if reason is not None:
            return Miss(op, reason)
        outer_loop = _find_enclosing_loop(op)
        if outer_loop is not None:
            outer = self.match(outer_loop)
            if isinstance(outer, Miss):
                return Miss(op, f"it is inside a loop that is not unrolled: {outer.reason}")
            return Miss(op, "it is unrolled with the enclosing loop, one copy per step", near=False)
        try:
            steps, ops = self._measure_expansion(op)
        except UnknownStepCount as reason:
            return Miss(op, str(reason))
        has_nested = any(each.op_type == "while_loop" for each in _iterate_computing_ops(op))
        nested = ", with its inner loops unrolled," if has_nested else ""
        product = f"{steps} steps of {ops} ops{nested} make {steps * ops}"
        if steps * ops > self.max_ops:
            return Miss(op, f"{product}, more than {self.max_ops} (max_ops)")
        most = UnrolledSize(self.max_chain, self.max_ops)
        size = measure_unrolled_size(self, op, self._measure_size, most)
        if size.ops > self.max_ops:
            beside = size.ops - steps * ops
            return Miss(op, f"{product}, and together with the {beside} other ops more than {self.max_ops} (max_ops)")
        if size.chain > self.max_chain:
            return Miss(op, f"{format_count(steps, 'step')} would make a chain of {size.chain} dependent products in "
                            f"the function, more than {self.max_chain} (max_chain)")
        for initial, new, old in zip(op.loop_vars, op.blocks[1].outputs, op.outputs):
            if not (can_replace_value(initial, old) and can_replace_value(new, old)):
                return Miss(op, f"the shape of '{old.name}' changes between steps")
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

    def _measure_size(self, op: Operation) -> UnrolledSize | None:
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
            # A nested loop of unknown length stays a loop, whose products are not part of the unrolled chain.
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
                # The loop stays: it counts as one op and its body once.
                return 1 + self._count_block_ops(op.blocks[1])
            return steps * ops
        return 1 + sum(map(self._count_block_ops, op.blocks))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        copier, values = _BlockCopier(mb), list(hit.op.loop_vars)
        for _ in range(hit.steps):
            values = copier.copy_block(hit.op.blocks[1], values)
        return make_replacement_outputs(mb, hit.op, [copier.materialize(var) for var in values])

    def examples(self) -> Iterable[Example]:
        counted = _make_counted_example
        yield counted("counted", 2)
        yield make_example("with weights", _build_weighted_loop, x=(2, 8))
        yield counted("a loop in a loop", 3, lambda i, x, z: (_build_loop_up_to(i, x), z))
        yield counted("a branch by the step", 3, lambda i, x, z: (_build_branch_by_step(i, x), z))
        yield counted("no step", 0)
        yield counted("passed through", 3, lambda i, x, z: (x, Builder.add(x=x, y=z)))
        yield make_example("decided by values", _build_data_dependent_loop, x=(2, 3),
                           reason="the number of steps depends on 'x', which is dynamic")
        yield counted("many steps", 9, options={"max_steps": 8}, reason="it runs more than 8 steps (max_steps)")
        yield counted("many ops", 9, options={"max_ops": 8}, reason="9 steps of 3 ops make 27, more than 8 (max_ops)")
        yield Example("many ops in a nest", lambda: build_nested_loops(4, 5), options={"max_ops": 19}, reason=(
            "5 steps of 4 ops, with its inner loops unrolled, make 20, more than 19 (max_ops)"))
        yield Example("a nest", lambda: build_nested_loops(4, 5))
        yield make_example("one after the other", lambda x: _build_halving_loop(5, _build_halving_loop(5, x)),
                           x=(2, 3))
        yield Example("in one that stays", lambda: build_nested_loops(4, None), reason=(
            "it is inside a loop that is not unrolled: the number of steps depends on 'x', which is dynamic"))
        yield counted("random numbers", 3, lambda i, x, z: (Builder.add(
            x=x, y=Builder.random_normal(shape=[2, 3], mean=np.float16(0), stddev=np.float16(1))), z),
            reason="random_normal in it has a different result each time")
        yield counted("growing", 3, lambda i, x, z: (Builder.concat(values=[x, z], axis=0), z),
                      reason="the shape of 'y_1' changes between steps")
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _find_unroll_obstacle(op: Operation) -> str | None:
    if op.op_type.startswith("random_"):
        return f"{op.op_type} in it has a different result each time"
    if op.op_type in ("read_state", "coreml_update_state", "write_state"):
        return f"{op.op_type} in it must not be moved"
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


class _BlockCopier:
    """Copies of the ops of blocks in the block that `mb` builds in; compile-time constants are not computed.

    A const of the block, and a compressed weight, is moved out and serves all copies. An op with the same inputs as in
    an earlier copy is not built again, and a branch that is always executed is copied without its cond.
    """

    def __init__(self, mb: RewriteBuilder) -> None:
        self._mb = mb
        self._copies: dict[Any, list[Var]] = {}
        self._values = Float64Values()
        self._consts: dict[Any, Var] = {}

    def copy_block(self, block: Block, inputs: Sequence[Var]) -> list[Var]:
        """Return the outputs of `block` for its `inputs`; `materialize` builds those that are constants."""
        env = dict(zip(block.inputs, inputs))
        self._copy_ops(block, env, None)
        return [env.get(var, var) for var in block.outputs]

    def materialize(self, var: Var) -> Var:
        """Return `var`, or a const with its known value where `var` is in no block."""
        if var.op is None or var.op.enclosing_block is not None:
            return var
        value = np.asarray(var.val)
        key = (var.sym_type, value.tobytes())
        if key not in self._consts:
            self._consts[key] = self._mb.const(val=var.val, name=var.name)
        return self._consts[key]

    def _copy_ops(self, block: Block, env: dict[Var, Var], into: Block | None) -> None:
        for op in list(block.operations):
            pred = env.get(op.pred, op.pred).val if op.op_type == "cond" else None
            if op.op_type.startswith("const"):
                if op.enclosing_block is not self._mb.block:
                    self._mb.moved(op)
            elif pred is not None:
                branch = op.blocks[0 if pred else 1]
                self._copy_ops(branch, env, into)
                env.update(zip(op.outputs, [env.get(var, var) for var in branch.outputs]))
            else:
                env.update(zip(op.outputs, self._copy_op(op, env, into)))

    def _copy_op(self, op: Operation, env: Mapping[Var, Var], into: Block | None) -> list[Var]:
        bound = map_inputs(op, env)
        key = (op, *_iterate_bound_vars(bound))
        if key in self._copies:
            return self._copies[key]
        narrow = _find_value_before_widening(op, bound)
        if narrow is not None:
            return [narrow]
        copied = clone_op(op, bound)
        for block in op.blocks:
            copied.blocks.append(self._copy_nested_block(block, copied, env))
        is_folded = is_compile_time_constant(infer_outputs(copied, op), _MAX_FOLDED_BYTES)
        if not is_folded or not self._values.are_exact_in_float64(copied):
            self._insert_copy(copied, into)
        outputs = list(copied.outputs)
        if into is None and not op.blocks:
            self._copies[key] = outputs
        return outputs

    def _copy_nested_block(self, block: Block, outer: Operation, env: Mapping[Var, Var]) -> Block:
        own = copy.copy(block)
        own.outer_op, own.operations = outer, CacheDoublyLinkedList()
        clear_block_copy(own, map(self._copy_input, block.inputs))
        inner = {**env, **dict(zip(block.inputs, own.inputs))}
        self._copy_ops(block, inner, own)
        own.set_outputs([self.materialize(inner.get(var, var)) for var in block.outputs])
        return own

    def _copy_input(self, var: Var) -> Var:
        own = copy.copy(var)
        clear_users(own)
        own.name = self._mb.make_unique_name(var.name)
        return own

    def _insert_copy(self, copied: Operation, into: Block | None) -> None:
        for name, bound in copied.inputs.items():
            is_list = isinstance(bound, (list, tuple))
            operand = tuple(map(self.materialize, bound)) if is_list else self.materialize(bound)
            set_input_var(copied, name, operand)
        self._mb.insert(copied, into)


def _iterate_bound_vars(bound: Mapping[str, Any]) -> Iterator[Var]:
    for operand in bound.values():
        yield from operand if isinstance(operand, (list, tuple)) else [operand]


def _find_value_before_widening(op: Operation, bound: Mapping[str, Any]) -> Var | None:
    """Return the value before a lossless widening cast that `op`, a cast, undoes; None where there is no such cast.

    A loop that keeps its state in a wider type has both casts between two steps.
    """
    wide = bound["x"].op if op.op_type == "cast" else None
    if wide is None or wide.op_type != "cast" or is_opaque(wide):
        return None
    narrow: Var = wide.x
    exact = (narrow.dtype, wide.outputs[0].dtype) in _LOSSLESS_CASTS
    return narrow if exact and can_replace_value(narrow, op.outputs[0]) else None


def _make_counted_example(name: str, steps: int, step: _LoopStep | None = None, **expected: Any) -> Example:
    return Example(name, partial(build_counted_loop, steps, step), **expected)


def build_counted_loop(steps: int, step: _LoopStep | None = None) -> Program:
    """Build a loop of `steps` steps, by default of x = (x + i) * z."""
    apply = step or _add_and_scale

    def build_body(x: Var) -> list[Var]:
        outputs = Builder.while_loop(
            _cond=lambda i, x, z: Builder.less(x=i, y=np.int32(steps)),
            _body=lambda i, x, z: (Builder.add(x=i, y=np.int32(1)), *apply(i, x, z)),
            loop_vars=(np.int32(0), x, Builder.abs(x=x)), name="y")
        return list(outputs[1:])

    return build_program(build_body, x=(2, 3))


def _add_and_scale(i: Var, x: Var, z: Var) -> tuple[Var, Var]:
    return Builder.mul(x=Builder.add(x=x, y=Builder.cast(x=i, dtype="fp16")), y=z), z


def _build_weighted_loop(x: Var) -> Var:
    return _count_up(x, lambda j: Builder.less(x=j, y=np.int32(3)),
                     lambda x: Builder.linear(x=x, weight=make_weight(8, 8)))


def _count_up(x: Var, condition: Callable[[Var], Var], step: Callable[[Var], Var]) -> Var:
    """Build a loop that counts from 0 while `condition` holds and applies `step` to x."""
    outputs: tuple[Var, ...] = Builder.while_loop(
        _cond=lambda j, x: condition(j),
        _body=lambda j, x: (Builder.add(x=j, y=np.int32(1)), step(x)),
        loop_vars=(np.int32(0), x))
    return outputs[1]


def _build_loop_up_to(i: Var, x: Var) -> Var:
    """Build a loop whose number of steps depends on the step `i` of the loop around it."""
    return _count_up(x, lambda j: Builder.less_equal(x=j, y=i), lambda x: Builder.mul(x=x, y=np.float16(0.5)))


def _build_branch_by_step(i: Var, x: Var) -> Var:
    odd = Builder.equal(x=Builder.mod(x=i, y=np.int32(2)), y=np.int32(1))
    result: Var = Builder.cond(pred=odd, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x))
    return result


def _build_data_dependent_loop(x: Var) -> Var:
    outputs: tuple[Var, ...] = Builder.while_loop(
        _cond=lambda x: Builder.less(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
        _body=lambda x: Builder.sub(x=Builder.mul(x=x, y=np.float16(2)), y=np.float16(1)), loop_vars=(x,))
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def build_nested_loops(inner: int, outer: int | None) -> Program:
    """Build a loop of `inner` steps in one of `outer` steps (None: a dynamic number)."""
    def build_body(x: Var) -> Var:
        if outer is not None:
            return _count_up(x, lambda i: Builder.less(x=i, y=np.int32(outer)), partial(_build_halving_loop, inner))
        outputs = Builder.while_loop(
            _cond=lambda x: Builder.greater(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
            _body=lambda x: _build_halving_loop(inner, x), loop_vars=(x,))
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs

    return build_program(build_body, x=(2, 3))


def _build_halving_loop(steps: int, x: Var) -> Var:
    """Build a loop of `steps` steps of one op."""
    return _count_up(x, lambda j: Builder.less(x=j, y=np.int32(steps)), lambda x: Builder.mul(x=x, y=np.float16(0.5)))
