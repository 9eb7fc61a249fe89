"""Where two programs part: the fault is put at a known op, and found there."""

from __future__ import annotations

import json
import tempfile

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from mil_ane_passes import rewrite, verify
from mil_ane_passes.equivalence import difference_search
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.execution import build_plans
from mil_ane_passes.equivalence.value_store import ValueStore
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Exactness, Hit, Miss
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from tests.ir.test_edits import stateful
from tests.passes.test_engine import rule


def spoilt(prog, name, wrong, function="main"):
    """The same program in which the op that makes `name` is replaced by what `wrong(mb, op)` builds."""
    twin = clone_program(prog)

    def match(op):
        mine = op.outputs and op.outputs[0].name == name and op.op_type != "const" and not done
        return Hit(op) if mine else Miss(op, "another", near=False)

    done = []

    def replace(hit, mb):
        done.append(hit.op)
        return wrong(mb, hit.op)

    roots = tuple({op.op_type for where, op in iterate_ops(twin) if where == function})
    assert apply_rewrite(rule(replace, roots=roots, match=match), twin).fired
    return twin


def again(mb, op, **changes):
    return getattr(mb, op.op_type)(**{**op.inputs, **changes})


def first(before, after, **how):
    report = verify(before, after, **how)
    assert report.status == "different"
    assert report.to_dict()["first_difference"] == report.first.to_dict()
    json.dumps(report.to_dict(), allow_nan=False)
    return report.first


NAMES = ("a", "b", "c", "d", "y")


def chain():
    def body(x):
        a = mb.mul(x=x, y=np.float32(1.5), name="a")
        b = mb.tanh(x=a, name="b")
        c = mb.matmul(x=b, y=make_weight(3, 3, dtype=np.float32), name="c")
        d = mb.add(x=c, y=b, name="d")
        return mb.square(x=d, name="y")

    return build_program(body, x=(2, 3), dtype=types.fp32)


def chain_in_numpy(x):
    a = x.astype(np.float64) * 1.5
    b = np.tanh(a)
    c = b @ make_weight(3, 3, dtype=np.float64)
    return {"a": a, "b": b, "c": c, "d": c + b, "y": (c + b) ** 2}


@pytest.mark.parametrize("name", NAMES)
def test_the_op_with_the_fault_is_named_with_both_values(name):
    before = chain()
    after = spoilt(before, name, lambda mb, op: mb.add(x=again(mb, op), y=np.float32(0.25)))
    x = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
    found = first(before, after, feeds={"x": x})
    assert (found.before.value, found.after.value, found.place, found.execution) == (name, name, "main", 1)
    assert found.after.op_type == "add" and (found.function, found.feeds) == ("main", "given feeds")
    right = chain_in_numpy(x)[name][found.worst.index]
    assert found.worst.before == pytest.approx(right, abs=1e-12)
    assert found.worst.after == pytest.approx(right + 0.25, abs=1e-12)
    assert found.worst.absolute == pytest.approx(0.25) and found.worst.relative == pytest.approx(0.25 / abs(right))
    assert found.after.type == "fp32[2, 3]"


def test_the_mil_around_it_is_shown_in_both():
    before = chain()
    after = spoilt(before, "c", lambda mb, op: again(mb, op, y=make_weight(3, 3, dtype=np.float32) * 2))
    found = first(before, after)
    for side, op in ((found.before, "matmul"), (found.after, "matmul")):
        (marked,) = [line for line in side.mil if line.startswith("> ")]
        assert f"= {op}(" in marked and marked.startswith("> %c: fp32[2, 3]")
        assert [line[3:].split(":")[0] for line in side.mil] == ["a", "b", "c", "d", "y"]
    assert found.agree == ("b",) and found.unknown == () and found.parameters == ("y",)
    text = str(verify(before, after))
    assert "first difference: %c (matmul) in main; seed 0, float64" in text
    assert "constants that differ: y" in text and "operands that agree: %b" in text and "relative" in text


