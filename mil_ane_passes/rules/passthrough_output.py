"""Find outputs that are inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Block, Builder, Function

from ..passes.contract import BlockRule, Example, Hit, Miss
from ..passes.evidence import cite_private_quirk
from ..passes.examples import make_example


class PassthroughOutput(BlockRule):
    """An output is an input handed through without an op between.

    why     By a private route such a program crashed. That Core ML is struck as well is not known: coremltools itself
            puts an `identity` between when it converts, other tools need not.
    when    A function that returns one of its own inputs.
    fix     Leave the output out, the caller has the value; or multiply by one, which the same source used. An
            `identity` says the same, and was not tried by it.
    """

    code, slug = "ANE515", "passthrough-output"
    level, confidence = "note", "low"
    advice = "Leave the output out, since the caller has the value, or multiply it by one."
    evidence = (
        cite_private_quirk("an output that is an input crashes in Espresso; a multiplication by one fixes it"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        inputs = {var: name for name, var in block.inputs.items()}
        first = next((op for op in block.operations if op.op_type != "const"), None)
        for var in block.outputs:
            if var in inputs and first is not None:
                yield Hit(first, note=f"output '{var.name}' is the input '{inputs[var]}'")

    def examples(self) -> Iterable[Example]:
        yield make_example("beside another", lambda x: (Builder.relu(x=x, name="y"), x), x=(2, 3))
        yield make_example("an identity", lambda x: Builder.identity(x=x, name="y"), reason="", x=(2, 3))
