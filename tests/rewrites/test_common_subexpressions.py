"""ANE543: what several ops compute from the same values is computed once."""

from __future__ import annotations

import sys
from functools import partial

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.constants import make_reshaped_const
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds
from tests.rewrites.transformer_blocks import run_at

rule = partial(configure_rewrite, "common_subexpressions")


def merge(program):
    after = clone_program(program)
    trace = apply_rewrite(rule(), after, target="m4")
    assert not apply_rewrite(rule(), after, target="m4").fired
    return after, trace


def split_twice(x):
    (a, b), (c, d) = (mb.split(x=x, num_splits=2, axis=1) for _ in range(2))
    return mb.add(x=mb.mul(x=a, y=mb.exp(x=b)), y=mb.sub(x=c, y=mb.exp(x=d)), name="y")


def branches(x):
    positive = mb.greater(x=mb.reduce_sum(x=mb.tanh(x=x), axes=[0, 1]), y=np.float16(0))
    return mb.cond(pred=positive, _true_fn=lambda: mb.mul(x=mb.tanh(x=x), y=x),
                   _false_fn=lambda: mb.sub(x=mb.tanh(x=x), y=x), name="y")


def changed_places(x):
    y = mb.exp(x=x)
    return mb.sub(x=mb.tanh(x=mb.mul(x=x, y=y)), y=mb.relu(x=mb.mul(x=y, y=x)), name="y")


@pytest.mark.parametrize("body, kind, left", [(split_twice, "split", 1), (split_twice, "exp", 1),
                                              (branches, "tanh", 1), (changed_places, "mul", 1)])
def test_what_coremltools_leaves(body, kind, left):
    """coremltools' own pass merges none of these."""
    program = build_program(body, x=(2, 4))
    theirs = clone_program(program)
    PASS_REGISTRY["common::remove_redundant_ops"].apply(theirs)
    assert kinds(theirs)[kind] > left
    after, _ = merge(program)
    assert kinds(after)[kind] == left
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float16)}
    for precision in ("float64", "float16"):
        np.testing.assert_array_equal(run_at(after, feeds, precision), run_at(program, feeds, precision))


def test_each_layer_prepares_the_same(tmp_path):
    """A mask and the angles of a rotary embedding, prepared in each of three layers, against PyTorch."""
    torch = pytest.importorskip("torch")

    class Layers(torch.nn.Module):
        def forward(self, x, mask, place):
            for number in range(3):
                added = (1 - mask) * -1e4
                angles = place[:, None] * (0.1 + torch.arange(4) / 7)
                x = x * torch.cos(angles) + torch.sin(angles) * (number + 1)
                x = torch.softmax(x @ x.transpose(-1, -2) + added, -1) @ x
            return x

    inputs = torch.randn(1, 6, 4), torch.tensor([[1.0] * 4 + [0.0] * 2]), torch.arange(6.0)
    module = Layers()
    with torch.no_grad():
        traced = torch.jit.trace(module, inputs)
    made = ct.convert(traced, convert_to="mlprogram", compute_precision=ct.precision.FLOAT32, skip_model_load=True,
                      minimum_deployment_target=ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY,
                      inputs=[ct.TensorType(f"x{at}", shape=x.shape) for at, x in enumerate(inputs)])
    made.save(str(tmp_path / "layers.mlpackage"))
    program = ane.load(tmp_path / "layers.mlpackage").program
    after, trace = merge(program)
    assert (kinds(program)["cos"], kinds(program)["sub"]) == (3, 3)
    assert (kinds(after)["cos"], kinds(after)["sin"], kinds(after)["sub"], kinds(after)["softmax"]) == (1, 1, 1, 3)
    feeds = {f"x{at}": x.numpy() for at, x in enumerate(inputs)}
    np.testing.assert_array_equal(run_at(after, feeds, "float32"), run_at(program, feeds, "float32"))
    wide = module(*(x.double() for x in inputs)).numpy()
    assert np.abs(run_at(after, feeds, "float64") - wide).max() <= 1e-6
    assert all(hit.reason.endswith("again") for hit in trace.fired)


