"""Find logical ops that were not observed on the ANE."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import build_mask_program, make_example
from ._unsupported_ops import M4, format_chips, is_any_admitted


class LogicalOps(Rule):
    """A logical op on masks may not run on the ANE: the sources contradict each other.

    why     Core ML accepts logical_and on an M4. By a private route logical_and, logical_or and logical_xor are
            supported on no chip, which at least for the first is not so. Nothing else was measured.
    when    logical_or and logical_xor; logical_and when another chip than M4 is looked at. Never known.
    fix     On masks of 0 and 1 in fp16: and is mul or minimum, or is maximum, xor is abs of the difference (the same
            bits).
    """

    code, slug = "ANE237", "logical-op"
    roots = ("logical_and", "logical_or", "logical_xor")
    refuses, confidence = True, "low"
    advice = "Use fp16 masks of 0 and 1 with mul (and), maximum (or), abs of sub (xor): the same bits."
    evidence = (
        cite_m4_study("logical_and is accepted, contradicts the private route"),
        cite_private_route("logical_and, logical_or and logical_xor are supported nowhere"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "logical_and":
            others = tuple(one for one in self.generations if not is_any_admitted(M4, (one,)))
            if not others:
                return Miss(op, "logical_and is accepted on M4", near=False)
            return Hit(
                op,
                sure=False,
                note=f"logical_and is accepted on M4, and not measured on {format_chips(others)}; a "
                "private route rejects it",
            )
        return Hit(op, sure=False, note=f"{op.op_type} was not measured through Core ML; a private route rejects it")

    def examples(self) -> Iterable[Example]:
        yield Example("and", lambda: build_mask_program("logical_and"))
        yield Example("or", lambda: build_mask_program("logical_or"))
        yield Example("xor", lambda: build_mask_program("logical_xor"))
        yield make_example("product", lambda x, z: Builder.mul(x=x, y=z, name="y"), reason="", x=(2, 3), z=(2, 3))
