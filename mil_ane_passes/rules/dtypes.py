"""Ops on integers and on fp32, and integer model inputs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, ListVar, Operation, Program, Var, types

from ..ane.op_support import find_dynamic_inputs
from ..ir.large_values import list_groups, merge_groups
from ..ir.query import (
    get_consumers,
    get_flat_inputs,
    get_type_info,
    is_computed_in_fp16,
    is_const,
    is_opaque,
    iterate_nested_ops,
)
from ..passes.contract import BlockRule, Example, Hit, Miss, Severity, Vendor
from ..passes.evidence import cite_m4_study, cite_private_quirk, cite_private_route, cite_surgery_tip
from ..passes.examples import build_program, make_example, make_weight
from ..utils.text_format import format_count
from ._transitive_readers import find_transitive_readers, is_integer_or_bool
from ._unsupported_ops import make_unsupported_hit

_MAX_KINDS_NAMED = 4
"Most op types that a note names."
_INT32_MESSAGE = "Unsupported tensor data type: int32"
_LOOKUP_OPS = ("gather", "gather_along_axis", "gather_nd", "one_hot", "scatter", "scatter_nd", "scatter_along_axis")
_EXEMPT_OPS = frozenset({"const", "cast", "classify"})
"Ops whose dtypes are not those of a computation; custom_layer reports classify."
_OPS_WITH_OWN_RULE = frozenset({
    "one_hot", "band_part", "argsort", "reduce_argmax", "reduce_argmin", "non_maximum_suppression", "topk", "range_1d",
    "non_zero", "sliding_windows", "crop_resize", "scatter", "scatter_nd", "scatter_along_axis", "lstm", "gru",
    "rnn", "cond", "while_loop", "make_list", "list_gather", "list_length", "list_read", "list_scatter", "list_write",
    "random_normal", "random_uniform", "random_bernoulli", "random_categorical", "classify", "custom_layer",
})
"Ops that leave the ANE for any dtype: rules of their own report them."
_POSITION_OR_SIZE_INPUTS = {
    "gather": ("indices",), "gather_nd": ("indices",), "gather_along_axis": ("indices",), "reshape": ("shape",),
    "tile": ("reps",), "pad": ("pad",), "resize": ("shape",), "slice_by_index": ("begin", "end", "stride"),
    "slice_by_size": ("begin", "size"), "fill": ("shape",), "slice_update": ("begin", "end", "stride"),
    "torch_tensor_assign": ("begin", "end", "stride"),
}
"Inputs that are positions or sizes: where one is dynamic, a rule of its own reports it."
_NARROW_INTEGER_TYPES = frozenset({types.int8, types.uint8, types.int16, types.uint16})
_INPUT_ROLES = {"indices": "the indices of", "begin": "the place of", "end": "the place of", "size": "the size of",
                "shape": "the shape of", "reps": "the shape of", "pad": "the shape of"}
_MAX_READERS_EXAMINED, _MAX_READERS_NAMED = 64, 3
"Most readers that are examined, and most that are named."


class Int32Ops(BlockRule):
    """An op that reads or makes int32 leaves the ANE, the casts to and from it, too.

    why     int32 is unsupported on the ANE. Core ML on an M4 rejects every op on it, one by one; bool, the int8 of
            quantize, and 16 bits where an op passes them on (the uint16 of topk, the int16 of a squeeze) are accepted.
            In the middle of a model such an op costs two transitions. Much of it nobody wrote: the preparation of
            indices, and sizes computed from shapes.
    when    A chain: ops of one block that hand integers to one another. One finding each, at its first op; the note
            says what it is computed for. A cast to int8 is unsupported, too. Casts to other narrow types and int64,
            uint32 and int4 were not measured, and are a guess. Constants, and shapes or axes that are constants, do not
            count; ops that are unsupported whatever they compute on have rules of their own.
    fix     Compute what is known at conversion beforehand; fixed input shapes fold most sizes. Pass positions, lengths
            and masks as fp16, which is exact up to 2048, and compare in fp16. Return indices, and use them outside.
    """

    code, slug = "ANE201", "int32-op"
    refuses, confidence = True, "high"
    advice = "Fold what is known at conversion, pass numbers as fp16 (exact up to 2048), and use indices outside."
    evidence = (
        cite_m4_study("any arithmetic on int32 is unsupported, and casts between fp16 and int32 and from fp16 to int8"),
        cite_m4_study("refused: cast, add, mul, select and greater_equal on int32; accepted: bool, quantize to int8, "
                      "uint16 indices of topk, squeeze of int16, gather_nd by int16", rows=True),
        Vendor("with int32 token ids 4 of 606 ops run on the CPU, those of the embedding lookup",
               source="apple/ml-ane-transformers README.md", date="2022-06"),
        cite_private_route("a cast to int32 is rejected on M1; those between fp16, fp32 and bool are taken", chip="M1"),
        cite_private_quirk("fp32, int32 and bf16 are not implemented"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = {op: sure for op in block.operations if (sure := _check_integer_support(op)) is not None}
        for members in _group_integer_ops(block, found) if found else ():
            for sure in (True, False):
                ops = [op for op in members if found.get(op) is sure]
                if not ops:
                    continue
                note = _format_integer_note(ops, members)
                if sure:
                    yield make_unsupported_hit(self, ops[0], note, message=_find_coreml_message(ops[0]), covers=ops)
                else:
                    yield Hit(ops[0], note=f"{note}; not measured", sure=False, covers=ops)

    def reports_op(self, op: Operation) -> bool:
        return _check_integer_support(op) is not None

    def examples(self) -> Iterable[Example]:
        yield Example("indices", _build_wrapped_gather)
        yield make_example("arithmetic", lambda i: Builder.mul(x=i, y=i, name="y"), dtype=types.int32, i=(3,))
        yield make_example("passed through", lambda i: Builder.identity(x=i, name="y"), dtype=types.int32, i=(3,))
        yield make_example("rounded to integers", lambda x: Builder.cast(x=x, dtype="int32", name="y"), x=(3,))
        yield make_example("to int8", lambda x: Builder.cast(x=x, dtype="int8", name="y"), x=(3,))
        yield make_example("to uint8", lambda x: Builder.cast(x=x, dtype="uint8", name="y"), x=(3,))
        yield make_example(
            "size of a flexible input",
            lambda x: Builder.cast(x=Builder.shape(x=x), dtype="fp16", name="y"),
            x=(None, 3),
        )
        yield make_example(
            "truth",
            lambda x: Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="fp16", name="y"),
            reason="",
            x=(3,),
        )
        yield make_example(
            "constants",
            lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=0, name="y"),
            reason="",
            x=(3, 4),
        )


def _format_integer_note(ops: list[Operation], members: list[Operation]) -> str:
    most = Counter(op.op_type for op in ops).most_common()
    shown = ", ".join(f"{count} {kind}" for kind, count in most[:_MAX_KINDS_NAMED])
    more = f" and {len(most) - _MAX_KINDS_NAMED} kinds more" if len(most) > _MAX_KINDS_NAMED else ""
    kinds = sorted({types.builtin_to_string(kind) for op in ops for kind in _find_integer_types(op)})
    ends = _describe_readers(members)
    named = "int32" if "int32" in kinds else " and ".join(kinds)
    return f"{format_count(len(ops), 'op')} on {named} ({shown}{more}){f': {ends}' if ends else ''}"


def _find_coreml_message(op: Operation) -> str | None:
    """Return Core ML's message for such an op, for the forms that were measured; else None."""
    if types.int32 not in _find_integer_types(op):
        return None
    if op.op_type in ("cast", "select"):
        return _INT32_MESSAGE
    if op.op_type == "greater_equal" and is_const(op.y):
        return 'Unable to resolve operation input "y".'
    if op.op_type == "add" and is_const(op.y):
        return 'Failed to extract constant value "add"' if op.y.rank else _INT32_MESSAGE
    return None


