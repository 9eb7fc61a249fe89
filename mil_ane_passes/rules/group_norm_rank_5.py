"""Find group norms that are computed at rank 5."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program, Var

from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.examples import build_program


class GroupNormRank5(Rule):
    """A group norm reduces over a tensor of rank 5, which one source calls unsupported.

    why     Apple's models for Core AI write group norm at rank 4, because at rank 5 it is "not supported" on an ANE of
            the M4's generation. Against it stand Apple's diffusion models, whose UNet has torch's GroupNorm, which
            coremltools writes at rank 5, and which are made for the ANE. Single ops of rank 5 are accepted on an M4.
    when    reduce_mean over the last two axes and more of a value of rank 5 that a reshape made of one of rank 4. That
            the op is unsupported is not concluded.
    fix     Reshape to [N * G, C / G, H, W] and reduce over the last three axes: the same sums.
    """

    code, slug = "ANE236", "group-norm-rank-5"
    roots = ("reduce_mean",)
    confidence, level = "low", "note"
    advice = "Reshape to [N * G, C / G, H, W] and normalise over the last three axes: the same sums."
    evidence = (
        Vendor("group norm at rank 5 is not supported on h16c: reshape to (B * G, C / G, H, W) (Core AI)",
               source="apple/coreai-models primitives, mask_decoder.py", date="2026"),
        Vendor("contradicts it: the UNet has torch's GroupNorm and is meant for the ANE", date="2022",
               source="apple/ml-stable-diffusion python_coreml_stable_diffusion/unet.py"),
        Community("group norm is lowered at rank 4, [1, G, C / G, H * W] (private route)", date="2026",
                  source="sbryngelson/ANEForge docs/developer/capabilities-and-targets.md"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.rank != 5:
            return Miss(op, "not of rank 5", near=False)
        axes = {axis % 5 for axis in get_const_value(op.axes, list(range(5)))}
        if not {3, 4} <= axes or op.x.op is None or op.x.op.op_type != "reshape" or op.x.op.x.rank != 4:
            return Miss(op, "no group norm", near=False)
        shape = "x".join(map(str, op.x.shape))
        return Hit(op, note=f"a group norm at rank 5 ({shape}): sources disagree on whether it is supported on the ANE")

    def examples(self) -> Iterable[Example]:
        yield Example("torch's", lambda: _build_group_norm(1, 2, 4, 6, 6))
        yield Example("rank 4", lambda: _build_group_norm(2, 4, 6, 6), reason="not of rank 5")


def _build_group_norm(*shape: int) -> Program:
    def body(x: Var) -> Var:
        split = Builder.reshape(x=x, shape=list(shape))
        mean = Builder.reduce_mean(x=split, axes=list(range(len(shape) - 3, len(shape))), keep_dims=True)
        result: Var = Builder.reshape(x=Builder.sub(x=split, y=mean), shape=[1, 8, 6, 6], name="y")
        return result

    return build_program(body, x=(1, 8, 6, 6))
