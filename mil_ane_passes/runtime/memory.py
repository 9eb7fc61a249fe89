"""What a run may hold in memory at once: refused before anything runs as far as shapes say, else before the op runs.

The bound is on the sum of the values that are alive, since many systems promise memory that they do not have and end
the process that uses it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from coremltools.converters.mil.mil import types

from ..core.errors import LimitReached
from ..core.printer import size_text

if TYPE_CHECKING:
    from .prepared import Prepared

__all__ = ["LiveValues", "expected_bytes", "is_out_of_memory", "most_kept", "refuse_allocation", "refuse_giants",
           "refuse_peak"]

_ELEMENT_BYTES = 8
_PART = 0.5
"""The part of the machine's memory that values may take: the rest is for the weights, for what kernels need besides
(a convolution lays its input out anew), and for other processes."""
_KEPT_PART = 0.25
"The part of the machine's memory that weights which were read from files may take; a run reads what is beyond anew."
_SMALL = 1 << 12
"Bytes up to which a value is not counted: a thousand of these do not matter, and counting costs time in loops."
_NO_ROOM = re.compile(r"can't allocate memory|not enough memory|Unable to allocate|you tried to allocate")
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
_REMEDY = "expected a smaller input or fewer values at once; a machine or a limit (ulimit -v) with more memory"
#: ops whose result is the memory of their operand `x`
_ALIASES = frozenset({"reshape", "squeeze", "expand_dims", "identity"})


def refuse_giants(ops: Iterable[Any]) -> None:
    """LimitReached when an op makes a value, as far as its shape is known, that half of the memory cannot hold."""
    most = _PART * _machine_bytes()
    for op in ops:
        for var in op.outputs:
            nbytes = _ELEMENT_BYTES * _elements(var.sym_type)
            if nbytes > most:
                raise LimitReached(
                    f"value {var.name!r} of shape ({', '.join(map(size_text, var.sym_type.get_shape()))}) takes "
                    f"{nbytes / 1e9:.0f} GB; the reference runtime holds at most {most / 1e9:.0f} GB for one value "
                    "on this machine"
                )


def refuse_peak(prepared: Prepared, block: Any) -> None:
    """LimitReached when the values that are alive at one op of `block`, as far as shapes are known, are too many."""
    peak, op = _peak(prepared, block)
    most = _most_bytes()
    if peak > most:
        raise LimitReached(_words(op, f"the values that are alive here take {_gigabytes(peak)}", most))


def _peak(prepared: Prepared, block: Any) -> tuple[int, Any]:
    """The most bytes that values of `block` take at once, blocks in it included, and the op where they do."""
    steps = prepared.steps[block]
    owner: dict[int, int] = {}  # by variable: the one whose memory it has
    held: dict[int, int] = {}  # by owner: its bytes
    users: dict[int, int] = {}
    total, peak, where = 0, 0, None

    def hold(var: Any, memory_of: int | None) -> int:
        key = memory_of if memory_of in held else id(var)
        owner[id(var)] = key
        users[key] = users.get(key, 0) + 1
        held.setdefault(key, 0 if key != id(var) else _static_bytes(prepared, var))
        return held[key] if key == id(var) else 0

    for var in steps.inputs:
        total += hold(var, None)
    for op, finished in steps.ops:
        source = prepared.inputs(op).get("x") if op.op_type in _ALIASES else None
        total += sum(hold(var, owner.get(id(source))) for var in op.outputs)
        inner = max((_peak(prepared, each)[0] for each in op.blocks), default=0)
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
        self.most = _most_bytes()
        self.bytes = 0
        self._memory: dict[int, int] = {}  # by variable: where its memory is
        self._held: dict[int, list[int]] = {}  # by place: bytes, and how many variables have them

    def add(self, key: int, value: Any) -> None:
        """Count `value`, which the variable `key` is from now on."""
        if key in self._memory:
            self.drop(key)
        nbytes = getattr(value, "nbytes", 0)
        if nbytes <= _SMALL:
            return
        place = value.untyped_storage().data_ptr() if hasattr(value, "untyped_storage") else id(value)
        self._memory[key] = place
        if place in self._held:
            self._held[place][1] += 1
        else:
            self._held[place] = [nbytes, 1]
            self.bytes += nbytes

    def drop(self, key: int) -> None:
        """Count the value of the variable `key` no longer."""
        place = self._memory.pop(key, None)
        if place is None:
            return
        held = self._held[place]
        held[1] -= 1
        if not held[1]:
            self.bytes -= self._held.pop(place)[0]

    def require(self, op: Any, nbytes: int) -> None:
        """LimitReached when `op` makes values of `nbytes`, and these are too many beside those that are alive."""
        if nbytes and self.bytes + nbytes > self.most:
            raise LimitReached(_words(op, f"makes {_gigabytes(nbytes)} beside {_gigabytes(self.bytes)} of values that "
                                          "are still needed", self.most))


def expected_bytes(prepared: Prepared, op: Any, inputs: Any) -> int:
    """The bytes of what `op` makes: by its shapes, else by the operands that say how large its result is; else 0."""
    known = prepared.made_bytes(op)
    if known is not None:
        return known
    sizes = _SIZES.get(op.op_type)
    return 0 if sizes is None else math.prod(sizes(inputs)) * prepared.precision.compute.itemsize


def _shape(inputs: Any, name: str) -> tuple[int, ...]:
    """The shape of an operand, which is not brought into the computing dtype for that."""
    stored = inputs.machine.env.get(id(inputs.var(name)))
    return tuple((inputs[name] if stored is None else stored).shape)


def _broadcast(inputs: Any) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(_shape(inputs, "x"), _shape(inputs, "y"))
    except ValueError:  # the kernel says what does not fit
        return (0,)


def _tiled(inputs: Any) -> list[int]:
    return [size * int(count) for size, count in zip(_shape(inputs, "x"), inputs.values("reps"))]


def _counted(inputs: Any) -> list[int]:
    start, end, step = (float(inputs.value(name)) for name in ("start", "end", "step"))
    return [max(0, math.ceil((end - start) / step))] if step and math.isfinite(end - start) else []


def _classes(inputs: Any) -> list[int]:
    return [*_shape(inputs, "indices"), int(inputs.value("one_hot_vector_size"))]


def _padded(inputs: Any) -> list[int]:
    sizes, pads = list(_shape(inputs, "x")), [int(each) for each in inputs.values("pad")]
    axes = range(len(sizes) - len(pads) // 2, len(sizes))
    return [size + sum(pads[2 * (axis - axes[0]):][:2]) if axis in axes else size for axis, size in enumerate(sizes)]


#: the shape of the result where sizes are values: an op of a few bytes may ask for any amount of memory
_SIZES: dict[str, Any] = {
    "fill": lambda inputs: [int(each) for each in inputs.values("shape")], "tile": _tiled, "range_1d": _counted,
    "one_hot": _classes, "pad": _padded,
    **dict.fromkeys(("random_normal", "random_uniform", "random_bernoulli"),
                    lambda inputs: [int(each) for each in inputs.values("shape")]),
    **dict.fromkeys(("add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "greater", "less", "equal"),
                    _broadcast),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for and not given; torch says so with a RuntimeError."""
    return isinstance(error, MemoryError) or _NO_ROOM.search(str(error)) is not None


