"""Integers that are computed from integers through floats, such as relative position buckets: fp32 in fp16 models.

T5 computes the bucket of a distance `p` as `(torch.log(p / 8) / math.log(16) * 8).long()`, and DeBERTa with
`torch.ceil`. At float16 coremltools rounds the constants, so a distance of 16, whose quotient is a whole number, gets
the bucket below. And fp16 has no odd integers above 2048, so `(p.float() * scale).long()` is wrong for many positions
above that. Here the float ops between integers and a cast to integers stay in fp32. Their divisions by constants stay
divisions, because a product with the rounded inverse makes a quotient of equal logarithms differ from 1. The integers
at both ends run without the Neural Engine in any case (ANE201).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, types

from ...ir.query import get_consumers, get_flat_inputs, iterate_ops
from ...passes.severity import Severity
from ..contract import Patch

_PASS_MODULE = "coremltools.converters.mil.mil.passes.defs.quantization"
_CHAIN_OPS = frozenset((
    "abs", "add", "avg_pool", "ceil", "clip", "concat", "cos", "cumsum", "erf", "exp", "exp2", "expand_dims", "floor",
    "floor_div", "inverse", "log", "maximum", "minimum", "mod", "mul", "pow", "range_1d", "real_div", "reduce_max",
    "reduce_mean", "reduce_min", "reduce_sum", "relu", "reshape", "round", "rsqrt", "select", "sigmoid", "sign", "sin",
    "slice_by_index", "slice_by_size", "softplus", "sqrt", "square", "squeeze", "stack", "sub", "tan", "tanh", "tile",
    "transpose"))
_MAX_CHAIN_OPS = 64
"The most ops that are searched before an op, and after it; the limit keeps the search linear."

PATCH = Patch(code="TORCH197", severity=Severity.WRONG,
              title="integers computed from integers through floats are rounded at fp16: distances get wrong buckets "
                    "(T5 and DeBERTa of flexible length)",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Convert a program that scales integers to fp16; report a fault if the product became fp16."""
    from coremltools.converters.mil.mil.passes.defs.quantization import add_fp16_cast

    def build(x: Any) -> Any:
        return mb.cast(x=mb.mul(x=mb.cast(x=x, dtype="fp32"), y=0.36067376), dtype="int32")

    program = mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.int32)])(build)
    add_fp16_cast().apply(program)
    product, = program.find_ops(op_type="mul")
    return "silently miscompiled" if product.outputs[0].dtype == types.fp16 else None


@PATCH.replace_function(_PASS_MODULE, "FP16ComputePrecision.is_valid_op")
def is_valid_op(host: Callable[..., bool], self: Any, op: Operation) -> bool:
    """Return whether the op may become fp16."""
    return not _is_between_integers(op) and host(self, op)


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.optimize_elementwise_binary",
                        "divide_to_multiply.apply")
def keep_divisions(host: Callable[..., None], self: Any, program: Any) -> None:
    """Replace divisions by constants with products, except in chains from integers to integers."""
    divisors = {f"_inversed_{op.name}": op.y for _, op in iterate_ops(program)
                if op.op_type == "real_div" and op.y.val is not None and _is_between_integers(op)}
    host(self, program)
    for _, op in [*iterate_ops(program)] if divisors else ():
        if op.name in divisors:
            name = op.name.removeprefix("_inversed_")
            with op.enclosing_block as block:
                quotient = mb.real_div(x=op.x, y=divisors[op.name], name=name, before_op=op)
                block.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=quotient)
                block.remove_ops([op])


def _is_between_integers(op: Operation) -> bool:
    """Return whether the op is in a chain of float ops from integers to integers."""
    return _is_chain_op(op) and _leads_to_integers(op) and _reads_integers_alone(op)


def _is_chain_op(op: Operation) -> bool:
    return op.op_type in _CHAIN_OPS and _is_float(op.outputs[0])


def _reads_integers_alone(op: Operation) -> bool:
    """Return whether all floats from which the op is computed are constants and casts of integers."""
    found = [op]
    for each in found:
        for operand in get_flat_inputs(each):
            source = operand.op
            if operand.val is not None or not _is_float(operand) or (
                    source is not None and (source in found or source.op_type == "cast" and not _is_float(source.x))):
                continue
            if source is None or not _is_chain_op(source) or len(found) == _MAX_CHAIN_OPS:
                return False
            found.append(source)
    return True


def _leads_to_integers(op: Operation) -> bool:
    """Return whether a result of the op, or of ops of a chain that read it, is cast to integers."""
    found = [op]
    for each in found:
        for reader in (reader for var in each.outputs for reader in get_consumers(var)):
            if reader.op_type == "cast":
                if types.is_int(reader.outputs[0].dtype):
                    return True
            elif _is_chain_op(reader) and reader not in found and len(found) < _MAX_CHAIN_OPS:
                found.append(reader)
    return False


def _is_float(var: Any) -> bool:
    return bool(types.is_float(var.dtype))
