"""Estimates of ops that nobody published: never a crash, never a weight's values, and called a guess."""

from __future__ import annotations

import shutil

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

from mil_ane_passes.ane import cost_laws, predict_plan
from mil_ane_passes.ane.cost import estimate_cost
from mil_ane_passes.ane.sizes import Sizes
from mil_ane_passes.commands.sources import open_source
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.examples import build_program

from ..package.helpers import main_block, spec_of, write_spec
from .m4_build import W
from .m4_cases import CASES, alone, estimates, in_order


def costs(*shapes, dtype=types.fp16, sizes=None):
    """The estimates of each op of the program that the decorated function builds."""
    def read(body):
        specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes]
        program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body)
        return {op.op_type: estimate_cost(op, takes=True, sizes=sizes or Sizes()) for _, op in iterate_ops(program)}
    return read


@pytest.mark.sampled(90)
@pytest.mark.parametrize("name", CASES)
def test_every_case_has_estimates(name):
    for op in in_order(alone(name)):
        found = estimate_cost(op, takes=True)
        assert 0 <= found.ane < 10 and 0 <= found.bnns < 10 and 0 <= found.classic < 10
        assert estimate_cost(op, takes=False).ane is None


@pytest.mark.parametrize("name, kind, guess", [
    ("cos", "cos", False), ("mul", "mul", True), ("gelu_exact", "gelu", True), ("lstm", "lstm", True),
    ("conv_transpose_k3s2", "conv_transpose", False), ("conv_transpose_1d", "conv_transpose", True),
    ("conv3x3_d2", "conv", True), ("sw_conv_g32", "conv", True), ("transpose_nc", "transpose", True),
    ("linear", "linear", False), ("matmul_dyn", "matmul", True), ("sw_matmul_k16384", "matmul", False),
])
def test_what_no_published_estimate_stands_for_is_a_guess(name, kind, guess):
    assert [estimate_cost(op, takes=True).guess for op in in_order(alone(name)) if op.op_type == kind] == [guess]


def test_no_published_convolution_lies_where_the_law_is_a_guess():
    def intensity(op):
        flops = 2 * np.prod(op.outputs[0].shape) * np.prod(op.weight.shape[1:])
        return flops / (2 * (np.prod(op.x.shape) + np.prod(op.weight.shape) + np.prod(op.outputs[0].shape)))
    seen = [intensity(op) for name, rows in estimates().items() if rows[0]["source"] == "analytics"
            for op in in_order(alone(name)) if op.op_type == "conv"]
    assert len(seen) > 20
    for (low, high), start in zip(
        cost_laws.UNMEASURED_INTENSITIES, (cost_laws.MIDDLE_MIN_INTENSITY, cost_laws.DENSE_MIN_INTENSITY), strict=True
    ):
        assert low < start < high and not [each for each in seen if low < each < high]


def test_a_symbolic_dimension_counts_what_it_stands_for():
    shape = (1, 8, get_new_symbol())
    one = costs(shape)(lambda x: mb.cos(x=x))["cos"]
    many = costs(shape, sizes=Sizes(50))(lambda x: mb.cos(x=x))["cos"]
    assert one.guess and many.guess
    assert many.ane == pytest.approx(50 * one.ane) and many.bnns == pytest.approx(50 * one.bnns)


def test_a_flexible_input_counts_with_its_default():
    spec = mb.TensorSpec((1, 64, 1, get_new_symbol()), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(x):
        return mb.tanh(x=mb.conv(x=x, weight=W(64, 64, 1, 3)))
    found = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                       inputs=[ct.TensorType("x", (1, 64, 1, ct.RangeDim(16, 4096, default=1024)), dtype=np.float16)])
    source = open_source(found)
    plan, _ = predict_plan(source.program, [], target="m4", package=source.package)
    tanh = next(row for row in plan.rows if row.op.op_type == "tanh")
    assert tanh.cost.ane == pytest.approx(2 * 2 * 64 * 1022 / (68 * 2 ** 30) * 1e3)  # a valid conv 3 wide


def test_scalars_and_both_ends_of_rank_have_estimates():
    @costs((1,), (1, 1, 1, 1, 4))
    def found(x, y):
        return mb.squeeze(x=x), mb.reduce_sum(x=y, axes=[0, 1, 2, 3, 4], keep_dims=False)
    assert found["squeeze"].ane == pytest.approx(4 / (68 * 2 ** 30) * 1e3)
    assert found["reduce_sum"].ane > 0


def test_lists_and_nested_blocks_have_estimates():
    @costs((4, 8), dtype=types.fp32)
    def found(x):
        rows = mb.make_list(init_length=4, elem_shape=(8,))
        rows = mb.list_write(ls=rows, index=0, value=mb.reduce_sum(x=x, axes=[0]))
        return mb.cond(pred=mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=0.0),
                       _true_fn=lambda: mb.cos(x=x), _false_fn=lambda: x), mb.list_read(ls=rows, index=0)
    assert {"make_list", "list_write", "list_read", "cond", "cos"} <= set(found)
    assert all(item.bnns >= 0 for item in found.values())


def test_a_state_has_estimates():
    @mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.fp16), mb.StateTensorSpec((8,), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, state):
        return mb.add(x=x, y=mb.read_state(input=state))
    assert all(estimate_cost(op, takes=True).guess for _, op in iterate_ops(program) if op.op_type == "read_state")


def test_a_compressed_weight_counts_as_what_it_unpacks_to():
    def dense(x):
        return mb.linear(x=x, weight=W(512, 256))

    def packed(x):
        indices = np.zeros((512, 256), types.nptype_from_builtin(types.uint4))
        weight = mb.constexpr_lut_to_dense(indices=indices, lut=np.zeros((1, 1, 16, 1), np.float16))
        return mb.linear(x=x, weight=weight)
    plain, small = (costs((1, 128, 256))(body)["linear"] for body in (dense, packed))
    assert (plain.ane, plain.bnns) == (small.ane, small.bnns)
    assert small.guess and not plain.guess


def test_an_op_that_the_loader_does_not_know_has_estimates(fixtures, tmp_path):
    source = tmp_path / "tomorrow.mlpackage"
    shutil.copytree(fixtures / "nothing_to_do.mlpackage", source)
    spec = spec_of(source)
    for op in main_block(spec).operations:
        op.type = {"conv": "conv_of_tomorrow"}.get(op.type, op.type)
    write_spec(source, spec)
    found = open_source(source)
    plan, _ = predict_plan(found.program, [], target="m4", package=found.package)
    row = next(row for row in plan.rows if row.op.op_type == "conv_of_tomorrow")
    assert row.cost.guess and row.cost.ane is None and row.cost.bnns > 0 and row.backend == "cpu"


def test_of_a_tensors_symbols_no_more_count_than_an_input_has():
    """A computed shape gives the batch and the heads symbols, too."""
    made = build_program(lambda x: mb.relu(x=x, name="y"), x=(None, None, 48)).functions["main"].outputs[0]
    assert Sizes(32).shape(made) == (1, 32, 48)
    assert Sizes(32, free=2).shape(made) == (32, 32, 48)
    scores = build_program(lambda x: mb.matmul(x=x, y=x, transpose_y=True, name="y"), x=(None, 48)).functions["main"]
    assert Sizes(32).shape(scores.outputs[0]) == (32, 32), "one symbol, twice"
