"""Integers that select something are drawn where it is, however they get there, and all of it is reached."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.program import get_new_symbol

from mil_ane_passes import verify
from mil_ane_passes.equivalence.feeds import list_shape_choices, make_feeds
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.equivalence.test_feeds import default, function

ROWS = 20


def table(rows=ROWS):
    return mb.const(val=np.arange(rows * 2, dtype=np.float32).reshape(rows, 2))


def looked_up(i):
    return mb.gather(x=table(), indices=i, axis=0)


def guarded(i, rows=ROWS):
    """Negative ids count from the end: what the converter makes of an embedding for iOS 17."""
    return mb.select(cond=mb.greater_equal(x=i, y=0), a=i, b=mb.add(x=i, y=rows))


def in_loop(i):
    return mb.while_loop(
        _cond=lambda n, ids, v: mb.less(x=n, y=2),
        _body=lambda n, ids, v: (mb.add(x=n, y=1), ids, mb.add(x=v, y=looked_up(ids))),
        loop_vars=(0, i, mb.fill(shape=(64, 2), value=np.float32(0))))[2]


def through_branch(i):
    chosen = mb.cond(pred=mb.greater(x=mb.reduce_max(x=i, keep_dims=False), y=3), _true_fn=lambda: mb.identity(x=i),
                     _false_fn=lambda: mb.add(x=i, y=2))
    return looked_up(chosen)


def one_by_one(i):
    return mb.scatter(data=mb.fill(shape=(ROWS,), value=np.float32(0)), indices=i,
                      updates=mb.fill(shape=(64,), value=np.float32(1)), axis=0)


def beside(i):
    return mb.scatter_along_axis(data=mb.fill(shape=(ROWS,), value=np.float32(0)), indices=i,
                                 updates=mb.fill(shape=(64,), value=np.float32(1)), axis=0)


def points(i):
    """Pairs (id, 0) into a table that is longer than wide."""
    pairs = mb.stack(values=[i, mb.mul(x=i, y=0)], axis=1)
    return mb.scatter_nd(data=mb.fill(shape=(ROWS, ROWS), value=np.float32(0)), indices=pairs,
                         updates=mb.fill(shape=(64,), value=np.float32(1)))


def two_wrapped(i):
    extents = np.array([ROWS, 30], np.int32)
    pairs = mb.mod(x=mb.add(x=mb.stack(values=[i, i], axis=1), y=extents), y=extents)
    return mb.gather_nd(x=mb.const(val=np.ones((*extents, 2), np.float32)), indices=pairs)


REACHES = {
    "gather": (looked_up, 0, 19),
    "cast and back": (lambda i: looked_up(mb.cast(x=mb.cast(x=i, dtype="fp32"), dtype="int32")), 0, 19),
    "negative ids from the end": (lambda i: looked_up(guarded(i)), 0, 19),
    "the same behind casts": (lambda i: looked_up(mb.cast(x=guarded(mb.cast(x=mb.cast(x=i, dtype="int16"),
                                                                            dtype="int32")), dtype="int16")), 0, 19),
    "plus": (lambda i: looked_up(mb.add(x=i, y=3)), 0, 16),
    "plus, the other way": (lambda i: looked_up(mb.add(x=3, y=i)), 0, 16),
    "minus": (lambda i: looked_up(mb.sub(x=i, y=3)), 3, 22),
    "from": (lambda i: looked_up(mb.sub(x=25, y=i)), 6, 25),
    "times": (lambda i: looked_up(mb.mul(x=i, y=4)), 0, 4),
    "halved": (lambda i: looked_up(mb.floor_div(x=i, y=2)), 0, 39),
    "times and plus": (lambda i: looked_up(mb.add(x=mb.mul(x=i, y=2), y=np.array([1, 3] * 32, np.int32))), 0, 8),
    "at most": (lambda i: looked_up(mb.minimum(x=i, y=9)), 0, 7),
    "at most, too late": (lambda i: looked_up(mb.minimum(x=i, y=50)), 0, 19),
    "at least": (lambda i: looked_up(mb.maximum(x=i, y=2)), 0, 19),
    "rest": (lambda i: looked_up(mb.mod(x=i, y=ROWS)), 0, 7),
    "wrapped by a remainder": (lambda i: looked_up(mb.mod(x=mb.add(x=i, y=ROWS), y=ROWS)), 0, 19),
    "wrapped by a remainder, the other way": (lambda i: looked_up(mb.mod(x=mb.add(x=ROWS, y=i), y=ROWS)), 0, 19),
    "plus and the rest of another": (lambda i: looked_up(mb.mod(x=mb.add(x=i, y=5), y=ROWS)), 0, 7),
    "two wrapped by remainders": (two_wrapped, 0, 19),
    "the first of several": (lambda i: mb.add(x=looked_up(mb.maximum(x=guarded(i), y=0)),
                                              y=looked_up(mb.add(x=mb.maximum(x=guarded(i), y=0), y=4))), 0, 15),
    "one of two": (lambda i: looked_up(mb.select(cond=mb.equal(x=i, y=5), a=i, b=mb.mul(x=i, y=0))), 0, 19),
    "two readers": (lambda i: mb.add(x=looked_up(i), y=looked_up(mb.add(x=i, y=10))), 0, 9),
    "one in a loop": (in_loop, 0, 19),
    "through a branch": (through_branch, 0, 17),
    "scatter": (one_by_one, 0, 19),
    "scatter_along_axis": (beside, 0, 19),
    "scatter_nd": (points, 0, 19),
    "one_hot": (lambda i: mb.one_hot(indices=i, one_hot_vector_size=ROWS), 0, 19),
    "gather_along_axis": (lambda i: mb.gather_along_axis(x=mb.const(val=np.ones((ROWS, 2), np.float32)),
                                                         indices=mb.tile(x=mb.expand_dims(x=i, axes=[1]), reps=[1, 2]),
                                                         axis=0), 0, 19),
    "gather_nd": (lambda i: mb.gather_nd(x=mb.const(val=np.ones((ROWS, 3, 2), np.float32)),
                                         indices=mb.expand_dims(x=i, axes=[1])), 0, 19),
    "the number of set flags": (lambda i: mb.gather(x=table(64), indices=guarded(mb.sub(
        x=mb.reduce_sum(x=i, axes=[0]), y=1), 64), axis=0), 0, 1),
    "positions of set flags": (lambda i: mb.gather(x=table(128), indices=mb.cumsum(x=i, axis=0), axis=0), 0, 1),
    "nothing": (lambda i: mb.add(x=i, y=1), 0, 7),
}


@pytest.mark.parametrize(("body", "low", "high"), REACHES.values(), ids=REACHES)
def test_numbers_that_select_are_in_range_and_reach_all_of_it(body, low, high):
    made = function(body, i=(types.int32, (64,)))
    drawn = np.concatenate([default(made, seed)["i"] for seed in range(8)])
    assert set(drawn.tolist()) == set(range(low, high + 1))


# one more than the highest is there too: counted from the end, not selected by it, or a row of zeros
FORGIVING = {"from", "one of two", "through a branch", "one_hot", "rest", "at most", "nothing",
             "wrapped by a remainder", "wrapped by a remainder, the other way", "plus and the rest of another",
             "two wrapped by remainders"}


@pytest.mark.parametrize("name", REACHES)
def test_what_is_drawn_can_be_run(name):
    """The range is the program's own: it runs on every draw, and refuses one more than the highest number."""
    body, _, high = REACHES[name]
    made = Program()
    made.add_function("main", function(body, i=(types.int32, (64,))))
    runtime = Runtime(made)
    for seed in range(3):
        runtime(default(made.functions["main"], seed))
    if name not in FORGIVING:
        with pytest.raises(InputError, match="found indices"):
            runtime({"i": np.full(64, high + 1, np.int32)})


