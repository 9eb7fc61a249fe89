"""ANE620: products that stream their weights again for each tile of rows, in parts of their inner dimension."""

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
from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ir.query import is_compressed, iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "split_linear_inner"
rule = partial(configure_rewrite, NAME)


def placeholder(*shape):
    return np.broadcast_to(np.float16(0.5), shape)


def linear(rows, inner, outer, **more):
    return build_program(lambda x: mb.linear(x=x, weight=placeholder(outer, inner), name="y", **more), x=(rows, inner))


def reason_of(program, target="m2", **options):
    found = find_matches(rule(**options), program, target=target)
    assert not found.fired
    return [miss.reason for miss in found.near_misses]


FORMATS = ("plain", "palette", "palette 2", "grouped palette", "affine", "affine inner", "int8",
           "int4 blocks", "scaled palette")


def store(shape, form, axis, random):
    """Store a weight of `shape`, summed over `axis`, in a format."""
    other = 1 - axis
    by_inner, by_outer = ([1] * len(shape) for _ in range(2))
    by_inner[axis], by_outer[other] = 4, shape[other]

    def draw(*size):
        return random.uniform(-1, 1, size).astype(np.float16)

    def indices(bits, kind):
        return random.integers(0, 2 ** bits, shape).astype(kind)

    if form == "plain":
        return draw(*shape)
    if form == "affine":
        return mb.constexpr_affine_dequantize(quantized_data=indices(7, np.int8), zero_point=np.int8(3), axis=other,
                                              scale=draw(shape[other]))
    if form == "affine inner":
        return mb.constexpr_affine_dequantize(quantized_data=indices(7, np.int8), axis=axis, scale=draw(shape[axis]),
                                              zero_point=random.integers(0, 5, shape[axis]).astype(np.int8))
    if form == "int8":
        return mb.constexpr_blockwise_shift_scale(data=indices(7, np.int8), scale=draw(*by_outer))
    if form == "int4 blocks":
        return mb.constexpr_blockwise_shift_scale(data=indices(3, types.np_int4_dtype), scale=draw(*by_inner),
                                                  offset=random.integers(0, 5, by_inner).astype(types.np_int4_dtype))
    if form == "palette 2":
        return mb.constexpr_lut_to_dense(indices=indices(2, types.np_uint2_dtype), lut=draw(*[1] * len(shape), 4, 1))
    tables = by_inner if form == "grouped palette" else [1] * len(shape)
    built = mb.constexpr_lut_to_dense(indices=indices(4, types.np_uint4_dtype), lut=draw(*tables, 16, 1))
    if form == "scaled palette":
        return mb.constexpr_blockwise_shift_scale(data=built, scale=draw(*by_outer))
    return built


def build_layer(kind, form, inner, outer, bias, seed):
    random = np.random.default_rng(seed)

    def body(x):
        if kind == "conv":
            return mb.conv(x=x, weight=store((outer, inner, 1, 1), form, 1, random), name="y",
                           **({"bias": make_weight(outer)} if bias else {}))
        if kind == "linear":
            return mb.linear(x=x, weight=store((outer, inner), form, 1, random), name="y",
                             **({"bias": make_weight(outer)} if bias else {}))
        turned = kind == "turned matmul"
        shape = (outer, inner) if turned else (inner, outer)
        return mb.matmul(x=x, y=store(shape, form, 1 if turned else 0, random), transpose_y=turned, name="y")

    shape = (1, inner, 2, 3) if kind == "conv" else (3, inner)
    return build_program(body, opset=ct.target.iOS18, x=shape)


def stored_bits(program):
    """The bits of all stored data; tables and scales that parts share count once."""
    held = {id(op.outputs[0].val if op.val.val is None else op.val.val): op.outputs[0]
            for _, op in iterate_ops(program) if op.op_type == "const" and op.outputs[0].rank > 1}
    return sum(int(np.prod(var.shape)) * (var.dtype.get_bitwidth() if hasattr(var.dtype, "get_bitwidth") else 8)
               for var in held.values())


