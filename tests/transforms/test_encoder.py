"""Transforms for encoders: constants of sizes, rows at computed places, masks that are added, integers cut off."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.commands.adapt_encoder import evaluate_values
from mil_ane_passes.equivalence.changed_interfaces import compare_across_interfaces
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.encoder import AddMasks, NarrowMasks, OneHotRows
from mil_ane_passes.transforms.fix_shape import FoldSizes
from mil_ane_passes.transforms.split_inputs import SplitInputs
from tests.package.helpers import normal

ROWS, WIDTH = 16, 4
TABLE = normal(8, WIDTH).astype(np.float16)


def program_of(body, *, ids=(1, ROWS), x=(1, ROWS, WIDTH)):
    @mb.program(input_specs=[mb.TensorSpec(ids, dtype=types.int32), mb.TensorSpec(x, dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(ids, x):
        return body(ids, x)

    return program


def apply(program, *transforms):
    return apply_transforms(Draft(clone_program(program), "a program"), list(transforms))


def types_of(draft):
    return [op.op_type for op in draft.program.functions["main"].operations if op.op_type != "const"]


def buckets(ids, x):
    """Rows of a table at places on a logarithmic scale: those of powers of 2 are at the edge of two buckets."""
    places = mb.cast(x=mb.range_1d(start=1, end=ROWS + 1, step=1), dtype="fp16")
    scaled = mb.mul(x=mb.log(x=places), y=np.float16(1 / np.log(2)))
    rows = mb.gather(x=TABLE, indices=mb.cast(x=scaled, dtype="int32"), axis=0)
    return mb.add(x=x, y=rows, name="out")


def test_places_on_a_logarithmic_scale_are_evaluated_and_not_rounded():
    program = program_of(buckets)
    kept, = apply(program, FoldSizes())
    assert "log" in types_of(kept) and compare_across_interfaces(program, [kept]).equal
    folded, = apply(program, FoldSizes(evaluate_values))
    assert types_of(folded) == ["add"]
    report = compare_across_interfaces(program, [folded])
    assert report.equal, str(report)
    wrong, = apply(program, FoldSizes(lambda function, values, precision, constants: [
        TABLE[np.log(np.arange(1, ROWS + 1), dtype=np.float16).astype(np.float16).astype(int)] for _ in values]))
    assert not compare_across_interfaces(program, [wrong]).equal


@pytest.mark.parametrize("sign", [1, -1])
def test_casts_of_numbers_at_a_border_are_those_of_the_border(sign):
    """The logarithm of 8 to the base 2 is below 3 in float64 with the rounded constant, and 3 as declared."""
    def body(ids, x):
        places = mb.cast(x=mb.range_1d(start=1, end=ROWS + 1, step=1), dtype="fp16")
        scaled = mb.mul(x=mb.log(x=places), y=np.float16(sign / np.log(2)))
        whole = mb.cast(x=mb.cast(x=scaled, dtype="int32"), dtype="fp16")
        return mb.add(x=x, y=mb.expand_dims(x=whole, axes=[1]), name="out")

    unstable: list[str] = []
    folded, = apply(program_of(body), FoldSizes(partial(evaluate_values, unstable=unstable)))
    table, = (op.y.val for op in folded.program.functions["main"].operations if op.op_type == "add")
    assert unstable and table.reshape(-1)[7] == 3 * sign


def compressed_rows(places, finish=lambda rows: rows):
    """Rows of a compressed table at constant places, added to x."""
    def body(ids, x):
        table = mb.constexpr_blockwise_shift_scale(data=np.arange(20 * WIDTH, dtype=np.int8).reshape(20, WIDTH),
                                                   scale=np.full((20, 1), 0.5, np.float16), name="positions")
        return mb.add(x=x, y=finish(mb.gather(x=table, indices=np.int32(places), axis=0)), name="out")

    return body


@pytest.mark.parametrize(("places", "kept"), [
    ([list(range(ROWS))], ["slice_by_index", "add"]), (list(range(2, ROWS + 2)), ["slice_by_index", "add"]),
    ([list(range(20))], ["add"])])
def test_rows_of_a_compressed_table_in_order_stay_compressed(places, kept):
    program = program_of(compressed_rows(places), x=(1, np.size(places), WIDTH))
    folded, = apply(program, FoldSizes(evaluate_values))
    assert types_of(folded) == ["constexpr_blockwise_shift_scale", *kept]
    assert "rows of the compressed 'positions' stay compressed" in folded.done[-1].note
    report = compare_across_interfaces(program, [folded])
    assert report.equal, str(report)


def test_rows_of_a_compressed_table_out_of_order_are_unpacked_and_named():
    program = program_of(compressed_rows([[*range(ROWS - 1), 3]]))
    folded, = apply(program, FoldSizes(evaluate_values))
    assert types_of(folded) == ["add"]
    assert any("rows of the compressed 'positions' are stored unpacked, 128 bytes" in each.note
               for each in folded.done), [each.note for each in folded.done]
    assert compare_across_interfaces(program, [folded]).equal


def test_a_compressed_weight_in_another_order_is_not_unpacked():
    def body(ids, x):
        table = mb.constexpr_blockwise_shift_scale(data=np.arange(WIDTH * WIDTH, dtype=np.int8).reshape(WIDTH, WIDTH),
                                                   scale=np.full((WIDTH, 1), 0.5, np.float16))
        return mb.matmul(x=x, y=mb.transpose(x=table, perm=[1, 0]), name="out")

    folded, = apply(program_of(body), FoldSizes(evaluate_values))
    assert types_of(folded) == ["constexpr_blockwise_shift_scale", "transpose", "matmul"]


def count_from_the_end(places):
    return mb.select(cond=mb.greater_equal(x=places, y=0), a=places, b=mb.add(x=places, y=np.int32([1, ROWS])))


PICKED = {
    "one row": lambda ids, x: mb.gather(x=x, indices=mb.reduce_argmax(x=ids, axis=1, keep_dims=False), axis=1,
                                        name="out"),
    "rows in two axes": lambda ids, x: mb.gather(x=x, indices=mb.mod(x=mb.slice_by_index(
        x=ids, begin=[0, 0], end=[1, 6]), y=ROWS), axis=1, name="out"),
    "places from the end": lambda ids, x: mb.gather(x=x, indices=mb.sub(x=mb.mod(x=mb.slice_by_index(
        x=ids, begin=[0, 0], end=[1, 6]), y=ROWS), y=ROWS), axis=1, name="out"),
    "columns": lambda ids, x: mb.gather(x=x, indices=mb.mod(x=mb.slice_by_index(
        x=ids, begin=[0, 2], end=[1, 4], squeeze_mask=[True, False]), y=WIDTH), axis=2, name="out"),
    "indices": lambda ids, x: mb.gather_nd(x=x, indices=mb.stack(values=[np.int32([0]), mb.reduce_argmax(
        x=ids, axis=1, keep_dims=False)], axis=1), name="out"),
    "indices, those below 0 from the end": lambda ids, x: mb.gather_nd(x=x, indices=count_from_the_end(mb.stack(
        values=[np.int32([0]), mb.reduce_argmax(x=ids, axis=1, keep_dims=False)], axis=1)), name="out"),
}


@pytest.mark.parametrize("name", PICKED)
def test_rows_at_computed_places_are_read_by_a_product(name):
    program = program_of(PICKED[name])
    draft, = apply(program, OneHotRows())
    assert "matmul" in types_of(draft) and not {"gather", "gather_nd"} & set(types_of(draft))
    report = compare_across_interfaces(program, [draft])
    assert report.equal, str(report)


def test_wrong_rows_of_negative_places_are_found():
    """`ids` are places of rows, and a place below 0 counts from the end; here the rows of these are zeros."""
    def rows(ids, x):
        return mb.gather(x=x, indices=mb.slice_by_index(x=ids, begin=[0, 0], end=[1, 6], squeeze_mask=[True, False]),
                         axis=1, name="out")

    def found_by_a_product(ids, x):
        places = mb.slice_by_index(x=ids, begin=[0, 0], end=[1, 6], squeeze_mask=[True, False])
        return mb.matmul(x=mb.one_hot(indices=places, one_hot_vector_size=ROWS, on_value=np.float16(1),
                                      off_value=np.float16(0)), y=x, name="out")

    source = program_of(rows)
    draft, = apply(source, OneHotRows())
    assert compare_across_interfaces(source, [draft]).equal
    assert not compare_across_interfaces(source, [Draft(program_of(found_by_a_product), "a program")]).equal


@pytest.mark.parametrize("size", [-40000.0, -100.0])
def test_masks_that_hide_too_little_are_found(monkeypatch, size):
    def body(ids, x):
        hidden = mb.expand_dims(x=mb.equal(x=mb.mod(x=ids, y=2), y=1), axes=[1])
        products = mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(4))
        chosen = mb.select(cond=hidden, a=np.float16(-3e4), b=products)
        return mb.matmul(x=mb.softmax(x=chosen, axis=-1), y=x, name="out")

    program = program_of(body)
    monkeypatch.setattr("mil_ane_passes.transforms.encoder.MASKED", size)
    draft, = apply(program, AddMasks())
    assert compare_across_interfaces(program, [draft], seeds=6).equal == (size < -1e4)


@pytest.mark.parametrize("body", [
    lambda ids, x: mb.gather(x=x, indices=[3, 1], axis=1, name="out"),
    lambda ids, x: mb.gather(x=TABLE, indices=mb.mod(x=ids, y=8), axis=0, name="out"),
    lambda ids, x: mb.gather(x=mb.constexpr_blockwise_shift_scale(data=np.arange(32, dtype=np.int8).reshape(8, 4),
                             scale=np.full((8, 1), 0.5, np.float16)), indices=mb.mod(x=ids, y=8), axis=0, name="out"),
    lambda ids, x: mb.gather(x=mb.concat(values=[x, x], axis=1), indices=mb.concat(values=[mb.mod(
        x=ids, y=ROWS), [[3]]], axis=1), axis=1, name="out"),
    lambda ids, x: mb.gather_nd(x=x, indices=mb.stack(values=[np.int32([0]), np.int32([3])], axis=1), name="out"),
    lambda ids, x: mb.gather_nd(x=x, indices=count_from_the_end(mb.stack(values=[np.int32([0]), mb.sub(
        x=mb.reduce_argmax(x=ids, axis=1, keep_dims=False), y=1)], axis=1)), name="out"),
])
def test_constant_places_tables_and_many_rows_stay_as_they_are(body):
    program = program_of(body)
    draft, = apply(program, OneHotRows())
    assert types_of(draft) == types_of(Draft(program, "a program"))
    assert [each.changed for each in draft.done] == [False] and "nothing to do" in draft.done[0].note


def scores(ids, x):
    return mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=np.float16(0.1))


def hidden_by(choose):
    """Attention whose scores are chosen by integers: keys of odd ids, but not all, are hidden."""
    def body(ids, x):
        odd = mb.logical_and(x=mb.equal(x=mb.mod(x=ids, y=2), y=1), y=(np.arange(ROWS) > 0)[None])
        chosen = choose(mb.expand_dims(x=odd, axes=[1]), scores(ids, x))
        return mb.matmul(x=mb.softmax(x=chosen, axis=-1), y=x, name="out")

    return body


def test_a_select_of_scores_becomes_a_mask_that_is_added():
    for choose in (lambda hidden, found: mb.select(cond=hidden, a=np.float16(-np.inf), b=found),
                   lambda hidden, found: mb.select(cond=mb.logical_not(x=hidden), a=found, b=np.float16(-3e4))):
        program = program_of(hidden_by(choose))
        draft, = apply(program, AddMasks())
        assert "select" not in types_of(draft)
        report = compare_across_interfaces(program, [draft])
        assert report.equal, str(report)


def test_a_select_of_other_numbers_or_for_another_reader_stays():
    program = program_of(hidden_by(lambda hidden, found: mb.select(cond=hidden, a=np.float16(-5), b=found)))
    assert "select" in types_of(apply(program, AddMasks())[0])
    program = program_of(hidden_by(lambda hidden, found: mb.relu(x=mb.select(
        cond=hidden, a=np.float16(-3e4), b=found))))
    assert "select" in types_of(apply(program, AddMasks())[0])


def spread_mask(ids, x, *, repeat, read):
    """Attention with a mask of keys that is repeated for each query."""
    seen = mb.logical_or(x=mb.equal(x=mb.mod(x=ids, y=2), y=1), y=(np.arange(ROWS) == 0)[None])
    mask = mb.cast(x=repeat(mb.expand_dims(x=seen, axes=[1])), dtype="fp16")
    added = mb.mul(x=mb.sub(x=np.float16(1), y=mask), y=np.float16(-3e4))
    return mb.matmul(x=mb.softmax(x=mb.add(x=scores(ids, x), y=read(added)), axis=-1), y=x, name="out")


REPEATS = {"tile": lambda mask: mb.cast(x=mb.tile(x=mb.cast(x=mask, dtype="fp16"), reps=[1, ROWS, 1]), dtype="bool"),
           "and": lambda mask: mb.logical_and(x=np.ones((1, ROWS, 1), bool), y=mask)}


@pytest.mark.parametrize("name", REPEATS)
def test_a_mask_that_is_repeated_for_each_query_crosses_once(name):
    program = program_of(lambda ids, x: spread_mask(ids, x, repeat=REPEATS[name], read=lambda mask: mask))
    draft, = apply(program, NarrowMasks())
    assert not {"tile", "logical_and"} & set(types_of(draft))
    mul, = (op for op in draft.program.functions["main"].operations if op.op_type == "mul" and op.y.val == -3e4)
    assert tuple(mul.outputs[0].shape) == (1, 1, ROWS)
    report = compare_across_interfaces(program, [draft])
    assert report.equal, str(report)


def test_a_choice_between_constants_of_full_size_is_narrowed_as_well():
    def body(ids, x):
        seen = mb.logical_or(x=mb.equal(x=mb.mod(x=ids, y=2), y=1), y=(np.arange(ROWS) == 0)[None])
        mask = mb.select(cond=REPEATS["and"](mb.expand_dims(x=seen, axes=[1])),
                         a=np.zeros((1, ROWS, ROWS), np.float16), b=np.full((1, ROWS, ROWS), -3e4, np.float16))
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores(ids, x), y=mask), axis=-1), y=x, name="out")

    program = program_of(body)
    draft, = apply(program, AddMasks(), NarrowMasks())
    assert not {"select", "logical_and"} & set(types_of(draft))
    report = compare_across_interfaces(program, [draft])
    assert report.equal, str(report)


@pytest.mark.parametrize(("repeat", "read"), [
    (REPEATS["tile"], lambda mask: mb.transpose(x=mask, perm=[0, 2, 1])),
    (REPEATS["and"], lambda mask: mb.softmax(x=mask, axis=1)),
    (lambda mask: mb.logical_and(x=np.eye(ROWS, dtype=bool)[None], y=mask), lambda mask: mask),
])
def test_a_mask_that_differs_or_is_read_by_place_keeps_its_size(repeat, read):
    program = program_of(lambda ids, x: spread_mask(ids, x, repeat=repeat, read=read))
    draft, = apply(program, NarrowMasks())
    shapes = [tuple(op.outputs[0].shape) for each in (program, draft.program)
              for op in each.functions["main"].operations if op.op_type == "sub"]
    assert shapes == [(1, ROWS, ROWS)] * 2
    assert compare_across_interfaces(program, [draft]).equal


def embedded(ids, x):
    """Rows and a mask of the same integers, beside features."""
    rows = mb.gather(x=TABLE, indices=mb.mod(x=ids, y=8), axis=0)
    mask = mb.mul(x=mb.cast(x=mb.greater(x=ids, y=3), dtype="fp16"), y=np.float16(-10))
    mixed = mb.add(x=mb.add(x=rows, y=x), y=mb.expand_dims(x=mask, axes=[2]))
    return mb.relu(x=mixed, name="out")


def test_integers_are_cut_off_together_where_floats_read_them():
    program = program_of(embedded)
    drafts = apply(program, SplitInputs(["ids"], together=True))
    first, second = (draft.program.functions["main"] for draft in drafts)
    assert set(first.inputs) == {"ids"} and {"x"} < set(second.inputs)
    assert all(types.is_float(var.dtype) for var in second.inputs.values())
    assert "gather" not in types_of(drafts[1]) and "relu" in types_of(drafts[1])
    assert compare_across_interfaces(program, drafts).equal
