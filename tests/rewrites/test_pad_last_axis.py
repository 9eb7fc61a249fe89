"""ANE104: PyTorch's values from rows that are padded once, carried, and cut once."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.equivalence.comparison import Strictness, compare_outputs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import load_converted
from tests.rewrites.helpers import half, kinds, torch_outputs, unsupported_ops
from tests.rules.helpers import converted


def padded(built, target="all", **options):
    return apply_rewrite(find_rewrite("pad_last_axis").configured(**options), built, target=target)


def held(built, module, *inputs, precision="float64", tolerance=1e-12):
    """The program's outputs against PyTorch's, in double precision."""
    feeds = dict(zip(built.functions["main"].inputs, (each.numpy() for each in inputs)))
    (found,) = Runtime(built, precision=precision)(feeds).values()
    np.testing.assert_allclose(found, torch_outputs(module, *inputs), rtol=tolerance, atol=tolerance)


def numbers(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float16)).float()


class Perceptron(torch.nn.Module):
    """A hidden width of 100, as people choose it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 100), torch.nn.Linear(100, 8)
        self.scale = torch.nn.Parameter(torch.linspace(-1, 1, 100))

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(x))
        return self.second(torch.relu(hidden * self.scale + 0.5))


class Scores(torch.nn.Module):
    """Attention with heads of 40: queries and keys meet over the padded axis."""

    def forward(self, x):
        q, k, v = (each.reshape(2, 7, 2, 40).transpose(1, 2) for each in x.chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Channels(torch.nn.Module):
    """(batch, channels, 1, sequence), Apple's layout: convs of one leave the sequence alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(8, 16, 1), torch.nn.Conv2d(16, 4, 1)

    def forward(self, x):
        return torch.tanh(self.second(torch.nn.functional.silu(self.first(x))))


MODELS = {
    "perceptron": (Perceptron, (2, 3, 32), {"pad": 0, "slice_by_size": 1}),
    "scores": (Scores, (2, 7, 240), {"pad": 2, "slice_by_size": 0}),
    "channels first": (Channels, (1, 8, 1, 50), {"pad": 1, "slice_by_size": 1}),
}


@pytest.mark.parametrize("way", ["traced", "exported"])
@pytest.mark.parametrize("model", MODELS)
def test_models_of_torch_keep_their_values(model, way):
    kind, shape, moves = MODELS[model]
    torch.manual_seed(0)
    module, x = half(kind()), numbers(*shape)
    built = converted(module, x, way=way)
    assert padded(built).fired
    assert {name: kinds(built)[name] for name in moves} == moves
    assert not unsupported_ops(built, "m4") and not unsupported_ops(built, "m1")
    held(built, module, x, precision="float16", tolerance=4e-3)
    held(built, module, x, tolerance=1e-3)  # constants of the converted program are fp16's


def test_all_but_the_constants_is_exact():
    x = numbers(2, 3, 50)

    class Chain(torch.nn.Module):
        def forward(self, x):
            return torch.relu(torch.tanh(x * 2 + 0.5) * torch.sigmoid(x))

    built = converted(Chain(), x)
    assert padded(built).strength is Exactness.BITWISE
    held(built, Chain(), x)


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(tmp_path, target):
    loaded = load_converted(Channels(), torch.zeros(1, 8, 1, 50), path=tmp_path / "m.mlpackage",
                            passes="pad_last_axis", minimum_deployment_target=target)
    assert kinds(loaded)["pad"] == kinds(loaded)["slice_by_size"] == 1
    assert not find_matches(find_rewrite("pad_last_axis").configured(), loaded).fired
    (out,) = loaded.functions["main"].outputs
    assert tuple(out.shape) == (1, 4, 1, 50)


def chain(width, x=None):
    def body(x):
        return mb.tanh(x=mb.sin(x=mb.tanh(x=mb.sin(x=x))), name="y")

    return build_program(body, x=(2, width))


@pytest.mark.parametrize("width, options, wide", [
    (33, {}, 64), (63, {}, 64), (97, {}, 128), (32, {}, None), (65, {}, None), (600, {}, None), (1, {}, None),
    (64, {}, None), (600, {"min_gain": -0.06}, 640), (600, {"unit": "bytes"}, 608), (32, {"unit": "bytes"}, None),
    (1, {"unit": "bytes"}, None), (600, {"multiple": 32}, 608), (33, {"min_gain": 0.01}, None),
])
def test_a_row_is_padded_where_it_takes_no_more_bytes(width, options, wide):
    built = chain(width)
    padded(built, **options)
    widths = {int(op.outputs[0].shape[-1]) for _, op in iterate_ops(built) if op.op_type in ("sin", "tanh")}
    assert widths == {wide or width}


def test_no_extent_takes_less_memory_for_being_padded():
    """The page says so: rows are padded to 64 bytes by the ANE itself."""
    rule = find_rewrite("pad_last_axis").configured(min_gain=1e-9)
    assert not any(find_matches(rule, chain(width)).fired for width in range(2, 130))


def test_what_is_returned_on_the_way_is_cut_as_well():
    built = build_program(lambda x: [mb.sin(x=x, name="a"), mb.tanh(x=mb.sin(x=x), name="b")], x=(2, 50))
    assert padded(built, min_ops=1).fired
    assert kinds(built)["pad"] == 1 and kinds(built)["slice_by_size"] == 2
    assert [var.name for var in built.functions["main"].outputs] == ["a", "b"]


def test_infinity_in_the_data_stays_where_it_is():
    """Columns of zeros in a factor make NaN of an infinite input: never in what is read."""
    def body(x):
        hidden = mb.relu(x=mb.linear(x=x, weight=-np.abs(make_weight(50, 4)) - np.float16(1)))
        return mb.linear(x=mb.relu(x=hidden), weight=make_weight(3, 50), bias=make_weight(3), name="y")

    built = build_program(body, x=(2, 4))
    assert padded(built, min_ops=1).fired
    x = np.array([[np.inf, 1, 1, 1], [1, 1, 1, 1]], np.float16)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], np.tile(make_weight(3), (2, 1)))


def test_weights_are_replaced_not_doubled_and_compressed_ones_left():
    built = build_program(lambda x: mb.relu(x=mb.relu(x=mb.linear(x=x, weight=make_weight(50, 8)))), x=(2, 8))
    padded(built)
    consts = [np.asarray(op.outputs[0].val) for _, op in iterate_ops(built) if op.op_type == "const"]
    held_bytes = [each.nbytes for each in consts if each.ndim == 2]
    assert held_bytes == [64 * 8 * 2]


def test_several_functions_and_a_shared_input_are_padded_each():
    built = chain(50)
    built.add_function("other", chain(50).functions["main"])
    assert len(padded(built).fired) == 2 and kinds(built)["pad"] == 2


@pytest.mark.parametrize("name, body, shape", [
    ("batch_norm", lambda x: mb.batch_norm(x=mb.sin(x=x), mean=make_weight(4), variance=np.square(make_weight(4)),
                                           epsilon=np.float16(0.25)), (2, 4, 50)),
    ("factor from the left", lambda x: mb.matmul(x=make_weight(3, 50), y=mb.sin(x=x)), (50, 50)),
    ("its own transpose", lambda x: (lambda v: mb.matmul(x=v, y=v, transpose_x=True))(mb.sin(x=x)), (6, 50)),
    ("backwards", lambda x: mb.slice_by_index(
        x=mb.sin(x=x), begin=[5, 0], end=[0, 50], stride=[-2, 1]), (6, 50)),
    ("column by row", lambda x: mb.mul(x=mb.reduce_max(x=x, axes=[-1], keep_dims=True), y=make_weight(50)), (6, 50)),
    ("five axes", lambda x: mb.transpose(x=mb.sin(x=x), perm=[0, 2, 1, 3, 4]), (1, 2, 3, 3, 50)),
    ("one axis", lambda x: mb.sub(x=make_weight(50), y=x), (50,)),
    ("a norm", lambda x: mb.reduce_l2_norm(x=mb.sin(x=x), axes=[0, -1]), (3, 50)),
    ("a joined axis", lambda x: mb.stack(values=[mb.sin(x=x), x], axis=1), (3, 50)),
])
@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18])
def test_it_is_built_in_every_opset(name, body, shape, opset):
    built = build_program(lambda x: mb.tanh(x=body(x), name="y"), x=shape, opset=opset)
    before = clone_program(built)
    assert padded(built, min_ops=0).fired
    x = numbers(*shape).numpy().astype(np.float16)
    old, new = (Runtime(each, precision="float64")({"x": x})["y"] for each in (before, built))
    np.testing.assert_allclose(new, old, rtol=0, atol=1e-12)


ELEMENTWISE = ("relu", "tanh", "exp", "log", "inverse", "sqrt", "abs", "softsign")
LINKS = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(ELEMENTWISE)),
    st.tuples(st.just("binary"), st.sampled_from(["add", "mul", "sub", "real_div", "maximum"]), st.booleans()),
    st.tuples(st.just("earlier"), st.sampled_from(["add", "mul", "minimum"]), st.integers(0, 9)),
    st.tuples(st.just("matmul"), st.sampled_from(["columns", "inner", "both", "square"])),
    st.tuples(st.sampled_from(["softmax", "reduce_sum", "reduce_max", "turn", "halves"]), st.integers(0, 2)),
)


def linked(values, link, width):
    """One more op behind the last of `values`, all of shape (3, 4, width)."""
    x, kind = values[-1], link[0]
    if kind == "unary":
        more = {"epsilon": np.float16(0.0)} if link[1] in ("log", "inverse") else {}
        return getattr(mb, link[1])(x=x, **more)
    if kind == "binary":
        return getattr(mb, link[1])(x=x, y=make_weight(4, width) if link[2] else make_weight(4, 1))
    if kind == "earlier":
        return getattr(mb, link[1])(x=values[link[2] % len(values)], y=x)
    if kind == "matmul":
        narrow = {"inner": 64, "columns": width}.get(link[1], width)
        if link[1] == "square":
            return mb.matmul(x=mb.tanh(x=mb.matmul(x=x, y=mb.relu(x=x), transpose_y=True)), y=x)
        found = mb.matmul(x=x, y=make_weight(width, narrow))
        return mb.matmul(x=found, y=make_weight(narrow, width)) if link[1] != "columns" else found
    if kind == "turn":
        return mb.transpose(x=mb.reshape(x=mb.transpose(x=x, perm=[1, 0, 2]), shape=[4, 3, width]), perm=[1, 0, 2])
    if kind == "halves":
        return mb.concat(values=mb.split(x=x, num_splits=2, axis=1)[::-1], axis=1)
    if kind == "softmax":
        return mb.softmax(x=x, axis=link[1])
    return mb.sub(x=x, y=getattr(mb, kind)(x=x, axes=[link[1]], keep_dims=True))


@pytest.mark.law
@given(width=st.integers(2, 140), links=st.lists(LINKS, min_size=1, max_size=6), seed=st.integers(0, 9),
       special=st.sampled_from([None, np.inf, np.nan, -0.0]), unit=st.sampled_from(["elements", "bytes"]),
       returned=st.booleans())
def test_any_chain_keeps_its_values(width, links, seed, special, unit, returned):
    def body(x):
        values = [x]
        for link in links:
            values.append(linked(values, link, width))
        return [mb.identity(x=values[-1], name="y"), *([mb.identity(x=values[1], name="z")] if returned else [])]

    built = build_program(body, x=(3, 4, width))
    before = clone_program(built)
    trace = padded(built, unit=unit, min_gain=-64.0, min_ops=0)
    step = 64 if unit == "elements" else 32
    assert bool(trace.fired) or width % step == 0
    moves = [[int(word) for word in hit.reason.split() if word.isdigit()] for hit in trace.fired]
    assert kinds(built)["pad"] == sum(each[-2] for each in moves)
    assert kinds(built)["slice_by_size"] == sum(each[-1] for each in moves)
    assert not padded(built, unit=unit, min_gain=-64.0, min_ops=0).fired
    x = np.random.default_rng(seed).standard_normal((3, 4, width)).astype(np.float16)
    if special is not None:
        x.flat[seed] = special
    promised = Strictness(trace.strength or Exactness.BITWISE, False, 0.0)
    exact = Runtime(before, precision="float64")({"x": x})
    for precision in ("float64", "float16"):
        old, new = (Runtime(each, precision=precision)({"x": x}) for each in (before, built))
        found = compare_outputs(old, new, promised, None if precision == "float64" else exact)
        assert not [str(each) for each in found if not each.passed]
