"""A few random programs with the tests, and that failures of each kind are seen."""

from __future__ import annotations

import json

import pytest

import mil_ane_passes as ane
from mil_ane_passes.core.printer import program_text

from .__main__ import FUZZ
from .fuzz_programs import trial
from .fuzz_programs.draft import draw
from .fuzz_programs.kinds import KINDS
from .fuzz_programs.trial import run_trial


def _drawn(*kinds, first=0):
    """The first program of these kinds from seed `first` on."""
    return next(drawn for drawn in (draw(seed, {kind: KINDS[kind] for kind in kinds}) for seed in range(first, 40))
                if drawn is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_drawn(kind):
    drawn = _drawn(kind)
    drawn.program.validate()
    assert set(drawn.kinds) == {kind}


def test_a_seed_is_the_same_program_each_time():
    one, other = draw(3, KINDS), draw(3, KINDS)
    assert program_text(one.program, names=True) == program_text(other.program, names=True)
    assert one.kinds == other.kinds and one.seed == 3


def test_random_programs_pass():
    outcomes = [run_trial(drawn) for drawn in (draw(seed, KINDS) for seed in (0, 1, 4)) if drawn is not None]
    assert [failure for outcome in outcomes for failure in outcome.failures] == []
    assert sum(outcome.statuses.total() for outcome in outcomes) >= 6
    assert any(outcome.fired for outcome in outcomes)


def test_an_exception_is_a_crash(monkeypatch):
    def broken(*args, **settings):
        raise KeyError("x")

    monkeypatch.setattr(ane, "lint", broken)
    assert [failure.kind for failure in run_trial(_drawn("mod")).failures] == ["crash", "crash"]


def test_a_rejected_result_that_is_equal_is_a_false_alarm(monkeypatch):
    from mil_ane_passes.api import rewriting
    from mil_ane_passes.proof.blame import Blamed

    settle = rewriting.settle

    def suspicious(rules, apply, prove, progress):
        found = settle(rules, apply, prove, progress)
        found.left_out.append(Blamed("modulo_by_floor", 1, found.verify))
        return found

    monkeypatch.setattr(rewriting, "settle", suspicious)
    drawn = draw(0, {"windows": KINDS["windows"]})
    assert {failure.kind for failure in run_trial(drawn).failures} == {"false alarm"}


def test_what_is_not_finite_any_more_is_told_apart(monkeypatch):
    monkeypatch.setattr(trial, "_leaves_range", lambda drawn, after: True)
    drawn = _drawn("windows")
    settings = {"preset": "full", "target": "m4", "max_growth": None}
    assert trial._judged(drawn, "m4", settings, "windows_by_slices", "").kind == "out of range"


@pytest.mark.slow
def test_the_recorded_programs_fare_as_recorded():
    failed = json.loads(FUZZ.read_text())["failed"]
    recorded = {(failure["seed"], failure["kind"], failure["rule"]) for failure in failed}
    found = set()
    for seed in range(200):
        drawn = draw(seed, KINDS)
        if drawn is not None:
            found |= {(failure.seed, failure.kind, failure.rule) for failure in run_trial(drawn).failures}
    assert found == {each for each in recorded if each[0] < 200}
