"""Small ops of every type that coremltools registers, placed next to the ops that a rule matches.

Each is built for a given shape and dtype, so that it can replace the producer of an input while the program stays
valid. A recipe maps that shape to the inputs of the op.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_flat_inputs, is_const, iterate_blocks, iterate_ops

__all__ = [
    "FUNCTION_INPUT",
    "NeighbourBuilder",
    "iterate_failures",
    "list_op_types",
    "list_representative_op_types",
    "remove_failed_ops",
]

Shape = tuple[Any, ...]
Inputs = dict[str, Any]
MakeValue = Callable[..., Var]
"""given(shape, dtype=None): a value of that shape that is unknown until the model runs."""
Recipe = Callable[[Shape, MakeValue], Inputs]
MatchProgram = Callable[[Program], object]
FUNCTION_INPUT = "input"
"""Used instead of an op type: an input of the function, which no op produces."""

_NOT_BUILT = frozenset({
    "const", "_const_symbolic", "read_state",  # a constant is tried for each input besides
    "conv_quantized",  # of the neural network backend only
    "classify", "list_length", "make_list", "list_scatter", "list_write",  # their results are lists, or labels
})
_ONE = np.float16(1)


def list_op_types() -> list[str]:
    """List every registered op type that produces a tensor."""
    return sorted(op_type for op_type, versions in SSAOpRegistry.core_ops.items()
                  if versions and op_type not in _NOT_BUILT)


def list_representative_op_types() -> list[str]:
    """Return one op type for each set of required inputs: a rule that reads an absent input fails on one of them."""
    found: dict[tuple[str, ...], str] = {}
    for op_type in sorted(list_op_types(), key=lambda each: len(_get_input_types(each))):
        required = tuple(name for name, kind in _get_input_types(op_type).items() if not kind.optional)
        found.setdefault(required, op_type)
    return sorted(found.values())


def _get_input_types(op_type: str) -> dict[str, Any]:
    versions = SSAOpRegistry.core_ops[op_type]
    found: dict[str, Any] = versions[max(versions)].input_spec.input_types
    return found


def _make_kernel_sizes(count: int, kernel: int = 1) -> list[int]:
    return [kernel] * count


def _make_weights(*shape: Any) -> np.ndarray[Any, Any]:
    return np.ones([int(extent) for extent in shape], np.float16)


def _make_pool_inputs(shape: Shape, given: MakeValue) -> Inputs:
    return {"x": given(shape), "kernel_sizes": _make_kernel_sizes(len(shape) - 2), "pad_type": "valid"}


def _make_recurrent_recipe(gates: int, *states: str) -> Recipe:
    def make_inputs(shape: Shape, given: MakeValue) -> Inputs:
        steps, batch, hidden = shape
        return {"x": given((steps, batch, 3)), **{state: given((batch, hidden)) for state in states},
                "weight_ih": _make_weights(gates * hidden, 3), "weight_hh": _make_weights(gates * hidden, hidden),
                "output_sequence": True}

    return make_inputs


def _make_cond_inputs(shape: Shape, given: MakeValue) -> Inputs:
    value = given(shape)
    return {"pred": given((), types.bool), "_true_fn": lambda: Builder.identity(x=value),
            "_false_fn": lambda: Builder.identity(x=value)}


def _make_while_loop_inputs(shape: Shape, given: MakeValue) -> Inputs:
    return {"_cond": lambda i, x: Builder.less(x=i, y=2), "_body": lambda i, x: (Builder.add(x=i, y=1), x),
            "loop_vars": (np.int32(0), given(shape))}


def _make_reduce_inputs(shape: Shape, given: MakeValue) -> Inputs:
    if shape and shape[-1] == 1:
        return {"x": given((*shape[:-1], 2)), "axes": [-1], "keep_dims": True}
    return {"x": given((*shape, 2)), "axes": [-1], "keep_dims": False}


def _make_reduce_arg_inputs(shape: Shape, given: MakeValue) -> Inputs:
    inputs = _make_reduce_inputs(shape, lambda wanted: given(wanted, types.fp16))
    return {"x": inputs["x"], "axis": -1, "keep_dims": inputs["keep_dims"]}


def _make_list_read_inputs(shape: Shape, given: MakeValue) -> Inputs:
    values = Builder.make_list(init_length=2, elem_shape=shape, dtype=types.builtin_to_string(given(shape).dtype))
    return {"ls": values, "index": given((), types.int32)}


_SAMPLING_INPUTS = {"sampling_mode": "bilinear", "padding_mode": "constant", "padding_value": np.float16(0),
                    "coordinates_mode": "normalized_minus_one_to_one", "align_corners": True}
_RECIPES: dict[str, Recipe] = {
    "affine": lambda s, v: {
        "x": v(s),
        "transform_matrix": v((s[0], 6)),
        "output_height": s[2],
        "output_width": s[3],
        **_SAMPLING_INPUTS,
    },
    "argsort": lambda s, v: {"x": v(s, types.fp16)},
    "avg_pool": _make_pool_inputs,
    "l2_pool": _make_pool_inputs,
    "max_pool": _make_pool_inputs,
    "batch_norm": lambda s, v: {"x": v(s), "mean": _make_weights(s[1]), "variance": _make_weights(s[1])},
    "batch_to_space": lambda s, v: {
        "x": v((s[0] * 2, s[1], s[2] // 2, s[3])),
        "block_shape": [2, 1],
        "crops": np.zeros((2, 2), np.int32),
    },
    "cast": lambda s, v: {"x": v(s, types.fp32), "dtype": types.builtin_to_string(v(s).dtype)},
    "clamped_relu": lambda s, v: {"x": v(s), "alpha": _ONE, "beta": _ONE},
    "clip": lambda s, v: {"x": v(s), "alpha": -_ONE, "beta": _ONE},
    "concat": lambda s, v: {"values": [v((*s[:-1], 1)), v((*s[:-1], s[-1] - 1))], "axis": -1},
    "cond": _make_cond_inputs,
    "constexpr_affine_dequantize": lambda s, v: {
        "quantized_data": np.ones(s, np.uint8),
        "zero_point": np.uint8(1),
        "scale": _ONE,
        "axis": 0,
    },
    "constexpr_blockwise_shift_scale": lambda s, v: {
        "data": np.ones(s, np.int8),
        "scale": _make_weights(*[1] * len(s)),
    },
    "constexpr_cast": lambda s, v: {"source_val": np.ones(s, np.float16), "output_dtype": "fp32"},
    "constexpr_lut_to_dense": lambda s, v: {
        "indices": np.zeros(s, np.uint8),
        "lut": _make_weights(*[1] * len(s), 256, 1),
    },
    "constexpr_sparse_to_dense": lambda s, v: {"nonzero_data": _make_weights(np.prod(s)), "mask": np.ones(s, np.uint8)},
    "conv": lambda s, v: {"x": v((s[0], 2, *s[2:])), "weight": _make_weights(s[1], 2, *[1] * (len(s) - 2))},
    "conv_transpose": lambda s, v: {"x": v((s[0], 2, *s[2:])), "weight": _make_weights(2, s[1], *[1] * (len(s) - 2))},
    "crop": lambda s, v: {"x": v((s[0], s[1], s[2] + 1, s[3])), "crop_height": [1, 0], "crop_width": [0, 0]},
    "crop_resize": lambda s, v: {
        "x": v((s[0], s[-3], 3, 3)),
        "boxes": v((s[0], 4)),
        "target_height": s[-2],
        "target_width": s[-1],
    },
    "depth_to_space": lambda s, v: {"x": v((s[0], s[1] * 4, s[2] // 2, s[3] // 2)), "block_size": 2},
    "dequantize": lambda s, v: {"input": v(s, types.int8), "scale": _ONE},
    "einsum": lambda s, v: {
        "values": [v((s[0], s[1], s[2], 3)), v((s[0], 3, s[2], s[3]))],
        "equation": "nchw,nwhu->nchu",
    },
    "elu": lambda s, v: {"x": v(s), "alpha": _ONE},
    "expand_dims": lambda s, v: {
        "x": v(tuple(e for n, e in enumerate(s) if n != list(s).index(1))),
        "axes": [list(s).index(1)],
    },
    "fill": lambda s, v: {"shape": list(s), "value": _ONE},
    "fill_like": lambda s, v: {"ref_tensor": v(s), "value": _ONE},
    "gather": lambda s, v: {"x": v((3, *s[1:])), "indices": v((s[0],), types.int32), "axis": 0},
    "gather_along_axis": lambda s, v: {"x": v(s), "indices": v(s, types.int32), "axis": -1},
    "gather_nd": lambda s, v: {"x": v((3, *s[1:])), "indices": v((s[0], 1), types.int32)},
    "gru": _make_recurrent_recipe(3, "initial_h"),
    "rnn": _make_recurrent_recipe(1, "initial_h"),
    "layer_norm": lambda s, v: {"x": v(s), "axes": [-1]},
    "leaky_relu": lambda s, v: {"x": v(s), "alpha": _ONE},
    "linear": lambda s, v: {"x": v((*s[:-1], 3)), "weight": _make_weights(s[-1], 3)},
    "linear_activation": lambda s, v: {"x": v(s), "alpha": _ONE, "beta": _ONE},
    "list_gather": lambda s, v: {"ls": _make_list_read_inputs(s[1:], v)["ls"], "indices": v((s[0],), types.int32)},
    "list_read": _make_list_read_inputs,
    "local_response_norm": lambda s, v: {"x": v(s), "size": 2},
    "lstm": _make_recurrent_recipe(4, "initial_h", "initial_c"),
    "matmul": lambda s, v: {"x": v((*s[:-1], 3)), "y": v((*s[:-2], 3, s[-1]))},
    "non_maximum_suppression": lambda s, v: {
        "boxes": v((s[0], 9, 4)),
        "scores": v((s[0], 9, 2)),
        "max_boxes": s[1],
        "iou_threshold": _ONE,
    },
    "one_hot": lambda s, v: {
        "indices": v(s[:-1], types.int32),
        "one_hot_vector_size": s[-1],
        "on_value": _ONE,
        "off_value": np.float16(0),
    },
    "pad": lambda s, v: {"x": v((*s[:-1], s[-1] - 1)), "pad": [1, 0]},
    "pixel_shuffle": lambda s, v: {"x": v((s[0], s[1] * 4, s[2] // 2, s[3] // 2)), "upscale_factor": 2},
    "pixel_unshuffle": lambda s, v: {"x": v((s[0], s[1] // 4, s[2] * 2, s[3] * 2)), "downscale_factor": np.uint32(2)},
    "prelu": lambda s, v: {"x": v(s), "alpha": _make_weights(s[1])},
    "quantize": lambda s, v: {"input": v(s, types.fp16), "scale": _ONE, "output_dtype": "int8"},
    "random_bernoulli": lambda s, v: {"shape": list(s), "prob": _ONE},
    "random_normal": lambda s, v: {"shape": list(s), "mean": _ONE, "stddev": _ONE},
    "random_uniform": lambda s, v: {"shape": list(s), "low": _ONE, "high": _ONE},
    "range_1d": lambda s, v: {"start": np.int32(0), "end": np.int32(s[0]), "step": np.int32(1)},
    "reduce_argmax": _make_reduce_arg_inputs,
    "reduce_argmin": _make_reduce_arg_inputs,
    "resample": lambda s, v: {"x": v((s[0], s[1], 3, 3)), "coordinates": v((s[0], s[2], s[3], 2)), **_SAMPLING_INPUTS},
    "reshape": lambda s, v: {"x": v((1, *s)), "shape": list(s)},
    "reshape_like": lambda s, v: {
        "x": v((1, *s)),
        "ref_tensors": (v(s),),
        "begins": [0],
        "ends": [0],
        "end_masks": [True],
    },
    "resize": lambda s, v: {"x": v(s), "shape": list(s), "resized_dims": np.uint32(len(s))},
    "resize_nearest_neighbor": lambda s, v: {
        "x": v((*s[:-2], 1, 1)),
        "target_size_height": s[-2],
        "target_size_width": s[-1],
    },
    "resize_bilinear": lambda s, v: {"x": v((*s[:-2], 1, 1)), "target_size_height": s[-2], "target_size_width": s[-1]},
    "reverse_sequence": lambda s, v: {"x": v(s), "lengths": v((s[0],), types.int32), "seq_axis": 1},
    "scaled_dot_product_attention": lambda s, v: {"query": v(s), "key": v(s), "value": v(s)},
    "scaled_tanh": lambda s, v: {"x": v(s), "alpha": _ONE, "beta": _ONE},
    "scatter": lambda s, v: {"data": v(s), "indices": v((1,), types.int32), "updates": v((1, *s[1:]))},
    "scatter_along_axis": lambda s, v: {"data": v(s), "indices": v(s, types.int32), "updates": v(s)},
    "scatter_nd": lambda s, v: {"data": v(s), "indices": v((1, 1), types.int32), "updates": v((1, *s[1:]))},
    "select": lambda s, v: {"cond": v(s, types.bool), "a": v(s), "b": v(s)},
    "shape": lambda s, v: {"x": v((2,) * s[0], types.fp16)},
    "sigmoid_hard": lambda s, v: {"x": v(s), "alpha": _ONE, "beta": _ONE},
    "slice_by_index": lambda s, v: {
        "x": v((3, *s)),
        "begin": [1, *[0] * len(s)],
        "end": [2, *s],
        "squeeze_mask": [True, *[False] * len(s)],
    },
    "slice_by_size": lambda s, v: {"x": v((s[0] + 1, *s[1:])), "begin": [1, *[0] * (len(s) - 1)], "size": list(s)},
    "slice_update": lambda s, v: {"x": v(s), "update": v((1, *s[1:])), "begin": [0] * len(s), "end": [1, *s[1:]]},
    "sliding_windows": lambda s, v: {"x": v((s[0] + s[1] - 1, *s[2:])), "axis": 0, "size": s[1]},
    "softplus_parametric": lambda s, v: {"x": v(s), "alpha": _make_weights(s[1]), "beta": _make_weights(s[1])},
    "space_to_batch": lambda s, v: {
        "x": v((s[0] // 2, s[1], s[2] * 2, s[3])),
        "block_shape": [2, 1],
        "paddings": np.zeros((2, 2), np.int32),
    },
    "space_to_depth": lambda s, v: {"x": v((s[0], s[1] // 4, s[2] * 2, s[3] * 2)), "block_size": 2},
    "split": lambda s, v: {"x": v((*s[:-1], 2 * s[-1])), "num_splits": 2, "axis": -1},
    "squeeze": lambda s, v: {"x": v((*s, 1)), "axes": [-1]},
    "stack": lambda s, v: {"values": [v(s[1:]) for _ in range(s[0])], "axis": 0},
    "threshold": lambda s, v: {"x": v(s), "alpha": _ONE},
    "thresholded_relu": lambda s, v: {"x": v(s), "alpha": _ONE},
    "tile": lambda s, v: {"x": v((1, *s[1:])), "reps": [s[0], *[1] * (len(s) - 1)]},
    "topk": lambda s, v: {"x": v((*s[:-1], s[-1] + 1), types.fp16), "k": s[-1], "axis": -1},
    "transpose": lambda s, v: {"x": v(s[::-1]), "perm": list(range(len(s)))[::-1]},
    "upsample_bilinear": lambda s, v: {"x": v((*s[:-2], s[-2] // 2, s[-1])), "scale_factor_height": 2},
    "upsample_nearest_neighbor": lambda s, v: {"x": v((*s[:-2], s[-2] // 2, s[-1])), "scale_factor_height": 2},
    "while_loop": _make_while_loop_inputs,
}


def _make_op_inputs(op_type: str, shape: Shape, given: MakeValue) -> Inputs:
    if op_type in _RECIPES:
        return _RECIPES[op_type](shape, given)
    if op_type.startswith("reduce_"):
        return _make_reduce_inputs(shape, given)
    required = [name for name, kind in _get_input_types(op_type).items() if not kind.optional]
    if not set(required) <= {"x", "y"}:
        raise NotImplementedError(f"no recipe for {op_type}")
    return {name: given(shape) for name in required}


class NeighbourBuilder:
    """Builder of ops in `block` before `anchor` (None: at its end) that read `source` where they can."""

    def __init__(self, block: Block, anchor: Operation | None, source: Var | None = None) -> None:
        self._block, self._anchor, self._source = block, anchor, source
        self._given: dict[tuple[Shape, Any], Var] = {}
        self._has_failed = False

    def build_producer(self, op_type: str, shape: Sequence[Any], dtype: Any) -> Var | None:
        """Build an op of `op_type` whose result has that shape and dtype; None where it cannot have them."""
        if op_type == FUNCTION_INPUT:
            return _make_placeholder(shape, dtype)
        for read in (dtype, types.fp16) if dtype == types.bool else (dtype,):
            for var in self._build_op(op_type, tuple(shape), read):
                if not types.is_list(var.sym_type) and var.dtype == dtype and tuple(var.shape) == tuple(shape):
                    return var
        return None

    def build_consumer(self, op_type: str) -> Operation | None:
        """Build an op of `op_type` that reads `source`; None where it cannot."""
        source = self._source
        assert source is not None
        key = (op_type, source.rank, source.dtype)
        for number, shape in enumerate(_iterate_result_shapes(tuple(source.shape))):
            if number not in _READABLE_SHAPES.get(key, (number,)):
                continue
            for var in self._build_op(op_type, shape, source.dtype):
                if any(source is read for read in var.op.get_flattened_inputs()):
                    _READABLE_SHAPES[key] = (number,)
                    made: Operation = var.op
                    return made
        _READABLE_SHAPES.setdefault(key, ())
        return None

    def _build_op(self, op_type: str, shape: Shape, dtype: Any) -> list[Var]:
        def make_operand(wanted: Shape, kind: Any = None) -> Var:
            return self._make_value(tuple(wanted), kind or dtype)

        try:
            inputs = _make_op_inputs(op_type, shape, make_operand)
            made = getattr(Builder, op_type)(**inputs, before_op=self._anchor)
        except Exception:  # coremltools has no such op for this shape and dtype in this opset
            self._has_failed = True
            return []
        return list(made)[::-1] if isinstance(made, (list, tuple)) else [made]

    def clean_up(self, program: Program) -> None:
        """Remove what is left in `program` of ops that could not be built since the last call, if there are any."""
        if self._has_failed:
            remove_failed_ops(program)
            self._has_failed = False

    def _make_value(self, shape: Shape, dtype: Any) -> Var:
        source = self._source
        if source is not None and tuple(source.shape) == shape and source.dtype == dtype:
            return source
        if any(map(is_symbolic, shape)) or any(extent < 1 for extent in shape):
            raise ValueError(f"no value of shape {shape}")
        if (shape, dtype) not in self._given:
            self._given[shape, dtype] = _make_placeholder(shape, dtype)
        return self._given[shape, dtype]


def remove_failed_ops(program: Program) -> None:
    """Remove what coremltools leaves of ops that could not be built: from their block, and from the users of values."""
    for _, block in iterate_blocks(program):
        for op in [op for op in block.operations if op.outputs is None]:
            block.operations.remove(op)
    inner = [var for _, block in iterate_blocks(program) for var in block.inputs]
    given = [var for function in program.functions.values() for var in function.inputs.values()]
    read = (var for _, op in iterate_ops(program) for var in (*op.outputs, *get_flat_inputs(op)))
    for var in {var for var in (*given, *inner, *read) if isinstance(var, Var)}:
        if any(op.outputs is None for op in var.child_ops):
            var.child_ops[:] = [op for op in var.child_ops if op.outputs is not None]


def _make_placeholder(shape: Sequence[Any], dtype: Any) -> Var:
    """Make an input of the function in which it is used; coremltools does not check whether the function has it."""
    made: Var = Builder.placeholder(shape=list(shape), dtype=dtype, allow_rank0_input=True).outputs[0]
    return made


_READABLE_SHAPES: dict[tuple[Any, ...], tuple[int, ...]] = {}
"Which of `_iterate_result_shapes` an op type can have when it reads a value of some rank and dtype; searched once."


def _iterate_result_shapes(shape: Shape) -> Iterator[Shape]:
    """Yield shapes of results that an op may compute from a value of `shape`."""
    yield from (shape, shape[:-1], (*shape[:-1], 1), shape[1:], shape[::-1])
    if shape and not is_symbolic(shape[-1]):
        yield from ((*shape[:-1], shape[-1] * 2), (*shape[:-1], shape[-1] + 1))


class _InputSlot(NamedTuple):
    """Input `name` of `op`, and the position in it if it is a tuple."""

    op: Operation
    name: str
    position: int | None
    var: Var

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.op.op_type, self.name, bool(self.position), getattr(self.var.op, "op_type", None))

    def read(self, var: Var) -> None:
        """Set the input to read `var`."""
        bound = self.op.inputs[self.name]
        if self.position is not None:
            var = tuple(var if number == self.position else each for number, each in enumerate(bound))
        self.op.set_inputs(no_check_var_types=True, **{self.name: var})


def _iterate_input_slots(program: Program) -> Iterator[_InputSlot]:
    for _, op in iterate_ops(program):
        given = {} if op.op_type == "const" else op.inputs
        for name, bound in given.items():
            if op.input_spec.input_types[name].const:
                continue
            several = isinstance(bound, (list, tuple))
            for position, var in enumerate(bound if several else (bound,)):
                if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type):
                    yield _InputSlot(op, name, position if several else None, var)


def iterate_failures(
    cases: Iterable[tuple[str, Program, MatchProgram]], kinds: Callable[[int], Sequence[str]]
) -> Iterator[str]:
    """Describe how `answer(program)` fails once an input in the program reads another op, or another op reads a value.

    `cases` have a name for the program. `kinds(n)` are the op types to try at the n-th input; `FUNCTION_INPUT` is an
    input of the function. Inputs of the same op type that read the same op type are tried once.
    """
    seen: set[tuple[Any, ...]] = set()
    for name, program, answer in cases:
        block = program.functions["main"]
        builders = NeighbourBuilder(block, block.operations[0] if len(block.operations) else None)
        with block:
            for place in list(_iterate_input_slots(program)):
                if place.key in seen:
                    continue
                seen.add(place.key)
                yield from _iterate_feeding_failures(name, program, place, builders, kinds(len(seen)), answer)
        builders.clean_up(program)
        for place in list(_iterate_input_slots(program)):
            key = (getattr(place.var.op, "op_type", None), place.var.dtype)
            if key not in seen and not is_const(place.var):
                seen.add(key)
                yield from _iterate_reading_failures(name, program, place, kinds(len(seen)), answer)


def _iterate_feeding_failures(
    name: str,
    program: Program,
    place: _InputSlot,
    builders: NeighbourBuilder,
    kinds: Sequence[str],
    answer: MatchProgram,
) -> Iterator[str]:
    block = program.functions["main"]
    own = set(block.operations)
    for kind in kinds:
        made = builders.build_producer(kind, place.var.shape, place.var.dtype)
        if made is None:
            continue
        place.read(made)
        yield from _iterate_match_failures(
            f"'{name}', {kind} feeding '{place.name}' of {place.op.op_type}", program, answer, builders
        )
        place.read(place.var)
        _remove_other_ops(block, own)


def _iterate_reading_failures(
    name: str, program: Program, place: _InputSlot, kinds: Sequence[str], answer: MatchProgram
) -> Iterator[str]:
    block = place.op.enclosing_block
    builder = NeighbourBuilder(block, None, place.var)
    own = set(block.operations)
    with block:
        for kind in kinds:
            made = builder.build_consumer(kind)
            if made is not None:
                source = getattr(place.var.op, "op_type", "the block")
                what = f"'{name}', {kind} reading the output of {source}"
                yield from _iterate_match_failures(what, program, answer, builder)
            builder.clean_up(program)
            _remove_other_ops(block, own)


def _remove_other_ops(block: Block, own: Collection[Operation]) -> None:
    """Remove the ops that were built since `own` were all ops of the block, none of which reads them."""
    block.remove_ops([op for op in reversed(list(block.operations)) if op not in own])


def _iterate_match_failures(
    what: str, program: Program, answer: MatchProgram, builder: NeighbourBuilder
) -> Iterator[str]:
    builder.clean_up(program)
    try:
        answer(program)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        yield f"{what}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
