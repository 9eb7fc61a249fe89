"""A random program under construction: seeded choices, a pool of values to build on, and inputs on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, Var, types
from coremltools.converters.mil.mil.program import get_new_symbol
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = ["Draft", "Kind", "RandomProgram", "UnsuitableKind", "generate_program"]

T = TypeVar("T")
Kind = Callable[["Draft"], Any]
_OPSETS = (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18)
_DTYPES = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32, "bool": types.bool, "state": types.fp16}
_MAX_POOL_ELEMENTS = 600
"Elements up to which a value is built upon by further kinds; larger ones make runs slow and show nothing new."


class UnsuitableKind(Exception):
    """A kind of op cannot be made here: of an older opset, or another dtype."""


class _MissingInput(Exception):
    """The function needs another input, which pymil declares before the body."""


@dataclass(frozen=True)
class RandomProgram:
    """A random program: the kinds of op that it was made of, and what they ask of the run."""

    seed: int
    program: Program
    kinds: tuple[str, ...]
    targets: tuple[str, ...]
    feeds: dict[str, Any] | None = None


@dataclass
class Draft:
    """Offers what kinds of op need; each kind adds its results to the pool."""

    random: np.random.Generator
    opset: Any
    dtype: str
    symbolic: bool
    specs: dict[str, tuple[tuple[int | None, ...], str]]
    inputs: dict[str, Var] = field(default_factory=dict)
    pool: list[Var] = field(default_factory=list)
    targets: set[str] = field(default_factory=set)
    scale: float | None = None
    "The deviation of feeds to give, where the kind is about values that are measured."
    requested: int = 0
    _weights: dict[tuple[Any, ...], Var] = field(default_factory=dict)

    # Choices -----------------------------------------------------------------------------------------------------

    def int(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return int(self.random.integers(low, high + 1))

    def ints(self, low: int, high: int, count: int) -> list[int]:
        return [self.int(low, high) for _ in range(count)]

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.int(0, len(choices) - 1)]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    @property
    def np_dtype(self) -> Any:
        return np.float16 if self.dtype == "fp16" else np.float32

    def number(self, value: float) -> Any:
        """A scalar of the program's dtype."""
        return self.np_dtype(value)

    def needs(self, opset: int = 15, dtype: str = "") -> None:
        """Raise Unsuitable unless the program has at least this opset, and this dtype."""
        if self.opset.value < getattr(ct.target, f"iOS{opset}").value or (dtype and self.dtype != dtype):
            raise UnsuitableKind

    # Values ------------------------------------------------------------------------------------------------------

    def input(self, shape: Sequence[int | None], dtype: str = "") -> Var:
        """A new input; the program is built again with it declared."""
        if not shape:  # pymil has no inputs of rank 0
            return mb.squeeze(x=self.input([1], dtype), axes=[0])
        name = f"x{self.requested}"
        self.requested += 1
        if name not in self.specs:
            self.specs[name] = (tuple(shape), dtype or self.dtype)
            raise _MissingInput
        return self.inputs[name]

    def batch(self) -> int | None:
        """An extent of a leading axis, symbolic in a program with a flexible batch."""
        drawn = self.int(1, 3)
        return None if self.symbolic else drawn

    def shape(self, rank: int, low: int = 1, high: int = 6) -> list[int | None]:
        return [self.batch(), *self.ints(low, high, rank - 1)] if rank else []

    def value(self, rank: int | None = None, suits: Callable[[Var], bool] = lambda var: True,
              shape: Sequence[int | None] | None = None) -> Var:
        """A value of the program's float dtype: one of the pool that suits, or a new input of `shape`."""
        found = [var for var in self.pool if var.dtype == _DTYPES[self.dtype] and rank in (None, var.rank)
                 and (shape is None or not self.symbolic or is_symbolic(var.shape[0]) or None not in shape)
                 and _count_elements(var) <= _MAX_POOL_ELEMENTS and suits(var)]
        if found and self.chance(0.8):
            return self.pick(found)
        if shape is None:
            rank = self.int(1, 4) if rank is None else rank
            shape = self.shape(rank)
        made = self.input(shape)
        if not suits(made):
            raise UnsuitableKind
        return made

    def fixed(self, rank: int, low: int = 2, high: int = 6) -> Var:
        """A value whose axes but the first are at least `low` long."""
        return self.value(rank, lambda var: all(int(n) >= low for n in var.shape[1:]), self.shape(rank, low, high))

    def weight(self, *shape: int) -> Var:
        """A constant; half the time one of that shape that is read elsewhere, too."""
        if shape not in self._weights or self.chance(0.5):
            scale = 1 / np.sqrt(max(1, int(np.prod(shape[1:]))))
            self._weights[shape] = mb.const(val=(self.random.standard_normal(shape) * scale).astype(self.np_dtype))
        return self._weights[shape]

    def array(self, *shape: int, scale: float = 1.0) -> Any:
        return (self.random.standard_normal(shape) * scale).astype(self.np_dtype)


