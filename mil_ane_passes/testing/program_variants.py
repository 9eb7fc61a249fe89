"""Variants of a program: inside a block, with more users, with symbolic shapes, with compressed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, mil_list, types
from coremltools.converters.mil.mil.program import get_new_symbol
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.clone import clone_program
from ..ir.query import is_const, is_default

__all__ = [
    "COMPRESSIONS",
    "continued",
    "make_compressed",
    "make_nested",
    "make_observed",
    "make_repeated",
    "make_symbolic",
]

Substitute = Callable[[Operation, str, Var], "Var | None"]


def inline_block(function: Block, env: dict[Var, Var], substitute: Substitute | None = None) -> list[Var]:
    """Build `function`'s ops again in the current block; `env` maps its inputs to vars that are visible there."""
    for op in function.operations:
        made = (
            Builder.const(val=_get_const_data(op.outputs[0]))
            if op.op_type == "const"
            else _rebuild_op(op, env, substitute)
        )
        for old, new in zip(op.outputs, made if isinstance(made, (list, tuple)) else [made]):
            env[old] = new
    return [env[var] for var in function.outputs]


def _rebuild_op(op: Operation, env: Mapping[Var, Var], substitute: Substitute | None) -> Any:
    if op.blocks:
        return _rebuild_block_op(op, env, substitute)
    inputs: dict[str, Any] = {}
    for name, bound in op.inputs.items():
        if isinstance(bound, (list, tuple)):
            inputs[name] = [env[var] for var in bound]
        elif not (is_const(bound) and bound.dtype == types.fp32 and op.outputs[0].dtype == types.fp16
                  and bound.rank == 0 and is_default(op, name)):
            inputs[name] = (substitute(op, name, bound) if substitute else None) or env[bound]
    return getattr(Builder, op.op_type)(**inputs)


def _rebuild_block_op(op: Operation, env: Mapping[Var, Var], substitute: Substitute | None) -> Any:
    def make_block_builder(number: int) -> Callable[..., Any]:
        block = op.blocks[number]
        return lambda *given: _unwrap_single(inline_block(block, {**env, **dict(zip(block.inputs, given))}, substitute))

    if op.op_type == "cond":
        return Builder.cond(pred=env[op.pred], _true_fn=make_block_builder(0), _false_fn=make_block_builder(1))
    return Builder.while_loop(_cond=make_block_builder(0), _body=make_block_builder(1),
                              loop_vars=tuple(env[var] for var in op.loop_vars))


def _unwrap_single(made: list[Var]) -> Any:
    return tuple(made) if len(made) != 1 else made[0]


def _get_const_data(var: Var) -> Any:
    return mil_list(var.val) if types.is_list(var.sym_type) else var.val


def _rebuild_program(
    program: Program, body: Callable[[dict[Var, Var]], list[Var]], shape: Callable[[Var], Iterable[Any]] | None = None
) -> Program:
    """Build a program with the inputs (reshaped by `shape`) and output names of `program`, and a body of its own."""
    source = program.functions["main"]
    placeholders = {
        name: Builder.placeholder(shape=list(shape(var) if shape else var.shape), dtype=var.dtype)
        for name, var in source.inputs.items()
    }
    with Function(placeholders, opset_version=source.opset_version) as function:
        outputs = body({old: function.inputs[name] for name, old in source.inputs.items()})
        for old, new in zip(source.outputs, outputs):
            new.name = old.name
        function.set_outputs(outputs)
    built = Program()
    built.add_function("main", function)
    return built


def make_nested(program: Program) -> Program:
    """Nest the body inside a `cond`, once in each branch."""
    source = program.functions["main"]

    def build_body(env: dict[Var, Var]) -> list[Var]:
        first = next(iter(env.values()))
        total = Builder.reduce_sum(x=Builder.cast(x=first, dtype="fp32"), axes=list(range(first.rank)),
                                   keep_dims=False)
        result = Builder.cond(
            pred=Builder.greater(x=total, y=np.float32(0)),
            _true_fn=lambda: tuple(inline_block(source, dict(env))),
            _false_fn=lambda: tuple(inline_block(source, dict(env))))
        return list(result) if isinstance(result, (list, tuple)) else [result]

    return _rebuild_program(program, build_body)


def make_repeated(program: Program, times: int = 3) -> Program:
    """Repeat the body several times side by side, with shared consts; every copy's outputs are outputs."""
    source = program.functions["main"]
    consts = [op for op in source.operations if op.op_type == "const"]
    placeholders = {name: Builder.placeholder(shape=list(var.shape), dtype=var.dtype)
                    for name, var in source.inputs.items()}
    with Function(placeholders, opset_version=source.opset_version) as function:
        shared = {op.outputs[0]: Builder.const(val=_get_const_data(op.outputs[0])) for op in consts}
        outputs = []
        for number in range(times):
            env = {old: function.inputs[name] for name, old in source.inputs.items()} | shared
            made = _inline_computed_ops(source, env)
            for old, new in zip(source.outputs, made):
                new.name = f"{old.name}_{number}"
            outputs += made
        function.set_outputs(outputs)
    built = Program()
    built.add_function("main", function)
    return built


