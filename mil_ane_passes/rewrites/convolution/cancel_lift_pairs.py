"""Cancel squeeze and expand_dims between consecutive lifted ops."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import make_example
from ._conv_1d_lifting import find_dummy_axis


class CancelLiftPairs(Rewrite):
    """Cancel a squeeze and an expand_dims of the same axis.

    why     A lifted op (a 1-D op computed as a 2-D one with a dummy axis) squeezes its output, and the next lifted op
            expands it again: two layout ops without effect.
    when    squeeze of one axis (2 or 3) of a rank-4 value, followed by an expand_dims of the same axis. Other users of
            the squeezed value keep it.
    exact   bitwise: both ops only rename axes.
    cost    none; a squeeze with other users stays.

    before
        %0: fp16[1, 4, 8] = squeeze(x=%x, axes=[-1])
        %1: fp16[1, 4, 8, 1] = expand_dims(x=%0, axes=[-1])
        %y: fp16[1, 4, 8, 1] = relu(x=%1)
    after
        %y: fp16[1, 4, 8, 1] = relu(x=%x)
    """

    code, slug = "ANE101", "squeeze-expand-pair"
    stage = "layout"
    after = ("lift_conv_transpose_1d", "lift_conv_1d")
    exactness = Exactness.BITWISE
    preset = "safe"
    roots = ("expand_dims",)
    evidence = (
        cite_apple_authoring_rules("avoid reshape and transpose between ops: each is a pass over the data"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        axis = find_dummy_axis(op)
        if axis is None:
            return Miss(op, "not one axis, 2 or 3, of rank 4", near=False)
        source = op.x.op
        if source is None or source.op_type != "squeeze":
            return Miss(op, "x is not squeezed", near=False)
        if find_dummy_axis(source) != axis:
            return Miss(op, f"the squeeze drops an axis other than {axis}")
        return Hit(op, note="squeeze and expand_dims of the same axis")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        wide: Var = hit.op.x.op.x
        return wide

    def examples(self) -> Iterable[Example]:
        yield _make_pair_example("same axis", [-1], [-1], (1, 4, 8, 1))
        yield _make_pair_example("spelt differently", [3], [-1], (1, 4, 8, 1))
        yield _make_pair_example("axis 2", [2], [2], (1, 4, 1, 8))
        yield _make_pair_example("other axis", [2], [-1], (1, 4, 1, 8),
                                 reason="the squeeze drops an axis other than 3")
        yield make_example("no squeeze", lambda x: Builder.relu(x=Builder.expand_dims(x=x, axes=[-1]), name="y"),
                           reason="x is not squeezed", x=(1, 4, 8))
        yield _make_pair_example("first axis", [0], [0], (1, 4, 8, 1), reason="not one axis, 2 or 3, of rank 4")


def _make_pair_example(
    name: str, dropped: list[int], added: list[int], x: tuple[int, ...], reason: str | None = None
) -> Example:
    def build_body(x: Var) -> Var:
        expanded = Builder.expand_dims(x=Builder.squeeze(x=x, axes=dropped), axes=added)
        built: Var = Builder.relu(x=expanded, name="y")
        return built

    return make_example(name, build_body, reason=reason, x=x)
