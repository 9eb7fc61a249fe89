"""ANE201: truth values are counted in fp16."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import load_converted

STEPS = {
    "add": lambda i, j, n: mb.add(x=i, y=j),
    "add a number": lambda i, j, n: mb.add(x=i, y=np.int32(n)),
    "sub": lambda i, j, n: mb.sub(x=np.int32(n), y=i),
    "mul": lambda i, j, n: mb.mul(x=i, y=j),
    "scaled": lambda i, j, n: mb.mul(x=i, y=np.int32(n)),
    "maximum": lambda i, j, n: mb.maximum(x=i, y=j),
    "minimum": lambda i, j, n: mb.minimum(x=i, y=np.int32(n)),
    "abs": lambda i, j, n: mb.abs(x=i),
    "sum": lambda i, j, n: mb.add(x=mb.reduce_sum(x=i, axes=[1], keep_dims=True), y=j),
    "most": lambda i, j, n: mb.reduce_max(x=i, axes=[0], keep_dims=True),
    "turned": lambda i, j, n: mb.reverse(x=mb.transpose(x=mb.transpose(x=i, perm=[1, 0]), perm=[1, 0]), axes=[1]),
    "chosen": lambda i, j, n: mb.select(cond=mb.greater(x=i, y=np.int32(n)), a=i, b=j),
    "counted": lambda i, j, n: mb.add(x=i, y=mb.cast(x=mb.less(x=i, y=j), dtype="int32")),
    "joined": lambda i, j, n: mb.slice_by_index(x=mb.concat(values=[i, j], axis=0), begin=[1, 0], end=[3, 0],
                                                end_mask=[False, True]) if i.shape == j.shape == (2, 3) else i,
}


def integers(built):
    return [op.op_type for _, op in iterate_ops(built)
            if op.op_type != "const" and any(var.dtype == types.int32 for var in op.outputs)]


@pytest.mark.law
@given(st.lists(st.tuples(st.sampled_from(list(STEPS)), st.integers(-4, 40)), max_size=7), st.integers(0, 99),
       st.sampled_from(["fp16", "fp32", "bool"]))
def test_any_counting_gives_the_same_bits(steps, seed, end):
    def body(x):
        first = value = mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="int32")
        for kind, number in steps:
            value = STEPS[kind](value, first, number)
        return mb.cast(x=value, dtype=end, name="y")

    built = build_program(body, x=(2, 3))
    x = np.random.default_rng(seed).standard_normal((2, 3)).astype(np.float16)
    before = {precision: Runtime(built, precision=precision)({"x": x})["y"] for precision in ("float64", "float16")}
    trace = apply_rewrite(find_rewrite("int_casts").configured(), built)
    for precision, old in before.items():
        new = Runtime(built, precision=precision)({"x": x})["y"]
        np.testing.assert_array_equal(old, new)
        if end != "bool":
            np.testing.assert_array_equal(np.signbit(old), np.signbit(new))
    if trace.fired:
        assert not integers(built)
    else:
        (miss,) = trace.near_misses
        assert "may reach" in miss.reason or "may be -0.0" in miss.reason or "beyond" in miss.reason


class Counted(torch.nn.Module):
    """A masked mean, with a count as torch users write it."""

    def forward(self, x):
        mask = x > 0
        count = mask.int().sum(-1, keepdim=True).clamp(min=1)
        return torch.where(mask, x, torch.zeros_like(x)).sum(-1, keepdim=True) / count


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_a_masked_mean_is_left_without_integers(tmp_path, target, exported):
    x = torch.randn(3, 8).half().float()
    built = load_converted(Counted(), x, path=tmp_path / "m.mlpackage", way="exported" if exported else "traced",
                           names="x", minimum_deployment_target=target, passes="int_casts")
    assert not integers(built)
    rules = [rule.configured() for rule in get_all_rules().values()]
    assert not [row.reason for row in predict_plan(built, rules, target="m4")[0].rows if row.ane == "no"]
    (found,) = Runtime(built, precision="float64")({"x": x.numpy()}).values()
    np.testing.assert_allclose(found, Counted()(x.double()).numpy(), rtol=0, atol=1e-12)


def test_two_outputs_of_one_count_keep_their_names():
    def body(x):
        whole = mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="int32")
        return [mb.cast(x=whole, dtype="fp16", name="a"), mb.cast(x=whole, dtype="fp16", name="b")]

    built = build_program(body, x=(2, 3))
    assert apply_rewrite(find_rewrite("int_casts").configured(), built).fired and not integers(built)
    assert [var.name for var in built.functions["main"].outputs] == ["a", "b"]


def test_a_sum_of_flexible_length_is_left():
    built = build_program(lambda x: mb.cast(x=mb.reduce_sum(x=mb.cast(
        x=mb.greater(x=x, y=np.float16(0)), dtype="int32"), axes=[0]), dtype="fp16"), x=(None, 3))
    (miss,) = apply_rewrite(find_rewrite("int_casts").configured(), built).near_misses
    assert miss.reason == "the number of summands is dynamic"
