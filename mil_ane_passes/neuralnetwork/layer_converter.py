"""Conversion of NeuralNetwork layers to MIL ops: the values by name, and the registry of one function per layer kind.

Values are MIL vars. In a network of exact array mapping a var has the shape of its value. In the classic mapping, in
which every value has the five axes sequence, batch, channel, height and width, a var has four: [N, C, H, W], where N
is the sequence (recurrent layers) or the batch; a fixed description never has both.

Source of the layers' semantics: the comments of NeuralNetwork.proto, format version 9.0 of coremltools (BSD-3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..utils.errors import InputError
from ..utils.text_format import escape_text
from .weights import WeightReader

__all__ = [
    "BUILDER_ERRORS",
    "CONVERTERS",
    "MIN_EPSILON",
    "LayerContext",
    "cast",
    "find_reshaped",
    "format_cause",
    "get_layer_kind",
    "keep_rank",
    "read_indices",
    "refuse",
    "register_layer",
    "reshape_leading",
    "to_index",
]

MIN_EPSILON = 1e-38
"The smallest epsilon that is not a denormal in fp32."
MAX_GENERATED_ELEMENTS = 2**26
"Maximum elements of a value that a layer declares without an input of that size: 256 MiB in fp32."

BUILDER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, ArithmeticError,
                  AssertionError, RuntimeError, MemoryError)
"What coremltools' builder and passes raise for shapes, types and values that they do not accept."
_MAX_CAUSE_CHARACTERS = 400

LayerFunction = Callable[[Any, "LayerContext"], "Var | Sequence[Var] | None"]

CONVERTERS: dict[str, LayerFunction] = {}
"""One function per layer kind (the name of its field in the proto), which returns the vars of the layer's outputs."""


def register_layer(*kinds: str) -> Callable[[LayerFunction], LayerFunction]:
    """Register the decorated function for layers of these kinds."""

    def register_function(function: LayerFunction) -> LayerFunction:
        for kind in kinds:
            if kind in CONVERTERS:
                raise ValueError(f"layer kind '{kind}' has two converters")
            CONVERTERS[kind] = function
        return function

    return register_function


def get_layer_kind(layer: Any) -> str:
    """Return the name of the field that is set in the layer's `oneof`; empty for a layer without one."""
    return layer.WhichOneof("layer") or ""


def refuse(layer: Any, found: str, advice: str) -> InputError:
    """Make the error for a layer that cannot be converted; the caller raises it."""
    return InputError(f"layer '{escape_text(layer.name)}' ({get_layer_kind(layer)}): {found}; {advice}")


def format_cause(error: BaseException) -> str:
    """Format an error of coremltools on one line."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    text = " ".join(str(error).split()) or type(error).__name__
    return escape_text(text if len(text) <= _MAX_CAUSE_CHARACTERS else f"{text[:_MAX_CAUSE_CHARACTERS]}...")


@dataclass
class LayerContext:
    """The values converted so far, and what a layer function needs besides its layer.

    `classic` says which array mapping the network has; `opset` is the deployment target. `convert_layers` converts
    layers of a nested network with this context; `nested` lists the kinds of the branches and loops around the layer.
    """

    classic: bool
    weights: WeightReader
    opset: Any
    values: dict[str, Var] = field(default_factory=dict)
    layer: Any = None
    convert_layers: Any = None
    nested: list[str] = field(default_factory=list)

    def inputs(self) -> list[Var]:
        """Return the vars of the present layer's inputs. Raises InputError for a name without a value."""
        return [self.get(name) for name in self.layer.input]

    def get(self, name: str) -> Var:
        """Return the var of the value `name`. Raises InputError when no layer before made it."""
        if name not in self.values:
            raise refuse(self.layer, f"its input '{escape_text(name)}' is not computed by an earlier layer",
                         "expected layers in the order in which they run: use a fresh copy of the model")
        return self.values[name]

    @property
    def x(self) -> Var:
        """The first input of the present layer."""
        if not self.layer.input:
            raise refuse(self.layer, "it has no input", "expected at least one: use a fresh copy of the model")
        return self.get(self.layer.input[0])

    @property
    def params(self) -> Any:
        return getattr(self.layer, get_layer_kind(self.layer))

    def refuse(self, found: str, advice: str) -> InputError:
        return refuse(self.layer, found, advice)

    def to_nchw(self, x: Var) -> tuple[Var, Callable[[Var], Var]]:
        """Return `x` at rank 4 ([N, C, H, W]) for a layer on the last three axes, and the way back.

        In exact mapping leading axes beyond one are merged, and missing ones added; the way back undoes either, with
        the sizes of the last three axes as they are then.
        """
        if x.rank == 4:
            return x, lambda y: y
        if x.rank > 4:
            leading = mb.slice_by_size(x=mb.shape(x=x), begin=[0], size=[x.rank - 3])
            flat = reshape_leading(x, 1, 3)

            def restore_rank(y: Var) -> Var:
                sizes = mb.slice_by_size(x=mb.shape(x=y), begin=[1], size=[3])
                return mb.reshape(x=y, shape=mb.concat(values=[leading, sizes], axis=0))

            return flat, restore_rank
        added = list(range(4 - x.rank))
        return mb.expand_dims(x=x, axes=added), lambda y: mb.squeeze(x=y, axes=added)

    def to_int(self, x: Var) -> Var:
        """Cast a value of integers, which this format stores in floats, to int32."""
        return x if types.is_int(x.dtype) else cast(x, "int32")

    def check_size(self, sizes: Iterable[int]) -> None:
        """Raise InputError when a value that the present layer declares has more elements than a file may ask for."""
        count = math.prod(int(size) for size in sizes)
        if count > MAX_GENERATED_ELEMENTS:
            raise self.refuse(
                f"a value of {count} elements", f"expected at most {MAX_GENERATED_ELEMENTS}: pass it as an input"
            )

    def read_positive(self, name: str, default: Sequence[int]) -> list[int]:
        """Return the numbers of the parameter `name`, or the default where it is empty. InputError for any below 1."""
        found = [int(each) for each in getattr(self.params, name)] or list(default)
        if len(found) != len(default) or min(found) < 1:
            raise self.refuse(f"a {name} of {tuple(found)}",
                              f"expected {len(default)} numbers of at least 1: use a fresh copy of the model")
        return found

    def check_outputs(self, count: int) -> None:
        """Raise InputError when the present layer has no outputs, or makes more values than it has names for."""
        named = len(self.layer.output)
        if not named or count > named:
            raise self.refuse(f"{count} parts for {named} outputs", "expected one output per part")

    def normalize_axis(self, axis: int, rank: int | None = None) -> int:
        """Return `axis` counted from the front. Raises InputError when it is out of range."""
        rank = self.x.rank if rank is None else rank
        if not -rank <= axis < rank:
            raise self.refuse(f"axis {axis} of a value of rank {rank}", f"expected an axis from {-rank} to {rank - 1}")
        return axis % rank


