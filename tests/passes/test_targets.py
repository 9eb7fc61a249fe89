"""Chips, devices, generations, and which rules apply to them."""

from __future__ import annotations

import pytest

from mil_ane_passes.passes.devices import list_device_names
from mil_ane_passes.passes.targets import (
    ALL_TARGETS,
    GENERATIONS,
    Gate,
    format_generations,
    get_generations_between,
    is_applicable,
    parse_target,
)
from mil_ane_passes.utils.errors import InputError

PAIRS = [("a14", "m1"), ("a15", "m2"), ("a16", "a17"), ("a17", "m3"), ("a19", "m5")]
CHIPS = ["a12", "a13", "a14", "m1", "a15", "m2", "a16", "a17", "m3", "m4", "a18", "a19", "m5", "m6"]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_chips_of_one_generation_are_one_target(one, other):
    assert parse_target(one) == parse_target(other)


def test_every_chip_is_in_one_generation_and_all_is_all():
    assert [chip for generation in GENERATIONS for chip in generation.chips] == CHIPS
    assert all(len(parse_target(chip)) == 1 for chip in CHIPS)
    assert parse_target("all") == GENERATIONS


@pytest.mark.parametrize("spelt", ["M1", " m1 ", "m 1", "M1 Pro", "m1max", "M1 Ultra"])
def test_spelling_is_forgiving(spelt):
    assert parse_target(spelt) == parse_target("m1")


@pytest.mark.parametrize(("device", "chip"), [
    ("iPhone XS", "a12"), ("A12X", "a12"), ("iPhone SE (2nd generation)", "a13"), ("iPhone 12 mini", "a14"),
    ("iPhone 15", "a16"), ("iPhone 15 Pro", "a17"), ("iphone15promax", "a17"), ("A17 Pro", "a17"),
    ("iPhone SE (3rd generation)", "a15"), ("iPhone 16 Pro", "a18"), ("iPhone 17 Pro", "a19"), ("iPhone Air", "a19"),
    ("iPad Air (M2)", "m2"), ("iPad Pro, 12.9-inch (3rd generation)", "a12"), ("iPad (10th gen)", "a14"),
    ("iPad mini (A17 Pro)", "a17"), ("MacBook Air (M2, 2022)", "m2"), ("Mac mini (M4)", "m4"),
    ("Mac mini (M4 Pro)", "m4"), ("MacBook Pro (14-inch, M5, 2025)", "m5"), ("Apple TV 4K (3rd generation)", "a15"),
    ("Apple Vision Pro", "m2"), ("Mac16,12", "m4"), ("mac17,2", "m5"), ("MacBookPro17,1", "m1"), ("Macmini9,1", "m1"),
    ("iPhone12,8", "a13"), ("iPhone18,1", "a19"), ("iPad16,1", "a17"), ("iPad16,3", "m4"),
])
def test_a_device_stands_for_its_chip(device, chip):
    assert parse_target(device) == parse_target(chip)


@pytest.mark.parametrize("name", list_device_names())
def test_every_device_that_is_named_in_errors_is_known(name):
    assert len(parse_target(name)) == len(parse_target(f" {name.upper()} ")) == 1


@pytest.mark.parametrize(("name", "expected"), [
    ("iPhone X", "A11; Core ML does not use its Neural Engine"), ("iPhone10,3", "A11"),
    ("a11", "A11; Core ML does not use its Neural Engine"), ("iPhone 7", "no Neural Engine (A10)"),
    ("a10", "no Neural Engine (A10)"),
    ("MacBookPro16,1", "no Neural Engine (Intel processor)"), ("MacBook Pro (Intel, 2019)", "Intel"),
    ("iMacPro1,1", "Intel"), ("Apple Watch Series 9", "is a watch"), ("S9", "is a watch"),
    ("MacBook Air", "add the chip, as in 'MacBook Air (M2)'"), ("iPad", "devices of this name have different chips"),
])
def test_a_device_without_an_answer_is_refused_with_the_reason(name, expected):
    with pytest.raises(InputError) as error:
        parse_target(name)
    assert str(error.value).startswith(f"target '{name}' ") and expected in str(error.value)


@pytest.mark.parametrize(("name", "ending"), [
    ("m7", "'Mac16,12'"), ("m44", "; did you mean 'm4'?"), ("al", "; did you mean 'all'?"), ("", "'Mac16,12'"),
    ("x", "'Mac16,12'"),
    ("iPhone 15 por", "; did you mean 'iPhone 15 Pro'?"), ("MacBook Pro (M9)", ""), ("Mac99,1", ""),
    ("m4 ; comment", ""), ("m4 # x", ""),
])
def test_an_unknown_target_is_refused(name, ending):
    with pytest.raises(InputError) as error:
        parse_target(name)
    assert str(error.value).startswith(f"target '{name}' is unknown; expected all, {', '.join(CHIPS)}")
    assert str(error.value).endswith(ending)


@pytest.mark.parametrize(
    ("gate", "target", "expected"),
    [
        (ALL_TARGETS, "all", True),
        (ALL_TARGETS, "a12", True),
        (ALL_TARGETS, "m4", True),
        (ALL_TARGETS, "m6", True),
        (Gate(first="m3"), "m2", False),
        (Gate(first="m3"), "a16", True),
        (Gate(first="m3"), "m6", True),
        (Gate(last="a13"), "a13", True),
        (Gate(last="a13"), "a14", False),
        (Gate(last="a13"), "all", True),
        (Gate("a14", "a15"), "a13", False),
        (Gate("a14", "a15"), "m1", True),
        (Gate("a14", "a15"), "a16", False),
    ],
)
def test_a_gate_includes_both_ends(gate, target, expected):
    assert is_applicable(gate, target) is expected


def test_a_gate_without_bounds_admits_every_generation():
    assert all(Gate().includes(generation) for generation in GENERATIONS)
    assert get_generations_between() == GENERATIONS and get_generations_between("m4", "m4") == parse_target("m4")


def test_a_gate_of_an_unknown_chip_says_so():
    with pytest.raises(InputError, match="target 'z9' is unknown"):
        is_applicable(Gate(first="z9"), "m1")


@pytest.mark.parametrize(("targets", "words"), [((), ""), (("m1",), "M1"), (("a15", "m4"), "M2 and M4"),
                                                 (("a13", "a14", "m6"), "A13, M1 and M6")])
def test_generations_in_words(targets, words):
    assert format_generations(generation for target in targets for generation in parse_target(target)) == words