def test_equal_programs_have_no_first_difference():
    report = verify(chain(), clone_program(chain()))
    assert report.equal and report.first is None and report.to_dict()["first_difference"] is None


@pytest.mark.parametrize("exactness", ["bitwise", "rounding"])
def test_what_may_differ_is_passed_over(exactness):
    """A value that is rounded otherwise is no fault where rounding is allowed, and is one where it is not."""
    before = chain()
    after = spoilt(before, "b", lambda mb, op: mb.sub(x=mb.add(x=again(mb, op), y=np.float32(1)), y=np.float32(1)))
    after = spoilt(after, "d", lambda mb, op: mb.add(x=again(mb, op), y=np.float32(0.5)))
    found = first(before, after, precision="float32", exactness=exactness)
    assert found.after.value == ("b" if exactness == "bitwise" else "d")


def looped():
    """`step` in the body of a while loop that runs five times."""

    def body(i, v):
        return mb.add(x=i, y=1, name="next"), mb.mul(x=v, y=np.float32(1.5), name="step")

    return build_program(lambda x: mb.while_loop(_cond=lambda i, v: mb.less(x=i, y=5), _body=body, loop_vars=(0, x),
                                                 name="y")[1], x=(2, 3), dtype=types.fp32)


def late(number):
    """A fault that shows in one iteration only."""

    def wrong(mb, op):
        counter = op.enclosing_block.inputs[0]
        now = mb.cast(x=mb.equal(x=counter, y=number), dtype="fp32")
        return mb.add(x=again(mb, op), y=mb.mul(x=now, y=np.float32(0.25)))

    return wrong


@pytest.mark.parametrize("iteration", [1, 3, 5])
def test_in_a_loop_the_iteration_is_told(iteration):
    before = looped()
    found = first(before, spoilt(before, "step", late(iteration - 1)))
    (loop,) = [op.outputs[0].name for _, op in iterate_ops(before) if op.op_type == "while_loop"]
    assert (found.after.value, found.execution) == ("step", iteration)
    assert found.place == f"main > block 1 of while_loop '{loop}'"
    assert found.worst.absolute == pytest.approx(0.25)
    assert (f"execution {iteration}" in str(found)) == (iteration > 1)


def test_what_a_loop_hands_on_is_known_when_it_was_right_on_both_ways_in():
    before = looped()
    after = spoilt(before, "step", lambda mb, op: mb.sub(x=op.x, y=late(2)(mb, op)))
    found = first(before, after)
    carried = next(op for _, op in iterate_ops(after) if op.outputs[0].name == "step").x.name
    assert found.execution == 1 and carried in found.agree
    assert carried not in found.unknown and carried not in found.since


def test_a_loop_that_runs_on_differs_in_its_condition():
    before = build_program(lambda x: mb.while_loop(
        _cond=lambda i, v: mb.less(x=i, y=5, name="more"), _body=lambda i, v: (mb.add(x=i, y=1), mb.mul(x=v, y=v)),
        loop_vars=(0, x))[1], x=(2, 3), dtype=types.fp32)
    found = first(before, spoilt(before, "more", lambda mb, op: mb.less(x=op.x, y=6)))
    assert (found.after.value, found.execution, found.worst.before, found.worst.after) == ("more", 6, 0.0, 1.0)


def branched(flag=1.0):
    def chosen(x):
        return mb.relu(x=mb.mul(x=x, y=np.float16(2), name="inner"), name="branch")

    return build_program(lambda x: mb.cond(
        pred=mb.greater(x=mb.reduce_sum(x=x, keep_dims=False), y=np.float16(0), name="flag"),
        _true_fn=lambda: chosen(x), _false_fn=lambda: mb.abs(x=x, name="other"), name="y"), x=(2, 3))


def test_a_branch_that_was_taken():
    before = branched()
    after = spoilt(before, "inner", lambda mb, op: again(mb, op, y=np.float16(3)))
    found = first(before, after, feeds={"x": np.ones((2, 3), np.float16)})
    assert (found.after.value, found.place) == ("inner", "main > block 0 of cond 'y'")


