"""ANE225: values of rank 6 to 9 in five axes, against PyTorch's own."""

from __future__ import annotations

from functools import partial
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rewrites.layout._rank_lowering import decompose_permutation
from mil_ane_passes.runtime import Runtime
from tests.conversions import reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, unsupported_ops
from tests.rewrites.spellings import WAYS, converted, outputs, spelt

NAME = "lower_rank"


rule = partial(configure_rewrite, NAME)


def highest(held):
    return max(var.rank for _, op in iterate_ops(held) for var in op.outputs)


@pytest.mark.parametrize("count", [6, 7])
def test_two_transposes_make_any_order_of_six_axes(count):
    """And of seven at most four do; each step merges to five axes, and together they are the order asked for."""
    for order in list(permutations(range(count)))[::1 if count == 6 else 97]:
        steps, now = decompose_permutation(order, 5), tuple(range(count))
        for step in steps:
            assert 1 + sum(b != a + 1 for a, b in pairwise(step)) <= 5
            now = tuple(now[axis] for axis in step)
        assert now == order and len(steps) <= (2 if count == 6 else 4)


STEPS = ["transpose", "unary", "table", "scalar", "own", "sum", "max", "softmax", "concat", "split", "slice", "flip",
         "tile", "stack", "expand", "matmul", "square", "select", "norm"]


def applied(draw, kind, v, t):
    """One drawn op, in MIL and in PyTorch."""
    rank, shape = v.rank, tuple(v.shape)
    axis = draw(st.integers(0, rank - 1))
    few = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    if kind == "transpose":
        perm = draw(st.permutations(range(rank)))
        return mb.transpose(x=v, perm=list(perm)), t.permute(*perm)
    if kind == "unary":
        return mb.relu(x=v), torch.relu(t)
    if kind in ("table", "select"):
        table = np.arange(np.prod([shape[at] if at in few else 1 for at in range(rank)]), dtype=np.float16)
        table = (table / 8 - 1).reshape([shape[at] if at in few else 1 for at in range(rank)])
        cut = table[0] if table.shape[0] == 1 else table
        other = torch.from_numpy(cut.astype(np.float64))
        if kind == "table":
            return mb.add(x=cut, y=v), other + t
        return mb.select(cond=mb.greater(x=v, y=np.float16(0)), a=v, b=cut), torch.where(t > 0, t, other)
    if kind == "scalar":
        return mb.mul(x=v, y=np.float16(0.5)), t * 0.5
    if kind == "own":
        mean, own = mb.reduce_mean(x=v, axes=few, keep_dims=True), t.mean(few, keepdim=True)
        return mb.sub(x=v, y=mean), t - own
    if kind == "sum":
        return mb.reduce_sum(x=v, axes=[axis], keep_dims=draw(st.just(True))), t.sum(axis, keepdim=True)
    if kind == "max":
        return mb.reduce_max(x=v, axes=few, keep_dims=True), t.amax(few, keepdim=True)
    if kind == "softmax":
        return mb.softmax(x=v, axis=axis - rank), t.softmax(axis)
    if kind == "concat":
        return mb.concat(values=[v, mb.relu(x=v)], axis=axis), torch.cat([t, torch.relu(t)], axis)
    if kind == "split":
        if shape[axis] < 2:
            return v, t
        sizes = [1, shape[axis] - 1]
        first, second = mb.split(x=v, split_sizes=sizes, axis=axis)
        return mb.add(x=first, y=second) if sizes[1] == 1 else second, \
            t.split(sizes, axis)[0] + t.split(sizes, axis)[1] if sizes[1] == 1 else t.split(sizes, axis)[1]
    if kind == "slice":
        begin = [draw(st.integers(0, extent - 1)) for extent in shape]
        size = [draw(st.integers(1, extent - first)) for extent, first in zip(shape, begin)]
        cut = t[tuple(slice(first, first + many) for first, many in zip(begin, size))]
        return mb.slice_by_size(x=v, begin=begin, size=size), cut
    if kind == "flip":
        stride = [-1 if at == axis else 1 for at in range(rank)]
        return mb.slice_by_index(x=v, begin=[0] * rank, end=[0] * rank, stride=stride, begin_mask=[True] * rank,
                                 end_mask=[True] * rank), t.flip(axis)
    if kind == "tile":
        reps = [2 if at == axis else 1 for at in range(rank)]
        return mb.tile(x=v, reps=reps), t.repeat(*reps)
    if kind == "stack":
        return mb.reduce_max(x=mb.stack(values=[v, mb.relu(x=v)], axis=axis), axes=[axis]), \
            torch.stack([t, torch.relu(t)], axis).amax(axis)
    if kind == "expand":
        return mb.squeeze(x=mb.sigmoid(x=mb.expand_dims(x=v, axes=[axis])), axes=[axis]), torch.sigmoid(t)
    if kind == "norm":
        own = shape[-draw(st.integers(1, 2)):]
        gamma, beta = (np.linspace(*ends, int(np.prod(own)), dtype=np.float16).reshape(own)
                       for ends in ((0.5, 2), (-1, 1)))
        made = mb.layer_norm(x=v, axes=list(range(-len(own), 0)), gamma=gamma, beta=beta, epsilon=np.float16(0.125))
        weight, bias = (torch.from_numpy(each.astype(np.float64)) for each in (gamma, beta))
        return made, torch.nn.functional.layer_norm(t, own, weight, bias, 0.125)
    if kind == "matmul":
        return mb.matmul(x=v, y=v, transpose_y=True), t @ t.mT
    return mb.reduce_sum_square(x=v, axes=few, keep_dims=True), t.square().sum(few, keepdim=True)