def cache(i):
    """A row written into a cache at a place that is an input."""
    begin = mb.concat(values=[np.array([0], np.int32), i, np.array([0], np.int32)], axis=0)
    end = mb.concat(values=[np.array([1], np.int32), mb.add(x=i, y=2),
                            np.array([3], np.int32)], axis=0)
    return mb.slice_update(x=mb.fill(shape=(1, 9, 3), value=np.float32(0)), begin=begin, end=end,
                           update=mb.fill(shape=(1, 2, 3), value=np.float32(1)))


PLACES = {
    "a row of a cache": (cache, 0, 7),
    "a slice by size": (lambda i: mb.slice_by_size(x=mb.fill(shape=(9, 3), value=np.float32(0)), begin=mb.concat(
        values=[i, np.array([1], np.int32)], axis=0), size=[4, 2]), 0, 5),
    "an end": (lambda i: mb.slice_by_index(x=mb.fill(shape=(9, 3), value=np.float32(0)), begin=[0, 0], end=mb.concat(
        values=[i, np.array([3], np.int32)], axis=0)), 1, 9),
    "an end that is not read": (lambda i: mb.slice_by_index(
        x=mb.fill(shape=(9, 3), value=np.float32(0)), begin=[0, 0], end_mask=[True, False],
        end=mb.concat(values=[i, np.array([3], np.int32)], axis=0)), 0, 7),
    "a count of copies": (lambda i: mb.tile(x=mb.fill(shape=(2,), value=np.float32(0)), reps=i), 1, 8),
}