def _count_elements(var: Var) -> int:
    return int(np.prod([3 if is_symbolic(extent) else int(extent) for extent in var.shape], initial=1))


def generate_program(seed: int, kinds: dict[str, tuple[float, Kind]]) -> RandomProgram | None:
    """The program of number `seed`; None where pymil rejects what was drawn."""
    specs: dict[str, tuple[tuple[int | None, ...], str]] = {}
    while True:
        try:
            return _build_program(seed, kinds, specs)
        except _MissingInput:
            continue
        except (UnsuitableKind, ValueError, TypeError, NotImplementedError, IndexError, AssertionError, AttributeError):
            return None


def _build_program(
    seed: int, kinds: dict[str, tuple[float, Kind]], specs: dict[str, tuple[tuple[int | None, ...], str]]
) -> RandomProgram:
    mb.name_count.clear()  # so that one seed prints the same names each time
    random = np.random.default_rng(seed)
    draft = Draft(random, _OPSETS[int(random.choice(4, p=[0.1, 0.1, 0.5, 0.3]))],
                  "fp16" if random.random() < 0.85 else "fp32", bool(random.random() < 0.25), specs)
    names, weights = list(kinds), np.array([share for share, _ in kinds.values()])
    wanted = [names[int(at)] for at in random.choice(len(names), int(random.integers(1, 4)), p=weights / weights.sum())]
    symbol = get_new_symbol()
    placeholders = {name: _make_placeholder(shape, dtype, symbol) for name, (shape, dtype) in specs.items()}
    with Function(placeholders, opset_version=draft.opset) as function:
        draft.inputs = dict(function.inputs)
        done = [name for name in wanted if _add_kind(draft, kinds[name][1])]
        if not done:
            raise UnsuitableKind
        function.set_outputs(_select_outputs(draft))
    program = Program()
    program.add_function("main", function)
    return RandomProgram(seed, program, tuple(done), tuple(sorted(draft.targets)), _make_feeds(draft))


def _make_feeds(draft: Draft) -> dict[str, Any] | None:
    """Normal feeds of the deviation that was requested, and the first places for indices."""
    if draft.scale is None:
        return None
    drawn = {}
    for name, (shape, dtype) in draft.specs.items():
        if dtype != "state":
            extents = [extent or 1 for extent in shape]
            values = draft.random.standard_normal(extents) * draft.scale
            drawn[name] = np.zeros(extents, np.int32) if dtype == "int32" else values.astype(draft.np_dtype)
    return drawn


def _make_placeholder(shape: Sequence[int | None], dtype: str, symbol: Any) -> Any:
    extents = [symbol if extent is None else extent for extent in shape]
    make = mb.state_tensor_placeholder if dtype == "state" else mb.placeholder
    return make(shape=extents, dtype=_DTYPES[dtype])


def _add_kind(draft: Draft, kind: Kind) -> bool:
    """Whether the kind could be added; its results join the pool."""
    try:
        made = kind(draft)
    except UnsuitableKind:
        return False
    draft.pool += made if isinstance(made, (list, tuple)) else [made]
    return True


def _select_outputs(draft: Draft) -> list[Var]:
    """Every value of the pool that nothing reads, and sometimes one that something reads; inputs as copies."""
    loose = [var for var in draft.pool if not var.child_ops]
    others = [var for var in draft.pool if var.child_ops and var.op is not None]
    if others and draft.chance(0.3):
        loose.append(draft.pick(others))
    outputs = []
    for var in dict.fromkeys(loose):
        if var.op is None or var.val is not None:
            var = mb.identity(x=var)
        outputs.append(mb.cast(x=var, dtype="int32") if var.dtype == types.bool else var)
    return outputs
