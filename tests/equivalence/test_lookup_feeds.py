"""Feeds that read the rows in which tables of two programs differ, whatever op looks them up."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.equivalence.equivalence import compare_programs

COUNT, WIDTH, ROW = 3000, 4, 2345
WINDOW = 5
ORDER = np.random.default_rng(1).permutation(COUNT).astype(np.int32)
ORDER[np.flatnonzero(ORDER == ROW)[0]], ORDER[1234] = ORDER[1234], ROW


def _begin(place):
    return mb.concat(values=[place, np.int32([0])], axis=0)


def _end(place, size):
    return mb.concat(values=[mb.add(x=place, y=np.int32([size])), np.int32([WIDTH])], axis=0)


def _flags(place):
    return mb.cast(x=mb.equal(x=np.arange(COUNT, dtype=np.int32), y=place), dtype="fp32")


LOOKUPS = {
    "slice_by_size": lambda t, p: mb.slice_by_size(x=t, begin=_begin(p), size=[1, WIDTH]),
    "slice_by_size of several": lambda t, p: mb.slice_by_size(x=t, begin=_begin(p), size=[WINDOW, WIDTH]),
    "slice_by_size of columns": lambda t, p: mb.slice_by_size(
        x=t.T.copy(), begin=mb.concat(values=[np.int32([0]), mb.add(x=p, y=np.int32([3]))], axis=0), size=[WIDTH, 1]),
    "slice_by_index": lambda t, p: mb.slice_by_index(x=t, begin=_begin(p), end=_end(p, 1)),
    "slice_by_index that squeezes": lambda t, p: mb.slice_by_index(
        x=t, begin=_begin(p), end=_end(p, 1), squeeze_mask=[True, False], end_mask=[False, True]),
    "gather_along_axis": lambda t, p: mb.gather_along_axis(
        x=t, indices=mb.tile(x=mb.reshape(x=p, shape=[1, 1]), reps=[1, WIDTH]), axis=0),
    "gather_nd": lambda t, p: mb.gather_nd(x=t, indices=mb.reshape(x=p, shape=[1, 1])),
    "one_hot before matmul": lambda t, p: mb.matmul(
        x=mb.cast(x=mb.one_hot(indices=p, one_hot_vector_size=COUNT), dtype="fp32"), y=t),
    "one_hot before a transposed product": lambda t, p: mb.matmul(
        x=mb.one_hot(indices=p, one_hot_vector_size=COUNT, on_value=1.0, off_value=0.0), y=t.T.copy(),
        transpose_y=True),
    "one_hot before linear": lambda t, p: mb.linear(
        x=mb.one_hot(indices=p, one_hot_vector_size=COUNT, on_value=1.0, off_value=0.0), weight=t.T.copy()),
    "comparison before matmul": lambda t, p: mb.matmul(x=mb.expand_dims(x=_flags(p), axes=[0]), y=t),
    "gather behind a cast": lambda t, p: mb.gather(x=mb.cast(x=t, dtype="fp16"), indices=p, axis=0),
    "gather behind movements": lambda t, p: mb.gather(
        x=mb.reshape(x=mb.transpose(x=t.T.copy(), perm=[1, 0]), shape=[COUNT, 2, 2]), indices=p, axis=0),
    "gather of rows in another order": lambda t, p: mb.gather(
        x=mb.gather(x=t, indices=np.arange(COUNT, dtype=np.int32)[::-1].copy(), axis=0), indices=p, axis=0),
    "ids through a map": lambda t, p: mb.gather(x=t, indices=mb.gather(x=ORDER, indices=p, axis=0), axis=0),
    "hashed ids": lambda t, p: mb.gather(
        x=t, indices=mb.mod(x=mb.mul(x=p, y=np.int32(31)), y=np.int32(COUNT)), axis=0),
    "gather behind arithmetic": lambda t, p: mb.gather(x=mb.mul(x=t, y=np.float32(2)), indices=p, axis=0),
}


def _look_up(name, row, value, other=None):
    table = np.random.default_rng(0).standard_normal((COUNT, WIDTH)).astype(np.float32)
    table[row] = value

    def body(place):
        return mb.identity(x=LOOKUPS[other or name](table, place), name="y")

    return mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.int32)], opset_version=ct.target.iOS17)(body)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_row_that_differs_is_read(name):
    """As a decoder cuts its row out of tables of cos and sin, and of positions: the two were called equal."""
    found = compare_programs(_look_up(name, ROW, 7.0), _look_up(name, ROW, 7.5))
    assert found.status == "different" and "rows of tables that differ" in str(found), str(found)
    same = compare_programs(_look_up(name, ROW, 7.0), _look_up(name, ROW, 7.0))
    assert same.equal and "rows of tables that differ" not in str(same.to_dict())


@pytest.mark.parametrize("row", [0, COUNT - 1])
def test_the_first_and_the_last_row_are_in_a_window(row):
    name = "slice_by_size of several"
    assert compare_programs(_look_up(name, row, 7.0), _look_up(name, row, 7.5)).status == "different"


@pytest.mark.parametrize("name", ["from the end", "every other row"])
def test_a_row_whose_id_no_search_tries_is_read(name):
    """The id follows from the index by the slope that is measured: a search of ids ends before it."""
    rows, row, indices = {
        "from the end": (40_000, 19_998, lambda ids: mb.sub(x=np.int32(39_999), y=ids)),
        "every other row": (80_000, 39_998, lambda ids: mb.mul(x=ids, y=np.int32(2))),
    }[name]

    def build(value):
        table = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)
        table[row] = value

        @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.int32)], opset_version=ct.target.iOS17)
        def program(ids):
            return mb.identity(x=mb.gather(x=table, indices=indices(ids), axis=0), name="y")

        return program

    found = compare_programs(build(7.0), build(7.5))
    assert found.status == "different" and "rows of tables that differ" in str(found), str(found)


@pytest.mark.parametrize("other", ["gather_nd", "one_hot before matmul", "one_hot before linear", "slice_by_size"])
def test_a_row_is_read_where_another_op_takes_the_place_of_the_lookup(other):
    """As rewrites replace lookups by products with flags."""
    name = "comparison before matmul"
    found = compare_programs(_look_up(name, ROW, 7.0), _look_up(name, ROW, 7.5, other))
    assert any(case.failed for case in found.cases if case.feeds == "rows of tables that differ")
    same = compare_programs(_look_up(name, ROW, 7.0), _look_up(name, ROW, 7.0, other))
    assert not any(case.feeds == "rows of tables that differ" for case in same.cases)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("read", ["list_read", "list_gather"])
def test_values_of_lists_beside_thresholds_and_tables(dynamic, read):
    @mb.program(input_specs=[mb.TensorSpec((5,), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids):
        x = mb.gather(x=np.arange(88, dtype=np.float32).reshape(11, 8) / 44 - 1, indices=ids, axis=0)
        values = mb.make_list(init_length=2, dynamic_length=dynamic, elem_shape=(5, 8), dtype="fp32")
        values = mb.list_write(ls=mb.list_write(ls=values, index=0, value=x), index=1, value=mb.mul(x=x, y=2.0))
        y = mb.list_read(ls=values, index=1) if read == "list_read" else mb.list_gather(ls=values, indices=[0])
        return mb.cumsum(x=mb.clip(x=y, alpha=-0.5, beta=0.7), axis=0)

    assert compare_programs(program, program).equal
