"""Conversion of fp32 ops to fp16 in place: ops keep their names, and casts remain only where fp16 and fp32 meet.

coremltools decides which inputs of an op may be fp16 (`FP16ComputePrecision`).
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types
from coremltools.converters.mil.mil.passes.defs.quantization import FP16ComputePrecision

from ...ir.block_editor import BlockEditor
from ...ir.builder import RewriteBuilder, UniqueNames
from ...ir.constants import make_const
from ...ir.coremltools_internals import set_stored_type, set_typed_value
from ...ir.query import get_flat_inputs, get_type_info, is_const, is_opaque, iterate_nested_ops
from ...ir.type_inference import infer_types

_Scope = ChainMap[Var, Var]
"Replacements of values, in a block and those around it."
_COREMLTOOLS_PASS = FP16ComputePrecision()
_ANY_FLOAT_OPS = frozenset({"cast", "shape"})
"Ops that read fp16 as well as fp32 with the same result."
_FIXED_DTYPE_OPS = FP16ComputePrecision._UNSUPPORTED_FP16_OPS | {"const", "classify", "shape"}
"Ops that do not compute in fp16."
_COREMLTOOLS_ERRORS = (
    AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
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
"Elements of a constant that are converted or examined at once, so that intermediate arrays stay small."
_MAX_ELEMENTS_TO_CLAMP = 400
"""Most elements of a constant in which numbers that fp16 flushes to 0 are raised to its smallest number.

