"""Construction of one coremltools op from its bound inputs.

Defaults are shared, types are as declared, and large weights are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types
from coremltools.converters.mil.mil.input_type import InternalInputType, TupleInputType
from coremltools.converters.mil.mil.scope import SCOPE_STACK
from coremltools.converters.mil.mil.types.symbolic import is_symbolic
from coremltools.converters.mil.mil.var import InternalVar

from ..ir.constants import LazyValue, get_blob_ref, make_bare_var, make_const
from ..ir.coremltools_internals import evaluate_op, get_typed_value, remove_last_user, set_output_vars
from ..ir.oversized_inputs import Rejected, reject_oversized_inputs
from ..ir.type_inference import (
    COREMLTOOLS_ERRORS,
    EvaluationBudget,
    count_elements,
    infer_types,
    raise_not_evaluated,
    refine_type,
)
from .input_checks import InputChecks
from .limits import MAX_ELEMENTS
from .opaque_ops import assign_attribute_names, make_opaque_class
from .origin import to_var_tuple
from .values import LoadedValue

# Ops on file-backed consts above this many bytes are not evaluated while loading, because that would read the weights.
# Shapes and indices, whose ops have to be evaluated, are far smaller.
_MAX_EVALUATED_BYTES = 64 * 1024
# pymil searches the list of users of a var linearly, so one shared default is used by at most this many ops.
_MAX_SHARED_USES = 64

_GATE_COUNTS = {"lstm": 4, "gru": 3, "rnn": 1}
"Number of gates of a recurrent op: its weights have one block of rows for each."
_MAX_UPSTREAM_WEIGHTS = 8
"Most compressed weights recorded as upstream of a constant. coremltools only reads whether the list is empty."
# Dtypes that pymil holds unchanged; it narrows 64 bits.
_PLAIN_DTYPES = tuple(map(np.dtype, ("f2", "f4", "i1", "i2", "i4", "u1", "u2", "u4", "?")))
_INPUT_CHECKS = InputChecks()


class OpBuilder:
    """Appends ops to the end of one block."""

    def __init__(self, block: Block, heavy: set[Var], budget: EvaluationBudget) -> None:
        self._block = block
        self._heavy, self._budget = heavy, budget
        self._shared: dict[Any, tuple[Var, int]] = {}

    def build_const(self, loaded: LoadedValue, name: str) -> Var:
        """Make a const of a value of the file; bytes in a weight file are neither read nor copied."""
        if isinstance(loaded.value, (LazyValue, str)) or loaded.blob is not None or _is_held_unchanged(loaded):
            var = make_const(loaded.value, loaded.dtype, name)
        else:
            var = Builder.const(val=loaded.value, name=name)
        if loaded.file is not None and loaded.blob is not None:
            var.op.blob = loaded.file.make_ref(loaded.blob)
        if isinstance(loaded.value, LazyValue) or (
            get_blob_ref(var) is not None and loaded.value.nbytes > _MAX_EVALUATED_BYTES
        ):
            self._heavy.add(var)
        return var

    def build_literal(self, loaded: LoadedValue, name: str) -> Var:
        """Make a const for a value that the file writes inside an op; it has no op of its own in the file."""
        var = self.build_const(loaded, Builder._get_free_name(name))
        var.op.synthetic = True
        return var

    def build_known_op(
        self, cls: Any, name: str, inputs: dict[str, Any], blocks: list[Block], declared: Sequence[Any]
    ) -> Operation:
        """Make an op of coremltools' class `cls`.

        Raises Rejected when the class does not accept the inputs, or infers other outputs than declared.
        """
        op = cls.__new__(cls)
        try:
            bound = {param: self._bind_input(cls, param, var, name) for param, var in inputs.items()}
            reject_oversized_inputs(cls, bound, len(declared))
            seen = _INPUT_CHECKS.begin_op(op, bound)
            op.__init__(name=name, enclosing_block=self._block, scopes=SCOPE_STACK.get_curr_scopes(), **bound)
            self._set_defaults(op, name, bound)
            _INPUT_CHECKS.end_op(op, seen)
            _check_recurrent(op)
            op.build_nested_blocks()
            result = _infer_output_types(op, declared)
        except (*COREMLTOOLS_ERRORS, Rejected) as error:
            # The caller then keeps the op as an opaque one.
            _detach_op(op, inputs)
            raise Rejected(f"{name}: {error}") from error
        for var in op.internal_inputs.values():
            self._block.add_internal_var(var)
        op.blocks = blocks
        self._block._insert_op_before(op)
        self._set_outputs(op, result)
        return op

    def build_opaque_op(
        self, op_type: str, name: str, inputs: Mapping[str, Any], blocks: list[Block], declared: Sequence[Any]
    ) -> Operation:
        """Make an op that is known only by its type's name, its inputs and its declared outputs."""
        shown = assign_attribute_names(inputs)
        bound = {shown[param]: var for param, var in inputs.items()}
        cls = make_opaque_class(op_type, bound, declared)
        op = cls(name=name, enclosing_block=self._block, scopes=SCOPE_STACK.get_curr_scopes(), **bound)
        op.blocks = blocks
        self._block._insert_op_before(op)
        op.type_value_inference()
        return op

    def _bind_input(self, cls: Any, param: str, var: Any, name: str) -> Any:
        kind = cls.input_spec.input_types.get(param)
        if kind is None:
            raise Rejected(f"unknown input {param}")
        if isinstance(kind, InternalInputType):
            return InternalVar(var, name=f"{name}_{param}")
        if isinstance(kind, TupleInputType):
            return list(to_var_tuple(var))
        if isinstance(var, list):
            raise Rejected(f"several values for input {param}")
        return var

    def _set_defaults(self, op: Operation, name: str, bound: Mapping[str, Any]) -> None:
        kinds = op.input_spec.input_types
        defaults: dict[str, Any] = {}
        for param, value in op.default_inputs().items():
            if param in bound or value is None:
                continue
            if isinstance(value, Var):
                defaults[param] = value
            elif isinstance(kinds[param], InternalInputType):
                defaults[param] = InternalVar(value, name=f"{name}_{param}")
            elif isinstance(kinds[param], TupleInputType):
                defaults[param] = [v if isinstance(v, Var) else self._make_default(v, f"{name}_{param}") for v in value]
            else:
                defaults[param] = self._make_default(value, f"{name}_{param}")
        op.set_inputs(type_inference=False, **defaults)

    def _make_default(self, value: Any, name: str) -> Var:
        if isinstance(value, range):  # some defaults of pymil are ranges, which cannot become consts
            value = np.asarray(value, np.int32)
        array = np.asarray(value)
        key = (type(value), array.dtype.str, array.shape, array.tobytes())
        var, uses = self._shared.get(key, (None, 0))
        if var is None or uses >= _MAX_SHARED_USES:
            var, uses = Builder.const(val=value, name=Builder._get_free_name(name)), 0
            var.op.synthetic = True
        self._shared[key] = (var, uses + 1)
        return var

    def _set_outputs(self, op: Operation, result: tuple[Any, ...]) -> None:
        flat = op.get_flattened_inputs()
        inner = [var for block in op.blocks for var in block.outputs]
        heavy = any(var in self._heavy for var in (*flat, *inner))
        count = sum(map(_count_type_elements, result))
        if heavy or not self._budget.can_evaluate(count):
            op.value_inference = raise_not_evaluated

        def return_result() -> tuple[Any, ...]:
            return result

        op.type_inference = return_result
        make = _make_plain_outputs if all(map(_is_plain_type, result)) else _make_special_outputs
        try:
            make(op, result)
        except COREMLTOOLS_ERRORS:
            # coremltools cannot compute the value, so the outputs get types only.
            set_output_vars(op, None)
            op.value_inference = raise_not_evaluated
            make(op, result)
        del op.type_inference
        if any(get_typed_value(var) is not None for var in op.outputs):
            self._budget.spend_elements(count)
        if heavy and all(var.is_descendant_of_const for var in flat):
            self._heavy.update(op.outputs)


