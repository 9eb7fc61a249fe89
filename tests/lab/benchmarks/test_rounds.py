"""Ratios are of rounds, and a bound is held to their median."""

from __future__ import annotations

import itertools

import pytest

from tests.lab.benchmarks import rounds
from tests.lab.benchmarks.rounds import Comparison, describe_machine, run_rounds


def make_comparison(ours, theirs, allowed=None, unit="s") -> Comparison:
    return Comparison("ours", "theirs", ours, theirs, allowed, unit)


def test_ratios_are_of_each_round_and_the_median_is_of_ratios():
    # The last round was slow for both: the medians' ratio would be 2 / 4.
    found = make_comparison([1.0, 2.0, 30.0], [2.0, 10.0, 4.0])
    assert found.ratios == [0.5, 0.2, 7.5] and found.ratio == 0.5
    assert found.cells()[4:6] == ["0.50 x", "0.20 to 7.5"]


@pytest.mark.parametrize("allowed, holds", [(None, True), (0.5, True), (0.49, False)])
def test_a_bound_is_on_the_median(allowed, holds):
    found = make_comparison([1.0, 2.0, 30.0], [2.0, 10.0, 4.0], allowed)
    assert found.holds is holds and ("MISSED" in found.cells()[6]) is not holds


def test_both_are_measured_in_each_round():
    with pytest.raises(ValueError, match="2 times and 'theirs' 1 times"):
        make_comparison([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="one round at least"):
        make_comparison([], [])


def test_a_comparison_is_recorded_and_read():
    found = make_comparison([1.0, 2.0], [3.0, 4.0], 1.5, "MB")
    assert Comparison(**found.to_dict()) == found


def test_a_figure_has_its_unit():
    assert make_comparison([0.0204], [1.53]).cells()[2:4] == ["20 ms", "1.53 s"]
    assert make_comparison([1234.5], [0.5], unit="MB").cells()[2:4] == ["1,234 MB", "0.50 MB"]


def test_sides_take_turns_and_every_other_round_goes_backwards():
    order, clock = [], itertools.count()

    def side(name):
        return lambda: order.append(name) or float(next(clock))

    found = run_rounds({name: side(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert found == {"a": [0.0, 5.0, 6.0], "b": [1.0, 4.0, 7.0], "c": [2.0, 3.0, 8.0]}


@pytest.mark.parametrize("load, busy", [(0.1, False), (1.5, True)])
def test_a_busy_machine_is_noticed(monkeypatch, load, busy):
    monkeypatch.setattr(rounds.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 2)
    found = describe_machine()
    assert found["load"] == load and found["busy"] is busy and found["machine"].endswith("2 cores")


def test_clocks_tell_waiting_from_work():
    import time

    def waiting() -> None:
        time.sleep(0.05)

    assert rounds.time_wall(waiting) >= 0.05 > rounds.time_processor(waiting)