def cast(x: Var, dtype: str) -> Var:
    """Cast `x`, or return it where it has the type `dtype`."""
    if types.builtin_to_string(x.dtype) == dtype:
        return x
    if x.op is not None and x.op.op_type == "cast" and dtype == "int32" and types.is_int(x.op.x.dtype):
        return x.op.x  # the whole numbers of which the floats were made
    result: Var = mb.cast(x=x, dtype=dtype)
    return result


def to_index(x: Var, count: int, context: LayerContext) -> Var:
    """Cast a value that holds indices from 0 to `count - 1` to the integers that a gather reads.

    Unsigned ones, which gathers read from iOS 17 on, show that none is negative: coremltools wraps the others.
    """
    if context.opset < ct.target.iOS17 or count > 2**16:
        return context.to_int(x)
    made_of_integers = x.op is not None and x.op.op_type == "cast" and types.is_int(x.op.x.dtype)
    return cast(x.op.x if made_of_integers else x, "uint16")


def find_reshaped(x: Var, shape: Sequence[Any]) -> Var | None:
    """Find the value of `shape` that `x` is, with other axes: `x`, or what the ops that made it add or remove axes of.

    Returns None where there is none.
    """
    while list(x.shape) != list(shape):
        if x.op is None or x.op.op_type not in ("expand_dims", "squeeze", "reshape"):
            return None
        x = x.op.x
    return x


def keep_rank(x: Var) -> Var:
    """Return `x` at rank 1 where it has rank 0, which this format has no values of."""
    return mb.expand_dims(x=x, axes=[0]) if x.rank == 0 else x


def read_indices(x: Var, context: LayerContext) -> Any:
    """Return the integers in `x`: an int32 array where they are constant, else a var of int32."""
    found = context.to_int(mb.reshape(x=x, shape=[-1]))
    return found if found.val is None else np.asarray(found.val, np.int32)


def reshape_leading(x: Var, kept_front: int, kept_back: int) -> Var:
    """Reshape `x` to `kept_front` leading axes (the last of them merged) and its last `kept_back` axes."""
    sizes = list(x.shape[x.rank - kept_back:])
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        front = [int(size) for size in x.shape[:kept_front - 1]] if kept_front > 1 else []
        result: Var = mb.reshape(x=x, shape=[*front, -1, *(int(size) for size in sizes)])
        return result
    tail = mb.slice_by_size(x=mb.shape(x=x), begin=[x.rank - kept_back], size=[kept_back])
    return mb.reshape(x=x, shape=mb.concat(values=[np.array([-1], np.int32), tail], axis=0))
