"""Eliminate common subexpressions."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.constants import get_blob_ref
from ...ir.query import get_type_info, is_const, is_opaque
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Severity
from ...passes.examples import make_example, make_weight

_COMMUTATIVE_OPS = frozenset({"add", "equal", "logical_and", "logical_or", "logical_xor", "mul", "not_equal"})
"Ops with commutative operands and equal bits; not maximum, which may return either of two zeros."
_EFFECT_OPS = ("random_", "read_state", "coreml_update_state", "write_state", "classify", "make_list", "list_",
               "constexpr_", "custom_")
"Beginnings of types of ops that are not functions of their inputs, and of compressed weights, which keep their number."
_MAX_COMPARED = 1024
"Maximum elements of consts to compare; larger ones are equal only if they share memory."


class CommonSubexpressions(BlockRewrite):
    """Eliminate common subexpressions: compute equal values once.

    why     Exporters repeat the preparation of a mask, the angles of a rotary embedding or the scale of a condition in
            each layer; unrolled loops repeat loop-invariant ops. coremltools merges most of them, except ops with
            several outputs, ops on a later output, commuted operands, nested blocks, and ops created later by other
            tools or rewrites.
    when    Two ops of one type whose inputs are the same values or equal constants, in one block or in one nested
            inside the other's. Operands of add, mul and comparisons may be commuted. Not for random numbers, states,
            lists or compressed weights, and not for an op whose result is returned, which needs its name.
    exact   bitwise: the same op on the same numbers.
    cost    none; a shared value stays live until its last user.

    before
        %0: fp16[1, 4] = sub(x=1.0, y=%m)
        %1: fp16[1, 4] = mul(x=%0, y=-100.0)
        %2: fp16[2, 4] = add(x=%x, y=%1)
        %3: fp16[2, 4] = softmax(x=%2)
        %4: fp16[1, 4] = sub(x=1.0, y=%m)
        %5: fp16[1, 4] = mul(x=%4, y=-100.0)
        %6: fp16[2, 4] = add(x=%3, y=%5)
        %y: fp16[2, 4] = softmax(x=%6)
    after
        %0: fp16[1, 4] = sub(x=1.0, y=%m)
        %1: fp16[1, 4] = mul(x=%0, y=-100.0)
        %2: fp16[2, 4] = add(x=%x, y=%1)
        %3: fp16[2, 4] = softmax(x=%2)
        %4: fp16[2, 4] = add(x=%3, y=%1)
        %y: fp16[2, 4] = softmax(x=%4)
    """

    code, slug = "ANE543", "computed-again"
    stage = "cleanup"
    exactness = Exactness.BITWISE
    repeats = True
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "low"
    evidence = (
        Community(
            "scalar work that is the same in all layers was moved out of them: 17 to 9.6 ms a call",
            source="FluidInference/mobius knowledge/coreml", date="2026",
        ),
        Community(
            "of little effect by itself: a layer inside a program costs 13 ns besides its work, and 8 elementwise ops "
            "after a conv are nearly free", chip="M6", os="macOS 27.0.1",
            source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6", date="2026",
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if isinstance(block, Function):
            yield from _find_repetitions(block, ChainMap(), {})

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return dict(zip(hit.op.outputs, hit.first.outputs, strict=True))

    def examples(self) -> Iterable[Example]:
        yield make_example("a mask in each layer", _build_masked_layers, x=(2, 4), m=(1, 4))
        yield make_example("commuted operands", lambda x, z: _sum_twice(
            lambda first: Builder.mul(**(dict(x=x, y=z) if first else dict(x=z, y=x)))), x=(2, 4), z=(2, 4))
        yield make_example("parts of a split", lambda x: _sum_twice(
            lambda first: Builder.mul(**dict(zip("xy", Builder.split(x=x, num_splits=2, axis=1), strict=True)))),
            x=(2, 4))
        yield make_example("equal weights", lambda x: _sum_twice(
            lambda first: Builder.linear(x=x, weight=make_weight(12, 12))), x=(2, 12))
        yield make_example("inside a branch", _build_branch, x=(2, 4))
        yield make_example("another constant", lambda x: _sum_twice(
            lambda first: Builder.mul(x=x, y=np.float16(2 if first else 3))), x=(2, 4), reason="")
        yield make_example("operands of a difference", lambda x, z: _sum_twice(
            lambda first: Builder.sub(**(dict(x=x, y=z) if first else dict(x=z, y=x)))), x=(2, 4), z=(2, 4), reason="")
        yield make_example("returned twice", lambda x: [Builder.tanh(x=x, name="y"), Builder.tanh(x=x, name="z")],
                           x=(2, 4), reason="computes 'y' again, but is an output")
        yield make_example("random numbers", lambda x: Builder.add(x=x, y=_sum_twice(
            lambda first: Builder.random_uniform(shape=np.array([2, 4]), low=np.float16(0), high=np.float16(1)),
            name="r"), name="y"), x=(2, 4), reason="")


def _find_repetitions(
    block: Block, seen: ChainMap[Hashable, Operation], first_of: dict[Var, Var],
) -> Iterator[Hit | Miss]:
    """Yield the ops of a block, and of those nested in it, that compute the same as an earlier op in scope.

    `seen` maps keys to the ops in scope that compute them; `first_of` maps a repeated value to the first one.
    """
    consts: dict[Var, Hashable] = {}
    for op in block.operations:
        for inner in op.blocks:
            yield from _find_repetitions(inner, seen.new_child(), first_of)
        if op.op_type == "const" or op.blocks or is_opaque(op) or op.op_type.startswith(_EFFECT_OPS):
            continue
        key = _make_key(op, first_of, consts)
        first = None if key is None else _look_up(seen, key, op)
        if first is None:
            continue
        if any(var.consuming_blocks for var in op.outputs):
            yield Miss(op, f"computes '{first.outputs[0].name}' again, but is an output")
            continue
        first_of.update(zip(op.outputs, first.outputs, strict=True))
        yield Hit(op, first=first, note=f"computes '{first.outputs[0].name}' again")


def _look_up(seen: MutableMapping[Hashable, Operation], key: Hashable, op: Operation) -> Operation | None:
    """Return the op in scope that computes `key`; if not found, add `op` as that op and return None."""
    return None if (found := seen.setdefault(key, op)) is op else found


def _make_key(op: Operation, first_of: dict[Var, Var], consts: dict[Var, Hashable]) -> Hashable | None:
    """Make a key that is equal for ops that compute the same; None if the results of `op` cannot be compared."""
    if not op.outputs or any(types.is_list(var.sym_type) or types.is_state(var.sym_type) for var in op.outputs):
        return None

    def make_var_key(var: Var) -> Hashable:
        if not is_const(var):
            return id(first_of.get(var, var))
        if var not in consts:
            consts[var] = _make_const_key(var)
        return consts[var]

    inputs: list[Hashable] = []
    for name in sorted(op.inputs):
        bound = op.inputs[name]
        if isinstance(bound, (list, tuple)):
            inputs.append((name, tuple(map(make_var_key, bound))))
        elif bound is not None:
            inputs.append((name, make_var_key(bound)))
    if op.op_type in _COMMUTATIVE_OPS:
        inputs = [frozenset((make_var_key(op.x), make_var_key(op.y)))]
    return op.op_type, tuple(inputs)


def _make_const_key(var: Var) -> Hashable:
    """Make a key that equal constants share: their value if they are small, else where they are stored."""
    kind = get_type_info(var)
    if not types.is_tensor(var.sym_type):
        return "value", kind.dtype, str(var.val)
    shape = kind.shape or ()
    if int(np.prod(shape)) <= _MAX_COMPARED:
        value = np.ascontiguousarray(var.val)
        if value.dtype.kind in "biuf":
            return "value", kind.dtype, shape, value.tobytes()
        return id(var)
    stored = get_blob_ref(var)
    return id(var) if stored is None else ("stored", kind.dtype, shape, stored)


def _sum_twice(compute: Callable[[bool], Var], name: str = "y") -> Var:
    total: Var = Builder.add(x=Builder.relu(x=compute(True)), y=Builder.tanh(x=compute(False)), name=name)
    return total


def _build_masked_layers(x: Var, m: Var) -> Var:
    """Build two layers, each of which prepares the mask."""
    for number in range(2):
        mask = Builder.mul(x=Builder.sub(x=np.float16(1), y=m), y=np.float16(-100))
        x = Builder.softmax(x=Builder.add(x=x, y=mask), axis=-1, name="y" if number else "first")
    return x


def _build_branch(x: Var) -> Var:
    """Build a branch that computes what was computed before it."""
    before = Builder.tanh(x=x)
    positive = Builder.greater(x=Builder.reduce_sum(x=before, axes=[0, 1]), y=np.float16(0))
    branched: Var = Builder.cond(
        pred=positive, _true_fn=lambda: Builder.mul(x=Builder.tanh(x=x), y=np.float16(2)),
        _false_fn=lambda: Builder.mul(x=Builder.tanh(x=x), y=np.float16(3)), name="y")
    return branched
