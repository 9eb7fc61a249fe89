"""Attention of single ops, computed in one step: the results of its ops one by one, which an observer asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

from mil_ane_passes.runtime import Runtime, attention_chains, interpreter
from mil_ane_passes.utils.errors import InputError
from tests.runtime.helpers import Array, draw, program

Build = Callable[..., Any]


@pytest.fixture(autouse=True, params=[1 << 20, 30], ids=["whole", "in parts"])
def scores_at_once(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(attention_chains, "_SCORES_AT_ONCE", request.param)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each chain that a run came to: whether it was computed in one step."""
    found: list[bool] = []
    compute = attention_chains.compute_chain

    def note(*arguments: Any) -> Any:
        made = compute(*arguments)
        found.append(made is not None)
        return made

    monkeypatch.setattr(interpreter, "compute_chain", note)
    return found


def make_feeds(batch: tuple[int, ...] = (2, 3), rows: int = 11, columns: int = 7) -> dict[str, Array]:
    return {"q": draw(0, *batch, rows, 4), "k": draw(1, *batch, columns, 4), "v": draw(2, *batch, columns, 5)}


def attend(q: Any, k: Any, v: Any, change: Callable[[Any], Any] = lambda scores: scores) -> Any:
    scores = change(mb.matmul(x=q, y=k, transpose_y=True))
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v, name="y")


def compare(build: Build, feeds: dict[str, Array], *, shapes: Any = None, times: int = 2) -> list[Array]:
    """Run `build` with its attention in one step, and op by op.

    The results agree within the rounding of float32, and are NaN at the same places.
    """
    made = program(build, feeds, opset=ct.target.iOS17, shapes=shapes)
    whole = Runtime(made, observer=lambda op, var, value: None)
    joined = Runtime(made)
    for _ in range(times):
        found, expected = (list(each(feeds).values()) for each in (joined, whole))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
    return found


@pytest.mark.parametrize("batch", [(2, 3), (1, 1), (5,), ()])
@pytest.mark.parametrize("rows", [11, 1])
def test_results_are_those_of_the_ops(batch: tuple[int, ...], rows: int, computed: list[bool]) -> None:
    feeds = make_feeds(batch, rows, 60)
    (found,) = compare(attend, feeds)
    assert computed == [True, True]
    q, k, v = (each.astype(np.float64) for each in feeds.values())
    weights = np.exp(q @ k.swapaxes(-1, -2))
    np.testing.assert_allclose(found, weights / weights.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 11, 7), (1, 1, 11, 7), (2, 1, 1, 7), (11, 7), (1, 7), (7,), (11, 1)])
def test_masks_of_any_shape_and_order(shape: tuple[int, ...], computed: list[bool]) -> None:
    mask = np.where(draw(3, *shape) > 0.7, -np.inf, draw(4, *shape)).astype(np.float32)
    feeds = make_feeds() | {"mask": mask}
    compare(lambda q, k, v, mask: attend(q, k, v, lambda s: mb.add(x=mb.mul(x=s, y=np.float32(0.5)), y=mask)), feeds)
    compare(lambda q, k, v, mask: attend(q, k, v, lambda s: mb.add(x=mask, y=mb.real_div(x=s, y=np.float32(3)))), feeds)
    compare(lambda q, k, v, mask: attend(q, k, v, lambda s: mb.sub(x=mask, y=s)), feeds)
    assert computed == [True] * 6


def test_rows_that_see_nothing_are_nan(computed: list[bool]) -> None:
    mask = np.zeros((11, 7), np.float32)
    mask[3], mask[4, 1:] = -np.inf, -np.inf
    feeds = make_feeds()
    (found,) = compare(lambda q, k, v: attend(q, k, v, lambda scores: mb.add(x=scores, y=mask)), feeds)
    assert np.isnan(found[..., 3, :]).all() and np.isfinite(np.delete(found, 3, -2)).all()
    np.testing.assert_allclose(found[..., 4, :], feeds["v"][..., 0, :], rtol=1e-6)
    feeds["q"][1, 2, 5, 0], feeds["v"][0, 0, 2, 1] = np.nan, np.inf
    compare(lambda q, k, v: attend(q, k, v, lambda scores: mb.add(x=scores, y=mask)), feeds)
    assert computed == [True] * 4


