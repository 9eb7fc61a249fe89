"""Find random numbers that are sampled in the model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example
from ..passes.targets import Gate
from ._unsupported_ops import M1_TO_M5, is_any_admitted, make_unsupported_hit


class RandomNumbers(Rule):
    """The model draws random numbers.

    why     Core ML on an M4 rejects random_normal. The ANE's compiler, asked without Core ML, supports no random op on
            any generation but random_uniform, and that on M3 and later only; Core ML was not asked about it.
    when    random_normal, random_uniform, random_bernoulli and random_categorical.
    fix     Draw outside and pass the numbers in as an input: any seed can then be repeated, too. Noise that may be the
            same in every run is a constant.
    no fix  What is drawn cannot be said by other ops: numbers that are drawn beforehand are another model.
    """

    code, slug = "ANE209", "random-numbers"
    roots = ("random_normal", "random_uniform", "random_bernoulli", "random_categorical")
    refuses, confidence = True, "high"
    advice = "Draw the numbers outside and pass them in as an input."
    evidence = (
        cite_m4_study("random_normal is unsupported"),
        cite_private_route("random_normal, random_bernoulli and random_categorical have no form on any generation; "
                           "random_uniform has one on M3, M4 and M5"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        note = f"{op.op_type} draws numbers in the model"
        if op.op_type == "random_uniform" and not is_any_admitted(Gate(last="m2"), tuple(self.generations)):
            return Hit(op, note=f"{note}; the hardware has it on M3 and later, nobody saw Core ML use it", sure=False)
        return make_unsupported_hit(self, op, f"{note}; they are supported on the ANE as an input", seen=M1_TO_M5)

    def examples(self) -> Iterable[Example]:
        yield Example("noise", _build_noise)
        yield make_example(
            "uniform",
            lambda x: Builder.add(
                x=x, y=Builder.random_uniform(shape=[2, 3], low=np.float16(0), high=np.float16(1), seed=1), name="y"
            ),
            x=(2, 3),
        )
        yield make_example(
            "noise as an input", lambda x, noise: Builder.add(x=x, y=noise, name="y"), reason="", x=(2, 3), noise=(2, 3)
        )


def _build_noise() -> Program:
    def body(x: Var) -> Var:
        noise = Builder.random_normal(shape=[2, 3], mean=np.float16(0), stddev=np.float16(1), seed=1)
        result: Var = Builder.add(x=x, y=noise, name="y")
        return result

    return build_program(body, x=(2, 3))
