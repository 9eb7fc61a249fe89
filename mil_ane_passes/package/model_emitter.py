"""The model file of a program: the source's bytes with only the changed parts replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var

from ..ir.block_editor import check_op_order
from ..utils.errors import InputError
from . import wire
from .interface import find_changed_widths, is_same_except_width, update_description
from .members import ML_PROGRAM_FIELD, Member, replace_members
from .names import assign_unique_names, walk_ops
from .op_exporter import Exporter, is_embedded, serialize_message
from .origin import (
    ATTRIBUTES,
    BLOCKS,
    DEFAULT,
    INPUTS,
    OUTPUTS,
    InputBinding,
    NestedOrigin,
    Origin,
    Part,
    get_file_inputs,
    get_origin,
    get_stored_value,
    is_kept,
)
from .program_reader import BLOCK_INPUTS, BLOCK_OUTPUTS, FUNCTIONS, OPERATIONS, SPECIALIZATIONS, FunctionOrigin
from .weight_plan import WeightPlan

_NAME_FIELD = 1
_FUNCTION_INPUTS_FIELD = 1


def emit_model(
    raw: bytes, spec: Any, program: Program, origins: Mapping[str, FunctionOrigin], plan: WeightPlan
) -> bytes:
    """Emit the model file for `program`, whose source is `raw` with the message `spec`.

    The model's description is kept, except for the dtypes of inputs and outputs that now hold floats of another width.
    Raises InputError when functions were added or removed, or when function inputs changed in any other way, as the
    description would not fit; in a pipeline also when float widths changed. Raises RuleError when an op uses a value
    that is defined after it.
    """
    if list(program.functions) != list(origins):
        raise InputError(
            f"the program has the functions {list(program.functions)}; expected {list(origins)} as loaded: "
            "functions cannot be added or removed when a package is saved"
        )
    by_member: dict[Member, dict[str, str]] = {}
    for full, origin in origins.items():
        by_member.setdefault(origin.member, {})[origin.name] = full
    new = {}
    for member, names in by_member.items():
        functions = {name: program.functions[full] for name, full in names.items()}
        data = _emit_member(member, functions, {name: origins[full] for name, full in names.items()}, plan)
        if data != member.raw:
            new[member.path] = data
    return replace_members(raw, spec, new) if new else raw


def _emit_member(
    member: Member, functions: Mapping[str, Function], origins: Mapping[str, FunctionOrigin], plan: WeightPlan
) -> bytes:
    """Emit the model message of one ML Program."""
    version = member.spec.specificationVersion
    blocks = {name: _emit_function(functions[name], origin, version, plan) for name, origin in origins.items()}
    changed = {
        name: find_changed_widths(functions[name], origin.inputs, origin.outputs) for name, origin in origins.items()
    }
    if member.path and any(changed.values()):
        raise InputError(
            f"the part {member.prefix[:-1]!r} of a pipeline has other widths of floats at its inputs or outputs now; "
            "expected those of before, which its neighbours and the pipeline declare: change the packages before they "
            "are made a pipeline"
        )

    def in_function(name: str, data: bytes) -> bytes:
        if changed[name]:
            data = _replace_inputs(functions[name], data, Exporter(version, plan, lambda block: b""))

        def change(f: wire.Field, payload: bytes) -> bytes | None:
            if f.number != SPECIALIZATIONS or wire.get_entry_key(payload) != origins[name].opset:
                return None
            return _replace_entry_value(payload, blocks[name]) if blocks[name] != origins[name].data else None

        return wire.edit_payloads(data, change)

    def in_program(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number != FUNCTIONS:
            return None
        return _replace_entry_value(payload, in_function(wire.get_entry_key(payload), wire.get_entry_value(payload)))

    made = wire.edit_payloads(
        member.raw, lambda f, payload: wire.edit_payloads(payload, in_program) if f.number == ML_PROGRAM_FIELD else None
    )
    return update_description(made, changed)


def _replace_inputs(function: Function, data: bytes, export: Exporter) -> bytes:
    """Return the bytes `data` of a function with its inputs' current types."""
    now = {name.encode(): export.output(var) for name, var in function.inputs.items()}
    old = wire.get_payloads(data, _FUNCTION_INPUTS_FIELD)
    return wire.replace_fields(
        data, _FUNCTION_INPUTS_FIELD, [now[wire.get_payloads(each, _NAME_FIELD)[-1]] for each in old]
    )