def test_operands_that_are_transposed_or_broadcast(computed: list[bool]) -> None:
    q, k, v = make_feeds().values()

    def turned(q: Any, k: Any, v: Any) -> Any:
        scores = mb.matmul(x=q, y=k, transpose_x=True)
        return mb.matmul(x=mb.softmax(x=scores, axis=3), y=v, transpose_y=True)

    compare(turned, {"q": q.swapaxes(-1, -2).copy(), "k": k.swapaxes(-1, -2).copy(), "v": v.swapaxes(-1, -2).copy()})
    compare(attend, {"q": q, "k": k[:, :1].copy(), "v": v[:1, :1].copy()})
    compare(attend, {"q": q, "k": k, "v": v[0, 0].copy()})
    assert computed == [True] * 6


def test_dynamic_shapes(computed: list[bool]) -> None:
    rows, columns = get_new_symbol(), get_new_symbol()
    shapes = {"q": (2, 3, rows, 4), "k": (2, 3, columns, 4), "v": (2, 3, columns, 5)}
    for extent in (11, 1, 0):
        compare(attend, make_feeds(rows=extent), shapes=shapes)
    assert computed == [True] * 6


def test_ops_in_nested_blocks(computed: list[bool]) -> None:
    feeds = {**make_feeds(), "take": np.array([1], np.int32)}
    compare(lambda q, k, v, take: mb.cond(
        pred=mb.squeeze(x=mb.greater(x=take, y=0)), _true_fn=lambda: attend(q, k, v),
        _false_fn=lambda: mb.matmul(x=q, y=np.ones((4, 5), np.float32))), feeds)
    assert computed == [True, True]


def test_attention_on_the_result_of_attention(computed: list[bool]) -> None:
    feeds = make_feeds() | {"w": draw(3, 2, 3, 5, 6)}

    def build(q: Any, k: Any, v: Any, w: Any) -> Any:
        return mb.matmul(x=mb.softmax(x=mb.mul(x=attend(q, k, v), y=np.float32(2)), axis=-1), y=w)

    compare(build, feeds)
    assert computed == [True, True]


def _return_scores(q: Any, k: Any, v: Any) -> Any:
    scores = mb.matmul(x=q, y=k, transpose_y=True)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v), mb.relu(x=scores)


def _return_weights(q: Any, k: Any, v: Any) -> Any:
    weights = mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=-1, name="weights")
    return weights, mb.matmul(x=weights, y=v)


def _over_another_axis(q: Any, k: Any, v: Any) -> Any:
    return mb.matmul(x=mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True), axis=2), y=v)


def _with_larger_mask(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, v, lambda scores: mb.add(x=scores, y=np.ones((4, 1, 1, 11, 7), np.float32)))


def _with_larger_values(q: Any, k: Any, v: Any) -> Any:
    return attend(q, k, mb.stack(values=[v, v, v], axis=0))


def _of_itself(q: Any, k: Any, v: Any) -> Any:
    scores = mb.matmul(x=q, y=k, transpose_y=True)
    return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=scores), axis=-1), y=v)