This is the limit of coremltools' conversion.
"""


def is_fp32(var: Any) -> bool:
    """Return whether `var` is a number or a tensor of fp32."""
    return isinstance(var, Var) and get_type_info(var).dtype == types.fp32 and not types.is_state(var.sym_type)


def is_cast_to_fp16(op: Operation) -> bool:
    return op.op_type == "cast" and bool(op.outputs[0].dtype == types.fp16)


def iterate_fp16_operands(op: Operation) -> Iterator[tuple[str, Var]]:
    """Yield the fp32 values that `op` may read in fp16, each with its parameter.

    The op's function must be the current one.
    """
    for name, bound in op.inputs.items():
        operands = [var for var in (bound if isinstance(bound, (list, tuple)) else [bound]) if is_fp32(var)]
        if operands and _COREMLTOOLS_PASS.should_cast_parameter(op, name):
            yield from ((name, var) for var in operands)


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


def convert_to_fp16(program: Program, chosen: Collection[Operation], constants: Fp16Constants) -> set[Operation]:
    """Convert the ops `chosen` to fp16 in place; inputs, outputs, states and all other ops keep their types.

    Return the ops of `chosen` that coremltools does not let read fp16; they are unchanged.
    """
    unsupported: set[Operation] = set()
    for function in program.functions.values():
        if any(op in chosen for op in iterate_nested_ops(function)):
            unsupported |= _FunctionConverter(function, chosen, constants).convert()
    return unsupported


class _FunctionConverter:
    """The conversion of one function.

    Two scopes map values to other types: an fp32 value to its fp16, and a narrowed value to its fp32.
    """

    def __init__(self, function: Function, chosen: Collection[Operation], constants: Fp16Constants) -> None:
        self._function, self._chosen, self._constants = function, chosen, constants
        self._names = UniqueNames(function)
        self._unsupported_ops: set[Operation] = set()
        self._converted_vars: set[Var] = set()
        self._removal_candidates: dict[Operation, None] = {}
        self._redundant_casts: list[Operation] = []

    def convert(self) -> set[Operation]:
        """Convert the function; return the chosen ops that stay in fp32."""
        self._convert_block(self._function, ChainMap(), ChainMap())
        for op in self._redundant_casts:  # last, as readers not yet visited count as fp32
            self._remove_redundant_cast(op)
        with BlockEditor() as editor:
            editor.remove_if_unused(self._removal_candidates)
        return self._unsupported_ops

    def _convert_block(self, block: Block, half: _Scope, full: _Scope) -> None:
        with block:
            mb = RewriteBuilder(block, self._names)
            for op in list(block.operations):
                with mb.at(op):
                    converted = op in self._chosen and self._convert_op(op, mb, half)
                    if not converted:
                        self._keep_op(op, mb, full)
                    mb.adopt_scopes(op.scopes)
                for inner in op.blocks:
                    self._convert_block(inner, half.new_child(), full.new_child())
            self._cast_outputs(block, mb)

    def _keep_op(self, op: Operation, mb: RewriteBuilder, full: _Scope) -> None:
        """Let `op`, which is not converted, read narrowed values; remember casts that have become redundant."""
        if op.op_type == "cast" and op.x in self._converted_vars and op.outputs[0].dtype == types.fp16:
            self._redundant_casts.append(op)
        elif op.op_type not in _ANY_FLOAT_OPS:
            narrowed = {name: bound for name, bound in op.inputs.items()
                        if not self._converted_vars.isdisjoint(bound if isinstance(bound, (list, tuple)) else [bound])}
            self._rebind_inputs(op, _map_bound(narrowed, lambda var: self._read_as_fp32(var, mb, full)))

    def _convert_op(self, op: Operation, mb: RewriteBuilder, half: _Scope) -> bool:
        """Convert `op` to fp16; return whether that succeeded."""
        convertible = {name for name, _ in iterate_fp16_operands(op)}
        old = op.inputs
        new = _map_bound({name: bound for name, bound in old.items() if name in convertible},
                         lambda var: self._read_as_fp16(var, mb, half, op))
        is_weight = op.op_type.startswith("constexpr_")  # whose data must not be read
        try:
            op.input_spec.validate_inputs(op.name, op.op_type, new if is_weight else {**old, **new})
            self._rebind_inputs(op, new)
            inferred = [_make_fp16_type(var) for var in op.outputs] if is_weight else infer_types(op)
        except _COREMLTOOLS_ERRORS:
            self._unsupported_ops.add(op)
            self._rebind_inputs(op, {name: old[name] for name in new})
            return False
        for var, sym_type in zip(op.outputs, inferred if isinstance(inferred, (list, tuple)) else [inferred]):
            if is_fp32(var) and _get_element_type(sym_type) == types.fp16:
                set_stored_type(var, _make_fp16_type(var))
                set_typed_value(var, None)
                self._converted_vars.add(var)
        return True

    def _read_as_fp16(self, var: Var, mb: RewriteBuilder, half: _Scope, reader: Operation) -> Var:
        """Return `var` in fp16, for `reader`."""
        if not is_fp32(var):
            return var
        if var not in half:
            op = var.op
            if is_const(var):
                half[var] = self._make_fp16_const(var, mb, reader)
            elif op is not None and op.op_type == "cast" and op.x.dtype == types.fp16:
                half[var] = op.x
            else:
                source = op.x if op is not None and op.op_type == "cast" else var
                half[var] = mb.cast(x=source, dtype="fp16", name=f"{var.name}_to_fp16")
        if var.op is not None:
            self._removal_candidates[var.op] = None
        return half[var]

    def _make_fp16_const(self, var: Var, mb: RewriteBuilder, reader: Operation) -> Var:
        value, name = self._constants.convert(var), self._names.make_unique_name(f"{var.name}_to_fp16")
        const: Var = (make_const(value, types.fp16, name, reader) if value.ndim
                      else Builder.const(val=np.float16(value), name=name, before_op=reader))
        mb.created_ops.append(const.op)
        return const

    def _read_as_fp32(self, var: Var, mb: RewriteBuilder, full: _Scope) -> Var:
        """Return a narrowed `var` in fp32, anything else unchanged."""
        if var not in self._converted_vars:
            return var
        if var not in full:
            full[var] = mb.cast(x=var, dtype="fp32", name=f"{var.name}_to_fp32")
        return full[var]

    def _remove_redundant_cast(self, op: Operation) -> None:
        """Remove a cast to fp16 of a value that is fp16 now, if another value can get the name of its output."""
        output, source = op.outputs[0], op.x
        returned = bool(output.consuming_blocks)
        if returned and (source.consuming_blocks or source.op.enclosing_block is not op.enclosing_block):
            return
        name = output.name
        if returned:
            output.name = self._names.make_unique_name(f"{name}_replaced")
        with BlockEditor() as editor:
            editor.replace(output, source)
            editor.remove_if_unused([op])
        if returned:
            source.name = name

    def _cast_outputs(self, block: Block, mb: RewriteBuilder) -> None:
        """Cast the narrowed outputs of the block back to fp32; outputs of a function keep their names."""
        for var in dict.fromkeys(block.outputs):
            if var not in self._converted_vars:
                continue
            name = var.name
            cast = mb.cast(x=var, dtype="fp32", name=f"{name}_to_fp32")
            mb.adopt_scopes(var.op.scopes)
            if isinstance(block, Function):
                var.name = self._names.make_unique_name(f"{name}_to_fp16")
                cast.name = name
            block.set_outputs([cast if each is var else each for each in block.outputs])

    @staticmethod
    def _rebind_inputs(op: Operation, new: dict[str, Any]) -> None:
        if new:
            op.set_inputs(no_check_var_types=True, **new)


def _map_bound(inputs: dict[str, Any], convert: Callable[[Var], Var]) -> dict[str, Any]:
    """Return `inputs` with each var converted, also those in lists."""
    return {name: tuple(map(convert, bound)) if isinstance(bound, (list, tuple)) else convert(bound)
            for name, bound in inputs.items()}


def _get_element_type(sym_type: Any) -> Any:
    return sym_type.get_primitive() if types.is_tensor(sym_type) else sym_type


def _make_fp16_type(var: Var) -> Any:
    return types.tensor(types.fp16, var.shape) if types.is_tensor(var.sym_type) else types.fp16


class Fp16Constants:
    """Constants as fp16.

    Two constants with the same array, or the same bytes in other shapes, share the converted bytes.
    """

    def __init__(self) -> None:
        # Each entry keeps its array alive, as the address that is its key is unique only as long.
        self._converted: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._summaries: dict[tuple[int, int], tuple[Array, MagnitudeSummary]] = {}

    def convert(self, var: Var) -> Array:
        """Return const `var` in fp16."""
        value = np.asarray(var.val)
        key = _make_buffer_key(value)
        if key not in self._converted:
            self._converted[key] = value, _convert_array(value)
        return self._converted[key][1].reshape(value.shape)

    def summarize(self, var: Var) -> MagnitudeSummary:
        """Summarize the magnitudes in const `var`."""
        value = np.asarray(var.val)
        key = _make_buffer_key(value)
        if key not in self._summaries:
            self._summaries[key] = value, _summarize_magnitudes(value)
        return self._summaries[key][1]


@dataclass(frozen=True)
class MagnitudeSummary:
    """Magnitudes in an fp32 constant: the largest below `INFINITY_THRESHOLD`, and whether finite ones are beyond."""

    largest: float = 0.0
    beyond: bool = False

    @property
    def is_below_fp16(self) -> bool:
        """Return whether all numbers are smaller than the smallest of fp16, 0 and infinities aside."""
        return not self.beyond and 0 < self.largest < FP16_MIN_SUBNORMAL


def _make_buffer_key(value: Array) -> tuple[int, int]:
    return int(value.__array_interface__["data"][0]), value.nbytes


def _convert_array(value: Array) -> Array:
    flat = np.ascontiguousarray(value).reshape(-1)
    converted = np.empty(flat.size, np.float16)
    for chunk in _split_into_chunks(flat):
        with np.errstate(over="ignore"):
            converted[chunk] = flat[chunk]
    if flat.size < _MAX_ELEMENTS_TO_CLAMP:
        flushed = (converted == 0) & (flat != 0)
        converted[flushed] = np.copysign(np.float16(FP16_MIN_SUBNORMAL), flat[flushed])
    converted.flags.writeable = False
    return converted


def _summarize_magnitudes(value: Array) -> MagnitudeSummary:
    flat = np.ascontiguousarray(value).reshape(-1)
    largest, beyond = 0.0, False
    for chunk in _split_into_chunks(flat):
        sizes = np.abs(flat[chunk])
        largest = max(largest, float(sizes[sizes < INFINITY_THRESHOLD].max(initial=0.0)))
        beyond |= bool(np.any((sizes >= INFINITY_THRESHOLD) & (sizes < math.inf)))
    return MagnitudeSummary(largest, beyond)


def _split_into_chunks(value: Array) -> list[slice]:
    return [slice(start, start + _CHUNK_ELEMENTS) for start in range(0, value.size, _CHUNK_ELEMENTS)]
