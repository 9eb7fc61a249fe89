"""Every rule says who reported what, and claims no more than its sources."""

from __future__ import annotations

import re

import pytest

from mil_ane_passes.passes.contract import Community, Measured, Vendor
from mil_ane_passes.passes.registry import get_all_rules

RULES = get_all_rules().values()
ADDRESS = re.compile(r"https://[\w.-]+\.\w+/\S+( .+)?")
FILE = re.compile(r"[\w.-]+/[\w.-]+(@\w+)?[:,]? ?\S+.*")
DOCUMENT = re.compile(r"\w+[,:]? .{6,}")
DATE = re.compile(r"20\d\d(-\d\d){0,2}")
OURS = re.compile(r"\b(we|our|ours|us) (measured|found|ran|saw)\b|\bmeasured by us\b", re.I)


SHORT = re.compile(r"\b(DISP|FORGE|CAI|MAT|SMP|SHLO|HOL|NUM|seed\d)\b|\bCT#\d")
"What our notes call sources."


def check_evidence(evidence):
    """Check that evidence says something and names its source in full.

    What is called measured names chip and system, and a vendor is Apple.
    """
    assert type(evidence) in (Measured, Vendor, Community)
    assert len(evidence.says) >= 10 and evidence.says == evidence.says.strip()
    assert any(form.fullmatch(evidence.source) for form in (ADDRESS, FILE, DOCUMENT)), (
        f"source {evidence.source!r}: expected https://..., owner/repository path, or a document's title")
    assert evidence.date is None or DATE.fullmatch(evidence.date)
    assert not isinstance(evidence, Measured) or (evidence.chip and evidence.os)
    assert not OURS.search(evidence.says)
    assert not SHORT.search(evidence.source) and not SHORT.search(evidence.says)
    assert not isinstance(evidence, Vendor) or "apple" in evidence.source.lower()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_evidence_says_who_reported_what(rule):
    assert rule.evidence and len(set(rule.evidence)) == len(rule.evidence)
    for evidence in rule.evidence:
        check_evidence(evidence)


@pytest.mark.parametrize("evidence", [
    Community("short", source="https://a.b/c"), Community("ends in a space ", source="https://a.b/c"),
    Community("of no source at all", source="somebody"), Community("of the year it was", "https://a.b/c", date="may"),
    Measured("of no chip and no system", source="https://a.b/c"), Community("we measured it", "https://a.b/c"),
    Community("short for a source", source="FORGE docs/a.md"), Vendor("not by Apple", source="https://a.b/c"),
])
def test_what_says_less_is_noticed(evidence):
    with pytest.raises(AssertionError):
        check_evidence(evidence)


CONTRADICTED = ("int_inputs", "last_axis_slice", "wide_reduce_sum", "large_angle", "large_round", "flexible_shapes",
                "compile_traps", "lopsided", "fills", "constant_gather",
                "runtime_slice", "integer_weights", "old_broadcast", "sequence_linears", "unmeasured_ops")


@pytest.mark.parametrize("name", CONTRADICTED)
def test_sources_that_disagree_are_both_cited(name):
    assert any(re.search(r"contradicts", evidence.says) for evidence in get_all_rules()[name].evidence)