@pytest.mark.law
@given(st.sampled_from(["linear", "conv", "matmul", "turned matmul"]), st.sampled_from(FORMATS), st.integers(3, 9),
       st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_parts_add_up_in_every_format(kind, form, blocks, outer, bias, seed):
    """Stored the way the weight was: nothing is unpacked, and no data is stored twice."""
    held = build_layer(kind, form, 4 * blocks, outer, bias, seed)
    x = np.random.default_rng(seed).uniform(-1, 1, held.functions["main"].inputs["x"].shape).astype(np.float32)
    true = Runtime(held, precision="float64")({"x": x})["y"]
    before, packed = stored_bits(held), [op.op_type for _, op in iterate_ops(held)
                                         if op.op_type.startswith("constexpr_")]
    options = {"inner": 2 * blocks} if form in ("int4 blocks", "grouped palette") else {"inner": 4}
    assert apply_rewrite(rule(always=True, **options), held).fired
    held.validate()
    np.testing.assert_allclose(Runtime(held, precision="float64")({"x": x})["y"], true, atol=1e-12)
    after = [op.op_type for _, op in iterate_ops(held) if op.op_type.startswith("constexpr_")]
    assert set(after) == set(packed) and stored_bits(held) <= before
    product = next(op for _, op in iterate_ops(held) if op.op_type in ("linear", "conv", "matmul"))
    assert is_compressed(product.inputs["y" if "matmul" in kind else "weight"]) == (form != "plain")


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("outer", [3, 8])
def test_packed_indices_of_the_older_form(bits, outer):
    """Before iOS18 indices are packed without gaps, so a cut begins in the middle of a byte."""
    random, inner = np.random.default_rng(bits), 10
    values = random.integers(0, 2 ** bits, outer * inner)
    stream = (values[:, None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(-1).astype(np.uint8), bitorder="little")
    lut = random.uniform(-1, 1, 2 ** bits).astype(np.float16)

    def body(x):
        weight = mb.constexpr_lut_to_dense(indices=packed, lut=lut, shape=np.array([outer, inner], np.uint32))
        return mb.linear(x=x, weight=weight, name="y")

    held = build_program(body, opset=ct.target.iOS16, x=(2, inner))
    x = random.uniform(-1, 1, (2, inner)).astype(np.float32)
    true = x.astype(np.float64) @ lut[values].astype(np.float64).reshape(outer, inner).T
    assert apply_rewrite(rule(always=True, inner=4), held).fired and kinds(held)["constexpr_lut_to_dense"] == 3
    np.testing.assert_allclose(Runtime(held, precision="float64")({"x": x})["y"], true, atol=1e-12)


BLOCKS = [
    ("Llama-3.2-1B, down, 512 tokens", 512, 8192, 2048, 4),
    ("Llama-3.2-1B, down, 1 token", 1, 8192, 2048, 0),
    ("Llama-3.2-1B, up, 512 tokens", 512, 2048, 8192, 0),
    ("Whisper small, second of the MLP", 1500, 3072, 768, 2),
    ("BERT large, second of the MLP", 512, 4096, 1024, 2),
    ("ViT-B/16, second of the MLP", 197, 3072, 768, 0),
    ("UNet, second of the MLP of 1280 channels, 16 x 16", 256, 5120, 1280, 3),
    ("UNet, second of the MLP of 1280 channels, 8 x 8", 64, 5120, 1280, 0),
]


def time_of_ops(program):
    return sum(op.latency_us for op in estimate_latency(program, target="m2").ops)


@pytest.mark.parametrize("name, rows, inner, outer, parts", BLOCKS, ids=[block[0] for block in BLOCKS])
def test_real_layers(name, rows, inner, outer, parts):
    """Parts where weights stream several times, none where they stream once; faster by the latency of an M2."""
    held = linear(rows, inner, outer)
    before = time_of_ops(held)
    assert bool(apply_rewrite(rule(), held, target="m2").fired) == bool(parts)
    assert kinds(held)["linear"] == max(1, parts) and kinds(held)["add"] == max(0, parts - 1)
    if parts:
        assert time_of_ops(held) < 0.95 * before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["linear", "conv"])
@pytest.mark.parametrize("rows, inner, outer", [(512, 4096, 1024), (1500, 3072, 768)], ids=["BERT large", "Whisper"])
def test_mlp_of_a_transformer_is_torchs(layout, rows, inner, outer):
    """The second layer of an MLP, with the activation before it and the residual after it."""
    random = np.random.default_rng(0)
    weight = (random.standard_normal((outer, inner)) / np.sqrt(inner)).astype(np.float16)
    bias = random.standard_normal(outer).astype(np.float16)
    last = layout == "conv"

    def body(x, z):
        hidden = mb.gelu(x=x, mode="TANH_APPROXIMATION")
        if last:
            made = mb.conv(x=hidden, weight=weight.reshape(outer, inner, 1, 1), bias=bias)
        else:
            made = mb.linear(x=hidden, weight=weight, bias=bias)
        return mb.add(x=mb.relu(x=made), y=z, name="y")

    shapes = ((1, inner, 1, rows), (1, outer, 1, rows)) if last else ((1, rows, inner), (1, rows, outer))
    held = build_program(body, x=shapes[0], z=shapes[1])
    assert apply_rewrite(rule(), held, target="m2").fired
    x, z = (random.standard_normal(shape).astype(np.float16).astype(np.float32) for shape in shapes)
    tensors = [torch.from_numpy(each.astype(np.float64)) for each in (x, z, weight, bias)]
    rows_first = [each.reshape(each.shape[1], -1).T if last else each for each in tensors[:2]]
    hidden = torch.nn.functional.gelu(rows_first[0], approximate="tanh")
    true = torch.relu(hidden @ tensors[2].T + tensors[3]) + rows_first[1]
    true = true.T.reshape(shapes[1]).numpy() if last else true.numpy()
    for precision, bound in (("float64", 1e-9), ("float16", 2e-2)):
        np.testing.assert_allclose(Runtime(held, precision=precision)({"x": x, "z": z})["y"], true, atol=bound)


def test_the_bias_is_added_once():
    held = build_layer("conv", "plain", 12, 4, True, 0)
    apply_rewrite(rule(always=True, inner=4), held)
    biases = [op.bias is not None for _, op in iterate_ops(held) if op.op_type == "conv"]
    assert biases == [True, False, False]


@pytest.mark.parametrize("target", ["m1", "m3", "m4", "m5", "m6", "a17", "a19", "all"])
def test_only_for_the_chip_on_which_it_was_measured_to_be_faster(target):
    assert reason_of(linear(1024, 4096, 4096), target) == [
        "parts were measured to be faster on M2 only, and slower on M5 at small sizes; choose that target, or "
        "always=true"]
    assert apply_rewrite(rule(), linear(1024, 4096, 4096), target="m2").fired


def test_what_was_measured_to_be_slower_is_left_alone():
    """K 512 in 16 parts (M5 Pro): below the size of a tile, on any target, at any number of rows."""
    for target in ("m2", "m5", "all"):
        assert not find_matches(rule(), linear(4096, 512, 4096), target=target).fired
        assert not find_matches(rule(always=True), linear(4096, 512, 4096), target=target).fired


def run_guarded(program, **options):
    return ane.rewrite(program, preset="full", target="m2", verify=False, options={NAME: options} if options else None)


def test_the_guard_keeps_it_where_weights_stream_again_and_reverts_it_elsewhere():
    kept = run_guarded(linear(1024, 4096, 4096))
    assert kept.changed and not kept.reverted
    before, after = kept.to_dict()["predicted"].values()
    assert after["est_ms"] > before["est_ms"] and after["latency_us"] < before["latency_us"]
    short = run_guarded(linear(128, 4096, 4096), always=True)
    assert [trace.rule for trace in short.reverted] == [NAME] and not short.changed


@pytest.mark.parametrize("build, reason", [
    (lambda: build_program(lambda x: mb.linear(x=x, weight=np.ones((4, 8), np.float32)), dtype=types.fp32, x=(3, 8)),
     "computed in fp32, which is unsupported on the ANE"),
    (lambda: build_layer("linear", "int4 blocks", 28, 4, False, 0),
     "blocks of 7 channels of the compressed weight are not aligned with parts"),
    (lambda: build_program(lambda x: mb.linear(x=x, weight=mb.constexpr_lut_to_dense(
        indices=np.zeros((4, 4), types.np_uint4_dtype), lut=np.ones((1, 1, 16, 2), np.float16), vector_axis=1)),
        opset=ct.target.iOS18, x=(3, 8)), "the weight has a table of vectors"),
])
def test_left_alone(build, reason):
    assert reason_of(build(), always=True, inner=4) == [reason]


def two_readers(second):
    def body(x, z):
        weight = mb.const(val=make_weight(4, 8), name="w")
        return mb.linear(x=x, weight=weight), second(z, weight)

    return build_program(body, x=(3, 8), z=(5, 8))


def test_a_weight_of_several_layers():
    """Cut once for all of them, and left whole where one of them needs it whole."""
    held = two_readers(lambda z, weight: mb.linear(x=z, weight=weight))
    assert len(apply_rewrite(rule(always=True, inner=4, max_bytes=0), held).fired) == 2
    assert sum(op.val.val.nbytes for _, op in iterate_ops(held)
               if op.op_type == "const" and op.outputs[0].rank == 2) == 64
    held = two_readers(lambda z, weight: mb.mul(x=mb.reduce_sum(x=z, axes=[0, 1]), y=weight))
    assert reason_of(held, always=True, inner=4, max_bytes=0) == [
        "the weight 'w' is also used as a whole: its pieces would add 64 B, above max_bytes=0"]
    assert find_matches(rule(always=True, inner=4), held).fired


def test_a_layer_with_few_rows_keeps_the_weight_of_one_with_many_whole():
    def body(x, z):
        weight = mb.const(val=placeholder(4096, 4096), name="w")
        return mb.linear(x=x, weight=weight), mb.linear(x=z, weight=weight)

    notes = reason_of(build_program(body, x=(1024, 4096), z=(1, 4096)), max_bytes=0)
    assert "the weight 'w' is also used as a whole: its pieces would add 33.6 MB, above max_bytes=0" in notes


def test_a_compressed_weight_that_something_else_reads():
    def body(x):
        weight = mb.constexpr_lut_to_dense(indices=np.zeros((4, 8), types.np_uint4_dtype),
                                           lut=make_weight(1, 1, 16, 1), name="w")
        return mb.linear(x=x, weight=weight), mb.reduce_sum(x=weight, axes=[0])

    assert reason_of(build_program(body, opset=ct.target.iOS18, x=(3, 8)), always=True, inner=4) == [
        "the compressed weight is also used as a whole: its parts would be stored in addition"]


def test_no_weight_is_read():
    """Parts are views: a placeholder of 2 GB has one element."""
    held = linear(1024, 32768, 32768)
    assert apply_rewrite(rule(), held, target="m2").fired
    parts = [op.val.val for _, op in iterate_ops(held) if op.op_type == "const" and op.outputs[0].shape[:1] == (32768,)
             and op.outputs[0].rank == 2]
    assert len(parts) == 16 and all(part.strides == (0, 0) for part in parts)


@pytest.mark.parametrize("inner", [0, -4])
def test_parts_of_no_inputs_are_refused(inner):
    assert reason_of(linear(1024, 64, 8), inner=inner, always=True) == [f"parts of {inner} inputs; expected at least 1"]
