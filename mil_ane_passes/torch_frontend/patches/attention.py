"""`scaled_dot_product_attention` with completely masked rows, with large scores, and with grouped heads.

Where a row of the mask allows no key (the padding of a prompt padded on the left), torch returns zeros. coremltools
adds -30000 to every score of such a row, which then averages all values; a mask of -inf makes it NaN. Here the rows of
a boolean mask, as 0 or 1, multiply coremltools' result, which is exact: all other rows are multiplied by 1. For a float
mask, a select replaces rows of -inf by zeros.

In fp32 a score can be more than 30000 above another, and a key that coremltools masks then counts. Here a boolean mask
adds -1e38, beside which no score counts, and which is -30000 in fp16.

`enable_gqa` (fewer heads of keys and values than of queries) is ignored by coremltools, which then cannot broadcast.
Here each such head is repeated, as torch defines it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, get_dims, make_range, to_python, to_size_vector
from ..probes import find_fault

PATCH = Patch(
    code="TORCH104", severity=Severity.WRONG,
    title="attention averages all values where torch returns zeros (entirely masked rows), and counts masked keys "
          "beside large scores; `enable_gqa` is ignored",
    upstream=("https://github.com/apple/coremltools/pull/2855",),
)
_OP_KIND = "scaled_dot_product_attention"
_MASK_VALUE, _FP16_MASK_VALUE = -1e38, -3e4
"""What is added to hide a key: scores of fp32 are lost beside the first, which TORCH114 turns into the second in fp16.

Both are finite with a score added, so that no row is NaN.
"""


@PATCH.probe
def probe() -> str | None:
    import torch

    x, attend = torch.tensor([[0., 1], [2, 3]]), torch.nn.functional.scaled_dot_product_attention
    return find_fault(lambda x: attend(x, x, x, attn_mask=x > 1), x) or find_fault(
        lambda x: attend(x, x, x, is_causal=True), 1e3 * x)


@PATCH.op(_OP_KIND)
def lower_attention(context: Any, node: Any) -> None:
    """Lower scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa)."""
    inputs = bind_arguments(context, node, "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None "
                                "enable_gqa=False")
    if to_python(inputs.dropout_p, node, "dropout_p") != 0:
        raise NotConverted.at(node, "applies random dropout", "pass dropout_p=0.0 for inference")
    key, value = inputs.key, inputs.value
    if to_python(inputs.enable_gqa, node, "enable_gqa"):
        key, value = (_repeat_heads(each, inputs.query) for each in (key, value))
    mask = inputs.attn_mask
    if to_python(inputs.is_causal, node, "is_causal"):
        mask = _make_causal_mask(inputs.query, key)
    takes_bools = inputs.scale is None and is_current_opset_version_compatible_with(ct.target.iOS18)
    mask, rows = _prepare_mask(mask, inputs.query.dtype, takes_bools)
    if rows is None:
        _lower_with_coremltools(context, node, inputs, key, value, mask, node.name)
        return
    found = _lower_with_coremltools(context, node, inputs, key, value, mask, node.name + "_unmasked")
    if rows.dtype == types.bool:
        add_result(context, node, mb.select(cond=rows, a=found, b=mb.const(val=_make_zero(found)), name=node.name))
    else:
        add_result(context, node, mb.mul(x=found, y=rows, name=node.name))


def make_additive_mask(allowed: Var, flags: Var) -> Var:
    """Return 0 where the bools `allowed` are true, and elsewhere a finite number that outweighs all scores.

    `flags` are these bools as 0 and 1 of the dtype of the scores.
    """
    value = _FP16_MASK_VALUE if flags.dtype == types.fp16 else _MASK_VALUE
    # of a select, MIL infers the shape from its numbers alone, which cannot both be scalars
    zero = mb.sub(x=flags, y=_to_numpy_scalar(1, flags.dtype))
    return mb.select(cond=allowed, a=zero, b=_to_numpy_scalar(value, flags.dtype))


def _prepare_mask(mask: Var | None, dtype: Any, takes_bools: bool) -> tuple[Var | None, Var | None]:
    """Return the mask to add, and which of its rows allow any key.

    The latter is None (all rows do), 0 and 1, or for float masks bools. With `takes_bools`, coremltools' lowering makes
    an op that masks by bools.
    """
    if mask is None:
        return None, None
    if mask.dtype == types.bool:
        flags = cast_to(mask, dtype)
        if mask.val is not None and np.all(np.any(mask.val, axis=-1)):
            return mask if takes_bools else make_additive_mask(mask, flags), None
        return make_additive_mask(mask, flags), mb.reduce_max(x=flags, axes=[-1], keep_dims=True)
    if mask.val is not None and np.all(np.any(mask.val > -np.inf, axis=-1)):
        return mask, None
    highest = mb.reduce_max(x=mask, axes=[-1], keep_dims=True)
    return mask, mb.greater(x=highest, y=_to_numpy_scalar(-np.inf, mask.dtype))


def _lower_with_coremltools(
    context: Any, node: Any, given: Any, key: Var, value: Var, mask: Var | None, name: str
) -> Var:
    """Lower query, key, value and mask with coremltools' own lowering, under `name`."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    inputs = []
    for place, each in enumerate((given.query, key, value, mask, given.scale)):
        inputs.append(f"{name}_argument_{place}")
        context.add(each if each is None or isinstance(each, Var) else mb.const(val=np.float32(each)), inputs[-1])
    plain = SimpleNamespace(kind="coreml::sdpa", name=name, inputs=inputs[:4], outputs=[name],
                            kwinputs={"scale": [inputs[4]]} if given.scale is not None else None)
    _TORCH_OPS_REGISTRY.name_to_func_mapping[_OP_KIND](context, plain)
    return context[name]


def _make_causal_mask(query: Var, key: Var) -> Var:
    """Make a mask that is true where the column is not beyond the row: a const where both lengths are constant."""
    rows, columns = get_dims(query)[-2], get_dims(key)[-2]
    if isinstance(rows, int) and isinstance(columns, int):
        return mb.const(val=np.tril(np.ones((rows, columns), dtype=bool)))
    return mb.greater_equal(x=mb.expand_dims(x=make_range(rows), axes=[1]), y=make_range(columns))


def _repeat_heads(x: Var, query: Var) -> Var:
    """Repeat each head of `x` (..., heads, length, size) until there are as many as in `query`."""
    times = query.shape[-3] // x.shape[-3]
    if times == 1:
        return x
    *batch, heads, length, size = get_dims(x)
    apart = mb.reshape(x=x, shape=to_size_vector([*batch, heads, 1, length, size]))
    repeated = mb.tile(x=apart, reps=[*[1] * len(batch), 1, times, 1, 1])
    return mb.reshape(x=repeated, shape=to_size_vector([*batch, heads * times, length, size]))


def _to_numpy_scalar(value: float, dtype: Any) -> Any:
    return types.nptype_from_builtin(dtype)(value)


def _make_zero(x: Var) -> Any:
    return types.nptype_from_builtin(x.dtype)(0)
