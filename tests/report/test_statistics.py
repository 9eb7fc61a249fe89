"""Counts of findings per rule."""

from __future__ import annotations

import json

from mil_ane_passes.report.lint_collection import CollectionTotals
from mil_ane_passes.report.lint_statistics import StatisticsCollection

from .made import chain, report


def count(form, *programs):
    collection, totals = StatisticsCollection(form, {"target": "m4"}), CollectionTotals()
    for each in programs:
        found = report(each)
        assert collection.add(found) is None
        totals.add(found)
    return collection.finish(totals)


def test_the_most_frequent_first_and_equal_ones_by_code():
    data = json.loads(count("json", chain("tanh", "relu", "relu", "sigmoid"), chain("relu", "square")))
    assert [(row["code"], row["severity"], row["count"], row["packages"]) for row in data["statistics"]] == [
        ("ANE216", "unsupported", 3, 2), ("ANE191", "suggestion", 1, 1), ("ANE391", "wrong", 1, 1),
        ("ANE591", "suggestion", 1, 1)]
    assert [row["fixes"] for row in data["statistics"]] == [{}, {"by_name": 1}, {"wrong_tanh": 1}, {}]
    assert data["summary"]["findings"] == 4 and data["summary"]["severities"] == {
        "wrong": 1, "unsupported": 3, "slow": 0, "suggestion": 2}


def test_a_rewrite_that_fixes_some_of_them_is_named_with_their_number():
    collection, totals = StatisticsCollection("text", {}), CollectionTotals()
    found = report(chain("tanh", "tanh"))
    object.__setattr__(found.findings[0], "not_fixed_because", "a reason")
    collection.add(found)
    (row,) = collection.rules.values()
    assert (row.count, row.fixable) == (2, 1)
    assert "wrong_tanh (1 of 2)" in collection.finish(totals)


def test_nothing_found():
    head, kind, _, _, summary = count("text", chain("abs")).splitlines()
    assert head.startswith("op ") and kind.startswith("abs ") and summary.startswith("1 package: 0 findings, 0 sugg")
