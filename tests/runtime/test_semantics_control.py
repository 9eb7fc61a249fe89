"""Branches, loops, lists, states, random numbers and the classifier's head, at their edges."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import mil
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, get_new_symbol, mil_list, types

from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import Array, close, program, run, same_bits

PRECISIONS = ("float64", "float32", "float16")
X = np.array([1.0, 2.0], np.float32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("count", [0, 1, 6])
def test_loops_that_swap_their_variables(count: int, precision: str) -> None:
    def build(x: Any, n: Any) -> Any:
        return mb.while_loop(
            _cond=lambda i, a, b: mb.less(x=i, y=n),
            _body=lambda i, a, b: (mb.add(x=i, y=1), b, mb.add(x=a, y=b)),
            loop_vars=(np.int32(0), x, mb.mul(x=x, y=2.0)),
        )

    a, b = X, 2 * X
    for _ in range(count):
        a, b = b, a + b
    times, first, second = run(build, {"x": X, "n": np.int32(count)}, precision=precision)
    assert times == count
    close(first, a)
    close(second, b)


@pytest.mark.parametrize("count", [0, 3])
def test_loops_whose_variables_grow(count: int) -> None:
    def build(x: Any, n: Any) -> Any:
        return mb.while_loop(
            _cond=lambda i, a: mb.less(x=i, y=n),
            _body=lambda i, a: (mb.add(x=i, y=1), mb.concat(values=[a, x], axis=0)),
            loop_vars=(np.int32(0), x),
        )

    close(run(build, {"x": X, "n": np.int32(count)})[1], np.tile(X, count + 1))


@pytest.mark.parametrize("pred", [True, False])
def test_branches_of_different_shapes_that_share_outer_values(pred: bool) -> None:
    def build(x: Any, pred: Any) -> Any:
        doubled = mb.mul(x=x, y=2.0)
        return mb.cond(
            pred=pred,
            _true_fn=lambda: (doubled, mb.slice_by_size(x=x, begin=[0], size=mb.shape(x=x))),
            _false_fn=lambda: (mb.add(x=doubled, y=1.0), mb.tile(x=x, reps=mb.shape(x=x))),
        )

    feeds = {"x": X, "pred": np.bool_(pred)}
    first, second = run(build, feeds, shapes={"x": (get_new_symbol(),)})
    close(first, 2 * X if pred else 2 * X + 1)
    close(second, X if pred else np.tile(X, 2))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_lists_grow(precision: str) -> None:
    """An element that was never written reads as zeros."""

    def build(x: Any, at: Any, none: Any) -> Any:
        made = mb.list_write(ls=mb.make_list(init_length=1, elem_shape=(2,)), index=at, value=x)
        made = mb.list_scatter(ls=made, indices=[5, 0], value=mb.stack(values=[x, mb.mul(x=x, y=3.0)], axis=0))
        several = mb.list_gather(ls=made, indices=[0, 2, 5]), mb.list_gather(ls=made, indices=none)
        return mb.list_length(ls=made), mb.list_read(ls=made, index=at), *several

    feeds = {"x": X, "at": np.int32(3), "none": np.zeros((0,), np.int32)}
    length, read, gathered, nothing = run(build, feeds, precision=precision)
    assert nothing.shape == (0, 2)
    assert length == 6
    close(read, X)
    close(gathered, [3 * X, 0 * X, X])


def test_a_write_does_not_change_the_list_it_reads() -> None:
    def build(x: Any) -> Any:
        before = mb.make_list(init_length=1, elem_shape=(2,), dynamic_length=False)
        after = mb.list_write(ls=before, index=0, value=x)
        return mb.list_read(ls=before, index=0), mb.list_read(ls=after, index=0)

    before, after = run(build, {"x": X})
    close(before, 0 * X)
    close(after, X)


@pytest.mark.parametrize(("name", "at"), [("list_write", -1), ("list_read", -1), ("list_read", 2), ("list_write", 2)])
def test_list_indices_out_of_range(name: str, at: int) -> None:
    """Indices of lists do not count from the end, and a list of fixed length does not grow."""

    def build(x: Any, at: Any) -> Any:
        made = mb.make_list(init_length=2, elem_shape=(2,), dynamic_length=False)
        made = mb.list_write(ls=made, index=at, value=x) if name == "list_write" else made
        return mb.list_read(ls=made, index=0 if name == "list_write" else at)

    with pytest.raises(InputError, match=f"{name} .*list.* index .*{'negative' if at < 0 else 'out of range'}"):
        run(build, {"x": X, "at": np.int32(at)})


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bool", "fp16"])
def test_lists_of_every_dtype(dtype: str) -> None:
    def build(x: Any) -> Any:
        return mb.list_gather(ls=mb.make_list(init_length=2, elem_shape=(3,), dtype=dtype), indices=[1, 0])

    found = run(build, {"x": X}, precision="float16")[0]
    same_bits(found, np.zeros((2, 3), types.nptype_from_builtin(types.string_to_builtin(dtype))))


def counter(dtype: Any) -> Any:
    """Two reads with an update between: what was read before stays what it was."""
    made = mil.Program()
    inputs = {"x": mb.placeholder(shape=(2,), dtype=dtype), "s": mb.state_tensor_placeholder(shape=(2,), dtype=dtype)}
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        before = mb.read_state(input=function.inputs["s"])
        after = mb.coreml_update_state(state=function.inputs["s"], value=mb.add(x=before, y=function.inputs["x"]))
        function.set_outputs([mb.identity(x=before), after, mb.read_state(input=function.inputs["s"])])
        made.add_function("main", function)
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_are_stored_as_declared(precision: str) -> None:
    """2048 + 1 is no half precision number."""
    runtime, state = Runtime(counter(types.fp16), precision=precision), {"s": np.float16([2048, 1])}
    before, after, again = runtime({"x": np.float16([1, 1])}, state).values()
    close(before, [2048, 1])
    close(after, [2048 if precision == "float16" else 2049, 2])
    same_bits(again, after)
    same_bits(state["s"].astype(after.dtype), after)


def classified(labels: list[Any], probabilities: Array) -> list[Any]:
    def build(x: Any) -> Any:
        return mb.classify(probabilities=x, classes=mb.const(val=mil_list(labels)))

    return list(Runtime(program(build, {"x": probabilities}))({"x": probabilities}).values())


def test_classes_are_strings_or_integers_and_the_first_of_equal_ones_wins() -> None:
    label, table = classified([np.int64(2**40), np.int64(-7)], np.array([[0.5, 0.5]], np.float32))
    assert (label, table) == (2**40, {2**40: 0.5, -7: 0.5})
    assert classified(["a", "b"], np.array([0.25, 0.75], np.float32))[0] == "b"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_uniform_numbers_never_reach_their_bound(precision: str) -> None:
    """Rounding to half precision would carry about one draw in 4096 there."""

    def build(x: Any) -> Any:
        return mb.random_uniform(shape=[50000], low=np.float16(-1), high=np.float16(1), seed=3)

    found = run(build, {"x": X}, precision=precision)[0].astype(np.float64)
    assert found.min() >= -1
    assert found.max() < 1
    assert abs(found.mean()) < 0.02


def test_draws_agree_at_every_precision() -> None:
    def build(x: Any) -> Any:
        flags = mb.random_bernoulli(shape=[2000], prob=np.float16(0.3), seed=1)
        return flags, mb.random_bernoulli(shape=[9], prob=1.0), mb.random_categorical(x=x, size=40, seed=2)

    logits = np.log(np.array([[0.2, 0.8, 0.0], [0.0, 0.0, 1.0]]) + 1e-30).astype(np.float32)
    wide, narrow = (run(build, {"x": logits}, precision=each) for each in ("float64", "float16"))
    for each, other in zip(wide, narrow):
        np.testing.assert_array_equal(each, other)
    flags, ones, drawn = wide
    assert abs(flags.mean() - 0.3) < 0.05
    assert ones.all()
    assert (drawn[1] == 2).all()
    assert 0.6 < drawn[0].mean() <= 1
