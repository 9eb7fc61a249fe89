"""What `python -m tests.lab.coverage` makes of a measurement."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.lab.coverage import BAR, missed, runs, summary, under

SOURCE = """\
def sign(number):
    if number > 0:
        return 1
    if number < 0:
        return -1
    for each in range(number):
        print(each)
    return 0

sign(3)
"""


@pytest.fixture
def measured(tmp_path):
    """What coverage's JSON says of a small module, measured as the package is."""
    coverage = pytest.importorskip("coverage", minversion="7.10", reason="coverage is no part of what is installed")
    if sys.gettrace() is not None:
        pytest.skip("the tests are being measured themselves")
    file = tmp_path / "small.py"
    file.write_text(SOURCE)
    cover = coverage.Coverage(data_file=None, branch=True, config_file=False, source=[str(tmp_path)])
    with cover.collect():
        spec = importlib.util.spec_from_file_location("small", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    cover.json_report(outfile=str(tmp_path / "result.json"))
    return json.loads((tmp_path / "result.json").read_text())


def test_what_is_missed_is_told_by_lines_and_branches(measured):
    (row,) = missed(measured["files"])
    assert row.endswith("small.py: 4-8")
    assert summary(measured["totals"]) == "44.44 % of 9 lines, 16.67 % of 6 branches"
    assert under(measured["totals"]) == [
        "44.44 % of lines; expected 95 % or more", "16.67 % of branches; expected 90 % or more"]


def test_a_branch_between_lines_that_ran_is_told_by_its_ends():
    files = {"a.py": {"missing_lines": [], "missing_branches": [[3, 5], [7, -2]]},
             "b.py": {"missing_lines": [4], "missing_branches": [[3, 4], [4, 6]]},
             "c.py": {"missing_lines": [], "missing_branches": []}}
    assert missed(files) == ["a.py: 3->5, 7->exit", "b.py: 4"]


def test_the_bar_is_held_by_lines_and_by_branches_each():
    totals = {"num_statements": 100, "covered_lines": 100, "num_branches": 100, "covered_branches": 89}
    assert under(totals) == [f"89.00 % of branches; expected {BAR['branches']:g} % or more"]
    assert under(totals | {"covered_branches": 90}) == []
    assert under({"num_statements": 0, "covered_lines": 0, "num_branches": 0, "covered_branches": 0}) == [
        "0.00 % of lines; expected 95 % or more"]


def test_lines_that_follow_each_other_are_one_run():
    assert runs([3, 4, 5, 9, 11, 12]) == ["3-5", "9", "11-12"]
    assert runs([]) == []
