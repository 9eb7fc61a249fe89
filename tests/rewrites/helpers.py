"""Counting layout ops, and holding converted models against PyTorch's own outputs."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mil_ane_passes.core.query import all_ops
from mil_ane_passes.runtime import Runtime


def kinds(program) -> Counter:
    return Counter(op.op_type for _, op in all_ops(program))


def layout_ops(program) -> int:
    counted = kinds(program)
    return counted["expand_dims"] + counted["squeeze"]


def torch_outputs(module, *inputs) -> np.ndarray:
    """The module's own output in double precision."""
    import torch

    with torch.no_grad():
        return module.double()(*(value.double() for value in inputs)).numpy()


def only_output(program, value, precision, quirks=()) -> np.ndarray:
    runtime = Runtime(program, precision=precision, quirks=quirks)
    (name,) = program.functions["main"].inputs
    (output,) = runtime({name: value}).values()
    return output


def half(module):
    """The module with its weights rounded to fp16, which is what an fp16 package stores."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.half().to(parameter.dtype))
    return module
