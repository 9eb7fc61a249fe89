"""A run op by op: ranges and counts are numpy's, and the first op to leave fp16's range is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from tests.ir.test_edits import stateful


def rising(dtype=types.fp32):
    kind = types.nptype_from_builtin(dtype)

    def body(x):
        big = mb.mul(x=x, y=kind(300), name="big")
        over = mb.mul(x=big, y=kind(300), name="over")
        return mb.mul(x=over, y=kind(2.0**-14), name="y")

    return build_program(body, x=(2, 3), dtype=dtype)


X = np.array([[1, -2, 0.5], [0, 3, -0.25]], np.float32)


def rows(report):
    return {row.value: row for row in report.rows}


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_each_op_has_its_range(precision):
    report = ane.trace(rising(), {"x": X}, precision=precision)
    assert [row.value for row in report.rows] == ["big", "over", "y"]
    for name, value in (("big", X * 300), ("over", X * 9e4), ("y", X * 9e4 / 2**14)):
        row = rows(report)[name]
        assert (row.minimum, row.maximum) == (pytest.approx(value.min()), pytest.approx(value.max()))
        assert (row.elements, row.runs, row.shape, row.nan, row.inf) == (6, 1, (2, 3), 0, 0)
        assert row.overflow == np.count_nonzero(np.abs(value) >= 65520)
        assert (row.op_type, row.type, row.place) == ("mul", "fp32[2, 3]", ("main",))
    np.testing.assert_allclose(report.outputs["y"], X * 9e4 / 2**14)


def test_the_first_to_overflow_is_told_in_full_precision_and_happens_in_half():
    for dtype, precision in ((types.fp32, "float32"), (types.fp16, "float64"), (types.fp16, "float16")):
        report = ane.trace(rising(dtype), {"x": X.astype(types.nptype_from_builtin(dtype))}, precision=precision)
        assert report.first.value == "over" and [row.value for row in report.rows if row.starts] == ["over"]
        assert report.first_overflow_mil.startswith("%over: ") and "= mul(x=%big" in report.first_overflow_mil
        assert report.to_dict()["first_overflow"] == "over"
        assert f"first to overflow fp16 ({precision}): %over in main" in str(report)
    assert rows(report)["over"].inf == 3 and rows(report)["over"].overflow == 0
    assert rows(report)["y"].inf == 3 and not rows(report)["y"].starts


@pytest.mark.parametrize(("value", "over"), [(65504.0, 0), (65519.0, 0), (65520.0, 1), (-65520.0, 1)])
def test_overflow_is_what_rounds_to_an_infinity(value, over):
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(value)) == bool(over)
    prog = build_program(lambda x: mb.add(x=x, y=np.float32(0), name="y"), x=(1,), dtype=types.fp32)
    assert rows(ane.trace(prog, {"x": np.array([value], np.float32)}))["y"].overflow == over


@pytest.mark.parametrize(("value", "under"), [(2.0**-24, 0), (2.0**-25 * 1.01, 0), (2.0**-25, 1), (1e-30, 1), (0.0, 0)])
def test_underflow_is_what_rounds_to_zero(value, under):
    assert (np.float16(value) == 0 and value != 0) == bool(under)
    prog = build_program(lambda x: mb.add(x=x, y=np.float32(0), name="y"), x=(1,), dtype=types.fp32)
    assert rows(ane.trace(prog, {"x": np.array([-value], np.float32)}))["y"].underflow == under


def test_what_is_not_finite_is_counted_and_left_out_of_the_range():
    prog = build_program(lambda x, z: mb.real_div(x=x, y=z, name="y"), x=(5,), z=(5,), dtype=types.fp32)
    feeds = {"x": np.array([1, -1, 0, 4, 6], np.float32), "z": np.array([0, 0, 0, 2, 2], np.float32)}
    row = rows(ane.trace(prog, feeds))["y"]
    assert (row.inf, row.nan, row.minimum, row.maximum, row.starts) == (2, 1, 2.0, 3.0, True)


def test_a_row_of_infinities_has_no_range():
    prog = build_program(lambda x: mb.real_div(x=x, y=np.float32(0), name="y"), x=(2,), dtype=types.fp32)
    report = ane.trace(prog, {"x": np.ones(2, np.float32)})
    assert (rows(report)["y"].minimum, rows(report)["y"].maximum) == (None, None)
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["trace"][0]["min"] is None


@pytest.mark.parametrize("where", ["a constant", "a feed"])
def test_what_is_handed_on_is_no_start(where):
    """A mask of minus infinity is meant."""
    def masked(x, m):
        mask = np.array([0, -np.inf], np.float32) if where == "a constant" else m
        return mb.softmax(x=mb.add(x=x, y=mask, name="masked"), name="y")

    prog = build_program(masked, x=(2,), m=(2,), dtype=types.fp32)
    report = ane.trace(prog, {"x": np.ones(2, np.float32), "m": np.array([0, -np.inf], np.float32)})
    assert rows(report)["masked"].inf == 1 and report.first is None
    assert "no op overflows fp16: overflows are in inputs or constants only" in str(report)


def test_integers_and_flags_have_a_range_too():
    def body(x):
        above = mb.greater(x=x, y=np.float32(0), name="above")
        return mb.mul(x=mb.cast(x=above, dtype="int32", name="count"), y=100_000, name="y")

    found = rows(ane.trace(build_program(body, x=(2, 3), dtype=types.fp32), {"x": X}))
    assert (found["above"].minimum, found["above"].maximum) == (0.0, 1.0)
    assert (found["y"].maximum, found["y"].overflow, found["y"].type) == (1e5, 0, "int32[2, 3]")


def grown(times):
    def body(i, v):
        return mb.add(x=i, y=1, name="next"), mb.mul(x=v, y=np.float32(10), name="step")

    return build_program(lambda x: mb.while_loop(_cond=lambda i, v: mb.less(x=i, y=times), _body=body, loop_vars=(0, x),
                                                 name="y")[1], x=(2,), dtype=types.fp32)


def test_a_loop_is_one_row_for_each_value():
    report = ane.trace(grown(6), {"x": np.array([1, -3], np.float32)})
    step = rows(report)["step"]
    assert (step.runs, step.elements, step.minimum, step.maximum) == (6, 12, -3e6, 1e6)
    assert step.overflow == 4 and step.starts and report.first is step  # both elements in the fifth run and the sixth
    assert step.place[0] == "main" and "block 1 of while_loop" in step.place[1]
    (line,) = [line for line in str(report).splitlines() if "%step" in line and " mul " in line]
    assert line.startswith(">   %step x6 ")
    assert not any(row.starts for row in report.rows if row is not step)


def test_states_are_read_and_left():
    state = {"memory": np.full((2, 3), -1.0, np.float16)}
    report = ane.trace(stateful(), {"x": X.astype(np.float16)}, state=state)
    read = next(row for row in report.rows if row.op_type == "read_state")
    assert (read.minimum, read.maximum) == (-1.0, -1.0)
    np.testing.assert_allclose(state["memory"], np.maximum(X - 1, 0))
    assert report.to_dict()["states"] == {"memory": {"dtype": "float32", "shape": [2, 3]}}


def test_a_fault_model_shows():
    prog = build_program(lambda x: mb.square(x=x, name="y"), x=(2,))
    feeds = {"x": np.array([255, 1], np.float16)}
    assert ane.trace(prog, feeds).first is None
    report = ane.trace(build_program(lambda x: mb.matmul(x=x, y=np.full((2, 2), 100, np.float16), name="y"), x=(1, 2)),
                       {"x": np.full((1, 2), 200, np.float16)}, quirks=("mac_overflow_32768",))
    assert report.first.value == "y" and report.first.inf == 2 and report.quirks == ("mac_overflow_32768",)


def test_the_dictionary_is_complete():
    data = ane.trace(rising(), {"x": X}).to_dict()
    assert list(data) == ["schema", "tool", "version", "command", "source", "function", "precision", "quirks",
                          "outputs", "states", "first_overflow", "trace"]
    assert list(data["trace"][0]) == ["value", "op_type", "type", "place", "shape", "runs", "elements", "min", "max",
                                      "nan", "inf", "overflow", "underflow", "starts"]
    assert (data["schema"], data["function"], data["precision"]) == (1, "main", "float32")
    assert data["outputs"] == {"y": {"dtype": "float32", "shape": [2, 3]}}


@pytest.mark.parametrize(
    ("how", "message"),
    [({"function": "mian"}, "function 'mian': not in the program"), ({"precision": "float8"}, "precision 'float8'"),
     ({"quirks": ("x",)}, "quirk 'x': unknown"), ({"state": {"m": X}}, "state 'm': no such state")])
def test_what_is_not_known_is_refused(how, message):
    with pytest.raises(ane.InputError) as error:
        ane.trace(rising(), {"x": X}, **how)
    assert str(error.value).startswith(message)
