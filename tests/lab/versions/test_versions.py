"""The matrix of versions counts what pytest did, says why a cell cannot be made, and keeps what it saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cells import CELLS, Cell, Result, named
from .run import Counted, counted, rerun
from .table import as_table, record, recorded, table
from .venvs import ROOT, Refused, interpreter, made, versions, why

_VERSION = "{}.{}".format(*sys.version_info[:2])
_FILE = """
import pytest

@pytest.mark.parametrize("number", range(7))
def test_one(number):
    assert number != 3

@pytest.mark.skip(reason="not here")
def test_two():
    raise AssertionError

@pytest.fixture
def broken():
    yield
    raise OSError("afterwards")

def test_three(broken):
    pass
"""


def _pytest(folder: Path, *options: str) -> Counted:
    (folder / "test_given.py").write_text(_FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", "--junitxml",
               str(folder / "junit.xml"), *options, str(folder / "test_given.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return counted(folder / "junit.xml")


def test_what_pytest_did_is_counted(tmp_path: Path) -> None:
    seen = _pytest(tmp_path)
    assert (seen.passed, seen.skipped, len(seen.failures)) == (6, 1, 2), seen
    assert "test_one[3]" in seen.failures[0] and "test_three" in seen.failures[1]


def test_a_sample_is_one_in_so_many_of_each_file(tmp_path: Path) -> None:
    seen = _pytest(tmp_path, "-p", "tests.lab.versions.sample", "--one-in", "3")
    assert (seen.passed, seen.skipped, len(seen.failures)) == (2, 0, 1), seen


def test_failures_have_the_names_that_pytest_takes(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text("""<testsuites><testsuite>
        <testcase classname="tests.test_import" name="test_a[x.y-1]"><failure message="no"/></testcase>
        <testcase classname="tests.test_import.TestB" name="test_c"><error message="no"/></testcase>
        <testcase classname="" name="tests.passes.test_gone"><error message="cannot be imported"/></testcase>
        <testcase classname="tests.test_import" name="test_d"/>
        </testsuite></testsuites>""")
    assert counted(file) == Counted(1, 0, ["tests/test_import.py::test_a[x.y-1]",
                                           "tests/test_import.py::TestB::test_c", "tests/passes/test_gone.py"])


@pytest.mark.slow
def test_what_failed_runs_once_more() -> None:
    before = Result("py310", "3.10.1", passed=5, failed=3,
                    failures=["tests/lab/versions/test_versions.py::test_a_cell_is_known_by_its_name",
                              "tests/lab/versions/test_versions.py::test_renamed[since]",
                              "tests/test_removed.py::test_a"])
    after = rerun(before, Path(sys.executable))
    assert (after.passed, after.failed, after.failures) == (6, 0, [])
    assert rerun(after, Path("nowhere")) == after


def test_a_cell_is_known_by_its_name() -> None:
    assert named(None) == CELLS and [cell.name for cell in named(["py312", "py310"])] == ["py312", "py310"]
    with pytest.raises(ValueError, match="no cell 'py27'; expected some of py310, "):
        named(["py27"])
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_interpreters_are_those_given_or_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Path(sys.executable)
    assert interpreter(_VERSION, [here]) == here
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=r"no python3\.1 was found; give one with --python"):
        interpreter("3.1", [here])
    found = tmp_path / "python3.1"
    found.write_text("#!/bin/sh\n")
    found.chmod(0o755)
    assert interpreter("3.1", [here]) == found


def test_a_cell_that_cannot_be_installed_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 3.1\necho 'WARNING: old' >&2\necho 'ERROR: No  matching distribution' >&2\n"
                      "echo 'a hint' >&2\n[ $1 = -c ]\n")
    broken.chmod(0o755)
    with pytest.raises(Refused, match=r"^No matching distribution$"):
        made(Cell("any", "3.1", ()), [broken], tmp_path / "venvs")
    assert why("Traceback\n  ValueError: bad\n") == "ValueError: bad" and why("") == ""


def test_versions_are_those_that_are_installed() -> None:
    import coremltools
    import numpy

    found = versions(Path(sys.executable))
    assert found["numpy"] == numpy.__version__ and found["coremltools"] == coremltools.__version__
    assert found["python"].startswith(_VERSION)


def test_results_take_the_place_of_those_of_the_same_cell(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    later = Result("py312", "3.12.1", refused="No matching distribution")
    record([later, Result("py310", "3.10.1", "1.26.4", "9.0", "2.13.0", 1, 2, 3, 4.4, 20)], file)
    record([Result("py310", "3.10.1", "1.26.4", "9.0", "2.13.0", 1234, 0, 3, 4.4)], file)
    assert [each.cell for each in recorded(file)] == ["py310", "py312"]
    assert as_table(recorded(file)).splitlines()[2:] == [
        "| 3.10.1 | 1.26.4 | 9.0 | 2.13.0 | all | 1,234 | 0 | 3 | 4 |",
        "| 3.12.1 |  |  |  | none |  |  |  | No matching distribution |"]
    record([Result("py310", "3.10.1", "1.26.4", "9.0", "2.13.0", 60, 0, 0, 1.0, 20)], file)
    assert "| 1 in 20 | 60 |" in as_table(recorded(file))


def test_every_recorded_cell_is_in_the_table() -> None:
    rows = recorded()
    assert table().count("\n") == 1 + len(rows)
    assert all(row.refused or (row.passed and row.failed == len(row.failures) and row.commit) for row in rows)


@pytest.mark.parametrize("arguments, said", [(["--cells", "py27"], "there is no cell 'py27'"),
                                             (["--one-in", "0"], "found 0, expected 1 or more")])
def test_what_cannot_be_asked_is_refused(arguments: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.lab.versions", *arguments], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2 and said in done.stderr


def test_a_cell_without_its_interpreter_is_a_row_that_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.lab.versions", "--cells", "py310", "--venvs", str(tmp_path)],
                          cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "| 3.10 |  |  |  | none |  |  |  | no python3.10 was found; give one with --python |" in done.stdout


def test_what_an_older_coremltools_does_not_take_by_itself_is_told_from_what_our_frontend_breaks(monkeypatch):
    from tests.lab.versions import needs

    def raised(message, file="elsewhere.py"):
        try:
            exec(compile(f"raise ValueError({message!r})", file, "exec"))
        except ValueError as error:
            return error

    refusal = "Unsupported fx node _assert_tensor_metadata, kind _assert_tensor_metadata"
    monkeypatch.setattr(needs, "older_than", lambda version: True)
    assert needs.unable(raised(refusal)).endswith("Unsupported fx node _assert_tensor_metadata")
    assert needs.unable(raised("another fault")) is None
    assert needs.unable(raised(refusal, "mil_ane_passes/torch_frontend/convert.py")) is None
    monkeypatch.setattr(needs, "older_than", lambda version: False)
    assert needs.unable(raised(refusal)) is None
