"""The table of limits: who stated what, and which is the strictest."""

from __future__ import annotations

import pytest

from mil_ane_passes.ane.limits import LIMITS, collect_evidence, find_exceeded_limit, find_limit
from mil_ane_passes.passes.targets import GENERATIONS, parse_target


@pytest.mark.parametrize("name", LIMITS)
def test_every_bound_has_a_source_and_no_generation_has_two(name):
    stated = [generation for bound in LIMITS[name] for generation in bound.generations]
    assert stated and len(stated) == len(set(stated)) and stated == sorted(stated, key=GENERATIONS.index)
    assert all(bound.says and bound.most > 0 for bound in LIMITS[name]) and collect_evidence(name)


@pytest.mark.parametrize(("name", "target", "most", "sure"), [
    ("conv-kernel-width", "m1", 13, True), ("conv-kernel-width", "m3", 13, False),
    ("conv-kernel-width", "m4", 15, True), ("conv-kernel-width", "all", 13, True),
    ("conv-kernel-height", "m4", 31, True), ("max-pool-width", "m4", 8, True), ("pool-stride", "a13", 2, True),
    ("spatial", "m2", 16384, True), ("spatial", "m4", 65536, True), ("channels", "m1", 65536, True),
    ("matmul-inner", "m4", 32768, True), ("matmul-inner", "m5", 32768, False), ("rank", "all", 5, True),
])
def test_the_strictest_is_given(name, target, most, sure):
    bound = find_limit(name, parse_target(target))
    assert (bound.most, bound.sure) == (most, sure)


@pytest.mark.parametrize(("name", "target"), [("conv-kernel-height", "m1"), ("max-pool-width", "m3"),
                                              ("pool-kernel", "m1"), ("upsampling", "m4")])
def test_what_nobody_stated_is_none(name, target):
    assert (
        find_limit(name, parse_target(target)) is None
        and find_exceeded_limit(name, 10**12, parse_target(target)) is None
    )


@pytest.mark.parametrize(("name", "value", "target", "words", "sure"), [
    ("conv-kernel-width", 16, "m4", "> 15 (M4)", True),
    ("conv-kernel-width", 14, "m3", "> 13 (assumed on M3)", False),
    ("conv-kernel-width", 14, "all", "> 13 (M1; assumed on A12, A13, M2 and M3)", True),
    ("conv-kernel-width", 16, "all",
     "> 15 (M4, M5 and M6; assumed on A18; 13 on M1; 13 assumed on A12, A13, M2 and M3)", True),
    ("spatial", 16385, "m2", "> 16384 (M2)", True),
])
def test_who_takes_less_in_words(name, value, target, words, sure):
    found = find_exceeded_limit(name, value, parse_target(target))
    assert (found.words, found.sure) == (words, sure)


@pytest.mark.parametrize("name", LIMITS)
def test_a_value_at_the_limit_is_taken_and_more_generations_are_never_milder(name):
    for number in range(len(GENERATIONS)):
        bound = find_limit(name, GENERATIONS[number:number + 1])
        if bound is None:
            continue
        assert find_exceeded_limit(name, bound.most, GENERATIONS[number:number + 1]) is None
        more = find_exceeded_limit(name, bound.most + 1, GENERATIONS[number:])
        assert more is not None and more.sure >= bound.sure
        assert find_limit(name, GENERATIONS).most <= bound.most
