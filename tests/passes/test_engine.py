"""The walk: what it keeps, what it rejects, and what it costs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types

from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.query import get_flat_inputs, iterate_ops
from mil_ane_passes.passes.contract import BlockRewrite, Exactness, Hit, Miss, Rewrite
from mil_ane_passes.passes.engine import MAX_ROUNDS, apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.targets import Gate
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import RuleError


class Twice(Rewrite):
    """relu(x) becomes relu(relu(x)), spelt with maximum: same numbers, and a const to share."""

    name, code, slug = "twice", "X1", "x"
    roots = ("relu",)

    def match(self, op):
        return Hit(op, note="doubled")

    def rewrite(self, hit, mb):
        return mb.maximum(x=mb.maximum(x=hit.op.x, y=np.float16(0)), y=np.float16(0))


def rule(rewrite, *, roots=("relu",), match=None, base=Rewrite, **fields) -> Rewrite:
    body = {
        "name": "mine",
        "code": "X2",
        "slug": "x",
        "roots": roots,
        "rewrite": lambda self, hit, mb: rewrite(hit, mb),
        "match": lambda self, op: match(op) if match else Hit(op),
        **fields,
    }
    return type("Mine", (base,), body)()


def kinds(prog) -> Counter:
    return Counter(op.op_type for _, op in iterate_ops(prog))


def chain(count: int, dtype=types.fp16) -> Program:
    def body(x):
        for _ in range(count):
            x = mb.relu(x=x)
        return mb.identity(x=x, name="y")

    return build_program(body, x=(2, 3), dtype=dtype)


def check(prog: Program) -> None:
    """Every operand is made by an op that is there, or is an input; both sides' books agree."""
    prog.validate()
    alive = {op for _, op in iterate_ops(prog)}
    for _, op in iterate_ops(prog):
        for var in get_flat_inputs(op):
            assert var.op is None or var.op in alive, f"{op.name} reads {var.name}, whose op was removed"
            assert op in var.child_ops
        for var in op.outputs:
            for reader in var.child_ops:
                assert reader in alive and any(given is var for given in get_flat_inputs(reader)), (
                    var.name,
                    reader.name,
                )


def same_numbers(before: Program, after: Program, feeds) -> None:
    for name in before.functions:
        old, new = (Runtime(each, function=name, precision="float16")(feeds) for each in (before, after))
        assert list(old) == list(new)
        for key, value in old.items():
            np.testing.assert_array_equal(new[key], value)


X = np.linspace(-2, 2, 6, dtype=np.float16).reshape(2, 3)


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda hit, mb: mb.cast(x=hit.op.x, dtype="fp32"), "expected the same dtype and shape"),
        (lambda hit, mb: mb.expand_dims(x=hit.op.x, axes=[0]), "expected the same dtype and shape"),
        (lambda hit, mb: mb.reshape(x=hit.op.x, shape=[3, 2]), "expected the same dtype and shape"),
        (lambda hit, mb: [hit.op.x, hit.op.x], "returned 2 values for 'relu_0', expected 1"),
        (lambda hit, mb: [], "returned 0 values for 'relu_0', expected 1"),
        (lambda hit, mb: None, "returned"),
        (lambda hit, mb: mb.relu(x=hit.op.x), f"still matches at 'relu_0' after {MAX_ROUNDS} rounds"),
        (
            lambda hit, mb: mb.block.set_outputs([mb.abs(x=hit.op.x, name="z")]) or mb.abs(x=hit.op.x),
            "changed the inputs or outputs of function 'main'",
        ),
        (lambda hit, mb: mb.mul(x=hit.op.outputs[0], y=np.float16(2)), "'relu_0'"),
    ],
    ids=["dtype", "rank", "shape", "two", "none", "None", "endless", "interface", "reads what it replaces"],
)
def test_a_rule_that_breaks_the_contract_is_named_with_its_file(rewrite, message):
    class Broken(Rewrite):
        name, code, slug, roots = "broken", "X3", "x", ("relu",)

        def match(self, op):
            return Hit(op)

        def rewrite(self, hit, mb):
            return rewrite(hit, mb)

    prog = build_program(lambda x: mb.abs(x=mb.relu(x=x, name="relu_0"), name="y"), x=(2, 3))
    with pytest.raises(RuleError) as error:
        apply_rewrite(Broken(), prog)
    assert str(error.value).startswith(f"rule broken ({__file__}:")
    assert message in str(error.value)


def test_a_rule_without_a_file_is_named_with_its_module():
    def rewrite(self, hit, mb):
        return []

    made = type("Made", (Twice,), {"__module__": "typed_in", "name": "made", "rewrite": rewrite})
    with pytest.raises(RuleError, match=r"rule made \(typed_in\) returned 0 values"):
        apply_rewrite(made(), chain(1))