def refuse_allocation(op: Any, error: BaseException, live: LiveValues) -> NoReturn:
    """Raises LimitReached: the system did not give the memory that `op` needs."""
    asked = _ASKED.search(str(error))
    amount = f"{_gigabytes(int(asked[1]))} more" if asked else "as much memory as it needs"
    raise LimitReached(f"{_named(op)}: the system does not give {amount}, beside {_gigabytes(live.bytes)} of values "
                       f"that are still needed; {_REMEDY}") from error


def _words(op: Any, what: str, most: float) -> str:
    return (f"{_named(op)}: {what}; the reference runtime holds at most {_gigabytes(most)} of values at once on this "
            f"machine; {_REMEDY}")


def _named(op: Any) -> str:
    return f"{op.op_type} '{op.outputs[0].name if op.outputs else op.name}'"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _static_bytes(prepared: Prepared, var: Any) -> int:
    """The bytes of `var` as it is stored, as far as its shape is known."""
    if not types.is_tensor(var.sym_type):
        return 0
    return int(prepared.precision.storage(prepared.dtypes[var]).itemsize) * _elements(var.sym_type)


def _elements(sym_type: Any) -> int:
    if not types.is_tensor(sym_type):
        return 1
    return math.prod(size for size in sym_type.get_shape() if isinstance(size, int))


def _most_bytes() -> float:
    """The bytes that values may take: a part of the machine's, and no more than the process may still ask for."""
    return min(_PART * _machine_bytes(), _address_space_left())


def most_kept() -> float:
    """The bytes of weights that are kept from one run to the next; half of what a limit leaves: values need some."""
    return min(_KEPT_PART * _machine_bytes(), _address_space_left() / 2)


@cache
def _machine_bytes() -> int:
    """The memory of the machine, or of the container that the process runs in."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        found = 1 << 36
    try:
        return min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return found


def _address_space_left() -> float:
    """What `ulimit -v` leaves to the process, in bytes; infinite where there is no such limit."""
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
