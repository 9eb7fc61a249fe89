"""Find integer model inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types

from ..ir.query import get_consumers
from ..passes.contract import BlockRule, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_m4_study, cite_surgery_tip
from ..passes.examples import build_program, make_example, make_weight
from ..utils.text_format import format_count
from ._transitive_readers import find_transitive_readers, is_integer_or_bool

_LOOKUP_OPS = ("gather", "gather_along_axis", "gather_nd", "one_hot", "scatter", "scatter_nd", "scatter_along_axis")


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