def test_the_wrong_branch_differs_in_what_chooses_it():
    before = branched()
    after = spoilt(before, "flag", lambda mb, op: mb.less(x=op.x, y=op.y))
    found = first(before, after, feeds={"x": np.ones((2, 3), np.float16)})
    assert (found.after.value, found.before.op_type, found.after.op_type) == ("flag", "greater", "less")


def test_a_second_function():
    before = chain()
    before.add_function("second", chain().functions["main"])
    after = spoilt(before, "d", lambda mb, op: again(mb, op, y=op.x), function="second")
    # both functions name a value `d`; the rule fires in the first one that has it
    wrong = [name for name, op in iterate_ops(after) if op.op_type == "add" and op.x is op.y]
    found = first(before, after)
    assert (found.function, found.place, found.after.value) == (wrong[0], wrong[0], "d")


def test_what_goes_into_a_state():
    before = stateful()
    (total,) = [op.outputs[0].name for _, op in iterate_ops(before) if op.op_type == "add"]
    found = first(before, spoilt(before, total, lambda mb, op: mb.sub(x=op.x, y=op.y)))
    assert (found.after.value, found.before.op_type, found.after.op_type) == (total, "add", "sub")


def test_a_state_that_is_given_something_else():
    """No value has changed: what is written is another one."""
    def built(which):
        memory = mb.state_tensor_placeholder(shape=(2, 3), dtype=types.fp16)
        with Function({"x": mb.placeholder(shape=(2, 3), dtype=types.fp16), "memory": memory},
                      opset_version=ct.target.iOS18) as function:
            x = function.inputs["x"]
            values = {"one": mb.relu(x=x, name="one"), "two": mb.abs(x=x, name="two")}
            mb.coreml_update_state(state=function.inputs["memory"], value=values[which], name="updated")
            function.set_outputs([mb.add(x=values["one"], y=values["two"], name="y")])
        made = Program()
        made.add_function("main", function)
        return made

    found = first(built("one"), built("two"))
    assert found.after.op_type == "coreml_update_state" and found.agree == ("two",)
    assert "value=%one" in "".join(found.before.mil) and "value=%two" in "".join(found.after.mil)


def renamed(factor):
    """What `chain` computes up to `d`, under other names."""
    def body(x):
        a = mb.mul(x=x, y=np.float32(1.5), name="a")
        b = mb.tanh(x=a, name="b")
        both = mb.matmul(
            x=b, y=make_weight(3, 3, dtype=np.float32) + np.eye(3, dtype=np.float32) * factor, name="fused"
        )
        return mb.square(x=both, name="y")

    return build_program(body, x=(2, 3), dtype=types.fp32)


def test_what_has_no_counterpart_is_told():
    assert verify(chain(), renamed(1)).equal
    found = first(chain(), renamed(2))
    assert (found.after.value, found.unknown, found.agree, found.since) == ("y", ("fused",), (), ("b",))
    assert found.only_before == ("matmul %c", "add %d") and found.only_after == ("matmul %fused",)
    text = str(found)
    assert "operands without a counterpart: %fused" in text and "so the difference arises between %b and %y:" in text
    assert "only the first program computes matmul %c, add %d" in text
    assert "only the second program computes matmul %fused" in text


def test_a_mapping_says_what_stands_for_what():
    report = compare_programs(chain(), renamed(2), mapping={"d": "fused"})
    assert (report.first.before.value, report.first.after.value) == ("d", "fused")
    assert "first difference: %d, now %fused (add, now matmul) in main" in str(report)


def lifted(shape, extra=0.0):
    """`a` in another shape, and `y` put back into the first."""
    def body(x):
        a = mb.mul(x=mb.reshape(x=x, shape=shape, name="up"), y=np.float32(2), name="a")
        b = mb.add(x=mb.reshape(x=a, shape=(2, 3), name="down"), y=np.float32(extra), name="b")
        return mb.relu(x=b, name="y")

    return build_program(body, x=(2, 3), dtype=types.fp32)