@pytest.mark.law
@given(st.data())
def test_any_region_is_pytorchs(data):
    """Drawn ops on drawn axes: it fires and is right, or it gives one of three reasons."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=6, max_size=8))
    wanted = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))
    start = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(int(np.prod(shape)) * 2)
    start = start.astype(np.float16).reshape(2, -1)
    made = {}

    def body(x):
        v, t = mb.reshape(x=x, shape=[2 * shape[0], *shape[1:]]), torch.from_numpy(
            start.astype(np.float64)).reshape(2 * shape[0], *shape[1:])
        for kind in wanted:
            if np.prod(v.shape) < 2000:
                v, t = applied(data.draw, kind, v, t)
        made["y"] = t.reshape(-1).numpy()
        return mb.reshape(x=v, shape=[-1], name="y")

    held = build_program(body, x=start.shape)
    if highest(held) < 6:
        return
    feeds = {"x": start.astype(np.float32)}
    before = Runtime(held, precision="float16")(feeds)["y"]
    scale = np.abs(made["y"]).max(initial=1)
    found = apply_rewrite(rule(max_transposes=9), held)
    if found.fired:
        assert highest(held) <= 5 and not {"matmul"} & set(unsupported_ops(held))
        exact = Runtime(held, precision="float64")(feeds)["y"]
        np.testing.assert_allclose(exact, made["y"], rtol=0, atol=1e-12 * scale)
        after = Runtime(held, precision="float16")(feeds)["y"]
        np.testing.assert_allclose(after, before, rtol=0, atol=4e-3 * np.abs(before).max(initial=1))
        if str(found.strength) == "Exactness.BITWISE":
            np.testing.assert_array_equal(after, before)
    else:
        (reason,) = (miss.reason for miss in found.near_misses)
        assert "axes are treated differently" in reason or "the concatenated values" in reason, reason


def windows(x):
    cut = torch.relu(x.view(2, 2, 2, 2, 2, 3))
    return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3)


def video(x):
    """Patches of two frames as Qwen2-VL cuts them: nine axes."""
    cut = x.reshape(1, 2, 3, 2, 2, 2, 2, 2, 2)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(8, 48)


def twice(x):
    cut = x.view(2, 2, 2, 2, 2, 3)
    return torch.tanh(cut.permute(5, 3, 1, 4, 2, 0)).permute(1, 0, 3, 2, 5, 4).reshape(12, 8)


CASES = {"windows": (windows, (2, 4, 4, 3)), "video": (video, (1, 384)), "twice": (twice, (4, 24)),
         "mean": (lambda x: x.view(2, 2, 2, 2, 2, 3).mean((1, 3)).reshape(2, 12), (4, 24))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_what_the_host_refuses_is_converted(name, way, tmp_path):
    """Without the pass coremltools ends with an error, or fixes it itself where it is three ops in a row."""
    function, shape = CASES[name]
    if name in ("mean", "twice", "windows"):
        with pytest.raises(ValueError, match="rank <= 5"):
            converted(function, way, tmp_path, shape=shape)
    after = converted(function, way, tmp_path, passes=NAME, shape=shape)
    assert highest(after) <= 5 and not unsupported_ops(after) and not unsupported_ops(after, "m1")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    with torch.no_grad():
        true = spelt(function)(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(outputs(after, x, "float64"), true, rtol=1e-12, atol=1e-12)


def test_an_open_batch_stays_open():
    def body(x):
        cut = mb.relu(x=mb.reshape(x=x, shape=[-1, 2, 4, 2, 4, 3]))
        return mb.reshape(x=mb.transpose(x=cut, perm=[0, 1, 3, 2, 4, 5]), shape=[-1, 16, 3], name="y")

    held = build_program(body, x=(None, 8, 8, 3))
    assert apply_rewrite(rule(), held).fired and highest(held) == 5
    for batch in (1, 3):
        x = np.random.default_rng(0).standard_normal((batch, 8, 8, 3)).astype(np.float32)
        true = torch.from_numpy(x).relu().view(batch, 2, 4, 2, 4, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, 3)
        np.testing.assert_array_equal(Runtime(held, precision="float64")({"x": x})["y"], true.numpy())


SLICES = {
    "an element": (lambda v: mb.slice_by_index(x=v, begin=[0] * 5 + [1], end=[0] * 5 + [2],
                                               end_mask=[True] * 5 + [False], squeeze_mask=[False] * 5 + [True]),
                   lambda v: v[..., 1]),
    "a slice": (lambda v: mb.slice_by_index(x=v, begin=[0, 0, 0, 1, 0, 0], end=[0, 2, 4, 2, 4, 3],
                                            end_mask=[True, *[False] * 5]), lambda v: v[:, :, :, 1:2]),
    "a slice by size": (lambda v: mb.slice_by_size(x=v, begin=[0, 0, 2, 0, 0, 0], size=[-1, 2, 2, 2, 4, 3]),
                        lambda v: v[:, :, 2:4]),
}


@pytest.mark.parametrize("name", SLICES)
def test_an_axis_beside_an_open_batch_is_sliced(name):
    slice_value, expect = SLICES[name]

    def body(x):
        cut = slice_value(mb.relu(x=mb.reshape(x=x, shape=[-1, 2, 4, 2, 4, 3])))
        return mb.reshape(x=cut, shape=[-1], name="y")

    held = build_program(body, x=(None, 8, 8, 3))
    assert apply_rewrite(rule(), held).fired and highest(held) <= 5
    for batch in (1, 3):
        x = np.random.default_rng(0).standard_normal((batch, 8, 8, 3)).astype(np.float32)
        true = expect(torch.from_numpy(x).relu().view(batch, 2, 4, 2, 4, 3)).reshape(-1)
        np.testing.assert_array_equal(Runtime(held, precision="float64")({"x": x})["y"], true.numpy())


def test_an_open_batch_that_is_sliced_is_left_alone():
    def body(x):
        cut = mb.relu(x=mb.reshape(x=x, shape=[-1, 2, 4, 2, 4, 3]))
        return mb.reshape(x=mb.slice_by_size(x=cut, begin=[1, 0, 0, 0, 0, 0], size=[-1, 2, 4, 2, 4, 3]), shape=[-1])

    found = apply_rewrite(rule(), build_program(body, x=(None, 8, 8, 3)))
    assert not found.fired and "a dynamic dimension is sliced" in found.near_misses[0].reason


def test_the_shape_of_a_reshape_is_its_operand():
    def body(x):
        read = mb.shape(x=x)
        half = mb.floor_div(x=mb.gather(x=read, indices=[1, 2], axis=0), y=np.int32(2))
        rows, columns = (mb.slice_by_index(x=half, begin=[at], end=[at + 1]) for at in (0, 1))
        sizes = mb.concat(values=[[1], rows, [2], columns, [2], [3]], axis=0)
        windows = mb.transpose(x=mb.relu(x=mb.reshape(x=x, shape=sizes)), perm=[0, 1, 3, 2, 4, 5])
        entire = mb.shape(x=mb.reshape(x=x, shape=sizes), name="sizes")
        return entire, mb.reshape(x=windows, shape=[-1, 2, 2, 3], name="y")

    held = build_program(body, x=(1, None, None, 3))
    assert apply_rewrite(rule(), held).fired and highest(held) <= 5
    assert [var.name for var in held.functions["main"].outputs] == ["sizes", "y"]
    for rows, columns in ((4, 6), (2, 10)):
        x = np.random.default_rng(0).standard_normal((1, rows, columns, 3)).astype(np.float32)
        found = Runtime(held, precision="float64")({"x": x})
        assert list(found["sizes"]) == [1, rows // 2, 2, columns // 2, 2, 3]
        true = torch.from_numpy(x).relu().view(1, rows // 2, 2, columns // 2, 2, 3).transpose(2, 3)
        np.testing.assert_array_equal(found["y"], true.reshape(-1, 2, 2, 3).numpy())


REASONS = {
    "'y' of rank 6 is an output": lambda v: v,
    "'x' of rank 6 comes from outside": None,
    "cumsum 'y': cumsum is not known to be equivalent with fewer axes":
        lambda v: mb.reshape(x=mb.cumsum(x=v, axis=1, name="y"), shape=[-1]),
    "reduce_sum 'y': 6 axes are treated differently, the limit is 5":
        lambda v: mb.reduce_sum(x=v, axes=[0, 2, 4], name="y"),
    "transpose 't': 2 transposes of rank 5 would be needed, the limit is 1":
        lambda v: mb.reshape(x=mb.transpose(x=v, perm=[5, 3, 1, 4, 2, 0], name="t"), shape=[-1], name="y"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_left_alone(reason):
    build = REASONS[reason]
    if build is None:
        held = build_program(lambda x: mb.reshape(x=x, shape=[-1], name="y"), x=(2, 2, 2, 2, 2, 2))
    elif reason.endswith("output"):
        held = build_program(lambda x: mb.reshape(x=x, shape=[2] * 6, name="y"), x=(8, 8))
    else:
        held = build_program(lambda x: build(mb.reshape(x=x, shape=[2] * 6)), x=(8, 8))
    found = find_matches(rule(max_transposes=1), held)
    assert not found.fired and [miss.reason for miss in found.near_misses] == [reason]


def test_what_nobody_reads_is_left_to_the_host():
    def body(x):
        cut = mb.reshape(x=x, shape=[2] * 6)
        mb.relu(x=cut, name="idle")
        return mb.reshape(x=mb.tanh(x=cut), shape=[-1], name="y")

    held = build_program(body, x=(8, 8))
    assert [miss.reason for miss in apply_rewrite(rule(), held).near_misses] == ["nothing reads 'idle'"]


def test_an_axis_that_would_be_too_long_is_not_made():
    def body(x):
        cut = mb.reshape(x=x, shape=[3, 100, 2, 3, 100, 2])
        return mb.reshape(x=mb.softmax(x=cut, axis=3), shape=[-1, 2], name="y")

    held = build_program(body, x=(300, 1200))
    assert find_matches(rule(), held, target="m4").fired and kinds(held)["softmax"] == 1
    assert not find_matches(rule(), build_program(lambda x: mb.reshape(x=mb.add(x=mb.reshape(
        x=x, shape=[300, 2, 1, 300, 1, 2]), y=np.ones((300, 1, 2, 1, 2, 1), np.float16)), shape=[-1]),
        x=(300, 1200)), target="m1").fired


def test_a_shared_view_is_made_once(tmp_path):
    def body(x):
        cut = mb.reshape(x=x, shape=[2] * 6)
        return [mb.reshape(x=mb.transpose(x=cut, perm=[0, 2, 1, 3, 4, 5][::order]), shape=[8, 8], name=f"y{order + 1}")
                for order in (1, -1)]

    held = build_program(body, x=(8, 8))
    apply_rewrite(rule(), held)
    again = reload_program(held, tmp_path / "m.mlpackage")
    assert highest(again) <= 5
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    for order in (1, -1):
        true = x.reshape([2] * 6).transpose([0, 2, 1, 3, 4, 5][::order]).reshape(8, 8)
        np.testing.assert_array_equal(Runtime(again)({"x": x})[f"y{order + 1}"], true)
