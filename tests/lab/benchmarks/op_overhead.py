"""The work of the runtime around one op, beside that of `torch.fx.Interpreter` around an addition.

The work around an op is its time less that of the torch call that computes the same. The time of one op is that of a
call of a program with many equal ops, less that of a program with one, by the number of the others. The operands are of
a few hundred elements, and one thread computes them, so that little but the work around them remains. Where torch makes
a view, its call copies it: each value of a program has memory of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program
from torch.nn import functional

from mil_ane_passes.runtime import Runtime
from tests.lab.benchmarks.rounds import Comparison, run_rounds

#: how much more the work around an op may be than that of torch.fx.Interpreter, which also runs a graph op by op
MAX_OVERHEAD_RATIO = 2.0
SHAPE = (1, 8, 8, 8)
#: ops beside the one that both programs have
COUNT = 64
#: calls of a program, and of torch, in each round
CALLS = 12


class Case(NamedTuple):
    """An op, and the torch call that computes the same."""

    build: Callable[[Any], Any]
    call: Callable[[torch.Tensor], object]


def make_cases() -> dict[str, Case]:
    draw = np.random.default_rng(0).standard_normal
    kernel, matrix, other = (draw(shape).astype(np.float32) for shape in ((8, 8, 3, 3), (8, 8), SHAPE))
    scale, shift, variance = (np.abs(draw(8)).astype(np.float32) for _ in range(3))
    k, m, y, g, b, v = (torch.from_numpy(each) for each in (kernel, matrix, other, scale, shift, variance))
    norm = {"gamma": scale, "beta": shift}
    return {
        "conv": Case(lambda x: mb.conv(x=x, weight=kernel, bias=shift, pad_type="same"),
                     lambda x: functional.conv2d(x, k, b, padding=1)),
        "linear": Case(lambda x: mb.linear(x=x, weight=matrix, bias=shift), lambda x: functional.linear(x, m, b)),
        "matmul": Case(lambda x: mb.matmul(x=x, y=x, transpose_y=True), lambda x: torch.matmul(x, x.mT)),
        "add": Case(lambda x: mb.add(x=x, y=other), lambda x: x + y),
        "mul": Case(lambda x: mb.mul(x=x, y=other), lambda x: x * y),
        "gelu (exact)": Case(lambda x: mb.gelu(x=x, mode="EXACT"), functional.gelu),
        "gelu (tanh)": Case(lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
                            lambda x: functional.gelu(x, approximate="tanh")),
        "layer_norm": Case(lambda x: mb.layer_norm(x=x, axes=[-1], **norm),
                           lambda x: functional.layer_norm(x, (8,), g, b)),
        "softmax": Case(lambda x: mb.softmax(x=x, axis=-1), lambda x: torch.softmax(x, -1)),
        "reduce_mean": Case(lambda x: mb.reduce_mean(x=x, axes=[2, 3], keep_dims=True),
                            lambda x: x.mean((2, 3), keepdim=True)),
        "reshape": Case(lambda x: mb.reshape(x=x, shape=[1, 8, 64]), lambda x: x.reshape(1, 8, 64)),
        "transpose": Case(lambda x: mb.transpose(x=x, perm=[0, 2, 3, 1]),
                          lambda x: x.permute(0, 2, 3, 1).contiguous()),
        "slice_by_index": Case(lambda x: mb.slice_by_index(x=x, begin=[0, 0, 2, 0], end=[1, 8, 6, 8]),
                               lambda x: x[:, :, 2:6].contiguous()),
        "concat": Case(lambda x: mb.concat(values=[x, x], axis=1), lambda x: torch.cat([x, x], 1)),
        "cast": Case(lambda x: mb.cast(x=x, dtype="int32"), lambda x: x.to(torch.int32)),
        "batch_norm": Case(lambda x: mb.batch_norm(x=x, mean=shift, variance=variance, **norm),
                           lambda x: functional.batch_norm(x, b, v, g, b)),
        "max_pool": Case(lambda x: mb.max_pool(x=x, kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid"),
                         lambda x: functional.max_pool2d(x, 2, 2)),
    }


def make_op_program(case: Case, count: int) -> Program:
    """`count` equal ops on the one input; the result of the last is the output."""

    @mb.program(input_specs=[mb.TensorSpec(SHAPE)], opset_version=ct.target.iOS17)
    def made(x: Any) -> Any:
        return [case.build(x) for _ in range(count)][-1]

    return made


def take_median(job: Callable[[], object], calls: int) -> float:
    """The median time of a call, in microseconds."""
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        job()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def measure_op_overheads(rounds: int) -> Iterator[Comparison]:
    """One row for each kind of op."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, case in make_cases().items():
            ours, theirs = measure_overhead(case, rounds)
            yield Comparison(f"work around {name}", "torch.fx.Interpreter around add", ours, theirs,
                             MAX_OVERHEAD_RATIO, "us")
    finally:
        torch.set_num_threads(threads)


def measure_overhead(case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """What one op takes above the torch call, and an addition in torch.fx, in microseconds, for each round."""
    x = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    given, addition = torch.from_numpy(x), make_cases()["add"]
    many, one = (Runtime(make_op_program(case, count)) for count in (1 + COUNT, 1))
    many_fx, one_fx = (make_interpreter(addition, count) for count in (1 + COUNT, 1))
    sides: dict[str, Callable[[], float]] = {
        "many": lambda: take_median(lambda: many({"x": x}), CALLS),
        "one": lambda: take_median(lambda: one({"x": x}), CALLS),
        "torch": lambda: take_median(lambda: [case.call(given) for _ in range(COUNT)], CALLS),
        "many, fx": lambda: take_median(lambda: many_fx.run(given), CALLS),
        "one, fx": lambda: take_median(lambda: one_fx.run(given), CALLS),
        "torch, fx": lambda: take_median(lambda: [addition.call(given) for _ in range(COUNT)], CALLS)}
    with torch.inference_mode():
        run_rounds(sides, 1)
        times = run_rounds(sides, rounds)
    ours, theirs = ([(whole - rest - call) / COUNT for whole, rest, call in zip(*(times[each] for each in names))]
                    for names in (("many", "one", "torch"), ("many, fx", "one, fx", "torch, fx")))
    return ours, theirs


def make_interpreter(case: Case, count: int) -> torch.fx.Interpreter:
    """An interpreter of `count` equal torch calls on the one input; the result of the last is the output."""
    return torch.fx.Interpreter(torch.fx.symbolic_trace(lambda x: [case.call(x) for _ in range(count)][-1]))
