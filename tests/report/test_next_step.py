"""The recommended step: a command that is predicted to gain, or a plain word that none is."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace

import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands.lint_outlook import SourceOutlook
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.forecast import Forecast
from mil_ane_passes.report.next_step import FixForecast, NextStep, iterate_step_lines
from tests.report import programs
from tests.report.made import chain
from tests.report.made import report as made_report

BEFORE = Forecast(ops=10, unsupported=2, off=2, cost=1.0, transitions=2, on_ane=8, latency_us=100.0)


class Told:
    """An outlook that knows the forecast of each set of passes."""

    def __init__(self, **found):
        self.found, self.asked = found, []

    def forecast(self, passes):
        self.asked.append(tuple(name.removeprefix("ane::") for name in passes))
        return self.found["__".join(self.asked[-1])]

    def forecast_preset(self, preset):
        return self.found.get(preset, "not here")

    def recognize(self):
        return ""


def gaining(**changes):
    return FixForecast(BEFORE, replace(BEFORE, **changes))


def sums(depth=64):
    """A cumsum among convs: a pass fixes it, and gains where the model is large enough."""
    def body(x):
        for number in range(3):
            x = mb.conv(x=x, weight=make_weight(depth, depth, 3, 3), pad_type="same", name=f"conv_{number}")
        return mb.relu(x=mb.cumsum(x=x, axis=1, name="sum"), name="y")

    return build_program(body, x=(1, depth, 32, 32))


def lines_of(report):
    return list(iterate_step_lines(report.next_step))


@pytest.mark.parametrize(("changes", "fault", "gains"), [
    ({"latency_us": 98.0}, "", True), ({"latency_us": 99.5}, "", False), ({"unsupported": 1}, "", True),
    ({"off": 1}, "", True), ({"on_ane": 9}, "", True), ({"on_ane": 9}, "slower", False), ({}, "", False),
    ({"ops": 20, "on_ane": 16}, "", False), ({"unsupported": 0, "latency_us": 102.0}, "", False),
])
def test_a_gain_is_fewer_ops_off_the_ane_or_less_time(changes, fault, gains):
    assert FixForecast(BEFORE, replace(BEFORE, **changes), fault).is_gain is gains


def test_a_command_that_gains_says_by_how_much():
    report = ane.lint(sums(), target="m4")
    report.outlook = Told(triangle_cumsum=gaining(ops=12, on_ane=12, unsupported=0, off=0, latency_us=50.0))
    command, words, predicted = lines_of(report)
    assert command == "next: mil_ane_passes.rewrite(..., passes='triangle_cumsum', target='m4')"
    assert "triangle_cumsum, which fixes findings" in words
    assert predicted == ("  predicted: 8 of 10 -> 12 of 12 ops on the ANE, 2 -> 0 unsupported, "
                         "latency 0.1 ms -> 0.05 ms")
    assert lines_of(report)[0] in str(report)


def test_ops_that_may_be_unsupported_are_counted_apart():
    found = FixForecast(BEFORE, replace(BEFORE, off=1, unsupported=1))
    assert "possibly" not in NextStep("", "", found).outcome
    found = FixForecast(replace(BEFORE, off=5), replace(BEFORE, off=2))
    assert ", 2 -> 2 unsupported, 3 -> 0 possibly unsupported, latency " in NextStep("", "", found).outcome


def test_json_and_sarif_have_it():
    report = ane.lint("fixtures/conv_transpose_1d.mlpackage", target="m4")
    step = report.to_dict()["next_step"]
    assert step["command"] == report.next_step.command and step["reason"] == report.next_step.words
    assert [step["predicted"][side]["ane_unsupported"] for side in ("before", "after")] == [
        report.next_step.found.before.unsupported, report.next_step.found.after.unsupported]
    assert report.to_sarif()["runs"][0]["properties"]["next_step"] == step
    clean = ane.lint(programs.two_functions(), target="m4")
    assert clean.to_dict()["next_step"] is clean.to_sarif()["runs"][0]["properties"]["next_step"] is None


def test_a_fix_that_costs_more_is_not_recommended():
    report = ane.lint(programs.large(100), target="m4")
    words, predicted, why = lines_of(report)
    assert words.startswith("next: No known fix is predicted to gain. Tried: triangle_cumsum. ")
    assert predicted.startswith("  predicted: 97 of 100 -> ") and why == "  the estimated latency grows"
    assert report.next_step.command == "" and "ANE205" not in words  # its advice is the pass that was tried


def test_passes_that_gain_alone_are_chosen_where_all_do_not():
    report = ane.lint(sums(), target="m4")
    item, = (one for one in report.findings if one.fixed_by or one.fix and one.fix["pass"])
    report.findings.append(replace(item, fixed_by="edge_integers"))
    bad = FixForecast(BEFORE, BEFORE, "slower")
    report.outlook = Told(triangle_cumsum__edge_integers=bad, triangle_cumsum=bad, edge_integers=gaining(off=1))
    assert lines_of(report)[0] == "next: mil_ane_passes.rewrite(..., passes='edge_integers', target='m4')"
    assert report.outlook.asked[0] == ("triangle_cumsum", "edge_integers")


def test_a_preset_is_recommended_where_it_gains_and_the_fixes_do_not():
    report = ane.lint(sums(), target="m4")
    report.outlook = Told(triangle_cumsum=gaining(), full=gaining(on_ane=10))
    assert lines_of(report)[0] == "next: mil_ane_passes.rewrite(..., preset='full', target='m4')"


def test_a_preset_that_gains_comes_before_a_fix_of_wrong_numbers_that_does_not():
    report = ane.lint(programs.vocoder(), target="m4")
    report.outlook.forecast_preset = lambda preset: gaining(on_ane=10)
    command, words, _ = lines_of(report)
    assert command == "next: mil_ane_passes.rewrite(..., preset='full', target='m4')" and "not predicted" in words


def test_fixes_of_wrong_numbers_are_recommended_without_a_gain():
    report = ane.lint(programs.vocoder(), target="m4")
    command, words, _ = lines_of(report)
    assert "'lift_conv_transpose_1d'" in command
    assert words.endswith("Fixes of wrong numbers are recommended even if they are not predicted to be faster. "
                          "The other fixes are not predicted to gain.")
    report = ane.lint("fixtures/conv_transpose_1d.mlpackage", target="m4")
    assert "Fixes of wrong numbers are recommended even if they are not predicted to be faster." in lines_of(report)[1]


def test_a_pass_that_measures_is_not_forecast():
    report = ane.lint("fixtures/nmp.mlpackage", target="m4")
    command, _, note = lines_of(report)
    assert command.endswith("--passes fp16_compute,split_wide_conv --target m4 --dry-run")
    assert note == "  no prediction: fp16_compute has to run the model to measure values"


def test_a_large_model_is_not_forecast(monkeypatch):
    monkeypatch.setattr("mil_ane_passes.report.next_step._MAX_TRIED_OPS", 3)
    report = ane.lint(sums(), target="m4")
    report.outlook = Told()
    assert lines_of(report)[2] == "  no prediction: forecasts are limited to models of 3 ops"
    assert report.outlook.asked == [] and "dry_run=True" in lines_of(report)[0]


def test_heavy_weights_are_not_forecast(monkeypatch):
    monkeypatch.setattr("mil_ane_passes.commands.lint_outlook._MAX_WEIGHT_BYTES", 1)
    report = ane.lint("fixtures/conv_transpose_1d.mlpackage", target="m4")
    assert "weights" in lines_of(report)[2]


def test_a_forecast_changes_nothing_and_is_that_of_rewrite():
    report = ane.lint("fixtures/conv_transpose_1d.mlpackage", target="m4")
    before = str(report.plan.program)
    found = report.outlook.forecast(["ane::lift_conv_transpose_1d"])
    assert str(report.plan.program) == before and isinstance(report.outlook, SourceOutlook)
    made = ane.rewrite("fixtures/conv_transpose_1d.mlpackage", passes="lift_conv_transpose_1d", target="m4",
                       verify=False)
    assert (found.before, found.after) == made.predicted


def test_the_printed_command_runs(tmp_path, monkeypatch, capsys):
    source = os.path.abspath("fixtures/conv_transpose_1d.mlpackage")
    monkeypatch.chdir(tmp_path)
    command = shlex.split(ane.lint(source, target="m4").next_step.command)
    assert command[0] == "mil-ane-passes" and main([*command[1:], "--no-verify"]) == 0
    capsys.readouterr()
    left = {item.code for item in ane.lint(str(tmp_path / "OUT.mlpackage"), target="m4").findings}
    assert left.isdisjoint({item.code for item in ane.lint(source, target="m4").warnings})


def test_without_a_fix_the_advice_of_the_worst_finding_stands():
    from tests.report.made import NoRelu

    (line,) = lines_of(made_report(chain("relu"), (NoRelu,)))
    assert line == "next: No pass fixes these findings. ANE216 no-relu: Use a tanh."


def test_nothing_is_recommended_where_nothing_fails():
    assert ane.lint(programs.two_functions(), target="m4").next_step is None


def test_a_baseline_leaves_known_findings_out(tmp_path):
    path = tmp_path / "known.json"
    ane.lint("fixtures/nmp.mlpackage", target="m4").save(path)
    assert ane.lint("fixtures/nmp.mlpackage", target="m4", baseline=path).next_step is None
