"""Every rule says who reported what, and claims no more than its sources."""

from __future__ import annotations

import re

import pytest

from mil_ane_passes.passes.contract import Community, Measured, Vendor
from mil_ane_passes.passes.registry import get_all_rules

CITED = [(rule, evidence) for rule in get_all_rules().values() for evidence in rule.evidence]
NAMES = [f"{rule.name}-{number}" for number, (rule, _) in enumerate(CITED)]
ADDRESS = re.compile(r"https://[\w.-]+\.\w+/\S+( .+)?")
FILE = re.compile(r"[\w.-]+/[\w.-]+(@\w+)?[:,]? ?\S+.*")
DOCUMENT = re.compile(r"\w+[,:]? .{6,}")
DATE = re.compile(r"20\d\d(-\d\d){0,2}")
OURS = re.compile(r"\b(we|our|ours|us) (measured|found|ran|saw)\b|\bmeasured by us\b", re.I)


@pytest.mark.parametrize("rule", get_all_rules().values(), ids=lambda rule: rule.name)
def test_there_is_evidence(rule):
    assert rule.evidence and len(set(rule.evidence)) == len(rule.evidence)


@pytest.mark.parametrize("rule,evidence", CITED, ids=NAMES)
def test_it_says_something_and_names_its_source(rule, evidence):
    assert type(evidence) in (Measured, Vendor, Community)
    assert len(evidence.says) >= 10 and evidence.says == evidence.says.strip()
    assert ADDRESS.fullmatch(evidence.source) or FILE.fullmatch(evidence.source) or DOCUMENT.fullmatch(evidence.source)
    assert evidence.date is None or DATE.fullmatch(evidence.date)


@pytest.mark.parametrize("rule,evidence", CITED, ids=NAMES)
def test_what_is_called_measured_names_chip_and_system(rule, evidence):
    if isinstance(evidence, Measured):
        assert evidence.chip and evidence.os
    assert not OURS.search(evidence.says)


@pytest.mark.parametrize("rule,evidence", CITED, ids=NAMES)
def test_a_source_is_named_in_full(rule, evidence):
    short = re.compile(r"\b(DISP|FORGE|CAI|MAT|SMP|SHLO|HOL|NUM|seed\d)\b|\bCT#\d")
    assert not short.search(evidence.source) and not short.search(evidence.says)


@pytest.mark.parametrize("rule,evidence", CITED, ids=NAMES)
def test_a_vendor_is_apple(rule, evidence):
    if isinstance(evidence, Vendor):
        assert "apple" in evidence.source.lower()


CONTRADICTED = ("int_inputs", "last_axis_slice", "wide_reduce_sum", "large_angle", "large_round", "flexible_shapes",
                "compile_traps", "lopsided", "fills", "constant_gather",
                "runtime_slice", "integer_weights", "old_broadcast", "sequence_linears", "unmeasured_ops")


@pytest.mark.parametrize("name", CONTRADICTED)
def test_sources_that_disagree_are_both_cited(name):
    assert any(re.search(r"at odds with|contradicts", evidence.says) for evidence in get_all_rules()[name].evidence)
