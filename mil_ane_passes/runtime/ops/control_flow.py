"""Constants, branches, loops and lists."""

from __future__ import annotations

from typing import Any

import torch

from ..registry import register_kernel


class TensorList:
    """A MIL list of tensors. Immutable: a write makes a new list, as in SSA."""

    def __init__(self, items: list[torch.Tensor | None], dynamic: bool) -> None:
        self.items = items
        self.dynamic = dynamic

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return sum(item.nbytes for item in self.items if item is not None)

    def written(self, index: int, value: torch.Tensor) -> TensorList:
        """Return a copy with `value` at `index`; a list of dynamic length grows as needed."""
        items = list(self.items)
        _check_not_negative(index)
        if self.dynamic and index >= len(items):
            items += [None] * (index + 1 - len(items))
        items[index] = value
        return TensorList(items, self.dynamic)

    def read(self, index: int) -> torch.Tensor:
        """Return the element at `index`.

        An element that was never written reads as zeros of the shape of the written elements. Raises IndexError when no
        element was written.
        """
        _check_not_negative(index)
        item = self.items[index]
        if item is not None:
            return item
        known = next((each for each in self.items if each is not None), None)
        if known is None:
            raise IndexError(f"list element {index} is read before any element is written")
        return torch.zeros_like(known)


def _check_not_negative(index: int) -> None:
    """Raise IndexError for a negative index: indices of lists do not count from the end, unlike Python's."""
    if index < 0:
        raise IndexError(f"list index {index} is negative")


@register_kernel("const", "_const_symbolic")
def const(op: Any, ins: Any) -> Any:
    """Return a constant.

    Constants are read when used and never executed; this only declares that they are supported.
    """
    return ins.machine.operand(op.outputs[0])


@register_kernel("select")
def select(op: Any, ins: Any) -> torch.Tensor:
    return torch.where(ins["cond"].bool(), ins["a"], ins["b"])


@register_kernel("cond")
def cond(op: Any, ins: Any) -> list[Any]:
    used = op.blocks[0] if ins.value("pred") else op.blocks[1]
    return list(ins.machine.run_block(used))


@register_kernel("while_loop")
def while_loop(op: Any, ins: Any) -> list[Any]:
    proceeds, body = op.blocks
    values = [ins.machine.keep(var, value) for var, value in zip(op.inputs["loop_vars"], ins["loop_vars"])]
    with ins.machine.track_loop(op) as count_step:
        while bool(ins.machine.run_block(proceeds, values)[0]):
            count_step()
            values = ins.machine.run_block(body, values)
    return values


@register_kernel("make_list")
def make_list(op: Any, ins: Any) -> TensorList:
    shape = list(ins["elem_shape"])
    items: list[torch.Tensor | None] = [None] * int(ins.value("init_length"))
    if all(isinstance(extent, torch.Tensor) for extent in shape):
        dtype = torch.int32 if ins.value("dtype") == "int32" else ins.compute
        dtype = torch.bool if ins.value("dtype") == "bool" else dtype
        items = [torch.zeros([int(extent) for extent in shape], dtype=dtype) for _ in items]
    return TensorList(items, bool(ins.value("dynamic_length")))


@register_kernel("list_length")
def list_length(op: Any, ins: Any) -> torch.Tensor:
    return torch.tensor(len(ins["ls"].items), dtype=torch.int32)


@register_kernel("list_write")
def list_write(op: Any, ins: Any) -> TensorList:
    made: TensorList = ins["ls"].written(int(ins["index"]), _to_stored(ins, "value"))
    return made


@register_kernel("list_read")
def list_read(op: Any, ins: Any) -> torch.Tensor:
    return ins.machine.precision.operand(ins["ls"].read(int(ins["index"])))


@register_kernel("list_gather")
def list_gather(op: Any, ins: Any) -> torch.Tensor:
    picked = [ins["ls"].read(index) for index in ins.values("indices")]
    return ins.machine.precision.operand(torch.stack(picked) if picked else ins["ls"].read(0)[None][:0])


@register_kernel("list_scatter")
def list_scatter(op: Any, ins: Any) -> TensorList:
    made: TensorList = ins["ls"]
    values = _to_stored(ins, "value")
    for position, index in enumerate(ins.values("indices")):
        made = made.written(index, values[position])
    return made


def _to_stored(ins: Any, name: str) -> torch.Tensor:
    """Return an operand in the dtype in which its variable is stored: lists hold stored values."""
    return ins.machine.keep(ins.var(name), ins[name])
