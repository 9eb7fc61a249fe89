"""Branches, loops, custom layers, and shapes that depend on values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, mil_list, types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ane.op_support import OpSupport, find_dynamic_inputs
from ..ir.query import get_contradiction, get_flat_inputs, is_const, is_opaque, is_used, plain_type
from ..passes.contract import BlockRule, Example, Hit, Miss, Rule
from ..passes.evidence import Vendor, cite_2020_layer_list, cite_ane_compiler, cite_m4_study, cite_surgery_tip
from ..passes.examples import build_program, make_example
from ..passes.severity import Severity
from ..utils.text_format import format_count
from ._unsupported_ops import UnsupportedOps, make_unsupported_hit

_SHAPE_INPUTS = {"reshape": "shape", "tile": "reps", "pad": "pad", "resize": "shape"}
"Ops whose input defines the shape of the output, with the name of that input."
_SplitPoints = Sequence[Sequence[str]]


class ControlFlow(UnsupportedOps):
    """Branches, loops and lists run on the CPU, including the ops inside them.

    why     cond left the ANE in a GPT model. The ANE's compiler, queried without Core ML, has no equivalent of cond,
            while_loop and the list ops on any generation.
    when    Any cond, while_loop, make_list or list op. The finding counts the ops inside.
    fix     Loops with a fixed trip count: ane::unroll_while_loop. Constant conditions: ane::inline_constant_branch.
            Other branches: compute both sides and select (the same bits), or make two functions and choose in the
            caller. Loops whose trip count depends on data: split the model before and after them with --split-at, at
            the values in the finding. Lists with constant indices: ane::lists_as_stack.
    """

    code, slug = "ANE218", "control-flow"

    def describe_form(self, row: OpSupport, op: Operation) -> str:
        inside = sum(_count_ops(block.operations) for block in op.blocks)
        what = f" with {format_count(inside, 'op')} inside" if op.blocks else ""
        if _has_constant_branch(op):
            return f"{what} with a constant condition"
        return f"{what}{_describe_split_points(op)}" if op.blocks else what

    def find_splits(self, op: Operation) -> _SplitPoints:
        return _find_split_points(op) if op.blocks and not _has_constant_branch(op) else ()

    def examples(self) -> Iterable[Example]:
        yield make_example("branch", _build_branch, x=(2, 3))
        yield Example("loop", _build_loop)
        yield make_example(
            "both sides",
            lambda x: Builder.select(cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=Builder.exp(x=x), name="y"),
            reason="",
            x=(2, 3),
        )


def _has_constant_branch(op: Operation) -> bool:
    return op.op_type == "cond" and is_const(op.pred)


def _count_ops(ops: Iterable[Operation]) -> int:
    return sum(1 for op in ops if op.op_type != "const")


def _build_branch(x: Var) -> Var:
    positive = Builder.greater(x=Builder.reduce_sum(x=x), y=np.float16(0))
    result: Var = Builder.cond(pred=positive, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x),
                               name="y")
    return result


def _build_loop() -> Program:
    def build_body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda i, a: Builder.less(x=i, y=np.int32(3)),
            _body=lambda i, a: (Builder.add(x=i, y=np.int32(1)), Builder.relu(x=a)), loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_program(build_body, dtype=types.fp16, x=(2, 3))


def _build_unknown_op() -> Program:
    program = build_program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3))
    program.functions["main"].find_ops(op_type="relu")[0].opaque = True  # as the reader marks ops that it does not know
    return program


class CustomLayer(BlockRule):
    """A custom layer runs on the CPU or GPU, depending on its implementation, but never on the ANE.

    why     A custom layer is implemented by the app. Lists of layers that leave the ANE have included it since 2020.
            For an op that the installed coremltools cannot read, support is unknown.
    when    custom_layer. As a guess, ops that this version of coremltools does not know, or whose inputs it rejects.
    fix     Implement the layer with Core ML ops (a composite op in the converter), or split the model before and after
            it, at the values in the finding. Unknown op: use a newer coremltools.
    no fix  The code of the layer is in the app, not in the package.
    """

    code, slug = "ANE219", "custom-layer"
    refuses, confidence = True, "high"
    advice = "Implement it with Core ML ops, or split the model before and after it (edit --split-at)."
    evidence = (
        cite_2020_layer_list("custom layers do not run on the ANE"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type == "custom_layer" or op.op_type in SSAOpRegistry.custom_ops:
                name = (getattr(op, "bindings", None) or {}).get("class_name")
                yield make_unsupported_hit(
                    self,
                    op,
                    split_at=_find_split_points(op),
                    note=f"the custom layer {name or op.name} is implemented by the app{_describe_split_points(op)}",
                )
            elif is_opaque(op) and not op.op_type.startswith("constexpr_"):
                yield Hit(op, note=_describe_unreadable(op), sure=False)

    def examples(self) -> Iterable[Example]:
        yield Example("unknown op", _build_unknown_op)
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


class ClassifierLabel(Rule):
    """The label of a classifier is looked up on the CPU, after all other ops.

    why     A classify op returns a label and a dictionary, which are not tensors. As it is the last op, it costs one
            transition.
    when    Any classify op: Core ML's interface of a classifier needs it.
    fix     None is needed. To save the transition, return the probabilities and look up the label in the app.
    no fix  Without the op, the outputs of the model would be others.
    """

    code, slug = "ANE244", "classifier-label"
    roots = ("classify",)
    refuses, confidence, severity = True, "high", Severity.SUGGESTION
    advice = "Needed for a classifier's outputs; to save one transition, return the probabilities."
    evidence = (
        Vendor("classify returns a label and a dictionary of the classes and their probabilities",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/mil/ops/defs/iOS15/"
                      "classify.py"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        return make_unsupported_hit(self, op, "classify returns a label and a dictionary, which are not tensors")

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "labels", lambda x: Builder.classify(probabilities=x, classes=Builder.const(val=mil_list(["cat", "dog"]))),
            dtype=types.fp32, x=(1, 2))
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _describe_unreadable(op: Operation) -> str:
    found, unknown = get_contradiction(op), "so its support on the ANE is unknown"
    if found:
        return (f"coremltools does not accept {plain_type(op)} with these inputs and outputs ({found}), {unknown}; "
                "fix them where the package is created")
    return f"this version of coremltools cannot read {plain_type(op)}, {unknown}"


class DataDependentShape(Rule):
    """The output shape depends on values, but the ANE needs static shapes.

    why     Shapes on the ANE are fixed when the model is compiled. non_zero is unsupported by Core ML on an M4, and on
            the GPU, too; the ANE's compiler, queried without Core ML, states the shape as the reason. For reshape,
            tile, pad and resize with computed sizes this is predicted: there are no reports.
    when    Any non_zero; reshape, tile, pad and resize whose shape, repetitions or widths are not constant.
    fix     Fix the shapes (ct.TensorType with fixed sizes, or one function per size), and fold the sizes that become
            constant. Use a mask and select instead of extracting the nonzero elements.
    no fix  The ANE supports static shapes only, and here the size of the result depends on data.
    """

    code, slug = "ANE210", "data-dependent-shape"
    roots = ("non_zero", *_SHAPE_INPUTS)
    refuses, confidence = True, "high"
    advice = ("Fix the shapes, so that sizes fold to constants; use a mask instead of extracting elements, or split "
              "the model there (edit --split-at).")
    evidence = (
        cite_m4_study("non_zero is unsupported, on the GPU, too"),
        cite_ane_compiler(
            "non_zero has no equivalent on any generation, because its shape depends on data; shapes are static"
        ),
        cite_surgery_tip("layers whose shapes are dynamic do not run on the ANE"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "non_zero":
            note = f"non_zero returns one row per nonzero element{_describe_split_points(op)}"
            return make_unsupported_hit(self, op, note, split_at=_find_split_points(op))
        given = _SHAPE_INPUTS[op.op_type]
        if not find_dynamic_inputs(op, given):
            return Miss(op, f"its {given} is a constant", near=False)
        are = "are" if given == "reps" else "is"
        return Hit(op, sure=False, note=f"the {given} of a {op.op_type} {are} computed in the model; no such op was "
                                        f"measured")

    def examples(self) -> Iterable[Example]:
        yield make_example("non_zero", lambda x: Builder.non_zero(x=x, name="y"), x=(2, 3))
        yield Example("size from a shape", _build_flatten)
        yield make_example(
            "fixed size",
            lambda x: Builder.reshape(x=x, shape=[3, -1], name="y"),
            reason="its shape is a constant",
            x=(2, 3),
        )
        yield make_example(
            "mask",
            lambda x: Builder.select(cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=np.float16(0), name="y"),
            reason="",
            x=(2, 3),
        )


def _build_flatten() -> Program:
    def build_body(x: Var) -> Var:
        extent = Builder.gather(x=Builder.shape(x=x), indices=np.int32(0), axis=0)
        size = Builder.concat(values=[Builder.expand_dims(x=extent, axes=[0]), np.array([-1], np.int32)], axis=0)
        result: Var = Builder.reshape(x=x, shape=size, name="y")
        return result

    return build_program(build_body, dtype=types.fp16, x=(None, 3, 4))


def _find_split_points(op: Operation) -> _SplitPoints:
    """Return the values to split at after and before `op`, in the order of the splits; see `Hit.split_at`.

    The split after `op` comes first: its first part still has the value to split at before `op`. Empty where no split
    is possible there.
    """
    if not isinstance(op.enclosing_block, Function):
        return ()
    behind = [var.name for var in op.outputs if is_used(var) and not var.consuming_blocks][:1]
    return tuple((name,) for name in (*behind, *_find_value_to_split_before(op)))


def _describe_split_points(op: Operation) -> str:
    """Format the splits of `_find_split_points(op)` for a note, or return ""."""
    before = _find_value_to_split_before(op)
    named = [
        f"{'before' if [name] == before else 'after'} it at '{name}'" for (name,) in reversed(_find_split_points(op))
    ]
    return f"; to split it off with --split-at: {', '.join(named)}" if named else ""


def _find_value_to_split_before(op: Operation) -> list[str]:
    return [var.name for var in dict.fromkeys(get_flat_inputs(op)) if _is_computed(var)][:1]


def _is_computed(var: Var) -> bool:
    """Return whether `var` depends on the model's inputs and is not one of them."""
    return var.op is not None and not var.is_descendant_of_const and isinstance(var.op.enclosing_block, Function)
