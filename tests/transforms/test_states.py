"""States merged into one, and states as inputs and outputs; results over several steps are those of the source."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.io import Io
from mil_ane_passes.transforms.merge_states import MergeStates
from mil_ane_passes.transforms.pad_shape import PadShape
from mil_ane_passes.transforms.rename import Rename
from mil_ane_passes.transforms.split_at import SplitAt
from mil_ane_passes.transforms.state_to_io import StateToIo
from tests.package.helpers import host_program, make, spec_of
from tests.transforms.test_pad_shape import SIZES, cache_program

HALF = types.fp16


def program_of(body, states, shape=(1, 2, 3)):
    """A program of `body(x, *states)`."""
    names = ["x", *(f"s{place}" for place in range(len(states)))]
    specs = [mb.TensorSpec(shape, dtype=HALF), *(mb.StateTensorSpec(each, dtype=HALF) for each in states)]
    scope: dict = {}
    exec(f"def call({', '.join(names)}): return body({', '.join(names)})", {"body": body}, scope)
    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(scope["call"])


def transform(program, *transforms, exactness=Exactness.BITWISE):
    draft, = apply_transforms(Draft(clone_program(program), "a program"), transforms)
    return draft, compare_across_interfaces(program, [draft], exactness=exactness, seeds=2, steps=4)


def types_of(draft, function="main"):
    return [op.op_type for op in draft.program.functions[function].operations if op.op_type != "const"]


def layers(x, k, v):
    """Two layers, each with a slice of both caches of rank 5 written and read again, as a decoder has them."""
    for layer in range(2):
        for state in (k, v):
            held = mb.read_state(input=state)
            row = mb.slice_by_index(x=held, begin=[layer, 0, 0, 0, 0], end=[layer + 1, 1, 2, 4, 3],
                                    squeeze_mask=[True, False, False, False, False])
            new = mb.add(x=mb.mul(x=row, y=np.float16(0.5)), y=mb.expand_dims(x=mb.reduce_sum(
                x=x, axes=[1], keep_dims=True), axes=[0]))
            kept = mb.slice_update(x=held, update=mb.expand_dims(x=new, axes=[0]), begin=[layer, 0, 0, 0, 0],
                                   end=[layer + 1, 1, 2, 4, 3])
            stored = mb.coreml_update_state(state=state, value=kept)
            read = mb.slice_by_index(x=stored, begin=[layer, 0, 0, 0, 0], end=[layer + 1, 1, 2, 4, 3],
                                     squeeze_mask=[True, False, False, False, False])
            x = mb.add(x=x, y=mb.reduce_mean(x=read, axes=[0, 1, 2], keep_dims=False))
    return mb.identity(x=x, name="out")


def counter(x, s):
    """A state that is read, written and read again."""
    total = mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=x))
    return mb.mul(x=mb.add(x=total, y=mb.read_state(input=s)), y=x, name="out")


CACHES = ((2, 1, 2, 4, 3), (2, 1, 2, 4, 3))
PROGRAMS = {
    "layers of two caches": (layers, CACHES),
    "read after a write": (counter, ((1, 2, 3),)),
    "written with the input": (lambda x, s: (mb.coreml_update_state(state=s, value=x),
                                             mb.add(x=mb.read_state(input=s), y=x))[1], ((1, 2, 3),)),
    "read only": (lambda x, s: mb.add(x=mb.read_state(input=s), y=x), ((1, 2, 3),)),
    "written and returned": (lambda x, s: mb.coreml_update_state(state=s, value=mb.exp(x=x)), ((1, 2, 3),)),
    "one of two is read": (lambda x, s, t: mb.add(x=mb.read_state(input=s), y=mb.coreml_update_state(
        state=t, value=mb.mul(x=x, y=x))), ((1, 2, 3), (1, 2, 3))),
    "two widths of channels": (lambda x, s, t: mb.add(x=x, y=mb.reduce_sum(x=mb.concat(values=[
        mb.coreml_update_state(state=s, value=mb.tile(x=x, reps=[4, 1, 1])), mb.read_state(input=t)], axis=0),
        axes=[0])), ((4, 2, 3), (2, 2, 3))),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kinds", ["merge", "io", "both"])
def test_results_and_states_have_the_same_bits_over_steps(name, kinds):
    transforms = [*[MergeStates("cache")] * (kinds != "io"), *[StateToIo()] * (kinds != "merge")]
    draft, report = transform(program_of(*PROGRAMS[name]), *transforms)
    assert report.equal and not report.notes, str(report)
    compared = {output.output for case in report.cases for output in case.outputs}
    assert {f"state s{place}" for place in range(len(PROGRAMS[name][1]))} <= compared
    kept = types_of(draft)
    assert kept.count("read_state") <= (kinds == "merge") and kept.count("coreml_update_state") <= (kinds == "merge")


def test_layers_that_are_stored_one_after_the_other_come_out_side_by_side():
    draft, report = transform(program_of(layers, CACHES), StateToIo())
    assert report.equal, str(report)
    kept = types_of(draft)
    assert "slice_update" not in kept and kept.count("concat") == 2


def test_caches_of_layers_become_channels_that_are_read_and_written_once():
    draft, _ = transform(program_of(layers, CACHES), MergeStates("cache"))
    found = types_of(draft)
    assert found.count("read_state") == found.count("coreml_update_state") == found.count("concat") == 1
    assert "slice_update" not in found and "reshape" not in found
    ranks = [var.rank for op in draft.program.functions["main"].operations if op.op_type != "const"
             for var in op.outputs]
    assert max(ranks) == 4
    assert tuple(draft.program.functions["main"].inputs["cache"].shape) == (1, 8, 4, 3)


@pytest.mark.parametrize("first", [[StateToIo()], [MergeStates("cache"), StateToIo()]])
def test_a_part_reads_what_a_later_part_returned_in_the_step_before(first):
    """Both parts read a layer of the caches, and the last one returns all layers."""
    program = program_of(layers, CACHES)
    value = [op.outputs[0].name for op in program.functions["main"].operations if op.op_type == "add" and tuple(
        op.outputs[0].shape) == (1, 2, 3)][1]
    drafts = apply_transforms(Draft(clone_program(program), "a program"), [*first, SplitAt([value])])
    names = {"s0", "s1"} if len(first) == 1 else {"cache"}
    assert len(drafts) == 2 and all(names <= {*each.program.functions["main"].inputs} for each in drafts)
    report = compare_across_interfaces(program, drafts, exactness=Exactness.BITWISE, seeds=2, steps=4)
    assert report.equal, str(report)
    assert {"out", "state s0", "state s1"} <= {each.output for case in report.cases for each in case.outputs}


@pytest.mark.parametrize("more", [(), (Rename({"cache": "past", "cache_rows": "fresh", "position": "place"}),),
                                  (Io("fp32"),)])
def test_new_rows_alone_come_out_where_they_are_written_at_a_position(more):
    program = cache_program()
    draft, report = transform(program, PadShape(SIZES), StateToIo(), *more, exactness=Exactness.ROUNDING)
    assert report.equal, str(report)
    function = draft.program.functions["main"]
    assert [tuple(var.shape) for var in function.outputs] == [(1, 2, 3), (1, 2, 3)]
    assert "cache_rows" in str(draft.done) and "state cache" in {
        output.output for case in report.cases for output in case.outputs}


def write_row(count, wide=False):
    """A program that writes a row of `count` caches (1, 4, 2, 3), rows in front of heads, at a position.

    With `wide`, the values have as many rows as the cache, and the mask selects one of them.
    """
    names = [f"s{place}" for place in range(count)]
    specs = [mb.TensorSpec((1, 4 if wide else 1, 2, 3), dtype=HALF), mb.TensorSpec((1,), dtype=types.int32),
             *(mb.StateTensorSpec((1, 4, 2, 3), dtype=HALF) for _ in names)]

    def body(x, position, *states):
        place = mb.expand_dims(x=mb.add(x=position, y=np.int32([0])), axes=[0])
        rows = mb.cast(x=mb.equal(x=np.arange(4, dtype=np.int32).reshape(4, 1), y=place), dtype="fp16")
        mask = mb.reshape(x=rows, shape=[1, 4, 1, 1])
        total = x
        for state in states:
            kept = mb.mul(x=mb.read_state(input=state), y=mb.sub(x=np.float16(1), y=mask))
            held = mb.coreml_update_state(state=state, value=mb.add(x=kept, y=mb.mul(x=x, y=mask)))
            total = mb.add(x=total, y=mb.reduce_sum(x=held, axes=[1], keep_dims=True))
        return mb.identity(x=total, name="out")

    scope: dict = {}
    given = ", ".join(names)
    exec(f"def call(x, position, {given}): return body(x, position, {given})", {"body": body}, scope)
    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(scope["call"])


@pytest.mark.parametrize(("program", "first", "output"), [
    (write_row(1), [], "s0_rows"), (write_row(2), [], "s1_rows"),
    (write_row(2), [MergeStates("cache")], "cache_new"), (write_row(1, wide=True), [], "s0_new")])
def test_rows_along_the_axis_of_merged_caches_come_out_with_all_of_them(program, first, output):
    """The rows of two caches that are merged along the axis of rows are at two places: one position was declared."""
    draft, report = transform(program, *first, StateToIo(), exactness=Exactness.ROUNDING)
    assert report.equal, str(report)
    assert output in [var.name for var in draft.program.functions["main"].outputs]


def test_rows_in_a_wrong_place_are_found(monkeypatch):
    from mil_ane_passes.transforms import state_to_io

    wrong = state_to_io._make_writer

    def off_by_one(rows):
        return wrong(state_to_io.RowWrite(rows.old, rows.new, rows.axis, rows.position, rows.offset - 1))

    program = cache_program()
    monkeypatch.setattr(state_to_io, "_make_writer", off_by_one)
    _, report = transform(program, PadShape({"y": (1, (4, 12))}), StateToIo(), exactness=Exactness.ROUNDING)
    assert report.status == "different"


@pytest.mark.parametrize(("kind", "kwargs", "reason"), [
    (StateToIo, {"names": ["t"]}, "there is no state 't'"),
    (StateToIo, {"function": "other"}, "no function 'other'"),
    (MergeStates, {"name": "x"}, "'x' is an input or output already"),
])
def test_names_that_do_not_fit_are_explained(kind, kwargs, reason):
    with pytest.raises(ane.InputError, match=reason):
        transform(program_of(counter, ((1, 2, 3),)), kind(**kwargs))


@pytest.mark.parametrize(("body", "states", "reason"), [
    (lambda x, s, t: mb.add(x=mb.read_state(input=s), y=mb.reduce_sum(x=mb.read_state(input=t))),
     ((1, 2, 3), (1, 2, 4)), "equal last two axes"),
    (lambda x, s: mb.add(x=mb.read_state(input=s), y=x), ((2, 3),), "rank 2"),
    (lambda x: mb.exp(x=x), (), "no states"),
])
def test_states_that_cannot_be_merged_are_explained(body, states, reason):
    with pytest.raises(ane.InputError, match=reason):
        transform(program_of(body, states), MergeStates("cache"))


@pytest.mark.parametrize("kind", [MergeStates("cache"), StateToIo()])
def test_a_state_in_a_block_has_to_stay(kind):
    def body(x, s):
        return mb.cond(pred=mb.greater(x=mb.reduce_sum(x=x), y=np.float16(0)),
                       _true_fn=lambda: mb.add(x=mb.read_state(input=s), y=x), _false_fn=lambda: mb.exp(x=x))

    with pytest.raises(ane.InputError, match="a block of the cond op"):
        transform(program_of(body, ((1, 2, 3),)), kind)


def test_functions_with_states_of_one_name_are_changed_both():
    program = program_of(counter, ((1, 2, 3),))
    program.functions["other"] = clone_program(program_of(PROGRAMS["written with the input"][0], ((1, 2, 3),))
                                               ).functions["main"]
    draft, report = transform(program, MergeStates("cache"), StateToIo())
    assert report.equal and {case.function for case in report.cases} == {"main", "other"}
    draft, report = transform(program, StateToIo(function="other"))
    assert report.equal and "read_state" in types_of(draft) and "read_state" not in types_of(draft, "other")


def test_the_command_writes_packages(tmp_path, capsys):
    source = make(tmp_path / "source.mlpackage", program_of(layers, CACHES), ct.target.iOS18,
                  pass_pipeline=ct.PassPipeline.EMPTY)
    merged, carried = tmp_path / "merged.mlpackage", tmp_path / "carried.mlpackage"
    assert main(["edit", str(source), "-o", str(merged), "--merge-states", "cache", "--verify"]) == 0
    assert "state 'cache' (1, 8, 4, 3) holds 's0' (2, 1, 2, 4, 3)" in capsys.readouterr().out
    assert [each.name for each in spec_of(merged).description.state] == ["cache"]
    host_program(merged)
    assert main(["edit", str(merged), "-o", str(carried), "--state-to-io", "all", "--verify"]) == 0
    assert "output 'cache_new' is what it holds afterwards" in capsys.readouterr().out
    host_program(carried)
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((1, 2, 3)).astype(np.float16)}
    state: dict = {}
    held = np.zeros((1, 8, 4, 3), np.float16)
    for _ in range(3):
        expected = ane.run(source, feeds, state=state, precision="float16")
        found = ane.run(carried, {**feeds, "cache": held}, precision="float16")
        held = found["cache_new"]
        assert found["out"].tobytes() == expected["out"].tobytes()
    assert np.array_equal(held[0, :4].reshape(2, 1, 2, 4, 3), state["s0"])


@pytest.mark.parametrize("names", [[], ["a", "b"], ()])
def test_states_are_merged_to_one_name(names, tmp_path):
    path = make(tmp_path / "in.mlpackage", program_of(layers, [(2, 1, 2, 4, 3)] * 2), ct.target.iOS18)
    with pytest.raises(ane.InputError, match="merge_states: found .*; expected one name"):
        ane.edit(path, dry_run=True, merge_states=names)
