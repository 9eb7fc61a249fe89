"""Normalizations in forms whose ANE support is disputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import any_symbolic

from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_const_value, is_opaque
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Rule, Severity, Vendor
from ..passes.examples import build_program
from ..passes.plan import Plan
from ..utils.text_format import format_count


class GroupNormRank5(Rule):
    """A group norm reduces a tensor of rank 5, which is unsupported according to one source.

    why     Apple's models for Core AI compute group norm at rank 4, because at rank 5 it is "not supported" on an ANE
            of the M4's generation. In contrast, the UNet of Apple's diffusion models, made for the ANE, has torch's
            GroupNorm, which coremltools lowers at rank 5. Single ops of rank 5 are accepted on an M4.
    when    reduce_mean over at least the last two axes of a value of rank 5 that a reshape made from rank 4. The
            prediction still counts the op as supported.
    fix     Reshape to [N * G, C / G, H, W] and reduce over the last three axes: the same sums.
    """

    code, slug = "ANE236", "group-norm-rank-5"
    roots = ("reduce_mean",)
    confidence, severity = "low", Severity.SUGGESTION
    advice = "Reshape to [N * G, C / G, H, W] and normalise over the last three axes: the same sums."
    evidence = (
        Vendor("group norm at rank 5 is not supported on h16c: reshape to (B * G, C / G, H, W) (Core AI)",
               source="apple/coreai-models primitives, mask_decoder.py", date="2026"),
        Vendor("contradicts it: the UNet has torch's GroupNorm and is meant for the ANE", date="2022",
               source="apple/ml-stable-diffusion python_coreml_stable_diffusion/unet.py"),
        Community("group norm is lowered at rank 4, [1, G, C / G, H * W] (not through Core ML)", date="2026",
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
    def build_body(x: Var) -> Var:
        split = Builder.reshape(x=x, shape=list(shape))
        mean = Builder.reduce_mean(x=split, axes=list(range(len(shape) - 3, len(shape))), keep_dims=True)
        result: Var = Builder.reshape(x=Builder.sub(x=split, y=mean), shape=[1, 8, 6, 6], name="y")
        return result

    return build_program(build_body, x=(1, 8, 6, 6))


class LayerNormFlexible(PlanRule):
    """A layer_norm of rank 3 in a model with enumerated shapes keeps the model off the ANE.

    why     One report with a script: a LayerNorm and a matmul take 175 ms with two enumerated shapes and 20 ms with a
            fixed shape or a range; without the LayerNorm enumerated shapes run on the ANE, too. The chip is not stated.
    when    layer_norm of a value of rank 3 with a dimension that is not fixed, in a package with enumerated shapes.
            A program in memory has no information about enumerated shapes, so it is reported as well.
    fix     Fix the shape, or make one function per shape, or normalise at rank 4 (expand_dims before, squeeze after;
            the same numbers). No report confirms that rank 4 helps.
    """

    code, slug = "ANE235", "layer-norm-flexible"
    confidence, severity = "low", Severity.SUGGESTION
    advice = "Fix the shape, or make one function per shape."
    evidence = (
        Community("with LayerNorm in it a model with EnumeratedShapes does not run on the ANE (175 ms for 20); with a "
                  "fixed shape or RangeDim it does", source="https://github.com/apple/coremltools/issues/1909",
                  date="2023-07-10"),
    )

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            norms = [row.op for row in rows if _is_dynamic_rank_3_norm(row.op)]
            if not norms:
                continue
            kinds = _find_shape_flexibilities(plan.package, name)
            if kinds and "enumerated" not in kinds:
                yield Miss(norms[0], "the shapes are ranged, for which layer_norm runs", near=False)
                continue
            how = "the shapes are enumerated" if kinds else "if the shapes are enumerated"
            count = f"{format_count(len(norms), 'layer_norm')} of rank 3 with a dimension that is not fixed"
            yield Hit(norms[0], covers=norms, note=f"{count}: {how}, the model was reported off the ANE")

    def examples(self) -> Iterable[Example]:
        yield Example("rank 3", lambda: _build_layer_norm(None, 4, 8))
        yield Example("fixed", lambda: _build_layer_norm(2, 4, 8), reason="")
        yield Example("rank 4", lambda: _build_layer_norm(None, 2, 4, 8), reason="")


def _is_dynamic_rank_3_norm(op: Operation) -> bool:
    if op.op_type != "layer_norm" or is_opaque(op) or not types.is_tensor(op.x.sym_type):
        return False
    return op.x.rank == 3 and bool(any_symbolic(op.x.shape))


def _find_shape_flexibilities(package: Any, function: str) -> set[str]:
    """Return the flexibilities of the package's inputs: enumerated, ranged; empty where nothing is known."""
    found = set()
    for feature in package.description(function).input if package is not None else ():
        if feature.type.WhichOneof("Type") == "multiArrayType":
            kind = feature.type.multiArrayType.WhichOneof("ShapeFlexibility")
            found |= {"enumerated"} if kind == "enumeratedShapes" else {"ranged"} if kind == "shapeRange" else set()
    return found


def _build_layer_norm(*shape: int | None) -> Program:
    return build_program(lambda x: Builder.layer_norm(x=x, axes=[-1], name="y"), x=shape)
