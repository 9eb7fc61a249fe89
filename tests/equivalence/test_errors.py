"""The largest error in one number, and programs whose ends hold floats of different widths."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.equivalence.interface_widths import InterfaceWidths, find_interface_widths
from mil_ane_passes.equivalence.output_errors import compute_largest_error
from mil_ane_passes.equivalence.range_measurement import measure_ranges
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.budget import share_budget
from mil_ane_passes.utils.errors import InputError, MemoryLimitReached

X = np.float32([[1.0, -2.0, 4.0, 0.5]])
PLAN = Plan("main", "given", {"x": X})


def plain(body=lambda x: mb.mul(x=x, y=np.float32(1), name="y")):
    return build_program(body, dtype=types.fp32, x=(1, 4))


@pytest.mark.parametrize("right, expected", [
    (X, 0.0), (X * np.float32(1.25), 0.2), (X * 0, math.inf), (X[0], math.inf), (X.astype(np.int32), math.inf),
    (np.float32([[np.inf, -2, 4, 0.5]]), 0.0)])
def test_is_a_share_of_the_outputs_largest_value(right, expected):
    assert compute_largest_error(plain(), [(PLAN, {"y": right})]) == pytest.approx(expected)


def test_numbers_that_are_lost_are_infinitely_wrong_and_of_integers_the_share_that_differs_counts():
    lost = plain(lambda x: mb.mul(x=x, y=np.float32(np.inf), name="y"))
    assert compute_largest_error(lost, [(PLAN, {"y": X})]) == math.inf
    whole = plain(lambda x: mb.reduce_argmax(x=x, axis=1, name="y"))
    assert compute_largest_error(whole, [(PLAN, {"y": np.int32([2])})]) == 0
    assert compute_largest_error(whole, [(PLAN, {"y": np.int32([1])})]) == 1


def test_the_worst_run_and_output_count():
    other = Plan("main", "other", {"x": X * 2})
    runs = [(PLAN, {"y": X}), (other, {"y": X * 2 + np.float32([[0, 0, 2, 0]])})]
    assert compute_largest_error(plain(), runs) == pytest.approx(0.2)
    assert compute_largest_error(plain(), [(PLAN, {"gone": X})]) == math.inf


def test_what_was_measured_judges_other_programs():
    seen = measure_ranges(plain(), [PLAN])
    assert seen.error(plain()) == 0
    assert seen.error(plain(lambda x: mb.mul(x=x, y=np.float32(1.1), name="y"))) == pytest.approx(0.1, rel=1e-3)


def test_drawn_runs_beyond_the_limit_on_memory_are_omitted():
    def body(x):
        return mb.reduce_sum(x=mb.matmul(x=x, y=x, transpose_y=True), name="y")

    program = build_program(body, dtype=types.fp32, x=(None, 1))
    small, large = (Plan("main", "drawn", {"x": np.ones((rows, 1), np.float32)}) for rows in (10, 3000))
    told = []
    with share_budget(max_memory=16_000_000):
        found = measure_ranges(program, [small, large], told.append)
        assert found.runs == [small] and "run 2 is omitted: matmul" in told[-1]
        with pytest.raises(MemoryLimitReached):
            measure_ranges(program, [large])
        with pytest.raises(MemoryLimitReached):
            measure_ranges(program, [small, replace(large, asked=True)])


def narrow(factor=2.0):
    return build_program(lambda x: mb.mul(x=x, y=np.float16(factor), name="y"), x=(1, 4))


def wide(factor=2.0):
    def body(x):
        return mb.cast(x=mb.mul(x=mb.cast(x=x, dtype="fp16"), y=np.float16(factor)), dtype="fp32", name="y")

    return plain(body)


def test_floats_of_another_width_are_fed_and_compared_as_the_narrower_holds_them():
    assert find_interface_widths(wide(), narrow()) == {
        "main": InterfaceWidths({"x": np.dtype(np.float16)}, {"y": np.dtype(np.float16)})}
    assert find_interface_widths(narrow(), wide())["main"].inputs == {"x": np.dtype(np.float32)}
    assert find_interface_widths(wide(), wide()) == {}
    report = compare_programs(wide(), narrow(), precisions=("float64", "float16"), widths=True)
    assert report.equal_bits
    wrong = compare_programs(wide(), narrow(2.002), precisions=("float64", "float16"), widths=True)
    assert wrong.status == "different" and wrong.first is not None
    with pytest.raises(InputError, match="different inputs or outputs"):
        compare_programs(wide(), narrow())


def total(factor, dtype):
    def body(x):
        whole = mb.reduce_sum(x=mb.mul(x=x, y=np.float32(factor)), keep_dims=False)
        return mb.identity(x=whole, name="y") if dtype == "fp32" else mb.cast(x=whole, dtype=dtype, name="y")

    return plain(body)


def test_with_widths_outputs_of_rank_0_are_compared_as_well():
    """A scalar is no tensor in MIL; `edit --io fp16` changes it all the same."""
    how = {"precisions": ("float64", "float16"), "widths": True}
    assert find_interface_widths(total(2, "fp32"), total(2, "fp16"))["main"].outputs == {"y": np.dtype(np.float16)}
    assert compare_programs(total(2, "fp32"), total(2, "fp16"), **how).equal_bits
    assert compare_programs(total(2, "fp16"), total(2, "fp32"), **how).status == "equal"
    assert compare_programs(total(2, "fp32"), total(2.01, "fp16"), **how).status == "different"
    with pytest.raises(InputError, match="different inputs or outputs"):
        compare_programs(total(2, "fp32"), total(2, "int32"), **how)


def test_with_widths_other_dtypes_still_have_to_agree():
    whole = build_program(lambda x: mb.cast(x=x, dtype="int32", name="y"), dtype=types.fp32, x=(1, 4))
    with pytest.raises(InputError, match="different inputs or outputs"):
        compare_programs(wide(), whole, widths=True)


def test_one_form_of_a_flexible_model_has_another_interface():
    def relu(*sizes):
        return build_program(lambda x: mb.relu(x=x, name="y"), x=sizes)

    for other, shape in (((1, 4), "(1, 4)"), ((1, 5), "(1, 5)"), ((1, 1, 4), "(1, 1, 4)")):
        with pytest.raises(InputError, match=rf"'x' of function 'main' has shape \(1, any\) in the first and "
                                             rf"{re.escape(shape)} in the second; expected the same shapes, or feeds="):
            ane.verify(relu(1, None), relu(*other))
    with pytest.raises(InputError, match=r"shape \(1, 4\) in the first and \(1, 5\)"):
        ane.verify(relu(1, 4), relu(1, 5))
    assert ane.verify(relu(1, 4), relu(1, None)).equal
    assert ane.verify(relu(1, None), relu(1, 4), feeds={"x": np.ones((1, 4), np.float16)}).equal