@functools.lru_cache(maxsize=1 << 16)
def _count_type_elements(sym_type: Any) -> int:
    """Return the number of elements of a value of the type, over its known dimensions."""
    return count_elements(sym_type.get_shape()) if types.is_tensor(sym_type) else 1


@functools.lru_cache(maxsize=1 << 16)
def _is_plain_type(sym_type: Any) -> bool:
    """Return whether a value of the type is an array or a scalar that pymil holds in an ordinary `Var`."""
    dtype = sym_type.get_primitive() if types.is_tensor(sym_type) else sym_type
    return bool(types.is_scalar(dtype)) and not types.is_complex(dtype) and not types.is_sub_byte(dtype)


def _make_special_outputs(op: Operation, result: tuple[Any, ...]) -> None:
    """Make output vars for lists, complex and sub-byte numbers; `result` comes from `op.type_inference`."""
    op.type_value_inference()


def skip_upstream_propagation() -> None:
    """Replace coremltools' propagation of upstream compressed weights, which it repeats in full after each block.

    It is redundant: `_make_plain_outputs` records them, and coremltools does so for each op that is added.
    """


def _make_plain_outputs(op: Operation, result: tuple[Any, ...]) -> None:
    """Make output vars as coremltools' `type_value_inference` does, without inferring types again.

    That saves a tenth of the loading time.
    """
    values = evaluate_op(op, result)
    try:
        named = op.output_names()
        names = named if isinstance(named, tuple) else (named,)
    except NotImplementedError:
        names = tuple(map(str, range(len(result)))) if len(result) > 1 else ("",)
    # The list is only read to decide whether a constant may be folded. coremltools would record all compressed weights
    # upstream of each value: 200 million entries for a model with 20,000 compressed weights.
    above = [var.nonreplaceable_vars_upstream for var in op.get_flattened_inputs()]
    outputs: list[Var] = []
    set_output_vars(op, outputs)
    for place, (name, sym_type, value) in enumerate(zip(names, result, values)):
        var = make_bare_var(Var, f"{op.name}_{name}" if name else op.name, sym_type, value)
        var._op, var.op_output_idx = op, place
        var.is_descendant_of_const = Var._propagate_constness_upstream(var)
        if op.op_type.startswith("constexpr_"):
            var.nonreplaceable_vars_upstream = {var}
        elif op.op_type != "shape" and var.is_descendant_of_const:
            var.nonreplaceable_vars_upstream = set(islice(chain.from_iterable(above), _MAX_UPSTREAM_WEIGHTS))
        outputs.append(var)


