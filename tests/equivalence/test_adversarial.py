"""Programs that agree on normal draws and differ elsewhere: the equivalence check sees them, or its page says not."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.proto import FeatureTypes_pb2, Model_pb2

import mil_ane_passes as ane
from mil_ane_passes.equivalence.adversarial_feeds import (
    INDICES,
    SPECIAL,
    TIES,
    WIDE,
    WIDE_AND_TIES,
    Domain,
    build_adversarial_plans,
)
from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite, get_all_rewrites

PRECISIONS = ("float64", "float16")
half = np.float16


def check(before, after, promised=Exactness.ROUNDING, **how):
    return compare_programs(before, after, precisions=PRECISIONS, exactness=promised, locate=False, **how)


def unary(body, *shape, dtype=types.fp16, opset=ct.target.iOS17):
    """`body` of one input, and what it is to be mistaken for: the identity of it."""
    return build_program(lambda x: mb.identity(x=body(x), name="y"), x=shape or (8, 16), dtype=dtype, opset=opset)


def same(x):
    return x


def nonfinite_swallowed(x):
    finite = mb.less(x=mb.abs(x=x), y=half(np.inf))
    return mb.select(cond=finite, a=x, b=half(0))


def nan_swallowed(x):
    return mb.select(cond=mb.equal(x=x, y=x), a=x, b=half(0))


def half_up(x):
    return mb.floor(x=mb.add(x=x, y=half(0.5)))


def shifted_softplus(x):
    """log(1 + exp(x)) as it overflows, cut off at 60000."""
    return mb.softplus(x=mb.minimum(x=x, y=half(60000)))


def last_largest(x):
    """The place of the last of equal maxima."""
    there = mb.equal(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True))
    places = mb.select(cond=there, a=np.arange(16, dtype=half), b=np.full(16, -1, half))
    return mb.cast(x=mb.reduce_max(x=places, axes=[-1]), dtype="int32")


def first_largest(x):
    return mb.reduce_argmax(x=x, axis=-1, keep_dims=False)


VALUES = {
    **{f"clipped at {limit}": (same, lambda x, limit=limit: mb.minimum(x=x, y=half(limit)))
       for limit in (4, 5, 8, 100, 1000, 60000)},
    **{f"clipped at -{limit}": (same, lambda x, limit=limit: mb.maximum(x=x, y=half(-limit))) for limit in (4, 100)},
    "NaN swallowed": (same, nan_swallowed),
    "NaN and infinities swallowed": (same, nonfinite_swallowed),
    "small numbers flushed": (same, lambda x: mb.select(
        cond=mb.less(x=mb.abs(x=x), y=half(1e-4)), a=half(0), b=x)),
    "1e-3 of x beside a large one": (same, lambda x: mb.select(
        cond=mb.greater(x=mb.reduce_max(x=x, axes=[-1], keep_dims=True), y=half(20)), a=mb.mul(x=x, y=half(1.001)),
        b=x)),
    "saturated tanh": (lambda x: mb.tanh(x=x), lambda x: mb.tanh(x=mb.maximum(x=x, y=half(-2.5)))),
    "rounded half up": (lambda x: mb.round(x=x), half_up),
    "softplus cut off": (lambda x: mb.softplus(x=x), shifted_softplus),
    "log-softmax clamped at -20": (
        lambda x: mb.sub(x=x, y=mb.reduce_log_sum_exp(x=x, axes=[-1], keep_dims=True)),
        lambda x: mb.maximum(x=mb.sub(x=x, y=mb.reduce_log_sum_exp(x=x, axes=[-1], keep_dims=True)), y=half(-20))),
    "ties go to the last": (first_largest, last_largest),
    "quotients above 8": (lambda x: mb.mod(x=x, y=half(1)), lambda x: mb.select(
        cond=mb.greater(x=x, y=half(8)), a=x, b=mb.mod(x=x, y=half(1)))),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("shape", [(8, 16), (16,), (1, 4, 300)], ids=str)
def test_wrong_values(name, shape):
    right, wrong = VALUES[name]
    if "ties" in name and shape[-1] != 16:
        pytest.skip("places are those of 16 columns")
    assert check(unary(right, *shape), unary(right, *shape)).equal
    report = check(unary(right, *shape), unary(wrong, *shape))
    assert report.status == "different", report


def test_sign_of_zero_under_bitwise():
    signed, plain = unary(same), unary(lambda x: mb.add(x=x, y=half(0)))
    assert check(signed, plain, Exactness.BITWISE).status == "different"
    assert check(signed, plain).equal  # which rounding allows


@pytest.mark.parametrize("dtype", [types.fp32, types.fp16])
def test_small_inputs_too(dtype):
    number = types.nptype_from_builtin(dtype)
    wrong = unary(lambda x: mb.minimum(x=x, y=number(4)), 1, 3, dtype=dtype)
    assert check(unary(same, 1, 3, dtype=dtype), wrong).status == "different"


def gathered(change, rows, ids=(6,), opset=ct.target.iOS17):
    table = (np.arange(rows * 2) % 97).reshape(rows, 2).astype(half)

    @mb.program(input_specs=[mb.TensorSpec(ids, types.int32)], opset_version=opset)
    def made(i):
        return mb.gather(x=table, indices=change(i), axis=0, validate_indices=False, name="y")

    return made


INTEGERS = {
    "absolute index": (lambda i: mb.abs(x=i), 20),
    "negative index is 0": (lambda i: mb.maximum(x=i, y=np.int32(0)), 20),
    "last row of a table": (lambda i: mb.minimum(x=i, y=np.int32(49998)), 50000),
    "first row of a table": (lambda i: mb.select(cond=mb.equal(x=i, y=np.int32(0)), a=np.int32(1), b=i), 50000),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_wrong_indices(name):
    change, rows = INTEGERS[name]
    assert check(gathered(same, rows), gathered(same, rows)).equal
    assert check(gathered(same, rows), gathered(change, rows)).status == "different"


@pytest.mark.parametrize("change", [lambda i: mb.abs(x=i), lambda i: mb.minimum(x=i, y=np.int32(8)),
                                    lambda i: mb.maximum(x=i, y=np.int32(-50))])
def test_wrong_integers(change):
    def free(change):
        @mb.program(input_specs=[mb.TensorSpec((4,), types.int32)], opset_version=ct.target.iOS17)
        def made(i):
            return mb.add(x=change(i), y=np.int32(1), name="y")

        return made

    assert check(free(same), free(same)).equal
    assert check(free(same), free(change)).status == "different"


def test_a_one_hot_lights_nothing_for_a_negative_index():
    def lit(change):
        @mb.program(input_specs=[mb.TensorSpec((5,), types.int32)], opset_version=ct.target.iOS17)
        def made(i):
            return mb.one_hot(indices=change(i), one_hot_vector_size=7, on_value=half(1), off_value=half(0), name="y")

        return made

    assert check(lit(same), lit(lambda i: mb.maximum(x=i, y=np.int32(0)))).status == "different"


def at_length(wrong_at):
    """x, doubled where its length passes `wrong_at`."""

    def body(x):
        length = mb.slice_by_index(x=mb.shape(x=x), begin=[0], end=[1], squeeze_mask=[True])
        factor = mb.select(cond=wrong_at(length), a=half(2), b=half(1))
        return mb.mul(x=x, y=factor, name="y")

    return build_program(body, x=(None, 3))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 41])
def test_wrong_at_one_length(size):
    right, wrong = at_length(lambda n: mb.less(x=n, y=0)), at_length(lambda n: mb.equal(x=n, y=size))
    assert check(right, right).equal
    assert check(right, wrong).status == "different"


@pytest.mark.parametrize("size", [41, 64, 100, 256])
def test_wrong_beyond_a_length(size):
    right, wrong = at_length(lambda n: mb.less(x=n, y=0)), at_length(lambda n: mb.greater(x=n, y=size))
    assert check(right, wrong).status == "different"


INVISIBLE = {
    "behind a relu that is always 0": (
        lambda x: mb.relu(x=mb.sub(x=mb.mul(x=mb.tanh(x=x), y=half(1)), y=half(2))),
        lambda x: mb.relu(x=mb.sub(x=mb.mul(x=mb.tanh(x=x), y=half(0.5)), y=half(2)))),
    "at one number": (same, lambda x: mb.add(x=x, y=mb.exp(x=mb.mul(
        x=half(-1), y=mb.square(x=mb.mul(x=mb.sub(x=x, y=half(0.123)), y=half(60000))))))),
}


@pytest.mark.parametrize("name", INVISIBLE)
def test_what_the_page_says_is_not_seen(name):
    right, wrong = INVISIBLE[name]
    assert check(unary(right), unary(wrong)).equal


def test_the_report_says_what_was_sampled():
    report = check(at_length(lambda n: mb.less(x=n, y=0)), at_length(lambda n: mb.less(x=n, y=0)))
    assert report.to_dict()["sampled"] == list(report.sampled)
    assert [each.partition(":")[0] for each in report.sampled[:4]] == ["normal draws", WIDE, SPECIAL, TIES]
    assert report.sampled[-1].startswith("sizes 1, 2, 7")
    for kind in (WIDE, SPECIAL, TIES, "sizes 1, 2, 7"):
        assert kind in str(report)


def test_feeds_that_are_given_are_the_only_ones():
    report = check(unary(same), unary(lambda x: mb.minimum(x=x, y=half(4))), feeds={"x": np.ones((8, 16), half)})
    assert report.equal and report.sampled == ()


def test_ranges_of_the_user_bound_every_feed():
    wrong = unary(lambda x: mb.clip(x=x, alpha=half(-2), beta=half(3)))
    assert check(unary(same), wrong).status == "different"
    for plan in build_adversarial_plans(wrong, lambda name: None, Domain(ranges={"x": (-2.0, 3.0)})):
        assert np.all((plan.feeds["x"] >= -2) & (plan.feeds["x"] <= 3))


def test_a_domain_bounds_every_feed():
    for plan in build_adversarial_plans(unary(same), lambda name: None, Domain(0.25, 30.0)):
        finite = np.abs(plan.feeds["x"][np.isfinite(plan.feeds["x"])].astype(float))
        assert finite.max() <= 30 and finite[finite > 0].min() >= 0.25


def test_nan_may_spread_where_a_promise_says_so():
    spread = unary(lambda x: mb.add(x=x, y=mb.mul(x=mb.reduce_sum(x=x, axes=[-1], keep_dims=True), y=half(0))))
    assert check(unary(same), spread).status == "different"
    assert check(unary(same), spread, Strictness(Exactness.ROUNDING, keeps_nonfinite=False)).equal
    swallowed = unary(nan_swallowed)
    assert check(unary(same), swallowed, Strictness(Exactness.ROUNDING, keeps_nonfinite=False)).status == "different"


def test_kinds_that_have_nothing_to_vary_are_left_out():
    flags = build_program(lambda x: mb.logical_not(x=x, name="y"), x=(3,), dtype=types.bool)
    assert build_adversarial_plans(flags, lambda name: None) == []
    kinds = [plan.adversarial for plan in build_adversarial_plans(gathered(same, 20), lambda name: None)]
    assert kinds == [WIDE, INDICES]


def test_what_runs_long_gets_one_run_less_with_both_halves():
    def body(x):
        for _ in range(8):
            x = mb.tanh(x=x)
        return x

    made = build_adversarial_plans(unary(body, 1024, 1024), lambda name: None)
    assert [plan.adversarial for plan in made] == [WIDE_AND_TIES, SPECIAL]
    first, rest = made[0].feeds["x"][:512].astype(np.float64), made[0].feeds["x"][512:].astype(np.float64)
    assert np.abs(first).max() == 65504 and np.abs(rest).max() < 100
    assert np.any(np.abs(rest) == half(6e-8)) and np.all(rest[-2] == 1.5)


def test_sizes_stay_below_what_an_option_says():
    cumsum = build_program(lambda x: mb.cumsum(x=x, axis=1, name="y"), x=(2, None))
    report = ane.rewrite(cumsum, passes="triangle_cumsum{longest=100}").verify
    assert report.equal and report.sampled[-1].startswith("sizes 1, 2, 7, 100:")


@pytest.mark.parametrize("name", ["by size, of a long axis", "all but the last three of a long axis"])
def test_sizes_stay_above_what_an_option_says(name):
    example = next(each for each in find_rewrite("known_slice")().examples() if each.name == name)
    report = ane.rewrite(example.build(), passes="known_slice{shortest=3}")
    assert report.changed and report.verify.equal, report
    assert report.verify.sampled[-1].startswith("sizes 7:")


def test_wrong_at_the_largest_length_that_an_option_allows():
    right, wrong = at_length(lambda n: mb.less(x=n, y=0)), at_length(lambda n: mb.equal(x=n, y=30))
    assert check(right, wrong, Strictness(Exactness.BITWISE, largest_size=30)).status == "different"
    assert check(right, wrong, Strictness(Exactness.BITWISE, largest_size=29)).equal


def test_wrong_bits_at_fp16_alone():
    remainder = unary(lambda x: mb.mod(x=x, y=half(4)))
    floored = unary(lambda x: mb.sub(x=x, y=mb.mul(x=mb.floor(x=mb.mul(x=x, y=half(0.25))), y=half(4))))
    report = check(remainder, floored, Exactness.BITWISE)  # -6e-8 / 4 is -0 in fp16
    assert {(case.feeds, case.precision) for case in report.cases if not case.passed} == {(TIES, "float16")}
    assert check(remainder, floored, Exactness.ROUNDING).equal


def test_sizes_stay_within_declared_ranges():
    description = Model_pb2.ModelDescription()
    feature = description.input.add()
    feature.name = "x"
    array = feature.type.multiArrayType
    array.dataType = FeatureTypes_pb2.ArrayFeatureType.FLOAT32
    array.shape.extend((8, 3))
    for low, high in ((4, 20), (3, 3)):
        size = array.shapeRange.sizeRanges.add()
        size.lowerBound, size.upperBound = low, high
    made = at_length(lambda n: mb.less(x=n, y=0))
    sizes = {plan.feeds["x"].shape for plan in build_adversarial_plans(made, lambda name: description)}
    assert sizes <= {(n, 3) for n in range(4, 21)} and (7, 3) in sizes


def test_a_size_that_the_model_does_not_take_is_left_out_without_a_word():
    joined = build_program(lambda x: mb.slice_by_size(x=x, begin=[4], size=[3], name="y"), x=(None,))
    report = check(joined, joined)
    assert report.equal and not report.notes and "sizes 7, 257" in str(report)


def test_a_rewrite_is_checked_on_adversarial_feeds_and_says_so():
    report = ane.rewrite(build_program(lambda x: mb.softplus(x=x, name="y"), x=(4, 8)), preset="safe").verify
    assert report.equal and any(each.startswith(WIDE) for each in report.sampled)
    # A fix of what overflows: which values were undefined shows at float16.
    assert {case.precision for case in report.cases if not case.feeds.startswith("seed")} == {"float64", "float16"}
    rounding = ane.rewrite(
        build_program(lambda x: mb.tan(x=x, name="y"), x=(4, 8)), passes="tangent{always=true}"
    ).verify
    assert {case.precision for case in rounding.cases if not case.feeds.startswith("seed")} == {"float64"}


def test_what_was_fed_is_the_same_each_time():
    one, other = (build_adversarial_plans(unary(same), lambda name: None) for _ in range(2))
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a.feeds["x"], b.feeds["x"])


def test_weights_are_no_feeds():
    convolved = build_program(lambda x: mb.conv(x=x, weight=make_weight(4, 2, 5), name="y"), x=(1, 2, 32))
    report = check(convolved, convolved)
    assert report.equal and report.equal_bits


@pytest.mark.parametrize(("passes", "made"), [
    ("triangle_cumsum{form=triangle}", lambda: build_program(
        lambda x: mb.cumsum(x=x, axis=1, exclusive=True, name="y"), x=(2, 12))),
    ("factor_conv_stride", lambda: build_program(
        lambda x: mb.conv(x=x, weight=make_weight(4, 3, 7), strides=[5], name="y"), x=(1, 3, 27))),
    ("finite_mask", lambda: build_program(
        lambda x: mb.softmax(x=mb.add(x=x, y=np.array([0, -np.inf, 0, 0], half)), name="y"), x=(3, 4))),
    ("modulo_by_floor{periods=3}", lambda: build_program(lambda x: mb.mod(x=x, y=half(6.28), name="y"), x=(4, 8))),
    ("stable_log_softmax", lambda: build_program(
        lambda x: mb.sub(x=x, y=mb.reduce_log_sum_exp(x=x, axes=[-1], keep_dims=True), name="y"), x=(4, 8))),
    ("hyperbolic", lambda: build_program(lambda x: mb.sinh(x=x, name="y"), x=(4, 8))),
])
def test_what_a_rule_documents_is_no_difference(passes, made):
    report = ane.rewrite(made(), passes=passes)
    assert report.changed and report.verify.equal, report


def test_hyperbolic_sines_are_allowed_what_is_promised():
    for seed in range(40):
        shape = (1 + seed % 3, 2 + seed % 7)
        report = ane.rewrite(build_program(lambda x: mb.sinh(x=x, name="y"), x=shape), passes="hyperbolic", seeds=3)
        assert report.verify.equal, (shape, report.verify)


def test_floats_beside_indices_are_ordinary():
    """A run on extreme indices says nothing of NaN: other floats stay normal draws."""
    @mb.program(input_specs=[mb.TensorSpec((4, 64), types.fp16), mb.TensorSpec((3,), types.int32)],
                opset_version=ct.target.iOS17)
    def made(x, i):
        return mb.gather(x=x, indices=i, axis=0, validate_indices=False, name="y")

    plans = [plan for plan in build_adversarial_plans(made, lambda name: None) if plan.adversarial == INDICES]
    assert plans and all(np.isfinite(plan.feeds["x"]).all() for plan in plans)


def test_a_row_of_zeros_is_among_the_ties():
    made = unary(same, 8, 16)
    (ties,) = [plan.feeds["x"] for plan in build_adversarial_plans(made, lambda name: None) if plan.adversarial == TIES]
    assert not ties[5].any() and len(set(ties[6])) == 1 and ties[7].sum() == 1 and len(set(ties[0])) > 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [
    name if place % 8 == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(
        name for name, rule in get_all_rewrites().items() if not rule.interface and not rule.measures)])
def test_what_rewrites_make_of_their_examples_passes(name):
    def spelt(options):
        listed = ",".join(f"{key}={str(value).lower()}" for key, value in options.items())
        return f"{name}{{{listed}}}" if options else name

    fired = [example for example in find_rewrite(name).configured().examples() if example.reason is None]
    for example in fired:
        report = ane.rewrite(example.build(), passes=spelt(example.options), target="m4", max_growth=None)
        assert report.status != "not verified", (example.name, str(report.verify))


def build_masked_attention():
    mask = np.triu(np.full((6, 6), -np.inf, np.float16), 1)

    def body(x, z):
        scores = mb.add(x=mb.matmul(x=x, y=z, transpose_y=True), y=mask)
        return mb.softmax(x=scores, axis=-1, name="y")

    return build_program(body, x=(6, 4), z=(6, 4))


def test_both_comparisons_say_what_extreme_feeds_they_judge():
    """rewrite knows the inputs for which finite_mask holds; verify of the two results does not, and says what to do."""
    before = build_masked_attention()
    report = ane.rewrite(before, passes="finite_mask", target="m4")
    assert report.verify.equal and any(
        note.startswith("extreme feeds were limited to inputs up to ") for note in report.verify.notes)
    again = ane.verify(before, report.package, fixes_nonfinite=True)
    assert again.status == "different"
    (note,) = [note for note in again.notes if "occurs on extreme feeds only" in note]
    assert "feeds= compares on your own values" in note
    feeds = {name: np.random.default_rng(0).standard_normal((6, 4)) for name in ("x", "z")}
    assert ane.verify(before, report.package, feeds=feeds, fixes_nonfinite=True).equal


@pytest.mark.parametrize("shape", [(1, 8, 8, 8), (1, 1, 16, 16), (2, 4, 8, 8), (4, 3, 8, 8)])
@pytest.mark.parametrize("level", [-100.0, -1e4])
def test_a_finite_pad_of_a_max_pool_is_seen(shape, level):
    """A pool has minus infinity around the image: where a window holds less than the pad, the two differ."""
    def pooled(x):
        return mb.max_pool(x=x, kernel_sizes=[3, 3], strides=[1, 1], pad_type="custom", pad=[1, 1, 1, 1], name="y")

    def padded(x):
        wide = mb.pad(x=x, pad=[1, 1, 1, 1], mode="constant", constant_val=np.float32(level))
        return mb.max_pool(x=wide, kernel_sizes=[3, 3], strides=[1, 1], pad_type="valid", name="y")

    one, other = (build_program(body, dtype=types.fp32, x=shape) for body in (pooled, padded))
    assert compare_programs(one, other).status == "different"
    assert compare_programs(one, build_program(pooled, dtype=types.fp32, x=shape)).equal


INNER, OUTER = (np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
                for seed, shape in ((1, (4, 4, 3, 3)), (2, (8, 4, 1, 1))))


def two_convs(x):
    return mb.relu(x=mb.conv(x=mb.conv(x=x, weight=INNER, pad_type="same"), weight=OUTER), name="y")


def one_conv(x):
    weight = np.einsum("oi,ikhw->okhw", np.float64(OUTER[:, :, 0, 0]), np.float64(INNER))
    return mb.relu(x=mb.conv(x=x, weight=weight.astype(np.float32), pad_type="same"), name="y")


def test_sums_of_infinities_are_judged_without_them():
    """Infinities of both signs make a NaN in one order of sums and an infinity in another, which a relu makes 0."""
    two, one = (build_program(body, dtype=types.fp32, x=(1, 4, 8, 8)) for body in (two_convs, one_conv))
    judged = Strictness(Exactness.ROUNDING, keeps_nonfinite=False, moves=1e-6)
    for pair in ((two, one), (one, two)):
        report = compare_programs(*pair, exactness=judged)
        assert report.equal, str(report)
    swallowed = build_program(
        lambda x: one_conv(mb.select(cond=mb.equal(x=x, y=x), a=x, b=np.float32(0))), dtype=types.fp32, x=(1, 4, 8, 8))
    assert compare_programs(two, swallowed, exactness=judged).status == "different"
