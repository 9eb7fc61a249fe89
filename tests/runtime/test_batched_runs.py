"""Batches of runs: which functions allow them, and that each run has the results that it has alone."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.equivalence.execution import build_plans
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.runtime.batched_runs import can_batch_runs
from tests.lab.fuzz_programs.draft import generate_program
from tests.lab.fuzz_programs.kinds import KINDS

TABLE = np.arange(40, dtype=np.float16).reshape(10, 4)


def spread(x, **options):
    return mb.slice_by_index(x=x, begin=[0, 0, 1], end=[0, 0, 3], begin_mask=[True, True, False],
                             end_mask=[True, True, False], **options)


BATCHED = {
    "conv": lambda x: mb.conv(x=x, weight=make_weight(4, 3, 3), pad_type="same"),
    "transposed conv": lambda x: mb.conv_transpose(x=x, weight=make_weight(3, 4, 2), strides=[2]),
    "one row of a constant": lambda x: mb.add(x=x, y=make_weight(1, 3, 5)),
    "a constant of lower rank": lambda x: mb.mul(x=make_weight(3, 1), y=x),
    "two values": lambda x: mb.maximum(x=mb.sin(x=x), y=x),
    "reduction": lambda x: mb.reduce_mean(x=x, axes=[-1], keep_dims=False),
    "softmax": lambda x: mb.softmax(x=x, axis=1),
    "reshape": lambda x: mb.reshape(x=x, shape=[1, 5, 3]),
    "reshape of all that is left": lambda x: mb.reshape(x=x, shape=[-1, 15]),
    "transpose": lambda x: mb.transpose(x=x, perm=[0, 2, 1]),
    "axes": lambda x: mb.squeeze(x=mb.expand_dims(x=x, axes=[2]), axes=[2]),
    "concat": lambda x: mb.concat(values=[x, mb.abs(x=x)], axis=2),
    "split": lambda x: mb.split(x=x, num_splits=3, axis=1)[1],
    "slice": spread,
    "pad": lambda x: mb.pad(x=x, pad=[0, 0, 1, 2], mode="reflect"),
    "linear": lambda x: mb.linear(x=x, weight=make_weight(4, 5)),
    "matmul by a constant": lambda x: mb.matmul(x=x, y=make_weight(5, 2)),
    "matmul of two values": lambda x: mb.matmul(x=x, y=x, transpose_y=True),
    "layer norm": lambda x: mb.layer_norm(x=x, axes=[2], gamma=make_weight(5), beta=make_weight(5)),
    "constants that are computed": lambda x: mb.add(x=x, y=mb.tile(x=make_weight(1, 1), reps=[3, 1])),
    "a constant that is reshaped": lambda x: mb.matmul(
        x=x, y=mb.reshape(x=mb.tile(x=make_weight(1, 30), reps=[1, 2]), shape=[1, 5, -1])),
    "places": lambda x: mb.gather(x=x, indices=np.int32([2, 0]), axis=1),
    "lookup": lambda x: mb.gather(x=TABLE, axis=0, indices=mb.cast(
        x=mb.clip(x=x, alpha=np.float16(0), beta=np.float16(9)), dtype="int32")),
    "cumulative sum": lambda x: mb.cumsum(x=x, axis=1),
}
ALONE = {
    "sum over rows": lambda x: mb.reduce_sum(x=x, axes=[0], keep_dims=True),
    "sum over all axes": lambda x: mb.add(x=x, y=mb.reduce_sum(x=x, keep_dims=False)),
    "softmax over rows": lambda x: mb.softmax(x=x, axis=0),
    "cumulative sum over rows": lambda x: mb.cumsum(x=x, axis=0),
    "order of rows": lambda x: mb.reverse(x=x, axes=[0]),
    "rows moved": lambda x: mb.transpose(x=x, perm=[2, 0, 1]),
    "rows merged": lambda x: mb.reshape(x=x, shape=[3, 5, 1]),
    "axis in front": lambda x: mb.expand_dims(x=x, axes=[0]),
    "rows appended": lambda x: mb.concat(values=[x, x], axis=0),
    "a constant appended": lambda x: mb.concat(values=[x, make_weight(1, 3, 5)], axis=1),
    "rows of a constant": lambda x: mb.add(x=mb.add(x=x, y=make_weight(2, 3, 5)), y=np.float16(0)),
    "rank raised by a constant": lambda x: mb.add(x=x, y=make_weight(1, 1, 3, 5)),
    "rows selected": lambda x: mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 3, 2]),
    "rows padded": lambda x: mb.pad(x=x, pad=[0, 1, 0, 0, 0, 0]),
    "rows taken": lambda x: mb.gather(x=x, indices=np.int32([0]), axis=0),
    "product of matrices": lambda x: mb.matmul(x=mb.squeeze(x=x, axes=[0]), y=mb.squeeze(x=x, axes=[0]),
                                               transpose_y=True),
    "stacks of another rank": lambda x: mb.matmul(x=x, y=mb.squeeze(x=x, axes=[0]), transpose_y=True),
    "weights that are computed": lambda x: mb.conv(x=x, weight=mb.mul(x=x, y=np.float16(2))),
    "an op without a rule": lambda x: mb.local_response_norm(x=mb.expand_dims(x=x, axes=[3]), size=3),
    "a branch": lambda x: mb.cond(pred=mb.less(x=mb.reduce_sum(x=x, keep_dims=False), y=np.float16(0)),
                                  _true_fn=lambda: mb.abs(x=x), _false_fn=lambda: mb.sin(x=x)),
}


def build(body, rows=1):
    return build_program(lambda x: mb.identity(x=body(x), name="y"), opset=ct.target.iOS17, x=(rows, 3, 5))


def run_both_ways(program, plans, precision):
    """Return the results of each plan alone, and of all as one batch."""
    runtime = Runtime(program, precision=precision)
    alone = [runtime(plan.feeds) for plan in plans]
    call = runtime.start_batched_call([plan.feeds for plan in plans])
    results = call.machine.run_block(call.block, call.arguments)
    batched = runtime.finish_call(call, results, None)
    return alone, [{name: np.split(value, len(plans))[number] for name, value in batched.items()}
                   for number in range(len(plans))]


def assert_close(alone, batched, share):
    for one, other in zip(alone, batched, strict=True):
        for name, value in one.items():
            assert other[name].shape == value.shape and other[name].dtype == value.dtype
            scale = np.abs(value[np.isfinite(value)]).max(initial=0) if value.dtype.kind == "f" else 0
            np.testing.assert_allclose(other[name], value, rtol=0, atol=share * scale)


@pytest.mark.parametrize("precision, share", [("float64", 1e-13), ("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_runs_have_their_own_results(name, precision, share):
    program = build(BATCHED[name])
    assert can_batch_runs(program.functions["main"])
    assert_close(*run_both_ways(program, build_plans(program, 3, lambda name: None), precision), share)


@pytest.mark.parametrize("name", ALONE)
def test_functions_in_which_rows_meet_are_run_alone(name):
    assert not can_batch_runs(build(ALONE[name]).functions["main"])


def test_several_rows_are_batched_where_no_constant_has_as_many():
    assert can_batch_runs(build(BATCHED["conv"], rows=2).functions["main"])
    program = build(BATCHED["one row of a constant"], rows=2)
    assert can_batch_runs(program.functions["main"])
    assert_close(*run_both_ways(program, build_plans(program, 3, lambda name: None), "float64"), 1e-13)
    assert not can_batch_runs(build(ALONE["rows of a constant"], rows=2).functions["main"])


@pytest.mark.parametrize("shapes", [((1, 2), (2, 2)), ((None, 2), (None, 2))])
def test_inputs_of_other_numbers_of_rows_are_not_batched(shapes):
    from coremltools.converters.mil.mil.program import get_new_symbol

    rows = get_new_symbol()
    specs = [mb.TensorSpec(tuple(rows if size is None else size for size in shape), dtype=types.fp32)
             for shape in shapes]
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x, y: (mb.abs(x=x), mb.abs(x=y)))
    assert not can_batch_runs(program.functions["main"])


def test_functions_with_states_are_run_alone():
    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.fp16), mb.StateTensorSpec((1, 2), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def stateful(x, s):
        return mb.add(x=x, y=mb.read_state(input=s))

    assert not can_batch_runs(stateful.functions["main"])


def test_random_programs_have_their_own_results_in_batched_runs():
    """A law on what the rules promise for any program: rows never meet."""
    batched = 0
    for seed in range(400):
        drawn = generate_program(seed, dict(KINDS))
        if drawn is not None and can_batch_runs(drawn.program.functions["main"]):
            program, batched = drawn.program, batched + 1
            plans = build_plans(program, 3, lambda name: None)[:3]
            if len({tuple(value.shape for value in plan.feeds.values()) for plan in plans}) == 1:
                assert_close(*run_both_ways(program, plans, "float64"), 1e-9)
    assert batched > 20
