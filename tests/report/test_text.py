"""What a person reads: the verdict first, causes worst first, what fixes them, near misses last."""

from __future__ import annotations

import re

import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.contract import Community, Measured, Severity
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.report.baseline import Baseline
from mil_ane_passes.report.lint_groups import group_findings
from mil_ane_passes.report.lint_text import format_headline, format_lint_text

from .made import MESSAGE, RULES, NoRelu, PerhapsExp, Remark, WrongTanh, chain, empty, report, two_functions

ALL = ("square", "sigmoid", "tanh", "exp", "relu")


def order_in(words, lines):
    places = [next(number for number, line in enumerate(lines) if word in line) for word in words]
    return places == sorted(places)


def test_the_verdict_comes_first_and_says_that_it_is_predicted():
    made = report(chain("relu", "tanh"))
    first, *_, last = str(made).splitlines()
    assert first == format_headline(made) and last.startswith("predicted, nothing was run")
    assert re.fullmatch(r"a program in memory on m4: \d of 2 ops \([\d.]+ %\) and [\d.]+ % of the segmenter's estimate "
                        r"predicted on the ANE; \d partitions?, \d transitions?; estimate of Core ML's segmenter "
                        r"\(decides placement\): .* ms; 1 unsupported op", first)


@pytest.mark.parametrize("target, wanted", [
    ("m4", r"latency on m4: [\d.]+ ms \([\d.]+ to [\d.]+ ms\); .*: \d+ % of the time; \d+ % of it extrapolated, "
           "not covered by measurements of m4"),
    ("a17", r"latency on a17: .*; extrapolated: no measurement of a17, so m3 is used, with a wider range"),
    ("all", r"latency: [\d.]+ to [\d.]+ ms over the measured chips m1 to m6, [\d.]+ ms on m\d, the median; "
            r".* % of the time"),
    ("a13", r"latency: .* over the measured chips m1 to m6, .*; a13: no measurement of this chip or a related one"),
])
def test_the_latency_has_a_line_of_its_own(target, wanted):
    program = build_program(lambda x: mb.softmax(x=x, axis=1), x=(1, 512, 64, 64))
    headline, second, *_ = str(ane.lint(program, target=target)).splitlines()
    assert re.fullmatch(wanted, second) and "latency" not in headline


def test_a_program_without_ops_has_no_latency_line():
    assert "latency" not in str(ane.lint(build_program(lambda x: x, x=(2, 3)))).splitlines()[1]


def test_causes_are_grouped_and_the_worst_comes_first():
    lines = str(report(chain(*ALL))).splitlines()
    assert order_in(["ANE391 ", "ANE292 ", "ANE591 ", "suggestions", "ANE191 ", "predicted, "], lines)
    assert order_in(["ANE391 ", "ANE216 "], lines)


def test_what_costs_more_on_the_cpu_comes_first():
    few, many = chain("relu", "exp", "exp", "exp"), chain("relu", "relu", "relu", "exp")
    for made, first in ((few, "ANE292"), (many, "ANE216")):
        found = report(made, (NoRelu, PerhapsExp))
        assert group_findings(found.findings, found.plan)[0].rule.code == first == found.findings[0].rule.code


def test_a_group_has_all_that_one_needs():
    block = str(report(chain("relu"), (NoRelu,))).split("\n\n")[1].splitlines()
    assert block[0].startswith("ANE216 no-relu  unsupported: 1 op, ") and block[0].endswith(" ms on the CPU")
    assert block[1:] == [
        "  relu is unsupported on the ANE.", "  %relu_0 (relu): relu of rank 2", f"  Core ML says: {MESSAGE}",
        "  fix: Use a tanh.",
        "  confidence high; measured: seen refused (M4, macOS 27, 2026) <a list of ops>"]


def test_ops_that_go_along_are_counted():
    found = report(chain("tanh", "relu", "tanh"), (NoRelu,))
    (group,) = group_findings(found.findings, found.plan)
    assert (group.ops, group.stranded) == (1, sum(row.takes and row.backend == "cpu" for row in found.plan.rows))
    assert f"{group.stranded} supported ops stranded with it" in str(found)


def test_an_unsure_refusal_says_so():
    assert "ANE292 perhaps-exp  possibly unsupported: 1 op, " in str(report(chain("exp"), (PerhapsExp,)))


def test_one_reason_is_said_once_and_places_are_limited():
    made = report(chain(*["relu"] * 11), (NoRelu,))
    (line,) = [line for line in format_lint_text(made).splitlines() if "relu of rank 2" in line]
    assert line.endswith("%relu_2 (relu) and 8 more") and line.startswith("  relu of rank 2: %relu_0 (relu), ")
    assert format_lint_text(made, everything=True).count("%relu_") == 11


def test_different_reasons_are_lines_of_their_own_and_limited():
    made = report(chain(*["tanh"] * 10), (WrongTanh,))
    assert format_lint_text(made).count("is wrong") == 9  # 8 places and the evidence
    assert "... and 2 more (--all shows them)" in format_lint_text(made)
    assert format_lint_text(made, everything=True).count("is wrong") == 11