def _inline_computed_ops(source: Function, env: dict[Var, Var]) -> list[Var]:
    for op in source.operations:
        if op.op_type != "const":
            made = _rebuild_op(op, env, None)
            env.update(zip(op.outputs, made if isinstance(made, (list, tuple)) else [made]))
    return [env[var] for var in source.outputs]


def make_observed(program: Program) -> Program:
    """Add a user to every intermediate value: an identity whose result is an output."""
    twin = clone_program(program)
    function = twin.functions["main"]
    inner = [var for op in function.operations if op.op_type != "const" and not op.op_type.startswith("constexpr_")
             for var in op.outputs if var not in function.outputs and not types.is_list(var.sym_type)]
    with function:
        extra = [Builder.identity(x=var, name=f"observed_{number}") for number, var in enumerate(inner)]
    function.set_outputs([*function.outputs, *extra])
    return twin


def continued(program: Program) -> Program:
    """Clone the program and add one op after each of its float outputs, whose result is another output."""
    twin = clone_program(program)
    function = twin.functions["main"]
    ends = [var for var in function.outputs if types.is_tensor(var.sym_type) and types.is_float(var.dtype)]
    with function:
        more = [Builder.relu(x=var, name=f"continued_{number}") for number, var in enumerate(ends)]
    function.set_outputs([*function.outputs, *more])
    return twin


def make_symbolic(program: Program, axes: tuple[int, ...]) -> Program | None:
    """Rebuild the program with symbolic dimensions at `axes` of each input; None if it cannot be built so."""
    source = program.functions["main"]

    def get_shape(var: Var) -> list[Any]:
        free = {axis % var.rank for axis in axes}
        return [get_new_symbol() if number in free and not is_symbolic(extent) else extent
                for number, extent in enumerate(var.shape)]

    try:
        return _rebuild_program(program, lambda env: inline_block(source, env), get_shape)
    except (AssertionError, ValueError, TypeError, IndexError):  # e.g. a constant output_shape: fixed by its nature
        return None


def _compress_affine(weight: np.ndarray[Any, Any]) -> Var:
    data = np.clip(np.round(weight.astype(np.float32) * 16) + 128, 0, 255).astype(np.uint8)
    scale = np.full(weight.shape[0], 0.0625, dtype=weight.dtype)
    return Builder.constexpr_affine_dequantize(
        quantized_data=data, zero_point=np.full(weight.shape[0], 128, np.uint8), scale=scale, axis=0)


def _compress_palettized(weight: np.ndarray[Any, Any]) -> Var:
    table, index = np.unique(weight, return_inverse=True)
    bits = 8 if table.size > 16 else 4
    lut = np.zeros(2**bits, dtype=weight.dtype)
    lut[:table.size] = table
    flat = np.unpackbits(index.reshape(-1, 1).astype(np.uint8), axis=1)[:, -bits:]
    return Builder.constexpr_lut_to_dense(
        indices=np.packbits(flat.reshape(-1), bitorder="little") if bits == 8 else _pack_nibbles(index.reshape(-1)),
        lut=lut, shape=np.array(weight.shape, dtype=np.uint32))


def _pack_nibbles(index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pack two 4-bit indices into a byte, the first in the low half, as coremltools does."""
    padded = np.append(index, np.zeros(index.size % 2, dtype=index.dtype)).astype(np.uint8)
    return (padded[::2] | padded[1::2] << 4).astype(np.uint8)


def _compress_sparse(weight: np.ndarray[Any, Any]) -> Var:
    kept = np.abs(weight) > 0.3
    return Builder.constexpr_sparse_to_dense(
        nonzero_data=weight[kept], mask=np.packbits(kept.reshape(-1), bitorder="little"),
        shape=np.array(weight.shape, dtype=np.uint32))


COMPRESSIONS: dict[str, Callable[[np.ndarray[Any, Any]], Var]] = {
    "affine": _compress_affine, "palette": _compress_palettized, "sparse": _compress_sparse,
}
"""iOS16 forms of compressed weights, by name."""


def make_compressed(program: Program, kind: str) -> Program | None:
    """Compress every constant `weight` of rank 3 and more; None if the program has no such weight."""
    found = False

    def substitute_weight(op: Operation, name: str, var: Var) -> Var | None:
        nonlocal found
        if name != "weight" or not is_const(var) or var.rank < 3:
            return None
        found = True
        return COMPRESSIONS[kind](np.asarray(var.val))

    built = _rebuild_program(program, lambda env: inline_block(program.functions["main"], env, substitute_weight))
    return built if found else None
