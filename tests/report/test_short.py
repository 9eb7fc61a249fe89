"""What an interactive session and a reader meet first: short reprs, and numbers with digits that mean something."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.mac_script import write_mac_script
from mil_ane_passes.equivalence.comparison import OutputDifference
from mil_ane_passes.equivalence.equivalence import VerifyReport
from mil_ane_passes.utils.text_format import format_duration


@pytest.fixture
def source(fixtures, tmp_path):
    return shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage")


def reports(source, folder):
    feeds = {"mel": np.zeros((1, 8, 20), np.float32)}
    yield ane.lint(source), "findings="
    yield ane.lint(source, after=source), "findings="
    yield ane.rewrite(source, folder / "out.mlpackage"), "status='written'"
    yield ane.rewrite(source, dry_run=True, diff=True), "status='dry run'"
    yield ane.verify(source, source), "status='equal'"
    yield ane.calibrate(source, feeds=feeds), "beyond_fp16="
    yield ane.trace(source, feeds), "outputs="
    yield ane.edit(source, folder / "edited.mlpackage", io={"fp32": []}), "status="
    yield ane.batch("lint", [source], folder / "reports"), "packages=1"
    yield write_mac_script(source, folder / "mac", seeds=1), "packages="


def test_the_repr_of_a_report_is_a_line(source, tmp_path):
    for report, fact in reports(source, tmp_path):
        said = repr(report)
        assert said.startswith(f"<{type(report).__name__}: ") and said.endswith(
            "; str() is its text, to_dict() has all>"
        )
        assert fact in said and "\n" not in said and len(said) < 400 + 3 * len(str(tmp_path)), said
        assert str(report) != said


def test_a_long_reason_is_cut():
    assert len(repr(VerifyReport("not verified", reason="x" * 10000))) < 400


@pytest.mark.parametrize(("milliseconds", "text"), [
    (0, "0 ms"), (1e-9, "less than 0.001 ms"), (0.000734, "0.001 ms"), (0.00188, "0.002 ms"), (0.0123, "0.012 ms"),
    (0.517, "0.517 ms"), (1.2345, "1.23 ms"), (99.96, "100 ms"), (12345.6, "12346 ms"), (-0.25, "-0.25 ms")])
def test_durations(milliseconds, text):
    assert format_duration(milliseconds) == text


def test_units_in_the_last_place():
    def words(ulps):
        return str(OutputDifference("y", False, False, absolute=1.0, ulps=ulps, before=1.0, after=2.0))

    assert "3.5 ulp" in words(3.5) and "> 1e6 ulp" in words(7.98e13) and "e+" not in words(7.98e13)
    assert "ulp" not in words(float("nan"))


def test_no_time_in_a_report_has_digits_below_a_microsecond(source, fixtures):
    for path in (source, fixtures / "nmp.mlpackage"):
        text = str(ane.lint(path))
        assert not re.search(r"0\.000\d* ms|\d\.\d{4,} ms", text)
