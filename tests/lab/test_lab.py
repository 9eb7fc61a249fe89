"""README.md is what the records say, and the records are of the errors and kinds that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from .__main__ import FUZZ, MUTATION, README, build_readme
from .fuzz_programs.kinds import KINDS
from .mutation.mutants import MUTANTS
from .records import ROOT, read_record, write_record


def test_the_readme_is_made_from_the_records():
    assert README.read_text() == build_readme(), "run python -m tests.lab"


def test_the_mutation_record_is_complete_and_reaches_the_goal():
    record = json.loads(MUTATION.read_text())
    assert [each["name"] for each in record["verdicts"]] == [mutant.name for mutant in MUTANTS], (
        "run python -m tests.lab.mutation --record MUTANT for each new one, then python -m tests.lab")
    outcomes = [each["outcome"] for each in record["verdicts"]]
    assert outcomes.count("caught") == record["caught"] and outcomes.count("missed") == record["missed"]
    assert record["not_tried"] == 0 and record["mutants"] >= 70
    assert record["score"] >= 0.95


def test_the_fuzz_record_is_complete():
    record = json.loads(FUZZ.read_text())
    assert record["programs"] >= 2000 and record["rewritten"] >= 0.5 * record["programs"]
    assert set(record["kinds"]) == set(KINDS)
    for kind in ("crash", "hang", "out of range", "false alarm", "different", "not verified"):
        assert record["failures"][kind] == 0, kind
    assert len(record["failed"]) == sum(record["failures"].values())


def test_records_name_no_path_of_the_machine(tmp_path):
    """Errors quote the file of a rule, below wherever the project lies."""
    found = [str(path) for path in Path(__file__).parent.rglob("*.json") if f"{ROOT}/" in path.read_text() or
             re.search(r"\(/[a-z]+/", path.read_text())]
    assert not found
    record = tmp_path / "record.json"
    write_record(record, {"reason": f"rule x ({ROOT}/mil_ane_passes/x.py:1)"})
    assert read_record(record) == {"reason": "rule x (mil_ane_passes/x.py:1)"}
