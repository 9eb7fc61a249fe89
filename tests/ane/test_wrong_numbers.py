"""Findings of wrong numbers that remain after a rewrite: those of lint, counted without a second prediction."""

import json

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ane.wrong_numbers import find_wrong_numbers, format_wrong_numbers
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.contract import PlanRule
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.passes.severity import Severity
from tests.conversions import save_program

WRONG = {name: rule for name, rule in get_all_rules().items() if rule.get_severity() is Severity.WRONG}


def build_nan_test(with_bias=False):
    """A test for NaN, which no pass fixes; `with_bias`: and a 1-D conv_transpose."""
    def body(x, z=None):
        y = mb.select(cond=mb.not_equal(x=x, y=x), a=np.float16(0), b=x, name="y")
        if z is None:
            return y
        return y, mb.conv_transpose(x=z, weight=make_weight(16, 4, 8), bias=make_weight(4), strides=[4], name="up")

    return build_program(body, x=(2, 8), **({"z": (1, 16, 8)} if with_bias else {}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRONG)
def test_findings_are_those_of_lint(name):
    assert not issubclass(WRONG[name], PlanRule), "a rule on the plan would be skipped"
    found = set()
    for example in WRONG[name]().examples():
        program = example.build()
        for target in ("all", "m1", "m4"):
            listed = find_wrong_numbers(program, target)
            expected = [each for each in ane.lint(program, target=target).findings if each.severity is Severity.WRONG]
            assert sorted((each.code, each.function, each.value, each.fixed_by) for each in listed) == sorted(
                (each.code, each.function, each.value, each.fixed_by) for each in expected)
            found |= {each.rule.name for each in listed}
    assert found or WRONG[name].measures, "an example has the finding, unless it needs values of inputs"


@pytest.mark.parametrize(("codes", "text"), [
    ([], ""), (["ANE319"], "1 finding of wrong numbers (ANE319)"),
    (["ANE319", "ANE310", "ANE319"], "3 findings of wrong numbers (ANE310, ANE319)")])
def test_findings_are_counted_with_their_codes(codes, text):
    assert format_wrong_numbers(codes) == text


@pytest.mark.parametrize("dry", [False, True])
def test_rewrite_states_what_remains(tmp_path, capsys, dry):
    source, made = tmp_path / "m.mlpackage", tmp_path / "made.mlpackage"
    save_program(build_nan_test(with_bias=True), source)
    arguments = ["rewrite", str(source), "-o", str(made), "--target", "m4", *["--dry-run"] * dry]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "ane::lift_conv_transpose_1d" in out
    line, = (line for line in out.splitlines() if line.startswith("on the ANE: "))
    assert line.endswith("; not fixed: 1 finding of wrong numbers (ANE319)")
    if dry:
        return
    assert "This lists" in out.splitlines()[-1] and out.splitlines()[-1].endswith(
        "the findings of wrong numbers, with reasons.")
    assert main([*arguments, "--overwrite", "--format", "json"]) == 0
    found, = json.loads(capsys.readouterr().out)["wrong_numbers"]
    linted, = (each.to_dict() for each in ane.lint(made, target="m4").findings if each.severity is Severity.WRONG)
    own = {"index", "covers"}  # positions of a plan, which is not made again
    assert {key: found[key] for key in linted if key not in own} == {key: linted[key] for key in linted.keys() - own}


def test_a_rewrite_that_matches_nothing_states_what_remains(tmp_path, capsys):
    source = tmp_path / "m.mlpackage"
    save_program(build_nan_test(), source)
    assert main(["rewrite", str(source), "-o", str(tmp_path / "made.mlpackage")]) == 0
    first, done, following, words = capsys.readouterr().out.splitlines()
    assert first == "not fixed: 1 finding of wrong numbers (ANE319)"
    assert done.startswith("nothing to do: no pass matched") and following == f"next: mil-ane-passes lint {source}"
    assert words.startswith("  This lists the findings of wrong numbers, and the ops that are off the ANE, if any")


def test_what_a_pass_fixed_does_not_remain(fixtures):
    report = ane.rewrite(fixtures / "conv_transpose_1d.mlpackage", target="m4")
    assert {each.code for each in find_wrong_numbers(ane.load(fixtures / "conv_transpose_1d.mlpackage").program, "m4")}
    assert report.changed and not report.wrong_numbers and "wrong numbers" not in str(report)
