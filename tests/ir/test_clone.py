"""A second copy of a program: independent of the first, with the same weights."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.ir.query import iterate_blocks, iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.testing import program_variants
from tests.ir.test_edits import convs, stateful
from tests.ir.test_printer import listed
from tests.passes.test_engine import Twice, X, chain, check, nested_program, same_numbers


def two_functions():
    prog = nested_program()
    prog.add_function("second", convs(2).functions["main"])
    return prog


def compressed():
    return program_variants.make_compressed(
        build_program(lambda x: mb.conv(x=x, weight=make_weight(6, 4, 3), name="y"), x=(1, 4, 8)), "affine"
    )


def everything():
    """The preset full, with what it leaves alone where the target supports it."""
    return select_rewrites("full", None, {"lift_conv_1d": {"always": True}})


BUILDS = {
    "chain": lambda: chain(3),
    "shared consts": lambda: convs(3),
    "nested": nested_program,
    "states": stateful,
    "lists": listed,
    "two functions": two_functions,
    "compressed": compressed,
    "symbolic": lambda: build_program(lambda x: mb.relu(x=x, name="y"), x=(None, 3)),
}


@pytest.fixture(params=BUILDS)
def build(request):
    return BUILDS[request.param]


def variables(prog):
    for _, block in iterate_blocks(prog):
        yield from block.inputs.values() if isinstance(block.inputs, dict) else block.inputs
        for op in block.operations:
            yield from op.outputs


def test_a_clone_is_the_same_program(build):
    prog = build()
    twin = clone_program(prog)
    assert format_program(twin, names=True) == format_program(prog, names=True)
    assert [op.name for _, op in iterate_ops(twin)] == [op.name for _, op in iterate_ops(prog)]
    check(twin)


def test_a_clone_shares_no_op_var_or_block(build):
    prog = build()
    twin = clone_program(prog)
    assert not {op for _, op in iterate_ops(prog)} & {op for _, op in iterate_ops(twin)}
    assert not {block for _, block in iterate_blocks(prog)} & {block for _, block in iterate_blocks(twin)}
    ours, theirs = set(variables(prog)), set(variables(twin))
    assert ours and not ours & theirs
    for _, op in iterate_ops(twin):
        assert not ours & set(op.get_flattened_inputs())
        assert not ours & {var for var in vars(op).values() if type(var).__name__ == "Var"}
    for _, block in iterate_blocks(twin):
        assert not ours & set(block.outputs)
        assert all(op.enclosing_block is block for op in block.operations)


def test_values_are_the_same_objects(build):
    prog = build()
    for (_, one), (_, other) in zip(iterate_ops(prog), iterate_ops(clone_program(prog)), strict=True):
        if one.op_type == "const":
            assert one.outputs[0]._sym_val is other.outputs[0]._sym_val
            if isinstance(one.outputs[0].val, np.ndarray) and one.outputs[0].rank:
                assert np.shares_memory(one.outputs[0].val, other.outputs[0].val)


def test_rewriting_one_leaves_the_other(build):
    prog = build()
    twin = clone_program(prog)
    text = format_program(prog, names=True)
    apply_rewrite(Twice(), twin)
    apply_rewrites(everything(), twin)
    check(twin)
    assert format_program(prog, names=True) == text
    check(prog)
    text = format_program(twin, names=True)
    apply_rewrite(Twice(), prog)
    assert format_program(twin, names=True) == text


def test_something_was_rewritten_in_most_of_them():
    fired = [
        name
        for name, build in BUILDS.items()
        if apply_rewrite(Twice(), build()).fired or any(trace.fired for trace in apply_rewrites(everything(), build()))
    ]
    assert set(fired) >= {"chain", "shared consts", "nested", "states", "two functions", "compressed", "symbolic"}


def test_a_clone_computes_the_same():
    prog = nested_program()
    for feed in (X + 1, X - 1):
        same_numbers(prog, clone_program(prog), {"x": feed.astype(np.float16)})


def test_states_of_a_clone_are_its_own():
    prog = stateful()
    state, other = {}, {}
    Runtime(prog)({"x": np.ones((2, 3), np.float16)}, state)
    Runtime(clone_program(prog))({"x": np.full((2, 3), 2, np.float16)}, other)
    np.testing.assert_array_equal(state["memory"], 1)
    np.testing.assert_array_equal(other["memory"], 2)


def test_functions_and_the_default_are_kept():
    prog = two_functions()
    prog.default_function_name = "second"
    twin = clone_program(prog)
    assert list(twin.functions) == ["main", "second"] and twin.default_function_name == "second"
    assert twin.functions is not prog.functions
    assert [f.opset_version for f in twin.functions.values()] == [f.opset_version for f in prog.functions.values()]


def test_a_long_program_does_not_recurse():
    assert sum(1 for _ in iterate_ops(clone_program(chain(3000)))) == 3001


def test_a_clone_converts():
    model = ct.convert(
        clone_program(convs(2)),
        convert_to="mlprogram",
        skip_model_load=True,
        pass_pipeline=ane.pipeline(),
        minimum_deployment_target=ct.target.iOS17,
    )
    assert [op.op_type for _, op in iterate_ops(model._mil_program)].count("conv_transpose") == 2


def test_scopes_are_copied():
    prog = chain(1)
    (op, twin) = (
        next(op for _, op in iterate_ops(each) if op.op_type == "relu") for each in (prog, clone_program(prog))
    )
    assert twin.scopes == op.scopes and twin.scopes is not op.scopes
