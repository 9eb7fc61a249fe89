"""Convert a model that was converted to compute in fp32 to compute in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, types

from ...passes.contract import Community, Exactness, Example, Hit, Miss, ProgramRewrite, Vendor
from ...passes.examples import build_program, make_weight
from ...rules.fp32_compute_left import Fp32ComputeLeft
from ._fp16_conversion import convert_to_fp16
from ._precision_selection import PrecisionDecision, PrecisionOptions, add_compressed_weights, choose_fp16_ops


class Fp16Compute(ProgramRewrite):
    """Compute in fp16 what a model computes in fp32, except where fp16 cannot hold the values.

    why     The ANE computes in fp16: what is in fp32 runs on the CPU or the GPU. Weights take half the room.
    when    A program that computes in fp32. Inputs, outputs and states keep their types; integers are not touched.
            An op stays in fp32 when a constant or a value seen in the runs is beyond fp16, or below it, or when the
            outputs lose more than `max_error` with it; each is listed with its numbers. Without runs only constants
            are judged. A function that computes in fp16 in part is left as it was made, unless mixed=true.
    exact   approximate: every value is rounded to 11 bits. The largest error of the runs is reported (of integers, such
            as the classes of an argmax, the share that changes), and the equivalence check holds the result to
            `max_error`.
    cost    a cast wherever fp16 and fp32 meet. To find what has to stay the model is run on the feeds up to 64
            times; what was not tried by then stays in fp32.

    before
        %0: fp32[1, 4] = linear(x=%x, weight=<fp32[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %y: fp32[1, 4] = relu(x=%0)
    after
        %0: fp16[1, 8] = cast(x=%x, dtype=fp16)
        %1: fp16[1, 4] = linear(x=%0, weight=<fp16[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %2: fp16[1, 4] = relu(x=%1)
        %y: fp32[1, 4] = cast(x=%2, dtype=fp32)
    """

    fixes = (Fp32ComputeLeft,)
    stage = "precision"
    exactness = Exactness.APPROXIMATE
    bound = "max_error (1e-2) of an output's largest value, in the runs measured"
    preset = "named"
    measures = True
    accepts_sampled = True
    moves = 1e-2
    evidence = (
        Vendor("the ANE does not support fp32; such ops run elsewhere",
               source="https://github.com/apple/ml-stable-diffusion"),
        Vendor("a model typed in fp32 does not use the Neural Engine, which computes in fp16",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        Community("an fp32 input gets a cast, and the rest goes on in fp16 on the ANE", chip="M4", os="macOS 27.0.1",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"),
    )

    max_error: float = 1e-2
    "The largest accepted output error, as a share of an output's largest value in the runs."
    keep: str = ""
    "Op types and names of values, with + between them, that stay in fp32."
    wide_sums: bool = False
    "Keep ops in fp32 whose partial sums may exceed 32768, where accumulators of the ANE are reported to overflow."
    mixed: bool = False
    "Convert the ops left in fp32 in a function that computes partly in fp16."

    def match_program(self, program: Program) -> Iterator[Hit | Miss]:
        kept = frozenset(filter(None, (name.strip() for name in self.keep.split("+"))))
        decision = choose_fp16_ops(
            program, PrecisionOptions(self.max_error, kept, self.wide_sums, self.mixed), self.measured
        )
        for op in decision.taken:
            note = "fp32 -> fp16" if op is not decision.taken[0] else _format_summary(decision)
            yield Hit(op, note=note, halves=decision.halves, moves=self.max_error)
        for op, reason in decision.kept:
            yield Miss(op, reason)

    def rewrite_program(self, hits: list[Hit], program: Program) -> None:
        convert_to_fp16(program, add_compressed_weights(hit.op for hit in hits), hits[0].halves)

    def examples(self) -> Iterable[Example]:
        yield Example("linear and relu", _build_linear, within=8.0)
        yield Example("weights shared with what stays", _build_shared_weight, within=8.0, options={"keep": "matmul"})
        yield Example("integers beside", _build_argmax_use, within=8.0)
        yield Example("constants only", _build_linear, within=8.0, measured=False)
        yield Example("asked for by name", _build_linear, options={"keep": "linear + relu"},
                      reason="kept fp32: asked for by name")
        yield Example(
            "a value beyond fp16",
            _build_large_square,
            reason="kept fp32: its result reaches 6.8e+04, fp16 ends at 65504",
            options={"keep": "mul"},
        )
        yield Example("a constant beyond fp16", lambda: _build_scaled(1e5),
                      reason="kept fp32: its y holds 1e+05, fp16 ends at 65504")
        yield Example("a constant below fp16", lambda: _build_scaled(1e-9),
                      reason="kept fp32: its y ends at 1e-09, below what fp16 holds (6.0e-08)")
        yield Example(
            "partly in fp16",
            _build_mixed_precision,
            reason="fp32 beside ops in fp16, kept so by whoever converted the model; mixed=true converts it too",
        )
        yield Example("all in fp16", lambda: _build_linear(types.fp16), reason="")


def _format_summary(decision: PrecisionDecision) -> str:
    count, every = len(decision.taken), len(decision.taken) + len(decision.kept)
    if decision.error is None:
        return f"{count} of {every} ops in fp16; nothing was run, so only constants were judged"
    return (f"{count} of {every} ops in fp16; largest error in the runs {decision.error:.1e} of an output's largest "
            "value")


def _build_linear(dtype: Any = types.fp32) -> Program:
    held = types.nptype_from_builtin(dtype)

    def body(x: Any) -> Any:
        y = Builder.linear(x=x, weight=make_weight(4, 8, dtype=held), bias=make_weight(4, dtype=held))
        return Builder.relu(x=y, name="y")

    return build_program(body, dtype=dtype, x=(1, 8))


def _build_shared_weight() -> Program:
    def body(x: Any) -> Any:
        kernel = Builder.const(val=make_weight(8, 8, dtype=np.float32))
        return Builder.matmul(x=Builder.tanh(x=Builder.linear(x=x, weight=kernel)), y=kernel, name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


def _build_argmax_use() -> Program:
    def body(x: Any) -> Any:
        best = Builder.add(x=Builder.reduce_argmax(x=Builder.relu(x=x), axis=-1, keep_dims=True), y=np.int32(1))
        return Builder.add(x=Builder.tanh(x=x), y=Builder.cast(x=best, dtype="fp32"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))


def _build_large_square() -> Program:
    return build_program(lambda x: Builder.square(x=Builder.mul(x=x, y=np.float32(200)), name="y"), dtype=types.fp32,
                         x=(1, 8))


def _build_scaled(factor: float) -> Program:
    return build_program(lambda x: Builder.mul(x=x, y=np.float32(factor), name="y"), dtype=types.fp32, x=(1, 8))


def _build_mixed_precision() -> Program:
    def body(x: Any) -> Any:
        half = Builder.relu(x=Builder.cast(x=x, dtype="fp16"))
        return Builder.tanh(x=Builder.cast(x=half, dtype="fp32"), name="y")

    return build_program(body, dtype=types.fp32, x=(1, 8))
