"""The estimate of run time in the JSON of `lint`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mil_ane_passes as ane
from tests.lab.latency import programs


def test_the_json_has_the_latency_of_the_program_and_of_each_op():
    program = programs.conv_chain((1, 512, 64, 64), (512, 512, 3, 3), layers=3, form="4-bit palette")
    found = json.loads(json.dumps(ane.lint(program, target="m4").to_dict(), allow_nan=False))
    summary = found["summary"]
    assert 0 < summary["latency_low_us"] < summary["latency_us"] < summary["latency_high_us"]
    assert summary["latency_term"].startswith("MACs: ")
    convs = [op for op in found["ops"] if op["op"] == "conv"]
    assert all(op["latency_us"] > 100 and op["latency_term"] == "MACs" for op in convs)
    assert sum(op["latency_us"] for op in convs) < summary["latency_us"] and summary["est_ms"] > 0
    unpacked = [op for op in found["ops"] if op["op"].startswith("constexpr_")]
    assert unpacked and all(op["latency_us"] is None for op in unpacked)


def test_a_program_with_placeholders_for_weights_is_linted():
    program = programs.linear_chain(1, 1 << 15, 1 << 15, layers=2)
    report = ane.lint(program, target="m4")
    assert report.latency is not None and report.latency.latency_us > 4e9 / 70e3
    assert report.latency.term.startswith("weights streamed")


@pytest.mark.parametrize("target", ["all", "a17", "iPhone 16"])
def test_where_nothing_was_measured_the_json_says_so(target):
    program = programs.conv_chain((1, 512, 64, 64), (512, 512, 3, 3))
    assert ane.lint(program, target=target).to_dict()["summary"]["latency_extrapolated"] is True


def test_a_rewrite_reports_the_latency_before_and_after():
    fixture = Path(__file__).parents[2] / "fixtures" / "conv_transpose_1d.mlpackage"
    predicted = ane.rewrite(fixture, target="m4", verify=False).to_dict()["predicted"]
    for each in (predicted["before"], predicted["after"]):
        assert 0 < each["latency_low_us"] < each["latency_us"] < each["latency_high_us"]
