"""A finding names the rewrite that fixes it where that rewrite applies, and the reason where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rewrites, get_all_rules

CUMSUM, FIX = get_all_rules()["cumsum"], find_rewrite("triangle_cumsum")


def summed(*shape):
    return build_program(lambda x: mb.add(x=mb.cumsum(x=x, axis=-1), y=np.float16(1), name="y"), x=shape)


def test_a_problem_and_its_fix_are_one_finding():
    report = ane.lint(summed(2, 5), target="m4")
    (found,) = [item for item in report.findings if item.rule.code == CUMSUM.code]
    assert FIX.code == CUMSUM.code and found.rule is CUMSUM
    assert found.fixed_by == FIX.name and not found.not_fixed_because
    assert found.fix["pass"] == f"ane::{FIX.name}" and found.to_dict()["not_fixed_because"] is None
    assert f"passes='{FIX.name}'" in str(report)


def test_rewrite_reports_the_code_that_lint_reports():
    source = summed(2, 5)
    linted = {item.op: item.rule.code for item in ane.lint(source, target="m4").findings if item.refuses}
    report = ane.rewrite(source, preset="full", target="m4", verify=False)
    fired = [each for trace in report.traces for each in trace.fired if trace.rule == FIX.name]
    assert fired and all(linted[each.op] == each.code for each in fired)


def test_a_pass_that_the_rule_names_itself_is_no_finding_of_its_own(fixtures):
    """fp32 ops are one finding for many ops, which names the pass; it was listed once more for each op."""
    found = ane.lint(fixtures / "nmp.mlpackage", target="m1").findings
    (problem,) = [item for item in found if item.rule.code == "ANE502"]
    assert problem.fixed_by == "fp16_compute" and problem.refuses and len(problem.covers) > 100


def test_a_kernel_that_compiles_slowly_is_not_called_unsupported():
    """An M4 supports 14x14 kernels; the pass that the rule names was listed as the fix of kernels beyond the limit."""
    held = build_program(lambda x: mb.conv(x=x, weight=np.ones((4, 3, 14, 14), np.float16), strides=[4, 4], name="y"),
                         x=(1, 3, 56, 56))
    assert [(item.code, item.fixed_by) for item in ane.lint(held, target="m4").findings if item.fixed_by] == [
        ("ANE512", "split_wide_conv")]
    report = ane.rewrite(held, passes="split_wide_conv", target="m4", verify=False)
    assert [each.code for trace in report.traces for each in trace.fired] == ["ANE512"]


def test_an_op_that_no_rewrite_fixes_has_the_reason():
    report = ane.lint(summed(2, None), target="m4")
    (found,) = [item for item in report.findings if item.rule.code == CUMSUM.code]
    assert found.not_fixed_because.startswith(f"{FIX.name}: ") and found.fix["pass"] is None
    assert found.to_dict()["not_fixed_because"] == found.not_fixed_because
    assert f"  not fixed by {found.not_fixed_because}" in str(report)
    assert f"passes='{FIX.name}'" not in str(report)


def test_the_rewrite_is_asked_when_only_the_finding_is_selected():
    report = ane.lint(summed(2, None), target="m4", select=[CUMSUM.code])
    assert [item.rule.code for item in report.findings] == [CUMSUM.code]
    assert report.findings[0].not_fixed_because and not report.near_misses


def test_a_rewrite_that_is_selected_alone_is_a_finding_under_the_code_of_the_problem():
    report = ane.lint(summed(2, 5), target="m4", select=[FIX.name])
    assert [(item.rule.name, item.rule.code) for item in report.findings] == [(FIX.name, CUMSUM.code)]


def test_a_rule_that_knows_which_of_its_ops_a_rewrite_leaves_alone_is_believed():
    def body(x, at):
        sampled = mb.resample(x=x, coordinates=at, sampling_mode="bilinear", padding_mode="constant",
                              padding_value=np.float16(0), coordinates_mode="normalized_minus_one_to_one",
                              align_corners=True, name="sampled")
        return sampled, mb.pad(x=x, pad=[1, 1], mode="reflect", name="padded")

    found = ane.lint(build_program(body, x=(1, 2, 4, 4), at=(1, 3, 3, 2)), target="m1", select="texture_ops").findings
    said = {item.value: (item.fix["pass"], item.not_fixed_because) for item in found}
    assert said == {"sampled": (None, "sliced_pad: applies to pad only"), "padded": ("ane::sliced_pad", "")}


@pytest.mark.parametrize(("target", "share"), [
    ("m4", 3), pytest.param("m4", 1, marks=pytest.mark.slow), pytest.param("m1", 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [
    name for name, rule in get_all_rewrites().items() if rule.fixes and not rule.interface])
def test_lint_and_rewrite_report_one_code_for_one_kind_of_op(name, target, share):
    """Where lint reports a problem that the rewrite fixes, the rewrite reports it under the same code.

    A third of the examples in the fast run; the slow one has all.
    """
    fix, compared = find_rewrite(name), 0
    for example in [each for each in fix().examples() if each.reason is None][::share]:
        source = example.build()
        report = ane.lint(source, target=target)
        kinds = {row.index: row.op.op_type for row in report.plan.rows}
        problems = [item for item in report.findings if item.rule in fix.fixes]
        linted = {(kinds[index], item.rule.code) for item in problems for index in item.covers}
        passes = {name: {key: str(value).lower() for key, value in example.options.items()}}
        for trace in ane.rewrite(source, passes=passes, target=target, verify=False, max_growth=None).traces:
            for fired in trace.fired:
                codes = {code for kind, code in linted if kind == fired.op}
                assert not codes or fired.code in codes, (example.name, fired, codes)
                compared += bool(codes)
    assert compared or name not in {"triangle_cumsum", "int_casts", "fold_constants", "unroll_lstm"}
