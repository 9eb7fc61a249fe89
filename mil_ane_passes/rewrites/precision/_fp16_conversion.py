"""Conversion of fp32 ops to fp16 in place: ops keep their names, and casts remain only where fp16 and fp32 meet.

coremltools decides which inputs of an op may be fp16 (`FP16ComputePrecision`).
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

from ...ir.block_editor import BlockEditor
from ...ir.builder import RewriteBuilder, UniqueNames
from ...ir.constants import make_const
from ...ir.query import get_flat_inputs, get_type_info, is_const, is_opaque, iterate_nested_ops
from ...ir.type_inference import infer_types

__all__ = [
    "FP16_MAX",
    "FP16_MIN_SUBNORMAL",
    "INFINITY_THRESHOLD",
    "Fp16Constants",
    "MagnitudeSummary",
    "Scope",
    "can_read_fp16",
    "convert_to_fp16",
    "is_fp32",
    "is_fp32_computation",
    "iterate_fp16_operands",
]


Scope = ChainMap[Var, Var]

_COREMLTOOLS_PASS = FP16ComputePrecision()
_ANY_FLOAT_OPS = frozenset({"cast", "shape"})
"Ops that read fp16 as well as fp32 with the same result."
_FIXED_DTYPE_OPS = FP16ComputePrecision._UNSUPPORTED_FP16_OPS | {"const", "classify", "shape"}
_COREMLTOOLS_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"Errors that coremltools' checks raise for inputs that an op does not accept."
Array = np.ndarray[Any, Any]
FP16_MAX = 65504.0
"The largest finite number of fp16."
FP16_MIN_SUBNORMAL = 2.0**-24
"The smallest positive number of fp16."
INFINITY_THRESHOLD = 1e38
"Magnitude from which an fp32 number is read as infinity: masks are filled with such numbers."
_CHUNK_ELEMENTS = 1 << 20
"Elements of a constant that are converted or examined at once."
_MAX_ELEMENTS_TO_CLAMP = 400
"""Most elements of a constant in which numbers that fp16 flushes to 0 are raised to its smallest number.

This is the limit of coremltools' conversion.
"""


def is_fp32(var: Any) -> bool:
    """Return whether `var` is a number or a tensor of fp32."""
    return isinstance(var, Var) and get_type_info(var).dtype == types.fp32 and not types.is_state(var.sym_type)


def iterate_fp16_operands(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the fp32 values that `op` may read in fp16, each with its parameter.

    The op's function must be the current one.
    """
    for name, bound in op.inputs.items():
        given = list(bound) if isinstance(bound, (list, tuple)) else [bound]
        if any(map(is_fp32, given)) and _COREMLTOOLS_PASS.should_cast_parameter(op, name):
            yield from ((name, var) for var in given if is_fp32(var))


def is_fp32_computation(op: Operation) -> bool:
    """Return whether `op` computes with fp32, so that it could compute with fp16."""
    if is_opaque(op) or op.op_type in _FIXED_DTYPE_OPS or op.op_type.startswith("constexpr_"):
        return False
    if any(not types.is_list(var.sym_type) and var.val is not None for var in op.outputs):
        return False  # a compile-time constant: other ops may rely on the value
    return any(map(is_fp32, get_flat_inputs(op)))


def can_read_fp16(op: Operation) -> bool:
    """Return whether coremltools lets `op` read fp16. The op's function must be the current one."""
    return next(iterate_fp16_operands(op), None) is not None


def convert_to_fp16(program: Program, chosen: Collection[Operation], halves: Fp16Constants) -> set[Operation]:
    """Convert the ops `chosen` to fp16 in place; inputs, outputs, states and all other ops keep their types.

    Return the ops of `chosen` that coremltools does not let read fp16; they are unchanged.
    """
    refused: set[Operation] = set()
    for function in program.functions.values():
        _FunctionConverter(function, chosen, halves, refused).go()
    return refused


