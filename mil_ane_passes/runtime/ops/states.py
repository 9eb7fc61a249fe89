"""Reading and writing states."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import register_kernel


@register_kernel("read_state")
def read_state(op: Any, ins: Any) -> torch.Tensor:
    return ins.machine.precision.operand(ins["input"].content)


@register_kernel("coreml_update_state")
def coreml_update_state(op: Any, ins: Any) -> torch.Tensor:
    cell, value = ins["state"], ins["value"]
    cell.content = ins.machine.keep(ins.op.outputs[0], value)
    cell.written = True
    return value


@register_kernel("write_state")
def write_state(op: Any, ins: Any) -> tuple[()]:
    cell, (dtype, value) = ins["state"], (ins.var("value").dtype, ins["value"])
    cell.content = ins.machine.precision.store(value, dtype)
    cell.written = True
    return ()
