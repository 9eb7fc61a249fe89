"""A rewrite and a finding in a distribution of their own. A module may have several."""

from __future__ import annotations

from collections.abc import Iterator

from coremltools.converters.mil.mil import Builder, Operation, Var

from mil_ane_passes.ir.builder import RewriteBuilder
from mil_ane_passes.ir.query import is_symbolic
from mil_ane_passes.passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Rule
from mil_ane_passes.passes.examples import build_program


class DropDoubleAbs(Rewrite):
    """Drop an abs whose input is an abs already.

    before
        %0: fp16[1, 4] = abs(x=%x)
        %1: fp16[1, 4] = abs(x=%0)
        %y: fp16[1, 4] = square(x=%1)
    after
        %0: fp16[1, 4] = abs(x=%x)
        %y: fp16[1, 4] = square(x=%0)
    """

    code, slug = "ACME101", "double-abs"
    stage = "cleanup"
    exactness = Exactness.BITWISE
    preset = "named"
    roots = ("abs",)
    evidence = (Community("abs(abs(x)) = abs(x)", source="algebra"),)

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.op is None or op.x.op.op_type != "abs":
            return Miss(op, "x is not an abs", near=False)
        return Hit(op, note="abs of an abs")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return hit.op.x

    def examples(self) -> Iterator[Example]:
        yield Example("two", lambda: build_program(
            lambda x: Builder.square(x=Builder.abs(x=Builder.abs(x=x)), name="y"), x=(1, 4)))
        yield Example(
            "one", lambda: build_program(lambda x: Builder.abs(x=x, name="y"), x=(1, 4)), reason="x is not an abs"
        )


class SoftmaxOfOne(Rule):
    """A softmax over an axis of extent 1 gives ones, whatever it reads."""

    code, slug = "ACME201", "softmax-of-one"
    roots = ("softmax",)
    confidence = "high"
    advice = "Check the axis; if it is meant, write a constant."
    evidence = (Community("exp(x) / exp(x) = 1", source="algebra"),)

    most: int = 1
    "The largest extent that is reported."

    def match(self, op: Operation) -> Hit | Miss:
        extent = op.x.shape[op.axis.val]
        if is_symbolic(extent):
            return Miss(op, "the extent of the axis is not fixed")
        if extent > self.most:
            return Miss(op, f"the axis has extent {extent}", near=False)
        return Hit(op, note=f"the axis has extent {extent}")

    def examples(self) -> Iterator[Example]:
        yield Example("one", lambda: build_program(lambda x: Builder.softmax(x=x, axis=1, name="y"), x=(4, 1)))
        yield Example("four", lambda: build_program(lambda x: Builder.softmax(x=x, axis=0, name="y"), x=(4, 1)),
                      reason="the axis has extent 4")
        yield Example("flexible", lambda: build_program(lambda x: Builder.softmax(x=x, axis=1, name="y"), x=(4, None)),
                      reason="the extent of the axis is not fixed")