def test_near_misses_come_after_the_findings():
    lines = str(report(chain("tanh", "relu", shape=(2, 3, 4)))).splitlines()
    assert order_in(["ANE216", "near misses:", "  ANE391 wrong-tanh  rank 3, not 2: %tanh_0", "predicted, "],
                    lines)


def test_a_model_without_findings_is_short():
    lines = str(report(chain("square"), ())).splitlines()
    assert lines[1].startswith("latency on m4: ") and lines[2] == "no findings" and len(lines) <= 5


def unmeasured(*kinds, target):
    made = report(chain(*kinds), (get_all_rules()["unmeasured_ops"],), target=target)
    assert all(item.severity is Severity.SUGGESTION for item in made.findings)
    return str(made).splitlines()


def test_kinds_that_nobody_measured_are_a_note():
    lines = unmeasured("atanh", "atanh", target="m1")
    assert lines[0].endswith("; 2 unmeasured ops")
    at = lines.index("ANE299 unmeasured-op  suggestion: 2 unmeasured ops")
    assert lines[at + 1] == (
        "  %atanh_0 (atanh, 2 ops): atanh: not measured on M1, and not observed on any ANE")


def test_all_targets_are_named_by_their_ends():
    assert " on every generation, A12 to M" in str(report(chain("relu"), (), target="all"))


def test_functions_have_lines_of_their_own():
    lines = str(report(two_functions())).splitlines()
    assert lines[1].startswith("  main: 1 op, ") and lines[2].startswith("  other: 2 ops, ")
    assert any("main:%main_relu (relu), other:%other_relu (relu)" in line for line in lines)


def test_a_program_that_computes_nothing():
    made = report(empty())
    assert str(made).splitlines()[:2] == ["a program in memory: 0 ops", "no findings"]
    assert made.share == 100.0 and made.to_dict()["summary"]["transitions"] == 0


def test_a_share_is_rounded_down():
    made = report(chain(*["tanh"] * 2000), ())
    for row in made.plan.rows[1:]:
        row.backend = "ane"
    made.plan.rows[0].backend = "cpu"
    assert "(99.9 %)" in format_headline(made)


def test_with_a_baseline_the_new_ones_are_shown():
    old, new = report(chain("relu"), (NoRelu,)), report(chain("relu", "relu"), (NoRelu,))
    from collections import Counter

    new.baseline = Baseline("old.json", "m1", Counter([item.key for item in old.findings])).compare(new.findings)
    shown = format_lint_text(new)
    assert "compared with old.json: 1 new, 1 known, 0 gone" in shown
    assert "the baseline is for target m1, this report for m4" in shown
    assert "%relu_1" in shown and "%relu_0" not in shown and "%relu_0" in format_lint_text(new, everything=True)


def test_after_is_set_beside():
    made = report(chain("relu", "tanh"))
    made.after = report(chain("sigmoid"))
    lines = str(made).splitlines()
    assert lines[2].startswith("after: a program in memory on m4: 0 of 1 op ")
    assert lines[3].startswith("after: latency on m4: ")
    assert lines[4] == "findings that fail a gate: 2 before, 0 after"
    assert made.to_dict()["after"] == made.after.to_dict()


@pytest.mark.parametrize("rule", RULES)
def test_every_kind_of_finding_is_shown(rule):
    kind = rule.roots[0]
    assert rule.code in str(report(chain(kind), (rule,)))


class Elsewhere(NoRelu):
    """relu is unsupported on the ANE."""

    evidence = (Community("one chip", "a note", chip="M1"), Measured("two others", "a table", chip="M4, M6"))


@pytest.mark.parametrize(("target", "says"), [("m4", "two others"), ("m1", "one chip"), ("m2", "one chip")])
def test_the_source_shown_speaks_of_the_chip_that_is_asked_for(target, says):
    """Where none does, it is the first."""
    assert f"  confidence high; {Elsewhere.evidence[says == 'two others']}" in str(
        report(chain("relu"), (Elsewhere,), target=target))


def test_observations_without_core_ml_are_named():
    lines = unmeasured("relu", "tanh", target="m1")
    assert "ANE299 unmeasured-op  suggestion: 2 unmeasured ops" in lines
    (line,) = [line for line in lines if "%relu_0" in line]
    assert line.endswith(
        "relu: seen without Core ML on M1; not measured through Core ML on M1 (predicted: supported)")
    (line,) = [line for line in lines if "%tanh_1" in line]
    assert "; not measured on M1 (predicted: supported)" in line


def test_unmeasured_ops_come_last_and_kinds_are_lines_of_their_own():
    made = report(chain("square", "relu", "tanh", "floor"), (get_all_rules()["unmeasured_ops"], Remark), target="all")
    assert order_in(["ANE591 ", "ANE299 ", "  %square_0", "  %relu_1", "  %tanh_2", "  %floor_3"],
                    [line for line in str(made).splitlines() if "a square" not in line])


class NoteRelu(NoRelu):
    """A relu is noted."""

    refuses, severity = False, Severity.SUGGESTION


def test_a_note_is_told_in_short():
    made = report(chain("relu"), (NoteRelu,))
    assert "A relu is noted." not in str(made) and "confidence" not in str(made)
    assert all(words in format_lint_text(made, everything=True) for words in ("A relu is noted.", "confidence high"))
