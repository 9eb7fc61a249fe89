"""Weights by format, the largest ones and duplicates, beside the sizes of files that coremltools wrote."""

from __future__ import annotations

import shutil

import coremltools as ct
import coremltools.optimize.coreml as optimize
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.proto import Model_pb2

import mil_ane_passes as ane
from mil_ane_passes.package.storage import survey_storage
from mil_ane_passes.passes.examples import build_program

from .helpers import WEIGHTS, make, normal

_PALETTE = {"mode": "uniform", "nbits": 4}
_SYMMETRIC = {"mode": "linear_symmetric"}


def palettize(model, joint=False, **how):
    chosen = optimize.OptimizationConfig(optimize.OpPalettizerConfig(**(_PALETTE | how)))
    return optimize.palettize_weights(model, chosen, joint_compression=joint) if joint else optimize.palettize_weights(
        model, chosen)


def quantize(model, **how):
    return optimize.linear_quantize_weights(model, optimize.OptimizationConfig(
        optimize.OpLinearQuantizerConfig(**(_SYMMETRIC | how))))


def prune(model):
    return optimize.prune_weights(model, optimize.OptimizationConfig(
        optimize.OpMagnitudePrunerConfig(target_sparsity=0.75)))


FORMATS = {
    "dense": (ct.target.iOS16, lambda model: model, "fp16"),
    "palette of iOS 16": (ct.target.iOS16, palettize, "palette of 4 bits"),
    "palette of iOS 18": (ct.target.iOS18, palettize, "palette of 4 bits"),
    "grouped palette": (ct.target.iOS18, lambda model: palettize(
        model, granularity="per_grouped_channel", group_size=16), "palette of 4 bits in groups"),
    "affine": (ct.target.iOS16, quantize, "int8 affine"),
    "channels": (ct.target.iOS18, quantize, "int8 per channel"),
    "blocks": (ct.target.iOS18, lambda model: quantize(
        model, dtype="int4", granularity="per_block", block_size=16), "int4 in blocks"),
    "sparse": (ct.target.iOS16, prune, "sparse, fp16"),
    "sparse palette": (ct.target.iOS18, lambda model: palettize(prune(model), joint=True),
                       "sparse, palette of 4 bits"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_bytes_by_format_are_those_of_the_weight_file(case, tmp_path):
    target, compress, name = FORMATS[case]

    @mb.program(input_specs=[mb.TensorSpec((1, 32, 8, 8))], opset_version=target)
    def program(x):
        x = mb.conv(x=x, weight=normal(64, 32, 3, 3), pad_type="same")
        return mb.conv(x=mb.relu(x=x), weight=normal(128, 64, 1, 1, seed=1), name="out")

    path = tmp_path / "in.mlpackage"
    model = ct.convert(program, minimum_deployment_target=target, skip_model_load=True)
    compress(model).save(str(path))
    found = ane.lint(path, target="m4", sizes=True).storage
    elements = 64 * 32 * 9 + 128 * 64
    assert (found.dense, [(each.format, each.count, each.dense) for each in found.formats]) == (
        2 * elements, [(name, 2, 2 * elements)])
    stored = (path / WEIGHTS).stat().st_size
    assert 0 <= stored - found.stored <= 64 + 2 * 6 * 128, "the file has also 64 bytes of metadata and padding per blob"
    assert [each.reader for each in found.weights] == ["conv", "conv"]
    assert found.weights[0].shape == (64, 32, 3, 3) and found.weights[0].stored > found.weights[1].stored


def test_a_weight_that_two_ops_read_counts_once():
    weight = np.ones((16, 8), np.float32)

    def body(x):
        held = mb.const(val=weight)
        return mb.add(x=mb.linear(x=x, weight=held), y=mb.linear(x=mb.relu(x=x), weight=held))

    found = survey_storage(build_program(body, x=(4, 8)))
    assert [(each.shape, each.stored) for each in found.weights if len(each.shape) == 2] == [((16, 8), 16 * 8 * 4)]
    assert found.duplicates is None, "a program in memory has no files"


def test_duplicates_are_listed_with_the_command_that_removes_them(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x):
        x = mb.linear(x=x, weight=normal(64, 64), bias=normal(64, seed=1), name="one")
        return mb.linear(x=mb.relu(x=x), weight=normal(64, 64), bias=normal(64, seed=2), name="two")

    source = make(tmp_path / "in.mlpackage", program, ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.lint(source, sizes=True)
    (group,) = report.storage.duplicates
    assert (group.nbytes, group.copies, len(group.values)) == (64 * 64 * 4, 2, 2)
    lines = str(report).splitlines()
    assert "duplicate weights: 1 value stored 2 times, 16.4 kB too many" in lines
    assert f"  fix: mil-ane-passes edit {source} -o OUT.mlpackage --dedup-weights" in lines
    ane.edit(source, tmp_path / "out.mlpackage", dedup_weights=True)
    after = ane.lint(source, after=tmp_path / "out.mlpackage", sizes=True)
    assert after.after.storage.duplicates == []
    lines = str(after).splitlines()
    assert "duplicate weights: 1 value stored 2 times, 16.4 kB too many -> none" in lines
    assert not any("--dedup-weights" in line for line in lines)
    assert "weights: 33.3 kB stored, 33.3 kB unpacked -> 16.9 kB stored, 16.9 kB unpacked" in lines


def test_memory_of_values_and_json(tmp_path):
    report = ane.lint(build_program(lambda x: mb.relu(x=mb.exp(x=x)), x=(1, 16, 64, 64)), sizes=True)
    data = report.to_dict()["storage"]
    assert data == {"stored_bytes": 0, "dense_bytes": 0, "formats": [], "weights": [], "duplicates": None,
                    "peak_bytes": 3 * 16 * 64 * 64 * 2}, "the input is live throughout"
    assert "weights: 0 B stored, 0 B unpacked" in str(report)
    assert "storage" not in ane.lint(build_program(lambda x: mb.relu(x=x), x=(1, 2))).to_dict()


def test_a_damaged_op_without_outputs_has_no_weights(fixtures, tmp_path):
    source = tmp_path / "in.mlpackage"
    shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", source)
    model = next(source.glob("Data/*/model.mlmodel"))
    spec = Model_pb2.Model.FromString(model.read_bytes())
    function = spec.mlProgram.functions["main"]
    nested = function.block_specializations[function.opset].operations[-1].blocks.add().operations.add()
    nested.type = "cond"
    nested.blocks.add()
    model.write_bytes(spec.SerializeToString())
    assert ane.lint(source, sizes=True).storage.weights
