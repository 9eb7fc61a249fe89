"""Move row slices before the ops that compute row by row."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.large_values import group_by_shared_values
from ...ir.query import get_consumers, get_flat_inputs, is_const, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss, Severity
from ...passes.evidence import cite_m1_gpt_notes
from ...passes.examples import make_example, make_weight
from ...utils.text_format import format_count
from ._row_slices import (
    EXACT_OPS,
    MOVEMENT_OPS,
    SLICE_OPS,
    InputKey,
    Rows,
    RowSlice,
    build_on_rows,
    find_rows_of_inputs,
    get_input,
    iterate_inputs,
    parse_row_slice,
    slice_const,
    slice_rows,
)

_OTHER_SLICES = tuple(f"other rows are read by {kind}" for kind in SLICE_OPS)
_PRODUCT_OPS = frozenset({"conv", "einsum", "linear", "matmul", "scaled_dot_product_attention"})


class HoistRowSlice(BlockRewrite):
    """Move row slices before ops that compute row by row, so that only the used rows are computed.

    why     Language models that return the logits of the last token often compute those of all tokens and slice them
            afterwards; classifiers use the first token of the last block. The final norm, the MLP of the last block and
            its queries need only these rows.
    when    slice_by_index, slice_by_size and gather with constant indices that keep some rows of one axis: the last
            token (also counted from the end for symbolic lengths), the first, some of a batch; a dropped axis is still
            dropped at the original position. The slice moves up through linear, matmul, 1x1 conv, attention (on the
            side of its queries), norms and softmax over other axes, elementwise ops, casts, residual adds (both sides),
            reshapes and transposes that keep the axis. An op is computed on these rows if all its users need only them;
            values with other users, or that depend on other rows, are sliced where they enter. Rows of constants
            (masks, tables of angles) are selected at compile time. Only if at most half of the rows are kept and
            computation is saved, and never with a slice of the last axis.
    exact   bitwise if only IEEE arithmetic and data movement are affected (`add`, `mul`, `square`, `select`, ...).
            rounding for sums and functions: the sums are the same, but their order may depend on the number of rows. In
            the reference runtime most float32 results of a linear differ in their last bits, and at fp16 about one in a
            few hundred by one unit in the last place.
    cost    a slice for each value that enters the moved ops, instead of one for each result.

    before
        %0: fp16[1, 6, 4] = linear(x=%x, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %y: fp16[1, 1, 4] = slice_by_index(x=%0, begin=[0, 5, 0], end=[1, 6, 4])
    after
        %0: fp16[1, 1, 4] = slice_by_index(x=%x, begin=[0, 5, 0], end=[1, 6, 4])
        %y: fp16[1, 1, 4] = linear(x=%0, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
    """

    code, slug = "ANE541", "rows-computed-and-dropped"
    stage = "structure"
    after = ("fold_constants", "plain_indices")
    repeats = True
    roots = SLICE_OPS
    exactness = Exactness.ROUNDING
    bound = "the same sums over the same numbers; their order may depend on the number of rows"
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "medium"
    evidence = (
        cite_m1_gpt_notes(
            "selecting the next token before the output projection: 663 to 450 ms per token (gpt2-xl), where it also "
            "moved the projection back to the ANE, and 95 to 52 ms (gpt2-medium)"
        ),
        cite_m1_gpt_notes(
            "contradicts it: returning one token's predictions \"seems to impact the speed dramatically\", but not "
            "with "
            "a model in the layout for the ANE"
        ),
    )

    most_share: float = 0.5
    "Maximum share of the rows that a slice may keep; not checked for symbolic lengths."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        claimed: set[Operation] = set()
        slices, misses = self._collect_slices(block)
        yield from misses
        order = {op: number for number, op in enumerate(block.operations)} if slices else {}
        for rows, found in slices.items():
            region = _Region(rows, order, claimed, [each for each in found if each.op not in claimed])
            region.grow()
            for part in region.split():
                obstacle = part.find_obstacle()
                if obstacle:
                    yield Miss(next(iter(part.roots)), obstacle)
                    continue
                claimed.update(part.steps)
                exact = all(op.op_type in EXACT_OPS for op in part.axes)
                yield Hit(
                    next(iter(part.roots)), part=part, exactness=Exactness.BITWISE if exact else None,
                    covers=tuple(part.roots),
                    note=f"{rows.kept} of {rows.extent} rows are used of the results of "
                         f"{format_count(len(part.axes), 'op')}")
            for root, reason in region.stopped:  # other slices may read the rest, as for a joint projection
                near = root.op.x.op.op_type in _PRODUCT_OPS and not reason.startswith(_OTHER_SLICES)
                yield Miss(root.op, reason, near=near)

    def _collect_slices(self, block: Block) -> tuple[dict[Rows, list[RowSlice]], list[Miss]]:
        """Collect the slices of `block` by the rows they keep, and the near misses."""
        slices: dict[Rows, list[RowSlice]] = {}
        misses: list[Miss] = []
        for op in block.operations:
            if op.op_type not in SLICE_OPS or is_opaque(op):
                continue
            if op.x.op is None or op.x.op.op_type == "const" or op.x.op.enclosing_block is not block:
                continue
            found = parse_row_slice(op)
            if isinstance(found, str):
                misses.extend([Miss(op, found, near=False)] if found else [])
                continue
            share = found.rows.share
            if share is not None and share > self.most_share:
                misses.append(Miss(op, f"keeps {found.rows.kept} of {found.rows.extent} rows, more than "
                                       f"{self.most_share:g} of them (most_share)", near=False))
                continue
            slices.setdefault(found.rows, []).append(found)
        return slices, misses

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        part: _Part = hit.part
        built: dict[Var, Var] = {}
        sliced: dict[tuple[Var, int], Var] = {}
        replaced: dict[Var, Var] = {}

        def take_rows(var: Var, axis: int) -> Var:
            if var in built:
                return built[var]
            if (var, axis) not in sliced:
                make = slice_const if is_const(var) else slice_rows
                sliced[var, axis] = make(mb, replaced.get(var, var), axis, part.rows)
            return sliced[var, axis]

        for op in part.steps:
            with mb.at(op):
                if op not in part.axes:
                    replaced[op.outputs[0]] = _build_root(mb, part.roots[op], built, replaced)
                    continue
                axis, inputs = part.axes[op]
                changed = {key: replaced[var] for key, var in iterate_inputs(op) if var in replaced}
                changed.update((key, take_rows(get_input(op, key), at)) for key, at in inputs.items())
                made = build_on_rows(mb, op, changed, inputs, axis, part.rows)
            built.update(zip(op.outputs, made, strict=True))
        return replaced

    def examples(self) -> Iterable[Example]:
        last = _take_last_row
        yield make_example("the last row", lambda x: Builder.slice_by_index(
            x=_build_linear(x), begin=[0, 5, 0], end=[1, 6, 4], name="y"), x=(1, 6, 4))
        yield make_example("last token", lambda x: last(Builder.relu(x=_build_linear(x))), x=(1, 6, 4))
        yield make_example("last token of a dynamic number", lambda x: last(_build_linear(x)), x=(1, None, 4))
        yield make_example("first token by gather", lambda x: Builder.gather(
            x=_build_linear(Builder.tanh(x=x)), indices=np.int32(0), axis=1, name="y"), x=(1, 6, 4))
        yield make_example("two rows by gather", lambda x: Builder.gather(
            x=_build_linear(x), indices=[4, 1], axis=1, name="y"), x=(1, 6, 4))
        yield make_example("rows by size", lambda x: Builder.slice_by_size(
            x=Builder.add(x=_build_linear(x), y=x), begin=[0, 2, 0], size=[-1, 2, -1], name="y"), x=(2, 6, 4))
        yield make_example("every third of a batch", lambda x: Builder.slice_by_index(
            x=_build_linear(x), begin=[0, 0], end=[6, 4], stride=[3, 1], name="y"), x=(6, 4))
        yield make_example("arithmetic", lambda x, z: last(Builder.real_div(
            x=Builder.sub(x=x, y=z), y=Builder.mul(x=make_weight(6, 4), y=x))), x=(1, 6, 4), z=(1, 1, 4),
            options={"most_share": 0.25})
        yield make_example("residual and norm", _build_block, x=(1, 6, 4))
        yield make_example("queries of an attention", _build_attention, x=(1, 6, 8))
        yield make_example("1x1 conv", lambda x: Builder.slice_by_index(
            x=Builder.conv(x=x, weight=make_weight(3, 4, 1, 1)), begin=[0, 0, 0, -1], end=[0, 0, 0, 0],
            begin_mask=[True, True, True, False], end_mask=[True] * 4, name="y"), x=(1, 4, 1, 6))
        yield make_example("two slices alike", lambda x: _take_two(_build_linear(x)), x=(1, 6, 4))
        yield make_example("dropped with the batch", lambda x: Builder.slice_by_index(
            x=_build_linear(x), begin=[0, 2, 0], end=[1, 3, 4], squeeze_mask=[True, True, False], name="y"),
            x=(1, 6, 4))
        yield make_example("all rows are an output", _build_returned_rows, x=(1, 6, 4), reason="all rows are an output")
        yield make_example("other rows are read", lambda x: _take_two(_build_linear(x), 3), x=(1, 6, 4),
                           reason="other rows are read by slice_by_index 'z'")
        yield make_example("summed along the rows", lambda x: last(Builder.softmax(x=x, axis=1)), x=(1, 6, 4),
                           reason="softmax runs along the rows")
        yield make_example("most rows are kept", lambda x: Builder.slice_by_index(
            x=_build_linear(x), begin=[0, 1, 0], end=[1, 6, 4], name="y"), x=(1, 6, 4),
            reason="keeps 5 of 6 rows, more than 0.5 of them (most_share)")
        yield make_example("columns of a linear", lambda x: Builder.slice_by_index(
            x=_build_linear(x), begin=[0, 0, 0], end=[1, 6, 2], name="y"), x=(1, 6, 4),
            reason="linear mixes the last axis")
        yield make_example("moved only", lambda x: last(Builder.transpose(x=x, perm=[1, 0, 2])), x=(6, 1, 4),
                           reason="only movement would be saved")
        yield make_example("from one sum two slices", lambda x, z: last(Builder.add(x=x, y=z)), x=(1, 6, 4),
                           z=(1, 6, 4), reason="2 slices instead of 1, and no matmul is saved")
        yield make_example("to the last axis", lambda x: last(Builder.transpose(
            x=Builder.conv(x=x, weight=make_weight(4, 4, 1)), perm=[0, 2, 1])), x=(1, 4, 6),
            reason="the rows would be sliced on the last axis")
        yield make_example("conv over the rows", lambda x: Builder.slice_by_index(
            x=Builder.conv(x=x, weight=make_weight(4, 4, 3), pad_type="same"), begin=[0, 0, 0], end=[1, 4, 1],
            name="y"), x=(1, 4, 6), reason="conv mixes the rows")
        yield make_example("broadcast of unknown lengths", lambda x, z: last(Builder.mul(x=x, y=z)), x=(1, None, 4),
                           z=(1, None, 4), reason="mul broadcasts over lengths that may differ")


def _build_linear(x: Var, width: int = 4) -> Var:
    built: Var = Builder.linear(x=x, weight=make_weight(width, int(x.shape[-1])), bias=make_weight(width))
    return built


def _take_last_row(x: Var) -> Var:
    row: Var = Builder.slice_by_index(x=x, begin=[0, -1, 0], end=[0, 0, 0], begin_mask=[True, False, True],
                                      end_mask=[True] * 3, squeeze_mask=[False, True, False], name="y")
    return row


def _take_two(x: Var, row: int = 5) -> list[Var]:
    return [_take_last_row(x), Builder.slice_by_index(x=x, begin=[0, row, 0], end=[1, row + 1, 4], name="z")]


def _build_returned_rows(x: Var) -> list[Var]:
    rows = Builder.linear(x=x, weight=make_weight(4, 4), bias=make_weight(4), name="rows")
    return [rows, _take_last_row(rows)]


def _build_block(x: Var) -> Var:
    """Build a layer norm, two linears with an activation and a residual add."""
    inner = Builder.gelu(x=_build_linear(Builder.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-3)), 6))
    return _take_last_row(Builder.add(x=x, y=_build_linear(inner)))


def _build_attention(x: Var) -> Var:
    """Build an attention of two heads with a constant mask, and the projection after it."""
    def split_heads(value: Var) -> Var:
        heads: Var = Builder.transpose(x=Builder.reshape(x=value, shape=[1, 6, 2, 4]), perm=[0, 2, 1, 3])
        return heads

    query, key, value = (split_heads(_build_linear(x, 8)) for _ in range(3))
    scores = Builder.add(x=Builder.matmul(x=query, y=key, transpose_y=True), y=make_weight(1, 1, 6, 6))
    mixed = Builder.matmul(x=Builder.softmax(x=scores, axis=-1), y=value)
    joined = Builder.reshape(x=Builder.transpose(x=mixed, perm=[0, 2, 1, 3]), shape=[1, 6, -1])
    return _take_last_row(_build_linear(joined, 8))


def _build_root(mb: RewriteBuilder, root: RowSlice, built: dict[Var, Var], replaced: dict[Var, Var]) -> Var:
    """Build what replaces a slice: the rows, less the axes that it drops."""
    rows = built[root.op.x]
    if root.dropped:
        rows = mb.squeeze(x=rows, axes=list(root.dropped))
    elif rows in replaced.values():  # each replaced value takes over its own name
        rows = mb.identity(x=rows)
    return rows


@dataclass
class _Part:
    """Connected ops of which only `rows` are read; `axes` has the axis of their outputs and those of their inputs.

    `roots` are the slices below them, `steps` all these ops in block order, for one slice may be read by the ops above
    another. `entries` counts the values to be sliced.
    """

    rows: Rows
    axes: dict[Operation, tuple[int, dict[InputKey, int]]]
    roots: dict[Operation, RowSlice]
    entries: int
    steps: list[Operation]

    def find_obstacle(self) -> str:
        """Return why moving the slices up saves nothing, or ""."""
        kinds = {op.op_type for op in self.axes}
        if kinds <= MOVEMENT_OPS:
            return "only movement would be saved"
        if self.entries > len(self.roots) and not kinds & _PRODUCT_OPS:
            return (f"{format_count(self.entries, 'slice')} instead of {len(self.roots)}, and no matmul is saved")
        return ""


@dataclass
class _Region:
    """The ops of a block of which only `rows` are read, found upwards from the slices `roots`."""

    rows: Rows
    order: dict[Operation, int]
    claimed: set[Operation]
    roots: list[RowSlice]
    stopped: list[tuple[RowSlice, str]] = field(default_factory=list)

    def grow(self) -> None:
        """Find the ops, each after all that read it."""
        self.members: dict[Operation, tuple[int, dict[InputKey, int]]] = {}
        self._axis_of: dict[Var, int] = {}
        self._whole: set[Var] = set()
        self._slice_of = {root.op: root for root in self.roots}
        self._roots_below: dict[Operation, list[RowSlice]] = {}
        for root in self.roots:
            self._roots_below.setdefault(root.op.x.op, []).append(root)
        self._pending: list[tuple[int, int, Operation]] = []
        for root in self.roots:
            self._require_rows(root.op.x, root.axis)
        visited: set[Operation] = set()
        while self._pending:
            op = heapq.heappop(self._pending)[-1]
            reason = "" if op in visited else self._visit_op(op)
            visited.add(op)
            if reason:
                self.stopped.extend((root, reason) for root in self._roots_below.get(op, ()))

    def _require_rows(self, var: Var, axis: int) -> None:
        if var in self._axis_of:
            if self._axis_of[var] != axis:
                self._whole.add(var)
            return
        self._axis_of[var] = axis
        if var.op in self.order and var.op.op_type != "const":
            heapq.heappush(self._pending, (-self.order[var.op], len(self._axis_of), var.op))

    def _visit_op(self, op: Operation) -> str:
        """Add `op` to the members, or return why it must not be one."""
        if op in self.claimed:
            return "another slice moves up to the same op"
        axes = {self._axis_of.get(var) for var in op.outputs if get_consumers(var) or var.consuming_blocks}
        axis = next(iter(axes)) if len(axes) == 1 else None
        if axis is None:
            return f"{op.op_type} has users that need all rows"
        for var in op.outputs:
            reason = self._find_other_use(var, axis)
            if reason:
                return reason
        inputs = find_rows_of_inputs(op, axis, self.rows)
        if isinstance(inputs, str):
            return inputs
        by_rows = Counter(get_input(op, key) for key in inputs)
        self._whole.update(var for var, count in Counter(get_flat_inputs(op)).items() if count != by_rows[var])
        self.members[op] = axis, inputs
        for key, at in inputs.items():
            self._require_rows(get_input(op, key), at)
        return ""

    def _find_other_use(self, var: Var, axis: int) -> str:
        if var.consuming_blocks:
            return "all rows are an output"
        if var in self._whole:
            return "all rows are read by another op"
        for reader in get_consumers(var):
            root = self._slice_of.get(reader)
            if reader not in self.members and not (root is not None and root.axis == axis and reader.x is var):
                return f"other rows are read by {reader.op_type} '{reader.outputs[0].name}'" if reader.outputs else (
                    f"other rows are read by {reader.op_type}")
        return ""

    def split(self) -> Iterator[_Part]:
        """Yield the connected parts of the region."""
        ops = sorted(self.members, key=self.order.__getitem__)
        values = {op: [*(get_input(op, key) for key in self.members[op][1] if not is_const(get_input(op, key))),
                       *op.outputs] for op in ops}
        for group in group_by_shared_values(values):
            inside = set(group)
            entries = {get_input(op, key) for op in group for key in self.members[op][1]}
            roots = {root.op: root for op in sorted(group, key=self.order.__getitem__)
                     for root in self._roots_below.get(op, ())}
            yield _Part(
                self.rows, {op: self.members[op] for op in group}, roots,
                sum(not is_const(var) and var.op not in inside for var in entries),
                sorted([*group, *roots], key=self.order.__getitem__))
