"""ANE218 and ANE218: branches that are always taken, and loops of a known number of steps."""

from __future__ import annotations

import time

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import count_ops, iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.rewrites.control_flow.unroll_while_loop import build_counted_loop, build_nested_loops
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds, unsupported_ops

PASSES = "unroll_while_loop,inline_constant_branch"


class Looped(torch.nn.Module):
    """A loop that torch.jit.script keeps."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        for step in range(3):
            x = torch.relu(self.inner(x)) + step
            if step == 1:
                x = x * 2
        return x


class Until(torch.nn.Module):
    def forward(self, x):
        while bool(x.sum() < 100):
            x = x * 2
        return x


def rewritten(built, passes=PASSES, **options):
    for name in passes.split(","):
        apply_rewrite(find_rewrite(name).configured(**options), built)
    built.validate()
    return built


def scripted(module, target, passes=None):
    return ct.convert(torch.jit.script(module.eval()), inputs=[ct.TensorType(name="x", shape=(2, 8))],
                      minimum_deployment_target=target, convert_to="mlprogram", skip_model_load=True,
                      pass_pipeline=ct.PassPipeline.DEFAULT if passes is None else ane.pipeline(passes=passes))


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
def test_a_scripted_loop_through_the_conversion_and_the_package(tmp_path, target):
    module = Looped()
    scripted(module, target, PASSES).save(str(tmp_path / "m.mlpackage"))
    loaded = ane.load(tmp_path / "m.mlpackage").program
    assert not {"while_loop", "cond"} & set(kinds(loaded)) and kinds(loaded)["linear"] == 3
    assert not unsupported_ops(loaded)
    scripted(module, target).save(str(tmp_path / "as_it_was.mlpackage"))
    before = ane.load(tmp_path / "as_it_was.mlpackage").program
    assert "while_loop" in kinds(before)
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    for precision in ("float64", "float16"):
        (old,), (new,) = (Runtime(each, precision=precision)({"x": x}).values() for each in (before, loaded))
        np.testing.assert_array_equal(old, new)
    with torch.no_grad():
        truth = module.double()(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(old, truth, rtol=2e-2, atol=2e-2)


def test_a_loaded_package_is_rewritten_and_saved(tmp_path):
    scripted(Looped(), ct.target.iOS17).save(str(tmp_path / "m.mlpackage"))
    package = ane.load(tmp_path / "m.mlpackage")
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    (before,) = Runtime(package.program, precision="float16")({"x": x}).values()
    size = sum(file.stat().st_size for file in (tmp_path / "m.mlpackage").rglob("weight.bin"))
    rewritten(package.program)
    ane.save(package, tmp_path / "n.mlpackage")
    again = ane.load(tmp_path / "n.mlpackage").program
    assert not unsupported_ops(again)
    (after,) = Runtime(again, precision="float16")({"x": x}).values()
    np.testing.assert_array_equal(before, after)
    assert sum(file.stat().st_size for file in (tmp_path / "n.mlpackage").rglob("weight.bin")) == size


def test_a_loop_that_values_end_is_left_and_named():
    model = ct.convert(torch.jit.script(Until()), inputs=[ct.TensorType(name="x", shape=(2, 8))],
                       convert_to="milinternal")
    (miss,) = find_matches(find_rewrite("unroll_while_loop").configured(), model).near_misses
    assert miss.reason.startswith("the number of steps depends on '") and miss.reason.endswith(", which is dynamic")


@st.composite
def counters(draw):
    start, stride = draw(st.integers(-5, 5)), draw(st.sampled_from([-3, -1, 1, 2]))
    steps = draw(st.integers(0, 6))
    return start, stride, steps, draw(st.booleans()), draw(st.booleans())


@pytest.mark.law
@given(counters())
def test_any_counted_loop_is_what_python_makes_of_it(drawn):
    """The counter starts, strides and ends anywhere; it is a vector or a scalar, and the body may branch on it."""
    start, stride, steps, as_vector, branches = drawn
    end = start + stride * steps
    shaped = (lambda value: np.array([value], np.int32)) if as_vector else np.int32
    test = mb.less if stride > 0 else mb.greater

    def step(i, x, total):
        at = mb.squeeze(x=i, axes=[0]) if as_vector else i
        moved = mb.add(x=mb.mul(x=x, y=np.float32(0.5)), y=mb.cast(x=at, dtype="fp32"))
        if branches:
            even = mb.equal(x=mb.mod(x=at, y=np.int32(2)), y=np.int32(0))
            moved = mb.cond(pred=even, _true_fn=lambda: mb.relu(x=moved), _false_fn=lambda: mb.sub(x=moved, y=x))
        return mb.add(x=i, y=shaped(stride)), moved, mb.add(x=total, y=moved)

    def body(x):
        return list(mb.while_loop(_cond=lambda i, x, t: mb.squeeze(x=test(x=i, y=shaped(end))) if as_vector else
                                  test(x=i, y=np.int32(end)), _body=step, loop_vars=(shaped(start), x, x)))

    built = build_program(body, dtype=ct.converters.mil.mil.types.fp32, x=(2, 3))
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    outputs = [var.name for var in built.functions["main"].outputs]
    assert apply_rewrite(find_rewrite("unroll_while_loop").configured(), built).fired
    assert not {"while_loop", "cond"} & set(kinds(built))
    found = Runtime(built, precision="float64")({"x": x})
    now = x.astype(np.float64)
    total, i = now.copy(), start
    for _ in range(steps):
        moved = now * 0.5 + i
        if branches:
            moved = np.maximum(moved, 0) if i % 2 == 0 else moved - now
        i, now, total = i + stride, moved, total + moved
    for name, truth in zip(outputs, (np.reshape(i, shaped(0).shape), now, total)):
        np.testing.assert_allclose(found[name], truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps, most", [(256, 256), (257, 256)])
def test_the_number_of_steps_has_a_bound(steps, most):
    trace = apply_rewrite(find_rewrite("unroll_while_loop").configured(max_steps=most), build_counted_loop(steps))
    assert bool(trace.fired) is (steps <= most)


def test_weights_and_compressed_weights_stay_one_each():
    def body(x):
        def step(i, x):
            packed = mb.constexpr_affine_dequantize(
                quantized_data=np.full((8, 8), 130, np.uint8), zero_point=np.uint8(128), scale=np.float16(0.25),
                axis=0)
            return mb.add(x=i, y=np.int32(1)), mb.linear(x=mb.linear(x=x, weight=make_weight(8, 8)), weight=packed)

        return mb.while_loop(_cond=lambda i, x: mb.less(x=i, y=np.int32(4)), _body=step, loop_vars=(np.int32(0), x))[1]

    built = build_program(body, opset=ct.target.iOS16, x=(2, 8))
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float16)
    (before,) = Runtime(built, precision="float16")({"x": x}).values()
    rewritten(built)
    counted = kinds(built)
    assert counted["constexpr_affine_dequantize"] == 1 and counted["linear"] == 8
    assert len({op.weight for _, op in iterate_ops(built) if op.op_type == "linear"}) == 2
    (after,) = Runtime(built, precision="float16")({"x": x}).values()
    np.testing.assert_array_equal(before, after)


def test_what_is_the_same_in_each_step_is_computed_once():
    built = build_counted_loop(5, lambda i, x, z: (mb.add(x=x, y=mb.exp(x=z)), z))
    rewritten(built)
    assert kinds(built)["exp"] == 1 and kinds(built)["add"] == 5


def test_several_functions_and_blocks_that_have_the_same_names():
    made = Program()
    for name in ("main", "other"):
        with Function({"x": mb.placeholder(shape=(2, 3))}, opset_version=ct.target.iOS18) as function:
            x = function.inputs["x"]
            true = mb.const(val=np.bool_(True))
            first = mb.cond(pred=true, _true_fn=lambda x=x: mb.relu(x=mb.exp(x=x, name="inner")),
                            _false_fn=lambda x=x: mb.abs(x=x))
            second = mb.cond(pred=true, _true_fn=lambda x=x: mb.relu(x=mb.abs(x=x, name="inner")),
                             _false_fn=lambda x=x: mb.abs(x=x))
            function.set_outputs([first, second])
        made.add_function(name, function)
    rewritten(made, "inline_constant_branch")
    for function in made.functions.values():
        names = [var.name for op in function.operations for var in op.outputs]
        assert len(names) == len(set(names)) and not any(op.blocks for op in function.operations)


def test_a_branch_of_other_sizes_than_declared_is_left():
    built = build_program(lambda x: mb.cond(
        pred=mb.const(val=np.bool_(False)), name="y", _true_fn=lambda: mb.relu(x=x),
        _false_fn=lambda: mb.fill(shape=[5, 3], value=np.float16(1))), x=(None, 3))
    (miss,) = apply_rewrite(find_rewrite("inline_constant_branch").configured(), built).near_misses
    assert miss.reason == "'y' is declared with another shape than the executed branch returns"


class TestLoopsInLoops:
    """Steps of a nest multiply, and all loops of a function share one budget."""

    def test_a_nest_of_64_by_128_is_left_as_it_is(self):
        built = build_nested_loops(128, 64)
        before = format_program(built)
        trace = apply_rewrite(find_rewrite("unroll_while_loop").configured(max_ops=4096), built)
        assert not trace.fired and format_program(built) == before
        assert trace.near_misses[0].reason == ("64 steps of 128 ops, with its inner loops unrolled, make 8192, more "
                                             "than 4096 (max_ops)")

    def test_a_nest_within_the_budget_is_written_out_whole(self):
        built = build_nested_loops(6, 7)
        apply_rewrite(find_rewrite("unroll_while_loop").configured(max_ops=42), built)
        assert not kinds(built)["while_loop"] and kinds(built)["mul"] == 42

    def test_loops_one_after_the_other_share_the_budget_and_stay_so(self):
        def body(x):
            for _ in range(6):
                (_, x) = mb.while_loop(_cond=lambda i, x: mb.less(x=i, y=np.int32(20)),
                                       _body=lambda i, x: (mb.add(x=i, y=np.int32(1)), mb.exp(x=x)),
                                       loop_vars=(np.int32(0), x))
            return mb.relu(x=x, name="y")

        built = build_program(body, x=(2, 3))
        rule = find_rewrite("unroll_while_loop")
        found = {finding.value for finding in find_matches(rule.configured(max_ops=80), built).fired}
        trace = apply_rewrite(rule.configured(max_ops=80), built)
        assert found == {finding.value for finding in trace.fired} and len(found) == 3
        assert count_ops(built) <= 80 and "other ops more than 80 (max_ops)" in trace.near_misses[0].reason
        assert not apply_rewrite(rule.configured(max_ops=80), built).fired

    def test_the_functions_of_a_program_share_the_budget(self):
        """Either alone would fit."""
        built, other = build_counted_loop(20), build_counted_loop(20)
        built.add_function("other", other.functions["main"])
        rule = find_rewrite("unroll_while_loop")
        assert len(apply_rewrite(rule.configured(max_ops=90), build_counted_loop(20)).fired) == 1
        found = [finding.function for finding in find_matches(rule.configured(max_ops=90), built).fired]
        trace = apply_rewrite(rule.configured(max_ops=90), built)
        assert [finding.function for finding in trace.fired] == found == ["main"]
        assert "other ops more than 90 (max_ops)" in trace.near_misses[0].reason and count_ops(built) <= 90
        assert not apply_rewrite(rule.configured(max_ops=90), built).fired

    def test_to_decide_takes_no_time_that_multiplies(self):
        """Four loops in each other, of 200 steps each: 1.6e9 steps, of which none is taken."""
        def nest(depth, x):
            if not depth:
                return mb.exp(x=x)
            return mb.while_loop(_cond=lambda i, x: mb.less(x=i, y=np.int32(200)),
                                 _body=lambda i, x: (mb.add(x=i, y=np.int32(1)), nest(depth - 1, x)),
                                 loop_vars=(np.int32(0), x))[1]

        built = build_program(lambda x: mb.relu(x=nest(4, x), name="y"), x=(2, 3))
        started = time.process_time()
        trace = find_matches(find_rewrite("unroll_while_loop").configured(), built)
        assert not trace.fired and "make 1600000000" in trace.near_misses[0].reason
        assert time.process_time() - started < 20
