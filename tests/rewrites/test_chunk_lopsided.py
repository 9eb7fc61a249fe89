"""ANE223: elementwise work on long axes in shapes that fit, against PyTorch's own."""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.targets import parse_target
from mil_ane_passes.rewrites.layout.chunk_lopsided import find_balanced_shape
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds, unsupported_ops
from tests.rewrites.spellings import converted, outputs

NAME = "chunk_lopsided"


rule = partial(configure_rewrite, NAME)


@pytest.mark.law
@given(st.integers(16385, 10**6))
def test_a_shape_holds_as_many_in_short_axes(size):
    shape = find_balanced_shape(size, parse_target("m1"))
    if shape is None:
        assert all(size % each or size // each > 16384 for each in range(1, 1001))
    else:
        assert prod(shape) == size and max(shape) <= 16384


UNARY = {"relu": torch.relu, "tanh": torch.tanh, "abs": torch.abs, "square": torch.square}
BINARY = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum}


@pytest.mark.law
@given(st.data())
def test_any_region_is_pytorchs(data):
    """Drawn ops on two long values: what is left that is unsupported are reshapes, and fewer than there were ops."""
    rows, half = data.draw(st.integers(1, 2)), data.draw(st.integers(8193, 9000))
    shape = data.draw(st.sampled_from([(rows, 2 * half), (1, rows, 2 * half)]))
    x, z = (np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float16) for seed in (0, 1))
    table = np.random.default_rng(2).uniform(-2, 2, shape).astype(np.float16)
    steps = data.draw(st.lists(st.sampled_from([*UNARY, *BINARY, "scalar", "table", "select"]), min_size=1, max_size=8))
    true = {}

    def body(x, z):
        pairs = [(x, torch.from_numpy(feeds["x"])), (z, torch.from_numpy(feeds["z"]))]
        for kind in steps:
            (one, t), (other, u) = (pairs[data.draw(st.integers(0, len(pairs) - 1))] for _ in range(2))
            if kind in UNARY:
                pairs.append((getattr(mb, kind)(x=one), UNARY[kind](t)))
            elif kind == "scalar":
                pairs.append((mb.mul(x=np.float16(0.5), y=one), 0.5 * t))
            elif kind == "table":
                pairs.append((mb.add(x=one, y=table), t + torch.from_numpy(table.astype(np.float64))))
            elif kind == "select":
                pairs.append((mb.select(cond=mb.greater(x=one, y=other), a=one, b=other), torch.where(t > u, t, u)))
            else:
                pairs.append((getattr(mb, kind)(x=one, y=other), BINARY[kind](t, u)))
        true["y"] = pairs[-1][1].numpy()
        return mb.identity(x=pairs[-1][0], name="y")

    feeds = {"x": x.astype(np.float64), "z": z.astype(np.float64)}
    held = build_program(body, x=shape, z=shape)
    count, before = len(unsupported_ops(held, "m1")), Runtime(held, precision="float16")(feeds)["y"]
    trace = apply_rewrite(rule(), held, target="m1")
    if trace.fired:
        assert len(unsupported_ops(held, "m1")) < count
        np.testing.assert_array_equal(Runtime(held, precision="float16")(feeds)["y"], before)
        np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], true["y"], rtol=1e-12)
    else:
        assert all("no reduction of unsupported ops" in miss.reason for miss in trace.near_misses)


@pytest.mark.parametrize("way", ["traced", "exported"])
def test_as_torch_converts(way, tmp_path):
    """Companding of ten seconds of sound."""
    def function(x):
        return torch.sign(x) * torch.log(1 + 255 * torch.abs(x)) / 5.545

    shape = (1, 1, 240000)
    before = converted(function, way, tmp_path / "before", shape=shape)
    held = converted(function, way, tmp_path / "after", shape=shape, passes=NAME)
    assert kinds(held)["reshape"] == 2
    assert set(unsupported_ops(held, "m4")) <= {"reshape", "cast"}
    assert len(unsupported_ops(held, "m4")) < len(unsupported_ops(before, "m4"))
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float16)
    true = function(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(outputs(held, x, "float64"), true, rtol=1e-3)  # the constants are fp16
    np.testing.assert_array_equal(outputs(held, x, "float16"), outputs(before, x, "float16"))


@pytest.mark.parametrize(("target", "length", "fires"), [
    ("m1", 16384, False), ("m1", 16386, True), ("m4", 20000, False), ("m4", 70000, True), ("all", 20000, False),
    ("all", 70000, True)])
def test_only_where_every_chip_refuses_it(target, length, fires):
    held = build_program(lambda x: mb.tanh(x=mb.relu(x=mb.abs(x=x))), x=(length,))
    assert bool(find_matches(rule(), held, target=target).fired) == fires
    assert bool(find_matches(rule(always=True), held, target=target).fired) == (fires or target == "all")


def test_a_conv_between_stays_with_its_neighbours():
    def body(x):
        one = mb.tanh(x=mb.relu(x=mb.abs(x=x)))
        made = mb.conv(x=one, weight=np.ones((1, 1, 3), np.float16), pad_type="same")
        return mb.add(x=mb.square(x=mb.sigmoid(x=made)), y=one, name="y")

    held = build_program(body, x=(1, 1, 20000))
    x = np.random.default_rng(0).standard_normal((1, 1, 20000)).astype(np.float32)
    before = Runtime(held, precision="float16")({"x": x})["y"]
    count = len(unsupported_ops(held, "m1"))
    assert apply_rewrite(rule(), held, target="m1").fired and len(unsupported_ops(held, "m1")) < count
    np.testing.assert_array_equal(Runtime(held, precision="float16")({"x": x})["y"], before)
    assert all(op.op_type in ("reshape", "conv") for _, op in iterate_ops(held)
               if op.op_type != "const" and max(op.outputs[0].shape) > 16384)
