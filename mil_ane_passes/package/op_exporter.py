"""Export of new ops to the model format: coremltools' exporter, with consts that stay in their weight files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coremltools import proto
from coremltools.converters.mil.backend.mil import helper
from coremltools.converters.mil.backend.mil.load import should_use_weight_file
from coremltools.converters.mil.mil import Block, Operation, Var, types

from . import wire
from .origin import BLOCKS
from .weight_plan import WeightPlan

if TYPE_CHECKING:

    class MILProtoExporter:
        """Type annotations for coremltools' exporter, which is not annotated."""

        specification_version: int

        def translate_const(self, op: Operation) -> Any: ...
        def translate_constexpr(self, op: Operation) -> Any: ...
        def translate_coreml_update_state_op(self, op: Operation) -> Any: ...
        def translate_generic_op(self, op: Operation, literal_params: Any = None) -> Any: ...
        def types_to_proto(self, valuetype: Any) -> Any: ...

else:
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter

MIL = proto.MIL_pb2
# Core ML accepts these inputs only as values written inside the op.
LITERAL_PARAMS = {"classify": ("classes",), "reshape_like": ("begins", "ends", "end_masks")}


def serialize_message(proto_message: Any) -> bytes:
    """Serialize a proto message deterministically."""
    return bytes(proto_message.SerializeToString(deterministic=True))


def is_embedded(op: Operation, param: str, var: Var) -> bool:
    """Return whether a new `op` holds const `var` as a value inside it instead of by name."""
    if var.op is None or var.op.op_type != "const":
        return False
    return op.op_type.startswith("constexpr_") or param in LITERAL_PARAMS.get(op.op_type, ())


class Exporter(MILProtoExporter):
    """Translates single ops; `emit_block` returns the bytes of a nested block."""

    def __init__(self, specification_version: int, plan: WeightPlan, emit_block: Callable[[Block], bytes]) -> None:
        # coremltools' constructor checks an entire program and opens weight files, so it is not called here.
        self.specification_version = specification_version
        self._plan = plan
        self._emit_block = emit_block

    def get_milproto_value(self, var: Var) -> Any:
        """Return the value of const `var` as a proto: a reference to a weight file, or an immediate value."""
        place = self._plan.find_existing(var)
        if place is None:
            if self._plan.target is None or not should_use_weight_file(var.val, self.specification_version):
                return helper.create_immediate_value(var)
            place = self._plan.add_blob(var)
        primitive = helper.types_to_proto_primitive(var.dtype)
        return helper.create_file_value_tensor(place[0], place[1], var.shape, primitive)

    def create_block(self, block: Block) -> Any:
        """Return an empty block.

        `operations` inserts the bytes from `emit_block`, in which unchanged parts keep their original bytes.
        """
        return MIL.Block()

    def export_op(self, op: Operation) -> list[bytes]:
        """Return the bytes of the op or ops that represent a new pymil op in the model format."""
        if op.op_type == "const":
            return [serialize_message(self.translate_const(op))]
        if op.op_type.startswith("constexpr_"):
            return [serialize_message(self.translate_constexpr(op))]
        if op.op_type == "coreml_update_state":
            return [serialize_message(part) for part in self.translate_coreml_update_state_op(op)]
        data = serialize_message(self.translate_generic_op(op, list(LITERAL_PARAMS.get(op.op_type, ()))))
        return [
            wire.replace_fields(data, BLOCKS, [self._emit_block(block) for block in op.blocks]) if op.blocks else data
        ]

    def export_argument(self, op: Operation, param: str, now: tuple[Var, ...]) -> bytes:
        """Return the Argument message that binds the vars in `now`."""
        result = MIL.Argument()
        for var in now:
            binding = result.arguments.add()
            if not is_embedded(op, param, var):
                binding.name = var.name
            elif op.op_type.startswith("constexpr_"):
                binding.value.CopyFrom(self.get_milproto_value(var))
            else:
                binding.value.CopyFrom(helper.create_immediate_value(var))
        return serialize_message(result)

    def export_output(self, var: Var) -> bytes:
        """Return the declaration of an op's output or a block's input."""
        return serialize_message(MIL.NamedValueType(name=var.name, type=self.types_to_proto(var.sym_type)))

    def has_same_type(self, a: Any, b: Any) -> bool:
        """Return whether two pymil types are equal in the model format, in which symbols have no names."""
        if a is b:
            return True
        if types.unknown in (a, b):
            return False
        return bool(serialize_message(self.types_to_proto(a)) == serialize_message(self.types_to_proto(b)))
