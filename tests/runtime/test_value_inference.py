"""Ops against coremltools' own `value_inference`: the op on a constant is folded by coremltools, on a feed by us."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import mil
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function

from tests.runtime.helpers import Array, close, draw, run


def folded(build: Any, feeds: dict[str, Array], opset: Any) -> list[Array]:
    """The values coremltools infers when all inputs are constants."""
    made = mil.Program()
    with Function({"unused": mb.placeholder(shape=(1,))}, opset_version=opset) as function:
        outputs = build(**{name: mb.const(val=value) for name, value in feeds.items()})
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        values = [var.val for var in outputs]
        function.set_outputs(outputs)
        made.add_function("main", function)
    assert all(value is not None for value in values)
    return [np.asarray(value) for value in values]


def agree(build: Any, feeds: dict[str, Array], opset: Any = ct.target.iOS18) -> None:
    """Host and runtime find the same."""
    for found, expected in zip(run(build, feeds, opset=opset), folded(build, feeds, opset)):
        close(found, expected)


X = draw(0, 2, 3, 4, 5)
POSITIVE = np.abs(X) + 0.1
UNIT = np.tanh(X)
INTS = np.random.default_rng(1).integers(-9, 10, (2, 3, 4)).astype(np.int32)

_UNARY = {
    "abs": X, "acos": UNIT, "asin": UNIT, "atan": X, "atanh": UNIT, "ceil": X, "cos": X, "cosh": X, "erf": X,
    "exp": X, "exp2": X, "floor": X, "inverse": POSITIVE, "log": POSITIVE, "round": X * 4, "rsqrt": POSITIVE,
    "sign": X, "sin": X, "sinh": X, "sqrt": POSITIVE, "square": X, "tan": X, "tanh": X, "relu": X, "relu6": 9 * X,
    "sigmoid": X, "softplus": X, "softsign": X, "identity": X,
}  # fmt: skip


@pytest.mark.parametrize("name", _UNARY)
def test_unary(name: str) -> None:
    agree(lambda x: getattr(mb, name)(x=x), {"x": _UNARY[name]})


@pytest.mark.parametrize("name", ["abs", "sign", "square"])
def test_unary_on_integers(name: str) -> None:
    agree(lambda x: getattr(mb, name)(x=x), {"x": INTS})


_TENS = np.array([0.5, -1.0, 2.0], np.float32)

_PARAMETERS: dict[str, dict[str, Any]] = {
    "clip": {"alpha": -0.5, "beta": 0.7},
    "threshold": {"alpha": 0.25},
    "clamped_relu": {"alpha": 0.2, "beta": 0.7},
    "elu": {"alpha": 0.7},
    "leaky_relu": {"alpha": 0.1},
    "linear_activation": {"alpha": 0.3, "beta": 0.2},
    "prelu": {"alpha": _TENS},
    "scaled_tanh": {"alpha": 1.5, "beta": 0.3},
    "sigmoid_hard": {"alpha": 0.2, "beta": 0.5},
    "softplus_parametric": {"alpha": _TENS, "beta": _TENS},
    "thresholded_relu": {"alpha": 0.4},
    "softmax": {"axis": 1},
    "l2_norm": {"epsilon": 1e-3},
    "layer_norm": {"axes": [2, -1], "gamma": draw(3, 4, 5), "beta": draw(4, 4, 5), "epsilon": 1e-3},
    "transpose": {"perm": [2, -1, 0, 1]},
    "expand_dims": {"axes": [0, -1]},
    "reverse": {"axes": [1, -1]},
    "tile": {"reps": [1, 2, 1, 3]},
    "band_part": {"lower": 1, "upper": 2},
    "cumsum": {"axis": 2, "reverse": True},
    "argsort": {"axis": 1, "ascending": True},
    "topk": {"k": 2, "axis": -1},
    "flatten2d": {"axis": 2},
    "slice_by_size": {"begin": [0, 1, -3, 0], "size": [-1, 2, 2, 4]},
    "split": {"split_sizes": [1, 3], "axis": 2},
}


@pytest.mark.parametrize("name", _PARAMETERS)
def test_with_parameters(name: str) -> None:
    agree(lambda x: getattr(mb, name)(x=x, **_PARAMETERS[name]), {"x": X.copy()})


@pytest.mark.parametrize("mode", ["EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"])
def test_gelu(mode: str) -> None:
    agree(lambda x: mb.gelu(x=x, mode=mode), {"x": X})


_BINARY = ["add", "sub", "mul", "floor_div", "mod", "maximum", "minimum", "greater", "greater_equal", "less", "equal"]


@pytest.mark.parametrize("name", [*_BINARY, "less_equal", "not_equal", "real_div"])
def test_binary(name: str) -> None:
    agree(lambda x, y: getattr(mb, name)(x=x, y=y), {"x": X, "y": draw(1, 4, 1)})


@pytest.mark.parametrize("name", _BINARY)
def test_binary_on_integers(name: str) -> None:
    y = np.array([[-3], [2], [5]], np.int32)
    agree(lambda x, y: getattr(mb, name)(x=x, y=y), {"x": INTS, "y": y})


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logical(name: str) -> None:
    agree(lambda x, y: getattr(mb, name)(x=x, y=y), {"x": X > 0, "y": draw(1, 5) > 0})


_REDUCTIONS = [
    "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum_exp", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod",
    "reduce_sum", "reduce_sum_square",
]  # fmt: skip


@pytest.mark.parametrize("keep_dims", [True, False])
@pytest.mark.parametrize("name", _REDUCTIONS)
def test_reductions(name: str, keep_dims: bool) -> None:
    agree(lambda x: getattr(mb, name)(x=x, axes=[1, -1], keep_dims=keep_dims), {"x": X})
    agree(lambda x: mb.reduce_log_sum(x=x, axes=[0, 2], keep_dims=keep_dims), {"x": POSITIVE})


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_mean", "reduce_max", "reduce_prod", "reduce_l2_norm"])
def test_reductions_of_integers(name: str) -> None:
    agree(lambda x: getattr(mb, name)(x=x, axes=[-1]), {"x": INTS})


@pytest.mark.parametrize("name", ["reduce_argmax", "reduce_argmin"])
def test_arguments_of_extremes(name: str) -> None:
    agree(lambda x: getattr(mb, name)(x=x, axis=2), {"x": X})


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_pad(mode: str) -> None:
    agree(lambda x: mb.pad(x=x, pad=[1, 2, 3, 0], mode=mode, constant_val=1.5), {"x": X})


@pytest.mark.parametrize("shape", [[6, -1], [-1, 0, 5], [1, 0, -1, 0], [2, 3, 20]])
def test_reshape(shape: list[int]) -> None:
    agree(lambda x: mb.reshape(x=x, shape=shape), {"x": X if shape[0] != 1 else X.reshape(6, 20)})


def test_slice_by_index() -> None:
    def build(x: Any) -> Any:
        return (
            mb.slice_by_index(x=x, begin=[0, 2, 0, -1], end=[2, 0, 4, 0], stride=[1, -1, 2, -2]),
            mb.slice_by_index(
                x=x, begin=[1, 1, -2, 0], end=[0, 3, 0, 99], begin_mask=[False, True, False, False],
                end_mask=[False, False, True, False], squeeze_mask=[True, False, False, False],
            ),
        )  # fmt: skip

    agree(build, {"x": X})


def test_slice_update() -> None:
    def build(x: Any, update: Any) -> Any:
        return mb.slice_update(x=x, update=update, begin=[0, 1, 0, 0], end=[2, 3, 4, 5], stride=[1, 1, 2, 2])

    agree(build, {"x": X, "update": draw(2, 2, 2, 2, 3)})


@pytest.mark.parametrize(("axis", "batch_dims"), [(0, 0), (-1, 0), (1, 1), (2, 1)])
def test_gather(axis: int, batch_dims: int) -> None:
    indices = np.array([[0, 2, 1], [1, 0, 0]], np.int32) if axis else np.array([1, 0, 1], np.int32)

    def build(x: Any, indices: Any) -> Any:
        return mb.gather(x=x, indices=indices, axis=axis, batch_dims=batch_dims)

    agree(build, {"x": X, "indices": indices})


def test_gather_along_axis() -> None:
    indices = np.random.default_rng(0).integers(0, 4, (2, 3, 7, 5)).astype(np.int32)
    agree(lambda x, indices: mb.gather_along_axis(x=x, indices=indices, axis=2), {"x": X, "indices": indices})


def test_joining() -> None:
    feeds = {"x": X, "y": draw(1, 2, 3, 4, 5)}
    agree(lambda x, y: mb.concat(values=[x, y], axis=1), feeds)
    agree(lambda x, y: mb.stack(values=[x, y], axis=-2), feeds)
    agree(lambda x, y: mb.select(cond=mb.greater(x=x, y=0.0), a=x, b=y), feeds)


def test_products() -> None:
    weight, bias = draw(1, 6, 5), draw(2, 6)
    agree(lambda x: mb.linear(x=x, weight=weight, bias=bias), {"x": X[0]})
    agree(lambda x, y: mb.matmul(x=x, y=y, transpose_x=True), {"x": X, "y": draw(1, 3, 4, 2)})
    agree(lambda x, y: mb.matmul(x=x, y=y, transpose_y=True), {"x": draw(0, 5), "y": draw(1, 3, 4, 5)})
    agree(lambda x, y: mb.einsum(values=[x, y], equation="nchw,nwhu->nchu"), {"x": X, "y": draw(1, 2, 5, 4, 3)})


def test_making() -> None:
    agree(lambda x: mb.fill(shape=[2, 3], value=1.5), {"x": X})
    agree(lambda x: mb.fill_like(ref_tensor=x, value=2), {"x": X})
    agree(lambda x: mb.range_1d(start=x, end=7.5, step=0.75), {"x": np.float32(1.25)})
    agree(lambda x: mb.non_zero(x=x), {"x": INTS})
    agree(lambda x: mb.shape(x=x), {"x": X})


@pytest.mark.parametrize("zero_point", [None, np.array([3, -4, 5], np.int8)])
def test_quantize(zero_point: Array | None) -> None:
    scale = np.array([0.1, 0.02, 0.3], np.float32)
    options = {"scale": scale, "zero_point": zero_point, "axis": 1}
    agree(lambda input: mb.quantize(input=input, output_dtype="int8", **options), {"input": X})


def test_attention() -> None:
    feeds = {"query": draw(0, 2, 3, 4, 8), "key": draw(1, 2, 3, 6, 8), "value": draw(2, 2, 3, 6, 5)}
    agree(lambda **given: mb.scaled_dot_product_attention(**given), feeds)
    mask = np.random.default_rng(0).random((4, 6)) > 0.3
    agree(lambda **given: mb.scaled_dot_product_attention(**given), {**feeds, "attn_mask": mask})
    agree(lambda **given: mb.scaled_dot_product_attention(**given), {**feeds, "attn_mask": draw(5, 4, 6)})
