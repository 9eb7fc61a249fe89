"""MLModels of packages with several functions: what is run and compared is the function for which they were made."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.errors import InputError
from tests.conversions import save_program
from tests.package.helpers import with_functions

FEEDS = {"x": np.arange(3, dtype=np.float16)}
FACTORS = {"double": 2.0, "triple": 3.0}


@pytest.fixture
def models(tmp_path):
    """The same package as an MLModel for each of its functions, of which `double` is the default one."""
    parts = {}
    for name, factor in FACTORS.items():
        parts[name] = tmp_path / f"{name}.mlpackage"
        save_program(build_program(lambda x: mb.mul(x=x, y=np.float16(factor), name="y"), x=(3,)), parts[name],
                     ct.target.iOS18)
    path = str(with_functions(tmp_path / "both.mlpackage", parts, "double"))
    return {name: ct.models.MLModel(path, function_name=name, skip_model_load=True) for name in FACTORS} | {
        "path": path, "any": ct.models.MLModel(path, skip_model_load=True)}


@pytest.mark.parametrize(("name", "factor"), [*FACTORS.items(), ("any", 2.0)])
def test_a_model_is_run_and_measured_in_its_function(models, name, factor):
    assert np.array_equal(ane.run(models[name], FEEDS)["y"], FEEDS["x"] * factor)
    assert np.array_equal(ane.run(models[name], FEEDS, function="triple")["y"], FEEDS["x"] * 3)
    found = ane.trace(models[name], FEEDS)
    assert found.function == ("double" if name == "any" else name)
    assert np.array_equal(found.outputs["y"], FEEDS["x"] * factor)
    ran = {row.function for row in ane.calibrate(models[name]).found.rows}
    assert ran == ({"triple"} if name == "triple" else set(FACTORS))


@pytest.mark.parametrize("name", FACTORS)
def test_a_model_is_compared_in_its_function(models, name):
    for other, factor in FACTORS.items():
        assert ane.verify(lambda x: x * factor, models[name]).equal is (other == name)
        assert ane.verify(models[name], lambda x: x * factor).equal is (other == name)
    assert ane.verify(models[name], models["path"]).equal
    functions = {case.function for case in ane.verify(models[name], models["path"]).cases}
    assert functions == ({"triple"} if name == "triple" else set(FACTORS))


def test_models_of_different_functions_are_not_compared(models):
    with pytest.raises(InputError, match="the first MLModel was made for the function 'double', the second for "
                                         "'triple'; expected the same one"):
        ane.verify(models["double"], models["triple"])
    assert ane.verify(models["double"], models["triple"], function="double").equal


def test_a_rewrite_keeps_all_functions_of_a_model(models, tmp_path):
    report = ane.rewrite(models["triple"], tmp_path / "out.mlpackage")
    assert set(ane.load(tmp_path / "out.mlpackage" if report.changed else models["path"]).functions) == set(FACTORS)
    assert ane.load(models["path"]).program.default_function_name == "double"
