"""Rules that the sources disagree on, and packages that say more than a program."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from coremltools.converters.mil.mil import Builder, types

import mil_ane_passes as ane
from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import Hit
from mil_ane_passes.passes.engine import iterate_hits_and_misses
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules

from .helpers import converted, fired

pytestmark = pytest.mark.filterwarnings("ignore")


def said(name, built, target="all", package=None):
    rules = [get_all_rules()[name]()]
    return [item.answer for item in predict_plan(built, rules, target=target, package=package)[1]
            if isinstance(item.answer, Hit)]


SHAPES = {
    "enumerated": (ct.EnumeratedShapes([(1, 4, 8), (1, 6, 8)]), 1),
    "ranged": (ct.Shape((1, ct.RangeDim(2, 8, default=4), 8)), 0),
    "fixed": ((1, 4, 8), 0),
}


@pytest.mark.parametrize(("shape", "count"), SHAPES.values(), ids=SHAPES)
def test_layer_norm_is_reported_where_the_package_lists_shapes(shape, count, tmp_path):
    traced = torch.jit.trace(torch.nn.LayerNorm(8).eval(), torch.zeros(1, 4, 8))
    model = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=shape)], skip_model_load=True)
    model.save(str(tmp_path / "norm.mlpackage"))
    package = ane.load(tmp_path / "norm.mlpackage")
    found = said("layer_norm_flexible", package.program, package=package)
    assert len(found) == count and all("the shapes are enumerated" in hit.note for hit in found)


def test_torchs_group_norm_is_written_at_rank_5():
    assert len(fired("group_norm_rank_5", converted(torch.nn.GroupNorm(2, 8), torch.zeros(1, 8, 6, 6)))) >= 1
    assert not fired("group_norm_rank_5", converted(torch.nn.BatchNorm2d(8), torch.zeros(1, 8, 6, 6)))


def test_attentions_in_branches_are_of_the_same_function():
    def attention(q, k, v):
        return Builder.scaled_dot_product_attention(query=q, key=k, value=v)

    def body(q, k, v):
        flag = Builder.greater(x=Builder.squeeze(x=Builder.slice_by_size(x=q, begin=[0] * 4, size=[1] * 4)), y=0.0)
        return Builder.cond(pred=flag, _true_fn=lambda: attention(q, k, v), _false_fn=lambda: attention(k, q, v))

    built = build_program(body, opset=ct.target.iOS18, dtype=types.fp32, q=(1, 2, 3, 4), k=(1, 2, 3, 4), v=(1, 2, 3, 4))
    (hit,) = said("several_attentions", built)
    assert len(hit.covers) == 2 and "keys up to 3 long" in hit.note


@pytest.mark.parametrize(("kind", "target", "count"), [
    ("logical_and", "m4", 0), ("logical_and", "m1", 1), ("logical_and", "all", 1), ("logical_or", "m4", 1)])
def test_logical_ops_are_never_known(kind, target, count):
    def body(x, z):
        return getattr(Builder, kind)(x=Builder.greater(x=x, y=z), y=Builder.greater(x=z, y=x))

    built = build_program(body, dtype=types.fp32, x=(2,), z=(2,))
    assert [hit.sure for _, hit in iterate_hits_and_misses(get_all_rules()["logical_ops"](), built, target=target)
            if isinstance(hit, Hit)] == [False] * count


@pytest.mark.parametrize(("target", "sure"), [("m4", True), ("all", True), ("m1", False)])
def test_block_scales_are_known_to_be_refused_where_that_was_seen(target, sure):
    rule = get_all_rules()["per_block_int8"]
    built = next(example.build() for example in rule().examples() if example.name == "conv")
    assert [hit.sure for hit in said("per_block_int8", built, target)] == [sure]


@pytest.mark.parametrize("kind", ["conv", "matmul", "max_pool", "scaled_dot_product_attention", "pad"])
def test_ops_that_the_loader_could_not_read_are_looked_at_from_outside_only(kind, tmp_path):
    traced = torch.jit.trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()).eval(), torch.zeros(1, 70000))
    model = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(1, 70000))], skip_model_load=True)
    spec = model.get_spec()
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    for op in block.operations:
        op.type = kind if op.type == "relu" else op.type
    ct.models.utils.save_spec(spec, str(tmp_path / "future.mlpackage"), weights_dir=model.weights_dir)
    package = ane.load(tmp_path / "future.mlpackage")
    assert any(op.op_type == f"{kind} (opaque)" and op.opaque for op in package.program.functions["main"].operations
               if hasattr(op, "opaque"))
    rows = ane.lint(package, target="m4").plan.rows
    assert {row.op.op_type: row.ane for row in rows}[f"{kind} (opaque)"] == "no"


def test_a_layer_norm_over_all_axes_is_read_as_one(tmp_path):
    traced = torch.jit.trace(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()).eval(), torch.zeros(2, 3))
    model = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(2, 3))], skip_model_load=True)
    spec = model.get_spec()
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    for op in block.operations:
        op.type = "layer_norm" if op.type == "relu" else op.type
    ct.models.utils.save_spec(spec, str(tmp_path / "norm.mlpackage"), weights_dir=model.weights_dir)
    rows = ane.lint(ane.load(tmp_path / "norm.mlpackage"), target="m4").plan.rows
    assert {row.op.op_type: row.ane for row in rows}["layer_norm"] == "yes"
