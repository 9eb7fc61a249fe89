"""Find custom layers, classifiers' labels, and ops that coremltools cannot read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Block, Builder, Operation, mil_list, types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ir.query import contradiction, is_opaque, plain_type
from ..passes.contract import BlockRule, Example, Hit, Miss
from ..passes.evidence import cite_2020_layer_list
from ..passes.examples import make_example
from ._split_points import describe_split_points, find_split_points
from ._unsupported_ops import make_unsupported_hit


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
                    split_at=find_split_points(op),
                    note=f"the custom layer {name or op.name} is code of the app's{describe_split_points(op)}",
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
