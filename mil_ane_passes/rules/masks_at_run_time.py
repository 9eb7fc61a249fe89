"""Find masks that are computed at run time: one_hot and band_part."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m1_gpt_notes, cite_m4_study, cite_private_route
from ..passes.examples import make_example
from ._unsupported_ops import M1_TO_M5, make_unsupported_hit

_REPLACEMENTS = {"one_hot": "equal of the index, as fp16, with a constant range", "band_part": "a constant mask"}


class MasksAtRunTime(Rule):
    """one_hot and band_part are unsupported on the ANE.

    why     Core ML on an M4 rejects both, and so does the ANE's compiler on M1 to M5 when asked without Core ML. In
            GPT models on an M1 Pro the band_part of the causal mask was what left the ANE.
    when    Any one_hot, any band_part.
    fix     ane::constant_band_part selects by a constant mask: the same bits, whatever lies outside the band.
            ane::one_hot_compare compares the indices, cast to fp16 at the edge (exact up to 2048), with a constant
            range; better still, pass the indices in as fp16, or the one-hot rows themselves.
    """

    code, slug = "ANE208", "mask-at-run-time"
    roots = tuple(_REPLACEMENTS)
    refuses, confidence = True, "high"
    advice = "Take a constant mask for band_part; compare the index, as fp16, with a constant range for one_hot."
    evidence = (
        cite_m4_study("one_hot and band_part are unsupported; comparisons, select and mul are accepted"),
        cite_private_route("one_hot and band_part have no form on any generation"),
        cite_m1_gpt_notes(
            "parts of a Pythia model that begin with band_part, of the causal mask, cannot run it on the ANE"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        message = 'Unsupported MIL operation "one_hot".' if op.op_type == "one_hot" else None
        return make_unsupported_hit(
            self,
            op,
            f"{op.op_type} is unsupported on the ANE; {_REPLACEMENTS[op.op_type]} stands for it",
            seen=M1_TO_M5,
            message=message,
        )

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "one_hot",
            lambda ids: Builder.one_hot(indices=ids, one_hot_vector_size=8, name="y"),
            dtype=types.int32,
            ids=(1, 4),
        )
        yield make_example("band_part", lambda x: Builder.band_part(x=x, lower=-1, upper=0, name="y"), x=(1, 4, 4))
        yield make_example(
            "constant mask",
            lambda x: Builder.mul(x=x, y=np.tril(np.ones((4, 4), np.float16)), name="y"),
            reason="",
            x=(1, 4, 4),
        )
