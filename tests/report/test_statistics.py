"""Counts of findings per rule."""

from __future__ import annotations

import json

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.passes.examples import build_program
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


def test_ops_are_counted_by_the_backend_they_are_predicted_on():
    def body(x):
        for _ in range(6):
            x = mb.conv(x=x, weight=np.full((256, 256, 3, 3), 0.01, np.float16), pad_type="same")
        return mb.tan(x=x)

    program = build_program(body, x=(1, 256, 64, 64))
    rows = report(program).plan.rows
    assert {row.backend for row in rows} == {"ane", "cpu"}
    found = {kind["op"]: kind for kind in json.loads(count("json", program))["op_kinds"]}
    assert found["conv"]["on_ane"] == 6 and found["conv"]["est_cpu_ms"] == 0 and found["tan"]["on_cpu"] == 1
    assert found["conv"]["est_ane_ms"] == pytest.approx(sum(row.cost.ane for row in rows if row.op.op_type == "conv"))
