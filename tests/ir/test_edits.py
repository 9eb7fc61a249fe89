"""What an edit costs and keeps: shared consts, removed consts, states, names."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Operation, Program, types

from mil_ane_passes.ir.block_editor import BlockEditor
from mil_ane_passes.ir.builder import RewriteBuilder, UniqueNames
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes import engine
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pipeline import select_rewrites
from tests.passes.test_engine import Twice, chain, check, kinds, rule


def convs(count: int) -> Program:
    """`count` 1-D conv_transpose ops that share weight and bias."""

    def body(x):
        shared = mb.const(val=make_weight(4, 4, 3)), mb.const(val=np.array([1, 2, 3, 4], np.float16))
        for number in range(count):
            x = mb.conv_transpose(
                x=x, weight=shared[0], bias=shared[1], pad=[1, 1], pad_type="custom", name=f"c{number}"
            )
        return x

    return build_program(body, x=(1, 4, 8))


def test_shared_consts_stay_shared_after_many_hits():
    prog = convs(20)
    apply_rewrite(select_rewrites(passes="lift_conv_transpose_1d")[0], prog)
    used = [op for _, op in iterate_ops(prog) if op.op_type == "conv_transpose"]
    assert len(used) == 20
    for parameter in ("weight", "bias", "strides", "pad", "dilations"):
        assert len({op.inputs[parameter] for op in used}) == 1, parameter
    assert [
        op.outputs[0].shape for _, op in iterate_ops(prog) if op.op_type == "const" and op.outputs[0].rank == 4
    ] == [(4, 4, 3, 1)]
    check(prog)


def test_a_view_of_a_const_has_its_bytes():
    prog = convs(1)
    (old,) = {op.weight.val.ctypes.data for _, op in iterate_ops(prog) if op.op_type == "conv_transpose"}
    apply_rewrite(select_rewrites(passes="lift_conv_transpose_1d")[0], prog)
    (new,) = {op.weight.val.ctypes.data for _, op in iterate_ops(prog) if op.op_type == "conv_transpose"}
    assert new == old


def test_consts_nobody_reads_any_more_are_gone_and_others_stay():
    def body(x):
        gone, kept = mb.const(val=np.float16(3)), mb.const(val=np.ones((2, 3), np.float16), name="kept")
        return mb.mul(x=mb.clip(x=x, alpha=gone, beta=np.float16(4)), y=kept, name="y")

    prog = build_program(body, x=(2, 3))
    apply_rewrite(rule(lambda hit, mb: mb.relu(x=hit.op.x), roots=("clip",)), prog)
    assert [op.outputs[0].name for _, op in iterate_ops(prog) if op.op_type == "const"] == ["kept"]
    check(prog)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, c: mb.concat(values=[mb.relu(x=x), c, c], axis=0),
        lambda x, c: mb.add(x=mb.relu(x=x), y=mb.add(x=x, y=c)),
        lambda x, c: mb.add(x=(r := mb.relu(x=x)), y=r),
        lambda x, c: mb.concat(values=[r := mb.relu(x=x), r, c], axis=0),
    ],
    ids=["const twice in a tuple", "const once", "value twice", "value twice in a tuple"],
)
@pytest.mark.parametrize("roots", [("relu",), ("concat", "add"), ("relu", "concat", "add")])
def test_operands_that_are_read_twice(body, roots):
    """Whichever op is replaced, the books of readers stay right."""

    def again(hit, mb):
        op = hit.op
        inputs = {name: list(bound) if isinstance(bound, (list, tuple)) else bound for name, bound in op.inputs.items()}
        return getattr(mb, op.op_type)(**inputs)

    done: set[Operation] = set()

    def once(op):
        from mil_ane_passes.passes.contract import Hit, Miss

        if len(done) < 4 and op not in done:
            done.add(op)
            return Hit(op)
        return Miss(op, "done", near=False)

    prog = build_program(lambda x: body(x, mb.const(val=np.ones((2, 3), np.float16))), x=(2, 3))
    trace = apply_rewrite(rule(again, roots=roots, match=once), prog)
    assert trace.fired
    check(prog)


def stateful() -> Program:
    placeholder = mb.state_tensor_placeholder(shape=(2, 3), dtype=types.fp16)
    with Function(
        {"x": mb.placeholder(shape=(2, 3), dtype=types.fp16), "memory": placeholder}, opset_version=ct.target.iOS18
    ) as function:
        x, memory = function.inputs["x"], function.inputs["memory"]
        total = mb.relu(x=mb.add(x=mb.read_state(input=memory), y=x))
        mb.coreml_update_state(state=memory, value=total)
        mb.read_state(input=memory)
        function.set_outputs([mb.relu(x=x, name="y")])
    made = Program()
    made.add_function("main", function)
    return made


def test_state_ops_are_neither_removed_nor_moved():
    prog = stateful()
    states = [op for _, op in iterate_ops(prog) if "state" in op.op_type]
    trace = apply_rewrite(Twice(), prog)
    assert len(trace.fired) == 2 and kinds(prog)["relu"] == 0
    assert [op for _, op in iterate_ops(prog) if "state" in op.op_type] == states
    check(prog)


def test_a_state_op_that_a_rewrite_left_unread_stays():
    prog = stateful()
    apply_rewrite(rule(lambda hit, mb: hit.op.y, roots=("add",)), prog)
    assert kinds(prog)["read_state"] == 2 and kinds(prog)["coreml_update_state"] == 1
    check(prog)


def test_new_names_are_free_of_those_in_nested_blocks_and_inputs():
    def body(x):
        inside = mb.cond(
            pred=mb.greater(x=mb.reduce_sum(x=x, axes=[0], keep_dims=False), y=np.float16(0)),
            _true_fn=lambda: mb.abs(x=x, name="taken"),
            _false_fn=lambda: mb.exp(x=x),
            name="y",
        )
        return inside

    names = UniqueNames(build_program(body, x=(3,)).functions["main"])
    assert names.make_unique_name("taken") == "taken_1"
    assert names.make_unique_name("taken") == "taken_2"
    assert names.make_unique_name("x") == "x_1"
    assert names.make_unique_name("free") == "free"
    assert names.make_unique_name("free") == "free_1"


def test_plain_values_become_one_const_each():
    prog = build_program(lambda x: mb.relu(x=x, name="y"), x=(2, 3))
    block = prog.functions["main"]
    op = next(iter(block.operations))
    with block:
        builder = RewriteBuilder(block, UniqueNames(block))
        with builder.at(op):
            made = [
                builder.mul(x=op.x, y=value)
                for value in (
                    np.float16(2),
                    np.float16(2),
                    np.float16(-0.0),
                    np.float16(0.0),
                    np.ones(3, np.float16),
                    np.ones(3, np.float16),
                    np.ones(100, np.float16)[:3],
                )
            ]
    assert len({var.op.y for var in made}) == 4
    assert not hasattr(builder, "_no_such_thing")


@pytest.mark.parametrize("value", [np.float16(2), np.full(1, 2, np.float16), np.full((1, 3), 2, np.float16)])
def test_a_const_made_of_another_keeps_its_rank(value):
    prog = build_program(lambda x: mb.add(x=x, y=mb.const(val=value), name="y"), x=(2, 3))
    block = prog.functions["main"]
    op = next(op for op in block.operations if op.op_type == "add")
    with block:
        builder = RewriteBuilder(block, UniqueNames(block))
        with builder.at(op):
            made = builder.weight(op.y, "negated", lambda: -op.y.val)
    assert made.shape == value.shape and made.dtype == types.fp16
    np.testing.assert_array_equal(made.val, -value)


@pytest.mark.parametrize("make", [chain, convs], ids=["one op for another", "shared consts"])
def test_cost_grows_with_the_program_and_not_with_its_square(make, monkeypatch):
    """Counted, not timed: questions to the rule, edits, and what an edit looks at."""
    counted: Counter = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def wrapped(self, *args, **kwargs):
            counted[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    chosen = Twice() if make is chain else select_rewrites(passes="lift_conv_transpose_1d")[0]
    for name in ("match", "rewrite"):
        count(type(chosen), name)
    for name in ("replace", "remove_if_unused", "_remove_op"):
        count(BlockEditor, name)
    for name in ("set_inputs", "type_value_inference", "get_flattened_inputs"):
        count(Operation, name)
    count(engine._FunctionRewriter, "_replace_output")
    seen = []
    for size in (50, 100, 200):
        prog = make(size)
        counted.clear()
        apply_rewrite(chosen, prog)
        seen.append(Counter(counted))
    assert seen[0]["match"] >= 50 and seen[0]["replace"] == 50 and seen[0]["set_inputs"] >= 50
    for name in seen[0]:
        assert seen[2][name] - seen[1][name] == 2 * (seen[1][name] - seen[0][name]), (name, [s[name] for s in seen])
