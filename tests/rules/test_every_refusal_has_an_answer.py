"""Each unsupported op has a rewrite that fixes it, or a page that says why none does."""

from __future__ import annotations

import inspect

import pytest

from mil_ane_passes.passes.registry import fixes_for, get_all_rules
from tests.ane.agreement import plan_alone
from tests.ane.m4_cases import estimates
from tests.lab.versions.needs import coremltools_from

REFUSING = {name: rule for name, rule in get_all_rules().items() if rule.refuses}


@pytest.mark.parametrize("name", REFUSING)
def test_each_unsupported_op_has_a_rewrite_or_a_page_that_says_why_not(name):
    rule = REFUSING[name]
    assert fixes_for(rule) or "\nno fix  " in inspect.getdoc(rule), (
        f"{name}: expected a rewrite with fixes = ({rule.__name__},), or a line 'no fix  ...' in its docstring")


@pytest.mark.slow
@coremltools_from("9.0", "leaves the indices of a gather alone: fewer ops than the M4 was given")
def test_each_op_that_an_m4_was_seen_to_refuse_is_found_by_such_a_rule():
    codes = {rule.code for rule in REFUSING.values()}
    seen = 0
    for name, rows in estimates().items():
        for row, told in zip(rows, plan_alone(name).rows, strict=True):
            if "ane" not in row["supported"].split(","):
                assert codes & set(told.codes), f"{name}: {row['op_type']}"
                seen += 1
    assert seen > 40
