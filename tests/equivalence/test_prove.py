"""Programs are run side by side on the same feeds, and the report says what was compared."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from mil_ane_passes import rewrite, verify
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime.registry import load_kernels
from mil_ane_passes.utils.errors import InputError, NotSupported
from mil_ane_passes.utils.option_spelling import use_command_spelling
from tests.ir.test_edits import stateful
from tests.passes.test_engine import nested_program, rule


def convolved(scale=1.0, name="y", source="x", kind=types.fp16):
    bias = np.array([0.5, -1.0], np.float16) * np.float16(scale)
    dtype = types.nptype_from_builtin(kind)
    return build_program(
        lambda **inputs: mb.conv_transpose(
            x=inputs[source], weight=make_weight(4, 2, 5, dtype=dtype), bias=bias.astype(dtype), strides=[3], name=name
        ),
        dtype=kind,
        **{source: (1, 4, 8)},
    )


def doubled(prog):
    """The same program with every relu's result doubled."""
    twin = clone_program(prog)
    assert apply_rewrite(rule(lambda hit, mb: mb.mul(x=mb.abs(x=hit.op.x), y=np.float16(2))), twin).fired
    return twin


def test_a_program_equals_itself_bit_for_bit():
    report = verify(convolved(), convolved())
    assert report.equal and report.equal_bits and report.status == "equal"
    assert str(report) == ("equal in 6 runs at float64, bit for bit\n"
                           "  sampled: normal draws, wide range, NaN and infinities, ties\n"
                           "  float64: 6 of 6 ops read the same values in both models; they ran once for both, at "
                           "float32 to save time, which does not affect the comparison")


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
def test_another_bias_is_different(precision):
    report = verify(convolved(), convolved(1.25), precision=precision)
    assert report.status == "different" and not report.equal and not report.equal_bits
    assert str(report).startswith("different, judged as rounding (")
    assert "main, seed 0, float64: y: " in str(report) and "beyond" in str(report)


@pytest.mark.parametrize(("exactness", "equal"), [("rounding", True), ("bitwise", False)])
def test_exactness_decides_about_a_split_bias(exactness, equal):
    before = convolved()
    after = rewrite(before, passes="split_conv_transpose_bias").package
    report = verify(before, after, precision="float16", exactness=exactness)
    assert report.equal is equal and not report.equal_bits
    assert ("judged as rounding" in str(report)) is equal


def test_precisions_below_double_are_run_beside_it():
    report = verify(convolved(), convolved(), precision="float16", seeds=2)
    assert [(case.feeds, case.precision) for case in report.cases] == [
        ("seed 0", "float64"),
        ("seed 0", "float16"),
        ("seed 1", "float64"),
        ("seed 1", "float16"),
        ("wide range", "float64"),
        ("NaN and infinities", "float64"),
        ("ties", "float64"),
    ]


def test_given_feeds_are_the_only_run():
    report = verify(convolved(), convolved(), feeds={"x": np.zeros((1, 4, 8), np.float16)})
    assert [(case.function, case.feeds) for case in report.cases] == [("main", "given feeds")]


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x': not fed; expected fp16 (1, 4, 8)"),
        ({"xx": 1.0}, "feed 'xx': no such input; did you mean 'x'?"),
        ({"x": np.zeros((1, 4, 9))}, "feed 'x': found shape (1, 4, 9), expected fp16 (1, 4, 8); axis 2 differs"),
        ({"x": np.zeros((1, 4, 8), int)}, "feed 'x': found dtype int64, expected fp16"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(feeds, message):
    with pytest.raises(InputError) as error:
        verify(convolved(), convolved(), feeds=feeds)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("other", [convolved(name="z"), convolved(source="xx")], ids=["output", "input"])
def test_other_names_are_another_interface(other):
    with pytest.raises(InputError, match=r"different inputs or outputs: the first .* the second"):
        verify(convolved(), other)


def test_other_functions_are_another_interface():
    two = convolved()
    two.add_function("second", convolved().functions["main"])
    with pytest.raises(InputError, match="the two programs have different inputs or outputs"):
        verify(convolved(), two)


@pytest.mark.parametrize(("is_command", "advice"), [(True, "--widths"), (False, "widths=True")])
def test_other_float_widths_of_the_interface_are_compared_on_request(is_command, advice):
    wide, narrow = (build_program(lambda x: mb.relu(x=x, name="y"), x=(2, 3), dtype=dtype)
                    for dtype in (types.fp32, types.fp16))
    with use_command_spelling(is_command):
        with pytest.raises(InputError, match=f"; expected the same names and dtypes in the same order, or {advice}, "
                                             "which compares floats of different widths$"):
            verify(wide, narrow)
        with pytest.raises(InputError, match="in the same order$"):
            verify(convolved(), convolved(name="z"))
    assert verify(wide, narrow, widths=True)


@pytest.mark.parametrize("precision", ["float64", "float16"])
def test_another_dtype_at_the_ends_is_not_equal(precision):
    def rounded(dtype):
        return build_program(lambda x: mb.cast(x=mb.relu(x=x), dtype=dtype, name="y"), x=(2, 3), dtype=types.fp32)

    try:
        report = verify(rounded("fp32"), rounded("fp16"), precision=precision)
    except InputError as error:
        assert "different inputs or outputs" in str(error)
    else:
        assert report.status == "different"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"precision": "float8"}, "precision 'float8': unknown"),
        ({"exactness": "bitwize"}, "bitwize"),
    ],
)
def test_a_word_that_is_not_known_is_refused(asked, message):
    with pytest.raises(InputError, match=message):
        verify(convolved(), convolved(), **asked)


