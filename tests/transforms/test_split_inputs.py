"""Packages that are cut behind lookups: what depends on one input alone, as far as the first floats."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.rename import rename_values
from mil_ane_passes.transforms.split_inputs import SplitInputs, find_lookups
from tests.package.helpers import make, normal


def model():
    """Two embeddings, angles of the position, and layers behind them."""
    @mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32), mb.TensorSpec((1,), dtype=types.int32),
                             mb.TensorSpec((1, 3, 4))], opset_version=ct.target.iOS17)
    def program(ids, position, x):
        tokens = mb.gather(x=normal(9, 4), indices=ids, axis=0, name="tokens")
        places = mb.add(x=position, y=np.arange(3, dtype=np.int32))
        rows = mb.gather(x=normal(8, 4), indices=places, axis=0, name="rows")
        angles = mb.cast(x=mb.expand_dims(x=places, axes=[1]), dtype="fp32", name="angles")
        both = mb.add(x=tokens, y=mb.expand_dims(x=rows, axes=[0]), name="both")
        turned = mb.mul(x=mb.linear(x=tokens, weight=normal(4, 4), name="projected"), y=mb.cos(x=angles), name="turned")
        cosine = mb.sub(x=mb.cos(x=angles, name="cosine"), y=1.0, name="less")
        return mb.add(x=mb.mul(x=both, y=x), y=mb.mul(x=turned, y=cosine), name="out")

    return program


def split(program, *names, function=None):
    parts = apply_transforms(Draft(clone_program(program), "a program"), [SplitInputs(names, function)])
    return parts, compare_across_interfaces(program, parts)


def test_the_first_floats_of_each_input_cross_and_what_follows_from_them_does_not():
    program = model()
    found = find_lookups(program.functions["main"], ["ids", "position"])
    assert [var.name for var in found["ids"]] == ["tokens"]
    assert "rows" in {var.name for var in found["position"]} and len(found["position"]) == 3
    parts, report = split(program, "ids", "position")
    assert report.equal, str(report)
    first, second = (part.program.functions["main"] for part in parts)
    assert list(first.inputs) == ["ids", "position"]
    assert "x" in second.inputs and not {"ids", "position"} & set(second.inputs)
    assert "linear" in {op.op_type for op in second.operations}
    assert all(types.is_float(var.dtype) for var in second.inputs.values())


def test_one_input_alone_leaves_the_others_in_the_second_part():
    parts, report = split(model(), "ids")
    assert report.equal, str(report)
    assert list(parts[0].program.functions["main"].inputs) == ["ids"]
    assert set(parts[1].program.functions["main"].inputs) == {"position", "x", "tokens"}


@pytest.mark.parametrize(("names", "reason"), [
    (["idz"], "there is no input 'idz'"), (["x"], "the other ops read no floats that depend only on 'x'")])
def test_inputs_that_are_no_lookups_are_explained(names, reason):
    with pytest.raises(ane.InputError, match=reason):
        split(model(), *names)


def test_several_functions_are_split_each_after_its_own_values():
    """Values of the other function have other names; it has the same inputs."""
    program = model()
    other = clone_program(program).functions["main"]
    rename_values(other, {"tokens": "tokens_of_other", "rows": "rows_of_other"})
    program.functions["other"] = other
    parts, report = split(program, "ids", "position")
    assert report.equal and {case.function for case in report.cases} == {"main", "other"}, str(report)
    assert {name: {var.name for var in each.outputs} & {"tokens", "tokens_of_other"}
            for name, each in parts[0].program.functions.items()} == {"main": {"tokens"}, "other": {"tokens_of_other"}}
    for part in parts[1:]:
        assert not any({"ids", "position"} & set(each.inputs) for each in part.program.functions.values())


def test_an_input_that_one_of_two_functions_lacks_is_explained():
    program = model()
    program.functions["other"] = clone_program(program).functions["main"]
    rename_values(program.functions["other"], {"ids": "tokens_in"})
    with pytest.raises(ane.InputError, match="function 'other': there is no input 'ids' in the model.*function="):
        split(program, "ids")
    parts, report = split(program, "ids", function="main")
    assert report.equal and [list(part.program.functions) for part in parts] == [["main"], ["main"]]


@pytest.mark.parametrize("together", [False, True])
def test_values_that_blocks_read_cross(together):
    @mb.program(input_specs=[mb.TensorSpec((2,)), mb.TensorSpec((1,), dtype=types.int32)],
                opset_version=ct.target.iOS17)
    def program(x, n):
        number = mb.cast(x=n, dtype="fp32", name="number")
        many = mb.greater(x=mb.squeeze(x=number, axes=[0]), y=np.float32(1))
        return mb.cond(pred=many, _true_fn=lambda: mb.add(x=x, y=number),
                       _false_fn=lambda: mb.mul(x=x, y=np.float32(2)), name="out")

    parts = apply_transforms(Draft(clone_program(program), "a program"), [SplitInputs(["n"], None, together)])
    assert compare_across_interfaces(program, parts).equal
    assert list(parts[1].program.functions["main"].inputs)[:2] == ["x", "number"]


def test_a_boolean_that_a_block_reads_crosses_once():
    @mb.program(input_specs=[mb.TensorSpec((2,)), mb.TensorSpec((2,), dtype=types.int32)],
                opset_version=ct.target.iOS17)
    def program(x, n):
        mask = mb.greater(x=n, y=np.int32(1), name="mask")
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0], keep_dims=False), y=np.float32(0))
        chosen = mb.cond(pred=positive, _true_fn=lambda: mb.select(cond=mask, a=x, b=np.zeros(2, np.float32)),
                         _false_fn=lambda: mb.mul(x=x, y=np.float32(2)))
        return mb.add(x=chosen, y=mb.select(cond=mask, a=x, b=np.ones(2, np.float32)), name="out")

    parts = apply_transforms(Draft(clone_program(program), "a program"), [SplitInputs(["n"], None, True)])
    assert compare_across_interfaces(program, parts).equal
    assert list(parts[1].program.functions["main"].inputs) == ["x", "mask_int32"]


def test_the_command_writes_both_packages(tmp_path, capsys):
    source = make(tmp_path / "source.mlpackage", model(), ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    arguments = ["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), "--split-inputs", "ids", "position"]
    assert main([*arguments, "--split-at", "tokens"]) == 2
    assert "each makes two packages" in capsys.readouterr().err
    assert main([*arguments, "--verify"]) == 0
    assert "computed from 'ids' alone: 'tokens'" in capsys.readouterr().out
    feeds = {"ids": np.int32([[1, 8, 0]]), "position": np.int32([4])}
    x = normal(1, 3, 4)
    expected = ane.run(source, {**feeds, "x": x})["out"]
    found = ane.run(tmp_path / "out_2.mlpackage", {**ane.run(tmp_path / "out_1.mlpackage", feeds), "x": x})["out"]
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-6)
