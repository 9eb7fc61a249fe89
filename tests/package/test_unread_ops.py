"""Ops that contradict coremltools' definition of them: kept as they are, and reported with the contradiction."""

from __future__ import annotations

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main

from .hostile import FLOAT, Made, package


def text(made: Made, name: str, value: str) -> None:
    """A const of one string."""
    op = made.op("const", name)
    op.outputs[0].type.tensorType.dataType = op.attributes["val"].type.tensorType.dataType = 2
    op.attributes["val"].immediateValue.tensor.strings.values.append(value)


def conv_transpose_of_unknown_padding() -> bytes:
    made = Made()
    made.input("image", 1, 4, 5)
    made.const("weight", (4, 2, 3), [1.0] * 24, FLOAT)
    text(made, "pad_type", "nearest")
    made.op("conv_transpose", "y", (1, 2, 7), x="image", weight="weight", pad_type="pad_type")
    made.block.outputs[:] = ["y"]
    return made.bytes()


def other_shape() -> bytes:
    made = Made()
    made.op("relu", "y", (5,), x="x")
    made.block.outputs[:] = ["y"]
    return made.bytes()


def missing_input() -> bytes:
    made = Made()
    made.op("add", "y", (4,), x="x")
    made.block.outputs[:] = ["y"]
    return made.bytes()


MODELS = {
    "padding": (conv_transpose_of_unknown_padding, "conv_transpose", "d_out_shape"),
    "shape": (other_shape, "relu", "outputs of other types than declared"),
    "input": (missing_input, "add", "Required input y is missing"),
}


@pytest.mark.parametrize("name", MODELS)
def test_lint_and_run_say_what_contradicts_the_definition(name, tmp_path, capsys):
    build, kind, words = MODELS[name]
    source = package(tmp_path / "in.mlpackage", build())
    assert main(["lint", str(source), "--no-config"]) == 1
    printed = capsys.readouterr()
    assert "internal error" not in printed.err
    assert f"read {kind} (opaque)" not in printed.out and words in printed.out
    with pytest.raises(ane.NotSupported) as refused:
        ane.runtime.Runtime(ane.load(source).program)
    assert words in str(refused.value) and f"{kind} 'y'" in str(refused.value)
    assert "no kernel" not in str(refused.value)
