"""The estimate of run time in the reports of `lint` and `rewrite`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mil_ane_passes as ane
from mil_ane_passes.report.html.payload import build_payload
from mil_ane_passes.report.lint_text import format_latency
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

def test_a_rewrite_prints_the_latency_beside_the_estimate_of_the_segmenter():
    fixture = Path(__file__).parents[2] / "fixtures" / "conv_transpose_1d.mlpackage"
    lines = str(ane.rewrite(fixture, target="m4", verify=False)).splitlines()
    assert "estimate of Core ML's segmenter (decides placement): " in lines[0] and "latency" not in lines[0]
    assert re.fullmatch(r"latency: m4 [\d.]+ ms -> [\d.]+ ms \(range [\d.]+ to [\d.]+ ms -> [\d.]+ to [\d.]+ ms\); "
                        r"before: .*; after: .*", lines[1])
    every = str(ane.rewrite(fixture, verify=False)).splitlines()[1]
    assert re.findall(r"(m\d) [\d.]+ ms -> [\d.]+ ms", every) == ["m1", "m2", "m3", "m4", "m5", "m6"]


def test_the_page_has_the_latency_of_the_program_and_of_each_op():
    report = ane.lint(programs.conv_chain((1, 512, 64, 64), (512, 512, 3, 3), form="4-bit palette"), target="m4")
    data = build_payload(report)
    one, = data["reports"]
    assert one["summary"]["latency_us"] == pytest.approx(report.latency.latency_us, rel=1e-4)
    assert one["latency"] == format_latency(report.latency)
    spent = {(op.function, op.index): op for op in report.latency.ops}
    wanted = [spent.get((row.function, row.index)) for row in report.plan.rows]
    assert None in wanted and [each is None for each in one["ops"]["latency_us"]] == [op is None for op in wanted]
    assert all(data["texts"][term].startswith(op.term)
               for term, op in zip(one["ops"]["latency_term"], wanted, strict=True) if op is not None)