def _replace_entry_value(entry: bytes, value: bytes) -> bytes | None:
    """Return map entry `entry` with `value`; None when it has that value already."""
    return None if wire.get_entry_value(entry) == value else wire.replace_fields(entry, wire.VALUE, [value])


def _emit_function(function: Function, origin: FunctionOrigin, version: int, plan: WeightPlan) -> bytes:
    emitter = _Emitter(function, version, plan)
    now = tuple((name, var.sym_type) for name, var in function.inputs.items())
    if not emitter.has_same_inputs(now, origin.inputs, widths=True):
        raise InputError(
            f"the function has the inputs {[name for name, _ in now]}; "
            f"expected {[name for name, _ in origin.inputs]} with "
            "their types as loaded: the interface of a package cannot be changed when it is saved"
        )
    check_op_order(function, emitter.written)
    with assign_unique_names(function, emitter.written):
        return emitter.block(function, origin.data)


class _Emitter:
    def __init__(self, function: Function, version: int, plan: WeightPlan) -> None:
        self._export = Exporter(version, plan, lambda block: self.block(block, b"", new=True))
        self._used = _find_used_vars(function)
        self.written = {op for op in walk_ops(function) if self._is_written(op)}

    def _is_written(self, op: Operation) -> bool:
        return op.op_type != "const" or get_origin(op) is not None or op.outputs[0] in self._used

    def has_same_inputs(
        self, now: tuple[tuple[str, Any], ...], then: tuple[tuple[str, Any], ...], widths: bool = False
    ) -> bool:
        """Return whether two lists of names and types are equal; with `widths`, floats may differ in width."""
        return len(now) == len(then) and all(
            a == b and (self._export.has_same_type(s, t) or (widths and is_same_except_width(s, t)))
            for (a, s), (b, t) in zip(now, then, strict=True)
        )

    def block(self, block: Block, data: bytes, then: tuple[tuple[str, Any], ...] = (), new: bool = False) -> bytes:
        """Emit the bytes of `block`, which was loaded from `data` with the inputs `then`."""
        if not isinstance(block, Function):
            now = tuple((var.name, var.sym_type) for var in block.inputs)
            if new or not self.has_same_inputs(now, then):
                data = wire.replace_fields(data, BLOCK_INPUTS, [self._export.output(var) for var in block.inputs])
        data = wire.replace_fields(data, BLOCK_OUTPUTS, [var.name.encode() for var in block.outputs])
        ops = [part for op in block.operations if op in self.written for part in self._operation(op)]
        return wire.replace_fields(data, OPERATIONS, ops)

    def _operation(self, op: Operation) -> list[bytes]:
        origin = get_origin(op)
        if origin is None:
            return self._export.operations(op)
        parts = [self._part(op, origin, part) for part in origin.parts]
        if not origin.names and op.op_type == "coreml_update_state" and _has_users(op.outputs[0]):
            # In the file the write had no read; its result is used now, so a read is added.
            parts.append(self._export.operations(op)[1])
        return parts

    def _part(self, op: Operation, origin: Origin, part: Part) -> bytes:
        data = part.data
        if op.op_type == "const" and get_stored_value(op) is not origin.value:
            data = _set_entry(
                data, ATTRIBUTES, "val", serialize_message(self._export.get_milproto_value(op.outputs[0]))
            )
        now = get_file_inputs(op)
        for bound in part.bounds:
            if not is_kept(bound, now.get(bound.param, ())):
                data = self._rebind(op, part, bound, now.get(bound.param, ()), data)
        if len(origin.parts) == 1 and op.op_type != "coreml_update_state":
            known = {bound.param for bound in part.bounds}
            for param in [param for param in now if param not in known]:
                data = self._rebind(op, part, InputBinding(param, param, DEFAULT, ()), now[param], data)
        data = self._update_outputs(op, origin, part, data)
        return self._update_blocks(op, origin.blocks, data)

    def _rebind(self, op: Operation, part: Part, bound: InputBinding, now: tuple[Var, ...], data: bytes) -> bytes:
        field = bound.field
        if field == DEFAULT:
            field = ATTRIBUTES if any(other.field == ATTRIBUTES for other in part.bounds) else INPUTS
        if not now:
            return _set_entry(data, field, bound.key, None)
        if field == ATTRIBUTES and is_embedded(op, bound.param, now[0]):
            return _set_entry(data, field, bound.key, serialize_message(self._export.get_milproto_value(now[0])))
        return _set_entry(data, INPUTS, bound.key, self._export.argument(op, bound.param, now))

    def _update_outputs(self, op: Operation, origin: Origin, part: Part, data: bytes) -> bytes:
        changed = []
        old = wire.get_payloads(data, OUTPUTS)
        for index, declared in zip(part.outputs, old, strict=True):
            var = op.outputs[index]
            if not self._export.has_same_type(var.sym_type, origin.sym_types[index]):
                declared = self._export.output(var)
            elif var.name != origin.names[index]:
                declared = wire.replace_fields(declared, _NAME_FIELD, [var.name.encode()])
            changed.append(declared)
        return data if changed == old else wire.replace_fields(data, OUTPUTS, changed)

    def _update_blocks(self, op: Operation, origins: tuple[NestedOrigin, ...], data: bytes) -> bytes:
        # By index, not by identity: a copy of the program has blocks of its own.
        matched = len(op.blocks) == len(origins)
        blocks = [
            self.block(block, origins[index].data, origins[index].inputs)
            if matched
            else self.block(block, b"", new=True)
            for index, block in enumerate(op.blocks)
        ]
        return wire.replace_fields(data, BLOCKS, blocks) if blocks or origins else data


