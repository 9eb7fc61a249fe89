"""Loading of a model file's program as pymil, each op with its origin."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from coremltools import _OPSET
from coremltools.converters.mil._deployment_compatibility import AvailableTarget
from coremltools.converters.mil.mil import Block, Function, ListVar, Placeholder, Program, Var, types
from coremltools.converters.mil.mil.program import StateTensorPlaceholder

from ..ir.type_inference import EvaluationBudget
from ..utils.errors import InputError
from . import wire
from .blobs import WeightFiles
from .members import ML_PROGRAM_FIELD, Member
from .op_builder import skip_upstream_propagation
from .operations import BlockReader
from .origin import BLOCKS, NestedOrigin
from .values import TypeReader, ValueReader

FUNCTIONS, OPSET, SPECIALIZATIONS = 2, 2, 3
BLOCK_INPUTS, BLOCK_OUTPUTS, OPERATIONS = 1, 2, 3
_REMEDY = "the package is damaged: use a fresh copy"
_MAX_NAMED = 5


@dataclass(frozen=True)
class FunctionOrigin:
    """A function as it was in the file: its ML Program, name, opset, block and interface.

    `data` are the bytes of its block for that opset. `name` is its name in the file, without the prefix of `member`.
    `features` maps the names of inputs, outputs and states to their FeatureDescriptions. `predicted` are the names of a
    classifier's outputs. The attribute `origin` of a pymil function, and of its clones, is this object.
    """

    member: Member
    name: str
    opset: str
    function: Function
    data: bytes
    inputs: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[str, Any], ...]
    features: Mapping[str, Any]
    predicted: tuple[str, ...]


class ProgramReader:
    """Reads one program; `where` is the package's name in messages, `budget` limits how much of it is evaluated."""

    def __init__(self, files: WeightFiles, where: str, budget: EvaluationBudget | None = None) -> None:
        self._types = TypeReader()
        self._values = ValueReader(files, self._types, budget)
        self._where = where
        self._heavy: set[Var] = set()

    def read_program(self, members: Sequence[Member]) -> tuple[Program, dict[str, FunctionOrigin]]:
        """Read the functions of all `members` as one program; raises InputError if one of them is inconsistent."""
        program, origins = Program(), {}
        for member in members:
            for name, data in self._function_bytes(member.raw).items():
                origin = self._read_function(member, name, data)
                program.functions[member.prefix + name] = origin.function
                origin.function.origin = origin
                origin.function.images = frozenset(
                    name for name, feature in origin.features.items() if feature.type.HasField("imageType"))
                origins[member.prefix + name] = origin
        names = list(program.functions)
        first = members[0]
        program.default_function_name = choose_default_function(first, names)
        program.export_as_multifunction = bool(first.spec.description.functions)
        program.chain = tuple(choose_default_function(member, names) for member in members if member.path)
        return program, origins

    def _function_bytes(self, raw: bytes) -> dict[str, bytes]:
        programs = wire.get_payloads(raw, ML_PROGRAM_FIELD)
        entries = [entry for program in programs for entry in wire.get_payloads(program, FUNCTIONS)]
        functions = {wire.get_entry_key(entry): wire.get_entry_value(entry) for entry in entries}
        if len(programs) != 1 or len(functions) != len(entries):
            raise InputError(
                f"{self._where}: the model file has {len(programs)} programs and {len(entries)} functions under "
                f"{len(functions)} names; expected one program with distinct names; {_REMEDY}"
            )
        if "" in functions:
            raise InputError(f"{self._where}: a function of the program has no name; expected one, such as 'main'; "
                             f"{_REMEDY}")
        return functions

    def _read_function(self, member: Member, name: str, data: bytes) -> FunctionOrigin:
        spec, version = member.spec.mlProgram.functions[name], member.spec.specificationVersion
        where = f"{self._where}: function {member.prefix + name!r}"
        blocks = {wire.get_entry_key(e): wire.get_entry_value(e) for e in wire.get_payloads(data, SPECIALIZATIONS)}
        if spec.opset not in blocks:
            raise InputError(
                f"{where} is for opset {spec.opset!r} but has blocks for "
                f"{', '.join(map(repr, sorted(blocks))) or 'none'}; expected one for its opset; {_REMEDY}"
            )
        self._check_names(spec.inputs, where)
        inputs = {i.name: self._make_placeholder(i.name, self._types.read(i.type)) for i in spec.inputs}
        scope: dict[str, Var] = {input_name: placeholder.outputs[0] for input_name, placeholder in inputs.items()}
        with Function(inputs, opset_version=_target_from_opset(spec.opset, version)) as function:
            self._read_block(function, spec.block_specializations[spec.opset], blocks[spec.opset], scope, where)
        if not function.outputs:
            raise InputError(f"{where} has no outputs; expected one or more, without which Core ML loads no model")
        signature = tuple((input_name, var.sym_type) for input_name, var in function.inputs.items())
        results = tuple((var.name, var.sym_type) for var in function.outputs)
        described = _get_descriptions(member.spec.description, name)
        features = {each.name: each for one in described for each in (*one.input, *one.output, *one.state)}
        if described[0].ByteSize() and (described[0] is not member.spec.description or name == (
                described[0].defaultFunctionName or "main")):
            self._check_described(described[0], signature, results, where)
        predicted = [name for one in described for name in (one.predictedFeatureName, one.predictedProbabilitiesName)]
        return FunctionOrigin(member, name, spec.opset, function, blocks[spec.opset], signature, results, features,
                              tuple(dict.fromkeys(filter(None, predicted))))

    @staticmethod
    def _check_described(described: Any, signature: Any, results: Any, where: str) -> None:
        """Raise InputError if a description names other inputs and outputs than its function has."""
        states = {name for name, kind in signature if types.is_state(kind)}
        owned = {"input": {name for name, _ in signature} - states, "output": {name for name, _ in results}}
        for kind, names in owned.items() if described.input or described.output else ():
            listed = {each.name for each in getattr(described, kind)}
            if listed != names:
                said = sorted(listed - names) or sorted(names - listed)
                raise InputError(
                    f"{where}: the model's description {'lists' if listed - names else 'lacks'} the {kind} "
                    f"{', '.join(map(repr, said[:_MAX_NAMED]))}, which the function "
                    f"{'does not have' if listed - names else 'has'}; expected the same names in both; {_REMEDY}")

    @staticmethod
    def _check_names(inputs: Any, who: str) -> None:
        names = Counter(each.name for each in inputs).most_common(1)
        if names and names[0][1] > 1:
            raise InputError(
                f"{who} has several inputs {names[0][0]!r}; expected different names; {_REMEDY}"
            )

    @staticmethod
    def _make_placeholder(name: str, sym_type: Any) -> Placeholder:
        if types.is_tensor(sym_type):
            return Placeholder(sym_type.get_shape(), sym_type.get_primitive(), name=name)
        if types.is_state(sym_type) and types.is_tensor(sym_type.wrapped_type()):
            inner = sym_type.wrapped_type()
            return StateTensorPlaceholder(inner.get_shape(), inner.get_primitive(), name=name)
        # coremltools has no placeholder for other types, but only its var is needed.
        placeholder = Placeholder.__new__(Placeholder)
        placeholder.sym_shape, placeholder.dtype, placeholder.name = (), sym_type, name
        placeholder.outputs = [Var(name, sym_type)]
        return placeholder

    def _read_block(self, block: Block, spec: Any, data: bytes, scope: MutableMapping[str, Var], where: str) -> None:
        if isinstance(block, Function):  # other blocks have no such attribute
            block._propagate_nonreplaceable_vars = skip_upstream_propagation
        slices = wire.get_payloads(data, OPERATIONS)
        reader = BlockReader(block, scope, (self._values, self._types), self._heavy, where)
        for op_spec, op_data in zip(spec.operations, slices, strict=True):
            blocks = self._read_nested_blocks(block, op_spec, op_data, scope, where) if op_spec.blocks else ()
            reader.read_op(op_spec, op_data, blocks)
        block.set_outputs([reader.find_var(name, "the block's outputs") for name in spec.outputs])

    def _read_nested_blocks(
        self, outer: Block, op_spec: Any, op_data: bytes, scope: MutableMapping[str, Var], where: str
    ) -> tuple[NestedOrigin, ...]:
        found = []
        # pymil needs the op before its blocks and the op needs its blocks; a placeholder serves until the op exists.
        stand_in = SimpleNamespace(enclosing_block=outer)
        for spec, data in zip(op_spec.blocks, wire.get_payloads(op_data, BLOCKS), strict=True):
            self._check_names(spec.inputs, f"{where}: a block of op {op_spec.type!r}")
            inputs = tuple(self._declared_var(i.name, self._types.read(i.type)) for i in spec.inputs)
            # Names inside a block are out of scope after it, and may shadow names around it.
            inner = ChainMap({var.name: var for var in inputs}, scope)
            with Block(block_inputs=inputs, outer_op=stand_in, name=Block._get_new_name()) as block:
                self._read_block(block, spec, data, inner, where)
            found.append(NestedOrigin(block, data, tuple((var.name, var.sym_type) for var in inputs)))
        return tuple(found)

    @staticmethod
    def _declared_var(name: str, sym_type: Any) -> Var:
        if types.is_list(sym_type):
            element, length, dynamic = sym_type.T
            return ListVar(name, elem_type=element, init_length=length, dynamic_length=dynamic)
        return Var(name, sym_type)


def choose_default_function(member: Member, names: Sequence[str]) -> str:
    """Return the function among `names` that runs by default when `member` is run."""
    default = member.prefix + str(member.spec.description.defaultFunctionName or "main")
    own = [name for name in names if name.startswith(member.prefix)]
    return default if default in own or not own else own[0]


def make_new_origin(member: Member, function: Function) -> FunctionOrigin:
    """Make the origin of a new function, to be written to the ML Program `member`."""
    opset = _OPSET[function.opset_version]
    return FunctionOrigin(member, "", opset, function, b"", (), (), {}, ())


def _get_descriptions(description: Any, function: str) -> list[Any]:
    """Return the parts of a model description that describe `function`: its own, or that of the entire model."""
    own = [found for found in description.functions if found.name == function]
    return own or [description]


def _target_from_opset(opset: str, version: int) -> AvailableTarget:
    """Return coremltools' target for `opset`. For an unknown opset, return the newest target that is not above the
    specification version `version`."""
    known = {name: AvailableTarget(number) for number, name in _OPSET.items()}
    if opset in known:
        return known[opset]
    return max(target for target in AvailableTarget if target <= max(version, min(AvailableTarget)))
