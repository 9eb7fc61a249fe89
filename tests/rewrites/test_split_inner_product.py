"""ANE224: products over long dimensions in parts, against PyTorch's own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.rewrites._weights import split_evenly
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, converted_as, kinds

NAME, LONG = "split_inner_product", 33000


rule = partial(configure_rewrite, NAME)


def refused(held, target="m4"):
    rows = predict_plan(held, [each() for each in get_all_rules().values()], target=target)[0].rows
    return [row.op.op_type for row in rows if row.ane == "no" or not row.takes]


@pytest.mark.law
@given(st.integers(1, 300), st.integers(1, 40))
def test_spans_are_even_and_few(length, most):
    found = split_evenly(length, most)
    assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), length]
    sizes = [stop - start for start, stop in found]
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1 and len(found) == -(-length // most)


@pytest.mark.law
@given(st.integers(32769, 65536), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(),
       st.sampled_from(["computed", "constant", "linear"]), st.integers(0, 2**31))
def test_is_pytorchs_product(inner, rows, columns, flip_x, flip_y, kind, seed):
    random = np.random.default_rng(seed)
    x, y = (random.uniform(-1, 1, shape).astype(np.float16) for shape in ((rows, inner), (columns, inner)))
    true = x.astype(np.float64) @ y.astype(np.float64).T
    feeds = {}
    if kind == "linear":
        feeds["x"] = x
        bias = np.arange(columns).astype(np.float16)
        held, true = build_program(lambda x: mb.linear(x=x, weight=y, bias=bias, name="y"), x=x.shape), true + bias
    else:
        feeds["x"], other = (x.T if flip_x else x), (y if flip_y else y.T)
        given = {"transpose_x": flip_x, "transpose_y": flip_y, "name": "y"}
        if kind == "constant":
            held = build_program(lambda x: mb.matmul(x=x, y=np.ascontiguousarray(other), **given), x=feeds["x"].shape)
        else:
            feeds["z"] = other
            held = build_program(lambda x, z: mb.matmul(x=x, y=z, **given), x=feeds["x"].shape, z=other.shape)
    feeds = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in feeds.items()}
    assert apply_rewrite(rule(), held, target="m4").fired
    assert all(op.x.shape[-2 if op.op_type == "matmul" and op.transpose_x.val else -1] <= 32768
               for _, op in iterate_ops(held) if op.op_type in ("matmul", "linear"))
    assert not refused(held)
    np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], true, rtol=0, atol=1e-9)
    scale = np.abs(true).max()
    np.testing.assert_allclose(Runtime(held, precision="float16")(feeds)["y"], true, rtol=0, atol=2e-3 * scale + 0.05)


@pytest.mark.parametrize("way", ["traced", "exported"])
def test_as_torch_converts(way, tmp_path):
    class Pooled(torch.nn.Module):
        """Attention over a map of 200 x 200 places, and a linear on all of a picture."""

        def __init__(self):
            super().__init__()
            self.last = torch.nn.Linear(40000, 3)

        def forward(self, x):
            weights = x.mean(1, keepdim=True).flatten(2).softmax(-1)
            return self.last(x.flatten(2)), weights @ x.flatten(2).transpose(1, 2)

    torch.manual_seed(0)
    module, x = Pooled().eval(), torch.randn(1, 2, 200, 200)
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()
    held = converted_as(module, x, way, tmp_path / "m.mlpackage", passes=NAME, chip="m4")
    assert kinds(held)["linear"] == 2 and kinds(held)["matmul"] == 2 and not refused(held)
    (name,) = held.functions["main"].inputs
    found = Runtime(held, precision="float64")({name: x.numpy()}).values()
    with torch.no_grad():
        for one, other in zip(found, module.double()(x.half().double())):
            np.testing.assert_allclose(one, other.numpy(), atol=2e-3)


def bytes_of(held):
    return sum(op.val.val.nbytes for _, op in iterate_ops(held) if op.op_type == "const" and op.outputs[0].rank > 1)


def test_readers_of_one_weight_share_its_parts():
    weight = np.ones((2, LONG), np.float16)

    def body(x):
        held = mb.const(val=weight, name="w")
        return [mb.linear(x=each, weight=held, name=name) for each, name in ((x, "y"), (mb.relu(x=x), "z"))]

    held = build_program(body, x=(1, LONG))
    assert len(apply_rewrite(rule(), held, target="m4").fired) == 2 and bytes_of(held) == weight.nbytes


def test_a_weight_read_whole_grows_within_bounds():
    def body(x):
        held = mb.const(val=np.ones((2, LONG), np.float16), name="w")
        return [mb.linear(x=x, weight=held, name="y"), mb.mul(x=x, y=held, name="z")]

    assert not find_matches(rule(max_bytes=131999), build_program(body, x=(2, LONG)), target="m4").fired
    assert find_matches(rule(max_bytes=132000), build_program(body, x=(2, LONG)), target="m4").fired


def compressed(x):
    table = mb.constexpr_affine_dequantize(quantized_data=np.ones((2, LONG), np.int8), zero_point=np.int8(0),
                                           scale=np.float16(0.5), axis=0)
    return mb.linear(x=x, weight=table)


@pytest.mark.parametrize(("held", "target", "reason"), [
    (lambda: build_program(compressed, x=(1, LONG)), "m4",
     "operand weight is compressed: its parts would have to be decompressed"),
    (lambda: build_program(lambda x, z: mb.matmul(x=x, y=z), dtype=types.fp32, x=(1, LONG), z=(LONG, 1)), "m4",
     "computed in fp32, which is unsupported on the ANE"),
    (lambda: build_program(lambda x, z: mb.matmul(x=x, y=z), x=(1, 20000), z=(20000, 1)), "m1",
     "an operand that is 20000 long is unsupported on M1, and so are slices of it"),
    (lambda: build_program(lambda x, z: mb.matmul(x=x, y=z), x=(1, 70000), z=(70000, 1)), "m4",
     "an operand that is 70000 long is unsupported on M4, and so are slices of it"),
])
def test_left_alone(held, target, reason):
    found = find_matches(rule(), held(), target=target)
    assert not found.fired and [miss.reason for miss in found.near_misses] == [reason]
