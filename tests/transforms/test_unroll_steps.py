"""Several steps of a recurrent model in one call: the values of as many single calls, and products for all at once."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.transforms.contract import Draft, apply_transforms
from mil_ane_passes.transforms.state_to_io import StateToIo
from mil_ane_passes.transforms.unroll_steps import UnrollSteps
from tests.package.helpers import normal

WIDTH, COUNT = 4, 3


def look_up(ids):
    return mb.gather(x=normal(9, WIDTH), indices=ids, axis=0)


def head(x):
    return mb.linear(x=x, weight=normal(5, WIDTH, seed=9), name="logits")


def stacked(ids, s):
    """Two layers, each with its part of one state, which is a decaying sum."""
    x = look_up(ids)
    for layer in range(2):
        entered = mb.linear(x=mb.mul(x=x, y=normal(WIDTH, seed=layer)), weight=normal(WIDTH, WIDTH, seed=layer))
        held = mb.slice_by_index(x=mb.read_state(input=s), begin=[layer, 0, 0, 0], end=[layer + 1, 1, 1, WIDTH],
                                 squeeze_mask=[True, False, False, False])
        new = mb.add(x=mb.mul(x=held, y=np.float32(0.5)), y=mb.tanh(x=entered))
        mb.coreml_update_state(state=s, value=mb.slice_update(
            x=mb.read_state(input=s), update=mb.expand_dims(x=new, axes=[0]), begin=[layer, 0, 0, 0],
            end=[layer + 1, 1, 1, WIDTH]))
        turned = mb.transpose(x=mb.linear(x=new, weight=normal(2 * WIDTH, WIDTH, seed=layer + 5)), perm=[0, 2, 1])
        first, second = mb.split(x=turned, num_splits=2, axis=1)
        mixed = mb.transpose(x=mb.mul(x=first, y=mb.sigmoid(x=second)), perm=[0, 2, 1])
        x = mb.add(x=x, y=mb.linear(x=mixed, weight=normal(WIDTH, WIDTH, seed=layer + 7)))
    return head(mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True)))


def shifted(ids, s):
    """The state is what the token before was looked up as, whatever the state was."""
    x = look_up(ids)
    before = mb.read_state(input=s)
    mb.coreml_update_state(state=s, value=mb.linear(x=x, weight=normal(WIDTH, WIDTH)))
    return head(mb.add(x=x, y=before))


def entire(ids, s):
    """A state that several ops read as it is, and that two others are made of."""
    held = mb.read_state(input=s)
    x = mb.add(x=look_up(ids), y=mb.mul(x=held, y=np.float32(0.3)))
    mb.coreml_update_state(state=s, value=mb.tanh(x=mb.add(x=x, y=mb.exp(x=mb.minimum(x=held, y=np.float32(1))))))
    return head(x)


def kept(ids, s):
    """A state that is read alone, and one row of a table that is not that of the token."""
    return head(mb.add(x=look_up(ids), y=mb.mul(x=mb.read_state(input=s), y=look_up(np.int32([[2]])))))


def mixing(ids, s):
    """Ops that mix a token's axis with others run for each token."""
    x = mb.linear(x=look_up(ids), weight=normal(WIDTH, WIDTH))
    flat = mb.reshape(x=mb.mul(x=mb.reshape(x=x, shape=[2, 2]), y=np.float32([[1], [2]])), shape=[1, 1, WIDTH])
    total = mb.add(x=mb.softmax(x=flat, axis=1), y=mb.reduce_sum(x=x, axes=[1], keep_dims=True))
    mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=total))
    return head(mb.add(x=flat, y=mb.read_state(input=s)))


PROGRAMS = {"stacked": (stacked, (2, 1, 1, WIDTH)), "shifted": (shifted, (1, 1, WIDTH)),
            "entire": (entire, (1, 1, WIDTH)), "kept": (kept, (1, 1, WIDTH)), "mixing": (mixing, (1, 1, WIDTH))}


def build(body, shape, ids=(1, 1)):
    @mb.program(input_specs=[mb.TensorSpec(ids, dtype=types.int32), mb.StateTensorSpec(shape, dtype=types.fp32)],
                opset_version=ct.target.iOS18)
    def program(ids, s):
        return body(ids, s)

    return program


def unroll(program, count=COUNT):
    draft, = apply_transforms(Draft(program, "a program"), [StateToIo()])
    outputs = [var.name for var in draft.program.functions["main"].outputs]
    states = {"s": "s_new"} if "s_new" in outputs else {}
    draft, = apply_transforms(draft, [UnrollSteps("ids", states, count)])
    return draft


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_of_several_tokens_is_as_many_calls_of_one(name):
    body, shape = PROGRAMS[name]
    source = Runtime(build(body, shape), precision="float64")
    made = Runtime(unroll(build(body, shape)).program, precision="float64")
    rng = np.random.default_rng(0)
    states = {"s": rng.standard_normal(shape)}
    carried = dict(states)
    for _ in range(3):
        ids = rng.integers(0, 9, (1, COUNT)).astype(np.int32)
        expected = [source({"ids": ids[:, place:place + 1]}, states)["logits"] for place in range(COUNT)]
        found = made({"ids": ids, **carried})
        carried = {"s": found.get("s_new", carried["s"])}
        np.testing.assert_allclose(found["logits"], np.concatenate(expected, 1), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(carried["s"], states["s"], rtol=1e-12, atol=1e-12)


def test_products_with_weights_are_computed_for_all_tokens_at_once():
    draft = unroll(build(*PROGRAMS["stacked"]), count=8)
    function = draft.program.functions["main"]
    assert tuple(function.inputs["ids"].shape) == (1, 8) and tuple(function.outputs[0].shape) == (1, 8, 5)
    kinds = [op.op_type for op in function.operations]
    assert kinds.count("linear") == 7 and kinds.count("gather") == 1 and kinds.count("transpose") == 4
    assert kinds.count("tanh") == 2 and kinds.count("split") - 2 <= 2  # of channels, and of tokens
    assert "ops are computed for all tokens at once, the others for each" in draft.done[-1].note


@pytest.mark.parametrize(("body", "ids", "reason"), [
    (kept, (1, 2), r"the token ids 'ids' are \(1, 2\); expected \(1, 1\), one token a call"),
    (lambda ids, s: mb.reduce_sum(x=mb.add(x=look_up(ids), y=mb.read_state(input=s)), axes=[0, 1, 2], name="logits"),
     (1, 1), r"the output 'logits' is \(.*\); expected \(1, 1, width\), with an axis for tokens"),
])
def test_what_cannot_be_unrolled_is_named(body, ids, reason):
    with pytest.raises(ane.InputError, match=reason):
        unroll(build(body, (1, 1, WIDTH), ids))
