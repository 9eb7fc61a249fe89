"""The builder passed to rewrites: pymil's `mb` with unique names and shared consts, and `rebuild_op`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Var, mil_list, types
from coremltools.converters.mil.mil.scope import ScopeSource, add_graph_pass_scope
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .block_editor import get_first_op
from .clone import insert_op
from .constants import make_const, make_reshaped_const
from .query import is_default
from .type_inference import limit_evaluation

__all__ = ["RewriteBuilder", "UniqueNames", "rebuild_op"]

_MAX_SHARED_ELEMENTS = 64
"""Largest element count of a const, built from a plain value, that is shared within its block.

Its bytes are the key of the lookup. Parameters such as shapes and axes are shorter; longer values are rarely equal.
"""

class UniqueNames:
    """The op and value names of a function; new names never collide with them."""

    def __init__(self, function: Function) -> None:
        self._taken: set[str] = set(function.inputs)
        self._next: dict[str, int] = {}
        self.shared: set[str] = set()
        "Names that several values in different blocks have."
        values = set(function.inputs)
        pending: list[Block] = [function]
        while pending:
            block = pending.pop()
            for op in block.operations:
                self._taken.add(op.name)
                names = {var.name for var in op.outputs}
                self.shared |= names & values
                values |= names
                pending.extend(op.blocks)
        self._taken |= values

    def make_unique_name(self, base: str) -> str:
        """Return `base`, or `base_1`, `base_2`, ... if it is in use, and reserve the result."""
        name, count = base, self._next.get(base, 0)
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._next[base] = count
        self._taken.add(name)
        return name


class RewriteBuilder:
    """Builder for rewrites: `mb.conv(x=..., ...)` inserts before the op that is being rewritten.

    Plain values (numbers, strings, short lists and arrays) become consts that all ops of the block share.
    `mb.reshaped(var, shape)` reshapes a const without copying its bytes; all users share the result.
    """

    def __init__(self, block: Block, names: UniqueNames) -> None:
        self.block = block
        self.created_ops: list[Operation] = []
        self._names = names
        self._consts: dict[Any, Var] = {}
        self._views: dict[tuple[Var, tuple[int, ...]], Var] = {}
        self._memo: dict[Any, Any] = {}
        self._base = "ane"
        self._anchor: Operation | None = None
        self._made: set[Operation] = set()
        self.moved_ops: set[Operation] = set()
        "Existing ops that were moved here, such as the ops of an inlined block."
        self._entry: Operation | None = None

    @contextmanager
    def at(self, op: Operation, base: str | None = None) -> Iterator[None]:
        """Insert before `op`; new names start with `base` (default: the name of the op's first output)."""
        with self._insert_before(op, base or (op.outputs[0].name if op.outputs else op.name)):
            yield

    @contextmanager
    def at_first(self, base: str) -> Iterator[None]:
        """Insert before all ops of the block; new names start with `base`."""
        with self._insert_before(get_first_op(self.block), base):
            yield

    @contextmanager
    def at_end(self, base: str) -> Iterator[None]:
        """Insert after all ops of the block; new names start with `base`."""
        with self._insert_before(None, base):
            yield

    @contextmanager
    def _insert_before(self, anchor: Operation | None, base: str) -> Iterator[None]:
        saved = self._anchor, self._base
        self._anchor, self._base = anchor, base
        try:
            yield
        finally:
            self._anchor, self._base = saved

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if op_type.startswith("_"):
            raise AttributeError(op_type)
        make = getattr(Builder, op_type)

        def build_op(**inputs: Any) -> Any:
            required = inputs.pop("name", None) or f"{self._base}_{op_type}"
            if op_type == "slice_by_index":
                inputs = _mask_whole_axes(inputs)
            shared = inputs if op_type == "const" else {
                key: self._share_const(key, args) for key, args in inputs.items() if args is not None}
            with limit_evaluation():
                result = make(**shared, name=self._names.make_unique_name(required), before_op=self._anchor)
            self._record_op((result[0] if isinstance(result, (list, tuple)) else result).op)
            return result

        return build_op

    def reshaped(self, var: Var, shape: tuple[int, ...]) -> Var:
        """Return const `var` reshaped to `shape`.

        The bytes are shared, and repeated calls return the same new const.
        """
        if tuple(var.shape) == shape:
            return var
        key = (var, shape)
        if not _is_in_program(self._views.get(key)):
            source = var.op.enclosing_block
            where = _find_next_op(var.op) if source is self.block else get_first_op(self.block)
            view = make_reshaped_const(
                var, shape, self._names.make_unique_name(f"{var.name}_{'x'.join(map(str, shape))}"), where
            )
            self._record_op(view.op)
            self._views[key] = view
        return self._views[key]

    def weight(self, source: Var, what: Any, make: Callable[[], np.ndarray[Any, Any]], view: bool = False) -> Var:
        """Make a const from `make()`, with the dtype of const `source` and next to it; calls with equal (source, what)
        share one const.

        With `view` the array is not copied: a strided view of the bytes of `source` is copied only when the package is
        written.
        """

        def build_const() -> Var:
            beside = source.op.enclosing_block is self.block
            where = _find_next_op(source.op) if beside else get_first_op(self.block)
            value = make()
            if np.ndim(value) == 0:
                value = np.asarray(value)[()]  # a scalar, as pymil has it; ascontiguousarray would add an axis
            elif not view:
                value = np.ascontiguousarray(value)
            var = make_const(value, source.dtype, self._names.make_unique_name(f"{source.name}_{what}"), where)
            self._record_op(var.op)
            return var

        built: Var = self.once(("weight", source, what), build_const)
        return built

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()` (vars). Later calls with the same `key` in this walk of the block return the same result."""
        if not _is_in_program(self._memo.get(key)):
            self._memo[key] = make()
        return self._memo[key]

    def find_insertion_point(self, var: Var) -> Operation | None:
        """Find the op before which ops that read `var` and shared consts can be inserted for the users of `var`.

        If `var` is defined outside the block, return the first op that was in the block before the rewrite: consts made
        since then precede it.
        """
        if var.op is not None and var.op.enclosing_block is self.block:
            return _find_next_op(var.op)
        if self._entry is None or self._entry.enclosing_block is not self.block:
            self._entry = next((op for op in self.block.operations if op not in self._made), None)
        return self._entry

    def make_unique_name(self, base: str) -> str:
        """Return a name unused in the function: `base`, or one that starts with it."""
        return self._names.make_unique_name(base)

    def insert(self, op: Operation, into: Block | None = None) -> list[Var]:
        """Insert `op`, which must not be in a block, at the current insertion point (or at the end of the block `into`)
        with a new name. Returns its outputs."""
        op.name = self.make_unique_name(op.name)
        for var in op.outputs:
            var.name = op.name if len(op.outputs) == 1 else self.make_unique_name(var.name)
        insert_op(op, into or self.block, None if into else self._anchor)
        self._record_op(op)
        return list(op.outputs)

    def moved(self, op: Operation) -> list[Var]:
        """Move `op` from its block to the current insertion point.

        Its names change only if they are not unique. Returns its outputs.
        """
        old = op.enclosing_block
        old.operations.remove(op)
        old._internal_vars.difference_update(op.internal_inputs.values())
        for inner in op.internal_inputs.values():
            self.block.add_internal_var(inner)
        op.enclosing_block = self.block
        self.block._insert_op_before(op, before_op=self._anchor)
        for var in op.outputs:
            if old is not self.block and var.name in self._names.shared:
                var.name = self._names.make_unique_name(var.name)
                op.name = var.name if len(op.outputs) == 1 else op.name
        self._record_op(op)
        self.moved_ops.add(op)
        return list(op.outputs)

    def _record_op(self, op: Operation) -> None:
        self.created_ops.append(op)
        self._made.add(op)

    def _share_const(self, parameter: str, given: Any) -> Any:
        key = None if _has_negative_indices(parameter, given) else _make_const_key(given)
        if key is None:
            return given
        if not _is_in_program(self._consts.get(key)):
            name = self._names.make_unique_name(f"{parameter}_const")
            var = Builder.const(val=given, name=name, before_op=get_first_op(self.block))
            self._record_op(var.op)
            self._consts[key] = var
        return self._consts[key]

    def adopt_scopes(self, scopes: Any) -> list[Operation]:
        """Assign the scopes of replaced ops to the ops made since the last call, and to the consts that pymil made for
        their inputs."""
        built, self.created_ops = self.created_ops, []
        for op in built:
            for new in [op, *(var.op for var in op.get_flattened_inputs() if var.op is not None)]:
                if scopes and set(new.scopes) <= {ScopeSource.COREMLTOOLS_GRAPH_PASS}:
                    new.scopes = add_graph_pass_scope(scopes, new.scopes)
        return built


def rebuild_op(mb: RewriteBuilder, op: Operation, **changes: Any) -> Var:
    """Build a copy of `op` with the inputs `changes` replaced; a change to None omits the input."""
    passed = {name: var for name, var in op.inputs.items() if name in changes or not _is_mismatched_default(op, name)}
    inputs = {**passed, **changes}  # in the order of the op, which is the order in which consts are made
    bias = inputs.get("bias")
    # pymil's conv_transpose reads the value of the bias to infer its type, and a compressed bias has no value.
    attach_bias_later = op.op_type == "conv_transpose" and bias is not None and bias.val is None
    if attach_bias_later:
        del inputs["bias"]
    result: Var = getattr(mb, op.op_type)(**inputs)
    if attach_bias_later:
        result.op.set_inputs(bias=bias)
    return result


def _is_mismatched_default(op: Operation, name: str) -> bool:
    """Return whether input `name` is a default that pymil filled in as fp32 although x is fp16.

    pymil accepts such a default when it fills it in, but not when the caller passes it.
    """
    var = op.inputs[name]
    return isinstance(var, Var) and var.dtype in (types.fp16, types.fp32) and is_default(op, name) \
        and var.dtype != op.outputs[0].dtype


def _mask_whole_axes(inputs: dict[str, Any]) -> dict[str, Any]:
    """Mask the begins of symbolic axes that a slice keeps whole: coremltools then infers the symbol of its operand.

    With a begin of 0 it makes a new symbol, and ops that need equal sizes cannot be read from a file. `inputs` are
    those of a slice_by_index; begins and masks that are no plain lists stay as they are.
    """
    x, begins, ends = inputs["x"], inputs.get("begin"), inputs.get("end_mask")
    if not isinstance(begins, list) or not isinstance(ends, list) or not any(map(is_symbolic, x.shape)):
        return inputs
    strides, masks = (
        [default] * x.rank if (given := inputs.get(name)) is None else given
        for name, default in (("stride", 1), ("begin_mask", False)))
    whole = [is_symbolic(size) and begin == 0 and end and stride == 1
             for size, begin, end, stride in zip(x.shape, begins, ends, strides)]
    return {**inputs, "begin_mask": [bool(a or b) for a, b in zip(masks, whole)]} if any(whole) else inputs


def _find_next_op(op: Operation) -> Operation | None:
    following = op.enclosing_block.operations._get_node_from_op(op).next
    return None if following is None else following.op


def _is_in_program(built: Any) -> bool:
    """Return whether a result made earlier is still in the program: ops that lost their last user were removed."""
    built = built if isinstance(built, (list, tuple)) else [built]
    return all(isinstance(var, Var) and var.op.enclosing_block is not None for var in built)


def _has_negative_indices(parameter: str, given: Any) -> bool:
    """Return whether `begin` or `end` has indices counted from the back.

    coremltools normalizes negative indices in place, in the array passed to it. The const must not be shared then,
    because another op may use it to slice a longer axis.
    """
    return parameter in ("begin", "end") and isinstance(given, (list, tuple, np.ndarray)) and bool(
        np.any(np.asarray(given) < 0))


def _make_const_key(given: Any) -> Any:
    """Return a key under which equal plain values share a const.

    Returns None for vars, long arrays and anything else that is not a plain value.
    """
    if isinstance(given, (Var, mil_list)) or given is None:
        return None
    if isinstance(given, str):
        return ("str", given)
    if isinstance(given, (list, tuple)) and (not given or not all(isinstance(item, (int, float)) for item in given)):
        return None
    if not isinstance(given, (bool, int, float, list, tuple, np.ndarray, np.generic)):
        return None
    array = np.asarray(given)
    if array.size > _MAX_SHARED_ELEMENTS or array.dtype.kind not in "bifu":
        return None
    return (type(given) in (bool, int, float), array.dtype.str, array.shape, array.tobytes())
