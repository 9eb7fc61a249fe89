"""A distribution with a rewrite and a finding: built, installed, found everywhere, and held to the tests of rules."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.testing import CHECKS
from tests.packaging.conftest import built, commands, installed, need_setuptools, run

EXAMPLE = Path(__file__).parent / "example_plugin"
HOST = """
import coremltools as ct
import mil_ane_passes
from mil_ane_passes.passes.examples import build_program
from coremltools.converters.mil.mil import Builder as mb
from mil_ane_passes.ir.query import iterate_ops
pipeline = ct.PassPipeline.DEFAULT
pipeline.append_pass("ane::drop_double_abs")
made = build_program(lambda x: mb.square(x=mb.abs(x=mb.abs(x=x)), name="y"), x=(1, 4))
model = ct.convert(made, convert_to="mlprogram", pass_pipeline=pipeline, skip_model_load=True,
                   minimum_deployment_target=ct.target.iOS17)
print(*[op.op_type for _, op in iterate_ops(model._mil_program) if op.op_type != "const"])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    need_setuptools()
    return Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("plugin") / "source"))


@pytest.fixture(scope="module")
def site(source) -> Path:
    """The plugin, and beside it the package under test, as Python would find them in one environment."""
    site = installed(built("wheel", source, source.parent), source.parent / "site")
    (site / "mil_ane_passes").symlink_to(Path(ane.__file__).parent)
    return site


@pytest.fixture
def package(tmp_path) -> str:
    made = build_program(lambda x: mb.softmax(x=mb.abs(x=mb.abs(x=x)), axis=1, name="y"), x=(4, 1))
    ct.convert(made, convert_to="mlprogram", skip_model_load=True, pass_pipeline=ct.PassPipeline.EMPTY,
               minimum_deployment_target=ct.target.iOS17).save(str(tmp_path / "in.mlpackage"))
    return "in.mlpackage"


@pytest.mark.slow
def test_every_command_knows_its_rules(site, tmp_path, package):
    listed, page, other, found, written, wrong = commands([
        ["passes"], ["explain", "ACME101"], ["explain", "softmax-of-one"],
        ["lint", package, "--format", "json", "--select", "ACME"],
        ["rewrite", package, "-o", "out.mlpackage", "--passes", "drop_double_abs", "--format", "json"],
        ["rewrite", package, "--dry-run", "--passes", "drop_double_ab"],
    ], tmp_path, site)
    assert "ACME101  ane::drop_double_abs " in listed.out and "ACME201  softmax_of_one " in listed.out
    assert page.code == 0 and "pass: ane::drop_double_abs (bitwise, preset named)" in page.out
    assert other.code == 0 and "most=1  The largest extent that is reported." in other.out
    assert sorted(item["code"] for item in json.loads(found.out)["findings"]) == ["ACME101", "ACME201"]
    report = json.loads(written.out)
    assert written.code == 0 and report["verified"] is True and (tmp_path / "out.mlpackage").is_dir()
    assert [trace["pass"] for trace in report["traces"] if trace["fired"]] == ["drop_double_abs"]
    assert wrong.code == 2 and "did you mean 'drop_double_abs'?" in wrong.err


@pytest.mark.slow
def test_coremltools_runs_its_pass(site, tmp_path):
    assert run(sys.executable, "-c", HOST, cwd=tmp_path, path=site).splitlines()[-1] == "abs square"


@pytest.mark.slow
def test_it_passes_the_tests_that_every_rule_has_to_pass(source, site):
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests", cwd=source,
               path=site)
    assert "17 passed" in said


def test_the_tests_tell_an_author_what_installed_would_be_left_out(tmp_path, monkeypatch):
    text = (EXAMPLE / "example_ane_rules.py").read_text()
    (tmp_path / "somebodys_rules.py").write_text(text.replace('"ACME101"', '"ANE777"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = importlib.import_module("somebodys_rules")
    CHECKS[0](rules.SoftmaxOfOne, tmp_path)
    with pytest.raises(AssertionError, match="has code 'ANE777', which is reserved for mil_ane_passes"):
        CHECKS[0](rules.DropDoubleAbs, tmp_path)