def _is_held_unchanged(loaded: LoadedValue) -> bool:
    """Return whether pymil would hold the value as it is: it narrows 64 bits and converts lists and strings."""
    return isinstance(loaded.value, (np.ndarray, np.generic)) and loaded.value.dtype in _PLAIN_DTYPES


def _detach_op(op: Operation, inputs: Mapping[str, Any]) -> None:
    for var in [
        var for bound in (*inputs.values(), *vars(op).get("_input_vars", {}).values()) for var in to_var_tuple(bound)
    ]:
        # The op is the last user added to the var, so it is found without a search.
        while isinstance(var, Var) and var.child_ops and var.child_ops[-1] is op:
            remove_last_user(var)


def _check_recurrent(op: Operation) -> None:
    """Raise ValueError if weights or initial states of an lstm, gru or rnn do not fit x.

    coremltools' type inference for these ops reads only weight_hh, and rewrites that decompose such an op would fail on
    it.
    """
    gates = _GATE_COUNTS.get(op.op_type)
    if gates is None:
        return
    hidden = op.weight_hh.shape[1]
    sides = 2 if op.direction.val == "bidirectional" else 1
    rows = gates * hidden
    expected: dict[str, tuple[Any, ...]] = {
        "weight_ih": (rows, op.x.shape[-1]), "weight_hh": (rows, hidden), "bias": (rows,),
        "initial_h": (None, sides * hidden), "initial_c": (None, sides * hidden)}
    expected |= {f"{name}_back": expected[name] for name in ("weight_ih", "weight_hh", "bias")}
    for name, shape in expected.items():
        var = op.inputs.get(name)
        fits = var is None or (len(var.shape) == len(shape) and all(
            want is None or is_symbolic(want) or is_symbolic(size) or size == want
            for size, want in zip(var.shape, shape)))
        if not fits:
            wanted = ["any" if want is None else str(want) for want in shape]
            raise ValueError(f"{name} of shape {list(var.shape)}; expected [{', '.join(wanted)}]")


def _infer_output_types(op: Operation, declared: Sequence[Any]) -> tuple[Any, ...]:
    """Infer the types of the outputs; raises Rejected if they differ from the types that the file declares."""
    if op.op_type.startswith("constexpr_"):
        # coremltools' type inference for these reads the compressed weights.
        return tuple(declared)
    inferred = infer_types(op, declared)
    result = inferred if isinstance(inferred, tuple) else (inferred,)
    if op.op_type == "coreml_update_state" and not declared:
        return result
    if len(result) != len(declared):
        raise Rejected(f"{len(result)} outputs, {len(declared)} declared")
    if not all(map(_is_compatible, result, declared)):
        raise Rejected("outputs of other types than declared")
    result = tuple(map(refine_type, result, declared))
    if any(_count_type_elements(sym_type) > MAX_ELEMENTS for sym_type in result):
        raise Rejected("outputs of more elements than can be counted")
    return result


def _is_compatible(inferred: Any, declared: Any) -> bool:
    return inferred is declared or bool(types.is_compatible_type(inferred, declared))
