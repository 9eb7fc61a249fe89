"""A pytest plugin under which coremltools' own tests of NeuralNetwork models predict through `upgrade` and the runtime.

    python -m pytest -p tests.lab.neuralnetwork.plugin COREMLTOOLS/test/neural_network/test_numpy_nn_layers.py

`MLModel.predict` upgrades the model to an ML Program at fp32 and runs it on the reference runtime. Nothing of the
tests is changed. A description of the classic array mapping leaves sequence and batch open, which ML Programs do not:
the shape of an array that is fed replaces the declared one where they differ.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

import coremltools._deps
import coremltools.models.utils
import numpy as np
import pytest
from coremltools.models.model import MLModel

from mil_ane_passes.neuralnetwork.interface import make_identifiers
from mil_ane_passes.neuralnetwork.program import NETWORK_KINDS
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model
from mil_ane_passes.runtime import predictor

MACOS_VERSION = (15, 5)
TARGET = "iOS18"

coremltools._deps._IS_MACOS = True
coremltools.models.utils._is_macos = lambda: True
coremltools.models.utils._macos_version = lambda: MACOS_VERSION


class PredictionCount:
    """How often the current test came to a prediction."""

    calls = 0


def _predict(self: Any, data: Any, state: Any = None) -> Any:
    spec = self.get_spec()
    if spec.WhichOneof("Type") not in NETWORK_KINDS:
        pytest.skip(f"a {spec.WhichOneof('Type')}, not a network")
    PredictionCount.calls += 1
    fed = dict(data)
    for feature in spec.description.input:
        if feature.type.WhichOneof("Type") != "multiArrayType" or feature.name not in fed:
            continue
        array, value = feature.type.multiArrayType, np.asarray(fed[feature.name])
        if array.WhichOneof("ShapeFlexibility"):
            continue
        if value.shape != tuple(array.shape):
            if value.size == int(np.prod(tuple(array.shape))) and len(array.shape):
                fed[feature.name] = value.reshape(tuple(array.shape))
            else:
                array.ClearField("shape")
                array.shape.extend(value.shape)
    names = make_identifiers([each.name for part in (spec.description.input, spec.description.output) for each in part])
    found = predictor(upgrade_model(spec, TARGET, "fp32").model).predict({names[name]: fed[name] for name in fed})
    given = {new: name for name, new in names.items()}
    return {given.get(name, name): value for name, value in found.items()}


MLModel.predict = _predict


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--results", help="file to append one JSON line per case to")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    np.random.seed(zlib.crc32(item.nodeid.encode()))
    PredictionCount.calls = 0
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report = yield
    path = item.config.getoption("--results")
    if path and (report.when == "call" or report.outcome != "passed"):
        message = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        line = {"case": item.nodeid.split("/")[-1], "outcome": report.outcome, "reached": PredictionCount.calls,
                "message": message[:900]}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return report
