"""Options are annotated fields; strings and typed values are read the same way."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest

from mil_ane_passes.passes.contract import Rewrite
from mil_ane_passes.passes.options import get_options, make_with_options, parse_passes
from mil_ane_passes.utils.errors import InputError


class Example(Rewrite):
    """An example."""

    name = "example"
    limit: int = 3
    "How far,\n    in two lines."
    share: float = 0.5
    loud: bool = False
    label: str = "x"
    mode: Literal["fast", "slow"] = "fast"
    axis: Literal[-1, 2] = -1
    _hidden: int = 1
    table: ClassVar[int] = 2


class More(Example):
    extra: int = 7
    "One more."


def test_fields_are_options_and_class_vars_are_not():
    assert list(get_options(Example)) == ["limit", "share", "loud", "label", "mode", "axis"]
    assert {name: option.default for name, option in get_options(Example).items()} == {
        "limit": 3,
        "share": 0.5,
        "loud": False,
        "label": "x",
        "mode": "fast",
        "axis": -1,
    }


def test_the_text_under_a_field_is_its_doc():
    assert get_options(Example)["limit"].doc == "How far, in two lines."
    assert get_options(Example)["share"].doc == ""


def test_options_and_their_docs_are_inherited():
    assert get_options(More)["extra"].doc == "One more."
    assert get_options(More)["limit"].default == 3
    assert get_options(More)["limit"].doc == "How far, in two lines."


def test_choices_are_those_of_the_literal():
    assert get_options(Example)["mode"].choices == ("fast", "slow")
    assert get_options(Example)["limit"].choices == ()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("limit", "12", 12),
        ("limit", " 12 ", 12),
        ("limit", 12, 12),
        ("limit", 12.0, 12),
        ("limit", "-1", -1),
        ("share", "0.25", 0.25),
        ("share", 1, 1.0),
        ("share", "1e-3", 1e-3),
        ("loud", "true", True),
        ("loud", "True", True),
        ("loud", "1", True),
        ("loud", "yes", True),
        ("loud", True, True),
        ("loud", "false", False),
        ("loud", "no", False),
        ("loud", 0, False),
        ("label", "y", "y"),
        ("mode", "slow", "slow"),
        ("axis", "2", 2),
        ("axis", -1, -1),
    ],
)
def test_values_become_the_options_type(name, given, expected):
    found = getattr(make_with_options(Example, {name: given}), name)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("limit", "1.5", "a value of type int"),
        ("limit", 1.5, "a value of type int"),
        ("limit", "", "a value of type int"),
        ("limit", True, "a value of type int"),
        ("limit", None, "a value of type int"),
        ("limit", float("inf"), "a value of type int"),
        ("limit", float("nan"), "a value of type int"),
        ("limit", [1], "a value of type int"),
        ("share", "half", "a value of type float"),
        ("share", False, "a value of type float"),
        ("loud", "maybe", "a value of type bool"),
        ("loud", 2, "a value of type bool"),
        ("mode", "SLOW", "fast or slow"),
        ("axis", "1", "-1 or 2"),
    ],
)
def test_bad_values_are_refused_with_what_was_expected(name, given, expected):
    with pytest.raises(InputError) as error:
        make_with_options(Example, {name: given})
    assert str(error.value) == f"ane::example: option '{name}' is {given!r}; expected {expected}"


def test_unknown_options_have_a_suggestion():
    with pytest.raises(InputError) as error:
        make_with_options(Example, {"limits": 1})
    assert str(error.value) == (
        "ane::example: no option 'limits'; it has limit, share, loud, label, mode, axis; did you mean 'limit'?"
    )


def test_instances_do_not_share_options():
    make_with_options(Example, {"limit": 9})
    assert make_with_options(Example, {}).limit == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a", {"a": {}}),
        ("ane::a", {"a": {}}),
        (" a , b ", {"a": {}, "b": {}}),
        ("a,", {"a": {}}),
        ("a{}", {"a": {}}),
        ("a{axis=2}", {"a": {"axis": "2"}}),
        ("a{axis=2 limit=-1},b", {"a": {"axis": "2", "limit": "-1"}, "b": {}}),
        ("a{x=1,y=2;z=3}", {"a": {"x": "1", "y": "2", "z": "3"}}),
        ("a{x=1},a{y=2}", {"a": {"x": "1", "y": "2"}}),
        ("a-b,c-d{x=1}", {"a-b": {}, "c-d": {"x": "1"}}),  # no pass is called so: the look-up suggests one
    ],
)
def test_passes_are_read(text, expected):
    assert parse_passes(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "passes: cannot read 'a b'; expected names like 'a,b{option=value}'"),
        ("a,,b", "passes: cannot read ',b'; expected names like 'a,b{option=value}'"),
        ("a{x=1", "passes: cannot read 'a{x=1'; expected names like 'a,b{option=value}'"),
        ("a{{x=1}}", "passes: cannot read 'a{{x=1}}'; expected names like 'a,b{option=value}'"),
        ("a,2b", "passes: cannot read '2b'; expected names like 'a,b{option=value}'"),
        ("a{x}", "passes: cannot read option 'x' of 'a'; expected option=value"),
        ("a{=1}", "passes: cannot read option '=1' of 'a'; expected option=value"),
        ("a{x=}", "passes: cannot read option 'x=' of 'a'; expected option=value"),
    ],
)
def test_what_cannot_be_read_is_shown(text, message):
    with pytest.raises(InputError) as error:
        parse_passes(text)
    assert str(error.value) == message