def _set_entry(data: bytes, field: int, key: str, value: bytes | None) -> bytes:
    """Return an op with entry `key` of map `field` set to `value`, in place or after the others; None removes it."""
    entries = wire.get_payloads(data, field)
    kept: list[bytes] = []
    found = False
    for entry in entries:
        if wire.get_entry_key(entry) != key:
            kept.append(entry)
        elif value is not None:
            kept.append(wire.replace_fields(entry, wire.VALUE, [value]))
            found = True
    if value is not None and not found:
        kept.append(wire.encode_entry(key, value))
    return wire.replace_fields(data, field, kept)


def _has_users(var: Var) -> bool:
    return bool(var.child_ops or var.consuming_blocks)


def _find_used_vars(function: Function) -> set[Var]:
    """Find the vars that ops in the file will refer to by name."""
    used = set(function.outputs)
    for op in walk_ops(function):
        used.update(var for block in op.blocks for var in block.outputs)
        if op.op_type == "const":
            continue
        origin = get_origin(op)
        bounds = {bound.param: bound for part in origin.parts for bound in part.bounds} if origin is not None else {}
        for param, now in get_file_inputs(op).items():
            bound = bounds.get(param)
            if bound is not None and is_kept(bound, now):
                # Literals inside the op need no const, also where other arguments are names.
                used.update(var for arg, var in zip(bound.args, now) if isinstance(arg, str))
                continue
            in_file = bound.args if bound is not None else ()
            used.update(var for var in now if var.name in in_file or not is_embedded(op, param, var))
    return used
