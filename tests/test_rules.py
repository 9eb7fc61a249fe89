"""Every rule that is found is held to the standard checks; nothing here names a rule."""

from __future__ import annotations

import zlib

import pytest

from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.testing import select_checks

EXPENSIVE = {
    "check_coremltools_pipeline", "check_equivalence_nested", "check_equivalence_observed",
    "check_equivalence_repeated", "check_equivalence_symbolic", "check_neighbouring_ops", "check_save_and_load",
    "check_weights_stay_compressed",
}
"""Checks that build, rewrite and run a program several times for each example, after `check_equivalence` ran them all,
or build many programs, after `rules/test_neighbours.py` had all rules look at one."""

CHECKED_AT_ONCE = 3
"How many of these a rule has in the fast run; the choice differs from rule to rule."


def list_cases():
    """List the checks of each rule; all but some of the expensive ones are slow."""
    for rule in get_all_rules().values():
        checks = select_checks(rule)
        expensive = sorted((check for check in checks if check.__name__ in EXPENSIVE),
                           key=lambda check: zlib.crc32(f"{check.__name__} {rule.name}".encode()))
        for check in checks:
            yield pytest.param(rule, check, marks=[pytest.mark.slow] if check in expensive[CHECKED_AT_ONCE:] else [])


def sample_firing_example(rule, check):
    """Sample a firing example of `rule` for `check`, which differs from check to check."""
    firing = [example for example in rule().examples() if example.reason is None]
    return firing[zlib.crc32(f"{rule.name}.{check.__name__}".encode()) % len(firing)]


def name_part(value):
    return getattr(value, "name", None) or value.__name__


@pytest.mark.sampled(480)
@pytest.mark.parametrize("rule, check", list_cases(), ids=name_part)
def test_rule(rule, check, tmp_path, monkeypatch):
    if check.__name__ in EXPENSIVE:
        sample = sample_firing_example(rule, check)
        monkeypatch.setattr(rule, "examples", lambda self: [sample])
    check(rule, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("rule, check", [
    (rule, check) for rule in get_all_rules().values() for check in select_checks(rule)
    if check.__name__ in EXPENSIVE], ids=name_part)
def test_rule_on_every_example(rule, check, tmp_path):
    check(rule, tmp_path)


def test_different_checks_sample_different_examples():
    rule = get_all_rules()["pad_last_axis"]
    sampled = {sample_firing_example(rule, check).name for check in select_checks(rule)}
    assert len(sampled) > 3