def test_every_function_is_compared():
    before, after = convolved(), convolved()
    before.add_function("second", convolved().functions["main"])
    after.add_function("second", convolved(2.0).functions["main"])
    report = verify(before, after)
    assert report.status == "different"
    passed = {
        name: all(output.passed for case in report.cases for output in case.outputs if case.function == name)
        for name in before.functions
    }
    assert passed == {"main": True, "second": False}


def test_one_function_is_compared_alone():
    before, after = convolved(), convolved(2.0)
    before.add_function("second", convolved().functions["main"])
    after.add_function("second", convolved().functions["main"])
    report = verify(before, after, function="second")
    assert report.equal and {case.function for case in report.cases} == {"second"}
    assert verify(before, after, function="main").status == "different"
    assert list(before.functions) == ["main", "second"] and before.default_function_name == "main"
    feeds = {"x": np.ones((1, 4, 8), np.float16)}
    assert [case.function for case in verify(before, after, function="second", feeds=feeds).cases] == ["second"]


def test_functions_that_only_one_program_has_do_not_matter_to_one_that_both_have():
    two = convolved()
    two.add_function("second", convolved().functions["main"])
    assert verify(convolved(), two, function="main").equal
    with pytest.raises(InputError, match="a program in memory: no function 'secund'; expected main"):
        verify(convolved(), two, function="secund")
    with pytest.raises(InputError, match=r"no function 'secund'; expected main or second; did you mean 'second'\?"):
        verify(two, convolved(), function="secund")


def test_nested_blocks_are_compared():
    assert verify(nested_program(), nested_program()).equal_bits
    assert verify(nested_program(), doubled(nested_program())).status == "different"


def test_programs_with_states_are_compared():
    assert verify(stateful(), stateful()).equal_bits
    assert verify(stateful(), doubled(stateful())).status == "different"


def test_what_is_written_to_a_state_is_compared():
    """`total` reaches the state only, never an output."""
    other = clone_program(stateful())
    (add,) = [op for _, op in iterate_ops(other) if op.op_type == "add"]
    apply_rewrite(rule(lambda hit, mb: mb.sub(x=hit.op.x, y=hit.op.y), roots=("add",)), other)
    assert add.enclosing_block is None
    assert verify(stateful(), other).status == "different"


def test_what_is_read_from_a_state_is_compared():
    """A state that is zero at the start of every run would hide a wrong sign."""

    def reading(combine):
        memory = mb.state_tensor_placeholder(shape=(2, 3), dtype=types.fp16)
        with Function(
            {"x": mb.placeholder(shape=(2, 3), dtype=types.fp16), "memory": memory}, opset_version=ct.target.iOS18
        ) as function:
            x, state = function.inputs["x"], mb.read_state(input=function.inputs["memory"])
            function.set_outputs([combine(x=x, y=state, name="y")])
        made = Program()
        made.add_function("main", function)
        return made

    assert verify(reading(mb.add), reading(mb.add)).equal_bits
    assert verify(reading(mb.add), reading(mb.sub)).status == "different"


def test_an_op_the_runtime_lacks_is_named_and_nothing_runs(monkeypatch):
    monkeypatch.delitem(load_kernels(), "conv_transpose")
    monkeypatch.setattr(
        "mil_ane_passes.runtime.interpreter.Interpreter.run_op", lambda *_: pytest.fail("an op was run")
    )
    with pytest.raises(NotSupported, match=r"the reference runtime has no kernel for: conv_transpose \('y'\)"):
        verify(convolved(), convolved())


