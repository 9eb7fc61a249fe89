"""Limits at, below and above their value, for the generations that are looked at."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, types

from mil_ane_passes.ane import predict_plan
from mil_ane_passes.passes.contract import Hit
from mil_ane_passes.passes.engine import iterate_hits_and_misses
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import fixes_for, get_all_rules
from mil_ane_passes.passes.targets import GENERATIONS

YES, NO, UNKNOWN = "yes", "no", "unknown"


def hits(name, prog, target):
    return [
        answer
        for _, answer in iterate_hits_and_misses(get_all_rules()[name](), prog, target=target)
        if isinstance(answer, Hit)
    ]


def verdict(name, prog, target):
    """no: refused; unknown: perhaps refused; yes: the rule has nothing against it."""
    found = hits(name, prog, target)
    return YES if not found else NO if any(hit.sure for hit in found) else UNKNOWN


def conv(*kernel, side=40, groups=1, **given):
    channels = 4
    return build_program(
        lambda x: Builder.conv(
            x=x,
            weight=make_weight(channels, channels // groups, *kernel),
            pad_type="same",
            groups=groups,
            name="y",
            **given,
        ),
        x=(1, channels, *[side] * len(kernel)),
    )


def pool(kind, *window, stride=1):
    return build_program(lambda x: getattr(Builder, kind)(
        x=x, kernel_sizes=list(window), strides=[stride] * len(window), pad_type="same", name="y"),
        x=(1, 2, *[40] * len(window)))


def relu(*shape, dtype=types.fp16):
    return build_program(lambda x: Builder.relu(x=x, name="y"), dtype=dtype, x=shape)


def matmul(inner, const=False):
    if const:
        return build_program(lambda x: Builder.matmul(x=x, y=np.zeros((inner, 2), np.float16), name="y"), x=(2, inner))
    return build_program(lambda x, z: Builder.matmul(x=x, y=z, name="y"), x=(2, inner), z=(inner, 2))


@pytest.mark.parametrize(("kernel", "target", "expected"), [
    ((1, 15), "m4", YES), ((1, 16), "m4", NO), ((1, 64), "m4", NO), ((1, 31), "m4", NO), ((31, 1), "m4", YES),
    ((32, 1), "m4", NO), ((64, 1), "m4", NO), ((15, 15), "m4", YES), ((16, 16), "m4", YES), ((17, 17), "m4", NO),
    ((16, 3), "m4", YES), ((3, 20), "m4", UNKNOWN), ((20, 16), "m4", UNKNOWN), ((33, 3), "m4", UNKNOWN),
    ((1, 13), "m1", YES), ((1, 14), "m1", NO), ((1, 14), "m2", UNKNOWN), ((1, 14), "m3", UNKNOWN),
    ((1, 14), "a13", UNKNOWN), ((1, 15), "m5", YES), ((1, 16), "m5", NO), ((16, 16), "m6", YES), ((1, 16), "m6", NO),
    ((16, 16), "m1", NO), ((32, 1), "m1", YES), ((1, 14), "all", NO), ((13, 13), "all", YES),
    ((1, 1, 16), "m4", UNKNOWN), ((3, 3, 3), "m4", YES), ((32,), "m4", NO), ((31,), "m4", YES),
])
def test_conv_kernels(kernel, target, expected):
    assert verdict("conv_kernel_size", conv(*kernel), target) == expected


@pytest.mark.parametrize(("kernel", "message"), [((1, 16), True), ((32, 1), True), ((17, 17), True), ((3, 20), False)])
def test_core_mls_words_are_given_for_the_forms_that_were_measured(kernel, message):
    (hit,) = hits("conv_kernel_size", conv(*kernel), "m4")
    words = "Error: conv with large kernel does not meet decomposition preconditions"
    assert hit.message == (words if message else None)
    assert all(hit.message is None for hit in hits("conv_kernel_size", conv(*kernel), "m1"))


def test_a_weight_that_is_computed_and_a_transposed_conv_are_not_known():
    computed = build_program(lambda x, w: Builder.conv(x=x, weight=w, pad_type="same", name="y"), x=(1, 2, 40, 40),
                             w=(2, 2, 1, 20))
    transposed = build_program(
        lambda x: Builder.conv_transpose(x=x, weight=make_weight(2, 2, 1, 20), name="y"), x=(1, 2, 4, 4)
    )
    assert verdict("conv_kernel_size", computed, "m4") == verdict("conv_kernel_size", transposed, "m4") == UNKNOWN


@pytest.mark.parametrize(("length", "target", "expected"), [
    (15, "m4", YES), (16, "m4", UNKNOWN), (31, "m4", UNKNOWN), (32, "m4", YES), (14, "m1", UNKNOWN), (13, "all", YES)])
def test_kernels_of_1d_convs_and_what_mends_them(length, target, expected):
    assert verdict("conv_1d_kernel", conv(length), target) == expected
    assert [fix.name for fix in fixes_for(get_all_rules()["conv_1d_kernel"])] == ["lift_conv_1d"]


@pytest.mark.parametrize(("kind", "window", "target", "expected"), [
    ("max_pool", (8, 8), "m4", YES), ("max_pool", (9, 9), "m4", NO), ("max_pool", (1, 9), "m4", NO),
    ("max_pool", (9, 1), "m4", YES), ("max_pool", (1, 32), "m4", UNKNOWN), ("max_pool", (15, 15), "m4", NO),
    ("max_pool", (9, 9), "m3", YES), ("max_pool", (9, 9), "m6", NO), ("max_pool", (9,), "m4", UNKNOWN),
    ("max_pool", (32, 1), "m4", UNKNOWN), ("avg_pool", (14, 14), "m4", YES), ("avg_pool", (31, 31), "m4", YES),
    ("avg_pool", (32, 32), "m4", UNKNOWN), ("l2_pool", (9, 9), "m4", YES), ("max_pool", (9, 9), "all", NO),
])
def test_windows(kind, window, target, expected):
    assert verdict("max_pool_kernel", pool(kind, *window), target) == expected


@pytest.mark.parametrize("width", [9, 15])
def test_the_windows_message_has_its_width(width):
    (hit,) = hits("max_pool_kernel", pool("max_pool", width, width), "all")
    assert hit.message == f"Invalid Pool kernel width ({width}), must be [1-8] or 32."


@pytest.mark.parametrize(("shape", "target", "expected"), [
    ((1, 1, 1, 65536), "m4", YES), ((1, 1, 1, 65537), "m4", NO), ((1, 65537, 1, 1), "m4", NO),
    ((1, 1, 65537, 1), "m4", NO), ((65537, 1, 1, 1), "m4", NO), ((1, 1, 1, 16384), "m2", YES),
    ((1, 1, 1, 16385), "m2", NO), ((1, 1, 16385, 1), "m1", NO), ((1, 16385, 1, 1), "m1", YES),
    ((1, 65537, 1, 1), "m1", NO), ((1, 65537, 1, 1), "m3", UNKNOWN), ((1, 1, 1, 17920), "m3", NO),
    ((1, 1, 1, 20000), "a13", UNKNOWN), ((65536,), "m4", YES), ((65537,), "m4", NO), ((1, 20000, 4), "m1", UNKNOWN),
    ((1, 4, 20000), "m1", NO), ((1, 1, 1, 65536), "m5", YES), ((1, 1, 1, 65537), "m5", NO), ((None, 4), "m4", YES),
    ((1, 1, 1, 16385), "all", NO),
])
def test_dimensions(shape, target, expected):
    assert verdict("dimension_limit", relu(*shape), target) == expected


def test_the_dimensions_message_is_core_mls_for_the_chip():
    (hit,) = hits("dimension_limit", relu(1, 1, 1, 65537), "m4")
    assert hit.message == ("Tensor dimensions N1D1C1H1W65537 are not within supported range, "
                           "N[1-65536]D[1-65536]C[1-65536]H[1-65536]W[1-65536].")
    (hit,) = hits("dimension_limit", relu(1, 240000), "m2")
    assert hit.message == ("Tensor dimensions N1D1C1H1W240000 are not within supported range, "
                           "N[1-65536]D[1-16384]C[1-65536]H[1-16384]W[1-16384].")
    assert [hit.message for hit in hits("dimension_limit", relu(3, 70000), "m4")] == [None]


def test_scalars_and_lists_are_no_large_values():
    def body(x):
        made = Builder.make_list(init_length=1, dynamic_length=True, elem_shape=[2], dtype="fp16")
        written = Builder.list_write(ls=made, index=np.int32(0), value=x)
        return Builder.list_read(ls=written, index=np.int32(0)), Builder.sqrt(x=Builder.reduce_sum(x=x))

    assert not hits("dimension_limit", build_program(body, x=(2,)), "all")
    assert not hits("rank_above_5", build_program(body, x=(2,)), "all")


def test_ops_that_share_large_values_are_one_finding_and_others_another():
    def body(x, z):
        for _ in range(3):
            x = Builder.relu(x=x)
        return x, Builder.relu(x=Builder.relu(x=z)), Builder.relu(x=Builder.reduce_sum(x=x, axes=[-1]))

    found = hits("dimension_limit", build_program(body, x=(1, 70000), z=(1, 80000)), "m4")
    assert sorted(len(hit.covers) for hit in found) == [2, 4]
    assert all(len(set(hit.covers)) == len(hit.covers) for hit in found)


@pytest.mark.parametrize(("inner", "const", "target", "expected"), [
    (32768, False, "m4", YES), (32769, False, "m4", NO), (49152, False, "m4", NO), (49152, True, "m4", UNKNOWN),
    (16384, False, "m1", YES), (16385, False, "m1", NO), (16385, False, "m3", UNKNOWN), (16385, False, "m4", YES),
    (40000, False, "m5", UNKNOWN), (32769, False, "m6", NO), (16385, False, "all", NO),
])
def test_inner_dimensions(inner, const, target, expected):
    assert verdict("matmul_inner_dimension", matmul(inner, const), target) == expected


def test_the_products_message_has_its_bytes():
    (hit,) = hits("matmul_inner_dimension", matmul(49152), "m4")
    assert hit.message == "Error: the output channel of input A (98304 kB) can not fit the Kmem (65536 kB)"
    (hit,) = hits("matmul_inner_dimension", matmul(20000), "all")
    assert hit.message is None and "> 16384" in hit.note


@pytest.mark.parametrize(("rule", "prog", "expected"), [
    ("old_pools", pool("avg_pool", 13, 13, stride=2), {}),
    ("old_pools", pool("avg_pool", 14, 14), {"a12": NO, "a13": NO}),
    ("old_pools", pool("max_pool", 3, 3, stride=3), {"a12": NO, "a13": NO, "m1": UNKNOWN, "m2": UNKNOWN,
                                                     "m3": UNKNOWN}),
    ("old_pools", pool("max_pool", 4, 4, stride=4), {"a12": NO, "a13": NO}),
    ("dilated_conv", conv(3, 3, dilations=[2, 2]), {"a12": UNKNOWN, "a13": UNKNOWN}),
    ("sin_cos", build_program(lambda x: Builder.sin(x=x, name="y"), x=(2,)),
     {"a12": UNKNOWN, "a13": UNKNOWN, "m1": NO, "m2": NO}),
    ("old_upsampling", build_program(lambda x: Builder.upsample_nearest_neighbor(
        x=x, scale_factor_height=3, scale_factor_width=3, name="y"), x=(1, 2, 4, 4)), {"a12": NO, "a13": NO}),
    ("texture_ops", build_program(lambda x: Builder.pad(x=x, pad=[1, 1], mode="reflect", name="y"), x=(1, 2, 4, 4)),
     {"a12": UNKNOWN, "a13": UNKNOWN, "m1": UNKNOWN}),
])
def test_what_is_said_of_each_generation(rule, prog, expected):
    chips = ["a12", "a13", "m1", "m2", "m3", "m4", "m5", "m6"]
    assert {chip: said for chip in chips if (said := verdict(rule, prog, chip)) != YES} == expected


@pytest.mark.parametrize(("name", "target", "expected"), [
    ("270", "m4", NO), ("270", "m1", UNKNOWN), ("256", "m4", YES)])
def test_states(name, target, expected):
    rule = get_all_rules()["state_width"]
    (example,) = [example for example in rule().examples() if example.name == name]
    assert verdict("state_width", example.build(), target) == expected


LARGE = {
    "wide kernel": conv(1, 16), "wide for an M1": conv(1, 14), "large window": pool("max_pool", 9, 9),
    "far stride": pool("max_pool", 3, 3, stride=3), "long": relu(1, 1, 1, 65537),
    "long for an M1": relu(1, 1, 1, 20000),
    "product": matmul(20000), "sin": build_program(lambda x: Builder.sin(x=x, name="y"), x=(1, 2, 3, 4)),
    "fine": relu(1, 2, 3, 4),
}


@pytest.mark.parametrize("prog", LARGE.values(), ids=LARGE)
def test_more_generations_never_turn_no_into_yes(prog):
    rules = [rule() for rule in get_all_rules().values() if rule.refuses]

    def said(target):
        return [row.ane for row in predict_plan(prog, rules, target=target)[0].rows]

    alone = [said(generation.name) for generation in GENERATIONS]
    together = said("all")
    for place, answer in enumerate(together):
        each = {answers[place] for answers in alone}
        assert answer == NO if NO in each else answer != YES if UNKNOWN in each else answer == YES


def test_the_same_limits_hold_at_every_opset():
    for opset in (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18):
        prog = build_program(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 1, 17, dtype=np.float32), name="y"),
                             opset=opset, dtype=types.fp32, x=(1, 2, 4, 40))
        assert verdict("conv_kernel_size", prog, "m4") == NO
