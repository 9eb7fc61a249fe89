"""Unsupported and unmeasured ops are counted in one way: by lint, by rewrite and on the page."""

from __future__ import annotations

import json
import re

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.plan import SupportCounts
from mil_ane_passes.report.html import build_page
from mil_ane_passes.report.sarif import build_sarif
from tests.package.helpers import make
from tests.report.test_html import data_of

TARGETS = ("a12", "m1", "m4", "m6", "all")
HALF = np.float16


def of_each_kind(x):
    """Ops that are supported, unsupported, not known by a rule, and unmeasured; a rewrite fixes one of them."""
    summed = Builder.cumsum(x=x, axis=1)
    sampled = Builder.acos(x=Builder.gather(x=summed, indices=np.array([1, 0], np.int32), axis=1))
    filled = Builder.add(x=sampled, y=Builder.fill(shape=[2, 2], value=HALF(1)))
    updated = Builder.slice_update(x=filled, update=np.ones((1, 2), HALF), begin=[1, 0], end=[2, 2])
    drawn = Builder.random_normal(shape=[2, 2], mean=HALF(0), stddev=HALF(1), seed=1)
    return Builder.add(x=updated, y=drawn, name="y")


def cached(x, cache):
    """A row of a cache is written, as in a language model."""
    kept = Builder.slice_update(x=Builder.read_state(input=cache), update=x, begin=[1, 0], end=[2, 32])
    return Builder.relu(x=Builder.coreml_update_state(state=cache, value=kept), name="y")


def in_a_loop(x):
    return Builder.while_loop(
        _cond=lambda i, y: Builder.less(x=i, y=HALF(3)),
        _body=lambda i, y: (Builder.add(x=i, y=HALF(1)), Builder.cumsum(x=y, axis=0)), loop_vars=(HALF(0), x))[1]


def stateful():
    from coremltools.converters.mil.mil import Function, Program

    given = {"x": Builder.placeholder(shape=(1, 32), dtype=types.fp16),
             "cache": Builder.state_tensor_placeholder((4, 32), types.fp16)}
    with Function(given, opset_version=ct.target.iOS18) as function:
        function.set_outputs([cached(**function.inputs)])
    built = Program()
    built.add_function("main", function)
    return built


PROGRAMS = {
    "each kind": lambda: build_program(of_each_kind, opset=ct.target.iOS18, x=(2, 4)),
    "a cache": stateful,
    "a loop": lambda: build_program(in_a_loop, x=(4, 8)),
    "nothing": lambda: build_program(lambda x: x, x=(2,)),
}


