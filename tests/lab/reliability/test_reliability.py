"""A few of each trial run with the tests; what was recorded of all of them has no failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import table

MEMORY = Path("/dev/shm")


KILLS = ("kills", "kills_overwrite", "kill_steps", "kill_steps_overwrite")
REFUSALS = ("limit", "limit_overwrite", "refusals", "refusals_overwrite", "small_disk")
TOGETHER = ("processes", "processes_overwrite", "threads")


def measure_figures(tmp_path_factory, names):
    folder = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path_factory.mktemp("reliability")
    command = [sys.executable, "-m", "tests.lab.reliability", "--quick", "--folder", folder, "--only", *names]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.stdout, done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    return measure_figures(tmp_path_factory, REFUSALS + TOGETHER)


@pytest.fixture(scope="module")
def figures_of_kills(tmp_path_factory):
    return measure_figures(tmp_path_factory, KILLS)


@pytest.mark.slow
def test_killed_runs_leave_a_whole_package_or_none(figures_of_kills):
    for name in ("kills", "kill_steps"):
        assert figures_of_kills[name]["tries"] >= 2 and figures_of_kills[name]["failures"] == 0
        assert set(figures_of_kills[name]) & {"old", "broken"} == set()
    steps = figures_of_kills["kill_steps"]
    assert steps["absent"] and steps["left over"], "some are killed in their midst"


@pytest.mark.slow
def test_killed_runs_leave_the_old_package_or_the_new_one(figures_of_kills):
    for name in ("kills_overwrite", "kill_steps_overwrite"):
        assert figures_of_kills[name]["tries"] >= 2 and figures_of_kills[name]["failures"] == 0
        assert set(figures_of_kills[name]) & {"absent", "broken"} == set()
    assert figures_of_kills["kill_steps_overwrite"]["old"] and figures_of_kills["kill_steps_overwrite"]["whole"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_disk_that_refuses_is_an_error_with_nothing_left(figures, name):
    if not figures[name].get("tries"):
        pytest.skip("this user may not mount a disk")
    assert figures[name]["refused"] and figures[name]["failures"] == 0


def test_one_of_several_runs_wins_and_the_others_say_so(figures):
    for name in ("processes", "threads"):
        found = figures[name]
        assert (found["written"], found["refused"], found["failures"]) == (1, 3, 0)
    assert (figures["processes_overwrite"]["written"], figures["processes_overwrite"]["failures"]) == (4, 0)


def test_the_recorded_figures_are_without_failures():
    recorded = table.read_figures()
    assert recorded.pop("run")["command"] == "python -m tests.lab.reliability --record"
    assert {name: figure["failures"] for name, figure in recorded.items() if figure.get("failures", 0)} == {}
    assert recorded["kills"]["tries"] >= 50 and recorded["kills_overwrite"]["tries"] >= 50
    assert recorded["kills"]["left over"] >= 25, "killed in the midst of writing"
    assert recorded["real"]["tries"] >= 30


def test_the_table_has_a_row_for_each_figure():
    rows = table.format_table().splitlines()[2:]
    assert len(rows) >= 9 and all(row.endswith("| 0 |") for row in rows)
