"""A finding names the rewrite that mends it where that rewrite would, and says why where it would not."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.core.examples import program
from mil_ane_passes.core.registry import all_rules, by_name

CUMSUM, CURE = all_rules()["cumsum"], by_name("triangle_cumsum")


def summed(*shape):
    return program(lambda x: mb.add(x=mb.cumsum(x=x, axis=-1), y=np.float16(1), name="y"), x=shape)


def test_what_is_mended_is_one_finding_with_its_pass():
    report = ane.lint(summed(2, 5), target="m4")
    codes = [item.rule.code for item in report.findings]
    assert CUMSUM.code in codes and CURE.code not in codes
    (found,) = [item for item in report.findings if item.rule.code == CUMSUM.code]
    assert found.mended_by == CURE.name and not found.unmended
    assert found.fix["pass"] == f"ane::{CURE.name}" and found.to_dict()["unmended"] is None
    assert f"passes='{CURE.name}'" in str(report)


def test_what_is_left_alone_has_the_reason():
    report = ane.lint(summed(2, None), target="m4")
    (found,) = [item for item in report.findings if item.rule.code == CUMSUM.code]
    assert found.unmended.startswith(f"{CURE.name}: ") and found.fix["pass"] is None
    assert found.to_dict()["unmended"] == found.unmended
    assert f"  not by {found.unmended}" in str(report)
    assert f"passes='{CURE.name}'" not in str(report)


def test_the_rewrite_is_asked_when_only_the_finding_is_selected():
    report = ane.lint(summed(2, None), target="m4", select=[CUMSUM.code])
    assert [item.rule.code for item in report.findings] == [CUMSUM.code]
    assert report.findings[0].unmended and not report.near_misses


def test_a_rewrite_that_mends_nothing_else_is_a_finding_of_its_own():
    report = ane.lint(summed(2, 5), target="m4", select=[CURE.code])
    assert [item.rule.code for item in report.findings] == [CURE.code]


def test_a_rule_that_knows_which_of_its_ops_a_rewrite_leaves_alone_is_believed():
    def body(x, at):
        sampled = mb.resample(x=x, coordinates=at, sampling_mode="bilinear", padding_mode="constant",
                              padding_value=np.float16(0), coordinates_mode="normalized_minus_one_to_one",
                              align_corners=True, name="sampled")
        return sampled, mb.pad(x=x, pad=[1, 1], mode="reflect", name="padded")

    found = ane.lint(program(body, x=(1, 2, 4, 4), at=(1, 3, 3, 2)), target="m1", select="texture_ops").findings
    said = {item.value: (item.fix["pass"], item.unmended) for item in found}
    assert said == {"sampled": (None, "sliced_pad: it is for reflecting pads"), "padded": ("ane::sliced_pad", "")}
