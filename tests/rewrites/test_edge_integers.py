"""ANE264: integers are prepared at the front of the model."""

from __future__ import annotations

from itertools import pairwise

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import make_weight
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model


def changes(built):
    rules = [rule.configured() for rule in get_all_rules().values()]
    plan = predict_plan(built, rules, target="m4")[0]
    return sum(one.backend != other.backend for one, other in pairwise(plan.segments)), sum(
        segment.milliseconds for segment in plan.segments)


def with_integers(body, x=(1, 64, 256, 256), i=(64,)):
    placeholders = {"x": mb.placeholder(shape=x, dtype=types.fp16), "i": mb.placeholder(shape=i, dtype=types.int32)}
    with Function(placeholders, opset_version=ct.target.iOS17) as function:
        made = body(**function.inputs)
        function.set_outputs(made if isinstance(made, list) else [made])
    built = Program()
    built.add_function("main", function)
    return built


def test_one_change_of_processor_is_left_of_two():
    """Convs, then numbers prepared from an integer input, then convs: the segments are those of the order of ops."""
    def body(x, i):
        kernel = make_weight(64, 64, 3, 3)
        for _ in range(4):
            x = mb.relu(x=mb.conv(x=x, weight=kernel, pad_type="same"))
        wrapped = mb.select(cond=mb.greater_equal(x=i, y=np.int32(0)), a=i, b=mb.add(x=i, y=np.int32(64)))
        x = mb.mul(x=x, y=mb.reshape(x=mb.cast(x=wrapped, dtype="fp16"), shape=[1, 64, 1, 1]))
        for _ in range(4):
            x = mb.relu(x=mb.conv(x=x, weight=kernel, pad_type="same"))
        return x

    built = with_integers(body)
    before = changes(built)
    (hit,) = apply_rewrite(find_rewrite("edge_integers").configured(), built).fired
    assert hit.reason.startswith("4 ops on integers after '")
    assert (before[0], changes(built)[0]) == (2, 1)


class Tokens(torch.nn.Module):
    """Positions are looked up behind the first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.table = torch.nn.Embedding(16, 8)

    def forward(self, x, ids):
        return self.last(torch.tanh(self.first(x)) + self.table(ids + 1))


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_a_look_up_behind_a_layer(tmp_path, target):
    torch.manual_seed(0)
    x, ids = torch.randn(1, 4, 8), torch.tensor([[3, 0, 14, 7]])
    model = convert_model(Tokens(), x, ids, names=("x", "ids"), minimum_deployment_target=target)
    model.save(str(tmp_path / "m.mlpackage"))
    package = ane.load(tmp_path / "m.mlpackage")
    feeds = {"x": x.numpy(), "ids": ids.numpy().astype(np.int32)}
    (before,) = Runtime(package.program, precision="float16")(feeds).values()
    assert apply_rewrite(find_rewrite("edge_integers").configured(), package.program).fired
    ane.save(package, tmp_path / "n.mlpackage")
    again = ane.load(tmp_path / "n.mlpackage").program
    (after,) = Runtime(again, precision="float16")(feeds).values()
    np.testing.assert_array_equal(before, after)
    kinds = [op.op_type for op in again.functions["main"].operations if op.op_type != "const"]
    assert kinds.index("gather") < kinds.index("linear")


@pytest.mark.law
@given(st.lists(st.tuples(st.sampled_from(["ints", "floats", "both", "table"]), st.integers(0, 9)), max_size=9))
def test_any_order_gives_the_same_and_integers_come_first(steps):
    def body(x, i):
        floats, ints = [x], [i]
        for kind, pick in steps:
            number, whole = floats[pick % len(floats)], ints[pick % len(ints)]
            if kind == "ints":
                ints.append(mb.add(x=whole, y=np.int32(pick)))
            elif kind == "floats":
                floats.append(mb.tanh(x=number))
            elif kind == "both":
                floats.append(mb.add(x=number, y=mb.cast(x=whole, dtype="fp16")))
            else:
                place = mb.mod(x=whole, y=np.int32(5))
                floats.append(mb.mul(x=number, y=mb.reduce_sum(x=mb.gather(x=make_weight(5, 2), indices=place, axis=0),
                                                                axes=[1])))
        return [mb.identity(x=floats[-1]), mb.identity(x=ints[-1])]

    built = with_integers(body, x=(2, 8), i=(8,))
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float16),
             "i": np.arange(8, dtype=np.int32)}
    before = Runtime(built, precision="float16")(feeds)
    apply_rewrite(find_rewrite("edge_integers").configured(), built)
    after = Runtime(built, precision="float16")(feeds)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])
    ops = [op for op in built.functions["main"].operations if op.op_type != "const"]
    whole = [op.op_type in ("gather", "mod") or any(var.dtype == types.int32 for var in op.outputs) or (
        op.op_type == "cast") for op in ops]
    assert whole == sorted(whole, reverse=True)