def test_a_block_rule_that_never_ends_is_named():
    class Endless(BlockRewrite):
        name, code, slug = "endless", "X3", "x"

        def match_block(self, block):
            yield from (Hit(op) for op in block.operations if op.op_type == "relu")

        def rewrite_block(self, hit, mb):
            return {hit.op.outputs[0]: mb.relu(x=hit.op.x)}

    fault = rf"rule endless \(.*test_engine.py:\d+\) still matches at .* after {MAX_ROUNDS}"
    with pytest.raises(RuleError, match=fault):
        apply_rewrite(Endless(), chain(1))


def test_symbolic_dimensions_stay_symbolic():
    def fixed(hit, mb):
        return mb.reshape(x=hit.op.x, shape=[5, 3])

    prog = build_program(lambda x: mb.abs(x=mb.relu(x=x), name="y"), x=(None, 3))
    with pytest.raises(RuleError, match="expected the same dtype and shape"):
        apply_rewrite(rule(fixed), prog)


def resized(op):
    """A rule that puts a concat, whose symbolic size has a symbol of its own, in the place of `op`."""
    def rewrite(hit, mb):
        return mb.concat(values=[hit.op.x], axis=1)

    return rule(rewrite, match=lambda found: Hit(found) if found.name == op else Miss(found, "another"))


def symbols(prog, op_type, number=0):
    found = [op for _, op in iterate_ops(prog) if op.op_type == op_type][number]
    return [tuple(map(str, var.shape)) for var in (*get_flat_inputs(found)[:1], *found.outputs)]


def test_a_symbol_that_changes_changes_in_all_that_is_computed_from_it():
    def body(x):
        y = mb.exp(x=mb.relu(x=x, name="old"))
        pred = mb.greater(x=mb.reduce_sum(x=y, axes=[0, 1, 2], keep_dims=False), y=np.float16(0))
        z = mb.cond(pred=pred, _true_fn=lambda: mb.abs(x=y), _false_fn=lambda: mb.sin(x=y))
        return [mb.sqrt(x=z, name="y"), mb.shape(x=y, name="sizes"), mb.cos(x=x, name="other")]

    prog = build_program(body, x=(2, None, 3))
    (before,) = set(symbols(prog, "relu"))
    apply_rewrite(resized("old"), prog)
    (after,) = {*symbols(prog, "exp"), *symbols(prog, "abs"), *symbols(prog, "sin"), *symbols(prog, "sqrt")}
    assert after == symbols(prog, "concat")[1] != before
    assert {*symbols(prog, "cos")} == {before}
    (sizes,) = [op.outputs[0] for _, op in iterate_ops(prog) if op.op_type == "shape"]
    assert tuple(map(str, sizes.sym_val)) == after
    check(prog)


def test_a_rule_that_leaves_what_coremltools_cannot_read_is_rolled_back():
    """An op needs equal symbols, and the rule replaces one of them by another."""
    def body(x):
        other = mb.transpose(x=x, perm=[2, 1, 0])
        y = mb.einsum(values=(mb.relu(x=x, name="old"), other), equation="vnm,mno->vno", name="product")
        return mb.abs(x=y, name="y")

    prog = build_program(body, x=(2, None, 3))
    before = str(prog)
    with pytest.raises(RuleError, match="'product' a size that coremltools does not infer to be equal to that of"):
        apply_rewrite(resized("old"), prog)
    assert str(prog) == before
    check(prog)


def test_outputs_keep_their_names_and_others_theirs():
    prog = build_program(
        lambda x: [mb.relu(x=x, name="first"), mb.relu(x=mb.exp(x=x, name="inner"), name="second")], x=(2, 3)
    )
    before = clone_program(prog)
    trace = apply_rewrite(Twice(), prog)
    assert [var.name for var in prog.functions["main"].outputs] == ["first", "second"]
    assert [op.outputs[0].name for _, op in iterate_ops(prog) if op.op_type == "exp"] == ["inner"]
    assert len({var.name for _, op in iterate_ops(prog) for var in op.outputs}) == sum(1 for _ in iterate_ops(prog))
    assert [finding.value for finding in trace.fired] == ["first", "second"]
    check(prog)
    same_numbers(before, prog, {"x": X})


def test_an_output_replaced_by_an_input_gets_an_identity():
    prog = build_program(lambda x: mb.relu(x=x, name="y"), x=(2, 3))
    apply_rewrite(rule(lambda hit, mb: hit.op.x), prog)
    assert kinds(prog) == {"identity": 1}
    assert [var.name for var in prog.functions["main"].outputs] == ["y"]
    assert list(prog.functions["main"].inputs) == ["x"]
    check(prog)


def test_one_value_for_two_outputs_keeps_both_names():
    prog = build_program(lambda x: [mb.relu(x=x, name="a"), mb.relu(x=x, name="b")], x=(2, 3))
    made = []

    def shared(hit, mb):
        if not made:
            made.append(mb.abs(x=hit.op.x))
        return made[0]

    apply_rewrite(rule(shared), prog)
    assert [var.name for var in prog.functions["main"].outputs] == ["a", "b"]
    check(prog)


