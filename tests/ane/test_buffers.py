"""Bytes as laid out: the worked rows of the formula, and what counts as a value."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, Function, Program, types

import mil_ane_passes as ane
from mil_ane_passes.ane.buffers import compute_peak_bytes, list_buffers, survey_buffers
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.layout import compute_padded_bytes

WORKED = [
    ((1, 768, 1, 1), types.fp16, 49_152, 32),
    ((1, 768, 1, 1), types.int8, 49_152, 64),
    ((1, 1, 1, 768), types.fp16, 16_384, 1),
    ((1, 768, 1, 600), types.fp16, 933_888, 608 / 600),
    ((1, 768, 600), types.fp16, 933_888, 608 / 600),
    ((1, 768, 600, 1), types.fp16, 29_491_200, 32),
    ((1, 384, 1, 1800), types.fp16, 1_409_024, 1824 / 1800),
    ((1, 512, 77, 1), types.fp16, 2_523_136, 32),
    ((1, 512, 1, 77), types.fp16, 98_304, 96 / 77),
    ((1, 64, 100, 33), types.fp16, 819_200, 64 / 33),
    ((2, 3, 4, 5, 6), types.fp16, 16_384, 32 / 6),
    ((7,), types.fp32, 16_384, 16 / 7),
    ((0, 4), types.fp16, 0, 1),
]


def same(shape, dtype=types.fp16):
    return build_program(lambda x: Builder.identity(x=x, name="y"), dtype=dtype, x=shape, opset=ct.target.iOS17)


@pytest.mark.parametrize("shape,dtype,laid_out,waste", WORKED)
def test_worked(shape, dtype, laid_out, waste):
    given, made = list_buffers(same(shape, dtype))
    assert (given.value, made.value, given.function) == ("x", "y", "main")
    size = np.dtype(types.nptype_from_builtin(dtype)).itemsize
    assert given.shape == made.shape == shape and given.padded == made.padded == laid_out
    assert given.dense == int(np.prod(shape)) * size and given.padding_ratio == pytest.approx(waste)
    assert given.rows == compute_padded_bytes(shape, size), "the same number that notes of rewrites give"


def test_a_single_number_takes_a_whole_row():
    (_, one) = list_buffers(
        build_program(lambda x: Builder.reduce_sum(x=x, axes=[0], keep_dims=False, name="y"), x=(4,))
    )
    assert (one.shape, one.dense, one.rows, one.padded, one.padding_ratio) == ((), 2, 64, 16_384, 32)


def test_what_is_not_fixed_is_left_out_and_counted():
    found = survey_buffers(same((1, None, 8)))
    assert (found.buffers, found.open) == ([], 2)
    assert survey_buffers(same((1, 4, 8))).open == 0


def test_weights_and_lists_are_no_values_and_nested_ones_are():
    def body(x):
        kept = Builder.conv(x=x, weight=make_weight(4, 8, 1, 1), name="wide")
        return Builder.cond(pred=Builder.greater(x=Builder.reduce_max(x=kept), y=np.float16(0), name="asked"),
                            _true_fn=lambda: Builder.relu(x=kept, name="inside"),
                            _false_fn=lambda: Builder.abs(x=kept, name="other"), name="y")

    names = [one.value for one in list_buffers(build_program(body, x=(1, 8, 5, 6)))]
    assert {"x", "wide", "inside", "other", "y"} <= set(names) and len(names) == len(set(names))
    assert not any("weight" in name for name in names)
    lists = build_program(lambda x: Builder.list_gather(
        ls=Builder.list_write(ls=Builder.make_list(init_length=1, elem_shape=(2,), dtype="fp16"), index=0, value=x),
        indices=np.array([0], np.int32), name="y"), x=(2,))
    assert [one.value for one in list_buffers(lists)] == ["x", "y"] or survey_buffers(lists).open == 1


def test_each_function_has_its_own():
    built = Program()
    for name in "abc":
        with Function({"x": Builder.placeholder((2, 3), types.fp16)}) as made:
            made.set_outputs([Builder.relu(x=made.inputs["x"], name="y")])
        built.add_function(name, made)
    assert [one.function for one in list_buffers(built)] == list("aabbcc")


def test_states_count_and_the_report_has_them_all():
    with Function({"x": Builder.placeholder((1, 4), types.fp16),
                   "s": Builder.state_tensor_placeholder((1, 270), types.fp16)},
                  opset_version=ct.target.iOS18) as function:
        read = Builder.read_state(input=function.inputs["s"], name="read")
        function.set_outputs([Builder.relu(x=function.inputs["x"], name="y"), read])
    built = Program()
    built.add_function("main", function)
    assert {one.value: one.dense for one in list_buffers(built)} == {"x": 8, "s": 540, "read": 540, "y": 8}
    report = ane.lint(built).to_dict()
    assert report["summary"]["padded_bytes"] == sum(one.padded for one in list_buffers(built)) == 4 * 16384
    assert report["buffers"][1]["row_waste"] == round(576 / 540, 4)


def test_the_peak_is_what_is_live_at_the_same_time():
    """Inputs are live throughout, outputs from where they are made, others to the last op that reads them."""
    one = 1 << 20

    def chain(x, count):
        for _ in range(count):
            x = Builder.relu(x=x)
        return x

    wide = (1, 1, 1024, 512)
    assert compute_peak_bytes(build_program(lambda x: chain(x, 1), x=wide)) == 2 * one
    assert compute_peak_bytes(build_program(lambda x: chain(x, 2), x=wide)) == 3 * one
    assert compute_peak_bytes(build_program(lambda x: chain(x, 9), x=wide)) == 3 * one

    def sum_up(x, count, held):
        total, parts = Builder.relu(x=x), []
        for _ in range(count):
            parts.append(Builder.sqrt(x=x))
            if not held:
                total = Builder.add(x=total, y=parts.pop())
        for part in parts:
            total = Builder.add(x=total, y=part)
        return Builder.relu(x=total)

    assert compute_peak_bytes(build_program(lambda x: sum_up(x, 9, False), x=wide)) == 4 * one
    assert compute_peak_bytes(build_program(lambda x: sum_up(x, 9, True), x=wide)) == 12 * one
    unread = build_program(lambda x: (Builder.relu(x=x), Builder.relu(x=Builder.relu(x=x)))[0], x=wide)
    assert compute_peak_bytes(unread) == 4 * one


def test_the_peak_counts_nested_blocks_and_no_weights():
    def body(x):
        def step(i, value):
            wide = Builder.concat(values=[value, value], axis=2)
            return Builder.add(x=i, y=1), Builder.reduce_sum(x=wide, axes=[2], keep_dims=True)

        start = Builder.reduce_sum(x=x, axes=[2], keep_dims=True)
        return Builder.while_loop(_cond=lambda i, value: Builder.less(x=i, y=3), _body=step,
                                  loop_vars=(np.int32(0), start))[1]

    inside = compute_peak_bytes(build_program(body, x=(1, 1, 1024, 512)))
    assert 1 << 20 < inside < 2 << 20
    held = build_program(lambda x: Builder.add(x=x, y=make_weight(1, 1, 1024, 512)), x=(1, 1, 1, 512))
    assert compute_peak_bytes(held) == (1 << 20) + compute_peak_bytes(same((1, 1, 1, 512))) // 2
    assert compute_peak_bytes(build_program(lambda x: Builder.relu(x=x), x=(1, None, 512))) == 0
