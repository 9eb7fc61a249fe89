"""A few random programs with the tests, and that failures of each kind are seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.equivalence.comparison import Strictness
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program

from .__main__ import FUZZ
from .fuzz_programs import beside, trial
from .fuzz_programs.draft import generate_program
from .fuzz_programs.kinds import KINDS
from .fuzz_programs.planted import plant_error
from .fuzz_programs.trial import run_trial


def _make_random_program(*kinds, first=0):
    """The first program of these kinds from seed `first` on."""
    return next(
        drawn
        for drawn in (generate_program(seed, {kind: KINDS[kind] for kind in kinds}) for seed in range(first, 40))
        if drawn is not None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_drawn(kind):
    drawn = _make_random_program(kind)
    drawn.program.validate()
    assert set(drawn.kinds) == {kind}


def test_a_seed_is_the_same_program_each_time():
    one, other = generate_program(3, KINDS), generate_program(3, KINDS)
    assert format_program(one.program, names=True) == format_program(other.program, names=True)
    assert one.kinds == other.kinds and one.seed == 3


def test_random_programs_pass():
    outcomes = [
        run_trial(drawn) for drawn in (generate_program(seed, KINDS) for seed in (0, 1, 4)) if drawn is not None
    ]
    assert [failure for outcome in outcomes for failure in outcome.failures] == []
    assert sum(outcome.statuses.total() for outcome in outcomes) >= 6
    assert any(outcome.fired for outcome in outcomes)


def test_an_exception_is_a_crash(monkeypatch):
    def broken(*args, **settings):
        raise KeyError("x")

    monkeypatch.setattr(ane, "lint", broken)
    assert [failure.kind for failure in run_trial(_make_random_program("mod")).failures] == ["crash", "crash"]


def test_a_rejected_result_that_is_equal_is_a_false_alarm(monkeypatch):
    from mil_ane_passes.commands import rewrite_steps

    apply_and_verify = rewrite_steps.apply_and_verify

    def suspicious(plan, before):
        found = apply_and_verify(plan, before)
        found.left_out.append(rewrite_steps.FaultyPass("modulo_by_floor", 1, found.verify))
        return found

    monkeypatch.setattr(rewrite_steps, "apply_and_verify", suspicious)
    drawn = generate_program(0, {"windows": KINDS["windows"]})
    assert {failure.kind for failure in run_trial(drawn).failures} == {"false alarm"}


def test_what_is_not_finite_any_more_is_told_apart(monkeypatch):
    monkeypatch.setattr(trial, "_has_new_nonfinite", lambda drawn, after: True)
    drawn = _make_random_program("windows")
    settings = {"preset": "full", "target": "m4", "max_growth": None}
    assert trial._classify_rejection(drawn, "m4", settings, "windows_by_slices", "").kind == "out of range"


@pytest.mark.slow
def test_the_recorded_programs_fare_as_recorded():
    failed = json.loads(FUZZ.read_text())["failed"]
    recorded = {(failure["seed"], failure["kind"], failure["rule"]) for failure in failed}
    found = set()
    for seed in range(200):
        drawn = generate_program(seed, KINDS)
        if drawn is not None:
            found |= {(failure.seed, failure.kind, failure.rule) for failure in run_trial(drawn).failures}
    assert found == {each for each in recorded if each[0] < 200}


def test_errors_are_planted_in_copies():
    random, labels = np.random.default_rng(0), []
    for seed in range(12):
        drawn = generate_program(seed, KINDS)
        if drawn is None:
            continue
        text = format_program(drawn.program, names=True)
        planted = plant_error(drawn.program, random)
        assert format_program(drawn.program, names=True) == text
        if planted is not None:
            planted[0].validate()
            labels.append(planted[1].partition(" of ")[0])
    assert len(labels) >= 6 and len(set(labels)) >= 3


def _make_pair(change, exactness=Exactness.ROUNDING):
    """The sum over rows keeps runs from being made as one, so that their bits are compared, too."""
    def build(make):
        return build_program(lambda x: mb.tanh(x=mb.reduce_sum(x=make(x), axes=[0]), name="y"), x=(2, 3))

    before, after = (build(make) for make in (lambda x: mb.exp(x=x, name="a"), change))
    return beside.Pair("planted", "by hand", before, after, Strictness(exactness))


def test_both_ways_of_checking_agree_on_right_and_wrong_programs():
    for change, status in ((lambda x: mb.exp(x=x, name="a"), "equal"), (lambda x: mb.abs(x=x, name="a"), "different")):
        pair, tally = _make_pair(change), beside.Tally()
        tally.add(pair, 0, *beside.compare_both_ways(pair))
        assert tally.pairs == {f"planted, {status}": 1} and not tally.differing
        assert tally.runs >= 3  # at float16 nothing is computed at another precision


def test_a_difference_between_the_ways_of_checking_is_seen(monkeypatch):
    pair, execute = _make_pair(lambda x: mb.abs(x=x, name="a")), beside._execute_alone
    monkeypatch.setattr(beside, "_execute_alone", lambda before, after, *more: execute(before, before, *more))
    tally = beside.Tally()
    tally.add(pair, 0, *beside.compare_both_ways(pair))
    (found,) = tally.differing
    assert "verdict 'different' in lockstep, 'not verified' alone" in found["what"] and "bits of" in found["what"]


def test_a_record_is_gone_on_with(monkeypatch, tmp_path):
    monkeypatch.setattr(beside, "BESIDE", tmp_path / "beside.json")
    monkeypatch.setattr(beside, "generate_pairs", lambda drawn: [])
    for first, last, end in ((0, 2, 2), (0, 2, 2), (2, 3, 3)):
        beside.run_seeds(first, last, KINDS, record=True)
        assert json.loads(beside.BESIDE.read_text())["shards"][f"{first}:{last}"]["next"] == end
    shards = json.loads(beside.BESIDE.read_text())["shards"]
    assert set(shards) == {"0:2", "2:3"} and shards["0:2"]["programs"] <= 2


def test_both_ways_of_checking_agreed_on_all_recorded_pairs():
    record = json.loads(beside.BESIDE.read_text())
    tallies = [beside.Tally.from_dict(each) for each in record["shards"].values()]
    assert sum(tally.pairs.total() for tally in tallies) >= 10_000
    assert [each for tally in tallies for each in tally.differing] == []
