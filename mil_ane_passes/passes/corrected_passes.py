"""Corrected passes of coremltools: subclasses that leave alone what coremltools' own pass converts wrongly or fails on.

Found by running each pass of `ct.PassPipeline.DEFAULT` on random programs and comparing the results on the reference
runtime before and after (coremltools 9.0). In our pipelines the name of such a pass is a `CorrectedName`: equal to the
name itself, so that pipelines are edited as usual, but coremltools runs the corrected class for it. Other pipelines
have plain names and are not changed, and so are those that travel as texts.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass

from ..ir.coremltools_internals import get_typed_value, set_typed_value

__all__ = ["CorrectedName", "correct_names", "get_corrected_pass", "iterate_corrections"]

Correction = Callable[..., Any]
"A function in place of a method: it is called with coremltools' method first, then with the arguments of the call."
_CORRECTIONS: dict[str, dict[str, Correction]] = {}
"By name of the pass and of the method."
_NEGLIGIBLE = 1e-6
"The share of the epsilon of a normalization that the epsilon of its rsqrt may have, 1e-12 by default."


class CorrectedName(str):
    """The name of a pass of coremltools for which the corrected class runs."""

    __slots__ = ()


def correct_names(names: Iterable[str]) -> list[str]:
    """Return names of passes, with those that have a correction as `CorrectedName`."""
    return [CorrectedName(name) if name in _CORRECTIONS else name for name in names]


def iterate_corrections() -> Iterator[tuple[str, str, Correction]]:
    """Yield the name of each corrected pass, the method to override, and the function to call in its place."""
    for name, methods in _CORRECTIONS.items():
        for method, function in methods.items():
            yield name, method, function


def get_corrected_pass(name: str, host: type[AbstractGraphPass]) -> type[AbstractGraphPass]:
    """Return the corrected class of a pass: a subclass of `host` that overrides the methods which `host` has."""
    members: dict[str, Any] = {"__doc__": host.__doc__, "__module__": __name__}
    for method, function in _CORRECTIONS[name].items():
        original = vars(host).get(method)
        if isinstance(original, staticmethod):
            members[method] = staticmethod(functools.partial(function, original.__func__))
        elif original is not None:
            members[method] = functools.partialmethod(_call_correction, function, original)
    return type(host.__name__, (host,), members)


def _call_correction(self: Any, function: Correction, original: Callable[..., Any], *arguments: Any) -> Any:
    return function(original, self, *arguments)


def _correct(name: str, method: str) -> Callable[[Correction], Correction]:
    """Register a function in place of `method` of a pass; its docstring says what is corrected."""
    def register_correction(function: Correction) -> Correction:
        _CORRECTIONS.setdefault(f"common::{name}", {})[method] = function
        return function
    return register_correction


@_correct("cast_optimization", "_is_cast_ops_fusable")
def _is_fusable_cast(host: Callable[..., Any], self: Any, first: Operation, second: Operation) -> bool:
    """A cast to an integer that drops fractions before one to a bool is kept: 0.4 is false, as in `x.int().bool()` and
    logical ops of integers."""
    drops = types.is_float(first.x.dtype) and types.is_int(first.outputs[0].dtype)
    return not (drops and second.outputs[0].dtype == types.bool) and bool(host(self, first, second))


@_correct("fuse_matmul_weight_bias", "_try_to_transform")
def _fuse_matmul_weight_bias(
    host: Callable[..., Any], self: Any, matmul: Operation, add: Operation, block: Block
) -> bool:
    """A bias is not added to the other axis of `W @ x + b`, not subtracted in `b - x @ W`, and a product that is also
    an output is kept."""
    # https://github.com/apple/coremltools/pull/2801
    wrong = matmul.x.val is not None or add.op_type == "sub" and add.x.val is not None
    return not wrong and not _is_block_output(matmul) and bool(host(self, matmul, add, block))


@_correct("fuse_linear_bias", "_try_to_transform")
def _fuse_linear_bias(host: Callable[..., Any], linear: Operation, add: Operation, block: Block) -> bool:
    """A constant of higher rank than a linear, with which the result silently loses dimensions, is added after an
    expand_dims; a number that is added to one output, which fails, is fused as a constant of one element."""
    if _raise_rank(linear, add):
        return False
    number = next((each for each in (add.x, add.y) if each.val is not None and each.rank == 0), None)
    if number is not None and linear.outputs[0].shape[-1] == 1:
        add = _replace_operand(add, number, mb.const(val=np.reshape(number.val, (1,)), before_op=add))
    return bool(host(linear, add, block))


@_correct("fuse_conv_bias", "_try_to_transform")
def _fuse_conv_bias(host: Callable[..., Any], conv: Operation, add: Operation) -> bool:
    """Correct four faults.

    - A subtracted constant is negated in place, which changes the torch module and all other ops that read it: copy it.
    - A constant of higher rank makes the result silently lose dimensions: add it after an expand_dims.
    - A scalar and a grouped transposed convolution without a bias fail: do not fuse them.
    - A constant of several channels and a convolution to one channel fail: do not fuse them.
    """
    if _raise_rank(conv, add):
        return False
    bias = add.y if add.op_type == "sub" or add.x.val is None else add.x
    if bias.val is None or np.size(bias.val) not in (1, conv.outputs[0].shape[1]):
        return False
    if _is_grouped_transposed(conv) and conv.bias is None and np.size(bias.val) == 1:
        return False
    held = get_typed_value(bias)
    try:
        if isinstance(bias.val, np.ndarray):
            copied = copy.copy(held)
            copied.val = np.copy(bias.val)
            set_typed_value(bias, copied)
        return bool(host(conv, add))
    finally:
        set_typed_value(bias, held)


@_correct("fuse_conv_bias", "_try_to_transform_transpose_pattern")
def _fuse_transposed_conv_bias(host: Callable[..., Any], conv: Operation, block: Block) -> bool:
    """A constant of another rank that is added to a transposed convolution, which fails or loses dimensions, is not
    fused."""
    transposed = [op for op in conv.outputs[0].child_ops if op.op_type == "transpose"]
    added = [op for each in transposed for op in each.outputs[0].child_ops if op.op_type in ("add", "sub")]
    short = any(var.val is not None and np.size(var.val) > 1 and np.ndim(var.val) < conv.outputs[0].rank
                for op in added for var in (op.x, op.y))
    raised = [_raise_rank(moved, op) for moved in transposed for op in moved.outputs[0].child_ops if op in added]
    return not short and not any(raised) and bool(host(conv, block))


@_correct("fuse_elementwise_to_batchnorm", "_try_to_transform")
def _fuse_batch_norm(host: Callable[..., Any], mul: Operation, add: Operation, block: Block) -> bool:
    """A product and a sum are fused only if both constants have one value for each channel of the operand. Constants
    that broadcast one channel to several become an invalid batch_norm: several values for an input of one channel."""
    constants = [var for op in (mul, add) for var in (op.x, op.y) if var.val is not None]
    channels = next((var.shape[1] for var in (mul.x, mul.y) if var.val is None and var.rank > 1), None)
    return all(np.size(var.val) == channels for var in constants) and bool(host(mul, add, block))


@_correct("fuse_conv_scale", "_try_to_transform")
def _fuse_conv_scale(host: Callable[..., Any], conv: Operation, scale: Operation) -> bool:
    """The scales of channels are not given to other channels of a grouped transposed convolution or to one of volumes,
    which fails, and a number that is divided by a convolution is not taken for its scale."""
    factor = scale.x if scale.x.val is not None else scale.y
    exchanged = _is_grouped_transposed(conv) or conv.op_type == "conv_transpose" and conv.x.rank == 5
    wrong = exchanged and np.size(factor.val) > 1 or scale.op_type == "real_div" and scale.y.val is None
    return not wrong and bool(host(conv, scale))


@_correct("fuse_conv_batchnorm", "_try_to_transform")
def _fuse_conv_batchnorm(host: Callable[..., Any], conv: Operation, batch_norm: Operation) -> bool:
    """The scales of channels are not given to other channels of a grouped transposed convolution, and a normalization
    without gamma and beta, which fails, is kept."""
    wrong = _is_grouped_transposed(conv) or batch_norm.gamma is None or batch_norm.beta is None
    return not wrong and bool(host(conv, batch_norm))


@_correct("fuse_stack_split", "_try_to_transform")
def _fuse_stack_split(host: Callable[..., Any], block: Block, stack: Operation) -> None:
    """A stack whose parts are not squeezed after a split, which fails, is kept."""
    parts = [part for op in stack.outputs[0].child_ops if op.op_type == "split" for part in op.outputs]
    if all([op.op_type for op in part.child_ops] == ["squeeze"] and part.child_ops[0].axes is not None
           for part in parts):
        host(block, stack)


@_correct("merge_consecutive_paddings", "_match_pattern")
def _merge_consecutive_paddings(host: Callable[..., Any], self: Any, block: Block, pad: Operation) -> bool:
    """A padding that is also an output, which fails, is kept."""
    return not _is_block_output(pad) and bool(host(self, block, pad))


@_correct("fuse_pad_conv", "_try_to_transform")
def _fuse_pad_conv(host: Callable[..., Any], pad: Operation, transposes: Any, block: Block) -> bool:
    """A padding that has no numbers for the first axes is kept where it fails on the transpose that moves them."""
    return pad.pad.val is not None and pad.pad.val.size == 2 * pad.x.rank and bool(host(pad, transposes, block))


@_correct("select_optimization", "try_to_transform_inf_const_selection")
def _select_infinity(host: Callable[..., Any], select: Operation, cond: Any, a: Any, b: Any) -> Any:
    """A choice between an infinity and a tensor by one constant condition, which fails, is kept."""
    return host(select, cond, a, b) if np.ndim(cond) or np.ndim(a) and np.ndim(b) else None


@_correct("fuse_layernorm_or_instancenorm", "_try_match_and_transform_pattern_5")
def _fuse_channel_norm(host: Callable[..., Any], self: Any, mean: Operation, block: Block) -> bool:
    """A normalization over axis 1 is kept whose beta or gamma belongs to another axis, or comes after its use in the
    program, as those of other ranks than 4 do."""
    sizes = [(1,) * (mean.x.rank - var.rank) + tuple(var.shape) for var in _iterate_affine_constants(mean)]
    other = any(size != 1 for each in sizes for axis, size in enumerate(each) if axis != 1)
    return mean.x.rank == 4 and not other and bool(host(self, mean, block))


def _iterate_affine_constants(mean: Operation) -> Iterator[Var]:
    """Yield the constants that a normalization adds, and then multiplies by, after the product with its rsqrt."""
    for centered in _iterate_users(mean, "sub"):
        for normalized in _iterate_users(centered, "mul"):
            for shifted in _iterate_users(normalized, "add"):
                for op in (shifted, *_iterate_users(shifted, "mul")):
                    yield from (var for var in (op.x, op.y) if var.val is not None)


def _iterate_users(op: Operation, op_type: str) -> Iterator[Operation]:
    return (user for user in op.outputs[0].child_ops if user.op_type == op_type)


@_correct("fuse_layernorm_or_instancenorm", "_try_apply_transform")
def _apply_normalization(
    host: Callable[..., Any], mean: Operation, block: Block, gamma: Any, beta: Any, epsilon: Any, end: Operation,
    matched: list[Operation],
) -> bool:
    """An rsqrt with an epsilon of its own, which is lost, is kept."""
    lost = any(op.op_type == "rsqrt" and op.epsilon.val > _NEGLIGIBLE * abs(epsilon.val) for op in matched)
    return not lost and bool(host(mean, block, gamma, beta, epsilon, end, matched))


def _is_grouped_transposed(conv: Operation) -> bool:
    return conv.op_type == "conv_transpose" and bool(conv.groups.val > 1)


def _is_block_output(op: Operation) -> bool:
    return any(var is op.outputs[0] for var in op.enclosing_block.outputs)


def _raise_rank(op: Operation, user: Operation) -> bool:
    """Insert an expand_dims between `op` and a `user` whose result has a higher rank; return whether it has one.

    The passes do not match the ops then, later runs of coremltools' own passes on the package included.
    """
    result = op.outputs[0]
    if user.outputs[0].rank == result.rank:
        return False
    axes = list(range(user.outputs[0].rank - result.rank))
    _replace_operand(user, result, mb.expand_dims(x=result, axes=axes, before_op=user))
    return True


def _replace_operand(user: Operation, old: Var, new: Var) -> Operation:
    """Replace an add or a sub by one with another operand of the same values, and return it."""
    operands = {name: new if operand is old else operand for name, operand in (("x", user.x), ("y", user.y))}
    result = user.outputs[0]
    made: Var = getattr(mb, user.op_type)(**operands, before_op=user, name=result.name)
    user.enclosing_block.replace_uses_of_var_after_op(anchor_op=user, old_var=result, new_var=made)
    user.enclosing_block.remove_ops([user])
    return made.op
