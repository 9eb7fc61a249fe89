"""Memory limits of a run: values of static shape are checked before anything runs, the others before each op runs.

The limit applies to the sum of the live values. A failed allocation cannot be relied on, because many systems promise
more memory than they have and kill the process that uses it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from coremltools.converters.mil.mil import types

from ..ir.printer import format_dimension
from ..ir.query import get_type_info
from ..utils.budget import get_current_budget
from ..utils.errors import MemoryLimitReached
from ..utils.option_spelling import format_option_values
from ..utils.text_format import format_count

if TYPE_CHECKING:
    from .prepared_function import PreparedFunction

__all__ = [
    "LiveValues",
    "estimate_result_bytes",
    "is_out_of_memory",
    "most_kept",
    "refuse_allocation",
    "refuse_excessive_peak",
    "refuse_oversized_values",
]

#: bytes of the widest element, float64 or int64: an upper bound, since the dtype is not read
_ELEMENT_BYTES = 8
_MAX_MEMORY_SHARE = 0.5
"""The fraction of the machine's memory that values may use. The other half is for the weights, for the working memory
of kernels (a convolution copies its input to another layout), and for other processes.
"""
_KEPT_PART = 0.25
"""The fraction of the machine's memory for cached weights; other weights are read from their files in each run.

Half of the memory that `_MAX_MEMORY_SHARE` leaves, since kernels and other processes need the rest.
"""
_MAX_UNCOUNTED_BYTES = 1 << 12
"Values of at most this many bytes are not counted: a thousand of them are 4 MB, and counting costs time in loops."
_OUT_OF_MEMORY_PATTERN = re.compile(r"can't allocate memory|not enough memory|Unable to allocate|you tried to allocate")
_REQUESTED_BYTES_PATTERN = re.compile(r"you tried to allocate (\d+) bytes")
_REMEDY = "expected a smaller input or fewer values at once; a machine or a limit (ulimit -v) with more memory"
#: ops whose result shares the memory of their operand `x`
_ALIASING_OPS = frozenset({"reshape", "squeeze", "expand_dims", "identity"})


def refuse_oversized_values(ops: Iterable[Any]) -> None:
    """Raise MemoryLimitReached if an op makes a value that needs more than half of the memory.

    A symbolic dimension counts as 1.
    """
    most = _MAX_MEMORY_SHARE * _get_allowed_bytes()
    for op in ops:
        for var in filter(_is_tensor, op.outputs):
            nbytes = _ELEMENT_BYTES * _count_elements(var.sym_type)
            if nbytes > most:
                raise MemoryLimitReached(
                    f"value {var.name!r} of shape ({', '.join(map(format_dimension, var.sym_type.get_shape()))}) takes "
                    f"{_format_bytes(nbytes)}; the reference runtime holds at most {_format_bytes(most)} for one value "
                    f"{_describe_limit()}"
                )


def refuse_excessive_peak(prepared: PreparedFunction, block: Any) -> None:
    """Raise MemoryLimitReached if the values alive at one op of `block` exceed the limit; a symbolic size counts as 1.
    """
    peak, op = _find_peak(prepared, block)
    most = _get_byte_limit()
    if peak > most:
        raise MemoryLimitReached(
            _format_limit_message(op, f"the values that are alive here take {_format_bytes(peak)}", most)
        )


def _find_peak(prepared: PreparedFunction, block: Any) -> tuple[int, Any]:
    """Return the largest number of bytes that the values of `block` use at once, and the op at which they do.

    Values of nested blocks are included.
    """
    steps = prepared.steps[block]
    owner: dict[int, int] = {}  # by variable: the variable whose memory it shares
    held: dict[int, int] = {}  # by owner: the size in bytes
    users: dict[int, int] = {}
    total, peak, where = 0, 0, None

    def hold_value(var: Any, memory_of: int | None) -> int:
        key = memory_of if memory_of in held else id(var)
        owner[id(var)] = key
        users[key] = users.get(key, 0) + 1
        held.setdefault(key, 0 if key != id(var) else _count_static_bytes(prepared, var))
        return held[key] if key == id(var) else 0

    for var in steps.inputs:
        total += hold_value(var, None)
    for op, finished in steps.ops:
        source = prepared.get_inputs(op).get("x") if op.op_type in _ALIASING_OPS else None
        total += sum(hold_value(var, owner.get(id(source))) for var in op.outputs)
        inner = max((_find_peak(prepared, each)[0] for each in op.blocks), default=0)
        if total + inner > peak:
            peak, where = total + inner, op
        for key in (owner.pop(each) for each in finished if each in owner):
            users[key] -= 1
            if not users[key]:
                total -= held.pop(key)
    return peak, where


class LiveValues:
    """The bytes of the values that a run holds at once; memory that values share counts once."""

    def __init__(self) -> None:
        self.most = _get_byte_limit()
        self.bytes = 0
        self._memory: dict[int, int] = {}  # by variable: the address of its memory
        self._held: dict[int, list[int]] = {}  # by address: the bytes, and the number of variables that share them

    def add_value(self, key: int, value: Any) -> None:
        """Count `value`, which becomes the value of the variable `key`."""
        if key in self._memory:
            self.drop_value(key)
        nbytes = getattr(value, "nbytes", 0)
        if nbytes <= _MAX_UNCOUNTED_BYTES:
            return
        place = value.untyped_storage().data_ptr() if hasattr(value, "untyped_storage") else id(value)
        self._memory[key] = place
        if place in self._held:
            self._held[place][1] += 1
        else:
            self._held[place] = [nbytes, 1]
            self.bytes += nbytes

    def drop_value(self, key: int) -> None:
        """Stop counting the value of the variable `key`."""
        place = self._memory.pop(key, None)
        if place is None:
            return
        held = self._held[place]
        held[1] -= 1
        if not held[1]:
            self.bytes -= self._held.pop(place)[0]

    def require_room(self, op: Any, nbytes: int) -> None:
        """Raise MemoryLimitReached if the live values and `nbytes` more, which `op` needs, exceed the limit.

        `nbytes` 0 checks the live values alone.
        """
        if self.bytes + nbytes > self.most:
            held = f"{_format_bytes(self.bytes)} of values still needed"
            what = f"makes {_format_bytes(nbytes)} in addition to {held}" if nbytes else f"there are {held} after it"
            raise MemoryLimitReached(_format_limit_message(op, what, self.most))


def estimate_result_bytes(prepared: PreparedFunction, op: Any, inputs: Any) -> int:
    """Estimate the bytes of the results of `op`.

    Uses the result shapes, or else the operands that determine them; returns 0 if neither is known.
    """
    known = prepared.count_result_bytes(op)
    if known is not None:
        return known
    sizes = _RESULT_SHAPES.get(op.op_type)
    return 0 if sizes is None else math.prod(sizes(inputs)) * prepared.precision.compute.itemsize


def _get_operand_shape(inputs: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an operand, without converting the operand to the computing dtype."""
    stored = inputs.machine.env.get(id(inputs.var(name)))
    return tuple((inputs[name] if stored is None else stored).shape)


