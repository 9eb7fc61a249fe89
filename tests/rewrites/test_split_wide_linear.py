"""ANE223: heads that are wider than the ANE holds, against PyTorch's own."""

from __future__ import annotations

from functools import partial

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
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model, load_converted
from tests.rewrites.helpers import (
    configure_rewrite,
    converted_as,
    kinds,
    unsupported_ops,
)

NAME = "split_wide_linear"


rule = partial(configure_rewrite, NAME)


def weights(held):
    return sum(op.val.val.nbytes for _, op in iterate_ops(held) if op.op_type == "const" and op.outputs[0].rank > 1)


@pytest.mark.law
@given(st.integers(16385, 70000), st.integers(1, 3), st.integers(1, 3), st.sampled_from(["linear", "matmul", "turned"]),
       st.booleans(), st.integers(0, 2**31))
def test_is_pytorchs_linear(wide, width, rows, kind, open_rows, seed):
    random = np.random.default_rng(seed)
    weight, bias = (random.uniform(-1, 1, shape).astype(np.float16) for shape in ((wide, width), wide))

    def body(x):
        if kind == "linear":
            return mb.linear(x=x, weight=weight, bias=bias, name="y")
        held = weight if kind == "turned" else np.ascontiguousarray(weight.T)
        return mb.matmul(x=x, y=held, transpose_y=kind == "turned", name="y")

    held = build_program(body, x=(1, None if open_rows else rows, width))
    before = weights(held)
    x = random.uniform(-1, 1, (1, rows, width)).astype(np.float16)
    true = torch.nn.functional.linear(*(torch.from_numpy(each.astype(np.float64)) for each in (x, weight)))
    true = true.numpy() + (bias.astype(np.float64) if kind == "linear" else 0)
    count = len(unsupported_ops(held, "m1"))
    assert apply_rewrite(rule(), held, target="m1").fired
    assert len(unsupported_ops(held, "m1")) <= count
    assert set(unsupported_ops(held, "m1")) == {"concat"} and weights(held) == before
    feeds = {"x": x.astype(np.float32)}
    np.testing.assert_allclose(Runtime(held, precision="float64")(feeds)["y"], true, rtol=0, atol=1e-12)
    np.testing.assert_allclose(Runtime(held, precision="float16")(feeds)["y"], true, rtol=0, atol=2e-3)


class Head(torch.nn.Module):
    def __init__(self, tied=False, wide=20000):
        super().__init__()
        self.table = torch.nn.Embedding(wide, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, wide, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(x if x.is_floating_point() else self.table(x)))


@pytest.mark.parametrize("way", ["traced", "exported"])
def test_as_torch_converts(way, tmp_path):
    torch.manual_seed(0)
    module, x = Head().eval(), torch.randn(1, 3, 4)
    module.head.requires_grad_(False).half().float()
    held = converted_as(module, x, way, tmp_path / "m.mlpackage", passes=NAME, chip="m2")
    assert kinds(held)["linear"] == 2 and unsupported_ops(held, "m2").count("linear") == 0
    assert not apply_rewrite(rule(), held, target="m2").fired
    (name,) = held.functions["main"].inputs
    (found,) = Runtime(held, precision="float64")({name: x.numpy()}).values()
    with torch.no_grad():
        np.testing.assert_allclose(found, module.double()(x.double()).numpy(), atol=2e-3)


def test_a_tied_head_is_not_stored_twice(tmp_path):
    loaded = load_converted(Head(tied=True), torch.tensor([[1, 5]]), path=tmp_path / "m.mlpackage", names="x")
    found = find_matches(rule(max_bytes=1000), loaded, target="m1")
    assert [miss.reason.split("' is")[1] for miss in found.near_misses] == [
        " also used as a whole: its pieces would add 160.0 kB, above max_bytes=1000"]


def test_the_package_does_not_grow(tmp_path):
    """Its parts are views of the mapped bytes, and the whole is written no more."""
    head = torch.nn.Linear(64, 20000, bias=False)
    convert_model(head, torch.zeros(1, 64), names="x").save(str(tmp_path / "a.mlpackage"))
    package = ane.load(tmp_path / "a.mlpackage")
    (before,) = (op.val.val for _, op in iterate_ops(package.program) if op.op_type == "const" and
                 op.outputs[0].shape == (20000, 64))
    apply_rewrite(rule(), package.program, target="m1")
    parts = [op.val.val for _, op in iterate_ops(package.program) if op.op_type == "const" and op.outputs[0].rank == 2]
    assert len(parts) == 2 and all(np.shares_memory(before, part) for part in parts)
    ane.save(package, tmp_path / "b.mlpackage")
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).rglob("weight.bin")) for name in
             ("a.mlpackage", "b.mlpackage")]
    assert sizes[1] <= sizes[0] + 256


