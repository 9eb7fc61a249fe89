"""Wrap runtime indices into range with two ops instead of eight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, get_static_shape
from ...passes.contract import Community, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example, make_weight

_LOOKUP_OPS = ("gather", "gather_along_axis", "gather_nd")
_INDEX_PREPARATION_OPS = ("cast", "greater_equal", "add", "select")
_LARGEST_EXTENTS: dict[type, int] = {types.int16: 2**15, types.uint16: 2**16, types.int32: 2**31}
"Dtypes of indices, with the longest axis of which they can represent every index."


class IndexByMod(Rewrite):
    """Wrap runtime indices into range with two ops instead of up to eight.

    why     coremltools implements negative indices with greater_equal, add and select on int32, with casts to 16 bits
            and back, and twice if a package is converted in two steps. These ops are unsupported on the ANE and run on
            the CPU before it.
    when    Indices of gather, gather_along_axis and gather_nd that went through select(i >= 0, i, i + n), where n is
            the indexed extent, if the intermediate values have no users except other lookups in the same extent.
    exact   bitwise for every index from -n to n - 1: mod(i + n, n). Other values are invalid indices before and after.
            mod(i, n) would not work: for negative numbers Core ML's mod was observed to return the C remainder, not
            Python's.
    cost    less: int32 ops on as many elements as there are indices.

    before
        %0: bool[3] = greater_equal(x=%i, y=0)
        %1: int32[3] = add(x=%i, y=5)
        %2: int32[3] = select(cond=%0, a=%i, b=%1)
        %y: fp16[3, 4] = gather(x=<fp16[5, 4]>, indices=%2)
    after
        %0: int32[3] = add(x=%i, y=5)
        %1: int32[3] = mod(x=%0, y=5)
        %y: fp16[3, 4] = gather(x=<fp16[5, 4]>, indices=%1)
    """

    code, slug = "ANE288", "long-index-preparation"
    stage = "decompose"
    preset = "full"
    roots = _LOOKUP_OPS
    evidence = (
        Community("the CoreML runtime happens to produce C-style results for mod, coremltools folds it as Python does; "
                  "floor_div rounds toward negative infinity (run through a compiled model)", date="2026-06-10",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/70"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        extents = _read_indexed_extents(op)
        if extents is None:
            return Miss(op, "the indexed extent is dynamic", near=False)
        found = _find_unwrapped_indices(op.indices, extents)
        if found is None:
            return Miss(op, "indices are not wrapped here", near=False)
        start, first = found
        if not _is_only_looked_up(first, extents):
            return Miss(op, "the wrapped indices have users other than lookups in the same extent")
        return Hit(op, note="indices are wrapped with two ops", source=start, extents=extents)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, before = hit.op, hit.source
        extent = np.int32(hit.extents[0]) if len(hit.extents) == 1 else np.array(hit.extents, np.int32)

        def build_wrapped_index() -> Var:
            wide = before if before.dtype == types.int32 else mb.cast(x=before, dtype="int32")
            index: Var = mb.mod(x=mb.add(x=wide, y=extent), y=extent)
            if op.indices.dtype == types.int32:
                return index
            return mb.cast(x=index, dtype=types.builtin_to_string(op.indices.dtype))

        index = mb.once(("index", before, hit.extents, op.indices.dtype), build_wrapped_index)
        return rebuild_op(mb, op, indices=index)

    def examples(self) -> Iterable[Example]:
        yield _make_lookup_example("embedding")
        yield _make_lookup_example("prepared twice", times=2)
        yield _make_lookup_example("16 bits", narrow="int16")
        yield _make_lookup_example("read elsewhere", returned=True,
                                   reason="the wrapped indices have users other than lookups in the same extent")
        yield _make_lookup_example("another extent", extent=4, reason="indices are not wrapped here")


def _read_indexed_extents(op: Operation) -> tuple[int, ...] | None:
    """Return the extents that the indices refer to, or None where they are unknown.

    These are one extent, or for gather_nd one for each coordinate.
    """
    shape = get_static_shape(op.x)
    if shape is None:
        return None
    if op.op_type != "gather_nd":
        axis = get_const_value(op.axis, 0)
        return (shape[axis],) if isinstance(axis, int) and shape else None
    known, first = get_static_shape(op.indices), get_const_value(op.inputs.get("batch_dims"), 0)
    return shape[first:first + known[-1]] if known else None


def _find_unwrapped_indices(index: Var, extents: tuple[int, ...]) -> tuple[Var, Var] | None:
    """Find the indices before they were wrapped into range, and the first value that is in range; None if not found."""
    found, start, var = None, index, index
    while var.op is not None:
        op = var.op
        if op.op_type == "cast" and _is_lossless_index_cast(op.x.dtype, var.dtype, extents):
            var = op.x
        elif op.op_type == "select" and _is_negative_index_wrap(op, extents):
            found, start, var = op.outputs[0], op.a, op.a
        else:
            break
    return None if found is None else (_skip_lossless_casts(start, extents), found)


def _is_lossless_index_cast(source: type, target: type, extents: tuple[int, ...]) -> bool:
    """Return whether a cast from `source` to `target` preserves every index."""
    if source not in _LARGEST_EXTENTS:
        return False
    return max(extents) <= _LARGEST_EXTENTS.get(target, 0)


def _is_negative_index_wrap(op: Operation, extents: tuple[int, ...]) -> bool:
    """Return whether a select is i >= 0 ? i : i + n."""
    condition, wrapped = op.cond.op, op.b.op
    if condition is None or wrapped is None or condition.op_type != "greater_equal" or wrapped.op_type != "add":
        return False
    if condition.x is not op.a or wrapped.x is not op.a or get_const_value(condition.y) != 0:
        return False
    addend = wrapped.y.val
    return np.size(addend) in (1, len(extents)) and tuple(np.broadcast_to(addend, (len(extents),))) == extents


def _skip_lossless_casts(start: Var, extents: tuple[int, ...]) -> Var:
    """Return `start` before casts that preserve every index, negative ones too."""
    while start.op is not None and start.op.op_type == "cast" and start.dtype in (types.int16, types.int32) and \
            _is_lossless_index_cast(start.op.x.dtype, start.dtype, extents):
        start = start.op.x
    return start


def _is_only_looked_up(index: Var, extents: tuple[int, ...]) -> bool:
    """Return whether all readers of `index`, through its preparation, are lookups in `extents`."""
    pending, seen = [index], {index}
    while pending:
        var = pending.pop()
        if var.consuming_blocks:
            return False
        for op in get_consumers(var):
            if op.op_type in _LOOKUP_OPS:
                if op.indices is not var or op.x is var or _read_indexed_extents(op) != extents:
                    return False
            elif op.op_type not in _INDEX_PREPARATION_OPS:
                return False
            else:
                pending += [made for made in op.outputs if made not in seen]
                seen.update(op.outputs)
    return True


def _make_lookup_example(
    name: str, *, times: int = 1, narrow: str = "", returned: bool = False, extent: int = 5, reason: str | None = None
) -> Example:
    """Make an example of a lookup in five rows, whose indices are wrapped by `extent` and cast to `narrow`."""

    def build_body(i: Var) -> list[Var]:
        for _ in range(times):
            is_valid = Builder.greater_equal(x=i, y=np.int32(0))
            i = Builder.select(cond=is_valid, a=i, b=Builder.add(x=i, y=np.int32(extent)))
            if narrow:
                i = Builder.cast(x=i, dtype=narrow)
        result = [Builder.gather(x=make_weight(5, 4), indices=i, axis=0, name="y")]
        return [*result, Builder.mul(x=i, y=i, name="z")] if returned else result

    return make_example(name, build_body, reason=reason, dtype=types.int32, i=(3,))
