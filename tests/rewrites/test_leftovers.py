"""What a rewrite adds and nothing needs is gone when it is done: a package has no clean-up behind it."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.ir.query import is_used, iterate_ops
from mil_ane_passes.passes.contract import BlockRewrite, Hit, Rewrite
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds

pytest.importorskip("torch")
STEPS = 6


def scanned(kind="fp32", narrow="fp16"):
    """A recurrence as JAX's scan arrives: the state is kept wider than it is computed, and a last value is not read."""
    held = np.dtype({"fp16": np.float16, "fp32": np.float32}[narrow])

    def body(x):
        x = mb.cast(x=x, dtype=narrow)
        start = mb.cast(x=mb.mul(x=x, y=np.zeros(1, held)), dtype=kind)

        def going(i, state, seen):
            return mb.less(x=i, y=np.int32(STEPS))

        def step(i, state, seen):
            now = mb.cast(x=state, dtype=narrow)
            further = mb.tanh(x=mb.add(x=mb.linear(x=now, weight=make_weight(4, 4, dtype=held.type)), y=x))
            return mb.add(x=i, y=np.int32(1)), mb.cast(x=further, dtype=kind), mb.cast(x=mb.exp(x=now), dtype=kind)

        _, state, _ = mb.while_loop(_cond=going, _body=step, loop_vars=(np.int32(0), start, start))
        return mb.cast(x=state, dtype="fp32", name="y")

    return build_program(body, dtype=types.fp32, x=(2, 4))


def unread(prog):
    return [op.op_type for _, op in iterate_ops(prog) if op.op_type != "const" and not any(map(is_used, op.outputs))]


def computing(prog):
    return {kind: count for kind, count in kinds(prog).items() if kind != "const"}


def test_a_loop_written_out_has_no_casts_between_its_steps_and_nothing_unread():
    built = scanned()
    x = {"x": np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)}
    before = {precision: Runtime(built, precision=precision)(x).values() for precision in ("float16", "float64")}
    assert len(apply_rewrite(find_rewrite("unroll_while_loop")(), built).fired) == 1
    for precision, values in before.items():
        for old, new in zip(values, Runtime(built, precision=precision)(x).values(), strict=True):
            np.testing.assert_array_equal(old, new)
    assert unread(built) == [] and "exp" not in kinds(built)
    assert kinds(built)["cast"] <= 4
    built.validate()


def test_a_narrow_state_keeps_its_rounding():
    """A cast to fewer bits and back is no way to leave out both."""
    built = scanned(kind="fp16", narrow="fp32")
    casts = kinds(built)["cast"]
    apply_rewrite(find_rewrite("unroll_while_loop")(), built)
    assert kinds(built)["cast"] > casts


def looked_up():
    """Rows of a table by the places of the largest values, as coremltools prepares indices: int16, int32, uint16."""
    def body(x):
        narrow = mb.cast(x=mb.topk(x=x, k=2, axis=1, output_indices_dtype="int32")[1], dtype="int16")
        places = mb.cast(x=mb.reverse(x=narrow, axes=[1]), dtype="int32")
        wrapped = mb.select(cond=mb.greater_equal(x=places, y=np.int32(0)), a=places,
                            b=mb.add(x=places, y=np.int32(8)))
        rows = mb.gather(x=make_weight(8, 3, dtype=np.float32), indices=mb.cast(x=wrapped, dtype="uint16"), axis=0)
        return mb.relu(x=rows, name="y")

    return build_program(body, dtype=types.fp32, opset=ct.target.iOS17, x=(4, 8))


def test_a_chain_of_casts_that_a_rewrite_leaves_is_one_cast():
    built = looked_up()
    x = {"x": np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)}
    before = Runtime(built)(x)["y"]
    apply_rewrite(find_rewrite("plain_indices").configured(), built)
    cast = built.functions["main"].find_ops(op_type="gather")[0].indices.op
    assert cast.x.dtype == types.int16 and cast.outputs[0].dtype == types.uint16
    np.testing.assert_array_equal(Runtime(built)(x)["y"], before)


@pytest.mark.parametrize("kind", [types.int8, types.uint8, types.int16, types.uint16])
@pytest.mark.parametrize("result", ["int8", "uint8", "int16", "uint16"])
def test_one_cast_for_two_gives_the_same_numbers(kind, result):
    """All of them, those that the last type does not hold included."""
    numbers = np.iinfo(types.nptype_from_builtin(kind))
    values = np.arange(numbers.min, numbers.max + 1).astype(np.int32)

    def body(i):
        narrow = mb.cast(x=i, dtype=types.builtin_to_string(kind))
        return mb.cast(x=mb.cast(x=mb.cast(x=narrow, dtype="int32"), dtype=result), dtype="int32", name="y")

    built = build_program(body, dtype=types.int32, opset=ct.target.iOS17, i=values.shape)
    before = Runtime(built)({"i": values})["y"]
    assert apply_rewrite(find_rewrite("plain_indices").configured(), built).fired and kinds(built)["cast"] < 4
    np.testing.assert_array_equal(Runtime(built)({"i": values})["y"], before)


@pytest.mark.parametrize("source", [scanned, looked_up])
def test_what_the_pipeline_reaches_a_package_reaches(source, tmp_path):
    def made(pipeline, name):
        path = tmp_path / f"{name}.mlpackage"
        ct.convert(source(), convert_to="mlprogram", skip_model_load=True, pass_pipeline=pipeline,
                   minimum_deployment_target=ct.target.iOS17).save(str(path))
        return path

    path = made(ct.PassPipeline.DEFAULT, "plain")
    inside = ane.load(made(ane.pipeline(preset="full", max_growth=None), "inside")).program
    report = ane.rewrite(path, tmp_path / "out.mlpackage", preset="full", max_growth=None)
    assert report.status == "written" and computing(report.package.program) == computing(inside)


class Wasteful(Rewrite):
    name, code, slug, roots = "wasteful", "X3", "x", ("relu",)

    def match(self, op):
        return Hit(op)

    def rewrite(self, hit, mb):
        mb.exp(x=mb.abs(x=hit.op.x))
        return mb.sqrt(x=hit.op.x)


class WastefulInBlocks(BlockRewrite):
    name, code, slug = "wasteful_in_blocks", "X4", "x"

    def match_block(self, block):
        yield from (Hit(op) for op in block.operations if op.op_type == "relu")

    def rewrite_block(self, hit, mb):
        mb.exp(x=mb.abs(x=hit.op.x))
        return {hit.op.outputs[0]: mb.sqrt(x=hit.op.x)}


@pytest.mark.parametrize("rule", [Wasteful, WastefulInBlocks])
def test_what_was_unread_before_stays(rule):
    def body(x):
        mb.sin(x=x)
        return mb.relu(x=x, name="y")

    built = build_program(body, x=(2, 4))
    apply_rewrite(rule(), built)
    assert unread(built) == ["sin"] and sorted(kinds(built)) == ["sin", "sqrt"]
