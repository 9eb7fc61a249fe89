"""Sizes as numbers: `int(x.shape[0])`, `a, b, _ = x.shape`, `x.shape[0] // 2`, traced or scripted; exported `min`.

A size that is temporarily a tensor (`NumToTensor`) becomes a const of shape (1,) in coremltools, and its casts call
`int(array)`, which numpy >= 2.4 allows for rank 0 only. torch's value has rank 0, and so does this one (which also
keeps `int(x.shape[0]) // 2 + 1` of rank 0 throughout). The casts read the single element of an operand of any rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH139",
              title="`int()` of a size, and arithmetic with it, fails with numpy >= 2.4, scripted `float()` always",
              upstream=(
        "https://github.com/apple/coremltools/issues/2633",
        "https://github.com/apple/coremltools/pull/2632",
        "https://github.com/apple/coremltools/issues/2755",
    ))

_NUMBER_TYPES: dict[str, tuple[type, Any]] = {"bool": (bool, types.bool), "int": (int, types.int32),
                                              "float": (float, types.fp32)}


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x[:, :x.shape[1] // 2] * int(x.shape[0] * 2), torch.ones(2, 4))


@PATCH.op("numtotensor")
def numtotensor(context: Any, node: Any) -> None:
    """Lower NumToTensor(a): the number itself, of rank 0."""
    x = to_tensor(bind_arguments(context, node, "a").a)
    add_result(context, node, x if x.val is None else mb.const(val=_get_single_element(x), name=node.name))


@PATCH.op("bool", "int", "float", "sym_float", "sym_int", "intimplicit", "floatimplicit", "scalarimplicit", "item")
def lower_number_cast(context: Any, node: Any) -> None:
    """Lower Int(a), Float(a), Bool(a), IntImplicit(a), item(a), ...: the one element of `a` as that type."""
    x = to_tensor(bind_arguments(context, node, "a").a)
    if any(size != 1 for size in x.shape):
        raise ValueError("input to cast must be either a scalar or a length 1 tensor")
    convert, dtype = _NUMBER_TYPES.get(node.kind.lower().removesuffix("implicit").removeprefix("sym_"), (None, x.dtype))
    if x.val is not None:
        value = _get_single_element(x)
        add_result(context, node, mb.const(val=value if convert is None else convert(value), name=node.name))
        return
    add_result(context, node, cast_to(mb.squeeze(x=x) if x.rank else x, dtype))


@PATCH.op("sym_ite")
def lower_choice_of_sizes(context: Any, node: Any) -> None:
    """Lower sym_ite(b, t, f) of exported numbers: t where b is true, else f."""
    inputs = bind_arguments(context, node, "b t f")
    add_result(context, node, mb.select(cond=to_tensor(inputs.b), a=to_tensor(inputs.t), b=to_tensor(inputs.f),
                                        name=node.name))


@PATCH.op("sym_min", "sym_max")
def lower_extreme_of_sizes(context: Any, node: Any) -> None:
    """Lower min(a, b) and max(a, b) of exported sizes."""
    inputs = bind_arguments(context, node, "a b")
    x, y = to_tensor(inputs.a), to_tensor(inputs.b)
    if x.val is not None and y.val is not None:
        extreme = min if node.kind == "sym_min" else max
        add_result(context, node, mb.const(val=extreme(x.val, y.val), name=node.name))
        return
    extreme_op = mb.minimum if node.kind == "sym_min" else mb.maximum
    add_result(context, node, extreme_op(x=x, y=y, name=node.name))


def _get_single_element(x: Any) -> Any:
    """Return the value of a const with one element as a numpy scalar."""
    return np.asarray(x.val).reshape(-1)[0]
