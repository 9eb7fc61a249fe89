"""Find tensors whose last axis is too short for a row of the ANE's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ..core.contract import Community, Example, Hit, Miss, PlanRule, Vendor
from ..core.evidence import for_authors
from ..core.examples import program
from ..core.islands import by_function
from ..core.layout import padded_bytes, size_text
from ..core.plan import Plan, Row
from ..core.query import itemsize, static_shape
from ..core.words import counted
from ._plans import inputs_at, listed

_TAKEN = (types.fp16, types.int8, types.uint8)


class LastAxisWaste(PlanRule):
    """Rows are padded to 64 bytes, and a short last axis makes the padding larger than the data.

    why     The last axis of the ANE's buffers lies in rows of multiples of 64 bytes. A last axis of one costs 32 times
            its bytes in fp16, 64 times in int8, and as much more to move. Apple says so of a model's inputs and
            outputs; values between may be held on the chip, where smaller rows may do. The bytes are computed by that
            layout, not measured.
    when    An fp16 or 8-bit input, or a value made or read by an op that the ANE takes, whose rows take at least
            `times` its bytes and lose at least `lost` bytes. One finding for each function, the largest loss first.
    cure    Move a longer axis to the last place: for (1, C, S, 1) that is (1, C, 1, S), Apple's own layout for
            transformers. At a border, hand the input over in that layout.
    """

    code, slug = "ANE513", "last-axis-waste"
    level = "note"
    advice = "Lay such tensors out with a longer axis last, for instance (1, C, 1, S) in place of (1, C, S, 1)."
    evidence = (
        for_authors("the last axis of inputs and outputs is contiguous and aligned to 64 bytes; a singleton last axis "
                    "costs 32 times the memory in fp16, 64 times in int8; values between may tolerate smaller widths"),
        Vendor("a singleton last axis is padded to 64 bytes: 32 times the memory in 16 bit",
               source="https://machinelearning.apple.com/research/neural-engine-transformers", date="2022-06"),
        Community("row and plane strides are multiples of 64 bytes, whole buffers of 16 KiB (a driver for Linux)",
                  source="eiln/ane libane/ane.c", chip="M1"),
    )
    times: float = 4.0
    "How many times its bytes the rows must take; the number is ours."
    lost: int = 65536
    "Bytes of padding below which a tensor is not mentioned; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in by_function(plan):
            values = _values(list(plan.program.functions[name].inputs.values()), rows)
            sizes = {var: size for var in values if (size := _bytes(var)) is not None}
            wasted = [var for var, (dense, padded) in sizes.items()
                      if padded >= self.times * dense and padded - dense >= self.lost]
            if wasted:
                wasted.sort(key=lambda var: sizes[var][1] - sizes[var][0], reverse=True)
                yield Hit(values[wasted[0]], covers=list(dict.fromkeys(values[var] for var in wasted)),
                          note=_note(wasted, sizes))

    def examples(self) -> Iterable[Example]:
        yield Example("a last axis of one", lambda: program(lambda x: Builder.tanh(x=x, name="y"), x=(1, 768, 600, 1)))
        yield Example("a last axis of seven", lambda: program(lambda x: Builder.tanh(x=x, name="y"), x=(8, 512, 7, 7)))
        yield Example("its own layout", lambda: program(lambda x: Builder.tanh(x=x, name="y"), x=(1, 768, 1, 600)),
                      reason="")
        yield Example("a small one", lambda: program(lambda x: Builder.tanh(x=x, name="y"), x=(1, 768, 1, 1)),
                      reason="")


def _values(inputs: list[Var], rows: list[Row]) -> dict[Var, Operation]:
    """Inputs and what ops make that the ANE takes or that feed one, each with the op it is reported at."""
    makers = {var: row for row in rows for var in row.op.outputs}
    found = inputs_at(inputs, rows)
    for var, row in makers.items():
        if row.takes or any(reader.takes for reader in _readers(var, makers)):
            found[var] = row.op
    return found


def _readers(var: Var, makers: dict[Var, Row]) -> list[Row]:
    return [makers[op.outputs[0]] for op in var.child_ops if op.outputs and op.outputs[0] in makers]


def _bytes(var: Var) -> tuple[int, int] | None:
    """Bytes without padding and with padded rows; None where they cannot be told or where the ANE has none."""
    shape = static_shape(var) if types.is_tensor(var.sym_type) and var.dtype in _TAKEN else None
    return None if not shape else (prod(shape) * itemsize(var), padded_bytes(shape, itemsize(var)))


def _note(wasted: list[Var], sizes: dict[Var, tuple[int, int]]) -> str:
    each = [f"%{var.name} ({', '.join(map(str, var.shape))}) {size_text(sizes[var][0])} in {size_text(sizes[var][1])}, "
            f"{sizes[var][1] / sizes[var][0]:.3g}x" for var in wasted]
    dense, padded = (sum(size[at] for size in sizes.values()) for at in (0, 1))
    return (f"{counted(len(wasted), 'tensor')} with short rows: {listed(each)}; all tensors of the function need "
            f"{size_text(dense)} and take {size_text(padded)}")
