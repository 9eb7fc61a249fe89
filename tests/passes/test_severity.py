"""The severity of rules: one scale, from which levels, order and exit codes follow."""

from __future__ import annotations

import pytest

from mil_ane_passes.ane.measured_otherwise import MeasuredOtherwise
from mil_ane_passes.neuralnetwork.layer_rules import get_layer_rules
from mil_ane_passes.passes.contract import Community, Rewrite, Rule, Severity
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.rule_class import assign_default_name, find_flaw
from mil_ane_passes.passes.severity import parse_fail_on
from mil_ane_passes.utils.errors import InputError

RULES = [*get_all_rules().values(), MeasuredOtherwise]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_wrong_numbers_are_those_of_the_codes_3xx(rule):
    severity = rule.get_severity()
    if severity is not Severity.SUGGESTION:
        assert (severity is Severity.WRONG) == rule.code.startswith("ANE3")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_refuses_ops_is_unsupported_or_left_open(rule):
    if rule.refuses:
        assert rule.get_severity() in (Severity.UNSUPPORTED, Severity.SUGGESTION)
    if issubclass(rule, Rewrite) and rule.preset == "named" or rule.unmeasured:
        assert rule.get_severity() is Severity.SUGGESTION


def test_every_severity_is_used_and_layers_have_one():
    assert {rule.get_severity() for rule in RULES} == set(Severity)
    assert {rule.severity for rule in get_layer_rules().values()} == {Severity.UNSUPPORTED}


class Problem(Rule):
    """A problem."""

    code, slug, evidence = "ACME1", "problem", (Community("so it is", source="a blog"),)
    roots, refuses = ("relu",), True


class Fix(Rewrite):
    """A fix of it."""

    fixes, preset = (Problem,), "full"


def test_a_rewrite_has_the_severity_of_what_it_fixes_unless_it_says_otherwise():
    assert (Problem.get_severity(), Fix.get_severity()) == (Severity.UNSUPPORTED, Severity.UNSUPPORTED)
    assert type("Mild", (Fix,), {"severity": Severity.SUGGESTION}).get_severity() is Severity.SUGGESTION
    assert type("Alone", (Rewrite,), {"preset": "full"}).get_severity() is Severity.SLOW


def test_a_severity_of_another_type_is_a_flaw():
    flawed = assign_default_name(type("Flawed", (Problem,), {"severity": "wrong"}))
    assert find_flaw(flawed, ours=False, quick=True) == (
        "has severity='wrong'; expected a Severity, such as Severity.SLOW")


def test_levels_follow_the_scale():
    assert [each.sarif_level for each in Severity] == ["error", "warning", "warning", "note"]
    assert [each.github_level for each in Severity] == ["error", "warning", "warning", "notice"]
    assert [each.fails for each in Severity] == [True, True, True, False]
    assert Severity.WRONG.reaches(Severity.UNSUPPORTED) and not Severity.SLOW.reaches(Severity.UNSUPPORTED)
    assert not any(each.reaches(None) for each in Severity)


def test_an_unknown_severity_is_named_with_the_nearest():
    assert parse_fail_on("slow", "--fail-on") is Severity.SLOW and parse_fail_on("never", "--fail-on") is None
    with pytest.raises(InputError) as refused:
        parse_fail_on("unsuported", "--fail-on")
    assert str(refused.value) == ("--fail-on: found 'unsuported'; expected wrong, unsupported, slow, suggestion or "
                                  "never; did you mean 'unsupported'?")
