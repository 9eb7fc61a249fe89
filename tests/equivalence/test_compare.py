"""Two sets of outputs are judged by what the rewrites between them promised; there is no tolerance to set."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.equivalence.comparison import (
    FLOAT64_TOLERANCE,
    Accuracy,
    OutputDifference,
    Strictness,
    compare_outputs,
    to_arrays,
)
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program

BITWISE, ROUNDING = Exactness.BITWISE, Exactness.ROUNDING
TRUTH = np.random.default_rng(0).standard_normal((4, 8))
HALF = TRUTH.astype(np.float16)
ULP = float(np.spacing(np.float16(np.abs(TRUTH).max())))
ERROR = float(np.abs(HALF.astype(np.float64) - TRUTH).max())


def judge(old, new, exactness=ROUNDING, truth=None) -> OutputDifference:
    (found,) = compare_outputs({"y": old}, {"y": new}, exactness, None if truth is None else {"y": truth})
    return found


def put(array, value, at=(1, 2)):
    changed = array.copy()
    changed[at] = value
    return changed


def test_the_element_that_fails_is_described_not_a_larger_difference_that_is_allowed():
    """A step of a quantization may move where the rewrites declare it, and not beside."""
    moved = np.zeros(TRUTH.shape)
    moved[0, 0] = 1.0
    new = put(put(TRUTH, TRUTH[0, 0] + 1.5, (0, 0)), TRUTH[3, 5] + 0.25, (3, 5))
    (found,) = compare_outputs({"y": TRUTH}, {"y": new}, ROUNDING, moved={"y": moved})
    assert not found.passed and found.index == (3, 5) and found.absolute > found.allowed
    assert "differs by 0.25" in str(found)


@pytest.mark.parametrize("exactness", Exactness)
@pytest.mark.parametrize("values", [[1.0, -2.0], [0.0, -0.0], [np.inf, -np.inf], [np.nan, 1.0]])
def test_the_same_bits_are_equal(exactness, values):
    found = judge(np.array(values, np.float16), np.array(values, np.float16), exactness)
    assert found.equal_bits and found.passed and str(found) == "y: the same bits"


def test_any_nan_is_any_nan():
    one, other = (np.array([bits, 0x3C00], np.uint16).view(np.float16) for bits in (0x7E00, 0xFE01))
    assert judge(one, other, BITWISE).equal_bits


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_zeros_of_different_sign_differ(dtype):
    found = judge(np.array([1, 0.0], dtype), np.array([1, -0.0], dtype), BITWISE)
    assert not found.equal_bits and not found.passed and found.index == (1,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_unit_in_the_last_place_is_not_the_same_bits(dtype):
    old = np.ones((2, 3), dtype)
    found = judge(old, put(old, np.nextafter(dtype(1), dtype(2))), BITWISE)
    assert not found.passed and found.ulps == 1.0 and found.index == (1, 2) and found.allowed == 0.0


@pytest.mark.parametrize("new", [np.nan, np.inf, -1.0])
def test_bitwise_sees_what_is_not_finite(new):
    assert not judge(np.ones(3), put(np.ones(3), new, 1), BITWISE).passed


WRONG = {
    "one element": lambda x: put(x, x[1, 2] + 0.25),
    "halved": lambda x: x * x.dtype.type(0.5),
    "negated": lambda x: -x,
    "one sign": lambda x: put(x, -x[1, 2]),
    "zeros": np.zeros_like,
    "infinite": lambda x: put(x, np.inf),
    "nan": lambda x: put(x, np.nan),
    "all nan": lambda x: np.full_like(x, np.nan),
    "reversed": lambda x: x[::-1].copy(),
    "shifted": lambda x: np.roll(x, 1, axis=1),
    "bias lost": lambda x: x - x.dtype.type(0.0625),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("old", "truth"), [(TRUTH, None), (HALF, TRUTH)], ids=["float64", "float16"])
def test_what_is_wrong_fails_as_rounding_too(old, truth, wrong):
    found = judge(old, wrong(old), ROUNDING, truth)
    assert not found.passed and not found.equal_bits


@pytest.mark.parametrize("new", [np.zeros((4, 4)), np.zeros((4, 8, 1)), np.zeros(32), np.float64(0)])
def test_another_shape_fails(new):
    found = judge(TRUTH, new)
    assert not found.passed and found.reason == f"was float64[4, 8] and is float64{list(np.shape(new))}"


def test_another_dtype_fails():
    assert judge(HALF, HALF.astype(np.float32)).reason == "was float16[4, 8] and is float32[4, 8]"
    assert not judge(HALF, HALF.astype(np.float32)).passed


def test_an_output_that_is_missing_fails():
    (found,) = compare_outputs({"y": TRUTH}, {"z": TRUTH}, ROUNDING)
    assert not found.passed and str(found) == "y: is missing after"


def test_integers_and_booleans_have_no_rounding():
    for old, new in ((np.array([1, 2]), np.array([1, 3])), (np.array([True]), np.array([False]))):
        assert not judge(old, new).passed
        assert judge(old, old.copy()).equal_bits


def test_labels_are_compared_as_they_are():
    found = judge(np.asarray("cat"), np.asarray("dog"))
    assert not found.passed and found.reason == "was 'cat' and is 'dog'"
    assert not judge(np.asarray("cat"), np.asarray("horse")).passed
    assert judge(np.asarray("cat"), np.asarray("cat")).equal_bits
    arrays = to_arrays({"label": "cat", "odds": {"cat": 0.75, "dog": 0.25}})
    assert {name: value.tolist() for name, value in arrays.items()} == {
        "label": "cat",
        "odds": [0.75, 0.25],
        "odds labels": ["cat", "dog"],
    }


def test_at_float64_a_share_of_the_largest_is_allowed():
    scale = np.abs(TRUTH).max()
    assert judge(TRUTH, put(TRUTH, TRUTH[1, 2] + 0.9 * FLOAT64_TOLERANCE * scale)).passed
    assert not judge(TRUTH, put(TRUTH, TRUTH[1, 2] + 1.1 * FLOAT64_TOLERANCE * scale)).passed


@pytest.mark.parametrize(("new", "passes"), [(1.8e-213, True), (1.1e-16, True), (1e-12, False), (1.0, False)])
def test_what_is_lost_beside_a_1_is_allowed_where_all_else_overflowed(new, passes):
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True)
    (found,) = compare_outputs({"y": np.array([np.inf, 0.0])}, {"y": np.array([710.0, new])}, promised)
    assert found.passed is passes


@pytest.mark.parametrize(("new", "passes"), [(-3.3e-16, True), (1e-12, False)])
def test_what_is_left_of_a_sum_that_cancels_is_rounding(new, passes):
    """The sum of normalized values is 0; its rounding depends on the order."""
    (found,) = compare_outputs({"y": np.array([-2.1e-15])}, {"y": np.array([new])}, Exactness.ROUNDING)
    assert found.passed is passes


@pytest.mark.parametrize(("truth", "passes"), [(1e6, True), (-1e6, False), (100.0, False), (np.nan, True)])
def test_a_nan_that_is_fixed_may_overflow_where_the_truth_does(truth, passes):
    promised = Strictness(Exactness.ROUNDING, fixes_nonfinite=True)
    for dtype in (np.float16, np.float32):  # an output that is cast to fp32 was computed in fp16
        old, new = np.array([np.nan, 1.0], dtype), np.array([np.inf, 1.0], dtype)
        (found,) = compare_outputs({"y": old}, {"y": new}, promised, truth={"y": np.array([truth, 1.0])})
        assert found.passed is passes


def test_fp16_values_cast_to_fp32_are_judged_in_units_of_fp16():
    old, unit = HALF.astype(np.float32), float(np.spacing(np.float16(np.abs(TRUTH).max())))
    near, far = put(old, old[1, 2] + 0.9 * unit), put(old, old[1, 2] + 6 * unit)
    for new, widened, passes in ((near, {"y"}, True), (far, {"y"}, False)):
        (found,) = compare_outputs({"y": old}, {"y": new}, ROUNDING, {"y": old.astype(np.float64)}, widened=widened)
        assert found.passed is passes
    (found,) = compare_outputs({"y": old}, {"y": near}, ROUNDING, {"y": old.astype(np.float64)})
    assert not found.passed


def test_programs_in_fp16_with_fp32_outputs_are_judged_in_units_of_fp16():
    """Times 3, divided by 3: exact at full precision, and rounded twice in fp16."""
    def build(detour):
        def body(x):
            y = mb.relu(x=mb.cast(x=x, dtype="fp16"))
            y = mb.real_div(x=mb.mul(x=y, y=np.float16(3)), y=np.float16(3)) if detour else y
            return mb.cast(x=y, dtype="fp32", name="y")

        return build_program(body, dtype=types.fp32, x=(4, 64))

    report = compare_programs(build(False), build(True), precisions=("float64", "float16"))
    typed = [case for case in report.cases if case.precision == "float16"]
    assert report.equal and typed and not all(output.equal_bits for case in typed for output in case.outputs)


def test_a_typed_run_may_be_as_far_from_the_truth_as_four_times_before_and_a_unit():
    noisy = put(HALF, np.nextafter(HALF[1, 2], np.float16(9)))
    found = judge(HALF, noisy, ROUNDING, TRUTH)
    assert found.passed and not found.equal_bits and "within" in str(found)
    assert found.allowed == pytest.approx(4 * ERROR + ULP)
    beyond = np.float16(TRUTH[1, 2] + 4 * ERROR + 3 * ULP)
    found = judge(HALF, put(HALF, beyond), ROUNDING, TRUTH)
    assert not found.passed and found.index == (1, 2) and "beyond" in str(found)


def test_the_error_is_measured_from_the_truth_not_from_before():
    """Nearer to the truth than before is never worse, however far from before."""
    coarse = np.round(TRUTH, 1).astype(np.float16)
    assert judge(coarse, HALF, ROUNDING, TRUTH).passed
    assert not judge(HALF, coarse, ROUNDING, TRUTH).passed


BEYOND = np.array([70000.0, -70000.0, 1.0])
OVERFLOWED = np.array([np.inf, -np.inf, 1.0])


def test_what_overflowed_before_may_be_right_or_overflow_the_same_way():
    assert judge(OVERFLOWED.astype(np.float16), OVERFLOWED.astype(np.float16), ROUNDING, BEYOND).passed
    assert judge(OVERFLOWED.astype(np.float32), BEYOND.astype(np.float32), ROUNDING, BEYOND).passed


@pytest.mark.parametrize("wrong", [[-np.inf, -np.inf, 1], [np.nan, -np.inf, 1], [-1.0, -np.inf, 1], [0.0, 0.0, 1]])
def test_what_overflowed_before_may_not_become_anything(wrong):
    assert not judge(OVERFLOWED.astype(np.float16), np.array(wrong, np.float16), ROUNDING, BEYOND).passed


@pytest.mark.parametrize("largest", [65504.0, 65519.0, 70000.0])
def test_one_value_at_the_end_of_the_range_does_not_excuse_the_others(largest):
    truth = np.array([largest, 1.0])
    old = np.array([largest if largest < 65520 else np.inf, 1.0], np.float16)
    new = put(old, -30000, 1)
    found = judge(old, new, ROUNDING, truth)
    assert not found.passed and np.isfinite(found.allowed)


def test_infinities_and_nan_of_the_algebra_stay():
    truth = np.array([np.inf, np.nan, 1.0])
    old = truth.astype(np.float16)
    assert judge(old, put(old, np.nextafter(np.float16(1), np.float16(2)), 2), ROUNDING, truth).passed
    for place, value in ((0, 1.0), (0, -np.inf), (0, np.nan), (1, 1.0), (1, np.inf)):
        assert not judge(old, put(old, value, place), ROUNDING, truth).passed, (place, value)


def test_nothing_to_compare_is_equal():
    assert judge(np.zeros((0, 3)), np.zeros((0, 3))).equal_bits


@pytest.mark.law
@given(at=st.integers(0, 31), sign=st.sampled_from([-1, 1]), factor=st.floats(1.001, 1e6), typed=st.booleans())
def test_a_perturbation_beyond_the_allowed_always_fails(at, sign, factor, typed):
    index = np.unravel_index(at, TRUTH.shape)
    old, truth = (HALF, TRUTH) if typed else (TRUTH, None)
    allowed = 4 * ERROR + ULP if typed else FLOAT64_TOLERANCE * np.abs(TRUTH).max()
    moved = TRUTH[index] + sign * allowed * factor
    if typed:  # away from the truth, to the next number that fp16 has
        moved = np.float16(moved)
        if abs(float(moved) - TRUTH[index]) <= allowed:
            moved = np.nextafter(moved, np.float16(sign * np.inf))
    found = judge(old, put(old, moved, index), ROUNDING, truth)
    assert not found.passed
    assert found.index == tuple(index)


@pytest.mark.law
@given(at=st.integers(0, 31), sign=st.sampled_from([-1, 1]), share=st.floats(0, 0.999))
def test_a_perturbation_within_the_allowed_always_passes_as_rounding_and_never_as_bitwise(at, sign, share):
    index = np.unravel_index(at, TRUTH.shape)
    new = put(TRUTH, TRUTH[index] + sign * share * FLOAT64_TOLERANCE * np.abs(TRUTH).max(), index)
    assert judge(TRUTH, new).passed
    assert judge(TRUTH, new, BITWISE).passed == bool(new[index] == TRUTH[index])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([0.0, 1.0], [1.0, 1.0]),
        ([np.inf, 1.0], [1.0, 1.0]),
        ([1.0, 2.0], [np.nan, 2.0]),
        ([np.nan], [1.0]),
        ([0.0], [-0.0]),
    ],
)
def test_a_difference_is_json(old, new):
    """Plain JSON has no NaN and no Infinity; readers of other languages stop at them."""
    text = json.dumps(judge(np.array(old), np.array(new)).to_dict())
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))


def test_limits_may_be_numbers_of_numpy():
    limits = Accuracy(atol=np.float32(0.5), snr=np.int64(3)).limits()
    assert json.loads(json.dumps(limits)) == {"atol": 0.5, "rtol": None, "snr": 3, "cosine": None}
