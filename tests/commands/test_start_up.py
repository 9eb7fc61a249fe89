"""What is answered without waiting for the import of coremltools."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest

from mil_ane_passes.commands.explain import TOPICS, Topic
from mil_ane_passes.commands.pages import PAGES_FILE, describe_environment
from tests.readme.walk import environment

CASES = {
    "settings": (["config"], 0), "topics": (["explain"], 0), "a topic": (["explain", "prediction"], 0),
    "a rule": (["explain", "ANE202"], 0), "a pass": (["explain", "ane::lift_conv_transpose_1d"], 0),
    "a rule about layers": (["explain", "NN101", "--format", "json"], 0), "passes": (["passes"], 0),
    "an unknown rule": (["explain", "cumsun"], 2), "a patch": (["explain", "TORCH117"], 0),
    "an unknown patch": (["explain", "TORCH199"], 2), "patches": (["patches", "--format", "json"], 0),
    "help": (["lint", "--help"], 0), "a wrong option of lint": (["lint", "x.mlpackage", "--wrong"], 2),
    "a wrong option of rewrite": (["rewrite", "x.mlpackage", "--wrong"], 2),
    "a wrong command": (["lin"], 2),
    "a wrong severity": (["lint", "nmp.mlpackage", "--fail-on", "x"], 2),
    "a wrong target of lint": (["lint", "nmp.mlpackage", "--target", "mm4"], 2),
    "a missing package": (["lint", "nmpp.mlpackage"], 2), "a missing file": (["lint", "nmp.mlmodel"], 2),
    "one of several": (["lint", "nmp.mlpackage", "--target", "m1,mm4"], 2),
    **{f"a missing package of {words.split()[0]}": (words.split(), 2) for words in (
        "rewrite nmpp.mlpackage out.mlpackage", "run nmpp.mlpackage --feeds conv_transpose_1d.npz --trace",
        "verify nmpp.mlpackage nmp.mlpackage", "edit nmpp.mlpackage -o out.mlpackage --rename a=b",
        "adapt nmpp.mlpackage -o out", "upgrade nmp.mlmodel -o out.mlpackage", "calibrate nmpp.mlpackage",
        "mac-script out nmpp.mlpackage")},
    "a second package that is missing": (["verify", "nmp.mlpackage", "nmpp.mlpackage"], 2),
    "what is no package": (["rewrite", "README.md", "--dry-run"], 2), "a file to lint": (["lint", "README.md"], 2),
    "a missing program": (["lint", "executorch/mixxed.pte"], 2),
    "a delegate of a missing program": (["calibrate", "mixed.pte/forward/0"], 2),
    "a missing plan": (["calibrate-plan", "result.json"], 2),
    "a missing measurement": (["lint", "nmp.mlpackage", "--measured", "result.json"], 2),
    "a missing baseline": (["lint", "nmp.mlpackage", "--baseline", "lint.json"], 2),
    "missing evidence": (["verify", "--replay", "check.json"], 2),
    "a missing package beside a module": (["verify", "nmpp.mlpackage", "--torch", "torch:nn.ReLU"], 2),
    "a wrong target of rewrite": (["rewrite", "nmp.mlpackage", "--dry-run", "--target", "mm4"], 2),
}


def are_patches_probed():
    """Whether the stored pages say what patches are needed with the installed versions."""
    return json.loads(PAGES_FILE.read_text())["probed with"] == describe_environment()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("words,code", CASES.values(), ids=CASES)
def test_coremltools_is_not_imported(words, code, fixtures):
    if ("patches" in words or words[-1].startswith("TORCH")) and not are_patches_probed():
        pytest.skip("patches are probed with these versions of Python and packages")
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "mil_ane_passes", *words], capture_output=True,
                          text=True, check=False, cwd=fixtures, env=environment())
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert done.returncode == code and "mil_ane_passes.commands.main" in modules, done.stderr[-500:]
    assert not {"coremltools", "torch"} & modules
    # Feeds, and the modules of all commands, which are imported for a wrong one, need numpy.
    assert "numpy" not in modules or words[0] in ("lin", "run", "verify", "edit", "adapt")


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_is_the_docstring_of_its_module(name):
    assert Topic(name).text == inspect.getdoc(import_module(f"mil_ane_passes.{TOPICS[name]}"))


@pytest.mark.slow
def test_a_folder_named_as_a_package_is_no_package(fixtures, tmp_path):
    """`python -m` imports from the working folder, too, where coremltools took a clone for an installed ExecuTorch."""
    (tmp_path / "executorch").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "mil_ane_passes", "verify", str(fixtures / "conv_transpose_1d.mlpackage"), "--torch",
         "torch.nn:ReLU"], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment())
    assert "executorch" not in done.stderr and "internal error" not in done.stderr, done.stderr[-500:]
