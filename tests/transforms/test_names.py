"""Errors for names of values that a model does not have."""

from __future__ import annotations

import pytest

from mil_ane_passes.transforms.names import make_unknown_name_error


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