def test_states_are_read_each_time():
    """Between two reads of a state it is written."""
    @mb.program(input_specs=[mb.TensorSpec((4,), types.fp16), mb.StateTensorSpec((4,), types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, s):
        first = mb.read_state(input=s)
        mb.coreml_update_state(state=s, value=mb.add(x=first, y=x))
        second = mb.read_state(input=s)
        return mb.add(x=mb.mul(x=first, y=np.float16(2)), y=mb.mul(x=second, y=np.float16(2)), name="y")

    after, trace = merge(program)
    assert not trace.fired and kinds(after) == kinds(program)


def test_a_loop_reads_what_is_computed_before_it():
    def body(x):
        before = mb.tanh(x=x)

        def step(i, total):
            return mb.add(x=i, y=np.int32(1)), mb.add(x=total, y=mb.tanh(x=x))

        _, total = mb.while_loop(_cond=lambda i, total: mb.less(x=i, y=np.int32(3)), _body=step,
                                 loop_vars=(np.int32(0), before))
        return mb.add(x=total, y=before, name="y")

    program = build_program(body, x=(2, 4))
    after, trace = merge(program)
    assert trace.fired and kinds(after)["tanh"] == 1
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float16)}
    np.testing.assert_array_equal(run_at(after, feeds, "float16"), run_at(program, feeds, "float16"))


def test_values_of_branches_are_not_seen_outside_them():
    def body(x):
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1]), y=np.float16(0))
        one = mb.cond(pred=positive, _true_fn=lambda: mb.exp(x=mb.tanh(x=x)), _false_fn=lambda: mb.relu(x=x))
        return mb.add(x=one, y=mb.tanh(x=x), name="y")

    program = build_program(body, x=(2, 4))
    assert not merge(program)[1].fired


def test_functions_do_not_share_values():
    program = build_program(lambda x: mb.tanh(x=x, name="y"), x=(2, 4))
    program.add_function("other", build_program(lambda x: mb.tanh(x=x, name="y"), x=(2, 4)).functions["main"])
    assert not merge(program)[1].fired


def test_large_weights_are_equal_where_they_are_stored_at_one_place(tmp_path):
    """Weights of more elements than are compared are not read."""
    def project(x):
        return mb.linear(x=x, weight=make_weight(64, 64))

    doubled = build_program(lambda x: mb.add(x=mb.tanh(x=project(x)), y=mb.relu(x=project(x)), name="y"), x=(2, 64))
    ct.convert(doubled, convert_to="mlprogram", skip_model_load=True, pass_pipeline=ct.PassPipeline.EMPTY,
               minimum_deployment_target=ct.target.iOS17).save(str(tmp_path / "doubled.mlpackage"))
    loaded = ane.load(tmp_path / "doubled.mlpackage").program
    assert kinds(merge(loaded)[0])["linear"] == 2
    function = loaded.functions["main"]
    first, second = function.find_ops(op_type="linear")
    with function:
        second.set_inputs(weight=make_reshaped_const(first.weight, (64, 64), "again", second))
    assert kinds(merge(loaded)[0])["linear"] == 1


def test_time_is_linear():
    def layers(count):
        def body(x):
            for _ in range(count):
                x = mb.add(x=x, y=mb.tanh(x=x))
            return x

        return build_program(body, x=(2, 4))

    def count_calls(count):
        """Count the function calls: what a clock would say, whatever the machine does besides."""
        program, calls = layers(count), 0

        def count_call(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_call)
        try:
            assert not apply_rewrite(rule(), program, target="m4").fired
        finally:
            sys.setprofile(None)
        return calls

    assert 2000 < count_calls(2000) < 12 * count_calls(200)


def test_outputs_keep_their_names_and_values():
    program = build_program(lambda x: [mb.tanh(x=x, name="y"), mb.exp(x=mb.tanh(x=x), name="z")], x=(2, 4))
    after, _ = merge(program)
    assert kinds(after)["tanh"] == 1 and [var.name for var in after.functions["main"].outputs] == ["y", "z"]
    feeds = {"x": np.ones((2, 4), np.float16)}
    for one, other in zip(Runtime(program)(feeds).values(), Runtime(after)(feeds).values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_slices_that_rows_are_hoisted_to_are_shared_in_one_run():
    """Slices are moved once more after all other rewrites, and two of one value are one then."""
    def body(x):
        row = mb.slice_by_index(x=mb.square(x=x), begin=[0, 0, 0], end=[1, 1, 1], end_mask=[False, True, True])
        return mb.gather(x=mb.matmul(x=mb.add(x=x, y=row), y=make_weight(3, 3)), indices=[0, 0], axis=0, name="y")

    report = ane.rewrite(build_program(body, x=(3, 6, 3)), preset="full", target="m1", max_growth=None)
    assert {"hoist_row_slice", "gather_as_slices"} <= {trace.rule for trace in report.traces if trace.fired}
    again = ane.rewrite(report.package, preset="full", target="m1", max_growth=None)
    assert not again.changed, str(again)
