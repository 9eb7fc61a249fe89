"""Corrected passes of coremltools: each is compared with the program before it on the reference runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.corrected_passes import CorrectedName, correct_names, iterate_corrections
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime

RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return RANDOM.normal(size=shape).astype(np.float32)


FIXED = {"fuse_stack_split": (9, 1)}
"Passes that coremltools has corrected itself, and since when."
SQUARE, CHANNELS, NUMBERS = draw(4, 4), draw(8, 1, 1), draw(8)


def grouped(x: Any, bias: Any = None) -> Any:
    """A transposed convolution in two groups of 2 inputs and 4 outputs each."""
    return mb.conv_transpose(x=x, weight=draw(4, 4, 2, 2), groups=2, **({} if bias is None else {"bias": bias}))


def convolution(x: Any) -> Any:
    return mb.conv(x=x, weight=draw(8, 4, 2, 2))


def normalized(x: Any, beta: Any, gamma: Any, rsqrt: float = 1e-12) -> Any:
    centered = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True))
    variance = mb.reduce_mean(x=mb.mul(x=centered, y=centered), axes=[1], keep_dims=True)
    scaled = mb.mul(x=centered, y=mb.rsqrt(x=mb.add(x=variance, y=np.float32(0.01)), epsilon=np.float32(rsqrt)))
    return mb.mul(x=mb.add(x=scaled, y=beta), y=gamma)


def split_stack(x: Any) -> Any:
    first, second = mb.split(x=mb.stack(values=[x, mb.relu(x=x)], axis=1), num_splits=2, axis=1)
    return mb.sub(x=first, y=second)


def padded_twice(x: Any) -> Any:
    inner = mb.pad(x=x, pad=[0, 0, 0, 0, 1, 1, 0, 0], mode="constant")
    return mb.pad(x=inner, pad=[0, 0, 0, 0, 0, 0, 1, 1], mode="constant"), inner


IMAGE = (2, 4, 3, 3)
KEPT: dict[str, tuple[str, tuple[int, ...], Callable[[Any], Any]]] = {
    "a float cast to an integer and a bool": ("cast_optimization", (2, 3), lambda x: mb.cast(x=mb.cast(
        x=mb.cast(x=x, dtype="int32"), dtype="bool"), dtype="fp32")),
    "W @ x + b": ("fuse_matmul_weight_bias", (4, 4), lambda x: mb.add(x=mb.matmul(x=SQUARE, y=x), y=NUMBERS[:4])),
    "W @ x - b": ("fuse_matmul_weight_bias", (4, 4), lambda x: mb.sub(x=mb.matmul(x=SQUARE, y=x), y=NUMBERS[:4])),
    "b - x @ W": ("fuse_matmul_weight_bias", (4, 4), lambda x: mb.sub(x=NUMBERS[:4], y=mb.matmul(x=x, y=SQUARE))),
    "W @ x + b of another size": (
        "fuse_matmul_weight_bias", (4, 4), lambda x: mb.add(x=mb.matmul(x=draw(8, 4), y=x), y=NUMBERS[:4])),
    "grouped plus a number": ("fuse_conv_bias", IMAGE, lambda x: mb.add(x=grouped(x), y=np.float32(2))),
    "a short constant after a transpose": ("fuse_conv_bias", IMAGE, lambda x: mb.add(
        x=mb.transpose(x=convolution(x), perm=[1, 0, 2, 3]), y=draw(2, 2, 2))),
    "grouped times channels": ("fuse_conv_scale", IMAGE, lambda x: mb.mul(x=grouped(x), y=CHANNELS)),
    "one channel plus channels": (
        "fuse_conv_bias", IMAGE, lambda x: mb.add(x=mb.conv(x=x, weight=draw(1, 4, 2, 2)), y=CHANNELS)),
    "one channel with a bias minus channels": ("fuse_conv_bias", IMAGE, lambda x: mb.sub(
        x=mb.conv_transpose(x=x, weight=draw(4, 1, 2, 2), bias=NUMBERS[:1]), y=CHANNELS)),
    "one channel times and plus channels": (
        "fuse_elementwise_to_batchnorm", (2, 1, 3, 3), lambda x: mb.add(x=mb.mul(x=x, y=CHANNELS), y=CHANNELS[::-1])),
    "channels times channels and plus one": (
        "fuse_elementwise_to_batchnorm", (2, 8, 3, 3), lambda x: mb.add(x=mb.mul(x=x, y=CHANNELS), y=draw(1, 1, 1))),
    "volumes times channels": ("fuse_conv_scale", (1, 4, 3, 3, 3), lambda x: mb.mul(
        x=mb.conv_transpose(x=x, weight=draw(4, 8, 2, 2, 2)), y=draw(8, 1, 1, 1))),
    "a number by a convolution": ("fuse_conv_scale", IMAGE, lambda x: mb.real_div(x=np.float32(2), y=convolution(x))),
    "grouped normalized": ("fuse_conv_batchnorm", IMAGE, lambda x: mb.batch_norm(
        x=grouped(x), mean=NUMBERS, variance=np.abs(NUMBERS) + 1, gamma=NUMBERS, beta=NUMBERS)),
    "normalized without gamma": ("fuse_conv_batchnorm", IMAGE, lambda x: mb.batch_norm(
        x=convolution(x), mean=NUMBERS, variance=np.abs(NUMBERS) + 1)),
    "stack and split": ("fuse_stack_split", (2, 3), split_stack),
    "an unused part": ("fuse_stack_split", (2, 3), lambda x: mb.squeeze(x=mb.split(
        x=mb.stack(values=[x, mb.relu(x=x)], axis=1), num_splits=2, axis=1)[0], axes=[1])),
    "a padding as output": ("merge_consecutive_paddings", IMAGE, padded_twice),
    "a padding of two axes that moves": ("fuse_pad_conv", IMAGE, lambda x: mb.conv(x=mb.transpose(
        x=mb.pad(x=x, pad=[0, 1, 1, 0], mode="constant"), perm=[2, 3, 1, 0]), weight=draw(2, 4, 1, 1))),
    "infinity by one condition": (
        "select_optimization", (2, 3), lambda x: mb.select(cond=np.bool_(False), a=x, b=np.float32(-np.inf))),
    "beta of another axis": ("fuse_layernorm_or_instancenorm", (2, 4, 3, 4),
                             lambda x: normalized(x, draw(1, 1, 1, 4), draw(4, 1, 1))),
    "beta and gamma of rank 2": (
        "fuse_layernorm_or_instancenorm", (3, 6), lambda x: normalized(x, draw(6), draw(6))),
    "gamma of another size": ("fuse_layernorm_or_instancenorm", (3, 6), lambda x: normalized(x, draw(6), draw(3, 1))),
    "an rsqrt with an epsilon": ("fuse_layernorm_or_instancenorm", IMAGE,
                                 lambda x: normalized(x, draw(4, 1, 1), draw(4, 1, 1), 0.5)),
}
FUSED: dict[str, tuple[str, tuple[int, ...], Callable[[Any], Any], str]] = {
    "a cast to its own type": (
        "cast_optimization", (2, 3), lambda x: mb.relu(x=mb.cast(x=x, dtype="fp32")), "cast"),
    "x @ W + b": (
        "fuse_matmul_weight_bias", (4, 4), lambda x: mb.add(x=mb.matmul(x=x, y=SQUARE), y=NUMBERS[:4]), "add"),
    "x @ W - b": (
        "fuse_matmul_weight_bias", (4, 4), lambda x: mb.sub(x=mb.matmul(x=x, y=SQUARE), y=NUMBERS[:4]), "sub"),
    "one output plus a number": (
        "fuse_linear_bias", (2, 4), lambda x: mb.add(x=mb.linear(x=x, weight=SQUARE[:1]), y=np.float32(2)), "add"),
    "a linear plus a vector": (
        "fuse_linear_bias", (2, 4), lambda x: mb.add(x=mb.linear(x=x, weight=SQUARE), y=NUMBERS[:4]), "add"),
    "a convolution minus channels": ("fuse_conv_bias", IMAGE, lambda x: mb.sub(x=convolution(x), y=CHANNELS), "sub"),
    "grouped plus a number": (
        "fuse_conv_bias", IMAGE, lambda x: mb.add(x=grouped(x, NUMBERS), y=np.float32(2)), "add"),
    "channels after a transpose": ("fuse_conv_bias", IMAGE, lambda x: mb.add(
        x=mb.transpose(x=convolution(x), perm=[0, 2, 3, 1]), y=draw(1, 1, 1, 8)), "add"),
    "grouped times a number": ("fuse_conv_scale", IMAGE, lambda x: mb.mul(x=grouped(x), y=np.float32(2)), "mul"),
    "a convolution by channels": (
        "fuse_conv_scale", IMAGE, lambda x: mb.real_div(x=convolution(x), y=CHANNELS), "real_div"),
    "a convolution normalized": ("fuse_conv_batchnorm", IMAGE, lambda x: mb.batch_norm(
        x=convolution(x), mean=NUMBERS, variance=np.abs(NUMBERS) + 1, gamma=NUMBERS, beta=NUMBERS), "batch_norm"),
    "channels times and plus channels": (
        "fuse_elementwise_to_batchnorm", (2, 8, 3, 3),
        lambda x: mb.add(x=mb.mul(x=x, y=CHANNELS), y=CHANNELS[::-1]), "mul"),
    "two paddings": ("merge_consecutive_paddings", IMAGE, lambda x: padded_twice(x)[0], "pad"),
    "a normalization of channels": ("fuse_layernorm_or_instancenorm", IMAGE,
                                    lambda x: normalized(x, draw(4, 1, 1), draw(4, 1, 1)), "rsqrt"),
}


def run(program: Program, shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    feeds = {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}
    found = Runtime(program)(feeds)
    return [np.asarray(found[var.name]) for var in program.functions["main"].outputs]


def list_kinds(program: Program) -> list[str]:
    return [op.op_type for _, op in iterate_ops(program) if op.op_type != "const"]


def check(name: str, shape: tuple[int, ...], build: Callable[[Any], Any]) -> Program:
    """Run the corrected pass on a program and assert that it computes the same."""
    program = build_program(build, dtype=types.fp32, x=shape)
    expected = run(program, shape)
    ane.pipeline()
    PASS_REGISTRY[correct_names([f"common::{name}"])[0]](program)
    for one, other in zip(run(program, shape), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    return program


@pytest.mark.parametrize("case", KEPT)
def test_what_coremltools_gets_wrong_is_kept(case: str) -> None:
    name, shape, build = KEPT[case]
    before = list_kinds(build_program(build, dtype=types.fp32, x=shape))
    assert list_kinds(check(name, shape, build)) == before


@pytest.mark.parametrize("case", KEPT)
def test_coremltools_own_pass_gets_it_wrong(case: str) -> None:
    """Without this, a correction that nothing needs any more would stay."""
    name, shape, build = KEPT[case]
    if name in FIXED and tuple(map(int, ct.__version__.split(".")[:2])) >= FIXED[name]:
        pytest.skip(f"coremltools {ct.__version__} has it right")
    program = build_program(build, dtype=types.fp32, x=shape)
    expected = run(program, shape)
    try:
        PASS_REGISTRY[f"common::{name}"](program)
        PASS_REGISTRY["common::dead_code_elimination"](program)
        found = run(program, shape)
    except (AttributeError, IndexError, ValueError, ane.InputError):
        return
    assert not all(one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-3)
                   for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", FUSED)
def test_what_coremltools_gets_right_is_fused(case: str) -> None:
    name, shape, build, kind = FUSED[case]
    before = list_kinds(build_program(build, dtype=types.fp32, x=shape))
    assert list_kinds(check(name, shape, build)).count(kind) < before.count(kind)


@pytest.mark.parametrize("build", [
    lambda x: mb.add(x=mb.linear(x=x, weight=SQUARE), y=draw(1, 1, 4)),
    lambda x: mb.sub(x=draw(1, 1, 1, 8, 1, 1), y=convolution(x)),
    lambda x: mb.add(x=mb.transpose(x=convolution(x), perm=[0, 2, 3, 1]), y=draw(1, 1, 1, 1, 8))])
def test_a_constant_of_higher_rank_keeps_the_rank_of_the_result(build) -> None:
    shape = (2, 4) if "linear" in build.__code__.co_names else IMAGE
    for name in ("fuse_linear_bias", "fuse_conv_bias"):
        assert "expand_dims" in list_kinds(check(name, shape, build)) or name == (
            "fuse_conv_bias" if shape == (2, 4) else "fuse_linear_bias")


def test_a_subtracted_constant_keeps_its_values() -> None:
    constant = draw(8, 1, 1)
    values = constant.copy()

    def build(x: Any) -> Any:
        shared = mb.const(val=constant)
        return (mb.sub(x=convolution(x), y=shared), mb.sub(x=convolution(x), y=shared),
                mb.mul(x=shared, y=mb.reduce_sum(x=x)))

    check("fuse_conv_bias", IMAGE, build)
    np.testing.assert_array_equal(constant, values)


def test_each_correction_has_a_case() -> None:
    corrected = {name for name, _, _ in iterate_corrections()}
    assert corrected == {f"common::{name}" for name, *_ in (*KEPT.values(), *FUSED.values())}
    assert corrected <= set(ct.PassPipeline.DEFAULT.passes)
    assert all(function.__doc__ for _, _, function in iterate_corrections())


def test_only_our_pipelines_run_corrected_passes() -> None:
    base = ct.PassPipeline.DEFAULT
    ours = ane.pipeline(base)
    assert base.passes == ct.PassPipeline.DEFAULT.passes == ours.passes[:len(base.passes)]
    marked = {str(name) for name in ours.passes if isinstance(name, CorrectedName)}
    assert marked == {name for name, _, _ in iterate_corrections()}
    assert not any(isinstance(name, CorrectedName) for name in base.passes)
    for name in marked:
        host = type(PASS_REGISTRY[name])
        corrected = type(PASS_REGISTRY[correct_names([name])[0]])
        assert host.__module__.startswith("coremltools.") and corrected is not host and issubclass(corrected, host)


def test_a_pipeline_is_edited_by_the_usual_names() -> None:
    ours = copy.deepcopy(ane.pipeline())
    assert any(isinstance(name, CorrectedName) for name in ours.passes)
    ours.remove_passes({"common::fuse_conv_bias"})
    assert "common::fuse_conv_bias" not in ours.passes and "common::fuse_conv_scale" in ours.passes
