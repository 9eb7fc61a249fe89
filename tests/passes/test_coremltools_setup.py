"""The command imports coremltools without what it would import for converters and training."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import _build_parser
from mil_ane_passes.passes import coremltools_setup

IN_A_COMMAND = """
import json, sys
sys.argv = ["mil-ane-passes", *json.loads(sys.argv[1])]
from mil_ane_passes.commands.main import main
code = main()
print(json.dumps([code, [name for name in ("torch", "transformers", "scipy") if name in sys.modules]]), file=sys.stderr)
"""


def run_command(*arguments):
    """Return the exit code of a command, and the optional packages that it has imported."""
    found = subprocess.run([sys.executable, "-c", IN_A_COMMAND, json.dumps(arguments)], capture_output=True, text=True)
    return json.loads(found.stderr.splitlines()[-1])


def test_lint_imports_neither_torch_nor_what_training_needs(fixtures):
    assert run_command("lint", str(fixtures / "conv_transpose_1d.mlpackage")) == [1, []]


@pytest.mark.slow
def test_the_check_imports_torch_itself(fixtures, tmp_path):
    code, found = run_command("rewrite", str(fixtures / "conv_transpose_1d.mlpackage"), "-o",
                              str(tmp_path / "out.mlpackage"))
    assert code == 0 and "torch" in found and (tmp_path / "out.mlpackage").is_dir()


@pytest.mark.parametrize(("arguments", "uses"), [
    (["patches"], True), (["explain", "TORCH101"], True), (["explain", "activations"], True),
    (["explain", "ane301"], False), (["lint", "x"], False), (["verify", "a", "b"], False),
    (["verify", "a", "--torch", "m:f"], True)])
def test_commands_that_may_use_the_frontend_say_so(arguments, uses):
    found = _build_parser().parse_args(arguments)
    assert getattr(found, "uses_frontend", lambda arguments: False)(found) is uses


@pytest.fixture
def finders(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "coremltools"})
    return sys.meta_path


def test_modules_of_coremltools_alone_do_not_find_them(finders, monkeypatch, tmp_path):
    (tmp_path / "xgboost.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    coremltools_setup.hide_optional_packages()
    for importer, is_found in (("coremltools._deps", False), ("coremltoolsmore", True), ("mil_ane_passes.x", True)):
        importlib.invalidate_caches()
        sys.modules.pop("xgboost", None)
        names = {"__name__": importer}
        if is_found:
            exec("import xgboost", names)
            assert names["xgboost"].__file__ == str(tmp_path / "xgboost.py")
        else:
            with pytest.raises(ModuleNotFoundError, match="No module named 'xgboost'"):
                exec("import xgboost", names)


def test_with_plugins_or_coremltools_nothing_is_hidden(finders, monkeypatch):
    before = list(finders)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [SimpleNamespace(name="a plugin's rule")])
    coremltools_setup.hide_optional_packages()
    assert finders == before
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    sys.modules["coremltools"] = ane
    coremltools_setup.hide_optional_packages()
    assert finders == before