def test_a_rewrite_that_cannot_be_proved_says_so_and_leaves_the_program(monkeypatch):
    monkeypatch.delitem(load_kernels(), "conv_transpose")
    prog = convolved()
    text = format_program(prog)
    report = rewrite(prog, dst=prog)
    assert (report.status, report.verified, report.changed) == ("not verified", False, True)
    assert report.verify.status == "not verified" and "verify=False writes" in str(report.verify)
    assert format_program(prog) == text
    assert rewrite(prog, dst=prog, verify=False).status == "in memory"
    assert format_program(prog) != text


def test_a_rewrite_with_a_wrong_rule_is_found_and_leaves_the_program(monkeypatch):
    from mil_ane_passes.passes.registry import find_rewrite

    lift = find_rewrite("lift_conv_transpose_1d")
    right = lift.rewrite
    monkeypatch.setattr(lift, "rewrite", lambda self, hit, mb: mb.mul(x=right(self, hit, mb), y=np.float16(0.5)))
    prog = convolved()
    text = format_program(prog)
    report = rewrite(prog, dst=prog, passes="lift_conv_transpose_1d")
    assert report.status == "not verified" and report.verify.status == "different"
    assert format_program(prog) == text


def test_progress_names_each_run():
    said = []
    compare_programs(convolved(), convolved(), seeds=1, progress=said.append)
    labels = ("seed 0", "wide range", "ties", "NaN and infinities")  # all but the last are batched
    runs = [f"run {number} of 4: main, {label}, float64" for number, label in enumerate(labels, 1)]
    assert said == runs
    compare_programs(convolved(), convolved(2.0), seeds=1, progress=said.append)
    again = [f"run {number} of 3: main, {label}, float64" for number, label in enumerate(labels[:3], 1)]
    assert said == [*runs, *runs, *again, "searching for the first difference"]


@pytest.mark.parametrize(("seconds", "left"), [(0.4, ""), (1.0, " (about 10 s left)"), (45.0, " (about 8 min left)")])
def test_progress_says_how_long_the_rest_may_take(monkeypatch, seconds, left):
    from mil_ane_passes.equivalence import execution

    clock = itertools.count()  # looked at once before the runs and once before each
    monkeypatch.setattr(execution, "time", SimpleNamespace(monotonic=lambda: next(clock) * seconds))
    said = []
    compare_programs(convolved(), convolved(), seeds=3, progress=said.append)
    assert said[0] == "run 1 of 6: main, seed 0, float64"
    assert said[1] == f"run 2 of 6{left}: main, seed 1, float64"


def test_the_report_as_data():
    report = compare_programs(convolved(), convolved(2.0), seeds=1, exactness=Exactness.BITWISE)
    data = report.to_dict()
    assert list(data) == [
        "schema", "tool", "version", "command", "status", "exactness", "equal_bits", "tolerance", "accuracy", "quirks",
        "reason", "notes", "advice", "sampled", "first_difference", "ops", "cases"]
    assert data["tolerance"] is None and data["quirks"] == []
    assert (data["schema"], data["status"], data["exactness"]) == (1, "different", "bitwise")
    assert [each.partition(":")[0] for each in data["sampled"]] == [
        "normal draws", "wide range", "NaN and infinities", "ties"]
    case, *others = data["cases"]
    assert [other["feeds"] for other in others] == ["wide range", "NaN and infinities", "ties"]
    assert list(case) == ["function", "feeds", "precision", "outputs"]
    assert set(case["outputs"][0]) == {
        "snr",
        "cosine",
        "output",
        "equal_bits",
        "passed",
        "ulps",
        "absolute",
        "relative",
        "before",
        "after",
        "allowed",
        "reason",
        "index",
        "fixed",
    }


def test_ends_of_another_width_are_compared_and_said_to_be_so():
    def doubled(dtype):
        return build_program(lambda x: mb.add(x=x, y=x, name="y"), dtype=dtype, x=(2, 3))

    report = verify(doubled(types.fp32), doubled(types.fp16), widths=True)
    assert report.equal and report.notes[0].startswith("inputs or outputs have different float widths")
    assert not verify(doubled(types.fp32), doubled(types.fp32), widths=True).notes


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_row_of_a_table_that_differs_is_read(wrapped):
    """Draws read few of 5,000 rows: without the rows in which the tables differ, the two were called equal."""
    def looked_up(row, value):
        table = np.random.default_rng(0).standard_normal((5000, 4)).astype(np.float32)
        table[row] = value

        def body(ids):
            if wrapped:
                ids = mb.select(cond=mb.less(x=ids, y=0), a=mb.add(x=ids, y=5000), b=mb.cast(x=ids, dtype="int32"))
            return mb.gather(x=table, indices=ids, axis=0, name="y")

        return mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32)], opset_version=ct.target.iOS17)(body)

    plain = looked_up(4321, 7.0)
    found = compare_programs(plain, looked_up(4321, 7.5))
    assert found.status == "different" and "rows of tables that differ" in str(found), str(found)
    assert compare_programs(plain, looked_up(4321, np.nan)).status == "different"
    same = compare_programs(plain, looked_up(4321, 7.0))
    assert same.equal and "rows of tables that differ" not in str(same.to_dict())