@pytest.mark.parametrize(
    ("shape", "compared"), [((1, 2, 1, 3), True), ((2, 3, 1), True), ((3, 2), False), ((6,), False)])
def test_a_value_in_another_shape_is_compared_when_only_axes_of_one_are_new(shape, compared):
    found = first(lifted((2, 3)), lifted(shape, extra=0.5))
    assert found.after.value == "b"
    if compared:  # `up` and `down` bear one name in both: of those only `down` has another operand
        assert found.agree == ("down",)
    wrong = spoilt(lifted(shape), "a", lambda mb, op: again(mb, op, y=np.float32(3)))
    found = first(lifted((2, 3)), wrong)
    assert found.after.value == ("a" if compared else "down")
    if compared:
        assert len(found.worst.index) == 2 and found.before.type == "fp32[2, 3]" != found.after.type


def test_a_typed_run_is_judged_against_full_precision():
    """The algebra is the same; what overflows on the way is found in the typed run only."""
    before = build_program(lambda x: mb.relu(x=mb.mul(x=x, y=np.float16(1), name="b"), name="y"), x=(2, 3))
    after = spoilt(before, "b", lambda mb, op: mb.mul(x=mb.mul(x=op.x, y=np.float16(4096)), y=np.float16(2**-12)))
    x = np.array([[1, 2, 3], [4, 5, 60]], np.float16)
    assert verify(before, after, feeds={"x": x}).equal
    found = first(before, after, feeds={"x": x}, precision="float16")
    assert (found.precision, found.after.value, found.worst.index) == ("float16", "b", (1, 2))
    assert found.worst.before == 60.0 and found.worst.after == np.inf
    assert found.to_dict()["after"]["number"] == "inf"


def test_an_intermediate_of_another_width_is_compared():
    def built(dtype):
        return build_program(lambda x: mb.cast(x=mb.relu(x=mb.mul(
            x=mb.cast(x=x, dtype=dtype, name="in"), y=types.nptype_from_builtin(types.string_to_builtin(dtype))(3),
            name="m"), name="r"), dtype="fp32", name="y"), x=(2, 3), dtype=types.fp32)

    assert verify(built("fp32"), built("fp16"), precision="float64").equal
    found = first(built("fp32"), built("fp16"), precision="float16")
    assert found.after.value == "in" and found.before.type == "fp32[2, 3]" and found.after.type == "fp16[2, 3]"


def test_integers_and_flags_are_compared():
    def built(limit):
        def body(x):
            above = mb.greater(x=x, y=np.float32(limit), name="above")
            count = mb.cast(x=above, dtype="int32", name="count")
            return mb.cast(x=count, dtype="fp32", name="y")

        return build_program(body, x=(64,), dtype=types.fp32)

    found = first(built(0.0), built(0.5))
    assert found.after.value == "above" and found.after.type == "bool[64]" and found.parameters == ("y",)


def test_a_value_that_no_wrong_output_depends_on_is_no_cause():
    def built(factor, offset):
        def body(x):
            dead = mb.mul(x=x, y=np.float32(factor), name="dead")
            mb.relu(x=dead, name="unread")
            return mb.add(x=x, y=np.float32(offset), name="y")

        return build_program(body, x=(2, 3), dtype=types.fp32)

    assert first(built(1, 1), built(2, 2)).after.value == "y"


