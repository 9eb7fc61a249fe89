"""Computation on padded axes: the contents of the padding of each value, and masks for ops that must not read it.

Axes are padded at their end, so the real part of a value comes first. Ops that move or combine elements preserve this.
An op that reduces over a padded axis is masked, unless the padding does not change its result. Rows at a position that
depends on the length are read and written by products with one-hot matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Var, types

from ..ir.block_editor import get_first_op
from ..ir.builder import RewriteBuilder
from ..ir.coremltools_internals import set_typed_value
from ..ir.query import get_flat_inputs, is_const, is_opaque, plain_type, wraps_negatives
from .dead_ops import get_read_vars, has_effects
from .fix_shape import EXACT_OPS
from .padded_values import LengthSamples, Refusal

__all__ = ["MASKED", "Padding", "find_count", "get_uniform", "skip_moves"]

MASKED = -40000.0
"The value that masks keys: finite in fp16, and so far below all scores that its softmax is 0."
_HIDDEN = -10000.0
"Padding at or below this value masks keys: models use masks of -1e4 or less, and scores are far larger."
_MAX_LENGTHS = 1 << 14
"Most lengths for which the result of a comparison is computed, to limit the time for a very long range."
FINITE, ANY = "finite", "any"
"Padding of unknown finite numbers, and padding that may hold NaN or infinities."

Pad = float | str
"Contents of the padding along an axis: one number, or FINITE, or ANY."
Pads = dict[int, Pad]

_COMPARISONS = {"equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
                "greater": np.greater, "greater_equal": np.greater_equal, "logical_and": np.logical_and,
                "logical_or": np.logical_or, "logical_xor": np.logical_xor}
_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "floor_div": np.floor_divide, "mod": np.mod, "real_div": np.divide, "pow": np.power, **_COMPARISONS}
_BOUNDED: dict[str, Callable[[float], Any] | None] = {
    "abs": np.abs, "relu": lambda x: max(x, 0.0), "square": np.square, "sign": np.sign, "sin": np.sin,
    "cos": np.cos, "tanh": np.tanh, "floor": np.floor, "ceil": np.ceil, "round": np.round,
    "identity": lambda x: x, "sigmoid": None, "silu": None, "gelu": None, "erf": None, "relu6": None,
    "hard_swish": None, "clip": None, "leaky_relu": None, "elu": None, "softsign": None, "atan": None,
    "softplus": None, "threshold": None, "sigmoid_hard": None, "clamped_relu": None, "scaled_tanh": None,
    "linear_activation": None, "logical_not": lambda x: float(not x)}
"Elementwise ops with finite results for finite operands, and the function of a number if it is simple."
_ZERO_KEPT = {"silu", "gelu", "erf", "relu6", "leaky_relu", "elu", "softsign", "atan", "hard_swish"}
"Elementwise ops that map 0 to 0."
_UNBOUNDED = {"exp", "exp2", "log", "rsqrt", "sqrt", "inverse", "tan", "asin", "acos", "sinh", "cosh", "atanh"}
_PARAMETERS = {
    "shape": ("x",), "reshape": ("shape",), "slice_by_index": ("begin", "end", "stride"),
    "slice_by_size": ("begin", "size"), "tile": ("reps",), "fill": ("shape",),
    "slice_update": ("begin", "end", "stride"), "range_1d": ("start", "end", "step")}
"Inputs that are parameters: their numbers must be known at each length."


@dataclass
class Padding:
    """The walk over a function whose inputs have the shapes of the maximum.

    `position` is an int32 input of shape (1,). It is `position_at_maximum` at the full length, and one less for each
    missing element. `pads` has the contents of the padding along each padded axis, for each value of the result.
    """

    function: Function
    samples: LengthSamples
    mb: RewriteBuilder
    position: Var
    position_at_maximum: int
    pads: dict[Var, Pads] = field(default_factory=dict)
    replaced: dict[Var, Var] = field(default_factory=dict)
    failed: dict[Var, Refusal] = field(default_factory=dict)
    notes: list[tuple[Var, str]] = field(default_factory=list)
    real: set[Var] = field(default_factory=set)
    "Positions of extremes along a padded axis that are never in the padding."
    counts: set[Var] = field(default_factory=set)
    "Numbers of elements along a padded axis that are not masked: a model reads the last of them at this number - 1."
    _unsure: set[Var] = field(default_factory=set)
    "Numbers that may differ at lengths that were not sampled, or on a device: the ops that compute them are kept."
    _made: dict[Any, Var] = field(default_factory=dict)
    _first: Operation | None = None

    def apply(self) -> None:
        """Rewrite all ops. Raises Refusal if a value that an output or a state needs cannot be computed."""
        self._first = get_first_op(self.function)
        for op in list(self.function.operations):
            if op.op_type == "const" or getattr(op, "synthetic", False) and not op.inputs:
                continue
            try:
                self._visit(op)
            except Refusal as refusal:
                for var in op.outputs:
                    self.failed[var] = refusal
                if has_effects(plain_type(op)):
                    raise
        self.function.set_outputs([self._get_output(var) for var in self.function.outputs])

    def _get_output(self, var: Var) -> Var:
        found = self._get_operand(var)
        if found is not var:
            name, var.name = var.name, self.mb.make_unique_name(f"{var.name}_unpadded")
            with self.mb.at_end(name):
                found = self.mb.identity(x=found) if found.op is None or is_const(found) or (
                    found in self.function.outputs) else found
            found.name = name
        return found

    def _visit(self, op: Operation) -> None:
        if self._is_constant_output(op) or not self._depends_on_length(op):
            return
        if op.blocks or is_opaque(op):
            raise Refusal(op, "a block or an unknown op reads values that depend on the length")
        unsure = any(var in self._unsure for var in get_flat_inputs(op))
        if not unsure and all(self._is_position(var) for var in op.outputs):
            return  # its users compute it from the position
        if op.op_type == "shape":
            if self.samples.get_values(op.outputs[0]) is not None:
                raise Refusal(op, f"a size of '{op.x.name}' is not the length of the inputs, shorter or longer by a "
                                  "fixed number")
            return
        rule = getattr(self, f"_pad_{op.op_type}", None)
        if rule is None and op.op_type in _BINARY:
            rule = self._pad_binary
        elif rule is None and (op.op_type in _BOUNDED or op.op_type in _UNBOUNDED):
            rule = self._pad_unary
        elif rule is None and op.op_type.startswith("reduce_"):
            rule = self._pad_reduction
        with self.mb.at(op):
            self._bind(op)
            if rule is not None:
                rule(op)
            elif any(self.get_pads(var) for var in get_flat_inputs(op)) or any(
                    self.samples.find_padded_axes(var, op) for var in op.outputs):
                raise Refusal(op, "it has no rule for padded axes")
            self.mb.adopt_scopes(op.scopes)
        for var in op.outputs:
            made = self.replaced.setdefault(var, var)
            set_typed_value(made, None)
            rounds = types.is_float(var.dtype) and op.op_type not in EXACT_OPS
            known = self.samples.get_values(var) is not None
            if known and (unsure or rounds or self.samples.get_value(var) is not None):
                self._unsure.add(var)
            axes = self.samples.find_padded_axes(var, op)
            if set(self.pads.get(made, {})) != set(axes):
                raise Refusal(op, f"axes {list(axes)} of '{var.name}' depend on the length; its rule for padded axes "
                                  f"expects {sorted(self.pads.get(made, {}))}")

    def _is_constant_output(self, op: Operation) -> bool:
        """Return whether an op computes the same numbers at all lengths, including those between the samples."""
        if not op.outputs or any(self.samples.get_value(var) is None for var in op.outputs) or any(
                var in self._unsure for var in get_flat_inputs(op)):
            return False
        if op.op_type not in _BINARY or not any(self._is_position(var) for var in (op.x, op.y)):
            return True
        operands = [self._list_all_values(var) for var in (op.x, op.y)]
        if any(each is None for each in operands):
            return True
        first, second = (each for each in operands if each is not None)
        with np.errstate(all="ignore"):
            found = {np.asarray(_BINARY[op.op_type](x, y)).tobytes() for x, y in zip(first, second, strict=True)}
        return len(found) == 1

    def _list_all_values(self, var: Var) -> list[np.ndarray[Any, Any]] | None:
        """Return the integers at every length, for a const or a value of fixed shape that is linear in the length."""
        count = min(self.samples.deficits[-1], _MAX_LENGTHS) + 1
        if is_const(var):
            return [np.asarray(var.val)] * count
        values = self.samples.get_values(var)
        if values is None or len({each.shape for each in values}) > 1:
            return None
        step = self.samples.fit_step(values)
        return None if step is None else [values[0] - step * deficit for deficit in range(count)]

    def _depends_on_length(self, op: Operation) -> bool:
        """Return whether an input, an output or a parameter depends on the length."""
        return any(var in self.failed or var in self.replaced or self._varies(var)
                   for var in (*(get_read_vars(op) if op.blocks else get_flat_inputs(op)), *op.outputs))

    def _varies(self, var: Var) -> bool:
        values = self.samples.get_values(var)
        if values is not None:
            return True  # even a number that is the same in all samples, if it is computed from one that differs
        try:
            return bool(self.samples.find_padded_axes(var))
        except Refusal:
            return True

    def get_pads(self, var: Var) -> Pads:
        return self.pads.get(var, {})

    def _bind(self, op: Operation) -> None:
        """Replace the operands of an op by their padded forms."""
        changes: dict[str, Any] = {}
        for name, bound in op.inputs.items():
            if bound is None or name in _PARAMETERS.get(op.op_type, ()):
                if bound in self._unsure:
                    raise Refusal(op, f"its {name} depends on the length in a way that a few lengths do not show, "
                                      "or is rounded")
                continue
            if isinstance(bound, (list, tuple)):
                made = tuple(self._get_operand(var) for var in bound)
                if any(new is not old for new, old in zip(made, bound)):
                    changes[name] = made
            elif (new := self._get_operand(bound)) is not bound:
                changes[name] = new
        if changes:
            op.set_inputs(no_check_var_types=True, **changes)

    def _get_operand(self, var: Var) -> Var:
        """Return the padded value for an original value. Raises the Refusal of the op on which it depends."""
        if var in self.replaced:
            return self.replaced[var]
        if var in self.failed:
            raise self.failed[var]
        if var.op is None or is_const(var) or (values := self.samples.get_values(var)) is None:
            return var
        constant = self.samples.get_value(var)
        if constant is not None:
            made = self.mb.const(val=constant if var.rank else constant[()], name=f"{var.name}_value")
        elif self._is_position(var):
            step = self.samples.fit_step(values)
            assert step is not None
            made = self._make_position(var, values[0], step)
            self.pads[made] = dict.fromkeys(self.samples.find_padded_axes(var), FINITE)
        else:
            return var
        self.replaced[var] = made
        return made

    def _is_position(self, var: Var) -> bool:
        """Return whether a value is integers that are linear in the length, and not the same at all lengths."""
        values = self.samples.get_values(var)
        if values is None or self.samples.get_value(var) is not None:
            return False
        return self.samples.fit_step(values) is not None

    def _make_position(self, var: Var, value: np.ndarray[Any, Any], step: np.ndarray[Any, Any]) -> Var:
        """Compute integers from the position: `value` at the full length, minus `step` for each missing element."""
        base = value.astype(np.int64) - step * self.position_at_maximum
        if not step.any():
            return self.mb.const(val=value)
        x = self.position if value.ndim else self._once("scalar position", lambda: self.mb.squeeze(x=self.position,
                                                                                                 axes=[0]))
        if (step == step.reshape(-1)[0]).all() and int(step.reshape(-1)[0]) == 1:
            scaled = x
        else:
            scaled = self.mb.mul(x=x, y=step.astype(np.int32) if value.ndim else np.int32(step))
        found = self.mb.add(x=scaled, y=base.astype(np.int32) if value.ndim else np.int32(base))
        return found if var.dtype == types.int32 else self.mb.cast(
            x=found, dtype=types.builtin_to_string(var.dtype))

    def _once(self, key: Any, make: Callable[[], Var]) -> Var:
        """Return the value that `make` builds at the beginning of the function, once for each key."""
        if key not in self._made:
            assert self._first is not None
            with self.mb.at(self._first, "length"):
                self._made[key] = make()
        return self._made[key]

    # Masks, and rows at positions that depend on the length.

    def make_one_hot(self, size: int, start: int, count: int, dtype: str) -> Var:
        """Return a matrix (size, count) with ones in the rows [start, start + count), which move with the length.

        `start` is the first row at the full length.
        """
        def make() -> Var:
            begin = start - self.position_at_maximum
            places = self.mb.add(x=self.position, y=np.arange(begin, begin + count, dtype=np.int32))
            rows = np.arange(size, dtype=np.int32)[:, None]
            found = self.mb.equal(x=rows, y=self.mb.expand_dims(x=places, axes=[0]))
            return self.mb.cast(x=found, dtype=dtype, name="rows")

        return self._once(("one hot", size, start, count, dtype), make)

    def make_valid(self, size: int, end: int, dtype: str) -> Var:
        """Return a vector (size,) of ones before `end` and zeros from there on.

        `end` is the position at the full length; it moves with the length.
        """
        def make() -> Var:
            places = self.mb.add(x=self.position, y=np.array([end - self.position_at_maximum], np.int32))
            found = self.mb.less(x=np.arange(size, dtype=np.int32), y=places)
            return found if dtype == "bool" else self.mb.cast(x=found, dtype=dtype, name="valid")

        return self._once(("valid", size, end, dtype), make)

    def _along(self, var: Var, axis: int, rank: int) -> Var:
        """Reshape a vector so that it broadcasts along an axis of values of that rank."""
        shape = [1] * rank
        shape[axis] = int(var.shape[0])
        key = ("along", var, tuple(shape))
        if key not in self._made:
            self._made[key] = self._once(key, lambda: self.mb.reshape(x=var, shape=shape))
        return self._made[key]

    def _clear(self, op: Operation, var: Var, axis: int) -> Var:
        """Return `var` with zeros in the padding of an axis."""
        pads = self.get_pads(var)
        if pads[axis] == 0.0:
            return var
        size = int(var.shape[axis])
        if pads[axis] == ANY or types.is_int(var.dtype):
            mask = self._along(self.make_valid(size, size, "bool"), axis, var.rank)
            zero = np.zeros((), types.nptype_from_builtin(var.dtype))[()]
            made = self.mb.select(cond=mask, a=var, b=zero)
        else:
            if not types.is_float(var.dtype):
                raise Refusal(op, f"'{var.name}' holds booleans; expected numbers to mask the padding of")
            mask = self._along(self.make_valid(size, size, types.builtin_to_string(var.dtype)), axis, var.rank)
            made = self.mb.mul(x=var, y=mask)
        self.pads[made] = {**pads, axis: 0.0}
        self._note(op, made, "padding is cleared by a mask")
        return made

    def _note(self, op: Operation, made: Var, what: str) -> None:
        """Add a note on an op; it is reported only if the result reads `made`."""
        self.notes.append((made, f"'{op.outputs[0].name}', {op.op_type}: {what}"))

    def _set(self, op: Operation, pads: Mapping[int, Pad]) -> None:
        for var in op.outputs:
            self.pads[var] = dict(pads)

    def _replace(self, op: Operation, made: Var, pads: Mapping[int, Pad] | None = None) -> None:
        """Replace the only output of an op by `made`."""
        self.replaced[op.outputs[0]] = made
        self.pads[made] = dict(pads or {})

    # Elementwise ops.

    def _pad_unary(self, op: Operation) -> None:
        simple = _BOUNDED.get(op.op_type)

        finite = op.op_type in ("rsqrt", "sqrt", "inverse", "log") and _is_positive(op.x) or (
            op.op_type == "sqrt" and _is_positive(op.x, strictly=False))

        def judge(pad: Pad) -> Pad:
            if pad != ANY and finite:
                return FINITE
            if pad == ANY or op.op_type in _UNBOUNDED:
                return 1.0 if op.op_type == "exp" and pad == 0.0 else ANY
            if isinstance(pad, float) and simple is not None:
                return float(simple(pad))
            return 0.0 if pad == 0.0 and op.op_type in _ZERO_KEPT else FINITE

        self._set(op, {axis: judge(pad) for axis, pad in self.get_pads(op.x).items()})

    def _pad_cast(self, op: Operation) -> None:
        truncates = types.is_float(op.x.dtype) and not types.is_float(op.outputs[0].dtype)
        to_bool = op.outputs[0].dtype == types.bool
        self._set(op, {axis: pad if isinstance(pad, str) else float(bool(pad)) if to_bool else
                       float(int(pad)) if truncates else pad for axis, pad in self.get_pads(op.x).items()})

    def _pad_binary(self, op: Operation) -> None:
        self._combine(op, [op.x, op.y], lambda pads: self._judge_binary(op, *pads))

    def _pad_select(self, op: Operation) -> None:
        def judge(pads: list[Pad | None]) -> Pad:
            cond, first, second = pads
            if isinstance(cond, float):
                return (first if cond else second) or (0.0 if (first if cond else second) == 0.0 else FINITE)
            if ANY in pads:
                return ANY
            return first if isinstance(first, float) and first == second else FINITE

        self._combine(op, [op.cond, op.a, op.b], judge)

    def _combine(self, op: Operation, operands: list[Var], judge: Callable[[list[Pad | None]], Pad]) -> None:
        """Set the pads of an op that combines broadcast operands.

        `judge` gets the pad of each operand, None for an operand that is broadcast along the axis.
        """
        rank = op.outputs[0].rank
        found: Pads = {}
        for axis in self.samples.find_padded_axes(op.outputs[0], op):
            pads: list[Pad | None] = []
            for var in operands:
                own = axis - (rank - var.rank)
                pad: Pad | None = self.get_pads(var).get(own)
                if pad is None:
                    if own >= 0 and int(var.shape[own]) != 1:
                        raise Refusal(op, f"'{var.name}' has {var.shape[own]} elements along axis {own} at any length")
                    pad = get_uniform(var)
                pads.append(pad)
            found[axis] = judge(pads)
        self._set(op, found)

    def _judge_binary(self, op: Operation, first: Pad | None, second: Pad | None) -> Pad:
        if isinstance(first, float) and isinstance(second, float):
            with np.errstate(all="ignore"):
                found = float(_BINARY[op.op_type](first, second))
            return found if np.isfinite(found) else ANY
        if ANY in (first, second):
            return ANY
        low = [pad for pad in (first, second) if isinstance(pad, float)]
        if op.op_type == "add" and low and low[0] <= _HIDDEN:
            return low[0]
        if op.op_type == "sub" and isinstance(first, float) and first <= _HIDDEN:
            return first
        if op.op_type in ("mul", "logical_and") and 0.0 in low or op.op_type == "real_div" and first == 0.0 and (
                second is None):
            return 0.0
        if op.op_type == "logical_or" and 1.0 in low:
            return 1.0
        if op.op_type in ("real_div", "floor_div", "mod") and second == FINITE:
            return FINITE if op.op_type == "real_div" and _is_positive(op.y) else ANY
        if op.op_type == "pow" and not (isinstance(second, float) and second >= 0 and second == int(second)):
            return ANY
        return FINITE

    # Ops that move elements.

    def _pad_transpose(self, op: Operation) -> None:
        perm = [axis % op.x.rank for axis in op.perm.val]
        pads = self.get_pads(op.x)
        self._set(op, {place: pads[axis] for place, axis in enumerate(perm) if axis in pads})

    def _pad_expand_dims(self, op: Operation) -> None:
        rank = op.outputs[0].rank
        added = {int(axis) % rank for axis in np.atleast_1d(op.axes.val)}
        kept = [axis for axis in range(rank) if axis not in added]
        self._set(op, {kept[axis]: pad for axis, pad in self.get_pads(op.x).items()})

    def _pad_squeeze(self, op: Operation) -> None:
        axes = op.axes.val if op.axes is not None else [i for i, size in enumerate(op.x.shape) if size == 1]
        gone = {int(axis) % op.x.rank for axis in np.atleast_1d(axes)}
        if gone & set(self.get_pads(op.x)):
            raise Refusal(op, "it removes a padded axis")
        kept = [axis for axis in range(op.x.rank) if axis not in gone]
        self._set(op, {kept.index(axis): pad for axis, pad in self.get_pads(op.x).items()})

    def _pad_reshape(self, op: Operation) -> None:
        source = self._get_source(op, "x")
        places = range(len(self.samples.deficits))
        old = [self.samples.get_shape(source, place) for place in places]
        new = [self.samples.get_shape(op.outputs[0], place) for place in places]
        found: Pads = {}
        for axis, pad in self.get_pads(op.x).items():
            before = [int(np.prod(shape[:axis])) for shape in old]
            match = [out for out in self.samples.find_padded_axes(op.outputs[0], op)
                     if [int(np.prod(shape[:out])) for shape in new] == before]
            if not match:
                raise Refusal(op, f"it merges the padded axis {axis} of '{op.x.name}' with another")
            found[match[0]] = pad
        self._set_parameter(op, "shape", np.array(new[0], np.int32))
        self._set(op, found)

    def _get_source(self, op: Operation, name: str) -> Var:
        """Return the original operand of an op: only original values have samples."""
        var = op.inputs[name]
        return next((old for old, new in self.replaced.items() if new is var and old in self.samples._samples), var)

    def _set_parameter(self, op: Operation, name: str, value: Any) -> None:
        bound = op.inputs[name]
        if not is_const(bound):
            op.set_inputs(no_check_var_types=True, **{name: self.mb.const(val=value, name=f"{op.name}_{name}")})

    def _pad_concat(self, op: Operation) -> None:
        axis = int(op.axis.val) % op.outputs[0].rank
        values = list(op.values)
        padded = [place for place, var in enumerate(values) if axis in self.get_pads(var)]
        if bool(op.interleave.val) and padded:
            raise Refusal(op, "it interleaves a padded axis")
        others = self._join(values, skip=axis)
        if not padded or padded == [len(values) - 1]:  # the padded value comes last: the real part still comes first
            self._set(op, {**others, **{axis: self.get_pads(values[-1])[axis] for _ in padded}})
            return
        if len(values) != 2 or padded != [0]:
            raise Refusal(op, "it appends to a padded axis more than once; expected two values")
        first, second = values
        if self.get_pads(first)[axis] == ANY:  # 0 times NaN is not 0
            first = self._clear(op, first, axis)
        size = int(first.shape[axis])
        count = int(second.shape[axis])
        room = np.zeros([count if place == axis else int(n) for place, n in enumerate(first.shape)],
                        types.nptype_from_builtin(first.dtype))
        longer = self.mb.concat(values=[first, room], axis=axis)
        made = self._blend(op, longer, second, axis, size)
        self._note(op, made, f"{count} rows are written after the real ones of axis {axis} by a mask")
        pad = self.get_pads(first)[axis]
        self._replace(op, made, {**others, axis: 0.0 if pad == 0.0 else ANY if pad == ANY else FINITE})

    def _pad_pad(self, op: Operation) -> None:
        """Fill the padding with the constant that the op pads with on both sides of a padded axis."""
        x, mode = op.x, "constant" if op.inputs.get("mode") is None else str(op.mode.val)
        value = 0.0 if op.inputs.get("constant_val") is None else get_uniform(op.constant_val)
        amounts = [0] * (2 * x.rank - len(op.pad.val)) + [int(each) for each in op.pad.val]
        found: Pads = {}
        for axis, pad in self.get_pads(x).items():
            if any(amounts[2 * axis:2 * axis + 2]):
                if mode != "constant" or value is None:
                    raise Refusal(op, f"it pads the padded axis {axis} with values that it reads (mode '{mode}'); "
                                      "expected a finite constant")
                if pad != value:
                    x = self._clear(op, x, axis) if value == 0.0 and types.is_float(x.dtype) else self._fill_padding(
                        op, x, axis, value)
                found[axis] = value
            else:
                found[axis] = pad if pad in (value, ANY) else FINITE if value is not None else ANY
        if x is not op.x:
            op.set_inputs(no_check_var_types=True, x=x)
        self._set(op, found)

    def _pad_stack(self, op: Operation) -> None:
        axis = int(op.axis.val) % op.outputs[0].rank
        self._set(op, {place + (place >= axis): pad for place, pad in self._join(list(op.values)).items()})

    def _join(self, values: list[Var], skip: int = -1) -> Pads:
        """Return the pads of concatenated or stacked values, without those of the axis `skip`."""
        found: Pads = {}
        for var in values:
            for axis, pad in self.get_pads(var).items():
                if axis != skip:
                    known = found.get(axis, pad)
                    found[axis] = pad if known == pad else ANY if ANY in (known, pad) else FINITE
        return found

    def _pad_split(self, op: Operation) -> None:
        if int(op.axis.val) % op.x.rank in self.get_pads(op.x):
            raise Refusal(op, "it splits a padded axis")
        self._set(op, self.get_pads(op.x))

    def _pad_tile(self, op: Operation) -> None:
        values = self.samples.get_values(op.reps) or [op.reps.val]
        pads = self.get_pads(op.x)
        added = set(self.samples.find_padded_axes(op.outputs[0], op)) - set(pads)
        fixed = all(len({int(each[axis]) for each in values}) == 1 and (axis not in pads or int(values[0][axis]) == 1)
                    for axis in range(op.x.rank) if axis not in added) if values[0] is not None else False
        if not fixed or any(int(op.x.shape[axis]) != 1 for axis in added):
            raise Refusal(op, "it repeats a padded axis, or more than one element by a number that depends on the "
                              "length")
        self._set_parameter(op, "reps", np.array(values[0], np.int32))
        self._set(op, {**pads, **dict.fromkeys(added, ANY if ANY in pads.values() else FINITE)})

    def _pad_gather(self, op: Operation) -> None:
        axis, pads, rank = int(op.axis.val) % op.x.rank, self.get_pads(op.x), op.indices.rank
        if op.inputs.get("batch_dims") is not None and int(op.batch_dims.val):
            raise Refusal(op, "it gathers with batch dimensions")
        found: Pads = {place if place < axis else place + rank - 1: pad for place, pad in pads.items() if place != axis}
        if axis in pads and not self._is_real_place(op.indices) and not self._are_real_places(op, axis):
            raise Refusal(op, "it reads a padded axis at positions that may be in the padding")
        self._clamp_places(op, int(op.x.shape[axis]))
        for place in self.get_pads(op.indices):
            same = op.indices.val is not None and _is_place(np.asarray(op.indices.val), place)
            found[axis + place] = pads.get(axis, FINITE) if same or pads.get(axis) == ANY else FINITE
        self._set(op, found)

    def _are_real_places(self, op: Operation, axis: int) -> bool:
        """Return whether the indices are known at each length, and are positions of real elements of `x`."""
        source, x = self._get_source(op, "indices"), self._get_source(op, "x")
        values = self.samples.get_values(source)
        if values is None:
            values = [op.indices.val] * len(self.samples.deficits) if is_const(op.indices) else None
        return values is not None and all(
            not np.size(each) or (np.min(each) >= 0 and np.max(each) < self.samples.get_shape(x, place)[axis])
            for place, each in enumerate(values))

    def _clamp_places(self, op: Operation, size: int) -> None:
        """Clamp indices in the padding to the valid range: those of relative positions, for example, are negative."""
        values = self.samples.get_values(self._get_source(op, "indices"))
        known = all(isinstance(pad, float) for pad in self.get_pads(op.indices).values())
        if known or values is None or any(each.size and int(each.min()) < 0 for each in values):
            return
        made = op.indices
        if made.op is not None and made.op.op_type == "cast" and made.op.x.dtype == types.int32:
            made = made.op.x  # unsigned integers are never negative
        made = made if made.dtype == types.int32 else self.mb.cast(x=made, dtype="int32")
        made = self.mb.minimum(x=self.mb.maximum(x=made, y=np.int32(0)), y=np.int32(size - 1))
        if made.dtype != op.indices.dtype:
            made = self.mb.cast(x=made, dtype=types.builtin_to_string(op.indices.dtype))
        self.pads[made] = self.get_pads(op.indices)
        op.set_inputs(no_check_var_types=True, indices=made)

    def _is_real_place(self, var: Var) -> bool:
        """Return whether integers are positions that are never in the padding.

        These are positions of extremes along a padded axis, and those of the last element that is not masked.
        """
        return skip_moves(var) in self.real or find_count(var) in self.counts

    def _pad_gather_along_axis(self, op: Operation) -> None:
        axis, pads = int(op.axis.val) % op.x.rank, self.get_pads(op.x)
        if axis in pads and not self._is_real_place(op.indices):
            raise Refusal(op, "it reads a padded axis at positions that may be in the padding")
        value = get_uniform(op.x)
        self._set(op, dict.fromkeys(self.samples.find_padded_axes(op.outputs[0], op), FINITE if value is None and (
            ANY not in pads.values()) else ANY if value is None else value))

    def _pad_gather_nd(self, op: Operation) -> None:
        indices, pads = self._get_source(op, "indices"), self.get_pads(op.x)
        if op.inputs.get("batch_dims") is not None and int(op.batch_dims.val):
            raise Refusal(op, "it gathers with batch dimensions")
        count, kept = int(op.indices.shape[-1]), op.indices.rank - 1
        if not is_const(op.indices) and not self._reads_real_places(op, [axis for axis in pads if axis < count]):
            raise Refusal(op, "it gathers at positions that move with the length")
        found: Pads = dict.fromkeys(self.samples.find_padded_axes(indices, op), FINITE)
        if kept in found:
            raise Refusal(op, "the number of its indices depends on the length")
        for axis in found:
            along = [pads[source] for source in pads if source < count and is_const(op.indices) and _is_place(
                np.asarray(op.indices.val)[..., source], axis)]
            if along:
                found[axis] = along[0]
        self._set(op, {**found, **{axis - count + kept: pad for axis, pad in pads.items() if axis >= count}})

    def _reads_real_places(self, op: Operation, axes: list[int]) -> bool:
        """Return whether a gather_nd op reads padded axes only at positions of extremes, of which its indices consist.
        """
        var = skip_moves(op.indices)
        made = var.op
        if made is None or made.op_type not in ("stack", "concat") or int(made.axis.val) % var.rank != var.rank - 1:
            return False
        columns = list(made.values)
        return len(columns) == int(var.shape[-1]) and all(self._is_real_place(columns[axis]) for axis in axes)

    def _pad_slice_by_index(self, op: Operation) -> None:
        source = self._get_source(op, "x")
        squeeze = _get_flags(op, "squeeze_mask", op.x.rank)
        begin, end, found = [], [], {}
        moving: tuple[int, int, int] | None = None
        for axis, bounds in enumerate(self._list_bounds(op, source, strided=True)):
            starts, stops = [each[0] for each in bounds], [each[1] for each in bounds]
            begin.append(starts[0])
            end.append(stops[0])
            size = int(op.x.shape[axis])
            follows = self._follows(stops)
            if len(set(starts)) == 1 and follows and len(self.samples.deficits) > 1:
                found[axis] = self._find_slice_pad(op, source, axis, stops)
            elif len(set(starts)) == 1 and len(set(stops)) == 1:
                pass
            elif self._follows(starts) and follows:
                if moving is not None:
                    raise Refusal(op, "it moves along two axes with the length")
                moving = (axis, starts[0], stops[0] - starts[0])
                begin[axis], end[axis] = 0, size
            else:
                raise Refusal(op, f"the position that it reads along axis {axis} does not follow the length one by one")
        for axis, pad in self.get_pads(op.x).items():
            if moving is not None and axis != moving[0]:
                found.setdefault(axis, pad)
        if moving is None:
            self._set_slice(op, begin, end)
            self._set(op, _drop_axes(found, squeeze))
            return
        self._read_moving(op, moving, begin, end, found, squeeze)

    def _read_moving(self, op: Operation, moving: tuple[int, int, int], begin: list[int], end: list[int],
                     found: Pads, squeeze: list[bool]) -> None:
        """Read rows at a position that moves with the length, by the product of a one-hot matrix and all rows."""
        axis, start, count = moving
        x = op.x
        if op.inputs.get("stride") is not None and np.any(op.stride.val != 1):
            raise Refusal(op, "it reads at a position that moves with the length, with a stride along another axis")
        if (begin, end) != ([0] * x.rank, list(map(int, x.shape))):
            x = self.mb.slice_by_index(x=x, begin=begin, end=end)
            self.pads[x] = self.get_pads(op.x)
        if types.is_int(x.dtype):
            raise Refusal(op, "it reads integers at a position that moves with the length")
        if x.dtype == types.bool:
            x = self.mb.cast(x=x, dtype="fp16")
            self.pads[x] = dict(self.get_pads(op.x))
        if axis in self.get_pads(x):
            x = self._clear(op, x, axis)
        rows = self.make_one_hot(int(x.shape[axis]), start, count, types.builtin_to_string(x.dtype))
        made = self._multiply_rows(rows, x, axis, transpose=True)
        gone = [place for place, flag in enumerate(squeeze) if flag]
        if gone:
            made = self.mb.squeeze(x=made, axes=gone)
        if op.x.dtype == types.bool:
            made = self.mb.cast(x=made, dtype="bool")
        self._note(op, made, f"{count} rows are read along axis {axis} by a one-hot matrix")
        self._replace(op, made, _drop_axes(found, squeeze))

    def _multiply_rows(self, rows: Var, x: Var, axis: int, transpose: bool = False) -> Var:
        """Return the product of the matrix `rows`, or its transpose, and the rows of `x` along an axis."""
        rank = x.rank
        if rank == 1:
            column = self.mb.matmul(x=rows, y=self.mb.expand_dims(x=x, axes=[1]), transpose_x=transpose)
            return self.mb.squeeze(x=column, axes=[1])
        perm = list(range(rank))
        if axis != rank - 2:
            perm[axis], perm[rank - 2] = perm[rank - 2], perm[axis]
            x = self.mb.transpose(x=x, perm=perm)
        made = self.mb.matmul(x=self._spread(rows, rank) if rows.rank == 2 else rows, y=x, transpose_x=transpose)
        return made if axis == rank - 2 else self.mb.transpose(x=made, perm=perm)

    def _set_slice(self, op: Operation, begin: list[int], end: list[int]) -> None:
        if is_const(op.begin) and is_const(op.end):
            return
        changes = {"begin": self.mb.const(val=np.array(begin, np.int32), name=f"{op.name}_begin"),
                   "end": self.mb.const(val=np.array(end, np.int32), name=f"{op.name}_end")}
        for name in ("begin_mask", "end_mask"):
            if op.inputs.get(name) is not None and np.any(op.inputs[name].val):
                changes[name] = self.mb.const(val=np.zeros(len(begin), bool), name=f"{op.name}_{name}")
        op.set_inputs(no_check_var_types=True, **changes)

    def _list_bounds(self, op: Operation, source: Var, strided: bool = False) -> list[list[tuple[int, int]]]:
        """Return begin and end along each axis at each length; negative bounds are resolved with the axis size.

        With `strided`, an axis that does not depend on the length may have any stride.
        """
        parameters = []
        for name in ("begin", "end"):
            values = self.samples.get_values(op.inputs[name])
            if values is None and op.inputs[name].val is None:
                raise Refusal(op, f"its {name} depends on data")
            parameters.append(values or [np.asarray(op.inputs[name].val)] * len(self.samples.deficits))
        stride = np.ones(source.rank) if op.inputs.get("stride") is None else op.stride.val
        if stride is None:
            raise Refusal(op, "it reads or writes with a stride that depends on data")
        masks = [_get_flags(op, name, source.rank) for name in ("begin_mask", "end_mask")]
        squeeze = _get_flags(op, "squeeze_mask", source.rank)
        found = []
        for axis in range(source.rank):
            bounds = []
            for place, (begin, end) in enumerate(zip(*parameters)):
                size = self.samples.get_shape(source, place)[axis]
                first = 0 if masks[0][axis] else _resolve_index(int(begin[axis]), size)
                last = size if masks[1][axis] else _resolve_index(int(end[axis]), size)
                bounds.append((first, first + 1 if squeeze[axis] else last))
            if stride[axis] != 1 and (not strided or len(set(bounds)) > 1 or axis in self.get_pads(op.x) or (
                    stride[axis] < 0 and not (is_const(op.begin) and is_const(op.end)))):
                raise Refusal(op, f"it reads or writes with a stride along axis {axis}, which is padded or moves")
            found.append(bounds)
        return found

    def _find_slice_pad(self, op: Operation, source: Var, axis: int, stops: list[int]) -> Pad:
        """Return the contents of the padding of a slice that ends at `stops`.

        If the slice cuts off real elements at the end, these are in the padding of the result: any numbers, also NaN,
        unless they are rows of a table. A cache, whose rows are not padded, has finite numbers after the position up to
        which it is read.
        """
        pads = self.get_pads(op.x)
        if axis not in pads:
            return FINITE
        to_end = all(stop == self.samples.get_shape(source, place)[axis] for place, stop in enumerate(stops))
        if not to_end and pads[axis] != ANY and _is_finite_table(op.x):
            return FINITE
        return pads[axis] if to_end else ANY

    def _follows(self, places: list[int]) -> bool:
        """Return whether the position becomes one smaller with each missing element."""
        return all(place == places[0] - deficit for place, deficit in zip(places, self.samples.deficits))

    def _pad_slice_update(self, op: Operation) -> None:
        source = self._get_source(op, "x")
        if self.get_pads(op.x) or self.get_pads(op.update):
            raise Refusal(op, "it writes into, or from, a padded axis")
        begin, end = [], []
        moving: tuple[int, int] | None = None
        for axis, bounds in enumerate(self._list_bounds(op, source)):
            starts, stops = [each[0] for each in bounds], [each[1] for each in bounds]
            begin.append(starts[0])
            end.append(stops[0])
            if len(set(starts)) == len(set(stops)) == 1:
                continue
            if not (self._follows(starts) and self._follows(stops)) or moving is not None:
                raise Refusal(op, f"the position that it writes along axis {axis} does not follow the length one by "
                                  "one")
            moving = (axis, starts[0])
        if moving is None:
            self._set_slice(op, begin, end)
            self._set(op, {})
            return
        axis = moving[0]
        begin[axis], end[axis] = 0, int(op.x.shape[axis])
        self._write_rows(op, axis, moving[1], begin, end)

    def _write_rows(self, op: Operation, axis: int, start: int, begin: list[int], end: list[int]) -> None:
        """Write rows into the slice from `begin` to `end`, such as a layer of a cache, and store this slice again."""
        flags = _get_flags(op, "squeeze_mask", op.x.rank)
        dropped = [place for place, flag in enumerate(flags) if flag and place != axis]
        lowered = axis - sum(place < axis for place in dropped)
        new = self.mb.expand_dims(x=op.update, axes=[lowered]) if flags[axis] else op.update
        what = f"{int(new.shape[lowered])} rows are written along axis {axis} by a mask"
        if not dropped and list(zip(begin, end)) == [(0, int(size)) for size in op.x.shape]:
            made = self._blend(op, op.x, new, axis, start)
        else:
            part = self.mb.slice_by_index(x=op.x, begin=begin, end=end,
                                          squeeze_mask=[place in dropped for place in range(op.x.rank)])
            made = self._blend(op, part, new, lowered, start)
            made = self.mb.expand_dims(x=made, axes=dropped) if dropped else made
            made = self.mb.slice_update(x=op.x, update=made, begin=begin, end=end)
        self._note(op, made, what)
        self._replace(op, made)

    def _blend(self, op: Operation, x: Var, new: Var, axis: int, start: int) -> Var:
        """Return `x` with the rows `new` at a position that moves with the length (`start` at the full length)."""
        if not types.is_float(x.dtype):
            raise Refusal(op, "it writes integers at a position that moves with the length")
        size, count = int(x.shape[axis]), int(new.shape[axis])
        dtype = types.builtin_to_string(x.dtype)
        rows = self.make_one_hot(size, start, count, dtype)
        rows = self._spread(self.make_one_hot(size, start, count, dtype), x.rank)
        chosen = rows if count == 1 else self._once(("chosen", rows), lambda: self.mb.reduce_sum(
            x=rows, axes=[-1], keep_dims=True))
        if axis != x.rank - 2:
            shape = [size if place == axis else 1 for place in range(x.rank)]
            chosen = self._once(("chosen", rows, axis), lambda: self.mb.reshape(x=chosen, shape=shape))
        one = np.ones((), types.nptype_from_builtin(x.dtype))[()]
        kept = self._once(("kept", chosen), lambda: self.mb.sub(x=one, y=chosen, name="kept_rows"))
        written = self.mb.mul(x=new, y=chosen) if count == 1 else self._multiply_rows(rows, new, axis)
        return self.mb.add(x=self.mb.mul(x=x, y=kept), y=written)

    def _spread(self, rows: Var, rank: int) -> Var:
        """Return a matrix of rows with the rank of the values that it is multiplied with, at least 2."""
        if rank <= 2:
            return rows
        return self._once(("rank", rows, rank), lambda: self.mb.expand_dims(
            x=rows, axes=list(range(rank - 2)), name="write_rows"))

    # Ops that reduce an axis.

    def _pad_reduction(self, op: Operation) -> None:
        x = op.x
        axes = {int(axis) % x.rank for axis in (range(x.rank) if op.inputs.get("axes") is None
                                               or op.axes.val is None else np.atleast_1d(op.axes.val))}
        padded = sorted(axes & set(self.get_pads(x)))
        kind = op.op_type.removeprefix("reduce_")
        gone = set() if op.keep_dims.val else axes
        for axis in padded:
            if kind in ("sum", "sum_square", "l1_norm", "l2_norm"):
                x = self._clear(op, x, axis)
            elif kind == "mean":
                x = self._scale_mean(op, self._clear(op, x, axis), axis)
            elif kind in ("max", "log_sum_exp") and _is_hidden(self.get_pads(x)[axis]) or (
                    kind == "max" and self.get_pads(x)[axis] == 0.0 and _is_positive(x, strictly=False)):
                continue
            elif kind in ("max", "min") and types.is_float(x.dtype):
                largest = np.finfo(types.nptype_from_builtin(x.dtype)).max
                x = self._fill_padding(op, x, axis, -largest if kind == "max" else largest)
            else:
                raise Refusal(op, f"it reduces the padded axis {axis}; only sums, means, norms and extremes of floats "
                                  "are masked")
        if x is not op.x:
            op.set_inputs(no_check_var_types=True, x=x)
        rest: Pads = {axis: 0.0 if pad == 0.0 and kind in ("sum", "mean", "max", "min", "sum_square", "l1_norm")
                      else ANY if pad == ANY or kind in ("log_sum", "log_sum_exp") else FINITE
                      for axis, pad in self.get_pads(x).items() if axis not in axes}
        kept = [axis for axis in range(x.rank) if axis not in gone]
        self._set(op, {kept.index(axis): pad for axis, pad in rest.items()})
        if kind == "sum" and axes == set(padded) and self._is_flag(self._get_source(op, "x")):
            self.counts.add(op.outputs[0])

    def _is_flag(self, var: Var) -> bool:
        """Return whether elements are 0 or 1: booleans, or an integer input that is not looked up, which is a mask."""
        var = skip_moves(var)
        return var.dtype == types.bool or var.op is None and types.is_int(var.dtype)

    def _pad_reduce_argmax(self, op: Operation) -> None:
        """Fill the padding with a value that is never the first extreme, because the real elements come first."""
        axis, x = int(op.axis.val) % op.x.rank, op.x
        if axis in self.get_pads(x):
            dtype = types.nptype_from_builtin(x.dtype)
            if not types.is_float(x.dtype) and not types.is_int(x.dtype):
                raise Refusal(op, f"it finds the largest of {types.builtin_to_string(x.dtype)} along a padded axis")
            limits = np.finfo(dtype) if types.is_float(x.dtype) else np.iinfo(dtype)
            x = self._fill_padding(op, x, axis, limits.min if op.op_type == "reduce_argmax" else limits.max)
            op.set_inputs(no_check_var_types=True, x=x)
            self.real.add(op.outputs[0])
        gone = [] if op.keep_dims.val else [axis]
        kept = [place for place in range(x.rank) if place not in gone]
        self._set(op, {kept.index(place): FINITE for place in self.get_pads(x) if place != axis})

    _pad_reduce_argmin = _pad_reduce_argmax

    def _scale_mean(self, op: Operation, x: Var, axis: int) -> Var:
        """Return `x` * (padded length / real length): its mean over all elements is the mean of the real part of `x`.
        """
        size, dtype = int(x.shape[axis]), types.builtin_to_string(x.dtype)

        def make() -> Var:
            length = self.mb.add(x=self.position, y=np.array([size - self.position_at_maximum], np.int32))
            whole = np.array([size], types.nptype_from_builtin(x.dtype))
            return self.mb.real_div(x=whole, y=self.mb.cast(x=length, dtype=dtype), name="mean_scale")

        made = self.mb.mul(x=x, y=self._once(("mean", size, dtype), make))
        self.pads[made] = self.get_pads(x)
        return made

    def _fill_padding(self, op: Operation, x: Var, axis: int, value: Any) -> Var:
        """Return `x` with a number in the padding of an axis."""
        size = int(x.shape[axis])
        mask = self._along(self.make_valid(size, size, "bool"), axis, x.rank)
        made = self.mb.select(cond=mask, a=x, b=np.asarray(value, types.nptype_from_builtin(x.dtype))[()])
        self.pads[made] = {**self.get_pads(x), axis: float(value)}
        self._note(op, made, "padding is hidden by a mask")
        return made

    def _pad_softmax(self, op: Operation) -> None:
        axis, pads = int(op.axis.val) % op.x.rank, self.get_pads(op.x)
        found: Pads = {place: ANY if pad == ANY else FINITE for place, pad in pads.items()}
        if axis in pads:
            if not _is_hidden(pads[axis]):
                op.set_inputs(no_check_var_types=True, x=self._hide(op, op.x, axis))
            found[axis] = 0.0
        self._set(op, found)

    def _hide(self, op: Operation, x: Var, axis: int) -> Var:
        """Return the scores, or their mask, of `op` with a large negative value added to the padding of an axis."""
        if self.get_pads(x)[axis] == ANY:
            x = self._clear(op, x, axis)
        dtype, size = types.builtin_to_string(x.dtype), int(x.shape[axis])
        kind = types.nptype_from_builtin(x.dtype)
        bias = self._once(("bias", size, dtype), lambda: self.mb.mul(
            x=self.mb.sub(x=self.make_valid(size, size, dtype), y=kind(1)), y=kind(-MASKED), name="padding_bias"))
        made = self.mb.add(x=x, y=self._along(bias, axis, x.rank))
        self.pads[made] = {**self.get_pads(x), axis: MASKED}
        self._note(op, made, "padded keys get a large negative value")
        return made

    def _pad_matmul(self, op: Operation) -> None:
        x, y = op.x, op.y
        if min(x.rank, y.rank) < 2:
            raise Refusal(op, "it multiplies a vector and a padded value")
        inner = (x.rank - (2 if op.transpose_x.val else 1), y.rank - (1 if op.transpose_y.val else 2))
        rank = op.outputs[0].rank
        if inner[0] in self.get_pads(x):
            x, y = self._clear_product(op, x, y, inner)
        found: Pads = {}
        for var, own, row in ((x, inner[0], rank - 2), (y, inner[1], rank - 1)):
            for axis, pad in self.get_pads(var).items():
                if axis != own:
                    place = axis + rank - var.rank if axis < var.rank - 2 else row
                    known = found.get(place, pad)
                    found[place] = ANY if ANY in (known, pad) else 0.0 if 0.0 in (known, pad) else FINITE
        self._set(op, found)

    def _clear_product(self, op: Operation, x: Var, y: Var, inner: tuple[int, int]) -> tuple[Var, Var]:
        """Set the padding of the summed axis to zero in one or both operands, so that it adds nothing."""
        pads = self.get_pads(x)[inner[0]], self.get_pads(y).get(inner[1], FINITE)
        if ANY in pads or 0.0 not in pads:
            x = self._clear(op, x, inner[0]) if pads[1] != 0.0 or pads[0] == ANY else x
            y = self._clear(op, y, inner[1]) if pads[1] == ANY else y  # 0 times NaN is not 0
            op.set_inputs(no_check_var_types=True, x=x, y=y)
        return x, y

    def _pad_scaled_dot_product_attention(self, op: Operation) -> None:
        query, key, value, mask = (self.get_pads(var) if var is not None else {} for var in (
            op.query, op.key, op.value, op.inputs.get("attn_mask")))
        rank, keys = op.query.rank, op.key.rank - 2
        if op.key.rank - 1 in (*query, *key) or op.value.rank - 1 in value:
            raise Refusal(op, "the width of its heads is padded")
        if keys in key:
            bias = op.inputs.get("attn_mask")
            if bias is None or bias.rank - 1 not in mask:
                raise Refusal(op, "its keys are padded, and no mask hides the padding; expected a mask that is an "
                                  "input, or a model of fixed length: a causal mask hides ids that the caller appends")
            if bias.dtype == types.bool:
                size = int(bias.shape[-1])
                valid = self._along(self.make_valid(size, size, "bool"), bias.rank - 1, bias.rank)
                made = self.mb.logical_and(x=bias, y=valid)
                self.pads[made] = {**mask, bias.rank - 1: 0.0}
                op.set_inputs(no_check_var_types=True, attn_mask=made)
            elif not _is_hidden(mask[bias.rank - 1]):
                op.set_inputs(no_check_var_types=True, attn_mask=self._hide(op, bias, bias.rank - 1))
            if value.get(keys) == ANY or key[keys] == ANY:
                raise Refusal(op, "the padding of its keys and values may hold NaN or infinities")
        self._set(op, dict.fromkeys(self.samples.find_padded_axes(op.outputs[0], op), ANY if ANY in query.values(
            ) else FINITE) if rank - 2 in query else {})

    def _pad_linear(self, op: Operation) -> None:
        if op.x.rank - 1 in self.get_pads(op.x):
            raise Refusal(op, "it sums over a padded axis")
        biased = op.inputs.get("bias") is not None
        self._set(op, {axis: FINITE if pad != ANY and (biased or pad != 0.0) else pad
                       for axis, pad in self.get_pads(op.x).items()})

    def _pad_layer_norm(self, op: Operation) -> None:
        axes = {int(axis) % op.x.rank for axis in (range(op.x.rank) if op.inputs.get("axes") is None else op.axes.val)}
        if axes & set(self.get_pads(op.x)):
            raise Refusal(op, f"it normalizes over the padded axes {sorted(axes & set(self.get_pads(op.x)))}")
        self._set(op, {axis: ANY if pad == ANY else FINITE for axis, pad in self.get_pads(op.x).items()})

    def _pad_cumsum(self, op: Operation) -> None:
        axis, x = int(op.axis.val) % op.x.rank, op.x
        if axis in self.get_pads(x) and op.reverse.val:
            x = self._clear(op, x, axis)
            op.set_inputs(no_check_var_types=True, x=x)
        self._set(op, {place: ANY if pad == ANY else FINITE for place, pad in self.get_pads(x).items()})

    def _pad_conv(self, op: Operation) -> None:
        weight, x = op.weight, op.x
        for axis in sorted(self.get_pads(x)):
            if axis < 2:
                raise Refusal(op, f"axis {axis} of what it reads, a batch or channels, is padded")
            kernel = int(weight.shape[axis])
            stride = 1 if op.inputs.get("strides") is None else int(op.strides.val[axis - 2])
            if stride != 1:
                raise Refusal(op, f"it steps along the padded axis {axis}")
            reads_zeros = op.pad_type.val == "custom" and np.any(op.pad.val[2 * axis - 4:2 * axis - 2])
            if kernel > 1 or reads_zeros:
                x = self._clear(op, x, axis)
        if x is not op.x:
            op.set_inputs(no_check_var_types=True, x=x)
        self._set(op, {axis: ANY if pad == ANY else FINITE for axis, pad in self.get_pads(x).items()})

    def _pad_fill(self, op: Operation) -> None:
        self._set_parameter(op, "shape", np.array(self.samples.get_shape(op.outputs[0]), np.int32))
        value = get_uniform(op.value)
        self._set(op, dict.fromkeys(self.samples.find_padded_axes(op.outputs[0], op),
                                    FINITE if value is None else value))

    def _pad_fill_like(self, op: Operation) -> None:
        value = get_uniform(op.value)
        self._set(op, dict.fromkeys(self.get_pads(op.ref_tensor), FINITE if value is None else value))

    def _pad_band_part(self, op: Operation) -> None:
        """Keep the pads: a band is selected by the difference of the indices, which padding at the end does not move.
        """
        self._set(op, {axis: pad if pad in (0.0, ANY) else FINITE for axis, pad in self.get_pads(op.x).items()})

    def _pad_coreml_update_state(self, op: Operation) -> None:
        if self.get_pads(op.value):
            raise Refusal(op, "it writes a padded value to a state")
        self._set(op, {})


def find_count(var: Var) -> Var | None:
    """Return the count if a value is the position of the last of counted elements, the count - 1; None otherwise."""
    op = skip_moves(var).op
    while op is not None and (op.op_type == "maximum" and get_uniform(op.y) == 0 or op.op_type == "clip" and (
            float(op.alpha.val) == 0 and float(op.beta.val) >= _MAX_LENGTHS)):  # a count of 0 gives the first element
        op = skip_moves(op.x).op
    if op is None or op.op_type not in ("add", "sub") or get_uniform(op.y) != (1 if op.op_type == "sub" else -1):
        return None
    return skip_moves(op.x)


def skip_moves(var: Var) -> Var:
    """Return the operand at the start of a chain of casts, reshapes, repetitions and wrapped negative indices."""
    while var.op is not None:
        if wraps_negatives(var.op):
            var = var.op.a
        elif var.op.op_type in ("cast", "expand_dims", "squeeze", "reshape", "tile", "identity"):
            var = var.op.x
        else:
            break
    return var


def get_uniform(var: Var) -> float | None:
    """Return the number to which all elements of a const, or of the result of a fill, are equal; None for others."""
    if var.op is not None and var.op.op_type == "fill" and var.op.value is not None:
        var = var.op.value
    if not is_const(var) or var.val is None or np.asarray(var.val).dtype.kind not in "biuf":
        return None
    value = np.asarray(var.val)
    first = value.reshape(-1)[0] if value.size else 0
    return float(first) if value.size and np.all(value == first) and np.isfinite(float(first)) else None


def _is_positive(var: Var, strictly: bool = True, known: dict[tuple[Var, bool], bool] | None = None) -> bool:
    """Return whether finite values of `var` are always positive or, without `strictly`, never negative.

    `known` caches results, because the sums of residual layers have several users each.
    """
    known = {} if known is None else known
    if (var, strictly) not in known:
        known[var, strictly] = _find_sign(var, strictly, known)
    return known[var, strictly]


def _find_sign(var: Var, strictly: bool, known: dict[tuple[Var, bool], bool]) -> bool:
    op = var.op
    if is_const(var):
        low = np.min(var.val) if var.val is not None and np.asarray(var.val).dtype.kind in "iuf" else -1
        return bool(low > 0 or low == 0 and not strictly)
    if op is None:
        return False
    if op.op_type in ("add", "maximum"):
        sides = [*([_is_positive(side, strict, known) for side in (op.x, op.y)] for strict in (False, True))]
        return (any(sides[1]) or not strictly and any(sides[0])) and (op.op_type == "maximum" or all(sides[0]))
    if op.op_type == "cast" and op.x.dtype == types.bool:
        return not strictly
    if op.op_type in ("mul", "real_div"):
        if op.op_type == "mul" and op.x is op.y and not strictly:
            return True
        return all(_is_positive(side, strictly or op.op_type == "real_div" and side is op.y, known)
                   for side in (op.x, op.y))
    if op.op_type in ("square", "abs") and strictly:
        return _is_positive(op.x, True, known)
    if op.op_type in ("reduce_mean", "reduce_sum", "reduce_max", "expand_dims", "reshape", "transpose", "identity"):
        return _is_positive(op.x, strictly, known)
    if op.op_type == "clip":
        return float(op.alpha.val) > 0 or not strictly and float(op.alpha.val) == 0
    squares = op.op_type == "pow" and is_const(op.y) and op.y.val is not None and np.all(np.mod(op.y.val, 2) == 0)
    return not strictly and bool(squares or op.op_type in ("square", "abs", "relu", "reduce_sum_square"))


def _is_finite_table(var: Var) -> bool:
    """Return whether all elements come from a constant without NaN and infinities."""
    while var.op is not None and var.op.op_type in ("gather", "reshape", "transpose", "expand_dims", "squeeze"):
        var = var.op.x
    return is_const(var) and var.val is not None and bool(np.isfinite(var.val).all())


def _is_place(column: np.ndarray[Any, Any], axis: int) -> bool:
    """Return whether each integer is equal to its index along an axis."""
    shape = [1] * column.ndim
    shape[axis] = -1
    return bool(np.all(column == np.arange(column.shape[axis]).reshape(shape)))


def _is_hidden(pad: Pad) -> bool:
    return isinstance(pad, float) and pad <= _HIDDEN


def _drop_axes(pads: Pads, gone: list[bool]) -> Pads:
    kept = [axis for axis, flag in enumerate(gone) if not flag]
    return {kept.index(axis): pad for axis, pad in pads.items() if axis in kept}


def _get_flags(op: Operation, name: str, rank: int) -> list[bool]:
    var = op.inputs.get(name)
    return [False] * rank if var is None or var.val is None else [bool(flag) for flag in var.val]


def _resolve_index(index: int, size: int) -> int:
    return max(index + size, 0) if index < 0 else min(index, size)