def _infer_broadcast_shape(inputs: Any) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(_get_operand_shape(inputs, "x"), _get_operand_shape(inputs, "y"))
    except ValueError:  # the kernel reports the mismatch
        return (0,)


def _infer_matmul_shape(inputs: Any) -> tuple[int, ...]:
    x, y = _get_operand_shape(inputs, "x"), _get_operand_shape(inputs, "y")
    if min(len(x), len(y)) < 2:
        return x[:-1] or y[-1:]
    rows, columns = x[-1 if inputs.value("transpose_x") else -2], y[-2 if inputs.value("transpose_y") else -1]
    try:
        return (*np.broadcast_shapes(x[:-2], y[:-2]), rows, columns)
    except ValueError:  # the kernel reports the mismatch
        return (0,)


def _infer_tile_shape(inputs: Any) -> list[int]:
    return [size * int(count) for size, count in zip(_get_operand_shape(inputs, "x"), inputs.values("reps"))]


def _infer_range_shape(inputs: Any) -> list[int]:
    start, end, step = (float(inputs.value(name)) for name in ("start", "end", "step"))
    return [max(0, math.ceil((end - start) / step))] if step and math.isfinite(end - start) else []


def _infer_one_hot_shape(inputs: Any) -> list[int]:
    return [*_get_operand_shape(inputs, "indices"), int(inputs.value("one_hot_vector_size"))]


