"""Feeds at floats that only one of two programs compares with a constant: draws rarely lie between two thresholds."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.equivalence import float_threshold_feeds
from mil_ane_passes.equivalence.adversarial_feeds import Domain
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.float_threshold_feeds import build_float_threshold_plans
from mil_ane_passes.passes.examples import build_program

WEIGHT = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)


def build(body, *shapes, states=()):
    specs = [mb.TensorSpec(shape, dtype=types.fp32) for shape in shapes]
    specs += [mb.StateTensorSpec(shape, dtype=types.fp16) for shape in states]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body)
    program.functions["main"].outputs[0].name = "y"
    return program


def to_floats(flags):
    return mb.cast(x=flags, dtype="fp32")


def below(threshold, scale=1.0):
    return build(lambda x: to_floats(mb.less(x=mb.mul(x=x, y=np.float32(scale)), y=np.float32(threshold))), (1, 3))


def score(threshold):
    """The flags of scores above a threshold, as of a detector."""
    return build(lambda x: to_floats(mb.greater(x=mb.sigmoid(x=x), y=np.float32(threshold))), (1, 4))


def loud(threshold):
    """A frame that is kept if its mean is above a threshold."""
    return build(lambda x: mb.mul(x=x, y=to_floats(mb.greater_equal(
        x=mb.reduce_mean(x=x, axes=[1, 2, 3], keep_dims=True), y=np.float32(threshold)))), (1, 3, 32, 32))


def energy(limit):
    return build(lambda x: mb.minimum(
        x=mb.reduce_sum_square(x=mb.linear(x=x, weight=WEIGHT), axes=[1]), y=np.float32(limit)), (1, 6))


def branch(threshold):
    return build(lambda x: mb.cond(
        pred=mb.greater(x=mb.reduce_max(x=x, keep_dims=False), y=np.float32(threshold)),
        _true_fn=lambda: mb.mul(x=x, y=np.float32(2)), _false_fn=lambda: mb.identity(x=x)), (1, 8))


def clipped(limit):
    return build(lambda x: mb.clip(
        x=mb.linear(x=x, weight=WEIGHT), alpha=np.float32(0), beta=np.float32(limit)), (1, 6))


def counted(limit):
    """A gate that closes at a step that a state counts."""
    def body(x, s):
        count = mb.read_state(input=s)
        mb.coreml_update_state(state=s, value=mb.add(x=count, y=np.float16(1)))
        return mb.mul(x=x, y=to_floats(mb.less(x=count, y=np.float16(limit))))
    return build(body, (1, 4), states=[(1,)])


def wrapped(period):
    """A place in a ring of rows that a state counts."""
    def body(x, s):
        place = mb.mod(x=mb.cast(x=mb.read_state(input=s), dtype="int32"), y=np.int32(period))
        return mb.mul(x=x, y=to_floats(place))
    return build(body, (1, 4), states=[(1,)])


def bucketed(row=None):
    """Rows of a table at the bucket of a pitch, as of a speech synthesizer."""
    table, edges = np.random.default_rng(1).standard_normal((257, 4)).astype(np.float32), np.geomspace(50, 900, 256)
    if row is not None:
        table[row] += 1
    return build(lambda x: mb.gather(x=table, indices=mb.reduce_sum(x=mb.cast(x=mb.greater(
        x=mb.expand_dims(x=x, axes=[2]), y=edges.astype(np.float32).reshape(1, 1, 256)), dtype="int32"), axes=[2]),
        axis=0), (1, 3))


def outlier(threshold):
    """Elements far from the mean, in standard deviations: moving all elements changes nothing."""
    return build(lambda x: to_floats(mb.greater(x=mb.layer_norm(x=x, axes=[1]), y=np.float32(threshold))), (1, 16))


PAIRS = {
    "a normalized value": (outlier(2.5), outlier(2.6)),
    "a row of a table at a bucket": (bucketed(), bucketed(137)),
    "a score": (score(0.25), score(0.27)),
    "a threshold of the input": (below(3.0), below(3.1)),
    "a mean": (loud(0.5), loud(0.6)),
    "an energy": (energy(2000.0), energy(2001.0)),
    "a branch": (branch(5.0), branch(6.0)),
    "a limit of clip": (clipped(6.0), clipped(6.001)),
    "a large limit of clip": (clipped(5000.0), clipped(5001.0)),
    "a step that a state counts": (counted(50), counted(51)),
    "a period of a state": (wrapped(64), wrapped(60)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_depends_on_a_threshold_of_floats_is_seen(name):
    for before, after in (PAIRS[name], PAIRS[name][::-1]):
        assert compare_programs(before, after).status == "different"


def test_equal_thresholds_need_no_runs():
    for before, _ in PAIRS.values():
        assert not build_float_threshold_plans(before, before, lambda name: None)


def test_a_threshold_in_another_form_is_equal():
    """Values just below and just above the threshold tell the two apart only if they differ."""
    after = build(lambda x: to_floats(mb.less(
        x=np.float32(1), y=mb.mul(x=mb.sigmoid(x=x), y=np.float32(4)))), (1, 4))
    found = compare_programs(score(0.25), after)
    assert found.equal and any("just below and above" in each for each in found.sampled)


def test_values_of_a_size_that_depends_on_data_are_not_searched():
    """The number of elements above 0 differs between two draws."""
    def positive(limit):
        return build(lambda x: to_floats(mb.less(x=mb.cast(x=mb.non_zero(x=mb.greater(
            x=x, y=np.float32(0))), dtype="fp32"), y=np.float32(limit))), (1, 16))

    assert compare_programs(positive(3.25), positive(3.5)).status == "equal"


def test_floats_are_within_the_ranges_of_the_user():
    before, after = PAIRS["a threshold of the input"]
    assert compare_programs(before, after, ranges={"x": (-1.0, 1.0)}).equal
    plans = build_float_threshold_plans(before, after, lambda name: None, Domain(ranges={"x": (-1.0, 3.05)}))
    assert plans and all(plan.feeds["x"].max() <= np.float32(3.05) for plan in plans)


def test_values_that_no_feeds_move_have_no_runs():
    assert not build_float_threshold_plans(below(1.0, 0.0), below(2.0, 0.0), lambda name: None)


def test_thresholds_that_no_feeds_move_leave_room_for_others():
    def counted(threshold, offset):
        @mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32), mb.TensorSpec((1, 3))],
                    opset_version=ct.target.iOS18)
        def program(ids, x):
            found = mb.greater(x=mb.sigmoid(x=x), y=np.float32(threshold))
            for number in range(5):
                found = mb.logical_and(x=found, y=mb.less(x=ids, y=np.int32(1000 + number + offset)))
            return mb.cast(x=found, dtype="fp32", name="y")
        return program

    found = build_float_threshold_plans(counted(0.25, 0), counted(0.27, 100), lambda name: None)
    assert len(found) == 4  # two for each program's threshold of the score


def test_what_is_costly_to_compute_is_not_searched(monkeypatch):
    before, after = PAIRS["an energy"]
    assert build_float_threshold_plans(before, after, lambda name: None)
    monkeypatch.setattr(float_threshold_feeds, "_MAX_ELEMENTS", WEIGHT.size)
    assert not build_float_threshold_plans(before, after, lambda name: None)


def test_floats_stay_within_what_a_rewrite_declares():
    """A mask of -inf becomes a finite one for scores that are not as large; a threshold behind it is no reason to draw
    others."""
    def body(x):
        scores = mb.add(x=x, y=np.array([-np.inf, -np.inf, -np.inf, 0], np.float16))
        return mb.atanh(x=mb.mul(x=mb.tanh(x=mb.softmax(x=scores, axis=-1)), y=np.float16(0.9)), name="y")

    report = ane.rewrite(build_program(body, x=(2, 5, 4)), passes="full", target="m4")
    assert not report.left_out_passes and report.verify.equal, str(report)
    assert {"finite_mask", "inverse_tanh"} <= {trace.rule for trace in report.traces if trace.fired}
