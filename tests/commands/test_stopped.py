"""The command told to stop, wherever it is: one line, the exit code of the signal, and nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.signals import hears_signals
from tests.without_torch import hide_torch

ROOT = Path(__file__).parents[2]

# The signal comes from the process itself: when a module is imported first, or something is done to a file.
RUN = """
import os, sys
where, number = sys.argv[1:3]
sys.argv = sys.orig_argv = ["mil-ane-passes", *sys.argv[3:]]
done = []

def stop():
    if not done:
        done.append(True)
        os.kill(os.getpid(), int(number))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            stop()

def audit(event, args):
    if args and f"{event} {args[0]}".startswith(where.split("*")[0]) and str(args[0]).endswith(where.split("*")[-1]):
        stop()

sys.meta_path.insert(0, Finder())
if "*" in where:
    sys.addaudithook(audit)
from mil_ane_passes.commands.main import main
sys.exit(main())
"""


@pytest.fixture
def source(tmp_path):
    made = Path(shutil.copytree(ROOT / "fixtures" / "nothing_to_do.mlpackage", tmp_path / "in.mlpackage"))
    (made / "Data" / "large.bin").write_bytes(b"l" * (9 << 20))
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("tempfile", signal.SIGTERM),  # while the command is imported
        ("os.scandir *in.mlpackage", signal.SIGINT),  # before the copy ahead
        ("coremltools", signal.SIGHUP),  # while copying ahead
        ("os.mkdir *.mil-ane-passes/new", signal.SIGTERM),  # while copying the rest
    ],
)
def test_a_signal_ends_the_run_with_nothing_left(source, tmp_path, where, number):
    command = [sys.executable, "-c", RUN, where, str(int(number)), "rewrite", source, "-o", tmp_path / "out.mlpackage",
               "--no-verify", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, preexec_fn=hears_signals,
                          env=hide_torch())
    why = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert (done.stdout, done.stderr) == ("", f"mil-ane-passes: {why}; no partial output was written\n")
    assert done.returncode == 128 + number
    assert os.listdir(tmp_path) == ["in.mlpackage"]


def test_a_signal_that_is_ignored_stays_ignored(source, tmp_path):
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{RUN}",
               "os.mkdir *.mil-ane-passes/new", str(int(signal.SIGHUP)), "rewrite", source, "-o",
               tmp_path / "out.mlpackage", "--no-verify"]
    assert subprocess.run(command, capture_output=True, cwd=ROOT, check=False, env=hide_torch()).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["in.mlpackage", "out.mlpackage"]


IN_A_FINALIZER = """
import os, signal, sys, weakref
from pathlib import Path
from mil_ane_passes.commands.signals import handle_stop_signals
from mil_ane_passes.package.staging import Staging

class Value:
    pass

with handle_stop_signals(), Staging(Path(sys.argv[1])):
    assert list(Path(sys.argv[1]).parent.iterdir())
    value = Value()
    seen = weakref.ref(value, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del value
    print("still running")
"""


def test_a_signal_in_a_finalizer_ends_the_run(tmp_path):
    found = subprocess.run([sys.executable, "-c", IN_A_FINALIZER, str(tmp_path / "out.mlpackage")], cwd=ROOT,
                           capture_output=True, text=True, preexec_fn=hears_signals, env=hide_torch())
    assert (found.returncode, found.stdout) == (128 + signal.SIGTERM, "")
    assert found.stderr.splitlines()[-1] == "mil-ane-passes: stopped by SIGTERM; no partial output was written"
    assert "Traceback" not in found.stderr and not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_printed_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mil_ane_passes", "passes", "--format", "json"], cwd=ROOT,
                              stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=hide_torch())
    assert (done.returncode, done.stderr) == (2, "mil-ane-passes: No space left on device\n")


def test_an_error_that_cannot_be_printed_leaves_its_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "mil_ane_passes", "lint", "none.mlpackage"], cwd=ROOT,
                              stderr=full, check=False, env=hide_torch())
    assert done.returncode == 2
