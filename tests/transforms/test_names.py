"""Errors for names of values that a model does not have."""

from __future__ import annotations

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.transforms.names import collect_names, make_unknown_name_error


@pytest.mark.parametrize(("name", "near"), [
    ("x_3", "x_3_cast_fp16"),  # coremltools appends this where it converts to fp16
    ("hidden", "hidden_1_cast_fp16"),
    ("x_33_cast_fp16", "x_3_cast_fp16"),
])
def test_a_name_before_a_suffix_of_the_converter_is_suggested(name, near):
    names = ["x_31_cast_fp16", "x_3_pad_0", "x_3_cast_fp16", "hidden_1_cast_fp16", "hidden_1_perm_0_cast_fp16", "y"]
    assert str(make_unknown_name_error(name, "--expose", names)) == (
        f"--expose: there is no value '{name}' in the model; did you mean '{near}'?")


def test_other_names_are_listed():
    assert str(make_unknown_name_error("hid", "--expose", ["hidden_1", "y"])).endswith("; its values are hidden_1, y")


def make_function(count=1):
    """A function with `count` inputs, a state, an output, and many values between them."""
    specs = [mb.TensorSpec((1, 4), dtype=types.fp16) for _ in range(count)]

    def body(given, cache):
        x = mb.add(x=given[0], y=mb.read_state(input=cache))
        for number in range(10, 60):
            x = mb.relu(x=x, name=f"a_{number}")
        return mb.tanh(x=x, name="logits")

    names = [f"x{number}" for number in range(count)]
    scope = {"body": body}
    exec(f"def call({', '.join(names)}, cache): return body([{', '.join(names)}], cache)", scope)
    program = mb.program(input_specs=[*specs, mb.StateTensorSpec((1, 4), dtype=types.fp16)],
                         opset_version=ct.target.iOS18)(scope["call"])
    return program.functions["main"]


def test_the_interface_is_listed_and_no_values_that_are_not_similar():
    function = make_function()
    error = make_unknown_name_error("nothing", "--rename nothing=x", collect_names(function), functions=[function])
    assert str(error) == ("--rename nothing=x: there is no value 'nothing' in the model (inputs: x0; outputs: logits; "
                          "states: cache)")


def test_similar_names_are_listed_after_the_interface():
    """Of names that are equally close none is suggested."""
    function = make_function()
    error = make_unknown_name_error("a_77", "--expose a_77", collect_names(function), functions=[function])
    assert str(error).endswith("(inputs: x0; outputs: logits; states: cache); similar names: a_57, a_47, a_37")


def test_of_a_long_interface_the_first_names_are_listed():
    function = make_function(23)
    error = make_unknown_name_error("nothing", "--expose nothing", collect_names(function), functions=[function])
    assert "(inputs: x0, x1, x2, " in str(error) and "x19 and 3 more; outputs: logits; states: cache)" in str(error)


@pytest.mark.parametrize("option", ["rename", "expose"])
def test_edits_of_values_list_the_interface(fixtures, tmp_path, option):
    given = {"nothing": "logits"} if option == "rename" else "nothing"
    with pytest.raises(ane.InputError, match=r"no value 'nothing' in the model \(inputs: mel; outputs: waveform\)$"):
        ane.edit(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "out.mlpackage", **{option: given})
