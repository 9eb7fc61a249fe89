"""Casts at a function's interface: inserted, and left out where one would only undo another."""

from __future__ import annotations

from ..package.names import make_free_name
from .casts import DTYPES, get_cast_input, get_dtype, make_cast, make_identity, replace_dtype
from .program_parts import Function, Op, ValueDeclaration
from .uses import get_read_names, rename_reads

__all__ = ["InterfaceCasts"]

_OPS_READING_ANY_FLOAT = ("cast", "shape")
"Ops that accept any float type, so that they need no cast back."


class InterfaceCasts:
    """Changes inputs and outputs of `function` to `dtype`, "fp16" or "fp32", from the other of the two."""

    def __init__(self, function: Function, dtype: str) -> None:
        self._function, self._block, self._dtype = function, function.block, dtype
        self._old = "fp32" if dtype == "fp16" else "fp16"
        self._taken = function.names()
        self.removed = False
        "True once ops were removed."

    def change_input(self, name: str) -> tuple[str, bool]:
        """Declare the input in the new type. Returns a note on its casts, and whether results stay the same bits.

        Casts of it to the new type are removed. Ops that read it in the old type read a cast back.
        """
        place = next(i for i, each in enumerate(self._function.inputs) if each.name == name)
        declared = self._function.inputs[place].message.type
        self._function.inputs[place] = ValueDeclaration.of_type(name, replace_dtype(declared, self._dtype))
        casts = self._find_casts(name)
        reading = [op for op in self._block.ops if op not in casts and _is_reader(op, name)]
        readers = [op for op in reading if op.type not in _OPS_READING_ANY_FLOAT]
        if readers:
            inside = make_free_name(f"{name}_to_{self._old}", self._taken)
            changed = {op: rename_reads(op, {name: inside}) for op in readers}
            cast = make_cast(name, replace_dtype(declared, self._dtype), self._old, inside, self._taken)
            self._block.ops = [*cast, *(changed.get(op, op) for op in self._block.ops)]
        # This must follow the change of readers in the old type: the ops changed here read the input in its new type.
        self._remove_casts(casts, name)
        if readers:
            return f"it is cast to {self._old} where it is read so", self._dtype == "fp32"
        exact = self._dtype == "fp32" or all(op.type == "shape" for op in reading)
        return "its cast is gone" if casts else "what reads it takes either", exact

    def change_output(self, name: str) -> tuple[str, bool]:
        """Change the output to the new type, keeping its name. Returns as `change_input` does."""
        place = next(i for i, op in enumerate(self._block.ops) if name in op.outputs)
        maker = self._block.ops[place]
        declared = self._function.get_type(name)
        source = get_cast_input(maker)
        # A cast to fp16 rounds: its fp32 operand has other values.
        if source and self._dtype == "fp16" and get_dtype(self._function.get_type(source)) == DTYPES["fp16"]:
            self._return_source(name, source, place)
            return "its cast is gone", True
        inside = self._rename(name, f"{name}_in_{self._old}")
        self._block.ops += make_cast(inside, declared, self._dtype, name, self._taken)
        return f"it is made in {self._old} and cast", self._dtype == "fp32"

    def _find_casts(self, name: str) -> set[Op]:
        """Find the casts of an input to the new type, at the top of the function, that can be removed."""
        if any(self._is_hidden(name, op) for op in self._block.ops):
            return set()
        mark, new = name.encode(), DTYPES[self._dtype]
        return {op for op in self._block.ops if mark in op.data and get_cast_input(op) == name
                and get_dtype(op.message.outputs[0].type) == new and op.outputs[0] not in self._block.outputs}

    def _remove_casts(self, casts: set[Op], name: str) -> None:
        """Remove casts of an input; their users read the input."""
        if not casts:
            return
        names = {op.outputs[0]: name for op in casts}
        self._drop(casts)
        marks = [old.encode() for old in names]
        self._block.ops = [rename_reads(op, names) if any(mark in op.data for mark in marks) else op
                           for op in self._block.ops]

    def _is_hidden(self, name: str, op: Op) -> bool:
        """Return whether a block inside an op has a value of its own of this name."""
        return name.encode() in op.data and any(
            name in {each.name for each in block.inputs} or any(name in inner.outputs for inner in block.walk())
            for block in op.blocks)

    def _return_source(self, name: str, source: str, place: int) -> None:
        """Make output `name`, which the op at `place` casts from `source`, return that source itself."""
        cast = self._block.ops[place]
        declared = self._function.get_type(source)
        inside = make_free_name(f"{name}_in_{self._old}", self._taken)
        still = [op for op in self._block.ops if _is_reader(op, name)]
        kept = cast.with_outputs({name: inside})
        self._block.ops = [kept if op is cast else rename_reads(op, {name: inside}) if op in still else op
                           for op in self._block.ops]
        if not still:
            self._drop({kept})
        ends = {*self._block.outputs, *(each.name for each in self._function.inputs)}
        constant = any(source in op.outputs and op.type == "const" for op in self._block.ops)
        if source in ends or constant or any(self._is_hidden(name, op) for op in self._block.ops):
            self._block.ops.append(make_identity(source, declared, name))
        else:
            self._block.ops = [_rename_value(op, source, name) for op in self._block.ops]

    def _rename(self, name: str, other: str) -> str:
        """Rename the value `name` at its op and its users; the name of the output is then free."""
        inside = make_free_name(other, self._taken)
        self._block.ops = [_rename_value(op, name, inside) for op in self._block.ops]
        return inside

    def _drop(self, casts: set[Op]) -> None:
        """Remove casts, and the consts of their dtypes if no other op reads them."""
        said = {argument for op in casts for argument in op.arguments}
        self._block.ops = [op for op in self._block.ops if op not in casts]
        used = set(self._block.outputs).union(*map(get_read_names, self._block.ops))
        self._block.ops = [op for op in self._block.ops
                           if op.type != "const" or not said & set(op.outputs) - used]
        self.removed = True


def _is_reader(op: Op, name: str) -> bool:
    return name.encode() in op.data and name in get_read_names(op)


def _rename_value(op: Op, name: str, other: str) -> Op:
    """Return the op with the value `name` renamed to `other`, in its outputs and inputs."""
    if name.encode() not in op.data:
        return op
    return rename_reads(op, {name: other}).with_outputs({name: other})
