"""Writes through views in whole conversions; buffers that are states, and those that are not."""

from __future__ import annotations

import logging
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check, convert


def last_plus_one(x: torch.Tensor) -> torch.Tensor:
    x[..., -1] += 1
    return x


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_last_element_needs_neither_gather_nor_scatter(frontend: str, target: Any) -> None:
    x = torch.arange(24.).reshape(2, 3, 4)
    mlmodel = check(last_plus_one, x, frontend=frontend, target=target)
    ops = {op.op_type for op in mlmodel._mil_program.functions["main"].operations}
    assert not {kind for kind in ops if "gather" in kind or "scatter" in kind or kind == "reshape"}, ops


class Cache(torch.nn.Module):
    """A decoder's cache: one position of one layer a step, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(2, 1, 4, 8, dtype=torch.float16))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float16))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.k[0, :, :, position] = x.half()
        self.k[1][:, :, position] += 2 * x.half()
        self.seen += 1
        return self.k.float().sum(0) * self.seen


def states() -> list[Any]:
    return [ct.StateType(wrapped_type=ct.TensorType(shape=shape, dtype=np.float16), name=name)
            for name, shape in (("k", (2, 1, 4, 8)), ("seen", (1,)))]


def inputs() -> list[Any]:
    return [ct.TensorType(name="x", shape=(1, 4, 1), dtype=np.float32),
            ct.TensorType(name="position", shape=(1,), dtype=np.int32)]


def test_a_cache_fills_step_by_step() -> None:
    model = Cache().eval()
    traced = torch.jit.trace(Cache().eval(), (torch.zeros(1, 4, 1), torch.tensor([0])), check_trace=False)
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(traced, inputs=inputs(), states=states(), minimum_deployment_target=ct.target.iOS18,
                             compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    predictor = ane.runtime.predictor(mlmodel)
    state = predictor.make_state()
    for step in (0, 3, 7, 3):
        x = torch.full((1, 4, 1), step + 1.)
        expected = model(x, torch.tensor([step]))
        found = predictor.predict({"x": x.numpy(), "position": np.array([step], np.int32)}, state)
        np.testing.assert_allclose(next(iter(found.values())), expected.numpy(), rtol=1e-3)


def test_a_buffer_that_is_no_state_starts_anew_each_time_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    traced = torch.jit.trace(Cache().eval(), (torch.zeros(1, 4, 1), torch.tensor([0])), check_trace=False)
    logger = logging.getLogger("coremltools")
    logger.addHandler(caplog.handler)
    try:
        with ane.torch_frontend.patched():
            mlmodel = ct.convert(traced, inputs=inputs(), minimum_deployment_target=ct.target.iOS16,
                                 compute_precision=ct.precision.FLOAT32, skip_model_load=True)
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "StateType" in record.getMessage()]
    assert any("buffer 'k'" in text and "test_view_writes.py:" in text for text in said), said
    feeds = {"x": np.ones((1, 4, 1), np.float32), "position": np.array([3], np.int32)}
    model = Cache()
    model(torch.zeros(1, 4, 1), torch.tensor([0]))  # as the trace did
    expected = model(torch.ones(1, 4, 1), torch.tensor([3])).numpy()
    for _ in range(2):
        found = ane.runtime.predictor(mlmodel).predict(feeds)
        np.testing.assert_allclose(next(iter(found.values())), expected, rtol=1e-3)


def test_the_name_of_a_buffer_is_escaped_where_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    name = "k\x1b[2J\nWARNING of another"

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(name, torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = getattr(self, name)
            kept[1:] = x
            return kept * 2

    traced = torch.jit.trace(Named().eval(), (torch.ones(2),), check_trace=False)
    logger = logging.getLogger("coremltools")
    logger.addHandler(caplog.handler)
    try:
        ane.convert(traced, inputs=[ct.TensorType(name="x", shape=(2,))], skip_model_load=True)
    finally:
        logger.removeHandler(caplog.handler)
    (said,) = {record.getMessage() for record in caplog.records if "StateType" in record.getMessage()}
    assert "\\x1b[2J\\nWARNING of another" in said and "\n" not in said and "\x1b" not in said


def test_a_state_is_updated_in_place() -> None:
    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(4, 8, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.k[1:3] = x.half()
            return self.k * 2

    traced = torch.jit.trace(First().eval(), (torch.zeros(2, 8),), check_trace=False)
    state = ct.StateType(wrapped_type=ct.TensorType(shape=(4, 8), dtype=np.float16), name="k")
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(traced, inputs=[ct.TensorType(name="x", shape=(2, 8))], states=[state],
                             minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    kinds = [op.op_type for op in mlmodel._mil_program.functions["main"].operations if op.op_type != "const"]
    assert kinds[:3] == ["read_state", "slice_update", "coreml_update_state"], kinds


class Scratch(torch.nn.Module):
    """A buffer that every call overwrites before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scratch.copy_(x)
        self.scratch[1] = 5
        return self.scratch * 2


def test_a_buffer_overwritten_before_it_is_read_needs_no_state() -> None:
    check(Scratch().eval(), torch.tensor([1., 2., 3.]))


def half_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * y
    flat = torch.nn.functional.pad(z, [0, 0]).reshape(-1)
    kept = z.transpose(0, 1).reshape(-1)
    kept[0] = 1
    return z + flat.sum()


def test_a_write_that_cannot_be_followed_names_op_and_line() -> None:
    with pytest.raises(NotConverted, match=r"'aten::copy_' .*test_view_writes.py:\d+") as refused:
        convert(half_written, [torch.ones(2, 3), torch.ones(2, 3)], "script")
    assert "clone" in str(refused.value)


class Tail(torch.nn.Module):
    """A buffer that keeps the last elements of a signal of flexible length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.kept, x], -1)
        self.kept[:] = joined[:, :, -2:]
        return joined * 2


def test_the_end_of_a_flexible_signal_is_written_to_a_state() -> None:
    traced = torch.jit.trace(Tail().eval(), torch.zeros(1, 4, 5), check_trace=False)
    model = ane.convert(
        traced, inputs=[ct.TensorType("x", (1, 4, ct.RangeDim(2, 9, default=5)))],
        states=[ct.StateType(ct.TensorType(shape=(1, 4, 2), dtype=np.float16), name="kept")],
        minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    predictor, module = ane.runtime.predictor(model), Tail().eval()
    state = predictor.make_state()
    for length in (5, 3, 7):
        x = torch.arange(4. * length).reshape(1, 4, length)
        (found,) = predictor.predict({"x": x.numpy()}, state).values()
        assert found.tolist() == module(x).tolist()