@pytest.mark.parametrize("name", ["query", "key", "mask"])
def test_an_operand_whose_last_reader_is_not_of_the_attention(name: str, computed: list[bool]) -> None:
    """It is read when the attention is computed, after that reader."""
    def build(query: Any, key: Any, mask: Any) -> Any:
        made = {"query": mb.sin(x=query), "key": mb.sin(x=key), "mask": mb.sin(x=mask)}
        scores = mb.add(x=mb.matmul(x=made["query"], y=made["key"], transpose_y=True), y=made["mask"])
        other = mb.reduce_sum(x=mb.relu(x=made[name]), keep_dims=False)
        weights = mb.softmax(x=scores, axis=-1)
        second = mb.matmul(x=mb.softmax(x=mb.matmul(x=made["query"], y=made["key"], transpose_y=True), axis=-1), y=key)
        return mb.add(x=mb.add(x=mb.matmul(x=weights, y=key), y=second), y=other)

    shapes = {"query": (1, 2, 5, 4), "key": (1, 2, 5, 4), "mask": (1, 1, 5, 5)}
    specs = [mb.TensorSpec(shape) for shape in shapes.values()]
    made = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(build)
    feeds = {each: draw(seed, *shape) for seed, (each, shape) in enumerate(shapes.items())}
    (found,), (expected,) = (Runtime(made, precision=precision)(feeds).values() for precision in ("float32", "float64"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert computed == [True, True]


@pytest.mark.parametrize("build", [
    _return_scores, _return_weights, _over_another_axis, _with_larger_mask, _with_larger_values, _of_itself])
def test_other_ops_run_one_by_one(build: Build, computed: list[bool]) -> None:
    compare(build, make_feeds())
    assert True not in computed


@pytest.mark.parametrize("options", [
    {"precision": "float64"}, {"precision": "float16"}, {"quirks": ["exp_overflow"]},
    {"observer": lambda op, var, value: None}, {"partial_sums": lambda op, bound: None},
], ids=["float64", "float16", "quirks", "observer", "partial sums"])
def test_only_plain_calls_at_float32_join_ops(options: dict[str, Any], computed: list[bool]) -> None:
    feeds = make_feeds()
    Runtime(program(attend, feeds), **options)(feeds)
    assert computed == []


def test_operands_that_do_not_fit_are_refused_by_their_op() -> None:
    columns, more = get_new_symbol(), get_new_symbol()
    feeds = make_feeds()
    shapes = {"k": (2, 3, columns, 4), "mask": (11, more)}
    made = program(lambda q, k, v, mask: attend(q, k, v, lambda s: mb.add(x=s, y=mask, name="masked")),
                   feeds | {"mask": draw(3, 11, 7)}, opset=ct.target.iOS17, shapes=shapes)
    for changed, named in (({"mask": draw(3, 11, 6)}, "add 'masked'"), ({"k": draw(1, 2, 3, 8, 4)}, "add 'masked'"),
                           ({"k": draw(1, 2, 3, 8, 4), "mask": draw(3, 11, 8)}, "matmul 'y'")):
        with pytest.raises(InputError, match=f"^{named}: cannot be computed"):
            Runtime(made)(feeds | {"mask": draw(3, 11, 7)} | changed)


def _draw_overlapping(random: np.random.Generator) -> Build:
    """Return a function with attention whose ops are interleaved with others, and which share operands."""
    def build(query: Any, key: Any, value: Any) -> Any:
        pool = [mb.sin(x=query), mb.cos(x=key), value]

        def pick() -> Any:
            return pool[int(random.integers(max(0, len(pool) - 6), len(pool)))]

        for _ in range(int(random.integers(6, 16))):
            scores = mb.matmul(x=pick(), y=pick(), transpose_y=bool(random.integers(2)))
            pool.append(mb.relu(x=pick()) if random.integers(2) else mb.matmul(x=pick(), y=pick()))
            if random.integers(2):
                scores = getattr(mb, ["add", "sub", "mul"][int(random.integers(3))])(x=scores, y=pick())
            weights = mb.softmax(x=scores, axis=-1)
            pool.append(mb.tanh(x=pick()) if random.integers(2) else weights)
            pool.append(mb.matmul(x=weights, y=pick()))
        return tuple(mb.identity(x=each) for each in pool[-3:])

    return build


def test_attention_among_others_of_which_it_shares_operands(computed: list[bool]) -> None:
    """A law on random programs: each variable is kept as long as any attention reads it."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        made = mb.program(input_specs=[mb.TensorSpec((1, 2, 4, 4))] * 3, opset_version=ct.target.iOS17)(
            _draw_overlapping(random))
        feeds = {name: draw(number, 1, 2, 4, 4) for number, name in enumerate(("query", "key", "value"))}
        found = Runtime(made, precision="float32")(feeds)
        expected = Runtime(made, precision="float32", observer=lambda op, var, value: None)(feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    assert sum(computed) > 40