def nested_program() -> Program:
    """relu in the main block, in both branches of a cond, and in the body of a while loop in one of them."""

    def loop(x):
        return mb.while_loop(
            _cond=lambda i, v: mb.less(x=i, y=3),
            _body=lambda i, v: (mb.add(x=i, y=1), mb.relu(x=v)),
            loop_vars=(0, mb.relu(x=x)),
        )[1]

    def body(x):
        start = mb.relu(x=x)
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float16(0))
        return mb.cond(pred=positive, _true_fn=lambda: loop(start), _false_fn=lambda: mb.relu(x=start), name="y")

    return build_program(body, x=(2, 3))


@pytest.mark.parametrize("sign", [1, -1])
def test_nested_blocks_are_walked(sign):
    prog = nested_program()
    before = clone_program(prog)
    trace = apply_rewrite(Twice(), prog)
    assert len(trace.fired) == 4
    assert kinds(prog)["relu"] == 0 and kinds(prog)["maximum"] == 8
    check(prog)
    same_numbers(before, prog, {"x": (sign * (X + 0.5)).astype(np.float16)})


def test_every_function_is_walked():
    prog = chain(2)
    prog.add_function("second", chain(3).functions["main"])
    trace = apply_rewrite(Twice(), prog)
    assert Counter(finding.function for finding in trace.fired) == {"main": 2, "second": 3}
    assert kinds(prog)["relu"] == 0
    check(prog)


def test_hits_and_near_misses_are_in_the_trace():
    def match(op):
        if op.x.op is None:
            return Hit(op, note="first", exactness=Exactness.ROUNDING)
        return Miss(op, "too late", near=op.outputs[0].name == "near")

    prog = build_program(lambda x: mb.relu(x=mb.relu(x=mb.relu(x=x, name="a"), name="near"), name="far"), x=(2, 3))
    trace = apply_rewrite(rule(lambda hit, mb: mb.abs(x=hit.op.x), match=match), prog)
    assert trace.to_dict()["fired"] == [
        {
            "code": "X2",
            "slug": "x",
            "rule": "mine",
            "function": "main",
            "op": "relu",
            "value": "a",
            "reason": "first",
            "near_miss": False,
            "origin": None,
        }
    ]
    assert [(finding.value, finding.reason) for finding in trace.near_misses] == [("near", "too late")]
    assert (trace.strength, trace.rounds, trace.ops_before, trace.ops_after) == (Exactness.ROUNDING, 1, 3, 3)
    assert trace.to_dict()["exactness"] == "rounding"


def test_the_weakest_form_that_fired_is_the_passes_strength():
    def match(op):
        return Hit(op, exactness=None if op.x.op is None else Exactness.ROUNDING)

    assert apply_rewrite(rule(lambda hit, mb: mb.abs(x=hit.op.x), match=match), chain(1)).strength is Exactness.BITWISE
    assert apply_rewrite(rule(lambda hit, mb: mb.abs(x=hit.op.x), match=match), chain(3)).strength is Exactness.ROUNDING


def test_nothing_changes_where_nothing_fires_or_the_target_is_another():
    prog = chain(2)
    ops = [op for _, op in iterate_ops(prog)]
    assert not apply_rewrite(rule(None, match=lambda op: Miss(op, "no")), prog).fired
    assert not apply_rewrite(rule(None, targets=Gate(first="m4")), prog, target="m1").fired
    assert not find_matches(rule(None, targets=Gate(first="m4")), prog, target="m1").fired
    assert len(find_matches(Twice(), prog).fired) == 2
    assert [op for _, op in iterate_ops(prog)] == ops


def test_a_rewrites_own_result_is_asked_about_again():
    """leaky_relu halves its alpha until it is small. The second op ends with a value that the first one had for a
    while, and whose const went with it: it gets a new one."""

    def halve(hit, mb):
        return mb.leaky_relu(x=hit.op.x, alpha=np.float16(hit.op.alpha.val / 2))

    def match(op):
        return Hit(op) if op.alpha.val > (0.125 if op.x.op is None else 0.25) else Miss(op, "small", near=False)

    def body(x):
        return mb.leaky_relu(x=mb.leaky_relu(x=x, alpha=np.float16(0.5)), alpha=np.float16(1), name="y")

    prog = build_program(body, x=(2, 3))
    trace = apply_rewrite(rule(halve, roots=("leaky_relu",), match=match), prog)
    assert (len(trace.fired), trace.rounds) == (4, 2)
    (found,) = Runtime(prog, precision="float64")({"x": X}).values()
    np.testing.assert_array_equal(found, np.where(X > 0, X, X * 0.125 * 0.25).astype(np.float64))
    check(prog)


def test_a_rule_that_puts_an_op_before_what_it_reads_is_named():
    class Early(Rewrite):
        name, code, slug, roots = "early", "X4", "x", ("tanh",)

        def match(self, op):
            return Hit(op)

        def rewrite(self, hit, mb):
            with mb.at(hit.op.x.op):
                return mb.sigmoid(x=hit.op.x)

    prog = build_program(lambda x: mb.tanh(x=mb.relu(x=x), name="y"), x=(2, 3))
    with pytest.raises(RuleError, match="which no earlier op defines"):
        apply_rewrite(Early(), prog)