@pytest.mark.parametrize("precision", ["float64", "float16"])
@pytest.mark.parametrize("limit", [0, 24, 100])
def test_values_beyond_the_limit_go_to_files(limit, precision, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spilled = []
    leave = ValueStore.__exit__

    def noted(self, *problem):
        spilled.append(len(list(tmp_path.rglob("*.npy"))))
        leave(self, *problem)

    monkeypatch.setattr(ValueStore, "__exit__", noted)
    before = looped()
    after = spoilt(before, "step", late(2))
    (plan,) = build_plans(before, 1, lambda name: None)
    report = verify(before, after, seeds=1, precision=precision)
    how = (before, after, plan, precision, Exactness.ROUNDING, report.cases[0].failed)
    assert difference_search.find_first_difference(*how, limit=limit) == difference_search.find_first_difference(*how)
    few, none = spilled[-2:]
    assert few > 0 and none == 0
    assert list(tmp_path.iterdir()) == []


def test_without_room_for_files_the_verdict_stands(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mil_ane_passes.equivalence.value_store.np.save", full)
    monkeypatch.setitem(difference_search.find_first_difference.__kwdefaults__, "limit", 0)
    before = chain()
    report = verify(before, spoilt(before, "c", lambda mb, op: mb.add(x=again(mb, op), y=np.float32(1))))
    assert report.status == "different" and report.first is None
    assert "the first difference could not be found: [Errno 28] No space left on device" in str(report)


def test_when_the_second_cannot_run_what_led_there_is_found():
    def built(shift):
        def body(x):
            place = mb.add(x=mb.cast(x=mb.reduce_argmax(x=x, axis=0), dtype="int32"), y=shift, name="place")
            return mb.gather(x=mb.const(val=make_weight(4, 2, dtype=np.float32)), indices=place, axis=0, name="y")

        return build_program(body, x=(4,), dtype=types.fp32)

    report = verify(built(0), built(9))
    assert report.status == "different" and "the program after cannot be run" in str(report)
    assert report.first.after.value == "place" and report.first.parameters == ("y",)


def test_another_shape_at_the_end_is_told_at_the_output():
    before = build_program(lambda x: mb.reshape(x=mb.relu(x=x, name="r"), shape=(6,), name="y"), x=(2, 3))
    after = build_program(lambda x: mb.reshape(x=mb.relu(x=x, name="r"), shape=(3, 2), name="y"), x=(2, 3))
    found = first(before, after)
    assert found.after.value == "y" and "was float64[6] and is float64[3, 2]" in found.worst.reason
    assert found.parameters == ("shape",)


def test_a_rewrite_that_is_wrong_shows_where(monkeypatch):
    lift = find_rewrite("lift_conv_transpose_1d")
    right = lift.rewrite
    monkeypatch.setattr(lift, "rewrite", lambda self, hit, mb: mb.mul(x=right(self, hit, mb), y=np.float16(0.5)))
    bias = np.array([0.5, -1.0], np.float16)
    prog = build_program(lambda x: mb.relu(x=mb.conv_transpose(
        x=mb.tanh(x=x, name="t"), weight=make_weight(4, 2, 5), bias=bias, name="up"), name="y"), x=(1, 4, 8))
    report = rewrite(prog, passes="lift_conv_transpose_1d")
    found = report.verify.first
    assert (found.before.value, found.before.op_type, found.after.op_type) == ("up", "conv_transpose", "mul")
    assert found.since == ("t",) and [each.split()[0] for each in found.only_after] == [
        "expand_dims", "conv_transpose", "squeeze"]
    assert str(found) in str(report) and report.to_dict()["verify"]["first_difference"]["before"]["value"] == "up"


def test_a_fault_model_is_found_where_it_strikes():
    bias = np.array([0.5, -1.0], np.float16)
    prog = build_program(lambda x: mb.relu(x=mb.conv_transpose(
        x=x, weight=make_weight(4, 2, 5), bias=bias, name="up"), name="y"), x=(1, 4, 20))
    found = first(prog, prog, quirks=("conv_transpose_1d_bias",))
    assert found.after.value == "up" and found.agree == ("x",) and found.parameters == ()
    assert found.worst.absolute == 1.0 and "in both" in str(found)


def test_the_dictionary_is_complete():
    before = chain()
    data = first(before, spoilt(before, "c", lambda mb, op: mb.add(x=again(mb, op), y=np.float32(1)))).to_dict()
    assert list(data) == ["function", "feeds", "precision", "place", "execution", "before", "after", "index",
                          "absolute", "relative", "ulps", "allowed", "reason", "operands", "parameters", "between"]
    assert list(data["before"]) == ["value", "op_type", "type", "mil", "number"] == list(data["after"])
    assert list(data["between"]) == ["since", "before", "after"]