def _infer_pad_shape(inputs: Any) -> list[int]:
    sizes, pads = list(_get_operand_shape(inputs, "x")), [int(each) for each in inputs.values("pad")]
    axes = range(len(sizes) - len(pads) // 2, len(sizes))
    return [size + sum(pads[2 * (axis - axes[0]):][:2]) if axis in axes else size for axis, size in enumerate(sizes)]


#: the result shape of ops whose operands contain sizes: an operand of a few bytes may request any amount of memory
_RESULT_SHAPES: dict[str, Any] = {
    "fill": lambda inputs: [int(each) for each in inputs.values("shape")],
    "matmul": _infer_matmul_shape,
    "tile": _infer_tile_shape,
    "range_1d": _infer_range_shape,
    "one_hot": _infer_one_hot_shape,
    "pad": _infer_pad_shape,
    **dict.fromkeys(
        ("random_normal", "random_uniform", "random_bernoulli"),
        lambda inputs: [int(each) for each in inputs.values("shape")],
    ),
    **dict.fromkeys(
        ("add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "greater", "less", "equal"),
        _infer_broadcast_shape,
    ),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports a failed allocation; torch reports one with a RuntimeError."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY_PATTERN.search(str(error)) is not None


def refuse_allocation(op: Any, error: BaseException, live: LiveValues) -> NoReturn:
    """Raise MemoryLimitReached because the system did not provide the memory that `op` needs."""
    requested = _REQUESTED_BYTES_PATTERN.search(str(error))
    amount = f"{_format_bytes(int(requested[1]))} more" if requested else "as much memory as it needs"
    raise MemoryLimitReached(
        f"{_describe_op(op)}: the system does not provide {amount}, in addition to {_format_bytes(live.bytes)} of "
        f"values that are still needed; {_REMEDY}"
    ) from error


def _format_limit_message(op: Any, what: str, most: float) -> str:
    return (
        f"{_describe_op(op)}: {what}; the reference runtime holds at most {_format_bytes(most)} of values at once "
        f"{_describe_limit()}; {_REMEDY}"
    )


def _describe_limit() -> str:
    """Describe the origin of the limit: the machine, or the option `max_memory`."""
    most = get_current_budget().max_bytes
    return "on this machine" if most is None else f"with {format_option_values('max_memory', _format_bytes(most))}"


def _describe_op(op: Any) -> str:
    return f"{op.op_type} '{op.outputs[0].name if op.outputs else op.name}'"


def _format_bytes(nbytes: float) -> str:
    if nbytes < 1e5:
        return format_count(int(nbytes), "byte")
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _count_static_bytes(prepared: PreparedFunction, var: Any) -> int:
    """Count the bytes of `var` in its stored form; a symbolic dimension counts as 1."""
    if not get_type_info(var).is_tensor:
        return 0
    return int(prepared.precision.storage(prepared.dtypes[var]).itemsize) * _count_elements(var.sym_type)


def _is_tensor(var: Any) -> bool:
    return get_type_info(var).is_tensor


@lru_cache(maxsize=1 << 16)
def _count_elements(sym_type: Any) -> int:
    if not types.is_tensor(sym_type):
        return 1
    return math.prod(size for size in sym_type.get_shape() if isinstance(size, int))


def _get_byte_limit() -> float:
    """Return the bytes that values may use: a fraction of the machine's memory, and at most the free address space."""
    return min(_MAX_MEMORY_SHARE * _get_allowed_bytes(), _get_free_address_space())


def most_kept() -> float:
    """Return the bytes of weights that may be cached from one run to the next.

    At most half of the free address space, since values need memory, too.
    """
    return min(_KEPT_PART * _get_allowed_bytes(), _get_free_address_space() / 2)


def _get_allowed_bytes() -> float:
    """Return the bytes that runs may use: the machine's memory, or the smaller limit that the user set."""
    most = get_current_budget().max_bytes
    return _get_machine_bytes() if most is None else min(most, _get_machine_bytes())


@cache
def _get_machine_bytes() -> int:
    """Return the bytes of memory of the machine, or of the container in which the process runs."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        found = 1 << 36
    try:
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # not in a container, or in one without a limit ("max")
        return found


def _get_free_address_space() -> float:
    """Return the bytes that `ulimit -v` leaves to the process; infinite without such a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        used = 0
    return max(0, limit - used)
