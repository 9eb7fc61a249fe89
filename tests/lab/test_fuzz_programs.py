"""A few random programs with the tests, and that failures of each kind are seen."""

from __future__ import annotations

import json

import pytest

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program

from .__main__ import FUZZ
from .fuzz_programs import trial
from .fuzz_programs.draft import generate_program
from .fuzz_programs.kinds import KINDS
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
