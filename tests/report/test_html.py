"""The page as text: whole in one file, its policy, its data. What it does in a browser is tested beside."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.report.html import build_page
from mil_ane_passes.report.html.changes import find_changes
from mil_ane_passes.report.html.page import SCRIPTS
from mil_ane_passes.report.lint_groups import find_costliest, group_findings
from tests.report import programs


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def policy_of(text: str) -> str:
    return html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])


def rewritten():
    program = programs.vocoder()
    ane.rewrite(program, dst=program, preset="full", verify=False)
    return ane.lint(programs.vocoder(), target="m4"), ane.lint(program, target="m4")


def test_the_page_is_one_file_that_asks_for_nothing():
    text = build_page(ane.lint(programs.vocoder()))
    assert not re.search(r'\b(?:src|href)="(?!#)', text)
    assert "@import" not in text and "url(" not in text
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", text)


def test_the_policy_admits_this_style_and_this_script_only():
    text = build_page(ane.lint(programs.vocoder()))
    parts = [re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1] for tag in ("style", "script")]
    digests = [f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts]
    assert policy_of(text) == (
        f"default-src 'none'; script-src {digests[1]}; style-src {digests[0]}; base-uri 'none'; form-action 'none'"
    )


def test_the_data_are_those_of_the_report():
    report = ane.lint(programs.vocoder(), target="m4")
    data = data_of(build_page(report))
    (one,) = data["reports"]
    texts = data["texts"]
    assert [texts[place] for place in one["ops"]["type"]] == [row.op.op_type for row in report.plan.rows]
    assert one["ops"]["mil"] == [report.mil(row) for row in report.plan.rows]
    assert one["ops"]["on_ane"] == [int(row.backend == "ane") for row in report.plan.rows]
    listed = [*report.findings, *report.near_misses]
    assert [(one["rules"][item["rule"]]["code"], texts[item["reason"]], item["row"]) for item in one["findings"]] == [
        (item.rule.code, item.reason, item.index) for item in listed
    ]
    assert {rule["code"]: rule["evidence"] for rule in one["rules"]} == {
        item.rule.code: [source.to_dict() for source in item.rule.evidence] for item in listed
    }
    assert one["summary"].keys() == report.summary().keys()
    assert data["changes"] is None


@pytest.mark.parametrize(("make", "said"), [
    (programs.vocoder, "1 cumsum and 1 gather are unsupported and keep all 6 ops on the CPU."),
    (lambda: build_program(lambda x: mb.relu(x=x, name="y"), x=(1, 8, 1, 64)), ""),
    (lambda: build_program(lambda x: mb.cumsum(x=x, axis=1, name="y"), x=(1, 8, 1, 64)), "Unsupported: 1 cumsum."),
])
def test_the_cause_is_said_in_a_sentence(make, said):
    report = ane.lint(make(), target="m4")
    text = build_page(report)
    assert data_of(text)["reports"][0]["cause"] == said
    assert said in html.unescape(re.search(r"<noscript>(.*?)</noscript>", text, re.S)[1])


def test_the_cause_counts_integers_as_one_kind_and_names_three():
    def body(x):
        first = mb.cast(x=x, dtype="int32")
        values = [mb.cast(x=each, dtype="fp16") for each in (
            mb.add(x=first, y=np.int32(1)), mb.cast(x=mb.cumsum(x=x, axis=1), dtype="int32"))]
        return mb.add(x=mb.add(x=values[0], y=mb.cumsum(x=values[1], axis=1)),
                      y=mb.reverse(x=x, axes=[1]), name="y")

    report = ane.lint(build_program(body, x=(1, 8, 1, 64)), target="m4")
    assert "int32 ops" in data_of(build_page(report))["reports"][0]["cause"]


def test_the_cause_counts_ops_in_fp32_as_one_kind():
    one, = data_of(text := build_page(ane.lint(programs.long_names(), target="m4")))["reports"]
    assert one["cause"] == "Unsupported: 2 fp32 ops."
    kinds = [data_of(text)["texts"][place] if place >= 0 else "" for place in one["ops"]["blocker"]]
    assert kinds == ["fp32 op"] * 2 + [""] * 121


def test_what_a_mac_said_is_there_for_each_op():
    said = programs.said_by_a_mac(ane.lint(programs.vocoder(), target="m4"))
    report = ane.lint(programs.vocoder(), target="m4", measured=said)
    told = data_of(build_page(report))["reports"][0]["measured"]
    kinds = [row.op.op_type for row in report.plan.rows]
    cumsum = kinds.index("cumsum")
    assert told["where"] == "M4, macOS 26.1" and [row for row, *_ in told["ops"]] == list(range(len(kinds)))
    assert told["ops"][cumsum][1:3] == ["ane", True] and cumsum in told["differ"]
    assert data_of(build_page(ane.lint(programs.vocoder())))["reports"][0]["measured"] is None


def test_edges_are_what_ops_read():
    data = data_of(build_page(ane.lint(programs.vocoder())))
    ops, texts = data["reports"][0]["ops"], data["texts"]
    names = [texts[place] for place in ops["output"]]
    reads = {name: [names[maker] for maker in makers] for name, makers in zip(names, ops["reads"])}
    assert reads["grow"] == ["bend"] and reads["wave"] == ["phase"]
    assert all(maker < row for row, makers in enumerate(ops["reads"]) for maker in makers)


def test_ops_of_inner_blocks_know_what_they_are_inside_of():
    data = data_of(build_page(ane.lint(programs.nested())))
    ops, texts = data["reports"][0]["ops"], data["texts"]
    kinds = [texts[place] for place in ops["type"]]
    assert [kinds[outer] for outer, depth in zip(ops["inside"], ops["depth"]) if depth] == ["cond"] * 2
    assert all("\n" not in text for text in ops["mil"])


def test_functions_have_their_rows_and_segments():
    report = ane.lint(programs.two_functions())
    encode, decode = data_of(build_page(report))["reports"][0]["functions"]
    assert (encode["name"], encode["first"], encode["count"]) == ("encode", 0, 2)
    assert (decode["name"], decode["first"], decode["count"]) == ("decode", 2, 2)
    assert decode["segments"][0][0] == 2 and decode["segments"][-1][1] == 3


def test_the_commands_are_those_of_the_text():
    report = ane.lint("fixtures/conv_transpose_1d.mlpackage", target="m4")
    text = build_page(report)
    one, = data_of(text)["reports"]
    assert one["step"]["command"] == report.next_step.command
    plain = html.unescape(re.search("<noscript>(.*?)</noscript>", text, re.S)[1])
    assert f"Next step: {report.next_step.command}." in plain
    (command,) = one["fixes"][one["findings"][0]["fix"]]["commands"]
    how = one["fixes"][one["findings"][0]["fix"]]["how"]
    assert how == "same bits; in preset safe" and f"fix: {command} ({how})" in str(report)
    assert report.findings[one["costliest"]] is find_costliest(report.findings, report.plan)


def test_each_finding_has_its_own_fix():
    report = ane.lint(programs.vocoder(), target="m4")
    one, = data_of(build_page(report))["reports"]
    for item, encoded in zip(report.findings, one["findings"]):
        fix = item.fix or {"pass": None, "advice": None}
        found = {"pass": None, "advice": None} if encoded["fix"] < 0 else one["fixes"][encoded["fix"]]
        assert (found["pass"], found["advice"]) == (fix["pass"], fix["advice"])


def test_the_costliest_finding_is_that_with_most_time_on_the_cpu():
    report = ane.lint(programs.vocoder(), target="m4")
    found = find_costliest(report.findings, report.plan)
    groups = [each for each in group_findings(report.findings, report.plan) if each.severity.fails]
    assert found in max(groups, key=lambda each: each.cpu_ms).findings
    assert find_costliest(ane.lint(programs.two_functions()).findings, report.plan) is None


def test_names_of_a_foreign_package_are_no_markup():
    report = ane.lint(programs.hostile())
    report.model = f"/models/{programs.HOSTILE}.mlpackage"
    text = build_page(report)
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text
    assert text.encode("utf-8")
    assert "\u2028" not in re.search(r'id="data">(.*?)<', text)[1]
    assert programs.SHOWN in data_of(text)["texts"]


def test_a_text_without_end_is_cut():
    report = ane.lint(programs.hostile())
    report.plan.rows[0].op.outputs[0].name = "x" * 100_000
    assert len(build_page(report)) - len(build_page(ane.lint(programs.hostile()))) < 20_000


def test_changes_are_what_went_and_came():
    before, after = rewritten()
    found = find_changes(before, after)
    names = [{row.op.outputs[0].name: place for place, row in enumerate(one.plan.rows)} for one in (before, after)]
    assert before.plan.rows[found["gone"][0]].op.op_type in ("conv", "conv_transpose")
    assert {after.plan.rows[place].op.op_type for place in found["new"]} >= {"expand_dims", "add"}
    assert names[0]["rows"] not in found["gone"] and names[1]["rows"] not in found["new"]
    kept = {item.key for item in after.findings}
    assert {before.findings[place].key for place in found["fixed"]} == {item.key for item in before.findings} - kept
    assert find_changes(before, before) == {"gone": [], "new": [], "moved": [], "fixed": [], "found": []}


def test_equal_keys_are_paired_one_by_one():
    from mil_ane_passes.report.html.changes import _match_keys

    assert _match_keys(["a", "a", "b"], ["a", "b", "b"]) == ([(0, 0), (2, 1)], [1], [2])


def test_numbers_that_json_has_no_word_for_become_null():
    from mil_ane_passes.report.html.payload import _round_number

    assert [_round_number(value) for value in (float("inf"), float("nan"), 0.123456789, 7, None)] == [
        None,
        None,
        0.123457,
        7,
        None,
    ]


@pytest.mark.parametrize("make", [programs.empty, programs.nested, programs.two_functions])
def test_any_program_makes_a_page(make):
    assert data_of(build_page(ane.lint(make())))["schema"] == 1


def test_the_parts_of_the_script_are_all_there():
    from importlib.resources import files

    there = {file.name for file in files("mil_ane_passes.report.html").joinpath("app").iterdir()}
    assert there == {f"{name}.js" for name in SCRIPTS}
