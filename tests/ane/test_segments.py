"""The cheapest partition: against every partition of short models, at ties, and in linear time."""

from __future__ import annotations

import random
import sys
from itertools import product

import pytest

from mil_ane_passes.ane.segments import ENGINES, find_cheapest_partition
from mil_ane_passes.passes.plan import ANE_OUTPUT_MS, ENTER_ANE_MS, TRANSITION_MS, Cost


def price(costs, outputs, engines):
    total, before = 0.0, None
    for item, made, engine in zip(costs, outputs, engines):
        total += TRANSITION_MS if before not in (None, engine) else 0.0
        total += ENTER_ANE_MS if engine == "ane" and before != "ane" else 0.0
        total += item.of(engine) + (ANE_OUTPUT_MS * made if engine == "ane" else 0.0)
        before = engine
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_is_cheaper(seed):
    draw = random.Random(seed)
    ane, cpu = (None, 0.0, 0.01, 0.1), (0.0, 0.05, 0.3, 0.6)
    costs = [Cost(draw.choice(ane), draw.choice(cpu), draw.choice(cpu))
             for _ in range(draw.randint(1, 7))]
    outputs = [draw.choice((0, 0, 0, 2)) for _ in costs[1:]] + [1]
    chosen, total = find_cheapest_partition(costs, outputs)
    least = min(price(costs, outputs, engines) for engines in product(ENGINES, repeat=len(costs)))
    assert total == pytest.approx(least, abs=1e-9)
    assert price(costs, outputs, chosen) == pytest.approx(least, abs=1e-9)


def test_a_model_without_ops_has_no_segments():
    assert find_cheapest_partition([], []) == ([], 0.0)


@pytest.mark.parametrize("saved, taken", [(0.2499, False), (0.2501, True)])
def test_a_whole_model_must_save_a_quarter_of_a_millisecond(saved, taken):
    chosen, _ = find_cheapest_partition([Cost(0.1, 0.1 + saved, 0.1 + saved)], [1])
    assert (chosen == ["ane"]) is taken


@pytest.mark.parametrize("saved, taken", [(0.3749, False), (0.3751, True)])
def test_a_stretch_in_the_middle_must_save_more(saved, taken):
    refused = Cost(None, 1.0, 1.0)
    chosen, _ = find_cheapest_partition([refused, Cost(0.1, 0.1 + saved, 0.1 + saved), refused], [0, 0, 1])
    assert ("ane" in chosen) is taken


def test_of_two_cpu_backends_that_cost_the_same_it_is_the_classic_one():
    assert find_cheapest_partition([Cost(None, 1.0, 1.0)] * 3, [0, 0, 1])[0] == ["classic_cpu"] * 3


def test_a_last_op_that_costs_the_same_on_both_sides_is_placed_by_the_last_bit_of_a_sum():
    """Networks such as the published ones, where Core ML takes either side."""
    conv, relu = Cost(0.004674279, 0.1000639, 0.1150946), Cost(0.00262144, 0.00262144, 0.00262144)
    sides = set()
    for parameters in range(0, 64, 2):
        middle = Cost((262144 + parameters) / (68 * 2 ** 30) * 1e3, 0.0043, 0.0043)
        chosen, total = find_cheapest_partition([conv, relu, conv, relu, middle, conv, relu, conv, relu], [0] * 8 + [1])
        assert chosen[:-1] == ["ane"] * 8
        assert total == pytest.approx(ENTER_ANE_MS + ANE_OUTPUT_MS + 4 * conv.ane + 4 * relu.ane + middle.ane, abs=1e-9)
        sides.add(chosen[-1])
    assert sides == {"ane", "classic_cpu"}, "both happen"


def test_time_is_linear():
    def lines(count):
        """How many lines are run: what a clock would say, whatever the machine does besides."""
        draw, found = random.Random(0), 0
        costs = [Cost(draw.choice((None, 0.01)), 0.3, 0.3) for _ in range(count)]

        def count_line(frame, event, argument):
            nonlocal found
            found += event == "line"
            return count_line

        before = sys.gettrace()  # that of a run with coverage
        sys.settrace(count_line)
        try:
            find_cheapest_partition(costs, [0] * (count - 1) + [1])
        finally:
            sys.settrace(before)
        return found

    assert 4_000 < lines(4_000) < 4.5 * lines(1_000)
