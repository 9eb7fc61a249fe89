"""Find ops that need a unit which the ANE of M1 and older chips lacks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation

from ..ir.query import get_const_value
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ..passes.targets import Gate
from ._sizes import select_generations


class TextureOps(Rule):
    """affine, resample and reflecting pads need a unit that the ANE has from M2 on.

    why     By a private route M1 rejects affine ("affine transform is not supported on this architecture") and
            resample, and does resizing and reflecting pads by other means, some modes of which fail. Through Core ML
            only an M4 was measured, which accepts them all.
    when    Chips up to M1: affine, resample; pad with mode reflect, which is not known. Resizing is not reported: it
            is said to work there, rounded otherwise.
    fix     A fixed integer enlargement is a conv_transpose; a reflecting pad is slices, reverse and concat (the same
            bits); sampling grids have to stay outside the model.
    no fix  Sampling at places that are computed needs a gather, which is unsupported as well.
    """

    code, slug = "ANE231", "texture-op"
    roots = ("affine", "resample", "pad")
    targets = Gate(last="m1")
    refuses, confidence = True, "medium"
    advice = "Build a reflecting pad of slices, reverse and concat (the same bits); sample outside the model."
    evidence = (
        cite_private_route("affine and resample need the texture engine, from M2 on; M1 rejects them", "M1"),
        cite_private_route("symmetric and reflecting pads are done in software on M1, natively later", "M1"),
        cite_m4_study("affine, resample, reflecting and replicating pads are accepted"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "pad":
            mode = get_const_value(op.mode, "constant")
            if mode != "reflect":
                return Miss(op, f"pads with mode {mode}", near=False)
            return Hit(op, sure=False, note="a reflecting pad: by a private route native from M2 on only")
        sure = bool(select_generations(tuple(self.generations), "m1"))
        where = "M1 (a private route)" if sure else "M1; older chips were not measured"
        return Hit(op, sure=sure, note=f"{op.op_type} needs a unit that is not on {where}")

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "resample",
            lambda x, at: Builder.resample(
                x=x,
                coordinates=at,
                sampling_mode="bilinear",
                padding_mode="constant",
                padding_value=np.float16(0),
                coordinates_mode="normalized_minus_one_to_one",
                align_corners=True,
                name="y",
            ),
            x=(1, 2, 4, 4),
            at=(1, 3, 3, 2),
        )
        yield make_example("reflect", lambda x: Builder.pad(x=x, pad=[1, 1], mode="reflect", name="y"), x=(1, 2, 4, 4))
        yield make_example(
            "zeros",
            lambda x: Builder.pad(x=x, pad=[1, 1], mode="constant", constant_val=np.float16(0), name="y"),
            reason="pads with mode constant",
            x=(1, 2, 4, 4),
        )
