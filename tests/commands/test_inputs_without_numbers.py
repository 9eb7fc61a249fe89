"""Packages whose inputs or values have a type that is not one of numbers: each command works, or says so in a line."""

import shutil

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.proto import Model_pb2

from mil_ane_passes.commands.main import main

TYPES = {
    "none": lambda declared: declared.Clear(),
    "a dtype of a later format": lambda declared: setattr(declared.tensorType, "dataType", 77),
    "a tuple": lambda declared: declared.CopyFrom(_wrap(declared, lambda made, old: made.tupleType.types.append(old))),
    "a dictionary": lambda declared: declared.CopyFrom(_wrap(declared, _fill_dictionary)),
    "a state of nothing": lambda declared: declared.stateType.SetInParent(),
}


def _wrap(declared, fill):
    made = type(declared)()
    fill(made, declared)
    return made


def _fill_dictionary(made, old):
    made.dictionaryType.keyType.CopyFrom(old)
    made.dictionaryType.valueType.CopyFrom(old)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((2, 3))])
    def program(x, y):  # `y` is not read
        return mb.cumsum(x=mb.relu(x=x, name="r"), axis=1, name="out")

    path = tmp_path_factory.mktemp("source") / "in.mlpackage"
    ct.convert(program, convert_to="mlprogram", skip_model_load=True).save(str(path))
    return path


def edit(source, target, change):
    """Copy a package and change its model file."""
    shutil.copytree(source, target)
    (file,) = target.glob("Data/*/*.mlmodel")
    spec = Model_pb2.Model.FromString(file.read_bytes())
    change(spec.mlProgram.functions["main"])
    file.write_bytes(spec.SerializeToString())
    return target


@pytest.mark.sampled(8)
@pytest.mark.parametrize("at", ["the input of ops", "an input that nothing reads", "the output of an op"])
@pytest.mark.parametrize("kind", TYPES)
def test_each_command_works_or_says_so(source, tmp_path, capsys, kind, at):
    def change(function):
        block = function.block_specializations[function.opset]
        if at == "the output of an op":
            TYPES[kind](next(op for op in block.operations if op.type == "relu").outputs[0].type)
            return
        TYPES[kind](function.inputs[1 if at == "an input that nothing reads" else 0].type)

    damaged, out = edit(source, tmp_path / "in.mlpackage", change), tmp_path / "out.mlpackage"
    np.savez(tmp_path / "feeds.npz", x=np.zeros((2, 3), np.float32), y=np.zeros((2, 3), np.float32))
    feeds = ["--feeds", str(tmp_path / "feeds.npz")]
    for line in (
        ["lint", damaged], ["lint", damaged, "--format", "html"], ["lint", damaged, "--format", "json"],
        ["rewrite", damaged, "-o", out, "--preset", "full", "--overwrite", "--diff"], ["verify", damaged, damaged],
        ["verify", damaged, source], ["verify", damaged, damaged, *feeds], ["calibrate", damaged],
        ["calibrate", damaged, "--ranges", "x=0:1,y=0:1"], ["run", damaged, *feeds, "--trace"],
        ["edit", damaged, "-o", out, "--expose", "r", "--overwrite", "--verify"],
        ["edit", damaged, "-o", out, "--io", "fp16", "--overwrite"],
        ["mac-script", tmp_path / "folder", damaged],
    ):
        code = main([str(part) for part in line])
        printed = capsys.readouterr()
        assert code in (0, 1, 2) and "internal error" not in printed.err, (line[0], printed.err)


def test_an_input_that_cannot_be_fed_is_named(source, tmp_path, capsys):
    damaged = edit(source, tmp_path / "in.mlpackage", lambda function: TYPES["none"](function.inputs[0].type))
    assert main(["calibrate", str(damaged)]) == 2
    assert "input 'x' is of type unknown, which cannot be fed; expected a tensor of numbers" in capsys.readouterr().err
