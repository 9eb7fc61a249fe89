"""The model file of a program: the source's bytes with only the changed parts replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var

from ..ir.block_editor import check_op_order
from ..ir.query import iterate_nested_ops
from ..utils.errors import InputError
from . import wire
from .description import DESCRIPTION_FIELD, Description
from .interface import find_changed_widths, get_file_name, is_same_except_width, iterate_renamed, update_section
from .members import ML_PROGRAM_FIELD, Member, replace_members
from .names import assign_unique_names
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
    is_same_arg,
)
from .program_reader import (
    BLOCK_INPUTS,
    BLOCK_OUTPUTS,
    FUNCTIONS,
    OPERATIONS,
    OPSET,
    SPECIALIZATIONS,
    FunctionOrigin,
    choose_default_function,
    make_new_origin,
)
from .weight_plan import WeightPlan

_NAME_FIELD = _ARGUMENTS_FIELD = 1
_FUNCTION_INPUTS_FIELD = 1
NAMED_TYPE = proto.MIL_pb2.NamedValueType


def emit_model(
    raw: bytes, spec: Any, program: Program, origins: Mapping[str, FunctionOrigin], plan: WeightPlan,
    interface: bool = False,
) -> bytes:
    """Emit the model file for `program`, whose source is `raw` with the message `spec`.

    With `interface`, functions, inputs, outputs and states that were added, removed, renamed or changed are written,
    and the model's description is updated accordingly. Without it, floats of inputs and outputs may have another width
    (but not in a pipeline); InputError is raised when functions were added or removed, or inputs changed in any other
    way. Raises RuleError when an op uses a value that is defined after it.
    """
    if not interface and list(program.functions) != list(origins):
        raise InputError(
            f"the program has the functions {list(program.functions)}; expected {list(origins)} as loaded: "
            "functions cannot be added or removed when a package is saved"
        )
    members = list(dict.fromkeys(origin.member for origin in origins.values()))
    for function in program.functions.values():
        if not hasattr(function, "origin"):
            function.origin = make_new_origin(members[0], function)
    new: dict[tuple[int, ...], bytes] = {}
    renamed: dict[str, str] = {}
    for member in members:
        functions = {name.removeprefix(member.prefix): function for name, function in program.functions.items()
                     if function.origin.member is member}
        emitter = _MemberEmitter(member, functions, plan, interface)
        default = str(program.default_function_name).removeprefix(member.prefix)
        data = emitter.emit(default if interface else "")
        if data != member.raw:
            new[member.path] = data
        if member.path and interface:
            renamed |= {old: name for function in functions.values() for old, name in iterate_renamed(function)}
    made = replace_members(raw, spec, new) if new else raw
    return _rename_pipeline_features(made, renamed) if renamed else made


def _rename_pipeline_features(raw: bytes, renamed: Mapping[str, str]) -> bytes:
    described = Description(b"".join(wire.get_payloads(raw, DESCRIPTION_FIELD)))
    described.model.rename(renamed)
    return wire.replace_fields(raw, DESCRIPTION_FIELD, [described.emit()])


class _MemberEmitter:
    """Emits the model message of one ML Program."""

    def __init__(self, member: Member, functions: Mapping[str, Function], plan: WeightPlan, interface: bool) -> None:
        self._member, self._functions, self._interface = member, functions, interface
        self._version, self._plan = int(member.spec.specificationVersion), plan
        self._program = wire.get_payloads(member.raw, ML_PROGRAM_FIELD)[0]
        self._entries = {wire.get_entry_key(each): each for each in wire.get_payloads(self._program, FUNCTIONS)}

    def emit(self, default: str) -> bytes:
        """Emit the message; `default` is the function that runs by default ("" keeps the previous one)."""
        ordered = sorted(self._functions, key=list(self._entries).index) if (
            self._functions.keys() == self._entries.keys()) else list(self._functions)
        entries = [self._emit_entry(name, self._functions[name]) for name in ordered]
        raw = wire.replace_fields(
            self._member.raw, ML_PROGRAM_FIELD, [wire.replace_fields(self._program, FUNCTIONS, entries)])
        old = b"".join(wire.get_payloads(raw, DESCRIPTION_FIELD))
        described = self._emit_description(Description(old), default)
        return raw if described == old else wire.replace_fields(raw, DESCRIPTION_FIELD, [described])

    def _emit_entry(self, name: str, function: Function) -> bytes:
        origin = function.origin
        data = wire.get_entry_value(self._entries[origin.name]) if origin.name else _start_function(origin)
        block = _emit_function(function, origin, self._version, self._plan, self._interface)
        if self._member.path and find_changed_widths(function) and not self._interface:
            raise InputError(
                f"the part {self._member.prefix[:-1]!r} of a pipeline changed the float width of its inputs or "
                f"outputs; expected the original one, which its neighbours and the pipeline declare: change the "
                f"packages before they are joined"
            )
        data = self._replace_inputs(function, data)

        def replace_block(f: wire.Field, payload: bytes) -> bytes | None:
            if f.number != SPECIALIZATIONS or wire.get_entry_key(payload) != origin.opset:
                return None
            return _replace_entry_value(payload, block) if block != origin.data else None

        data = wire.edit_payloads(data, replace_block)
        if name not in self._entries:
            return wire.encode_entry(name, data)
        return wire.replace_fields(self._entries[name], wire.VALUE, [data])

    def _replace_inputs(self, function: Function, data: bytes) -> bytes:
        """Return the bytes `data` of a function with its current inputs and states."""
        export = Exporter(self._version, self._plan, lambda block: b"")
        then = dict(function.origin.inputs)
        old = {wire.get_payloads(each, _NAME_FIELD)[-1].decode(): each
               for each in wire.get_payloads(data, _FUNCTION_INPUTS_FIELD)}
        declared = []
        for name, var in function.inputs.items():
            source = get_file_name(function, name)
            if source not in old or not export.has_same_type(var.sym_type, then[source]):
                declared.append(export.export_output(var))
            elif name != source:
                declared.append(wire.replace_fields(old[source], _NAME_FIELD, [name.encode()]))
            else:
                declared.append(old[source])
        return wire.replace_fields(data, _FUNCTION_INPUTS_FIELD, declared)

    def _emit_description(self, description: Description, default: str) -> bytes:
        """Return the description of the current functions."""
        sources = [function.origin.name for function in self._functions.values()]
        first, single = description.default, not description.functions
        for name, function in self._functions.items():
            if not function.origin.name:
                for each in self._entries:
                    description.make_own_section(each)
                description.make_own_section(name)
            elif name != function.origin.name:
                description.functions.append(description.make_own_section(function.origin.name).copy(name))
            elif sources.count(name) > 1:
                description.make_own_section(name)
        if self._functions.keys() != self._entries.keys() and description.functions:
            known = {section.name: section for section in description.functions}
            description.functions = [known[name] for name in self._functions if name in known]
        for name, function in self._functions.items():
            for section in description.of(name):
                update_section(section, function, self._interface)
        names = list(self._entries)
        loaded = choose_default_function(self._member, [self._member.prefix + each for each in names])
        if description.functions and default in self._functions and not self._member.path:
            if first != default and (default != loaded or first or single):
                description.default = default
        return description.emit()


def _start_function(origin: FunctionOrigin) -> bytes:
    """Return the bytes of a function without inputs and ops."""
    block = wire.encode_field(SPECIALIZATIONS, wire.encode_entry(origin.opset, b""))
    return wire.encode_field(OPSET, origin.opset.encode()) + block


def _replace_entry_value(entry: bytes, value: bytes) -> bytes | None:
    """Return map entry `entry` with `value`; None when it has that value already."""
    return None if wire.get_entry_value(entry) == value else wire.replace_fields(entry, wire.VALUE, [value])


def _emit_function(
    function: Function, origin: FunctionOrigin, version: int, plan: WeightPlan, interface: bool
) -> bytes:
    emitter = _Emitter(function, version, plan)
    now = tuple((name, var.sym_type) for name, var in function.inputs.items())
    if not interface and not emitter.has_same_inputs(now, origin.inputs, widths=True):
        raise InputError(
            f"the function has the inputs {[name for name, _ in now]}; "
            f"expected {[name for name, _ in origin.inputs]} with "
            "their types as loaded: the interface of a package cannot be changed when it is saved"
        )
    check_op_order(function, emitter.written)
    with assign_unique_names(function, emitter.written):
        return emitter.emit_block(function, origin.data)


class _Emitter:
    def __init__(self, function: Function, version: int, plan: WeightPlan) -> None:
        self._export = Exporter(version, plan, lambda block: self.emit_block(block, b"", new=True))
        self._used = _find_used_vars(function)
        # Sizes that are unknown in the file may be known now, including sizes that loading inferred.
        self._sized = bool(getattr(function, "sizes_inferred", False))
        self.written = {op for op in iterate_nested_ops(function) if self._is_written(op)}

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

    def emit_block(self, block: Block, data: bytes, then: tuple[tuple[str, Any], ...] = (), new: bool = False) -> bytes:
        """Emit the bytes of `block`, which was loaded from `data` with the inputs `then`."""
        if not isinstance(block, Function):
            now = tuple((var.name, var.sym_type) for var in block.inputs)
            if new or not self.has_same_inputs(now, then):
                declared = [self._export.export_output(var) for var in block.inputs]
                data = wire.replace_fields(data, BLOCK_INPUTS, declared)
            elif self._sized:
                old = zip(wire.get_payloads(data, BLOCK_INPUTS), block.inputs, strict=True)
                data = wire.replace_fields(data, BLOCK_INPUTS, [self._add_sizes(each, var) for each, var in old])
        data = wire.replace_fields(data, BLOCK_OUTPUTS, [var.name.encode() for var in block.outputs])
        ops = [part for op in block.operations if op in self.written for part in self._emit_op(op)]
        return wire.replace_fields(data, OPERATIONS, ops)

    def _emit_op(self, op: Operation) -> list[bytes]:
        origin = get_origin(op)
        if origin is None:
            return self._export.export_op(op)
        parts = [self._emit_part(op, origin, part) for part in origin.parts]
        if not origin.names and op.op_type == "coreml_update_state" and _has_users(op.outputs[0]):
            # The file has no read after the write. The result of the write is used now, so a read is added.
            parts.append(self._export.export_op(op)[1])
        return parts

    def _emit_part(self, op: Operation, origin: Origin, part: Part) -> bytes:
        data = part.data
        if op.op_type == "const" and get_stored_value(op) is not origin.value:
            data = _set_entry(
                data, ATTRIBUTES, "val", serialize_message(self._export.get_milproto_value(op.outputs[0]))
            )
        now = get_file_inputs(op)
        for bound in part.bounds:
            if not is_kept(bound, now.get(bound.param, ())):
                data = self._rebind_input(op, part, bound, now.get(bound.param, ()), data)
        if len(origin.parts) == 1 and op.op_type != "coreml_update_state":
            known = {bound.param for bound in part.bounds}
            for param in [param for param in now if param not in known]:
                data = self._rebind_input(op, part, InputBinding(param, param, DEFAULT, ()), now[param], data)
        data = self._update_outputs(op, origin, part, data)
        return self._update_blocks(op, origin.blocks, data)

    def _rebind_input(self, op: Operation, part: Part, bound: InputBinding, now: tuple[Var, ...], data: bytes) -> bytes:
        field = bound.field
        if field == DEFAULT:
            field = ATTRIBUTES if any(other.field == ATTRIBUTES for other in part.bounds) else INPUTS
        if not now:
            return _set_entry(data, field, bound.key, None)
        if field == ATTRIBUTES and is_embedded(op, bound.param, now[0]):
            return _set_entry(data, field, bound.key, serialize_message(self._export.get_milproto_value(now[0])))
        new = wire.get_payloads(self._export.export_argument(op, bound.param, now), _ARGUMENTS_FIELD)
        if len(bound.args) == len(now):  # an argument that is still the same keeps its bytes, also a literal
            entries = wire.get_payloads(data, INPUTS)
            entry = next((each for each in entries if wire.get_entry_key(each) == bound.key), b"")
            old = wire.get_payloads(wire.get_entry_value(entry), _ARGUMENTS_FIELD)
            new = [before if is_same_arg(arg, var) else after
                   for before, after, arg, var in zip(old, new, bound.args, now)] if len(old) == len(now) else new
        return _set_entry(data, INPUTS, bound.key, b"".join(wire.encode_field(_ARGUMENTS_FIELD, each) for each in new))

    def _update_outputs(self, op: Operation, origin: Origin, part: Part, data: bytes) -> bytes:
        changed = []
        old = wire.get_payloads(data, OUTPUTS)
        for index, declared in zip(part.outputs, old, strict=True):
            var = op.outputs[index]
            if not self._export.has_same_type(var.sym_type, origin.sym_types[index]):
                declared = self._redeclare_var(declared, var)
            elif self._sized:
                declared = self._add_sizes(declared, var)
                if var.name != origin.names[index]:
                    declared = wire.replace_fields(declared, _NAME_FIELD, [var.name.encode()])
            elif var.name != origin.names[index]:
                declared = wire.replace_fields(declared, _NAME_FIELD, [var.name.encode()])
            changed.append(declared)
        return data if changed == old else wire.replace_fields(data, OUTPUTS, changed)

    def _redeclare_var(self, declared: bytes, var: Var) -> bytes:
        """Return the declaration of `var` with its current type; other fields of the one in the file stay."""
        made, old = (NAMED_TYPE.FromString(each) for each in (self._export.export_output(var), declared))
        if not (made.type.HasField("tensorType") and old.type.HasField("tensorType")):
            return serialize_message(made)
        made.type.tensorType.attributes.MergeFrom(old.type.tensorType.attributes)
        return serialize_message(made)

    def _add_sizes(self, declared: bytes, var: Var) -> bytes:
        """Return a declaration with the sizes that are known now; the same bytes if it already has all of them."""
        old = NAMED_TYPE.FromString(declared).type
        if old.WhichOneof("type") != "tensorType" or all(
            each.WhichOneof("dimension") == "constant" for each in old.tensorType.dimensions
        ):
            return declared
        made = self._redeclare_var(declared, var)
        return declared if NAMED_TYPE.FromString(made).type == old else made

    def _update_blocks(self, op: Operation, origins: tuple[NestedOrigin, ...], data: bytes) -> bytes:
        # By index, not by identity: a copy of the program has blocks of its own.
        matched = len(op.blocks) == len(origins)
        blocks = [
            self.emit_block(block, origins[index].data, origins[index].inputs)
            if matched
            else self.emit_block(block, b"", new=True)
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
    for op in iterate_nested_ops(function):
        used.update(var for block in op.blocks for var in block.outputs)
        if op.op_type == "const":
            continue
        origin = get_origin(op)
        bounds = {bound.param: bound for part in origin.parts for bound in part.bounds} if origin is not None else {}
        for param, now in get_file_inputs(op).items():
            bound = bounds.get(param)
            if bound is not None and is_kept(bound, now):
                # Literals inside the op need no const, even if other arguments of the op are names.
                used.update(var for arg, var in zip(bound.args, now) if isinstance(arg, str))
                continue
            in_file = bound.args if bound is not None else ()
            aligned = in_file if len(in_file) == len(now) else (None,) * len(now)
            used.update(var for arg, var in zip(aligned, now) if (arg is None or isinstance(arg, str) or
                        not is_same_arg(arg, var)) and (var.name in in_file or not is_embedded(op, param, var)))
    return used
