"""What a rewrite declares of an op it replaced is carried through the ops behind it, and hides no other difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.equivalence import equivalence, propagate
from mil_ane_passes.equivalence.comparison import Strictness, compare_outputs
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.propagate import MOVED, RAISED, ROUNDED
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pass_trace import Change
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime.departure import TRIALS

BOTH = ("float64", "float16")
BOXES = np.array([[0.59, 2.21, 2.54, 2.61], [1.5, 1.79, 1.97, 2.66]], np.float32)
CROP = Change("main", "crop_resize", "crop", moves=2.0**-10, moves_of="operands")
MOVES = Strictness(Exactness.ROUNDING, moves=2.0**-10, changes=(CROP,))


def cropped(behind=lambda y: mb.identity(x=y, name="y"), factor=1.0):
    def body(x):
        y = mb.crop_resize(x=x, boxes=BOXES, box_indices=np.zeros(2, np.int32), target_height=6, target_width=3,
                           sampling_mode="OFFSET_CORNERS", name="crop")
        return behind(y if factor == 1 else mb.mul(x=y, y=np.float16(factor)))

    return build_program(body, x=(1, 1, 4, 4))


def wrapped(y):
    return mb.mod(x=mb.mul(x=y, y=np.float16(100)), y=np.float16(4), name="y")


def largest(y):
    return mb.reduce_argmax(x=mb.reshape(x=y, shape=[2, 18]), axis=1, name="y")


def rounds(y):
    return mb.cast(x=mb.mul(x=y, y=np.float16(100)), dtype="int32", name="y")


def normed(axes=(4,)):
    return build_program(lambda x: mb.layer_norm(
        x=mb.conv(x=x, weight=make_weight(1, 1, 1, 3, 1), bias=np.array([0.055], np.float16), strides=[5, 1, 7],
                  pad_type="custom", pad=[2, 1, 1, 2, 3, 0], dilations=[1, 1, 2]),
        axes=list(axes), epsilon=np.float32(1e-12), name="y"), x=(3, 1, 7, 8, 7))


def root(behind):
    """`behind` of x and the reciprocal root of the squares of what a conv gives, with an epsilon of 1e-12."""
    def body(x):
        x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
        total = mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True)
        return mb.identity(x=behind(x, mb.rsqrt(x=total, epsilon=np.float32(1e-12), name="root")), name="y")

    return build_program(body, x=(6, 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("behind", [lambda y: mb.identity(x=y, name="y"), wrapped, largest, rounds],
                         ids=["alone", "wrapped", "argmax", "integers"])
def test_crops_are_right_whatever_stands_behind_them(behind):
    report = ane.rewrite(cropped(behind), passes="crop_resize_by_slices")
    assert report.status == "in memory", str(report)


def test_norms_of_what_hardly_varies_are_right():
    report = ane.rewrite(normed(), passes="representable_epsilon")
    assert report.status == "in memory", str(report)
    assert RAISED in report.verify.notes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factor", [1 + 2.0**-7, 1 - 2.0**-7])
@pytest.mark.parametrize("behind", [lambda y: mb.identity(x=y, name="y"), wrapped, rounds],
                         ids=["alone", "wrapped", "integers"])
def test_crops_that_are_further_off_than_declared_are_different(behind, factor):
    assert held(cropped(behind), cropped(behind, factor), MOVES).status == "different"
    right = cropped(behind)
    assert apply_rewrite(find_rewrite("crop_resize_by_slices").configured(), right).fired
    report = held(cropped(behind), right, MOVES)
    assert report.equal and (behind is not wrapped or MOVED in report.notes), str(report)


def test_a_change_of_another_op_is_none_of_this_one():
    right = cropped(wrapped)
    apply_rewrite(find_rewrite("crop_resize_by_slices").configured(), right)
    for change in (Change("main", "crop_resize", "other", 2.0**-10, "operands"),
                   Change("main", "resize", "crop", 2.0**-10, "operands"),
                   Change("other", "crop_resize", "crop", 2.0**-10, "operands")):
        promised = Strictness(Exactness.ROUNDING, moves=2.0**-10, changes=(change,))
        assert held(cropped(wrapped), right, promised).status == "different", change


@pytest.mark.parametrize("epsilon", [1e-4, 1e-6, 2.0**-22])
def test_epsilons_raised_further_are_different(epsilon):
    before, after = normed(), normed()
    change = Change("main", "layer_norm", "y", raises=True)
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, moves=2.0**-11, changes=(change,))
    raise_epsilon(after, epsilon)
    assert held(before, after, promised).status == "different"
    raise_epsilon(after, 2.0**-24)
    assert held(before, after, promised).equal


@pytest.mark.parametrize(("behind", "equal"), [
    (lambda x, y: mb.mul(x=x, y=y), True), (lambda x, y: mb.mul(x=mb.cos(x=x), y=y), False),
    (lambda x, y: mb.identity(x=y), False), (lambda x, y: mb.mul(x=y, y=np.float16(0.25)), False),
], ids=["what was squared", "another value", "the root", "a constant"])
def test_an_epsilon_that_results_at_zero_are_made_of_may_not_be_raised(behind, equal):
    before = root(behind)
    after = clone_program(before)
    raise_epsilon(after, 2.0**-24, "rsqrt")
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, moves=2.0**-11,
                          changes=(Change("main", "rsqrt", "root", raises=True),))
    assert held(before, after, promised).equal == equal


def test_what_moved_is_allowed_twice_and_no_more():
    old, moved = {"y": np.array([1.0, 2.0])}, {"y": np.array([0.25, 0.0])}

    def passed(*new):
        return compare_outputs(old, {"y": np.array(new)}, Exactness.ROUNDING, moved=moved)[0].passed

    assert passed(1.5, 2.0) and not passed(1.51, 2.0) and not passed(1.0, 2.01)
    whole = compare_outputs({"y": np.array([3, 5])}, {"y": np.array([4, 5])}, Exactness.ROUNDING,
                            moved={"y": np.array([1.0, 0.0])})
    assert whole[0].passed
    assert not compare_outputs({"y": np.array([3, 5])}, {"y": np.array([3, 4])}, Exactness.ROUNDING,
                               moved={"y": np.array([1.0, 0.0])})[0].passed


def held(before, after, promised):
    return compare_programs(before, after, precisions=BOTH, exactness=promised, locate=False)


def raise_epsilon(built, to, kind="layer_norm"):
    """Give the op of that kind another epsilon."""
    function = built.functions["main"]
    (op,) = function.find_ops(op_type=kind)
    with function:
        epsilon = mb.const(val=np.float32(to), before_op=op)
        made = getattr(mb, kind)(before_op=op, epsilon=epsilon, **{
            name: var for name, var in op.inputs.items() if name != "epsilon" and var is not None})
        function.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=made,
                                              no_check_var_types=True, force_replace=True)
    name = op.outputs[0].name
    function.remove_ops([op])
    made.name = name


def rewritten(built, passes):
    report = ane.rewrite(built, passes=passes)
    return report.status, report.verify


def test_remainders_of_what_fp16_does_not_hold_are_not_judged():
    """100 times an extreme element is beyond fp16: only float64 has a remainder of it."""
    status, verify = rewritten(build_program(lambda x: mb.mod(
        x=mb.mul(x=x, y=np.float16(100)), y=np.float16(10), name="y"), x=(3,)), "modulo_by_floor")
    assert status == "in memory" and MOVED in verify.notes, str(verify)


@pytest.mark.parametrize("added", [5, 0.5])
def test_remainders_of_what_fp16_holds_are_judged_beside_them(added):
    def made(less):
        return build_program(lambda x: mb.mod(
            x=mb.sub(x=mb.mul(x=x, y=np.float16(100)), y=np.float16(less)), y=np.float16(10), name="y"), x=(3,))

    reaches = Strictness(Exactness.BITWISE, changes=(Change("main", "mod", "y", reach=65504.0),))
    assert held(made(0), made(added), reaches).status == "different"


def test_rounding_before_a_remainder_may_wrap_it_round():
    """The logarithm of a softmax over equal numbers of one row is 0, or some 1e-16 below."""
    def body(x):
        x = mb.mul(x=mb.pad(x=x, pad=[3, 1], mode="constant", constant_val=np.float16(1)), y=np.float16(20))
        less = mb.reduce_log_sum_exp(x=x, axes=[1], keep_dims=True)
        return mb.mod(x=mb.sub(x=x, y=less), y=np.float16(2), name="y")

    status, verify = rewritten(build_program(body, x=(16, 4, 5)), "stable_log_softmax")
    assert status == "in memory", str(verify)


def test_logarithms_of_what_underflows_at_full_precision_are_not_judged():
    """exp(-741) is subnormal at float64, and keeps a few bits only."""
    built = build_program(
        lambda x: mb.log(x=mb.softmax(x=mb.mul(x=x, y=np.float16(20)), axis=2), name="y"), x=(2, 4, 6, 6)
    )
    before, change = clone_program(built), Change("main", "log", "y", 2.0**-40)
    assert apply_rewrite(find_rewrite("stable_log_softmax").configured(), built).fired
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, within=(0.0, 40.0), keeps_nonfinite=False)
    x = np.zeros((2, 4, 6, 6), np.float16)
    x[:, :, 0], x[:, :, 1] = 37, np.float16(-0.1)
    feeds = {"x": x}
    assert compare_programs(before, built, precisions=BOTH, exactness=promised, feeds=feeds).status == "different"
    propagated = replace(promised, changes=(change,))
    assert compare_programs(before, built, precisions=BOTH, exactness=propagated, feeds=feeds).equal


@pytest.mark.parametrize("behind", [False, True], ids=["beside", "behind"])
def test_sums_beside_a_fix_are_held_to_what_they_are_held_to_alone(behind):
    """Only the fix asks for extreme values at float16; partial sums of those overflow."""
    def body(x):
        total = mb.cumsum(x=x, axis=1, exclusive=True, reverse=True, name="total")
        return [mb.identity(x=total, name="y"), mb.softplus(x=total if behind else x, name="z")]

    status, verify = rewritten(build_program(body, x=(2, 300)), "triangle_cumsum,stable_softplus")
    assert status == "in memory", str(verify)


def test_sums_that_are_wrong_are_found_beside_a_fix():
    def made(factor):
        return build_program(lambda x: [
            mb.mul(x=mb.cumsum(x=x, axis=1, name="total"), y=np.float16(factor), name="y"),
            mb.softplus(x=x, name="z")], x=(2, 30))

    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, changes=(Change("main", "cumsum", "total", 2.0**-40,
                                                                          rounds=True),))
    assert held(made(1), made(1), promised).equal
    assert held(made(1), made(1.001), promised).status == "different"


@pytest.mark.parametrize("seen", [True, False], ids=["softmax is an output", "it is none"])
@pytest.mark.parametrize("kind", ["argmax", "cast there and back"])
def test_what_is_made_of_nan_is_that_of_the_limit(kind, seen):
    def made(low, turned=1):
        def body(x, m):
            shut = mb.sub(x=np.float16(1), y=mb.cast(x=mb.greater(x=m, y=np.float16(0)), dtype="fp16"))
            soft = mb.softmax(x=mb.add(x=x, y=mb.mul(x=shut, y=np.float16(low))), name="soft")
            whole = mb.mul(x=mb.round(x=soft), y=np.float16(turned))
            if kind == "argmax":
                made = mb.reduce_argmax(x=whole, axis=0, name="y")
            else:
                made = mb.cast(x=mb.cast(x=mb.mul(x=mb.add(x=soft, y=np.float16(turned)), y=np.float16(3)),
                                         dtype="int32"), dtype="fp16", name="y")
            return [made, soft] if seen else made

        return build_program(body, x=(2, 2), m=(2,))

    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, within=(0.0, 30.0))
    assert held(made(-np.inf), made(-1e4), promised).equal
    assert held(made(-np.inf), made(-1e4), Exactness.ROUNDING).status == "different"
    assert held(made(-np.inf), made(-1e4, -1), promised).status == "different"


def test_typed_integers_may_be_those_at_full_precision():
    def passed(old, new, truth):
        (found,) = compare_outputs({"y": np.array([old])}, {"y": np.array([new])}, Exactness.ROUNDING,
                                   {"y": np.array([truth])})
        return found.passed

    assert passed(1, 2, 2) and passed(1, 1, 2) and not passed(1, 3, 2)


def test_results_that_lie_beyond_what_a_rewrite_declares_prove_nothing():
    """Nothing is promised of remainders of more than 65504: where that is all of an output, whatever stands behind."""
    def remainder(added):
        def body(x):
            y = mb.add(x=mb.square(x=x), y=np.float16(1))
            for _ in range(2):
                y = mb.mul(x=y, y=np.float16(1000))
            return mb.add(x=mb.mod(x=y, y=np.float16(4), name="rest"), y=np.float16(added), name="y")

        return build_program(body, x=(4, 8))

    promised = Strictness(Exactness.BITWISE, changes=(Change("main", "mod", "rest", reach=65504.0),))
    report = held(remainder(1), remainder(1000), promised)
    assert report.status == "not verified"
    assert report.reason.startswith("every element of the output 'y' of function 'main' was beyond what")


def softplus(added=0.0, behind=lambda x, y: mb.mul(x=x, y=y)):
    """The logarithm of 1 + exp(x), which is rounded next to 1 where x is far below 0, and what `behind` makes of it."""
    def body(x):
        y = mb.log(x=mb.exp(x=x), epsilon=np.float16(1), name="soft")
        return behind(x, mb.add(x=y, y=np.float16(added)) if added else y)

    return build_program(lambda x: mb.identity(x=body(mb.mul(x=x, y=np.float16(30))), name="y"), x=(1,))


@pytest.mark.parametrize(("passes", "behind"), [
    ("stable_softplus", lambda x, y: mb.mul(x=x, y=y)), ("stable_mish", lambda x, y: mb.mul(x=mb.tanh(x=y), y=x)),
], ids=["softplus", "mish"])
def test_a_rounding_next_to_1_is_allowed_behind_what_enlarges_it(passes, behind):
    report = ane.rewrite(softplus(behind=behind), passes=passes, feeds={"x": np.array([-1.194], np.float16)})
    assert report.status == "in memory", str(report)


def test_more_than_a_rounding_next_to_1_is_different():
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True, changes=(Change("main", "log", "soft", 2.0**-40),))
    feeds = {"x": np.array([-1.194], np.float16)}
    for added, equal in ((0.0, True), (2.0**-24, False)):
        report = compare_programs(softplus(), softplus(added), precisions=BOTH, exactness=promised, feeds=feeds)
        assert report.equal == equal, str(report)


def small_part(factor=1.0, offset=0.0):
    """A small element of a crop between large ones; what is behind it returns nothing of the large ones."""
    def body(x):
        y = mb.crop_resize(x=x, boxes=np.array([[0, 0.25, 0, 2.25]], np.float32), box_indices=np.zeros(1, np.int32),
                           target_height=1, target_width=3, sampling_mode="ALIGN_CORNERS", name="crop")
        y = mb.mul(x=y, y=np.float16(factor)) if factor != 1 else y
        y = mb.sub(x=mb.add(x=y, y=np.float16(offset)), y=np.float16(offset)) if offset else y
        return mb.relu(x=y, name="y")

    return build_program(body, x=(1, 1, 1, 4))


def test_the_rounding_of_an_op_is_allowed_behind_what_leaves_its_small_results_only():
    report = ane.rewrite(small_part(), passes="crop_resize_by_slices")
    assert report.status == "in memory", str(report)
    assert ROUNDED in report.verify.notes


@pytest.mark.parametrize("wrong", [{"factor": 1 + 2.0**-7}, {"offset": 64.0}], ids=["factor", "typed runs only"])
def test_more_than_the_rounding_of_an_op_is_different(wrong):
    promised = Strictness(Exactness.ROUNDING, changes=(Change("main", "crop_resize", "crop", 2.0**-40, rounds=True),))
    assert held(small_part(), small_part(**wrong), promised).status == "different"
    right = small_part()
    assert apply_rewrite(find_rewrite("crop_resize_by_slices").configured(), right).fired
    assert held(small_part(), right, promised).equal


@pytest.fixture
def executed(monkeypatch):
    """The functions of which the source is run again, one entry for each run."""
    runs = []

    def record(original):
        def execute(program, plans, *arguments, **options):
            runs.extend(plan.function for plan in plans)
            return original(program, plans, *arguments, **options)

        return execute

    for module in (propagate, equivalence):
        monkeypatch.setattr(module, "execute_plans", record(module.execute_plans))
    return runs


def test_trials_end_when_the_run_passes(executed):
    right = cropped(wrapped)
    apply_rewrite(find_rewrite("crop_resize_by_slices").configured(), right)
    report = compare_programs(cropped(wrapped), right, seeds=1, exactness=MOVES)
    assert report.equal and MOVED in report.notes, str(report)
    assert 2 <= len(executed) < TRIALS


def test_trials_end_where_none_explains_that_a_number_became_infinite(executed):
    def power(y):
        return mb.mul(x=y, y=np.float16(4e4), name="y")

    right = cropped(lambda y: mb.mul(x=mb.mul(x=y, y=np.float16(6e4)), y=np.float16(6e4), name="y"))
    report = compare_programs(cropped(power), right, seeds=1, precisions=BOTH, exactness=MOVES, locate=False)
    assert report.status == "different" and "inf" in str(report)
    assert len(executed) < TRIALS
