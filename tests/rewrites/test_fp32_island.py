"""ANE502: what is only moved in fp32 is moved in fp16."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime

MOVES = {
    "reshape": lambda x: mb.reshape(x=x, shape=[-1, 2]),
    "transpose": lambda x: mb.transpose(x=x, perm=[1, 0]),
    "split": lambda x: mb.split(x=x, num_splits=2, axis=0)[1],
    "concat": lambda x: mb.concat(values=[x, x], axis=1),
    "reverse": lambda x: mb.reverse(x=x, axes=[1]),
    "tile": lambda x: mb.tile(x=x, reps=[1, 2]),
    "slice": lambda x: mb.slice_by_index(x=x, begin=[0, 0], end=[0, -1], end_mask=[True, False], stride=[1, 1]),
    "select": lambda x: mb.select(cond=mb.greater(x=x, y=np.float32(0)), a=x, b=np.float32(7)),
    "gather": lambda x: mb.gather(x=x, indices=np.array([1, 0, 1], np.int32) % x.shape[0], axis=0),
}


def wide(built):
    return {op.op_type for _, op in iterate_ops(built)
            if op.op_type not in ("const", "cast") and any(var.dtype == types.fp32 for var in op.outputs)}


@pytest.mark.law
@given(st.lists(st.sampled_from(list(MOVES)), min_size=1, max_size=5), st.booleans(), st.integers(0, 9))
def test_any_chain_of_moves_gives_the_same_bits(names, from_half, seed):
    def body(x):
        value = mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32") if from_half else x
        for name in names:
            value = MOVES[name](value)
        return mb.cast(x=value, dtype="fp16", name="y")

    try:
        built = build_program(body, dtype=types.fp32, x=(4, 4))
    except (ValueError, AssertionError):  # a slice that leaves nothing, an odd number of rows to split
        return
    x = np.random.default_rng(seed).choice(
        [np.inf, -np.inf, np.nan, -0.0, 1e5, -65519.9, 1e-8, 0.1, 3.14159], (4, 4)).astype(np.float32)
    before = {precision: Runtime(built, precision=precision)({"x": x})["y"] for precision in ("float64", "float16")}
    trace = apply_rewrite(find_rewrite("fp32_island").configured(), built)
    for precision, old in before.items():
        new = Runtime(built, precision=precision)({"x": x})["y"]
        np.testing.assert_array_equal(old, new)
        np.testing.assert_array_equal(np.signbit(old), np.signbit(new))
    if "select" not in names and from_half:  # of fp32 that is compared, too, the comparison stays
        assert trace.fired and not wide(built)


class Turned(torch.nn.Module):
    def forward(self, x):
        first, second = x.transpose(1, 2).reshape(2, 3, 8).chunk(2, -1)
        return torch.relu(first + second)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_what_stands_before_the_casts_of_inputs(tmp_path, target):
    """Casts that stand where coremltools was told to keep the moves in fp32."""
    x = torch.randn(2, 4, 6)
    kept = {"transpose", "reshape", "split"}
    model = ct.convert(
        torch.jit.trace(Turned(), x), inputs=[ct.TensorType(name="x", shape=x.shape, dtype=np.float32)],
        convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True,
        compute_precision=ct.transform.FP16ComputePrecision(op_selector=lambda op: op.op_type not in kept),
        pass_pipeline=ane.pipeline(passes="fp32_island"))
    model.save(str(tmp_path / "m.mlpackage"))
    built = ane.load(tmp_path / "m.mlpackage").program
    assert not wide(built)
    rules = [rule.configured() for rule in get_all_rules().values()]
    assert not [row for row in predict_plan(built, rules, target="m4")[0].rows if row.ane == "no"]
    x = x.half()
    (found,) = Runtime(built, precision="float64")({"x": x.float().numpy()}).values()
    np.testing.assert_allclose(found, Turned()(x.double()).numpy(), rtol=0, atol=1e-12)


def test_a_large_constant_and_what_is_read_in_fp32_stay():
    def body(x):
        moved = mb.transpose(x=x, perm=[1, 0])
        held = mb.concat(values=[x, np.ones((4, 600), np.float32)], axis=1)
        return [mb.cast(x=moved, dtype="fp16"), moved, mb.cast(x=held, dtype="fp16")]

    trace = apply_rewrite(find_rewrite("fp32_island").configured(), build_program(body, dtype=types.fp32, x=(4, 4)))
    assert not trace.fired
    (miss,) = trace.near_misses
    assert miss.reason.startswith("it moves the constant '")
