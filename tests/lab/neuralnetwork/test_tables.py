"""The lab of the older format: its records hold what is claimed, and a sample of coremltools' own tests passes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.lab.records import read_record

from . import tables
from .__main__ import RECORD, ROOT, compute_share
from .explained import EXPLAINED, PLACED_WORSE, find_explanation


def test_coremltools_own_tests_of_the_format_pass():
    record = read_record(RECORD)
    assert compute_share(record["files"]) >= 97
    assert not [why for _, why in record["failures"] if why.startswith("UNEXPLAINED")]
    assert sum(each["reached"] for each in record["files"].values()) >= 250


def test_every_explanation_is_needed():
    failed = [case for case, _ in read_record(RECORD)["failures"]]
    for pattern, reason in EXPLAINED.items():
        assert len(reason) > 40
        assert "KMeans" in pattern or any(find_explanation(f"neural_network/{case}") == reason for case in failed)


def test_sixty_architectures_are_right():
    rows = [row for row in read_record(tables.ARCHITECTURES) if not row["refused"]]
    assert len(rows) >= 60 and all(map(tables.is_right, rows))
    assert not [row["name"] for row in read_record(tables.ARCHITECTURES) if row["by"] == "upgrade"]


def test_each_is_placed_as_well_as_the_direct_conversion_or_explained():
    rows = [row for row in read_record(tables.ARCHITECTURES) if not row["refused"]]
    assert {row["name"] for row in rows if not tables.is_placed_as_well(row)} == set(PLACED_WORSE)
    assert sum(map(tables.is_placed_as_well, rows)) >= 60 and all(len(reason) > 40 for reason in PLACED_WORSE.values())
    assert not tables.is_placed_as_well({"upgraded": {"left": {"cast": 1}}, "direct": {"left": {"add": 2}}})


def test_nothing_breaks_the_upgrade():
    record = read_record(tables.FUZZ)
    assert record["failures"] == 0 and record["tries"] >= 500 and min(record["loaded"], record["refused"]) > 100


@pytest.mark.slow  # two processes that import coremltools and its test suite, 19 s
def test_a_sample_of_coremltools_tests_runs_and_goes_on_where_it_was(tmp_path):
    command = [sys.executable, "-m", "tests.lab.neuralnetwork", "--results", str(tmp_path / "results.jsonl"), "--only",
               "test_split_nd_cpu or test_bias_constant"]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and len({line["case"] for line in lines}) == len(lines)
    assert all(line["outcome"] == "passed" and line["reached"] for line in lines)
