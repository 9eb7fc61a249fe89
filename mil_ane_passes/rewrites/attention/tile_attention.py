"""Compute attention in tiles of queries, each over the keys that a constant mask allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_itemsize,
    is_const,
    is_opaque,
    is_symbolic,
    iterate_nested_ops,
)
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_apple_authoring_rules
from ...passes.examples import make_example
from ...passes.layout import format_bytes
from .._weights import split_evenly

_BLOCKED = -1e4
"Mask value up to which a key counts as masked: its weight, exp(-1e4 + score), is zero at any precision."
_ALLOWED = -100.0
"""Mask value from which a key counts as visible. Each query needs a visible key: an entirely masked row is the mean of
all values."""
_KEY_STEP = 64
"Ranges of keys begin and end at multiples of this number, so that rows of scores stay aligned to 64 bytes or more."
Array = np.ndarray[Any, Any]


class TileAttention(Rewrite):
    """Compute attention in tiles of queries, without the keys that a constant mask hides from an entire tile.

    why     With a causal mask half of all scores are computed, scaled, masked and exponentiated to become zero. On an
            M2 Pro, 40 heads of 128 with 512 positions took 4.41 ms, and 3.99 ms in tiles of 256 queries, each over the
            keys up to its last query; 1.21 times faster at 1024 and 1.55 times at 2048. The full matrix of scores also
            exceeds the ANE's memory: an encoder of Whisper in channels-first layout with queries in thirds ran in half
            the time, measured across two runtimes (11.2 and 5.7 ms tiny, 236 and 118 ms medium).
    when    matmul, scale, mask, softmax, matmul in fp16 over `least` queries and more, with a constant mask that hides
            keys from entire tiles: at most `most_kept` of the scores are left. Computed masks may be added in addition.
            A mask value of -10000 or less hides a key; every query needs a visible key. scaled_dot_product_attention
            only if the function has several already, because several are reported to move the model to the CPU.
            Attention without such a mask only with `unmasked_tiles`, because no separate measurement exists.
    exact   rounding: hidden keys have weight zero, which is no longer added. A NaN or infinity of a hidden key no
            longer reaches the result. Valid for inputs up to 8: scores in the thousands would compete with the mask.
    cost    a concat of the results, and slices. Tiles of 128 were 1.4 % slower than no tiles at 512 positions (M2 Pro),
            so tiles have `rows` of 256. The mask is stored in pieces of half the total size.

    before
        %0: fp16[1, 2, 8, 8] = matmul(x=%q, y=%k, transpose_y=True)
        %1: fp16[1, 2, 8, 8] = add(x=%0, y=<fp16[8, 8]>)
        %2: fp16[1, 2, 8, 8] = softmax(x=%1)
        %y: fp16[1, 2, 8, 4] = matmul(x=%2, y=%v)
    after
        %0: fp16[1, 2, 4, 4] = slice_by_size(x=%q, begin=[0, 0, 0, 0], size=[-1, -1, 4, -1])
        %1: fp16[1, 2, 4, 4] = slice_by_size(x=%k, begin=[0, 0, 0, 0], size=[-1, -1, 4, -1])
        %2: fp16[1, 2, 4, 4] = matmul(x=%0, y=%1, transpose_y=True)
        %3: fp16[1, 2, 4, 4] = add(x=%2, y=<fp16[4, 4]>)
        %4: fp16[1, 2, 4, 4] = softmax(x=%3)
        %5: fp16[1, 2, 4, 4] = slice_by_size(x=%v, begin=[0, 0, 0, 0], size=[-1, -1, 4, -1])
        %6: fp16[1, 2, 4, 4] = matmul(x=%4, y=%5)
        %7: fp16[1, 2, 4, 4] = slice_by_size(x=%q, begin=[0, 0, 4, 0], size=[-1, -1, 4, -1])
        %8: fp16[1, 2, 4, 8] = matmul(x=%7, y=%k, transpose_y=True)
        %9: fp16[1, 2, 4, 8] = add(x=%8, y=<fp16[4, 8]>)
        %10: fp16[1, 2, 4, 8] = softmax(x=%9)
        %11: fp16[1, 2, 4, 4] = matmul(x=%10, y=%v)
        %y: fp16[1, 2, 8, 4] = concat(values=(%6, %11), axis=-2)
    """

    code, slug = "ANE603", "blocked-keys-computed"
    stage = "layout"
    exactness = Exactness.ROUNDING
    bound = "the order of sums, without zero terms"
    preset = "full"
    within = (0.0, 8.0)
    severity, confidence = Severity.SUGGESTION, "medium"
    roots = ("matmul", "scaled_dot_product_attention")
    evidence = (
        Community("causal attention in blocks of 256 keys, 40 heads of 128: 4.412 -> 3.994 ms at 512 positions (128: "
                  "4.476), 1.21 times faster at 1024, 1.55 at 2048", chip="M2 Pro", os="macOS 27", date="2026",
                  source="trisanths/ane-llm-prefill"),
        Community("Whisper encoders, channels first and in three tiles of queries against whisper.cpp's Core ML form: "
                  "11.2 -> 5.7 ms (tiny), 23 -> 12.2 (base), 236 -> 117.6 (medium); two runtimes, chip not stated",
                  source="https://github.com/sbryngelson/ANEForge/issues/15", date="2026"),
        cite_apple_authoring_rules("attention in pieces: split heads, einsum, softmax, einsum"),
    )

    rows: int = 256
    "Queries in a tile."
    least: int = 512
    "Minimum number of queries to tile an attention."
    most_kept: float = 0.8
    "Maximum share of the scores that is left; above it, the concat costs as much as is saved."
    max_bytes: int = 1 << 24
    "Maximum bytes of the pieces of one mask."
    unmasked_tiles: int = 0
    "Number of tiles of an attention without a suitable constant mask; 0: no tiles; 3 was measured."

    def match(self, op: Operation) -> Hit | Miss:
        found = _read_fused(op) if op.op_type == "scaled_dot_product_attention" else _read_written_out(op)
        if found is None:
            return Miss(op, "no softmax of a product of two computed values", near=False)
        rows, keys = found.query.shape[-2], found.keys
        if is_symbolic(rows) or is_symbolic(keys):
            return Miss(op, "the number of queries or keys is dynamic")
        if int(rows) < self.least or _is_tile(found.query):
            return Miss(op, f"fewer than {self.least} queries (least)", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if found.obstacle:
            return Miss(op, found.obstacle)
        tiles = self._plan_tiles(found, int(rows), int(keys))
        if isinstance(tiles, str):
            return Miss(op, tiles)
        kept = sum((stop - start) * (last - first) for (start, stop), (first, last) in tiles) / (int(rows) * int(keys))
        if len(tiles) == 1 and kept == 1:
            return Miss(op, f"its {rows} queries are one tile, which needs all keys")
        return Hit(op, attention=found, tiles=tiles, fixes_nonfinite=kept < 1, keeps_nonfinite=kept == 1,
                   note=f"{len(tiles)} tiles of queries, {kept:.0%} of {rows} x {keys} scores computed")

    def _plan_tiles(self, found: _Attention, rows: int, keys: int) -> list[_Tile] | str:
        """Plan the tiles, or return why there are none."""
        seen = _find_seen_keys(found, rows, keys)
        if not isinstance(seen, str):
            tiles = [((start, stop), _find_key_range(seen[start:stop], found.keys_last))
                     for start, stop in split_evenly(rows, self.rows)]
            kept = sum((stop - start) * (last - first) for (start, stop), (first, last) in tiles) / (rows * keys)
            if kept <= self.most_kept:
                size = sum(_count_mask_bytes(mask, tile, rows, keys) for mask in found.masks for tile in tiles)
                if size <= self.max_bytes:
                    return tiles
                seen = f"the pieces of its mask take {format_bytes(size)}, above max_bytes={self.max_bytes}"
            else:
                seen = f"tiles of {self.rows} queries leave {kept:.0%} of the scores, above most_kept={self.most_kept}"
        if self.unmasked_tiles < 2:
            return seen
        return [((start, stop), (0, keys)) for start, stop in split_evenly(rows, -(-rows // self.unmasked_tiles))]

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        found: _Attention = hit.attention
        rows, keys = int(found.query.shape[-2]), int(found.keys)
        parts = [found.build(mb, _Slicer(mb, tile, rows, keys)) for tile in hit.tiles]
        joined: Var = mb.concat(values=parts, axis=-2)
        return joined

    def examples(self) -> Iterable[Example]:
        options = {"rows": 4, "least": 8}
        yield _make_written_example("causal", options=options)
        yield _make_written_example("scaled, two masks", options=options, scale=0.3, padding=True)
        yield _make_written_example("selected", options=options, select=True)
        yield _make_written_example("keys across", options=options, across=True)
        yield _make_written_example("a window", options=options, rows=256 + 32, window=40, within=2.0)
        yield _make_fused_example("fused", options=options, mask=_make_causal_mask(8))
        yield _make_fused_example("fused, boolean", options=options, mask=_make_causal_mask(8) == 0)
        yield _make_fused_example("one fused", options=options, mask=_make_causal_mask(8), count=1, reason=(
            "the only fused attention of its function: with two or more the model is reported to fall back to the "
            "CPU; use ane::decompose_attention"))
        yield _make_written_example("no mask", options={**options, "unmasked_tiles": 3}, mask=np.zeros((8, 8)))
        yield _make_written_example("nothing blocked", options=options, mask=np.zeros((8, 8)), reason=(
            "tiles of 4 queries leave 100% of the scores, above most_kept=0.8"))
        yield _make_written_example("one tile", options={"rows": 8, "least": 8, "most_kept": 1.0}, reason=(
            "its 8 queries are one tile, which needs all keys"))
        yield _make_written_example("a blocked row", options=options, mask=np.full((8, 8), -4e4), reason=(
            "a query has no visible key: its result is the mean of all values"))
        yield _make_written_example("short", reason="fewer than 512 queries (least)")
        yield _make_written_example("computed mask", options=options, mask=None, padding=True, reason=(
            "its mask is dynamic"))
        yield _make_written_example("fp32", options=options, dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)


_Tile = tuple[tuple[int, int], tuple[int, int]]
"A range of queries, and the range of their visible keys."


class _Slicer:
    """Slices queries, keys and masks for one tile."""

    def __init__(self, mb: RewriteBuilder, tile: _Tile, rows: int, keys: int) -> None:
        self._mb, self._tile, self._extents = mb, tile, (rows, keys)

    def take_rows(self, var: Var, axis: int = -2) -> Var:
        return self._slice_ranges(var, {axis: self._tile[0]})

    def take_keys(self, var: Var, axis: int) -> Var:
        return self._slice_ranges(var, {axis: self._tile[1]})

    def take_scores(self, var: Var) -> Var:
        """Slice a value that is broadcast to the scores."""
        return self._slice_ranges(var, _find_score_ranges(var, self._tile, *self._extents))

    def _slice_ranges(self, var: Var, ranges: dict[int, tuple[int, int]]) -> Var:
        wanted = {axis % var.rank: ends for axis, ends in ranges.items() if ends != (0, var.shape[axis])}
        if not wanted:
            return var
        if is_const(var):
            where = tuple(slice(*wanted[axis]) if axis in wanted else slice(None) for axis in range(var.rank))
            name = "_".join(f"{axis}_{start}_{stop}" for axis, (start, stop) in wanted.items())
            return self._mb.weight(var, name, lambda: np.asarray(var.val)[where])
        key = ("tile", var, tuple(sorted(wanted.items())))
        begin = [wanted[axis][0] if axis in wanted else 0 for axis in range(var.rank)]
        size = [wanted[axis][1] - wanted[axis][0] if axis in wanted else -1 for axis in range(var.rank)]
        made: Var = self._mb.once(key, lambda: self._mb.slice_by_size(x=var, begin=begin, size=size))
        return made


@dataclass(frozen=True)
class _Attention:
    """An attention: its queries, how many keys, and the constant masks that are added to its scores or select them.

    `keys_last` is true if the keys lie on the last axis of their value. `build` builds the part that a slicer cuts out.
    """

    query: Var
    keys: Any
    masks: tuple[tuple[Var, str], ...]
    build: Callable[[RewriteBuilder, _Slicer], Var]
    keys_last: bool = False
    obstacle: str = ""


def _read_fused(op: Operation) -> _Attention:
    mask = op.attn_mask

    def build_tile(mb: RewriteBuilder, part: _Slicer) -> Var:
        masks = {} if mask is None else {"attn_mask": part.take_scores(mask)}
        return rebuild_op(mb, op, query=part.take_rows(op.query), key=part.take_keys(op.key, -2),
                          value=part.take_keys(op.value, -2), **masks)

    obstacle = ""
    if mask is not None and not is_const(mask) and any(map(is_symbolic, mask.shape[-2:])):
        obstacle = "a mask has dimensions that are dynamic"
    elif not _has_other_fused_attentions(op):
        obstacle = ("the only fused attention of its function: with two or more the model is reported to fall back to "
                    "the CPU; use ane::decompose_attention")
    kind = "select" if mask is not None and mask.dtype == types.bool else "add"
    masks = ((mask, kind),) if is_const(mask) else ()
    return _Attention(op.query, op.key.shape[-2], masks, build_tile, obstacle=obstacle)


def _has_other_fused_attentions(op: Operation) -> bool:
    block = op.enclosing_block
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return any(each.op_type == op.op_type and each is not op for each in iterate_nested_ops(block))


def _read_written_out(op: Operation) -> _Attention | None:
    """Read the attention whose last op is the matmul `op`; None if it is not one."""
    softmax = op.x.op
    if softmax is None or softmax.op_type != "softmax" or is_opaque(softmax) or op.y.rank < 2:
        return None
    if get_const_value(softmax.axis, -1) not in (-1, op.x.rank - 1) or get_const_value(op.transpose_x, False):
        return None
    steps: list[Operation] = []
    masks: list[tuple[Var, str]] = []
    value = softmax.x
    while value.op is not None and value.op.op_type in ("add", "mul", "real_div", "select"):
        step = value.op
        found = _read_step(step)
        if found is None:
            return None
        value, step_masks = found
        masks += step_masks
        steps.insert(0, step)
    product = value.op
    if product is None or product.op_type != "matmul" or is_opaque(product) or is_const(product.y) or is_const(
            product.x) or min(product.x.rank, product.y.rank) < 2 or get_const_value(product.transpose_x, False):
        return None
    keys_last = not get_const_value(product.transpose_y, False)
    key_axis, value_axis = -1 if keys_last else -2, -1 if get_const_value(op.transpose_y, False) else -2

    def build_tile(mb: RewriteBuilder, part: _Slicer) -> Var:
        made = rebuild_op(mb, product, x=part.take_rows(product.x), y=part.take_keys(product.y, key_axis))
        for step in steps:
            made = rebuild_op(mb, step, **_slice_step(step, made, part))
        made = rebuild_op(mb, softmax, x=made)
        return rebuild_op(mb, op, x=made, y=part.take_keys(op.y, value_axis))

    obstacle = _find_use_obstacle([product, *steps, softmax], op, product)
    added = [var for step in steps for var in (step.inputs.get(name) for name in ("x", "y", "cond"))
             if var is not None and var is not (_read_step(step) or (None,))[0]]
    if any(map(is_symbolic, (extent for var in added for extent in var.shape[-2:]))):
        obstacle = "a mask has dimensions that are dynamic"
    return _Attention(product.x, product.y.shape[key_axis], tuple(masks), build_tile, keys_last, obstacle)


def _read_step(op: Operation) -> tuple[Var, list[tuple[Var, str]]] | None:
    """Return the scores that `op` scales or masks, and the constant masks; None if it does something else."""
    if is_opaque(op):
        return None
    if op.op_type == "select":
        scores = [var for var in (op.a, op.b) if not is_const(var)]
        fill = _read_uniform(op.b if scores and scores[0] is op.a else op.a)
        if len(scores) != 1 or fill is None:
            return None
        kind = "select" if scores[0] is op.a else "select not"
        return scores[0], [(op.cond, kind)] if fill <= _BLOCKED and is_const(op.cond) else []
    constant = [var for var in (op.x, op.y) if is_const(var)]
    if op.op_type == "add":
        scores = [var for var in (op.x, op.y) if not is_const(var)]
        if len(scores) == 2:  # a computed mask, added to the scores
            scores = [var for var in scores if _leads_to_product(var)]
        return (scores[0], [(constant[0], "add")] if constant else []) if len(scores) == 1 else None
    if len(constant) != 1 or np.size(constant[0].val) != 1 or (op.op_type == "real_div" and constant[0] is op.x):
        return None
    factor = float(np.asarray(constant[0].val).reshape(-1)[0])
    return (op.y if constant[0] is op.x else op.x, []) if factor > 0 else None


def _read_uniform(var: Var) -> float | None:
    """Return the one number that a constant holds, or None."""
    if not is_const(var):
        return None
    value = np.asarray(var.val).reshape(-1)
    return float(value[0]) if value.size and np.all(value == value[0]) else None


def _leads_to_product(var: Var) -> bool:
    """Return whether `var` is a product of two computed values, scaled or masked or not."""
    while var.op is not None and var.op.op_type in ("add", "mul", "real_div", "select"):
        found = [each for each in (var.op.inputs.get(name) for name in ("x", "y", "a", "b"))
                 if each is not None and not is_const(each)]
        if len(found) != 1:
            return False
        var = found[0]
    return var.op is not None and var.op.op_type == "matmul" and not is_const(var.op.x) and not is_const(var.op.y)


def _slice_step(step: Operation, scores: Var, part: _Slicer) -> dict[str, Any]:
    """Return the inputs of `step` for one tile: its scores, and its masks sliced."""
    names = ("cond", "a", "b") if step.op_type == "select" else ("x", "y")
    own, _ = _read_step(step) or (None, [])
    made: dict[str, Any] = {}
    for name in names:
        var = step.inputs[name]
        if var is own:
            made[name] = scores
        elif name in ("a", "b"):  # one value, stored any number of times
            made[name] = np.asarray(var.val).reshape(-1)[0]
        else:
            made[name] = part.take_scores(var)
    return made


def _find_use_obstacle(inside: list[Operation], last: Operation, product: Operation) -> str:
    """Return which value inside is needed elsewhere, or is no larger than the scores, or ""."""
    for op in inside:
        var = op.outputs[0]
        if op.enclosing_block is not last.enclosing_block or len(get_consumers(var)) > 1 or var.consuming_blocks:
            return f"'{var.name}' has other users"
        if tuple(var.shape[-2:]) != tuple(product.outputs[0].shape[-2:]):
            return f"'{var.name}' has a shape other than the scores"
    return ""


def _find_seen_keys(found: _Attention, rows: int, keys: int) -> Array | str:
    """Return which keys each query may see, as [rows, keys], or why that is not known."""
    if not found.masks:
        return "its mask is dynamic"
    added = np.zeros((1, rows, keys), np.float32)
    for mask, kind in found.masks:
        value = np.asarray(mask.val)
        if value.ndim > 2 and value.size // (value.shape[-1] * value.shape[-2]) > 64:
            return "its mask differs between too many heads"
        if kind != "add":
            blocked = value if kind == "select not" else ~value.astype(bool)
            value = np.where(blocked, np.float32(-np.inf), np.float32(0))
        if not np.all((value <= _BLOCKED) | (value >= _ALLOWED)):
            return "its mask has values that hide a key only in part"
        shape = value.shape[-2:] if value.ndim > 1 else (1, *value.shape)
        if len(shape) != 2 or any(extent not in (1, all_) for extent, all_ in zip(shape, (rows, keys))):
            return "its mask has a shape other than the scores"
        with np.errstate(invalid="ignore"):
            added = added + value.astype(np.float32).reshape(-1, *shape)
    open_ = added >= 2 * _ALLOWED
    if not open_.any(axis=2).all():
        return "a query has no visible key: its result is the mean of all values"
    return np.asarray(open_.any(axis=0))


def _find_key_range(seen: Array, from_front: bool) -> tuple[int, int]:
    """Return the range of keys that any of some queries sees, from the front on if a slice in it would be a fault."""
    used = np.flatnonzero(seen.any(axis=0))
    first = 0 if from_front else int(used[0]) // _KEY_STEP * _KEY_STEP
    return first, min(seen.shape[1], -(-(int(used[-1]) + 1) // _KEY_STEP) * _KEY_STEP) if (
        seen.shape[1] > _KEY_STEP) else int(used[-1]) + 1


def _find_score_ranges(var: Var, tile: _Tile, rows: int, keys: int) -> dict[int, tuple[int, int]]:
    """Return the ranges of the last two axes of a value that is broadcast to the scores."""
    ranges = {}
    for axis, ends, extent in ((-2, tile[0], rows), (-1, tile[1], keys)):
        if var.rank >= -axis and var.shape[axis] == extent and extent != 1:
            ranges[axis] = ends
    return ranges


def _count_mask_bytes(mask: tuple[Var, str], tile: _Tile, rows: int, keys: int) -> int:
    var = mask[0]
    count = get_itemsize(var)
    ranges = _find_score_ranges(var, tile, rows, keys)
    for axis, extent in enumerate(var.shape):
        ends = ranges.get(axis - var.rank)
        count *= int(extent) if ends is None else ends[1] - ends[0]
    return count


def _is_tile(query: Var) -> bool:
    """Return whether the queries are a tile already."""
    op = query.op
    while op is not None and op.op_type in ("mul", "real_div"):
        op = (op.y if is_const(op.x) else op.x).op
    return op is not None and op.op_type == "slice_by_size" and op.x.rank > 1 and (
        op.x.shape[-2] != op.outputs[0].shape[-2])


def _make_causal_mask(rows: int, window: int = 0) -> Array:
    behind = np.subtract.outer(np.arange(rows), np.arange(rows))
    blocked = (behind < 0) | ((behind >= window) if window else False)
    return np.where(blocked, -4e4, 0).astype(np.float16)


def _make_written_example(
    name: str, *, rows: int = 8, mask: Any = "causal", window: int = 0, scale: float = 0.0, padding: bool = False,
    select: bool = False, across: bool = False, within: float = 8.0, dtype: Any = types.fp16, **settings: Any,
) -> Example:
    """Make an example of attention as matmul, softmax and matmul."""
    kind = types.nptype_from_builtin(dtype)
    held = _make_causal_mask(rows, window) if isinstance(mask, str) else mask

    def build_body(q: Var, k: Var, v: Var, p: Var | None = None) -> Any:
        scores = Builder.matmul(x=q, y=k, transpose_y=not across)
        if scale:
            scores = Builder.mul(x=scores, y=kind(scale))
        if select:
            scores = Builder.select(cond=held == 0, a=scores, b=kind(-3e4))
        elif held is not None:
            scores = Builder.add(x=scores, y=np.asarray(held, kind))
        if p is not None:
            scores = Builder.add(x=p, y=scores)
        return Builder.matmul(x=Builder.softmax(x=scores, axis=-1), y=v, name="y")

    shapes: dict[str, Any] = {"q": (1, 2, rows, 4), "k": (1, 2, 4, rows) if across else (1, 2, rows, 4),
                              "v": (1, 2, rows, 4)}
    if padding:
        shapes["p"] = (1, 1, 1, rows)
    return make_example(name, build_body, within=within, dtype=dtype, **shapes, **settings)


def _make_fused_example(name: str, mask: Array, count: int = 2, **settings: Any) -> Example:
    def build_body(q: Var, k: Var, v: Var) -> Var:
        for _ in range(count):
            q = Builder.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)
        y: Var = Builder.identity(x=q, name="y")
        return y

    shape = (1, 2, 8, 16)
    return make_example(name, build_body, opset=ct.target.iOS18, within=2.0, q=shape, k=shape, v=shape, **settings)
