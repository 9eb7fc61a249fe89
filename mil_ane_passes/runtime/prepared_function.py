"""Prepared functions: data that a runtime computes once for all calls of a program.

These are liveness, connections, defaults and constants. They are computed before the first op runs: small long-lived
allocations between large short-lived ones would fragment the heap, and the C library could neither join nor return the
memory freed around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from coremltools.converters.mil.mil import types

from ..ir.constants import LazyValue
from ..ir.coremltools_internals import get_input_vars, get_typed_value
from ..ir.query import get_type_info, iterate_nested_ops
from ..utils.mapped_files import MappedFile, check_mapped_files, file_of
from .memory_limits import most_kept
from .numeric import Precision, is_tensor_value

__all__ = ["BlockSteps", "PreparedFunction", "is_lazy"]

#: Constants of at most this many bytes in the computing dtype are converted at the start and kept. Parameters and most
#: biases are smaller, and a thousand of them need at most 4 MB.
_MAX_EAGER_BYTES = 1 << 12
#: Bytes of larger constants that are kept from one call to the next; others are converted at each use. 1 GB holds the
#: weights of usual models and leaves memory for values.
_CACHE_BYTES = 1 << 30


class BlockSteps(NamedTuple):
    """The execution plan of one block. Variables are identified by `id`."""

    inputs: list[Any]
    #: inputs that no op reads
    unread_inputs: list[int]
    #: each op that computes, with the block's own variables that no later op reads
    ops: list[tuple[Any, list[int]]]
    #: the block's own variables that are outputs of the block
    left: list[int]


def is_lazy(op: Any) -> bool:
    """Return whether `op` is a constant or compressed constant, whose value is computed when it is used: weights may
    be memory mapped."""
    return op is not None and (op.op_type == "const" or op.op_type.startswith("constexpr_"))


class _Layout:
    """The part of a prepared function that does not depend on the precision: its ops, their operands, and the steps."""

    def __init__(self, block: Any) -> None:
        self.ops: list[Any] = list(iterate_nested_ops(block))
        self.inputs: dict[Any, Mapping[str, Any]] = {op: op.inputs for op in self.ops}
        #: the bound inputs of each op, which are faster to compare than `inputs`
        self.bound = {op: dict(get_input_vars(op)) for op in self.ops if op.op_type != "const"}
        blocks = [block, *(inner for op in self.ops for inner in op.blocks)]
        self.outputs = {each: list(each.outputs) for each in blocks}
        self.steps: dict[Any, BlockSteps] = {each: self._plan_block(each) for each in blocks}
        self._chained: dict[Any, list[tuple[Any, list[int]]]] = {}
        #: the declared builtin type of each tensor variable; None for a list
        self.dtypes: dict[Any, Any] = {var: _get_dtype(var) for op in self.ops for var in op.outputs}
        self.dtypes |= {var: _get_dtype(var) for steps in self.steps.values() for var in steps.inputs}

    def _plan_block(self, block: Any) -> BlockSteps:
        inputs = list(block.inputs.values()) if isinstance(block.inputs, Mapping) else list(block.inputs)
        ops = [op for op in block.operations if not is_lazy(op)]
        own = dict.fromkeys(map(id, inputs), -1)
        for index, op in enumerate(ops):
            for var in self._iterate_operands(op):
                if id(var) in own:
                    own[id(var)] = index
            own.update(dict.fromkeys(map(id, op.outputs), index))
        left = {id(var) for var in block.outputs} & own.keys()
        finished: list[list[int]] = [[] for _ in range(len(ops) + 1)]
        for key in own.keys() - left:
            finished[own[key]].append(key)
        return BlockSteps(inputs, finished[-1], list(zip(ops, finished)), list(left))

    def get_chained_ops(self, block: Any) -> list[tuple[Any, list[int]]]:
        """Return the ops of a block as in `steps`, with the ops of each attention replaced by one `ChainStep`."""
        from .attention_chains import plan_chains

        if block not in self._chained:
            steps = self.steps[block].ops
            operands = {op: tuple(self._iterate_operands(op)) for op, _ in steps}
            self._chained[block] = plan_chains(steps, operands, block.outputs)
        return self._chained[block]

    def _iterate_operands(self, op: Any) -> Iterable[Any]:
        """Yield all variables that an op reads, including those read inside its nested blocks."""
        for operand in self.inputs[op].values():
            yield from operand if isinstance(operand, (list, tuple)) else (operand,)
        for block in op.blocks:
            yield from block.outputs
            for inner in block.operations:
                yield from self._iterate_operands(inner)


class PreparedFunction:
    """The prepared form of one function, `block`, run at `precision`.

    `like` is the prepared form of the same function at another precision. The two share the layout, and constants that
    both use in the same form.
    """

    _layout: _Layout
    _defaults: dict[Any, dict[str, Any]]
    constants: _ConstantCache

    def __init__(
        self, block: Any, precision: Precision, *, keeps_constants: bool = False,
        like: PreparedFunction | None = None,
    ) -> None:
        self.precision = precision
        self._block = block
        self._layout = layout = _Layout(block) if like is None else like._layout
        self._ops, self._inputs = layout.ops, layout.inputs
        self.steps, self.dtypes = layout.steps, layout.dtypes
        is_like = like is not None and precision.has_constants_of(like.precision)
        self._defaults = like._defaults if like is not None and is_like else {
            op: self._collect_defaults(op) for op in self._ops if op.op_type != "const"}
        self.constants = _ConstantCache(precision, self._list_constants(), keeps_constants,
                                        None if like is None else like.constants, is_like)
        self._result_bytes = {op: self._count_bytes(op) for op in self._defaults}
        #: constant parameters as plain Python values, for those that an op has read as such
        self.parameters: dict[Any, Any] = {}
        #: results that kernels derived from an op and the shapes of its operands, by both
        self.memos: dict[Any, Any] = {}

    def _list_constants(self) -> list[Any]:
        return [var for op in self._ops if is_lazy(op) for var in op.outputs]

    def is_current(self) -> bool:
        """Return whether ops, their inputs and the outputs are unchanged. If not, this object must be made again."""
        return (
            self._ops == list(iterate_nested_ops(self._block))
            and all(self._layout.outputs[block] == list(block.outputs) for block in self._layout.outputs)
            and all(get_input_vars(op) == bound for op, bound in self._layout.bound.items())
        )

    def get_chained_ops(self, block: Any) -> list[tuple[Any, list[int]]]:
        """Return the ops of a block as in `steps`, with the ops of each attention replaced by one `ChainStep`."""
        return self._layout.get_chained_ops(block)

    def get_inputs(self, op: Any) -> Mapping[str, Any]:
        """Return the connected inputs of `op` by name; cached, since pymil filters them at each access."""
        return self._inputs[op]

    def count_result_bytes(self, op: Any) -> int | None:
        """Return the bytes of the results of `op` in the dtype in which it is computed; None if a size is dynamic."""
        return self._result_bytes[op]

    def _count_bytes(self, op: Any) -> int | None:
        total = 0
        for var in op.outputs:
            kind = get_type_info(var)
            if not kind.is_tensor or self.dtypes[var] is None:
                continue
            if kind.shape is None:
                return None
            total += math.prod(kind.shape) * self._computed_itemsize(self.dtypes[var])
        return total

    def _computed_itemsize(self, dtype: Any) -> int:
        return int((self.precision.compute if types.is_float(dtype) else self.precision.storage(dtype)).itemsize)

    def get_default(self, op: Any, name: str) -> Any:
        """Return the default of an input that is not connected, in the form kernels expect, or None."""
        return self._defaults[op].get(name)

    def _collect_defaults(self, op: Any) -> dict[str, Any]:
        """Collect the defaults of the inputs of `op` that are not connected.

        Cached, since op classes build their defaults at each call, some from the ranks of other inputs.
        """
        operand = self._inputs[op]
        return {name: self._make_default(value) for name, value in op.default_inputs().items() if name not in operand}

    def _make_default(self, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        return self.precision.tensor(list(value) if isinstance(value, range) else value)


class _ConstantCache:
    """The constant operands of a function, in the form that kernels expect.

    Constants that share the program's memory are always kept, since they need no memory of their own, and so are small
    ones. A weight that the package stores in the computing dtype is read from its file at its first use and kept, up to
    `most_kept` bytes; pages of the mapping would need the same memory. All other constants are converted when an op
    reads them and freed afterwards. From the second call on, they are kept, up to `_CACHE_BYTES`; with `keeps`, from
    their first use on. Constants that `source` has in the same form are taken from there.
    """

    def __init__(
        self, precision: Precision, made: Iterable[Any], keeps: bool = False, source: _ConstantCache | None = None,
        has_floats: bool = False,
    ) -> None:
        self._precision = precision
        self._source, self._keeps, self._has_floats = source, keeps, has_floats
        self._kept: dict[Any, Any] = {}
        #: constants to read from a file at their first use, and then keep
        self._unread: dict[Any, Any] = {}
        self._entered: set[Any] = set()
        #: the other constants, and whether they were read
        self._large: dict[Any, bool] = {}
        self._unread_free = most_kept()
        self._free = min(_CACHE_BYTES, self._unread_free)
        self._files: dict[MappedFile, None] = {}
        for var in made:
            if not self._is_in_source(var):
                # A packed value is unpacked only when it is used, and the unpacked elements are not kept.
                is_packed = isinstance(get_typed_value(var), LazyValue)
                self._add_constant(var, var.val if var.op.op_type == "const" and not is_packed else None)

    def _add_constant(self, var: Any, value: Any) -> None:
        if value is None:
            self._large[var] = False
            return
        if not is_tensor_value(value):
            self._kept[var] = value
            return
        array = np.asarray(value)
        size = self._precision.nbytes(array)
        file = None if array.flags.owndata else file_of(array)
        if file is not None:
            self._files[file] = None
        elif size <= _MAX_EAGER_BYTES:
            self._kept[var] = self._precision.make_small_constant(array)
            return
        if size > _MAX_EAGER_BYTES and self._precision.is_read_once(value) and size <= self._unread_free:
            self._unread[var] = value
            self._unread_free -= size
        elif file is None and (shared := self._precision.shared(value)) is not None:
            self._kept[var] = shared
        elif size <= _MAX_EAGER_BYTES:
            self._kept[var] = self._precision.constant(value)
        else:
            self._large[var] = False

    def check_files(self) -> None:
        """Raise AnePassesError if a file with constants was modified."""
        check_mapped_files(self._files)
        if self._source is not None:
            self._source.check_files()

    def is_converted(self, var: Any) -> bool:
        """Return whether the constant `var` is converted at each use."""
        return var in self._large

    def has_constant(self, var: Any) -> bool:
        """Return whether `var` is kept here in a form that a runtime of any precision can read.

        Compressed constants are excluded: they are rounded to the dtypes of one precision.
        """
        return var.op.op_type == "const" and (var in self._kept or var in self._unread)

    def _is_in_source(self, var: Any) -> bool:
        """Return whether `source` has the constant in the form of this precision: integers have the same at each."""
        return self._source is not None and self._source.has_constant(var) and (
            self._has_floats or not types.is_float(get_type_info(var).dtype))

    def read_ahead(self, block: Any) -> None:
        """Read the constants that the ops of `block` use and that are kept, before the first of its ops runs.

        If they were read between ops, each would take a piece of the memory that the values before it have left, and
        the next large value would need new memory: a process grew by up to 100 MB more.
        """
        if block in self._entered or not self._unread:
            return
        self._entered.add(block)
        for var in [each for each in self._unread if any(op.enclosing_block is block for op in each.child_ops)]:
            self._read(var)

    def _read(self, var: Any) -> None:
        self._kept[var] = self._precision.shared(self._unread.pop(var))

    def get_operand(self, var: Any, make: Callable[..., Any]) -> Any:
        """Return the operand for the constant `var`; if it is not kept, `make(var, passing)` computes it."""
        kept = self._kept.get(var)
        if kept is not None:
            return kept
        if var in self._unread:
            self._read(var)
        if var in self._kept:
            return self._kept[var]
        if self._source is not None and self._is_in_source(var):
            return self._source.get_operand(var, make)
        if var in self._large:
            self._large[var] = True
            if self._keeps and self._least_bytes(var) <= self._free:
                del self._large[var]
                return self._keep_value(var, make(var))
        return make(var, True)

    def _keep_value(self, var: Any, value: Any) -> Any:
        """Keep the value of a constant if there is room; returns it."""
        size = value.nbytes if isinstance(value, torch.Tensor) else 0
        if size <= self._free:
            self._kept[var] = value
            self._free -= size
        return value

    def cache_read_constants(self, make: Callable[[Any], Any]) -> None:
        """Make the constants that earlier calls have read, and keep them while there is room."""
        for var in [each for each, was_read in self._large.items() if was_read]:
            del self._large[var]
            if self._least_bytes(var) > self._free:
                continue
            self._keep_value(var, make(var))

    def _least_bytes(self, var: Any) -> int:
        """Return a lower bound on the bytes of `var` from its type, to avoid computing a value that cannot be kept."""
        if not types.is_tensor(var.sym_type) or not types.is_float(var.dtype):
            return 0
        known = (size for size in var.sym_type.get_shape() if isinstance(size, int))
        return math.prod(known) * int(self._precision.compute.itemsize)


def _get_dtype(var: Any) -> Any:
    return _get_cached_dtype(var.sym_type)


@lru_cache(maxsize=1 << 16)
def _get_cached_dtype(sym_type: Any) -> Any:
    """Return the dtype of a type, None for a list. It is cached because pymil derives it again on each access."""
    if types.is_list(sym_type):
        return None
    inner = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    return inner.get_primitive() if types.is_tensor(inner) else inner