def test_a_conv_at_single_places():
    weight = np.random.default_rng(0).uniform(-1, 1, (70000, 2, 1, 1)).astype(np.float16)
    held = build_program(lambda x: mb.conv(x=x, weight=weight, name="y"), x=(1, 2, 2, 2))
    assert apply_rewrite(rule(), held, target="m4").fired and kinds(held)["conv"] == 2
    x = np.random.default_rng(1).uniform(-1, 1, (1, 2, 2, 2)).astype(np.float32)
    true = torch.nn.functional.conv2d(*(torch.from_numpy(each.astype(np.float64)) for each in (x, weight)))
    np.testing.assert_allclose(Runtime(held, precision="float64")({"x": x})["y"], true.numpy(), atol=1e-12)


@pytest.mark.parametrize(("target", "wide", "fires"), [
    ("m1", 16385, True), ("m1", 16384, False), ("m4", 50257, False), ("m4", 65537, True), ("all", 50257, False),
    ("all", 151936, True)])
def test_only_where_every_chip_refuses_it(target, wide, fires):
    held = build_program(lambda x: mb.linear(x=x, weight=np.zeros((wide, 1), np.float16)), x=(1, 1))
    assert bool(find_matches(rule(), held, target=target).fired) == fires
    assert bool(find_matches(rule(always=True), held, target=target).fired) == (fires or target == "all")


def test_too_many_parts():
    held = build_program(lambda x: mb.linear(x=x, weight=np.zeros((70000, 1), np.float16)), x=(1, 1))
    found = find_matches(rule(max_parts=4), held)
    assert [miss.reason for miss in found.near_misses] == ["5 parts, above max_parts=4"]


@pytest.mark.parametrize("target", ["a19", "m5"])
def test_not_where_tiles_were_measured_to_be_slower(target):
    held = build_program(lambda x: mb.linear(x=x, weight=np.zeros((262144, 1), np.float16)), x=(1, 1))
    found = find_matches(rule(), held, target=target)
    assert [miss.reason for miss in found.near_misses] == [
        "tiles were measured to be slower on A19 Pro; choose another target, or always=true"]
    assert find_matches(rule(always=True), held, target=target).fired


def test_outputs_that_fit_are_left_whole_whatever_the_rows():
    """Tiles of the outputs stream as many weights: neither limits nor latency ask for them."""
    for wide, target in ((16384, "m2"), (65536, "m4")):
        held = build_program(lambda x: mb.linear(x=x, weight=np.broadcast_to(np.float16(1), (wide, 2048))),
                             x=(1024, 2048))
        assert not find_matches(rule(), held, target=target).fired
        traces = ane.rewrite(held, preset="full", target=target, verify=False).traces
        assert not any(trace.fired for trace in traces if trace.rule == NAME)


COMPRESSED = {
    "palette": lambda codes, random: mb.constexpr_lut_to_dense(
        indices=codes.astype(types.np_uint4_dtype), lut=random.uniform(-1, 1, (1, 1, 16, 1)).astype(np.float16)),
    "palette by outputs": lambda codes, random: mb.constexpr_lut_to_dense(
        indices=codes.astype(types.np_uint4_dtype),
        lut=random.uniform(-1, 1, (codes.shape[0] // 8, 1, 16, 1)).astype(np.float16)),
    "int8": lambda codes, random: mb.constexpr_blockwise_shift_scale(
        data=codes.astype(np.int8), scale=random.uniform(0, 1, (codes.shape[0], 1)).astype(np.float16)),
    "affine": lambda codes, random: mb.constexpr_affine_dequantize(
        quantized_data=codes.astype(np.int8), zero_point=np.int8(7), axis=0,
        scale=random.uniform(0, 1, codes.shape[0]).astype(np.float16)),
}


@pytest.mark.parametrize("form", COMPRESSED)
def test_a_compressed_head_is_cut_as_it_is_stored(form):
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (40008, 4))
    held = build_program(lambda x: mb.linear(x=x, weight=COMPRESSED[form](codes, random), bias=np.ones(
        40008, np.float16), name="y"), opset=ct.target.iOS18, x=(2, 4))
    x = random.uniform(-1, 1, (2, 4)).astype(np.float32)
    true = Runtime(held, precision="float64")({"x": x})["y"]
    assert apply_rewrite(rule(), held, target="m2").fired and kinds(held)["linear"] == 3
    assert sum(count for kind, count in kinds(held).items() if kind.startswith("constexpr_")) == 3
    np.testing.assert_array_equal(Runtime(held, precision="float64")({"x": x})["y"], true)


@pytest.mark.parametrize(("build", "reason"), [
    (lambda x: mb.linear(x=mb.cast(x=x, dtype="fp32"), weight=np.zeros((70000, 1), np.float32)),
     "computed in fp32, which is unsupported on the ANE"),
    (lambda x: mb.linear(x=x, weight=mb.constexpr_sparse_to_dense(
        nonzero_data=np.ones(35000, np.float16),
        mask=(np.arange(70000) % 2).reshape(-1, 1).astype(types.np_uint1_dtype))),
     "the weight is made by constexpr_sparse_to_dense, which cannot be split"),
])
def test_left_alone(build, reason):
    found = find_matches(rule(), build_program(build, opset=ct.target.iOS18, x=(1, 1)))
    assert not found.fired and [miss.reason for miss in found.near_misses] == [reason]
