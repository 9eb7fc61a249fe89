"""Find sin and cos on chips before M3."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route, cite_surgery_tip
from ..passes.examples import make_example
from ..passes.targets import Gate, format_generations
from ._sizes import select_generations


class SinCos(Rule):
    """sin and cos are not taken by the ANE of M1 and M2.

    why     By a private route both are native from M3 on, and M1 and M2 refuse them. A model with a lone sin is
            reported not to run on the ANE, chip not stated, which its small size explains as well. An M4 accepts both.
    when    sin and cos of numbers, on chips up to M2. A13 and before were not measured.
    fix     Where the angles are constants (positions, frequencies), put the values into the model: the same bits.
            Otherwise a polynomial after the angle is brought into one turn (close, not equal).
    no fix  No ops that M1 takes make the same values; a polynomial is another function, of a dozen ops for each.
    """

    code, slug = "ANE238", "sin-cos-before-m3"
    roots = ("sin", "cos")
    targets = Gate(last="m2")
    refuses, confidence = True, "medium"
    advice = "Store the values where the angles are constants (the same bits); else a polynomial within one turn."
    evidence = (
        cite_private_route("sin and cos are native from M3 on; M1 and M2 reject them, measured", "M1 and M2"),
        cite_surgery_tip(
            "a model with a single sin or cos layer does not run on the ANE; an encoder with sinusoids does"
        ),
        cite_m4_study("contradicts it: sin and cos are accepted"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "no numbers", near=False)
        struck = select_generations(tuple(self.generations), "m1", "m2")
        if struck:
            return Hit(
                op, note=f"{op.op_type} is unsupported on {format_generations(struck)} (a private route); M4 accepts it"
            )
        return Hit(
            op,
            sure=False,
            note=f"{op.op_type} is unsupported on M1 and M2, not measured on "
            f"{format_generations(select_generations(tuple(self.generations), 'a12', 'a13'))}",
        )

    def examples(self) -> Iterable[Example]:
        yield make_example("sin", lambda x: Builder.sin(x=x, name="y"), x=(2, 3))
        yield make_example("cos", lambda x: Builder.cos(x=x, name="y"), x=(None, 3))
        yield make_example("atan", lambda x: Builder.atan(x=x, name="y"), reason="", x=(2, 3))
