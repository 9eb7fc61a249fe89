"""Branches, loops, custom layers, and shapes that depend on values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, mil_list, types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ane.op_support import OpSupport, find_dynamic_inputs
from ..ir.query import contradiction, get_flat_inputs, is_const, is_opaque, is_used, plain_type
from ..passes.contract import BlockRule, Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_m4_study, cite_private_route, cite_surgery_tip
from ..passes.examples import build_program, make_example
from ..utils.text_format import format_count
from ._unsupported_ops import UnsupportedOps, make_unsupported_hit

_SHAPE_INPUTS = {"reshape": "shape", "tile": "reps", "pad": "pad", "resize": "shape"}
"Ops with the shape of their output, or a parameter of it, as an input."
_SplitPoints = Sequence[Sequence[str]]


class ControlFlow(UnsupportedOps):
    """Branches, loops and lists run on the CPU, and what stands inside them with them.

    why     cond was seen to leave the ANE in a GPT model; the ANE's compiler, asked without Core ML, has no form of
            cond, while_loop and the list ops on any generation.
    when    Any cond, while_loop, make_list or list op. The note counts the ops inside.
    fix     A loop whose number of steps is fixed: ane::unroll_while_loop. A branch that is always taken:
            ane::inline_constant_branch. Another branch: compute both sides and select (the same bits where neither
            side traps), or make two functions and choose outside. A loop that values end: cut the model before it and
            behind it with --split-at, at the values in the note. A list at known places: ane::lists_as_stack.
    """

    code, slug = "ANE218", "control-flow"

    def describe_form(self, row: OpSupport, op: Operation) -> str:
        inside = sum(_count_ops(block.operations) for block in op.blocks)
        what = f" with {format_count(inside, 'op')} inside" if op.blocks else ""
        if _has_constant_branch(op):
            return f"{what}, decided by a constant"
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
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda i, a: Builder.less(x=i, y=np.int32(3)),
            _body=lambda i, a: (Builder.add(x=i, y=np.int32(1)), Builder.relu(x=a)), loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_program(body, dtype=types.fp16, x=(2, 3))


class CustomLayer(BlockRule):
    """A custom layer runs where its own code runs: on the CPU or the GPU, never on the ANE.

    why     A custom layer is code of the app's. Listed among the layers that leave the ANE since 2020. A classify op
            returns a label and a dictionary, which are no tensors. What an op of a later version means to the ANE
            nobody can say who cannot read it.
    when    custom_layer and classify. Ops that this version of coremltools does not know, or whose inputs it does not
            take, as a guess.
    fix     Write the layer with ops that Core ML has (a composite op in the converter), or split the model before it
            and behind it, at the values in the note. classify: return the probabilities and look the label up in the
            app; it is the last op, so its cost is one transition. An unknown op: a newer coremltools.
    no fix  What the layer computes is code of the app's own, which is not in the package.
    """

    code, slug = "ANE219", "custom-layer"
    refuses, confidence = True, "high"
    advice = ("Write it with ops that Core ML has, or cut the model before and behind it (edit --split-at); of a "
              "classifier, return the probabilities.")
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
                    note=f"the custom layer {name or op.name} is code of the app's{_describe_split_points(op)}",
                )
            elif op.op_type == "classify":
                yield make_unsupported_hit(self, op, "classify returns a label and a dictionary, which are no tensors")
            elif is_opaque(op) and not op.op_type.startswith("constexpr_"):
                yield Hit(op, note=_unread(op), sure=False)

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "classifier",
            lambda x: Builder.classify(probabilities=x, classes=Builder.const(val=mil_list(["cat", "dog"]))),
            dtype=types.fp32,
            x=(1, 2),
        )
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _unread(op: Operation) -> str:
    found, unknown = contradiction(op), "so what the ANE makes of it is not known"
    if found:
        return (f"coremltools does not accept {plain_type(op)} with these inputs and outputs ({found}), {unknown}; "
                "correct them where the package is made")
    return f"this version of coremltools cannot read {plain_type(op)}, {unknown}"


class DataDependentShape(Rule):
    """The shape of an output depends on values, which the ANE cannot plan for.

    why     The ANE runs what is laid out when the model is compiled. non_zero is unsupported by Core ML on an M4, and
            runs on no GPU either; asked without Core ML the ANE's compiler names the shape as the reason. For a
            reshape, tile, pad or resize by computed numbers that is predicted: nobody reported one.
    when    Any non_zero; reshape, tile, pad and resize whose shape, repetitions or widths are no constant.
    fix     Fix the shapes (ct.TensorType with fixed numbers, or one function for each size), and fold what is then
            known. Select with a mask in place of picking out the elements that are not zero.
    no fix  The ANE runs fixed shapes only, and here the data say how large a result is.
    """

    code, slug = "ANE210", "data-dependent-shape"
    roots = ("non_zero", *_SHAPE_INPUTS)
    refuses, confidence = True, "high"
    advice = ("Fix the shapes, so that sizes fold to constants; use a mask in place of picking out elements, or cut "
              "the model there (edit --split-at).")
    evidence = (
        cite_m4_study("non_zero is unsupported, and runs on no GPU either"),
        cite_private_route(
            "non_zero has no form on any generation, as its shape depends on the data; shapes are static"
        ),
        cite_surgery_tip("layers whose shapes are dynamic do not run on the ANE"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "non_zero":
            note = f"non_zero makes as many rows as there are elements that are not zero{_describe_split_points(op)}"
            return make_unsupported_hit(self, op, note, split_at=_find_split_points(op))
        given = _SHAPE_INPUTS[op.op_type]
        if not find_dynamic_inputs(op, given):
            return Miss(op, f"its {given} is a constant", near=False)
        are = "are" if given == "reps" else "is"
        return Hit(op, sure=False, note=f"the {given} of a {op.op_type} {are} computed in the model; no such op was "
                                        "measured")

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
    def body(x: Var) -> Var:
        extent = Builder.gather(x=Builder.shape(x=x), indices=np.int32(0), axis=0)
        size = Builder.concat(values=[Builder.expand_dims(x=extent, axes=[0]), np.array([-1], np.int32)], axis=0)
        result: Var = Builder.reshape(x=x, shape=size, name="y")
        return result

    return build_program(body, dtype=types.fp16, x=(None, 3, 4))


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
        f"{'before' if [name] == before else 'behind'} it at '{name}'" for (name,) in reversed(_find_split_points(op))
    ]
    return f"; to cut it out with --split-at: {', '.join(named)}" if named else ""


def _find_value_to_split_before(op: Operation) -> list[str]:
    return [var.name for var in dict.fromkeys(get_flat_inputs(op)) if _is_computed(var)][:1]


def _is_computed(var: Var) -> bool:
    """Return whether `var` depends on the model's inputs and is not one of them."""
    return var.op is not None and not var.is_descendant_of_const and isinstance(var.op.enclosing_block, Function)