def counts_in(text):
    """(unsupported, unmeasured) as a text states them."""
    found = re.search(r"(?:(\d+) unsupported)?(?: and )?(?:(\d+) unmeasured)? ops?$", text)
    return SupportCounts(*(int(each or 0) for each in found.groups())) if found else SupportCounts(0, 0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_text_json_and_page_of_lint_agree(name, target):
    report = ane.lint(PROGRAMS[name](), target=target)
    rows = report.to_dict()["ops"]
    expected = SupportCounts(sum(row["ane"] == "no" for row in rows), sum(row["ane"] == "unknown" for row in rows))
    assert counts_in(str(report).splitlines()[0]) == expected
    summary = report.to_dict()["summary"]
    assert SupportCounts(summary["ane_unsupported"], summary["ane_unknown"]) == expected
    (page,) = data_of(build_page(report))["reports"]
    assert counts_in(page["support"]) == expected and page["support"] == str(expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["each kind", "a loop"])
def test_rewrite_counts_as_lint_does_before_and_after(name, target):
    program = PROGRAMS[name]()
    before = ane.lint(program, target=target).plan.support
    report = ane.rewrite(program, dst=program, preset="full", target=target, verify=False)
    assert report.predicted is not None, "a rewrite fires"
    after = ane.lint(program, target=target)
    assert (report.predicted[0].support, report.predicted[1].support) == (before, after.plan.support)
    line = str(report).splitlines()[0]
    assert counts_in(line) == counts_in(str(after).splitlines()[0]) == after.plan.support
    left = after.plan.support != SupportCounts(0, 0)
    assert line.endswith(f"; not fixed: {after.plan.support}") if left else "not fixed" not in line
    assert left or (name, target) == ("a loop", "m4")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_op_that_is_not_known_is_in_one_finding_or_the_other(name, target):
    report = ane.lint(PROGRAMS[name](), target=target)
    noted = [index for item in report.findings if item.rule.unmeasured for index in item.covers]
    doubted = {index for item in report.findings if item.refuses for index in item.covers}
    unknown = {row.index for row in report.plan.rows if row.ane == "unknown"}
    assert len(noted) == len(set(noted)) and not doubted & set(noted)
    assert set(noted) == unknown - doubted


@pytest.mark.parametrize(("unsupported", "unmeasured", "text"), [
    (0, 0, ""), (1, 0, "1 unsupported op"), (2, 0, "2 unsupported ops"), (0, 1, "1 unmeasured op"),
    (2, 1, "2 unsupported and 1 unmeasured op"), (1, 3, "1 unsupported and 3 unmeasured ops")])
def test_counts_are_stated_in_one_way(unsupported, unmeasured, text):
    assert str(SupportCounts(unsupported, unmeasured)) == text


def test_the_ops_of_a_state_come_first_with_both_sides():
    report = ane.lint(stateful(), target="m1")
    noted = [item for item in report.findings if item.rule.unmeasured]
    assert [item.op for item in noted[:3]] == ["slice_update", "read_state", "coreml_update_state"]
    assert noted[3].op == "relu"
    sides = {item.op: {source.kind for source in item.evidence} for item in noted}
    assert sides["slice_update"] == {"vendor", "community"} and sides["read_state"] == {"measured", "community"}
    assert "Apple: an assignment to a window may reside on the ANE; reported on M5 Pro: contradicts it: " in (
        noted[0].reason)
    assert noted[0].to_dict()["evidence"] == [source.to_dict() for source in noted[0].evidence]
    (page,) = data_of(build_page(report))["reports"]
    assert [len(item.get("evidence", ())) for item in page["findings"] if "evidence" in item][:1] == [2]


def test_unmeasured_ops_alone_fail_no_gate(tmp_path, capsys):
    source = make(tmp_path / "m.mlpackage", build_program(lambda x: Builder.relu(x=x, name="y"), x=(64, 64)))
    assert main(["lint", str(source), "--target", "m1", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {item["severity"] for item in found} == {"suggestion"} and "ANE299" in {item["code"] for item in found}
    baseline = tmp_path / "old.json"
    assert main(["lint", str(source), "--target", "m4", "--format", "json", "-o", str(baseline)]) == 0
    assert main(["lint", str(source), "--target", "m1", "--baseline", str(baseline)]) == 0
    (run,) = build_sarif(ane.lint(source, target="m1"))["runs"]
    assert [item["level"] for item in run["results"] if item["ruleId"] == "ANE299"] == ["note"]


def test_what_is_measured_is_no_longer_unmeasured():
    op = {"operator": "relu", "outputs": ["y"], "supported": ["cpu", "ane"], "preferred": "cpu", "cost": None}
    measured = {"program": {"functions": {"main": [op]}}, "machine": {"chip": "M1", "macos": "15.0"}}
    program = build_program(lambda x: Builder.relu(x=x, name="y"), x=(64, 64))
    report = ane.lint(program, target="m1", measured=measured)
    assert report.plan.support == SupportCounts(0, 0) and "ANE299" not in report.plan.rows[0].codes
    assert not [item for item in report.findings if item.rule.unmeasured]
    everywhere = ane.lint(program, measured=measured)
    assert everywhere.plan.support == SupportCounts(0, 1), "one chip says nothing of the others"
    assert [item.op for item in everywhere.findings if item.rule.unmeasured] == ["relu"]


def test_they_can_be_left_out():
    report = ane.lint(stateful(), target="m1", ignore="unmeasured-op")
    assert not [item for item in report.findings if item.rule.unmeasured] and report.plan.support.unmeasured
