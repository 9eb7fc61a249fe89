"""ANE258: what is known at conversion is a constant."""

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
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.torch_frontend import patched
from tests.rewrites.helpers import kinds, unsupported_ops


def folded(built, **options):
    return apply_rewrite(find_rewrite("fold_constants").configured(**options), built)


class Unpacked(torch.nn.Module):
    """Sizes unpacked from a shape and computed with, as vision models do."""

    def forward(self, x):
        b, c, h, w = x.shape
        return x.reshape(b, c * h // 2, -1).transpose(1, 2) * torch.arange(w * 2).view(-1, 1)[: w * 2]


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "after coremltools'"])
def test_sizes_that_torch_unpacks_from_a_shape(tmp_path, alone, target):
    base = ct.PassPipeline(["common::dead_code_elimination"], "alone") if alone else ct.PassPipeline.DEFAULT
    x = torch.randn(2, 4, 3, 6)
    with patched():
        model = ct.convert(torch.jit.trace(Unpacked(), x), inputs=[ct.TensorType(name="x", shape=x.shape)],
                           convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True,
                           pass_pipeline=ane.pipeline(base, passes="fold_constants"))
    model.save(str(tmp_path / "m.mlpackage"))
    built = ane.load(tmp_path / "m.mlpackage").program
    assert not any(
        types.is_int(var.dtype) for _, op in iterate_ops(built) if op.op_type != "const" for var in op.outputs
    )
    assert alone or not unsupported_ops(built, "m4") + unsupported_ops(built, "m1")
    (found,) = Runtime(built, precision="float64")({"x": x.numpy()}).values()
    np.testing.assert_allclose(found, Unpacked()(x.double()).numpy(), rtol=1e-12, atol=1e-12)


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "floor_div": np.floor_divide, "mod": np.mod,
               "maximum": np.maximum, "minimum": np.minimum}


@st.composite
def chains(draw):
    size = draw(st.integers(1, 4))
    numbers = st.lists(st.integers(-9, 9), min_size=size, max_size=size)
    steps = draw(st.lists(st.tuples(st.sampled_from([*_ARITHMETIC, "take", "turn", "choose"]), numbers), max_size=6))
    return draw(numbers), steps


@pytest.mark.law
@given(chains())
def test_any_integer_arithmetic_is_numpys(drawn):
    begin, steps = drawn
    now = np.array(begin, np.int32)
    size = len(begin)

    def body(x):
        value = mb.const(val=now)
        for kind, numbers in steps:
            other = np.array(numbers, np.int32)
            if kind == "take":
                value = mb.gather(x=value, indices=np.abs(other) % size, axis=0)
            elif kind == "turn":
                value = mb.reverse(x=value, axes=[0])
            elif kind == "choose":
                value = mb.select(cond=mb.greater(x=value, y=other), a=value, b=other)
            else:
                value = getattr(mb, kind)(x=value, y=np.where(other == 0, 1, other).astype(np.int32))
        return mb.mul(x=x, y=mb.cast(x=value, dtype="fp32"))

    built = build_program(body, dtype=types.fp32, x=(2, size))
    trace = folded(built)
    assert trace.fired and set(kinds(built)) <= {"const", "mul", "cast"}
    for kind, numbers in steps:
        other = np.array(numbers, np.int32)
        other = other if kind in ("take", "choose") else np.where(other == 0, 1, other)
        now = (now[np.abs(other) % size] if kind == "take" else now[::-1] if kind == "turn" else
               np.where(now > other, now, other) if kind == "choose" else _ARITHMETIC[kind](now, other))
        if np.abs(now).max() >= 2 ** 24:
            return
    x = np.random.default_rng(0).standard_normal((2, size)).astype(np.float32)
    (found,) = Runtime(built, precision="float64")({"x": x}).values()
    np.testing.assert_allclose(found, x.astype(np.float64) * now, rtol=0, atol=1e-12 * max(1, np.abs(now).max()))


def test_weights_random_numbers_and_outputs_stay():
    def body(x):
        packed = mb.constexpr_affine_dequantize(quantized_data=np.full((4, 8), 130, np.uint8), zero_point=np.uint8(128),
                                                scale=np.float16(0.25), axis=0)
        noise = mb.random_normal(shape=[2, 8], mean=np.float16(0), stddev=np.float16(1), seed=1)
        return [mb.linear(x=mb.add(x=x, y=noise), weight=packed), mb.shape(x=x, name="size"),
                mb.matmul(x=x, y=mb.transpose(x=make_weight(4200, 8), perm=[1, 0]))]

    built = build_program(body, opset=ct.target.iOS16, x=(2, 8))
    before = kinds(built)
    folded(built)
    assert kinds(built) == before


def test_equal_values_are_one_constant():
    built = build_program(lambda x: [mb.reshape(x=x, shape=mb.add(
        x=np.array([2, 5], np.int32), y=np.array([1, -3], np.int32))) for _ in range(3)], x=(2, 3))
    assert len(folded(built).fired) == 3
    assert len({op.shape for _, op in iterate_ops(built) if op.op_type == "reshape"}) == 1


@pytest.mark.parametrize("most, fires", [(11, False), (12, True)])
def test_the_bytes_have_a_bound(most, fires):
    built = build_program(lambda x: mb.reshape(x=x, shape=mb.add(
        x=np.array([1, 1, 5], np.int32), y=np.array([0, 1, -2], np.int32))), x=(2, 3))
    assert bool(folded(built, max_bytes=most).fired) is fires
