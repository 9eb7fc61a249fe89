"""Layers and loops that are written out share one limit on dependent products and one on the ops of a function."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from tests.rewrites.helpers import kinds

UNITS = 4


def lstm(x, **parameters):
    zeros = np.zeros((1, UNITS), np.float16)
    return mb.lstm(x=x, initial_h=zeros, initial_c=zeros, weight_ih=make_weight(4 * UNITS, UNITS),
                   weight_hh=make_weight(4 * UNITS, UNITS), output_sequence=True, **parameters)[0]


def layers(count, steps, before=0, behind=0):
    """`count` lstm layers in a row, with linears before and behind them."""
    def body(x):
        for _ in range(before):
            x = mb.linear(x=x, weight=make_weight(UNITS, UNITS))
        for _ in range(count):
            x = lstm(x)
        for _ in range(behind):
            x = mb.linear(x=x, weight=make_weight(UNITS, UNITS))
        return mb.relu(x=x, name="y")

    return build_program(body, x=(steps, 1, UNITS))


def rule(name="unroll_lstm", **options):
    return find_rewrite(name).configured(**options)


def test_layers_in_a_row_add_up():
    """Two layers of 120 steps fit, three do not: each has a product a step and one for its input."""
    built = layers(3, 120)
    trace = apply_rewrite(rule(), built)
    assert len(trace.fired) == 2 and kinds(built)["lstm"] == 1
    assert [miss.reason for miss in trace.near_misses] == [
        "120 steps would make a chain of 361 dependent products in the function, more than 320 (max_chain)"]


def test_what_is_found_is_what_is_written_out():
    built = layers(3, 120)
    found = {hit.value for hit in find_matches(rule(), built).fired}
    assert found == {hit.value for hit in apply_rewrite(rule(), built).fired} and len(found) == 2


@pytest.mark.parametrize(("before", "behind", "fires"), [(0, 0, True), (5, 4, True), (5, 5, False), (10, 0, False)])
def test_products_before_and_behind_a_layer_count(before, behind, fires):
    assert bool(find_matches(rule(max_chain=30), layers(1, 20, before, behind)).fired) is fires


def test_layers_beside_each_other_do_not_add_up():
    built = build_program(lambda x: mb.add(x=lstm(x), y=lstm(mb.relu(x=x)), name="y"), x=(20, 1, UNITS))
    assert len(find_matches(rule(max_chain=30), built).fired) == 2


def test_a_function_gets_no_more_ops_than_its_limit():
    built = layers(4, 20)
    trace = apply_rewrite(rule(max_ops=700), built)
    assert len(trace.fired) == 2
    assert all("ops, more than 700 (max_ops)" in miss.reason for miss in trace.near_misses)
    assert sum(kinds(built).values()) <= 700


def test_the_functions_of_a_program_share_the_limit_of_ops_and_not_that_of_products():
    built = layers(1, 20)
    built.add_function("other", layers(1, 20).functions["main"])
    assert len(find_matches(rule(max_chain=30), built).fired) == 2, "products of other functions do not depend on these"
    alone = layers(1, 20)
    apply_rewrite(rule(), alone)
    most = sum(kinds(alone).values()) + 50
    found = [hit.function for hit in find_matches(rule(max_ops=most), built).fired]
    trace = apply_rewrite(rule(max_ops=most), built)
    assert [hit.function for hit in trace.fired] == found == ["main"]
    assert all(f"ops, more than {most} (max_ops)" in miss.reason for miss in trace.near_misses)
    assert sum(kinds(built).values()) <= most


def loops(count, steps, products=1, inner=0):
    """`count` loops in a row, each step of `products` in a row; with `inner`, in loops of that many steps."""
    def multiplied(x):
        for _ in range(products):
            x = mb.linear(x=x, weight=make_weight(UNITS, UNITS))
        return x

    def loop(x, steps, step):
        return mb.while_loop(_cond=lambda i, x: mb.less(x=i, y=np.int32(steps)),
                             _body=lambda i, x: (mb.add(x=i, y=np.int32(1)), step(x)), loop_vars=(np.int32(0), x))[1]

    def body(x):
        for _ in range(count):
            x = loop(x, steps, lambda x: loop(x, inner, multiplied) if inner else multiplied(x))
        return mb.relu(x=x, name="y")

    return build_program(body, x=(1, UNITS))


@pytest.mark.parametrize(("count", "steps", "products", "inner", "left"), [
    (1, 30, 1, 0, 0), (1, 31, 1, 0, 1), (1, 15, 2, 0, 0), (1, 16, 2, 0, 1), (3, 12, 1, 0, 1), (1, 5, 1, 6, 0),
    (1, 6, 1, 6, 2)])
def test_loops_have_the_same_limit(count, steps, products, inner, left):
    built = loops(count, steps, products, inner)
    trace = apply_rewrite(rule("unroll_while_loop", max_chain=30), built)
    assert kinds(built)["while_loop"] == left
    assert all("more than 30 (max_chain)" in miss.reason for miss in trace.near_misses)
    assert bool(left) is bool(trace.near_misses)


@pytest.mark.slow
def test_a_deep_nest_is_decided_at_once():
    def nest(x, depth):
        if not depth:
            return mb.linear(x=x, weight=make_weight(UNITS, UNITS))
        return mb.while_loop(_cond=lambda i, x: mb.less(x=i, y=np.int32(1)),
                             _body=lambda i, x: (mb.add(x=i, y=np.int32(1)), nest(x, depth - 1)),
                             loop_vars=(np.int32(0), x))[1]

    assert find_matches(
        rule("unroll_while_loop"), build_program(lambda x: mb.relu(x=nest(x, 12), name="y"), x=(1, UNITS))
    ).fired