class _FunctionConverter:
    """The conversion of one function.

    Two scopes map values to other types: an fp32 value to its fp16, and a narrowed value to its fp32.
    """

    def __init__(self, function: Function, chosen: Collection[Operation], halves: Fp16Constants, refused: set[Operation]
                 ) -> None:
        self._function, self._chosen, self._halves, self._unsupported_ops = function, chosen, halves, refused
        self._names = UniqueNames(function)
        self._converted_vars: set[Var] = set()
        self._removal_candidates: dict[Operation, None] = {}
        self._redundant_casts: list[Operation] = []

    def go(self) -> None:
        if not any(op in self._chosen for op in iterate_nested_ops(self._function)):
            return
        self._block(self._function, ChainMap(), ChainMap())
        for (
            op
        ) in self._redundant_casts:  # last, as readers not yet visited count as fp32
            self._drop(op)
        with BlockEditor() as editor:
            editor.remove_if_unused(self._removal_candidates)

    def _block(self, block: Block, half: Scope, full: Scope) -> None:
        with block:
            mb = RewriteBuilder(block, self._names)
            for op in list(block.operations):
                with mb.at(op):
                    if op in self._chosen and self._convert_op(op, mb, half):
                        pass
                    elif op.op_type == "cast" and op.x in self._converted_vars and op.outputs[0].dtype == types.fp16:
                        self._redundant_casts.append(op)
                    elif op.op_type not in _ANY_FLOAT_OPS:
                        self._rebind_to_fp32(op, mb, full)
                    mb.adopt_scopes(op.scopes)
                for inner in op.blocks:
                    self._block(inner, half.new_child(), full.new_child())
            self._outputs(block, mb, full)

    def _convert_op(self, op: Operation, mb: RewriteBuilder, half: Scope) -> bool:
        """Convert `op` to fp16; return whether that succeeded."""
        old = op.inputs
        wanted = {name for name, _ in iterate_fp16_operands(op)}
        new = {name: tuple(self._read_as_fp16(var, mb, half, op) for var in bound) if isinstance(bound, (list, tuple))
               else self._read_as_fp16(bound, mb, half, op)
               for name, bound in old.items() if name in wanted}
        packed = op.op_type.startswith("constexpr_")  # whose data must not be read
        try:
            op.input_spec.validate_inputs(op.name, op.op_type, new if packed else {**old, **new})
            self._rebind(op, new)
            made = [_make_fp16_type(var) for var in op.outputs] if packed else infer_types(op)
        except _COREMLTOOLS_ERRORS:
            self._unsupported_ops.add(op)
            self._rebind(op, {name: old[name] for name in new})
            return False
        for var, kind in zip(op.outputs, made if isinstance(made, (list, tuple)) else [made]):
            if is_fp32(var) and _get_element_type(kind) == types.fp16:
                var._sym_type, var._sym_val = _make_fp16_type(var), None
                self._converted_vars.add(var)
        return True

    def _read_as_fp16(self, var: Var, mb: RewriteBuilder, half: Scope, reader: Operation) -> Var:
        """Return `var` in fp16, for `reader`."""
        if not is_fp32(var):
            return var
        if var not in half:
            op = var.op
            if is_const(var):
                half[var] = self._const(var, mb, reader)
            elif op is not None and op.op_type == "cast" and op.x.dtype == types.fp16:
                half[var] = op.x
            elif op is not None and op.op_type == "cast":
                half[var] = mb.cast(x=op.x, dtype="fp16", name=f"{var.name}_to_fp16")
            else:
                half[var] = mb.cast(x=var, dtype="fp16", name=f"{var.name}_to_fp16")
        if var.op is not None:
            self._removal_candidates[var.op] = None
        return half[var]

    def _const(self, var: Var, mb: RewriteBuilder, reader: Operation) -> Var:
        value, name = self._halves.value(var), self._names.make_unique_name(f"{var.name}_to_fp16")
        made: Var = (make_const(value, types.fp16, name, reader) if value.ndim
                     else Builder.const(val=np.float16(value), name=name, before_op=reader))
        mb.created_ops.append(made.op)
        return made

    def _read_as_fp32(self, var: Var, mb: RewriteBuilder, full: Scope) -> Var:
        """Return a narrowed `var` in fp32, anything else unchanged."""
        if var not in self._converted_vars:
            return var
        if var not in full:
            full[var] = mb.cast(x=var, dtype="fp32", name=f"{var.name}_to_fp32")
        return full[var]

    def _rebind_to_fp32(self, op: Operation, mb: RewriteBuilder, full: Scope) -> None:
        """Let `op`, which stays in fp32, read narrowed values through casts."""
        new = {name: tuple(self._read_as_fp32(var, mb, full) for var in bound) if isinstance(bound, (list, tuple))
               else self._read_as_fp32(bound, mb, full)
               for name, bound in op.inputs.items()
               if any(var in self._converted_vars for var in (bound if isinstance(bound, (list, tuple)) else [bound]))}
        self._rebind(op, new)

    def _drop(self, op: Operation) -> None:
        """Drop a cast to fp16 of a value that is fp16 now, if another value can get the name of its output."""
        made, given = op.outputs[0], op.x
        if made.consuming_blocks and (given.consuming_blocks or given.op.enclosing_block is not op.enclosing_block):
            return
        name = made.name
        made.name = self._names.make_unique_name(f"{name}_replaced") if made.consuming_blocks else name
        returned = bool(made.consuming_blocks)
        with BlockEditor() as editor:
            editor.replace(made, given)
            editor.remove_if_unused([op])
        if returned:
            given.name = name

    def _outputs(self, block: Block, mb: RewriteBuilder, full: Scope) -> None:
        """Cast the narrowed outputs of the block back to fp32; outputs of a function keep their names."""
        for var in dict.fromkeys(block.outputs):
            if var not in self._converted_vars:
                continue
            name = var.name
            last = mb.cast(x=var, dtype="fp32", name=f"{name}_to_fp32")
            mb.adopt_scopes(var.op.scopes)
            if isinstance(block, Function):
                var.name = self._names.make_unique_name(f"{name}_to_fp16")
                last.name = name
            block.set_outputs([last if each is var else each for each in block.outputs])

    @staticmethod
    def _rebind(op: Operation, new: dict[str, Any]) -> None:
        if new:
            op.set_inputs(no_check_var_types=True, **new)


