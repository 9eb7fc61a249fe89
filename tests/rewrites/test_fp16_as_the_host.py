"""Any program with any of its ops in fp16: the same bits as coremltools' passes give, and the same types."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.block_editor import check_op_order
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rewrites.precision._fp16_conversion import Fp16Constants, convert_to_fp16, is_fp32_computation
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds

WEIGHT = np.float32([[0.5, -1.25, 0.1, 3], [1 / 3, 0, -0.7, 2], [1, 1, -1, 0.01], [0.3, -0.2, 0.1, 0.9]])
OPS = {
    "tanh": lambda a, b: mb.tanh(x=a), "exp": lambda a, b: mb.exp(x=mb.clip(x=a, alpha=-3.0, beta=3.0)),
    "leaky": lambda a, b: mb.leaky_relu(x=a, alpha=0.1), "rsqrt": lambda a, b: mb.rsqrt(x=mb.abs(x=a), epsilon=1e-4),
    "linear": lambda a, b: mb.linear(x=a, weight=WEIGHT), "add": lambda a, b: mb.add(x=a, y=b),
    "scale": lambda a, b: mb.mul(x=a, y=np.float32(0.3)), "mul": lambda a, b: mb.mul(x=a, y=b),
    "norm": lambda a, b: mb.layer_norm(x=a, axes=[-1], gamma=WEIGHT[0], epsilon=1e-12),
    "concat": lambda a, b: mb.slice_by_size(x=mb.concat(values=[a, b], axis=1), begin=[0, 1], size=[2, 4]),
    "split": lambda a, b: mb.concat(values=mb.split(x=a, num_splits=2, axis=1)[::-1], axis=1),
    "whole": lambda a, b: mb.cast(x=mb.add(x=mb.cast(x=a, dtype="int32"), y=np.int32(1)), dtype="fp32"),
    "where": lambda a, b: mb.select(cond=mb.greater(x=a, y=b), a=a, b=b),
    "nested": lambda a, b: mb.cond(pred=mb.greater(x=mb.reduce_sum(x=a, axes=[0, 1], keep_dims=False), y=0.0),
                                   _true_fn=lambda: mb.sub(x=a, y=b), _false_fn=lambda: mb.softmax(x=b, axis=-1)),
}
STEP = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 99), st.integers(0, 99))
STEPS = st.lists(STEP, min_size=1, max_size=8)


def built(steps, opset):
    def body(x, z):
        values = [x, z]
        for kind, first, second in steps:
            values.append(OPS[kind](values[first % len(values)], values[second % len(values)]))
        return [mb.identity(x=value, name=f"out{number}") for number, value in enumerate(values[-2:])]

    made = build_program(body, opset=opset, dtype=types.fp32, x=(2, 4), z=(2, 4))
    PASS_REGISTRY["common::dead_code_elimination"](made)
    return made


def by_host(given_program, kept):
    made = clone_program(given_program)
    FP16ComputePrecision(op_selector=lambda op: op.name not in kept).apply(made)
    for name in ("cast_optimization", "const_elimination", "dead_code_elimination"):
        PASS_REGISTRY[f"common::{name}"](made)
    return made


@pytest.mark.law
@given(STEPS, st.sets(st.integers(0, 40)), st.sampled_from([ct.target.iOS15, ct.target.iOS17]), st.integers(0, 9))
def test_the_same_bits_as_the_hosts_passes(steps, numbers, opset, seed):
    source = built(steps, opset)
    every = [op for _, op in iterate_ops(source) if is_fp32_computation(op)]
    kept = {op.name for number, op in enumerate(every) if number in numbers}
    host, ours = by_host(source, kept), clone_program(source)
    assert not convert_to_fp16(
        ours, {op for _, op in iterate_ops(ours) if is_fp32_computation(op) and op.name not in kept}, Fp16Constants()
    )
    ours.validate()
    check_op_order(ours.functions["main"])
    random = np.random.default_rng(seed)
    feeds = {name: random.standard_normal((2, 4)).astype(np.float32) for name in ("x", "z")}
    for precision in ("float16", "float64"):
        one, other = (Runtime(each, precision=precision)(feeds) for each in (ours, host))
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
    if all(kind != "whole" for kind, _, _ in steps):  # casts that were there before are coremltools' to join
        assert kinds(ours)["cast"] <= kinds(host)["cast"]
    found, expected = ({name: count for name, count in kinds(each).items() if name not in ("cast", "const", "identity")}
                       for each in (ours, host))
    assert found == expected
