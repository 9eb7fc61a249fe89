"""A pytest plugin under which coremltools' own tests of NeuralNetwork models predict through `upgrade` and the runtime.

    python -m pytest -p tests.lab.neuralnetwork.plugin COREMLTOOLS/test/neural_network/test_numpy_nn_layers.py

`MLModel.predict` upgrades the model to an ML Program at fp32 and runs it on the reference runtime. Nothing of the
tests is changed. A description of the classic array mapping leaves sequence and batch open, which ML Programs do not:
the shape of an array that is fed replaces the declared one where they differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coremltools._deps
import coremltools.models.utils
import numpy as np
import pytest
from coremltools.models.model import MLModel
from coremltools.models.neural_network import quantization_utils

from mil_ane_passes.neuralnetwork.interface import make_identifiers
from mil_ane_passes.neuralnetwork.program import NETWORK_KINDS
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model
from mil_ane_passes.runtime import predictor
from tests.faster_conversions import skip_repeated_work
from tests.lab.cases import append_case, draw_anew, get_case_name, limit_time

MACOS_VERSION = (15, 5)
TARGET = "iOS18"

coremltools._deps._IS_MACOS = True
coremltools.models.utils._is_macos = lambda: True
for module in (coremltools.models.utils, quantization_utils):
    module._macos_version = lambda: MACOS_VERSION


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
    group = parser.getgroup("neuralnetwork")
    group.addoption("--limit", type=int, default=300, help="seconds after which a case has failed")
    group.addoption("--results", help="file to append one JSON line per case to; cases in it do not run again")


def pytest_configure(config: Any) -> None:
    skip_repeated_work(pytest.MonkeyPatch())


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    path = Path(config.getoption("--results") or os.devnull)
    done = {json.loads(line)["case"] for line in path.read_text().splitlines()} if path.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if get_case_name(item) in done])
    items[:] = [item for item in items if get_case_name(item) not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    draw_anew(item.nodeid)
    PredictionCount.calls = 0
    with limit_time(item.config.getoption("--limit")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report = yield
    path = item.config.getoption("--results")
    if path and (report.when == "call" or report.outcome != "passed"):
        append_case(path, item, call, report, PredictionCount.calls, 900)
    return report
