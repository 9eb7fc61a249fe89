"""Find tensors whose last axis is too short for a row of the ANE's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_itemsize, get_static_shape
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Vendor
from ..passes.evidence import cite_apple_authoring_rules
from ..passes.examples import make_example
from ..passes.layout import compute_padded_bytes, format_bytes
from ..passes.plan import Plan, Row
from ..utils.text_format import format_count
from ._plan_rules import format_list, map_inputs_to_ops

_SUPPORTED_TYPES = (types.fp16, types.int8, types.uint8)


class LastAxisWaste(PlanRule):
    """Rows are padded to 64 bytes, and a short last axis makes the padding larger than the data.

    why     The last axis of the ANE's buffers lies in rows of multiples of 64 bytes. A last axis of one costs 32 times
            its bytes in fp16, 64 times in int8, and as much more to move. Apple says so of a model's inputs and
            outputs; values between may be held on the chip, where smaller rows may do. The bytes are computed by that
            layout, not measured.
    when    An fp16 or 8-bit input, or a value made or read by an op supported on the ANE, whose rows take at least
            `times` its bytes and lose at least `lost` bytes. One finding for each function, the largest loss first.
    fix     Move a longer axis to the last place: for (1, C, S, 1) that is (1, C, 1, S), Apple's own layout for
            transformers. At a border, hand the input over in that layout.
    """

    code, slug = "ANE513", "last-axis-waste"
    level = "note"
    advice = "Lay such tensors out with a longer axis last, for instance (1, C, 1, S) in place of (1, C, S, 1)."
    evidence = (
        cite_apple_authoring_rules(
            "the last axis of inputs and outputs is contiguous and aligned to 64 bytes; a singleton last axis "
            "costs 32 times the memory in fp16, 64 times in int8; values between may tolerate smaller widths"
        ),
        Vendor(
            "a singleton last axis is padded to 64 bytes: 32 times the memory in 16 bit",
            source="https://machinelearning.apple.com/research/neural-engine-transformers",
            date="2022-06",
        ),
        Community(
            "row and plane strides are multiples of 64 bytes, whole buffers of 16 KiB (a driver for Linux)",
            source="eiln/ane libane/ane.c",
            chip="M1",
        ),
    )
    times: float = 4.0
    "Smallest reported ratio of the bytes of rows to those of the data; the number is ours."
    lost: int = 65536
    "Bytes of padding below which a tensor is not reported; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            values = _find_ane_values(list(plan.program.functions[name].inputs.values()), rows)
            sizes = {var: size for var in values if (size := _count_dense_and_padded_bytes(var)) is not None}
            wasted = [var for var, (dense, padded) in sizes.items()
                      if padded >= self.times * dense and padded - dense >= self.lost]
            if wasted:
                wasted.sort(key=lambda var: sizes[var][1] - sizes[var][0], reverse=True)
                yield Hit(values[wasted[0]], covers=list(dict.fromkeys(values[var] for var in wasted)),
                          note=_format_note(wasted, sizes))

    def examples(self) -> Iterable[Example]:
        yield make_example("a last axis of one", lambda x: Builder.tanh(x=x, name="y"), x=(1, 768, 600, 1))
        yield make_example("a last axis of seven", lambda x: Builder.tanh(x=x, name="y"), x=(8, 512, 7, 7))
        yield make_example("its own layout", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(1, 768, 1, 600))
        yield make_example("a small one", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(1, 768, 1, 1))


def _find_ane_values(inputs: list[Var], rows: list[Row]) -> dict[Var, Operation]:
    """Return inputs, and results of ops supported on the ANE or read by one, each with the op it is reported at."""
    makers = {var: row for row in rows for var in row.op.outputs}
    found = map_inputs_to_ops(inputs, rows)
    for var, row in makers.items():
        if row.takes or any(reader.takes for reader in _find_reader_rows(var, makers)):
            found[var] = row.op
    return found


def _find_reader_rows(var: Var, makers: dict[Var, Row]) -> list[Row]:
    return [makers[op.outputs[0]] for op in var.child_ops if op.outputs and op.outputs[0] in makers]


def _count_dense_and_padded_bytes(var: Var) -> tuple[int, int] | None:
    """Return the bytes without padding and with padded rows.

    Return None for a dynamic shape or a dtype that is unsupported on the ANE.
    """
    shape = get_static_shape(var) if types.is_tensor(var.sym_type) and var.dtype in _SUPPORTED_TYPES else None
    return None if not shape else (prod(shape) * get_itemsize(var), compute_padded_bytes(shape, get_itemsize(var)))


def _format_note(wasted: list[Var], sizes: dict[Var, tuple[int, int]]) -> str:
    each = [
        f"%{var.name} ({', '.join(map(str, var.shape))}) {format_bytes(sizes[var][0])} in "
        f"{format_bytes(sizes[var][1])}, "
        f"{sizes[var][1] / sizes[var][0]:.3g}x"
        for var in wasted
    ]
    dense, padded = (sum(size[at] for size in sizes.values()) for at in (0, 1))
    return (
        f"{format_count(len(wasted), 'tensor')} with short rows: {format_list(each)}; all tensors of the function need "
        f"{format_bytes(dense)} and take {format_bytes(padded)}"
    )