def _get_element_type(kind: Any) -> Any:
    return kind.get_primitive() if types.is_tensor(kind) else kind


def _make_fp16_type(var: Var) -> Any:
    return types.tensor(types.fp16, var.shape) if types.is_tensor(var.sym_type) else types.fp16


@dataclass(frozen=True)
class MagnitudeSummary:
    """Magnitudes in an fp32 constant: the largest below `INFINITY_THRESHOLD`, and whether finite ones are beyond."""

    largest: float = 0.0
    beyond: bool = False

    @property
    def is_below_fp16(self) -> bool:
        """Return whether all numbers are smaller than the smallest of fp16, 0 and infinities aside."""
        return not self.beyond and 0 < self.largest < FP16_MIN_SUBNORMAL


class Fp16Constants:
    """Constants as fp16.

    Two constants with the same array, or the same bytes in other shapes, share the converted bytes.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._extents: dict[tuple[int, int], tuple[Array, MagnitudeSummary]] = {}

    def value(self, var: Var) -> Array:
        """Return const `var` in fp16."""
        given = np.asarray(var.val)
        key = _make_buffer_key(given)
        if key not in self._values:
            self._values[key] = given, _convert_to_fp16(given)  # keeping the array alive keeps its address unique
        return self._values[key][1].reshape(given.shape)

    def extent(self, var: Var) -> MagnitudeSummary:
        """Summarize the magnitudes in const `var`."""
        given = np.asarray(var.val)
        key = _make_buffer_key(given)
        if key not in self._extents:
            self._extents[key] = given, _summarize_magnitudes(given)
        return self._extents[key][1]


def _make_buffer_key(value: Array) -> tuple[int, int]:
    return int(value.__array_interface__["data"][0]), value.nbytes


def _split_into_chunks(value: Array) -> list[slice]:
    return [slice(start, start + _CHUNK_ELEMENTS) for start in range(0, value.size, _CHUNK_ELEMENTS)]


def _convert_to_fp16(value: Array) -> Array:
    flat = np.ascontiguousarray(value).reshape(-1)
    made = np.empty(flat.size, np.float16)
    for piece in _split_into_chunks(flat):
        with np.errstate(over="ignore"):
            made[piece] = flat[piece]
    if flat.size < _MAX_ELEMENTS_TO_CLAMP:
        lost = (made == 0) & (flat != 0)
        made[lost] = np.copysign(np.float16(FP16_MIN_SUBNORMAL), flat[lost])
    made.flags.writeable = False
    return made


def _summarize_magnitudes(value: Array) -> MagnitudeSummary:
    flat = np.ascontiguousarray(value).reshape(-1)
    largest, beyond = 0.0, False
    for piece in _split_into_chunks(flat):
        sizes = np.abs(flat[piece])
        plain = sizes[sizes < INFINITY_THRESHOLD]
        largest = max(largest, float(plain.max(initial=0.0)))
        beyond |= bool(np.any((sizes >= INFINITY_THRESHOLD) & (sizes < math.inf)))
    return MagnitudeSummary(largest, beyond)
