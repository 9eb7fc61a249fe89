"""Tensors that are padded by the ANE's memory layout, or too small or too large for the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types

from ..ane.limits import find_limit
from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_const_value, get_consumers, get_itemsize, get_static_shape, get_type_info, is_opaque
from ..passes.contract import BlockRule, Community, Example, Hit, Miss, PlanRule, Severity, Vendor
from ..passes.evidence import cite_apple_authoring_rules, cite_m4_study, cite_surgery_tip
from ..passes.examples import build_program, make_example
from ..passes.layout import compute_padded_bytes, format_bytes
from ..passes.plan import Plan, Row
from ..utils.text_format import format_count
from ._plan_rules import COST_MODEL, format_list, format_op_types, map_inputs_to_ops

_SUPPORTED_TYPES = (types.fp16, types.int8, types.uint8)
_MIN_FAILING_PLANE = 5568 * 5568
"Height times width of the only input that was reported to fail."


class LastAxisWaste(PlanRule):
    """A short last axis is padded to rows of 64 bytes, and the padding is larger than the data.

    why     Rows of ANE buffers (the last axis) are padded to multiples of 64 bytes. A last axis of 1 takes 32 times its
            bytes in fp16 and 64 times in int8, and the same factor of bandwidth. Apple documents this for inputs and
            outputs of a model; internal values may be kept on the chip, possibly with smaller rows. The bytes are
            computed, not measured.
    when    An fp16 or 8-bit input, or an operand or result of an op supported on the ANE, whose padded rows take at
            least `times` its bytes, with at least `lost` bytes of padding. One finding per function, the largest
            padding first.
    fix     Move a longer axis to the last position: (1, C, 1, S) instead of (1, C, S, 1), Apple's own layout for
            transformers. For model inputs, pass the data in that layout.
    """

    code, slug = "ANE513", "last-axis-waste"
    severity = Severity.SUGGESTION
    advice = "Use a layout with a longer last axis, for instance (1, C, 1, S) instead of (1, C, S, 1)."
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
    "Minimum ratio of padded bytes to data bytes to report; our choice, no source states one."
    lost: int = 65536
    "Minimum bytes of padding to report; our choice, no source states one."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            values = _find_ane_values(list(plan.program.functions[name].inputs.values()), rows)
            sizes = {var: size for var in values if (size := _count_dense_and_padded_bytes(var)) is not None}
            wasted = [var for var, (dense, padded) in sizes.items()
                      if padded >= self.times * dense and padded - dense >= self.lost]
            if wasted:
                wasted.sort(key=lambda var: sizes[var][1] - sizes[var][0], reverse=True)
                yield Hit(values[wasted[0]], covers=list(dict.fromkeys(values[var] for var in wasted)),
                          note=_format_waste_note(wasted, sizes))

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


def _format_waste_note(wasted: list[Var], sizes: dict[Var, tuple[int, int]]) -> str:
    each = [
        f"%{var.name} ({', '.join(map(str, var.shape))}) {format_bytes(sizes[var][0])} in "
        f"{format_bytes(sizes[var][1])}, "
        f"{sizes[var][1] / sizes[var][0]:.3g}x"
        for var in wasted
    ]
    dense, padded = (sum(size[at] for size in sizes.values()) for at in (0, 1))
    return (
        f"{format_count(len(wasted), 'tensor')} with short rows: {format_list(each)}; all tensors of the function "
        f"have {format_bytes(dense)} of data and take {format_bytes(padded)} padded"
    )


class MovedRows(BlockRule):
    """Reshapes and transposes that change the last axis copy the entire tensor.

    why     Apple's rules for the Neural Engine: ops that change the last axis rewrite the entire tensor, because rows
            are contiguous; others may be free. The layout of Apple's transformers needs hardly any. The bytes are
            computed from shapes; no timings are published.
    when    reshape and transpose that change the last axis or its length, and together move at least `least` bytes. One
            finding per block.
    fix     Keep one layout, (B, C, 1, S), from input to output; move the remaining layout ops to the inputs and
            outputs; let pairs cancel (coremltools' reduce_transposes, ane::cancel_lift_pairs for squeeze and
            expand_dims).
    """

    code, slug = "ANE520", "rewritten-rows"
    severity, confidence = Severity.SUGGESTION, "high"
    advice = "Keep one layout, (B, C, 1, S), so that reshapes and transposes of the last axis cancel."
    evidence = (
        cite_apple_authoring_rules(
            "a reshape or transpose that touches the last axis rewrites the data: keep them few"
        ),
        Vendor(
            "reshapes and transposes are likely to cause copies: choose an einsum that needs none",
            date="2022-06",
            source="https://machinelearning.apple.com/research/neural-engine-transformers",
        ),
    )
    least: int = 8 << 20
    "Minimum bytes that such ops of a block move together to report; our choice, no source states one."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        sizes = {op: size for op in block.operations
                 if op.op_type in ("reshape", "transpose") and not is_opaque(op) and (size := _count_moved_bytes(op))}
        if sizes and sum(sizes.values()) >= self.least:
            found = sorted(sizes, key=lambda op: -sizes[op])
            yield Hit(found[0], covers=found,
                      note=f"{format_count(len(found), 'op')} ({format_op_types(found)}) change the last axis and move "
                           f"{format_bytes(sum(sizes.values()))}, the largest {format_bytes(sizes[found[0]])}")

    def examples(self) -> Iterable[Example]:
        yield Example("channels last", lambda: _build_transpose((0, 2, 3, 1), 512))
        yield Example("other axes", lambda: _build_transpose((0, 2, 1, 3), 512), reason="")
        yield Example("small", lambda: _build_transpose((0, 2, 3, 1), 8), reason="")


def _count_moved_bytes(op: Operation) -> int:
    """Count the bytes of the output if the last axis changes; 0 otherwise, and for unknown shapes."""
    before, after = get_type_info(op.x).shape, get_type_info(op.outputs[0]).shape
    if not before or not after:
        return 0
    if op.op_type == "reshape":
        stays = before[-1] == after[-1]
    else:
        perm = get_const_value(op.perm)
        stays = perm is None or perm[-1] % len(before) == len(before) - 1
    return 0 if stays else prod(after) * get_itemsize(op.outputs[0])


def _build_transpose(perm: tuple[int, ...], side: int) -> Program:
    def build_body(x: Var) -> Var:
        result: Var = Builder.transpose(x=x, perm=list(perm), name="y")
        return result

    return build_program(build_body, x=(1, 64, side, side))


class TinyTensors(PlanRule):
    """All tensors have fewer than 64 elements, so the entire model runs on the CPU.

    why     If inputs and outputs are too small, Core ML uses the CPU. One source recommends at least 64 elements. This
            lower bound was not measured: by the published cost model a segment must save 0.25 ms, which needs millions
            of elements in a few ops.
    when    A function whose inputs, outputs and internal values all have fewer than `least` elements. A small input (a
            time step, a scale) next to large ones is not reported. Dynamic dimensions count as large.
    fix     None is needed: the CPU is faster. To use the ANE, batch many such inputs.
    """

    code, slug = "ANE505", "tiny-tensors"
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Batch many inputs, or leave the model on the CPU, which is faster."
    evidence = (
        cite_surgery_tip(
            "if inputs and outputs are too small to be efficient, the work is delegated to the CPU; go for a "
            "total flattened size of 64 at least"
        ),
        COST_MODEL,
    )
    least: int = 64
    "Minimum number of elements of the largest tensor; the number of the source."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            inputs = plan.program.functions[name].inputs.values()
            sizes = []
            for size in map(_count_elements, (*inputs, *(var for row in rows for var in row.op.outputs))):
                if size is None or size >= self.least:
                    break
                sizes.append(size)
            else:
                yield Hit(rows[0].op, covers=[row.op for row in rows],
                          note=f"the largest of {format_count(len(sizes), 'tensor')} has "
                               f"{format_count(max(sizes, default=0), 'element')}, fewer than {self.least}")

    def examples(self) -> Iterable[Example]:
        yield make_example("a vector", lambda x: Builder.relu(x=x, name="y"), x=(1, 63))
        yield make_example("enough", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, 64))
        yield make_example(
            "grows inside",
            lambda x: Builder.reduce_sum(x=Builder.tile(x=x, reps=[64, 1]), name="y"),
            reason="",
            x=(1, 2),
        )
        yield make_example("open", lambda x: Builder.relu(x=x, name="y"), reason="", x=(1, None))


def _count_elements(var: Var) -> int | None:
    """Return the number of elements; None where it is unbounded or unknown."""
    if not types.is_tensor(var.sym_type):
        return 1 if types.is_scalar(var.sym_type) or types.is_str(var.sym_type) else None
    shape = get_static_shape(var)
    return None if shape is None else prod(shape)


class LargeInput(BlockRule):
    """An input is at least as large as one with which a model failed to compile for the ANE.

    why     One report: a model with a 1x3x5568x5568 input fails to load on an iPhone because the ANE's compiler fails.
            The cause (the input size, the ops, or memory) is unknown. After such a failure the entire model may run on
            the CPU, or the process may end at the first prediction.
    when    An input of rank 4 with a height times width of at least 5568 * 5568.
    fix     Split the image into tiles that overlap by the receptive field, and run the model on each.
    """

    code, slug = "ANE523", "large-input"
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Run the model on overlapping tiles of the image."
    evidence = (
        Community("with an input of 1x3x5568x5568 ANECCompile fails when the model is loaded",
                  source="https://github.com/apple/coremltools/issues/2247", date="2024-06-19"),
        Community("after a failure of ANECCompile that loading does not report, the first prediction with CPU_AND_NE "
                  "ends the process", source="https://github.com/apple/coremltools/issues/2758", date="2026-07-14"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        first = next((op for op in block.operations if op.op_type != "const"), None)
        for name, var in block.inputs.items():
            shape = () if types.is_state(var.sym_type) else get_type_info(var).shape or ()
            if first is not None and len(shape) == 4 and prod(shape[2:]) >= _MIN_FAILING_PLANE:
                yield Hit(next(iter(get_consumers(var)), first), note=f"input '{name}' is {'x'.join(map(str, shape))}; "
                                                                  "1x3x5568x5568 failed to compile")

    def examples(self) -> Iterable[Example]:
        yield Example("as reported", lambda: _build_max_pool(5568))
        yield Example("smaller", lambda: _build_max_pool(5567), reason="")


def _build_max_pool(side: int) -> Program:
    return build_program(
        lambda x: Builder.max_pool(x=x, kernel_sizes=[8, 8], strides=[8, 8], pad_type="valid", name="y"),
        x=(1, 3, side, side),
    )


class Lopsided(PlanRule):
    """A large tensor has nearly all its elements along one axis.

    why     One source advises to chunk or parallelise tensors of "some inexcusable shape like (50000,)", without a
            limit or measurement. In contrast, an M4 accepted a vector of 65536, so such shapes are supported there.
    when    An fp16 or 8-bit value with more than `longest` elements along one axis and at most `others` in all other
            axes together. One finding per function, the longest first. Axes above the dimension limit (16384 up to M3,
            65536 from M4 on) are unsupported, and reported by the rule on that limit.
    fix     Reshape elementwise work from [n] to [k, n / k]; split a long signal into chunks along the batch, with an
            overlap of the receptive field.
    """

    code, slug = "ANE506", "lopsided"
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Reshape long vectors to two axes, or split them into chunks along the batch."
    evidence = (
        cite_surgery_tip("tensors lopsided to a shape like (50000,): chunk or parallelise"),
        cite_m4_study("contradicts it: a relu of (65536,) is accepted", rows=True),
        Community("a width of 16384 passes, 17920 fails", chip="M3 Ultra", os="macOS 26.3.1", date="2026-03-20",
                  source="https://github.com/ncdrone/rustane/issues/13"),
    )
    longest: int = 8192
    "Maximum elements along the long axis without a report: half of the limit of M1 to M3; our choice."
    others: int = 1
    "Maximum elements in all other axes together; our choice, no source states one."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            made = {var: row.op for row in rows for var in row.op.outputs}
            read = map_inputs_to_ops(plan.program.functions[name].inputs.values(), rows)
            found = [var for var in (*read, *made) if self._is_lopsided(var)]
            if found:
                found.sort(key=lambda var: max(var.shape), reverse=True)
                at = [(made | read)[var] for var in found]
                yield Hit(at[0], covers=list(dict.fromkeys(at)), note=_format_lopsided_note(found))

    def _is_lopsided(self, var: Var) -> bool:
        if not types.is_tensor(var.sym_type) or var.dtype not in _SUPPORTED_TYPES:
            return False
        shape = get_static_shape(var)
        return bool(shape and self.longest < max(shape) <= self._max_extent and prod(shape) <= max(shape) * self.others)

    @property
    def _max_extent(self) -> int:
        """Return the largest extent of an axis that every requested generation supports."""
        strictest = find_limit("spatial", self.generations)
        return strictest.most if strictest else 0

    def examples(self) -> Iterable[Example]:
        yield make_example("a signal", lambda x: Builder.tanh(x=x, name="y"), x=(16000,))
        yield make_example("padded with ones", lambda x: Builder.tanh(x=x, name="y"), x=(1, 1, 10000, 1))
        yield make_example("short", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(8192,))
        yield make_example("folded", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(4, 4000))
        yield make_example("refused", lambda x: Builder.tanh(x=x, name="y"), reason="", x=(50000,))


def _format_lopsided_note(found: list[Var]) -> str:
    shown = [f"%{var.name} {tuple(int(extent) for extent in var.shape)}" for var in found]
    return f"{format_count(len(found), 'tensor')} along one axis: {format_list(shown)}"
