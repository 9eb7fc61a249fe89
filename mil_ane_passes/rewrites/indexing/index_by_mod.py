"""Wrap runtime indices into range in two ops instead of eight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, get_static_shape
from ...passes.contract import Community, Example, Hit, Miss, Rewrite
from ...passes.examples import build_program, make_weight

_LOOKUP_OPS = ("gather", "gather_along_axis", "gather_nd")
_INDEX_PREPARATION_OPS = ("cast", "greater_equal", "add", "select")


class IndexByMod(Rewrite):
    """Bring runtime indices into range in two ops instead of up to eight.

    why     coremltools lets a negative index count from the end: greater_equal, add and select on int32, with casts to
            16 bits and back around them, and when a package is converted in two steps all of that twice. Each of these
            ops is unsupported by the ANE and runs on the CPU in front of it.
    when    Indices of gather, gather_along_axis and gather_nd that went through select(i >= 0, i, i + n), n being the
            extent that they index, when nobody reads what is in between but other lookups in the same extent.
    exact   bitwise for every index from -n to n - 1: mod(i + n, n). What is outside is no index, before and after. It
            is not mod(i, n): of a negative number Core ML's mod was seen to give the C remainder, not Python's.
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
        counted = _read_indexed_extents(op)
        if counted is None:
            return Miss(op, "what is indexed has an extent known only at run time", near=False)
        found = _find_unwrapped_indices(op.indices, counted)
        if found is None:
            return Miss(op, "indices are not brought into range here", near=False)
        start, first = found
        if not _is_only_looked_up(first, counted):
            return Miss(op, "the indices in range are read by more than lookups in the same extent")
        return Hit(op, note="indices are brought into range in two ops", source=start, extents=counted)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, before = hit.op, hit.source
        many = np.int32(hit.extents[0]) if len(hit.extents) == 1 else np.array(hit.extents, np.int32)

        def prepared() -> Var:
            wide = before if before.dtype == types.int32 else mb.cast(x=before, dtype="int32")
            index = mb.mod(x=mb.add(x=wide, y=many), y=many)
            same = op.indices.dtype == types.int32
            return index if same else mb.cast(x=index, dtype=types.builtin_to_string(op.indices.dtype))

        index = mb.once(("index", before, hit.extents, op.indices.dtype), prepared)
        given = {name: var for name, var in op.inputs.items() if var is not None}
        built: Var = getattr(mb, op.op_type)(**{**given, "indices": index})
        return built

    def examples(self) -> Iterable[Example]:
        yield Example("embedding", _build_wrapped_lookup)
        yield Example("prepared twice", lambda: _build_wrapped_lookup(times=2))
        yield Example("16 bits", lambda: _build_wrapped_lookup(narrow="int16"))
        yield Example("read elsewhere", lambda: _build_wrapped_lookup(shown=True),
                      reason="the indices in range are read by more than lookups in the same extent")
        yield Example(
            "another extent", lambda: _build_wrapped_lookup(many=4), reason="indices are not brought into range here"
        )


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


def _is_lossless_index_cast(given: type, made: type, extents: tuple[int, ...]) -> bool:
    """Return whether a cast from `given` to `made` preserves every index."""
    if given not in (types.int16, types.uint16, types.int32):
        return False
    most = {types.int16: 2**15, types.uint16: 2**16, types.int32: 2**31}.get(made, 0)
    return max(extents) <= most


def _is_negative_index_wrap(op: Operation, extents: tuple[int, ...]) -> bool:
    """Return whether a select is i >= 0 ? i : i + n."""
    above, later = op.cond.op, op.b.op
    if above is None or later is None or above.op_type != "greater_equal" or later.op_type != "add":
        return False
    added = np.broadcast_to(later.y.val, (len(extents),)) if np.size(later.y.val) in (1, len(extents)) else None
    return bool(above.x is op.a and later.x is op.a and get_const_value(above.y) == 0
                and added is not None and tuple(added) == extents)


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


def _build_wrapped_lookup(times: int = 1, narrow: str = "", shown: bool = False, many: int = 5) -> Program:
    def body(i: Var) -> list[Var]:
        for _ in range(times):
            i = Builder.select(cond=Builder.greater_equal(x=i, y=np.int32(0)), a=i,
                               b=Builder.add(x=i, y=np.int32(many)))
            if narrow:
                i = Builder.cast(x=i, dtype=narrow)
        result = [Builder.gather(x=make_weight(5, 4), indices=i, axis=0, name="y")]
        return [*result, Builder.mul(x=i, y=i, name="z")] if shown else result

    return build_program(body, dtype=types.int32, i=(3,))