@pytest.mark.parametrize(("body", "low", "high"), PLACES.values(), ids=PLACES)
def test_places_and_counts(body, low, high):
    made = function(body, i=(types.int32, (1,)))
    drawn = {int(default(made, seed)["i"].item()) for seed in range(200)}
    assert drawn == set(range(low, high + 1))


@pytest.mark.parametrize("dtype", [types.fp16, types.fp32])
def test_ids_that_come_as_floats_are_drawn_as_ids(dtype):
    made = function(lambda i: looked_up(mb.cast(x=i, dtype="int32")), i=(dtype, (256,)))
    feed = default(made)["i"]
    assert feed.dtype == types.nptype_from_builtin(dtype) and set(feed.tolist()) == set(range(ROWS))


def test_ids_fit_the_dtype_of_the_input():
    made = function(lambda i: mb.gather(x=mb.const(val=np.zeros((30_000, 1), np.float16)), axis=0,
                                        indices=mb.cast(x=i, dtype="int32")), i=(types.int8, (4096,)))
    feed = default(made)["i"]
    assert set(feed.tolist()) == set(range(128))


def test_two_inputs_that_are_added_share_the_range():
    made = function(lambda i, j: looked_up(mb.add(x=i, y=j)), i=(types.int32, (256,)), j=(types.int32, (256,)))
    feeds = default(made)
    total = feeds["i"] + feeds["j"]
    assert total.min() == 0 and 15 <= total.max() < ROWS


def test_a_table_that_is_an_input_has_the_size_of_the_run():
    length = get_new_symbol()
    made = function(lambda x, i: mb.gather(x=x, indices=i, axis=0), x=(types.fp32, (length, 2)),
                    i=(types.int32, (512,)))
    reached = []
    for choice in list_shape_choices(made):
        reached.append(int(make_feeds(made, choice, 0)["i"].max()) + 1)
        assert reached[-1] == choice.shapes["x"][0]
    assert len(set(reached)) == 2


def test_ids_that_no_row_answers_to_still_give_a_draw():
    made = function(lambda i: mb.add(x=looked_up(mb.add(x=i, y=30)), y=looked_up(i)), i=(types.int32, (8,)))
    assert set(default(made)["i"].tolist()) == {0}


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18])
def test_an_embedding_as_the_converter_makes_it(target):
    """Drawn for the program, held against PyTorch's own embedding, which takes no id that is not there."""
    torch.manual_seed(0)
    net = torch.nn.Embedding(ROWS, 4).eval()
    prog = ct.convert(torch.jit.trace(net, torch.zeros(2, 3, dtype=torch.int64)), convert_to="milinternal",
                      inputs=[ct.TensorType("ids", (2, 3), dtype=np.int32)], minimum_deployment_target=target,
                      compute_precision=ct.precision.FLOAT32)
    assert verify(prog, net).equal and verify(prog, clone_program(prog)).equal_bits
    drawn = np.concatenate([default(prog.functions["main"], seed)["ids"].ravel() for seed in range(60)])
    assert set(drawn.tolist()) == set(range(ROWS))
