"""A few planted errors with the tests, all of them in the slow run; each still finds the text that it replaces."""

from __future__ import annotations

import json

import pytest

from .__main__ import MUTATION
from .mutation.directed import DIRECTED_PROGRAMS
from .mutation.mutants import MUTANTS
from .mutation.trial import ROOT, run_trial

_BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_error_can_be_planted(mutant):
    compile(mutant.patch((ROOT / mutant.path).read_text()), str(mutant.path), "exec")
    assert set(mutant.programs) <= set(DIRECTED_PROGRAMS)


def test_names_are_used_once():
    assert len(_BY_NAME) == len(MUTANTS)
    assert {program for mutant in MUTANTS for program in mutant.programs} == set(DIRECTED_PROGRAMS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["same-pads-swapped", "gather-negatives-mirrored", "band-by-one"])
def test_an_error_is_caught(name):
    verdict = run_trial(_BY_NAME[name])
    assert verdict.outcome == "caught", verdict


def test_a_change_of_no_consequence_is_equivalent():
    assert run_trial(_BY_NAME["xor-not-squared"]).outcome == "equivalent"


def test_text_that_is_not_there_once_is_an_error():
    with pytest.raises(ValueError, match="occurs 0 times; expected once"):
        _BY_NAME["band-by-one"].patch("nothing of the kind")


@pytest.mark.slow
def test_all_errors_fare_as_recorded():
    recorded = {each["name"]: each["outcome"] for each in json.loads(MUTATION.read_text())["verdicts"]}
    assert {mutant.name: run_trial(mutant).outcome for mutant in MUTANTS} == recorded