CODEBOOKS = np.int32([[0], [1250], [2500], [3750]])
PLACES = {
    "offset": lambda ids: mb.add(x=ids, y=2),
    "offset from the other end": lambda ids: mb.cast(x=mb.sub(x=mb.expand_dims(x=ids, axes=[0]), y=-2), dtype="int32"),
    "codebooks": lambda ids: mb.reshape(x=mb.add(x=ids, y=CODEBOOKS), shape=[-1]),
    "ids of one codebook for all": lambda ids: mb.add(x=ids, y=CODEBOOKS),
    "negative ones from the end": lambda ids: mb.select(cond=mb.greater_equal(x=ids, y=0), a=ids,
                                                        b=mb.add(x=ids, y=5000)),
    "one offset for each, in another shape": lambda ids: mb.add(x=mb.reshape(x=ids, shape=[12]),
                                                                y=np.arange(0, 120, 10, dtype=np.int32)),
    "codebooks, in another order": lambda ids: mb.reshape(x=mb.add(x=mb.transpose(x=ids, perm=[1, 0]),
                                                                   y=CODEBOOKS.T), shape=[2, 6]),
    "every third row": lambda ids: mb.add(x=mb.mul(x=ids, y=3), y=1),
    "counted from the last row": lambda ids: mb.sub(x=4999, y=ids),
    "the last two of each": lambda ids: mb.slice_by_index(x=ids, begin=[0, 1], end=[4, 3]),
    "limited to the table": lambda ids: mb.minimum(x=mb.maximum(x=ids, y=0), y=4999),
    "floats": lambda ids: mb.cast(x=mb.floor(x=mb.cast(x=ids, dtype="fp32")), dtype="int32"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_row_that_is_read_at_an_offset_is_read(name):
    """As tables of positions begin with rows for padding, and those of several codebooks lie behind each other."""
    def looked_up(value):
        table = np.random.default_rng(0).standard_normal((5000, 4)).astype(np.float32)
        table[4321] = value

        def body(ids):
            return mb.gather(x=table, indices=PLACES[name](ids), axis=0, name="y")

        shape = (1, 3) if name == "ids of one codebook for all" else (4, 3)
        return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.int32)], opset_version=ct.target.iOS17)(body)

    found = compare_programs(looked_up(7.0), looked_up(7.5))
    assert found.status == "different" and "rows of tables that differ" in str(found), str(found)


@pytest.mark.parametrize("form", ["blocks", "palette", "sparse"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_of_a_compressed_table_that_differs_is_read(form, axis):
    """As tables of embeddings are stored on the ANE: they were taken for equal whatever rows the draws missed."""
    rng = np.random.default_rng(0)
    shape, place = ((5000, 8), (4321, 3)) if axis == 0 else ((8, 5000), (3, 4321))
    data = rng.integers(-8, 8, shape).astype(np.int8)
    codes = rng.integers(0, 16, shape).astype(np.uint8)

    def looked_up(value, scale=0.5):
        numbers, scales = data.copy(), np.full((shape[0] // 8, 1), 0.5, np.float16)
        numbers[place], scales[place[0] // 8, 0] = value, scale

        def make_table():
            if form == "blocks":
                return mb.constexpr_blockwise_shift_scale(data=numbers, scale=scales)
            if form == "palette":
                indices = codes.copy()
                indices[place] = value
                return mb.constexpr_lut_to_dense(indices=indices.astype(types.nptype_from_builtin(types.uint4)),
                                                 lut=np.arange(16, dtype=np.float16).reshape(1, 1, 16, 1))
            mask = np.ones(shape, types.nptype_from_builtin(types.uint1))
            return mb.constexpr_sparse_to_dense(nonzero_data=numbers.astype(np.float16).reshape(-1), mask=mask)

        def body(ids):
            return mb.gather(x=make_table(), indices=ids, axis=axis, name="y")

        return mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32)], opset_version=ct.target.iOS18)(body)

    plain = looked_up(1)
    found = compare_programs(plain, looked_up(5))
    assert found.status == "different" and "rows of tables that differ" in str(found), str(found)
    same = compare_programs(plain, looked_up(1))
    assert same.equal and "rows of tables that differ" not in str(same.to_dict())
    if form == "blocks":
        assert compare_programs(plain, looked_up(1, scale=0.75)).status == "different"


def test_programs_without_functions_are_refused():
    with pytest.raises(InputError, match="the program has no function; expected at least one"):
        compare_programs(Program(), Program())
