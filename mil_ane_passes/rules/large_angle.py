"""Find sines and cosines of angles that are too large for the resolution of fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.bounds import bound_magnitude, get_measured_range
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_surgery_tip
from ..passes.examples import build_program, make_example


class LargeAngle(Rule):
    """The sine or cosine of a large angle is noise in fp16: from 64 on angles are 1/16 apart, from 1024 on 1.

    why     An fp16 angle of magnitude a is known to a / 2048 at best; a phase that has been summed up over a signal, or
            a frequency times a position, soon has no phase left. The table behind the ANE's sine covers a quarter of a
            period and cannot bring it back. M1 and M2 are said to have no sine at all.
    when    sin or cos in fp16, unless the program bounds the angle within `beyond` (a mod, a clip,
            `x - c * round(x / c)`) or, with feeds, it was seen to stay within.
    fix     Reduce the angle before it is large: sum up phases modulo one turn, compute frequency times position
            modulo 2 pi in fp32 outside the model, or make the sines a constant table. A reduction after the fp16 angle
            has been formed comes too late. ane::fp16_compute keeps such an op fp32 where the feeds show the loss.
    """

    code, slug = "ANE317", "sin-cos-large-argument"
    roots = ("sin", "cos")
    advice = "Bring the angle into one turn before it is large, in fp32 or outside the model."
    measures = True
    evidence = (
        Community(
            "sine within 6.3e-4; 33 table points over a quarter period, the rest by symmetry; how arguments are "
            "reduced is not stated",
            source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md",
            chip="M6",
            date="2026-10-05",
        ),
        cite_m4_study("sin and cos are accepted"),
        cite_private_route(
            "sin and cos are native from the M3 generation on and rejected on M1 and M2, where a polynomial stands in"
        ),
        cite_surgery_tip(
            "a model with a single sin or cos layer does not run on the ANE: at odds with the M4 list, unless "
            "it is the cost of so small a model"
        ),
        Community(
            "a vocoder's sine of a phase summed up to thousands is noise once the phase is rounded (bfloat16, "
            "another machine, the same arithmetic)",
            source="https://github.com/tenstorrent/tt-xla/issues/5332",
            chip="n150 (no Apple chip)",
            date="2026-06-22",
        ),
    )

    beyond: float = 100.0
    "Magnitude in radians from which an angle counts as large; fp16 angles are 1/16 apart there."

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, which resolves such angles, but not on the ANE")
        bound, found = bound_magnitude(op.x), get_measured_range(self.measured, op.x)
        if bound is not None and bound <= self.beyond:
            return Miss(op, f"the program keeps the angle within {bound:.4g}")
        if found is None:
            return Hit(op, note=f"nothing here keeps the angle within {self.beyond:g}, where fp16 angles are "
                                f"{_compute_fp16_spacing(self.beyond):g} apart")
        if found.largest <= self.beyond and found.finite:
            return Miss(op, f"the angle reaches {found.largest:.4g} in the runs at hand, within {self.beyond:g}")
        return Hit(op, note=f"the angle reaches {found.largest:.4g} in the runs at hand, where fp16 angles are "
                            f"{_compute_fp16_spacing(found.largest):g} apart")

    def examples(self) -> Iterable[Example]:
        yield Example("anything", lambda: _build_sine(lambda x: x), measured=False)
        yield Example(
            "seen to be large", lambda: _build_sine(lambda x: Builder.mul(x=x, y=np.float16(100))), scale=30.0
        )
        yield make_example("cosine", lambda x: Builder.cos(x=x, name="y"), measured=False, x=(4, 8))
        yield Example("seen to be small", lambda: _build_sine(lambda x: x),
                      reason="the angle reaches 2.324 in the runs at hand, within 100")
        yield Example("mod", lambda: _build_sine(lambda x: Builder.mod(x=x, y=np.float16(6.28))),
                      reason="the program keeps the angle within 6.281")
        yield Example("reduced", lambda: _build_sine(_reduce_angle), reason="the program keeps the angle within 6.281")
        yield Example("fp32", lambda: _build_sine(lambda x: x, types.fp32),
                      reason="computed in fp32, which resolves such angles, but not on the ANE")


def _compute_fp16_spacing(magnitude: float) -> float:
    """Compute the distance between fp16 numbers of this magnitude."""
    return float(np.spacing(np.float16(min(magnitude, 65504.0))))


def _reduce_angle(x: Var) -> Var:
    turns = Builder.round(x=Builder.mul(x=x, y=np.float16(1 / 6.28)))
    result: Var = Builder.sub(x=x, y=Builder.mul(x=turns, y=np.float16(6.28)))
    return result


def _build_sine(angle: Callable[[Var], Var], dtype: object = types.fp16) -> Program:
    return build_program(lambda x: Builder.sin(x=angle(x), name="y"), dtype=dtype, x=(4, 8))
