"""Loading of the ops of one block: inputs are resolved, literals become consts, state reads and writes are paired."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from coremltools.converters.mil.frontend.milproto.load import _set_inputs_for_control_flow_op
from coremltools.converters.mil.mil import Block, Operation, Var
from coremltools.converters.mil.mil.block import curr_opset_version
from coremltools.converters.mil.mil.ops.helper import _get_version_of_op
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

from ..ir.oversized_inputs import Rejected
from ..utils.errors import InputError
from .op_builder import OpBuilder
from .opaque_ops import assign_attribute_names
from .origin import (
    ATTRIBUTES,
    DEFAULT,
    INPUTS,
    InputBinding,
    NestedOrigin,
    Origin,
    Part,
    get_file_inputs,
    get_stored_value,
)
from .values import LoadedValue, TypeReader, Unrepresentable, ValueReader

UPDATE_STATE = "coreml_update_state"
_STATE_PARAMS = {"input": "state", "data": "value"}
# Number of nested blocks of coremltools' ops that have blocks.
_BLOCK_COUNTS = {"cond": 2, "while_loop": 2}
_REMEDY = "the package is damaged: use a fresh copy"


class BlockReader:
    """Reads the ops of one block in order; `scope` maps the visible names to vars and grows with each op."""

    def __init__(
        self,
        block: Block,
        scope: MutableMapping[str, Var],
        readers: tuple[ValueReader, TypeReader],
        heavy: set[Var],
        where: str,
    ) -> None:
        self._scope, self._where = scope, where
        # Names of enclosing blocks may be shadowed; names within one block must differ.
        self._own: MutableMapping[str, Var] = scope.maps[0] if isinstance(scope, ChainMap) else scope
        self._values, self._types = readers
        self._build = OpBuilder(block, heavy, self._values.budget)
        self._write: Operation | None = None

    def find_var(self, name: str, who: str) -> Var:
        """Return the var called `name`; InputError when no earlier op or input defines it."""
        if name not in self._scope:
            raise InputError(
                f"{self._where}: {who} refer to {name!r}; expected an input or an earlier op of that name; {_REMEDY}"
            )
        return self._scope[name]

    def read_op(self, spec: Any, data: bytes, blocks: tuple[NestedOrigin, ...]) -> None:
        """Add one op to the block.

        Raises InputError when its values contradict their declared types, or it is not a valid op.
        """
        write, self._write = self._write, None
        name = _get_op_name(spec)
        self._check_op(spec, name)
        if spec.type == "const" and self._read_const(spec, data):
            return
        inputs, bounds = self._read_inputs(spec, name)
        if spec.type == "write_state" and self._write_state(spec, data, name, inputs, bounds):
            return
        if write is not None and _is_read_of(spec, inputs, write):
            self._merge_state_read(write, spec, data, name, bounds)
            return
        self._read_generic(spec, data, name, inputs, bounds, blocks)

    def _check_op(self, spec: Any, name: str) -> None:
        """Raise InputError if the message cannot be an op of any type."""
        if not spec.type or not (spec.inputs or spec.outputs or spec.blocks):
            found = f"neither inputs nor outputs (type {spec.type!r})" if spec.type else "no type"
            raise InputError(f"{self._where}: op {name!r} has {found}; expected an op with a type and inputs, outputs "
                             f"or blocks; {_REMEDY}")
        if spec.type == "const" and ("val" not in spec.attributes or len(spec.outputs) != 1):
            raise InputError(
                f"{self._where}: const {name!r} has {len(spec.outputs)} outputs and "
                f"{'a' if 'val' in spec.attributes else 'no'} value; expected one of each; {_REMEDY}"
            )

    def _read_const(self, spec: Any, data: bytes) -> bool:
        """Load a const and return True; False if pymil cannot represent its value."""
        output = spec.outputs[0].name
        loaded = self._read_value(spec.attributes["val"], f"const {output!r}")
        if loaded is None:
            return False
        var = self._build.build_const(loaded, _get_op_name(spec))
        self._publish_var(var, output)
        part = Part(data, (), (0,))
        var.op.origin = Origin((part,), (output,), (var.sym_type,), value=get_stored_value(var.op))
        return True

    def _read_inputs(self, spec: Any, name: str) -> tuple[dict[str, Any], list[InputBinding]]:
        inputs: dict[str, Any] = {}
        bounds: list[InputBinding] = []
        for key in sorted(spec.inputs):
            args = [self._read_argument(binding, key, spec, name) for binding in spec.inputs[key].arguments]
            found = [var for _, var in args if var is not None]
            if found and len(found) == len(args):
                inputs[key] = found[0] if len(found) == 1 else found
                bounds.append(InputBinding(key, key, INPUTS, tuple(in_file for in_file, _ in args)))
        if spec.type.startswith("constexpr_"):
            self._add_attributes(spec, name, inputs, bounds)
        return inputs, bounds

    def _add_attributes(self, spec: Any, name: str, inputs: dict[str, Any], bounds: list[InputBinding]) -> None:
        """Add the inputs that the iOS 16 form of compressed weights writes as attributes."""
        cls = self._get_class(spec.type)
        for key in sorted(spec.attributes):
            if cls is None or key not in cls.input_spec.input_types or key in inputs:
                continue
            loaded = self._read_value(spec.attributes[key], f"op {name!r} ({spec.type}), {key!r}")
            if loaded is not None:
                inputs[key] = self._build.build_literal(loaded, f"{name}_{key}")
                bounds.append(InputBinding(key, key, ATTRIBUTES, (inputs[key],)))

    def _read_argument(self, binding: Any, key: str, spec: Any, name: str) -> tuple[Any, Var | None]:
        """Return what the file binds (a name, or the const of a literal) and its var.

        Returns None if pymil cannot represent it.
        """
        if binding.WhichOneof("binding") == "name":
            return binding.name, self.find_var(binding.name, f"the inputs of op {name!r} ({spec.type})")
        loaded = self._read_value(binding.value, f"op {name!r} ({spec.type}), {key!r}")
        var = None if loaded is None else self._build.build_literal(loaded, f"{name}_{key}")
        return var, var

    def _read_value(self, value: Any, who: str) -> LoadedValue | None:
        try:
            return self._values.read(value)
        except Unrepresentable:
            return None
        except InputError as error:
            raise InputError(f"{self._where}: {who}: {error}") from error

    @staticmethod
    def _get_class(op_type: str) -> Any:
        """Return coremltools' class for `op_type` in the function's opset; None if it defines none."""
        if op_type == UPDATE_STATE:
            return SSAOpRegistry.dialect_ops[op_type]
        if op_type not in SSAOpRegistry.core_ops:
            return None
        try:
            return _get_version_of_op(SSAOpRegistry.core_ops[op_type], curr_opset_version())
        except ValueError:
            return None

    def _write_state(
        self, spec: Any, data: bytes, name: str, inputs: dict[str, Any], bounds: list[InputBinding]
    ) -> bool:
        """Load a write_state as coremltools' `coreml_update_state` and return True.

        Returns False if that is not possible.
        """
        if inputs.keys() != _STATE_PARAMS.keys() or spec.outputs or spec.blocks:
            return False
        renamed = {_STATE_PARAMS[key]: var for key, var in inputs.items()}
        try:
            op = self._build.build_known_op(self._get_class(UPDATE_STATE), name, renamed, [], ())
        except Rejected:
            # The types do not fit `coreml_update_state`: the caller keeps the op as it was read.
            return False
        part = Part(data, tuple(InputBinding(b.key, _STATE_PARAMS[b.key], b.field, b.args) for b in bounds), ())
        op.origin = Origin((part,), (), (op.outputs[0].sym_type,))
        self._write = op
        return True

    def _merge_state_read(
        self, write: Operation, spec: Any, data: bytes, name: str, bounds: list[InputBinding]
    ) -> None:
        """Merge a read that directly follows a write of the same state into the write: one op in pymil."""
        output = spec.outputs[0].name
        write.name = name
        self._publish_var(write.outputs[0], output)
        read = Part(data, tuple(InputBinding(b.key, _STATE_PARAMS[b.key], b.field, b.args) for b in bounds), (0,))
        write.origin = Origin((*write.origin.parts, read), (output,), write.origin.sym_types)

    def _read_generic(
        self,
        spec: Any,
        data: bytes,
        name: str,
        inputs: dict[str, Any],
        bounds: list[InputBinding],
        blocks: tuple[NestedOrigin, ...],
    ) -> None:
        declared = [self._read_output_type(output) for output in spec.outputs]
        op = self._make_op(spec, name, inputs, [origin.block for origin in blocks], declared)
        for origin in blocks:
            origin.block.outer_op = op
        for output, var in zip(spec.outputs, op.outputs, strict=True):
            self._publish_var(var, output.name)
        if getattr(op, "opaque", False):
            shown = assign_attribute_names(inputs)
            bounds = [replace(bound, param=shown[bound.key]) for bound in bounds]
        in_file = {bound.param for bound in bounds}
        defaults = [InputBinding(p, p, DEFAULT, now) for p, now in get_file_inputs(op).items() if p not in in_file]
        part = Part(data, (*bounds, *defaults), tuple(range(len(op.outputs))))
        names = tuple(output.name for output in spec.outputs)
        op.origin = Origin((part,), names, tuple(var.sym_type for var in op.outputs), blocks)

    def _read_output_type(self, output: Any) -> Any:
        try:
            return self._types.read(output.type)
        except InputError as error:
            raise InputError(f"{self._where}: {output.name!r}: {error}") from error

    def _make_op(
        self,
        spec: Any,
        name: str,
        inputs: dict[str, Any],
        blocks: list[Block],
        declared: list[Any],
    ) -> Operation:
        cls = self._get_class(spec.type)
        # If an input is left out because pymil cannot represent it, coremltools' class would use a default instead.
        rejected, why = None, ""
        complete = all(key in inputs for key in spec.inputs) and len(blocks) == _BLOCK_COUNTS.get(spec.type, 0)
        if cls is not None and spec.type != "const" and complete:
            try:
                bound = dict(inputs)
                if blocks:
                    _set_inputs_for_control_flow_op(bound, blocks, spec.type)
                return self._build.build_known_op(cls, name, bound, blocks, declared)
            except Rejected as error:
                # coremltools' own error on these inputs; empty if it accepts them but infers other outputs.
                rejected = "" if isinstance(error.__cause__, Rejected) else " ".join(str(error.__cause__).split())
                why = _format_error(error.__cause__)
        op = self._build.build_opaque_op(spec.type, name, inputs, blocks, declared)
        op.rejected, op.contradiction = rejected, why
        return op

    def _publish_var(self, var: Var, name: str) -> None:
        if name in self._own:
            raise InputError(
                f"{self._where}: two values of one block are called {name!r}; expected different names; {_REMEDY}, or, "
                "if coremltools' save_multifunction made it, give the constants of its programs names"
            )
        var.name = name
        self._own[name] = var


def _format_error(error: BaseException | None) -> str:
    """Format coremltools' error on an op in one line, with the error's type if its text alone is not clear."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (Rejected, ValueError)) else f"{type(error).__name__}: {text}"


def _is_read_of(spec: Any, inputs: Mapping[str, Any], write: Operation) -> bool:
    """Return whether an op is a plain read of the state that `write` wrote."""
    plain = spec.type == "read_state" and inputs.keys() == {"input"} and len(spec.outputs) == 1 and not spec.blocks
    return plain and inputs["input"] is write.state


def _get_op_name(spec: Any) -> str:
    """Return the op's name: its attribute, else its first output's name, else its type."""
    if "name" in spec.attributes:
        names = spec.attributes["name"].immediateValue.tensor.strings.values
        if names:
            return str(names[0])
    return str(spec.outputs[0].name if spec.outputs else spec.type)
