"""States."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import coremltools as ct
from coremltools.converters.mil.mil import Block, Builder, Function, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_consumers
from ..passes.contract import BlockRule, Community, Example, Hit, Measured, Miss
from ..passes.examples import make_example
from ..passes.targets import format_generations
from ._sizes import select_generations

_WIDTH_MULTIPLE = 32
"Numbers in a row of 64 bytes in fp16: a state failed whose width is not a multiple of it."


class StateWidth(BlockRule):
    """A state's width is no multiple of 32, with which a model failed on the ANE.

    why     A model with a state 270 wide fails when the ANE is allowed, and runs with one of 256; on CPU and GPU both
            run. One report, with a script. 32 numbers in fp16 are the 64 bytes to which rows are padded.
    when    Each state whose last dimension is no multiple of 32, at its first reader. Chips other than M4 were not
            measured.
    fix     Make the state wider, to the next multiple of 32, and slice what is read; write back padded.
    no fix  The shape of a state is the model's interface: who makes the state makes it wider.
    """

    code, slug = "ANE233", "state-width"
    refuses, confidence = True, "medium"
    advice = "Pad the state's last dimension to a multiple of 32 and slice what is read (the same bits)."
    evidence = (
        Measured("a state 270 wide fails on the ANE, 256 works", chip="M4", os="macOS 15.2", date="2025-12-19",
                 source="https://github.com/apple/coremltools/issues/2631"),
        Community("a key and value cache worked on the ANE after its shapes were made smaller; the alignment to 64 "
                  "bytes is suspected", source="https://github.com/Anemll/Anemll/issues/27", date="2025-07-11"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        m4 = select_generations(tuple(self.generations), "m4")
        for name, var in block.inputs.items():
            if not types.is_state(var.sym_type) or not var.shape or not get_consumers(var):
                continue
            width, readers = var.shape[-1], get_consumers(var)
            if is_symbolic(width):
                continue
            if int(width) % _WIDTH_MULTIPLE == 0:
                yield Miss(readers[0], f"state '{name}' is {width} wide, a multiple of 32", near=False)
                continue
            beside = "" if m4 else f"; not measured on {format_generations(self.generations)}"
            yield Hit(readers[0], covers=readers, sure=bool(m4),
                      note=f"state '{name}' is {width} wide, no multiple of {_WIDTH_MULTIPLE}; 270 failed on M4, "
                           f"256 ran{beside}")

    def examples(self) -> Iterable[Example]:
        yield Example("270", lambda: _build_stateful(270))
        yield Example("256", lambda: _build_stateful(256), reason="state 's' is 256 wide, a multiple of 32")
        yield make_example("no state", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, 270))


def _build_stateful(width: int) -> Program:
    held = Builder.state_tensor_placeholder((1, 2, width), types.fp16)
    given = Builder.placeholder((1, 2, width), types.fp16)
    with Function({"s": held, "x": given}, opset_version=ct.target.iOS18) as function:
        read: Var = Builder.read_state(input=function.inputs["s"])
        added = Builder.add(x=read, y=function.inputs["x"], name="y")
        Builder.coreml_update_state(state=function.inputs["s"], value=added)
        function.set_outputs([added])
    built = Program()
    built.add_function("main", function)
    return built