def _build_wrapped_gather() -> Program:
    """Build the ops that coremltools writes so that negative indices count from the end."""
    def body(ids: Var) -> Var:
        wrapped = Builder.add(x=ids, y=np.int32(16))
        ids = Builder.select(cond=Builder.greater_equal(x=ids, y=np.int32(0)), a=ids, b=wrapped)
        result: Var = Builder.gather(x=make_weight(16, 4), indices=Builder.cast(x=ids, dtype="int16"), axis=0, name="y")
        return result

    return build_program(body, dtype=types.int32, ids=(3,))


class IntInputs(BlockRule):
    """An integer input brings int32 ops, which are unsupported on the ANE.

    why     Sources disagree on how far that reaches. One says an integer input, even an unused one, sends the whole
            model to the CPU. Apple's own transformers take int32 ids, and all but 4 of 606 ops are on the ANE: only
            the embedding lookup is not. A list made on M4 agrees with the latter: the int32 ops one by one.
    when    Every integer input of a function. The note says who reads it: as indices (gather, one_hot), in arithmetic
            of integers, or in numbers after a cast. It is reported at its first reader.
    fix     Look the embedding up outside and pass its rows in fp16; pass what is computed with (positions, lengths,
            masks) as fp16, which is exact up to 2048. Where ids must go in, keep the lookup first and alone. Whether
            that pays depends on what a transition costs the model at hand.
    """

    code, slug = "ANE501", "int-inputs"
    severity = Severity.UNSUPPORTED
    advice = "Look embeddings up outside and pass their rows, and pass positions, lengths and masks as fp16."
    evidence = (
        cite_surgery_tip("passing an int, even an unused one, is an automatic signal for the CPU (whole model)"),
        Vendor("contradicts it: with int32 token ids 4 of 606 ops run on the CPU, those of the embedding lookup, "
               "because they are more efficient there", source="apple/ml-ane-transformers README.md", date="2022-06"),
        cite_m4_study("contradicts it: int32 ops are unsupported one by one, casts between fp16 and int32 among them"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        first = next((op for op in block.operations if op.op_type != "const"), None)
        for name, var in block.inputs.items():
            if not types.is_state(var.sym_type) and is_integer_or_bool(var) and first is not None:
                at = next(iter(get_consumers(var)), first)
                yield Hit(at, note=f"input '{name}' is {types.builtin_to_string(var.dtype)}: {_describe_use(var)}")

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "ids of an embedding",
            lambda ids: Builder.gather(x=make_weight(16, 4), indices=ids, axis=0, name="y"),
            dtype=types.int32,
            ids=(3,),
        )
        yield make_example(
            "arithmetic",
            lambda position: Builder.cast(x=Builder.add(x=position, y=np.int32(1)), dtype="fp16", name="y"),
            dtype=types.int32,
            position=(3,),
        )
        yield make_example(
            "numbers",
            lambda count: Builder.relu(x=Builder.cast(x=count, dtype="fp16"), name="y"),
            dtype=types.int32,
            count=(3,),
        )
        yield make_example("fp16", lambda x: Builder.relu(x=x, name="y"), reason="", x=(3,))
        yield Example("integers inside", _build_internal_integers, reason="")


def _describe_use(var: Var) -> str:
    """Describe the readers of the input."""
    ends = find_transitive_readers(
        var, lambda op: all(is_integer_or_bool(out) for out in op.outputs) and not _is_lookup(op)
    )
    lookups = [op for op in ends if _is_lookup(op)]
    numbers = [op for op in ends if op.op_type == "cast"]
    others = [op.op_type for op in ends if op not in lookups and op not in numbers]
    parts = [f"index of {len(lookups)} {lookups[0].op_type}"] if lookups else []
    parts += [f"cast to numbers for {_name_first_reader(numbers[0])}"] if numbers else []
    parts += [f"read by {', '.join(sorted(set(others)))}"] if others else []
    direct = sum(all(is_integer_or_bool(out) for out in op.outputs) and not _is_lookup(op) for op in get_consumers(var))
    if direct:
        parts.append(f"{format_count(direct, 'integer op')} on it first")
    return "; ".join(parts) or "nothing computes with it"


def _is_lookup(op: Operation) -> bool:
    """Return whether `op` reads or writes elements at the indices that integers name."""
    return op.op_type in _LOOKUP_OPS and not all(is_integer_or_bool(out) for out in op.outputs)


def _name_first_reader(cast: Operation) -> str:
    found = get_consumers(cast.outputs[0])
    return found[0].op_type if found else "an output"


def _build_internal_integers() -> Program:
    def body(x: Var) -> Var:
        rows = Builder.reduce_argmax(x=x, axis=-1)
        result: Var = Builder.gather(x=make_weight(8, 4), indices=rows, axis=0, name="y")
        return result

    return build_program(body, x=(3, 8))


class Fp32ComputeLeft(BlockRule):
    """Ops that compute in fp32 stay off the ANE, which knows fp16 only.

    why     Every op that reads or makes fp32 runs on the GPU or the CPU, and each transition costs time and
            may take its neighbours along.
    when    A partition: ops of one block that read or make fp32 and hand it to one another. One finding each, at its
            first op, with the number of ops. Constants and casts are no ops here, so the casts at the border of a
            model with fp32 inputs and outputs are no finding.
    fix     ane::fp16_compute turns the ops to fp16, keeps in fp32 those that lose more than asked on your feeds, and
            lists them; what is only moved ane::fp32_island moves in fp16, the same bits. With coremltools: convert
            with compute_precision FLOAT16, and look at what op_selector excludes.
    """

    code, slug = "ANE502", "fp32-compute-left"
    refuses, confidence = True, "high"
    evidence = (
        Vendor("the ANE does not support FLOAT32", date="2022-12",
               source="apple/ml-stable-diffusion python_coreml_stable_diffusion/torch2coreml.py"),
        Vendor("with fp32 precision, ops run on the GPU or the CPU; the ANE computes in fp16",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        cite_m4_study("fp32 model inputs get a cast to fp16, and the rest runs on the ANE"),
        cite_private_quirk("fp32, int32 and bf16 are not implemented"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        island = {op: [op] for op in block.operations if _computes_in_fp32(op)}
        for op in list(island):
            for var in get_flat_inputs(op):
                if var.op in island and get_type_info(var).dtype == types.fp32:
                    merge_groups(island, var.op, op)
        fix = "fp16_compute{mixed=true}" if island and _is_mixed_precision(block) else "fp16_compute"
        for members in list_groups(island):
            yield Hit(members[0], note=_format_fp32_note(members, fix), covers=members, fixed_by=fix)

    def examples(self) -> Iterable[Example]:
        yield Example("one partition", lambda: _build_chain(types.fp32, False))
        yield Example("inside fp16", lambda: _build_chain(types.fp16, True))
        yield Example("fp16", lambda: _build_chain(types.fp16, False), reason="")
        yield Example("casts at the border", _build_interface_casts, reason="")


def _computes_in_fp32(op: Operation) -> bool:
    if op.op_type in _EXEMPT_OPS or op.op_type.startswith("constexpr_") or is_opaque(op) or op.blocks:
        return False
    read = [var for var in get_flat_inputs(op) if var.op is None or var.op.op_type != "const"]
    return any(get_type_info(var).dtype == types.fp32 for var in [*op.outputs, *read])


def _is_mixed_precision(block: Block) -> bool:
    """Return whether the function of `block` also computes in fp16.

    ane::fp16_compute rewrites the fp32 ops of such a function only on request.
    """
    while block.outer_op is not None:
        block = block.outer_op.enclosing_block
    return any(map(is_computed_in_fp16, iterate_nested_ops(block)))


def _format_fp32_note(members: list[Operation], fix: str) -> str:
    kinds = Counter(op.op_type for op in members).most_common()
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:_MAX_KINDS_NAMED])
    more = f" and {len(kinds) - _MAX_KINDS_NAMED} kinds more" if len(kinds) > _MAX_KINDS_NAMED else ""
    if len(members) == 1:
        return f"{shown} computes in fp32; ane::{fix} turns it to fp16"
    return f"{len(members)} ops compute in fp32 ({shown}{more}); ane::{fix} turns them to fp16"


def _build_chain(dtype: object, island: bool) -> Program:
    def body(x: Var) -> Var:
        inner = Builder.cast(x=x, dtype="fp32") if island else x
        inner = Builder.exp(x=Builder.relu(x=inner))
        result: Var = Builder.cast(x=inner, dtype="fp16", name="y") if island else Builder.abs(x=inner, name="y")
        return result

    return build_program(body, dtype=dtype, x=(2, 3))


def _build_interface_casts() -> Program:
    def body(x: Var) -> Var:
        inner = Builder.add(x=Builder.cast(x=x, dtype="fp16"), y=np.float16(1))
        result: Var = Builder.cast(x=inner, dtype="fp32", name="y")
        return result

    return build_program(body, dtype=types.fp32, x=(2, 3))


def _check_integer_support(op: Operation) -> bool | None:
    """Return True where integers make `op` unsupported on the ANE, False where that is a guess, else None."""
    if (
        (op.op_type in _OPS_WITH_OWN_RULE and not _is_topk_of_int32(op))
        or op.op_type.startswith("const")
        or op.blocks
        or is_opaque(op)
    ):
        return None
    kinds = _find_integer_types(op)
    if not kinds:
        return None
    if find_dynamic_inputs(op, *_POSITION_OR_SIZE_INPUTS.get(op.op_type, ())):
        return True if any(out.dtype == types.int32 for out in op.outputs) else None
    if types.int32 in kinds:
        return True
    if kinds - _NARROW_INTEGER_TYPES:
        return False
    if op.op_type != "cast":
        return None
    return bool(op.outputs[0].dtype == types.int8 and types.is_float(op.x.dtype))


def _is_topk_of_int32(op: Operation) -> bool:
    """Return whether `op` is a topk of int32, which is unsupported; a topk of other dtypes is supported."""
    return op.op_type == "topk" and bool(op.x.dtype == types.int32)


def _find_integer_types(op: Operation) -> set[type]:
    """Return the integer types of the outputs of `op`, and of its inputs that are not constants."""
    return {
        get_type_info(var).dtype
        for var in (*op.outputs, *get_flat_inputs(op))
        if _is_integer_var(var) and not is_const(var)
    }


def _is_integer_var(var: Var) -> bool:
    return not isinstance(var, ListVar) and _is_integer_type(get_type_info(var).dtype)


@functools.cache
def _is_integer_type(dtype: type) -> bool:
    """Return whether `dtype` is an integer type; cached, as coremltools computes it anew for each call."""
    return bool(types.is_int(dtype))


def _group_integer_ops(block: Block, found: Mapping[Operation, object]) -> Iterable[list[Operation]]:
    """Group ops connected by integer values, in program order; each group has at least one op of `found`."""
    group: dict[Operation, list[Operation]] = {}
    for op in block.operations:
        if op not in found and (op.op_type == "const" or not any(_is_integer_var(out) for out in op.outputs)):
            continue
        group[op] = [op]
        for var in get_flat_inputs(op):
            if var.op in group and (_is_integer_var(var) or (op in found and var.op in found)):
                merge_groups(group, var.op, op)
    return [members for members in list_groups(group) if any(op in found for op in members)]


def _describe_readers(members: list[Operation]) -> str:
    """Describe the readers of a group's results; "" where it has no reader."""
    inside, found, looked = set(members), dict[str, None](), 0
    for var in (out for op in reversed(members) for out in op.outputs):
        if looked >= _MAX_READERS_EXAMINED:
            break
        if var.consuming_blocks:
            found[f"{_describe_block_output(var)} '{var.name}'"] = None
        for reader in get_consumers(var):
            looked += 1
            if reader not in inside and looked <= _MAX_READERS_EXAMINED:
                found[f"{_describe_input_role(var, reader)} {reader.op_type} '{_get_op_name(reader)}'"] = None
    named = list(found)
    more = f" and {len(named) - _MAX_READERS_NAMED} more" if len(named) > _MAX_READERS_NAMED else ""
    return ", ".join(named[:_MAX_READERS_NAMED]) + more


def _describe_block_output(var: Var) -> str:
    """Describe the block that returns `var`."""
    block = var.consuming_blocks[0]
    return "the output" if isinstance(block, Function) else f"the {block.outer_op.op_type}'s"


def _describe_input_role(var: Var, reader: Operation) -> str:
    given = next((name for name, value in reader.inputs.items() if value is var), "")
    return _INPUT_ROLES.get(given, "an input of")


def _get_op_name(op: Operation) -> str:
    return str(op.outputs[0].name if op.outputs else op.name)
