"""A pytest plugin under which coremltools' own op tests predict on the reference runtime, on any machine.

It makes the tests believe that prediction is available and routes `MLModel.predict` and `make_state` to
`mil_ane_passes.runtime.predictor`. Nothing of the tests is changed. NeuralNetwork backends are left out.
"""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Iterator
from typing import Any

import coremltools._deps
import coremltools.models.utils
import pytest
from coremltools.models.model import MLModel

from mil_ane_passes import torch_frontend
from mil_ane_passes.runtime import predictor
from tests.lab.cases import append_case, draw_anew, limit_time

#: the macOS that runs every opset up to iOS18
MACOS_VERSION = (15, 5)
_SYMBOL = re.compile(r'symbol="is\d+"')

coremltools._deps._IS_MACOS = True
coremltools.models.utils._macos_version = lambda: MACOS_VERSION


class PredictionCount:
    """How often the current test came to a prediction."""

    calls = 0


def _get_predictor(mlmodel: Any) -> Any:
    if mlmodel.get_spec().WhichOneof("Type") != "mlProgram":
        pytest.skip("a NeuralNetwork: not for this runtime")
    PredictionCount.calls += 1
    if "_reference_predictor" not in vars(mlmodel):
        mlmodel._reference_predictor = predictor(mlmodel)
    return mlmodel._reference_predictor


MLModel.predict = lambda self, data, state=None: _get_predictor(self).predict(data, state)
MLModel.make_state = lambda self: _get_predictor(self).make_state()


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("upstream")
    group.addoption("--shard", default="0/1", help="I/N: every Nth case, from the Ith")
    group.addoption("--one-in", type=int, default=1, help="one case in so many of each test function")
    group.addoption("--limit", type=int, default=120, help="seconds after which a case has failed")
    group.addoption("--results", help="file to append one JSON line per case to")
    group.addoption("--patched", action="store_true", help="install the patches of our torch frontend")


def pytest_configure(config: Any) -> None:
    if config.getoption("--patched"):
        torch_frontend.install()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    index, count = map(int, config.getoption("--shard").split("/"))
    seen: dict[str, int] = {}
    kept, dropped = [], []
    for item in sorted(items, key=_hash_case):
        function = item.nodeid.split("[")[0]
        if not _is_neural_network(item):
            seen[function] = seen.get(function, -1) + 1
        wanted = not _is_neural_network(item) and seen[function] % config.getoption("--one-in") == 0
        mine = _hash_case(item) // 7 % count == index
        (kept if wanted and mine else dropped).append(item)
    # In the order of the files: parametrized fixtures and caches expect it.
    chosen = {id(item) for item in kept}
    items[:] = [item for item in items if id(item) in chosen]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    """`ct.convert` collects garbage each time, and would walk over all the collected cases: half a second a case."""
    gc.collect()
    gc.freeze()


def _hash_case(item: Any) -> int:
    """Return a hash of a case that is equal in each run: ids have symbols, whose numbers depend on what ran before."""
    return zlib.crc32(_SYMBOL.sub("", item.nodeid).encode())


def _is_neural_network(item: Any) -> bool:
    parameters = getattr(item, "callspec", None)
    backend = parameters.params.get("backend") if parameters is not None else None
    name = getattr(backend, "backend", None) or (backend[0] if isinstance(backend, (tuple, list)) else backend)
    return bool(name == "neuralnetwork")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Iterator[None]:
    """Each case draws its own numbers, whichever ran before it, and has a time limit."""
    draw_anew(item.nodeid)
    PredictionCount.calls = 0
    with limit_time(item.config.getoption("--limit")):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report = yield
    path = item.config.getoption("--results")
    if path and (report.when == "call" or report.outcome != "passed"):
        append_case(path, item, call, report, PredictionCount.calls)
    return report
