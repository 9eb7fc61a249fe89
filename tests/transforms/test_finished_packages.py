"""Transforms that `adapt` makes, on a finished package by `edit`: each alone, compared with the source."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import make, normal, tree, with_functions
from tests.transforms import test_encoder as encoders
from tests.transforms.helpers import host_takes

HALF = np.float16
MASKED = encoders.hidden_by(lambda hidden, found: mb.select(cond=hidden, a=HALF(-3e4), b=found))
BODIES = {
    "fold_sizes": encoders.buckets, "one_hot_rows": encoders.PICKED["one row"], "add_masks": MASKED,
    "narrow_masks": lambda ids, x: encoders.spread_mask(
        ids, x, repeat=encoders.REPEATS["tile"], read=lambda mask: mask)}
GONE = {"fold_sizes": "gather", "one_hot_rows": "gather", "add_masks": "select", "narrow_masks": "tile"}


def save(program, path):
    return make(path, program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY)


def types_of(path, function="main"):
    return {op.op_type for op in ane.load(path).program.functions[function].operations}


@pytest.mark.parametrize("option", BODIES)
def test_an_option_of_its_own(tmp_path, capsys, option):
    source = save(encoders.program_of(BODIES[option]), tmp_path / "source.mlpackage")
    before, flag = tree(source), f"--{option.replace('_', '-')}"
    assert GONE[option] in types_of(source)
    assert main(["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), flag, "--verify"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{flag}  ") and "compared with the source: equal in" in printed, printed
    assert "\n  sampled: normal draws" in printed and "\\n" not in printed
    assert GONE[option] not in types_of(tmp_path / "out.mlpackage") and tree(source) == before
    host_takes(tmp_path / "out.mlpackage")


@pytest.mark.parametrize("option", BODIES)
def test_where_there_is_nothing_to_do_the_package_is_copied(tmp_path, option):
    source = save(encoders.program_of(lambda ids, x: mb.tanh(x=x, name="out")), tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, **{option: True})
    assert report.status == "unchanged" and "nothing to" in str(report), str(report)
    assert tree(tmp_path / "out.mlpackage") == tree(source)


@pytest.mark.parametrize("option", BODIES)
def test_one_of_two_functions(tmp_path, option):
    one = save(encoders.program_of(BODIES[option]), tmp_path / "one.mlpackage")
    source = with_functions(tmp_path / "source.mlpackage", {"a": one, "b": one}, "a")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, function="b", **{option: True})
    assert report.status == "written" and report.verification.equal, str(report)
    found = [GONE[option] in types_of(tmp_path / "out.mlpackage", each) for each in "ab"]
    assert found == [True, False]


def test_a_flexible_input_is_named_where_sizes_cannot_be_folded(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, get_new_symbol()), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x):
        return mb.fill(shape=mb.shape(x=x), value=HALF(1), name="out")

    source = save(program, tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, fold_sizes=True)
    assert report.status == "unchanged" and "nothing to fold: the input 'x' has a flexible shape" in str(report)
    report = ane.edit(source, tmp_path / "fixed.mlpackage", verify=True, fold_sizes=True, fix_shape={"x": (1, 2)})
    assert report.status == "written" and report.verification.equal, str(report)


@pytest.mark.parametrize("hidden", [-np.inf, -3e4])
def test_a_choice_between_two_numbers_is_reported(tmp_path, hidden):
    def body(ids, x):
        odd = mb.logical_and(x=mb.equal(x=mb.mod(x=ids, y=2), y=1), y=(np.arange(encoders.ROWS) > 0)[None])
        mask = mb.select(cond=mb.expand_dims(x=odd, axes=[1]), a=HALF(hidden), b=HALF(0))
        return mb.softmax(x=mb.add(x=encoders.scores(ids, x), y=mask), axis=-1, name="out")

    source = save(encoders.program_of(body), tmp_path / "source.mlpackage")
    report = ane.edit(source, tmp_path / "out.mlpackage", verify=True, add_masks=True)
    assert report.verification.equal, str(report)
    assert report.status == "written" and tree(tmp_path / "out.mlpackage") != tree(source), str(report)
    assert "replaced by arithmetic on two numbers" in str(report)


def cross_attention(encoded, x, held):
    """A step that attends to what an encoder returned, with keys and values that follow from this alone."""
    keys = mb.linear(x=encoded, weight=normal(8, 8).astype(HALF), name="keys")
    values = mb.linear(x=mb.tanh(x=encoded), weight=normal(8, 8, seed=1).astype(HALF), name="values")
    queries = mb.coreml_update_state(state=held, value=mb.add(x=mb.mul(x=mb.read_state(input=held), y=HALF(0.5)), y=x))
    weights = mb.softmax(x=mb.matmul(x=queries, y=keys, transpose_y=True), axis=-1)
    return mb.add(x=mb.matmul(x=weights, y=values), y=x, name="out")


@pytest.fixture
def decoder(tmp_path):
    specs = [mb.TensorSpec((1, 5, 8), dtype=types.fp16), mb.TensorSpec((1, 2, 8), dtype=types.fp16),
             mb.StateTensorSpec((1, 2, 8), dtype=types.fp16)]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(cross_attention)
    return save(program, tmp_path / "source.mlpackage")


@pytest.mark.parametrize("more", [{}, {"state_to_io": "all"}, {"rename": {"encoded": "context", "x": "tokens"}}])
def test_what_is_the_same_for_all_calls_is_computed_once(decoder, tmp_path, more):
    report = ane.edit(decoder, tmp_path / "out.mlpackage", verify=True, split_constant_inputs="encoded", **more)
    assert report.status == "written" and report.verification.equal, str(report)
    assert len(report.verification.cases) == 6 and {"out", "state held"} <= {
        each.output for case in report.verification.cases for each in case.outputs}
    first, second = (ane.load(path).program.functions["main"] for path in report.outputs)
    assert list(first.inputs) == [more.get("rename", {}).get("encoded", "encoded")]
    assert {var.name for var in first.outputs} == {"keys", "values"} <= set(second.inputs)


@pytest.mark.parametrize(("names", "reason"), [
    (["encode"], "there is no input 'encode' in the model; did you mean 'encoded'?"),
    (["x"], "no value depends only on these; expected inputs that are the same for many calls"),
    (["held"], "'held' is a state, which each call may change; expected inputs"),
])
def test_inputs_that_cannot_be_split_off_are_named(decoder, tmp_path, names, reason):
    with pytest.raises(ane.InputError) as refusal:
        ane.edit(decoder, tmp_path / "out.mlpackage", split_constant_inputs=names)
    assert reason in str(refusal.value), str(refusal.value)
    assert not (tmp_path / "out_1.mlpackage").exists()


def test_both_functions_read_what_is_computed_once(decoder, tmp_path):
    both = with_functions(tmp_path / "both.mlpackage", {"a": decoder, "b": decoder}, "a")
    report = ane.edit(both, tmp_path / "out.mlpackage", split_constant_inputs="encoded", verify=True)
    assert report.status == "written" and report.verification.equal, str(report)
    for path in report.outputs:
        assert set(ane.load(path).program.functions) == {"a", "b"}
