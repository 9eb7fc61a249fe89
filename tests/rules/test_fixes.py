"""What a finding names as its fix fixes it, as it is named; what needs no fix is not named."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, mil_list, types

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program, make_weight

pytestmark = pytest.mark.filterwarnings("ignore")


def found(report, name):
    return [item for item in report.findings if item.rule.name == name]


def lint_and_fix(built, name):
    """The findings of a rule before, and after the pass that the first one names."""
    before = found(ane.lint(built), name)
    spec = before[0].fix["pass"].removeprefix("ane::")
    return spec, before, found(ane.lint(ane.rewrite(built, passes=spec).package), name)


@pytest.mark.parametrize("mixed", [False, True])
def test_fp32_is_fixed_also_where_the_rest_is_fp16(mixed):
    def body(x):
        y = Builder.tanh(x=Builder.mul(x=x, y=np.float32(0.5)))
        return Builder.relu(x=Builder.cast(x=y, dtype="fp16"), name="y") if mixed else Builder.relu(x=y, name="y")

    spec, before, after = lint_and_fix(build_program(body, dtype=types.fp32, x=(2, 3)), "fp32_compute_left")
    assert spec == ("fp16_compute{mixed=true}" if mixed else "fp16_compute")
    assert len(before) == 1 and f"ane::{spec} converts them to fp16" in before[0].reason and not after


def test_fp16_in_another_function_does_not_count():
    """The pass judges each function by itself, as the rule does."""
    whole = build_program(lambda x: Builder.tanh(x=x, name="y"), dtype=types.fp32, x=(2, 3))
    whole.add_function("other", build_program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3)).functions["main"])
    spec, before, after = lint_and_fix(whole, "fp32_compute_left")
    assert spec == "fp16_compute" and len(before) == 1 and not after


def test_a_slope_in_fp32_beside_fp16_is_no_fp32_that_was_left():
    report = ane.lint(build_program(lambda x: Builder.leaky_relu(x=x, alpha=np.float32(0.1), name="y"), x=(2, 3)))
    assert not report.findings or not found(report, "fp32_compute_left")
    assert not [item for item in report.near_misses if item.rule.name == "fp16_compute"]


def test_a_long_1d_conv_transpose_names_the_pass_that_lays_it_on_the_height():
    built = build_program(lambda x: Builder.conv_transpose(
        x=x, weight=make_weight(4, 2, 16), bias=np.ones(2, np.float16), strides=[8], name="y"), x=(1, 4, 8))
    spec, before, after = lint_and_fix(built, "conv_kernel_size")
    assert (spec, len(before), after) == ("lift_conv_transpose_1d", 1, [])
    assert f"fix: mil_ane_passes.rewrite(..., passes='{spec}')" in str(ane.lint(built))
    bare = build_program(lambda x: Builder.conv_transpose(x=x, weight=make_weight(4, 2, 16), name="y"), x=(1, 4, 8))
    (item,) = found(ane.lint(bare), "conv_kernel_size")
    assert item.fix["pass"] is None and item.fix["advice"], "the pass leaves one without a bias alone"


def test_classify_is_one_finding():
    def body(x):
        classes = Builder.const(val=mil_list(["a", "b", "c"]))
        return Builder.classify(probabilities=Builder.softmax(x=x), classes=classes)

    report = ane.lint(build_program(body, dtype=types.fp32, x=(3,), opset=ct.target.iOS15))
    found = [item.rule.name for item in report.findings if item.op == "classify" and item.refuses]
    assert found == ["classifier_label"]


def test_a_loop_weighs_with_what_stands_in_it():
    def body(x):
        return Builder.while_loop(
            _cond=lambda i, y: Builder.less(x=i, y=np.float16(3)),
            _body=lambda i, y: (Builder.add(x=i, y=np.float16(1)), Builder.cumsum(x=y, axis=0)),
            loop_vars=(np.float16(0), x))[1]

    report = ane.lint(build_program(body, x=(64, 512)))
    refused = list(dict.fromkeys(item.rule.name for item in report.findings if item.refuses))
    assert refused[:2] == ["control_flow", "cumsum"]
