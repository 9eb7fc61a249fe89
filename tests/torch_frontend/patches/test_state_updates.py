"""States of exported programs: several of them, written from quotients, and named as ops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend.patching import patched


class Keeper(torch.nn.Module):
    """Buffers of three numbers that `step` reads and writes."""

    def __init__(self, step: Callable[..., torch.Tensor], *names: str) -> None:
        super().__init__()
        self.step, self.names = step, names
        for name in names:
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x, *(getattr(self, name) for name in self.names))


def standardize(x: torch.Tensor, mean: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    y = (x - mean) / (spread + 1)
    mean.mul_(0.5).add_(x.mean(0))
    spread.mul_(0.5).add_(x.var(0))
    return y


def keep_half(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    y = x + kept
    kept.copy_(x[0] / 2)
    return y


def keep_both(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    y, half = x + first * second, x.sum(0) / 2
    first.copy_(half)
    second.copy_(half * 2)
    return y


def keep_mean(x: torch.Tensor, kept: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    y = x + kept * mean
    kept.copy_(x.mean())
    mean.copy_(x[0, 0] * 2)
    return y


CASES = {
    "values that are expanded": (keep_mean, "kept", "mean"),
    "two statistics": (standardize, "mean_of_all", "spread"),
    "statistics named as ops": (standardize, "mean", "var"),
    "all named as ops": (standardize, "mul", "add"),
    "a quotient": (keep_half, "kept"),
    "a quotient in a buffer named as its op": (keep_half, "div"),
    "a value and its double": (keep_both, "first", "second"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("precision", ["FLOAT16", "FLOAT32"])
@pytest.mark.parametrize("name", CASES)
def test_exported_states_are_those_of_pytorch(name: str, precision: str) -> None:
    module = Keeper(*CASES[name]).eval()
    program = torch.export.export(Keeper(*CASES[name]).eval(), (torch.zeros(4, 3),)).run_decompositions({})
    names = [node.name for node in program.graph.nodes]
    model = ane.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                        compute_precision=getattr(ct.precision, precision))
    assert [node.name for node in program.graph.nodes] == names, "the user's program is not changed"
    predictor = ane.runtime.predictor(model)
    state = predictor.make_state()
    for step in range(3):
        x = torch.arange(12.).reshape(4, 3).roll(step, 0) / 8
        (found,) = predictor.predict({next(iter(program.graph_signature.user_inputs)): x.numpy()}, state).values()
        np.testing.assert_allclose(found, module(x).numpy(), atol=4e-3)


class Stream(torch.nn.Module):
    """A window of the last rows, to which chunks of any length are appended."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.register_buffer("kept", torch.zeros(2, 16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.copies:
            self.kept.copy_(torch.cat([self.kept, x], 1)[:, -16:])
        else:
            self.kept[:] = torch.cat([self.kept[:, x.shape[1]:], x], 1)
        return self.kept.sum(1)


@pytest.mark.parametrize("copies", [False, True])
def test_a_window_of_the_last_rows_keeps_its_shape(copies: bool) -> None:
    module, flexible = Stream(copies), ({1: torch.export.Dim("length", min=2, max=14)},)
    program = torch.export.export(Stream(copies), (torch.zeros(2, 6, 4),), dynamic_shapes=flexible)
    model = ane.convert(program.run_decompositions({}), minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    predictor = ane.runtime.predictor(model)
    state = predictor.make_state()
    for length in (6, 9, 3):
        x = torch.randn(2, length, 4)
        (found,) = predictor.predict({"x": x.numpy()}, state).values()
        np.testing.assert_allclose(found, module(x).numpy(), atol=2e-2)


class StaticCache(torch.nn.Module):
    """A cache that counts its tokens as that of transformers: from the place of the first new one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("keys", torch.zeros(1, 8, 4))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.count.copy_(place[0])
        self.keys.index_copy_(1, torch.arange(x.shape[1]) + self.count, x)
        self.count.add_(x.shape[1])
        return self.keys.sum(1) + self.count


@pytest.mark.parametrize("precision", ["FLOAT16", "FLOAT32"])
def test_a_count_that_is_set_by_an_input(tmp_path: Path, precision: str) -> None:
    """It is a state of rank 0, to which a scalar is written."""
    module, example = StaticCache().eval(), (torch.randn(1, 2, 4), torch.tensor([0]))
    program = torch.export.export(StaticCache().eval(), example).run_decompositions({})
    model = ane.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True, check=True,
                        compute_precision=getattr(ct.precision, precision))
    model.save(str(tmp_path / "m.mlpackage"))
    ane.rewrite(tmp_path / "m.mlpackage", tmp_path / "out.mlpackage", preset="full")  # raises if it is not equivalent
    predictor = ane.runtime.predictor(tmp_path / "out.mlpackage")
    state = predictor.make_state()
    for place in (0, 2, 4):
        x = torch.randn(1, 2, 4)
        (found,) = predictor.predict({"x": x.numpy(), "place": np.int32([place])}, state).values()
        np.testing.assert_allclose(found, module(x, torch.tensor([place])).numpy(), atol=2e-2)
    assert state.read_state("count").tolist() == 6


def test_an_update_is_not_moved_before_a_read_of_its_state() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.fp16), mb.StateTensorSpec((2,), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, kept):
        doubled = mb.mul(x=x, y=np.float16(2))
        before = mb.read_state(input=kept)
        mb.coreml_update_state(state=kept, value=doubled)
        return mb.add(x=before, y=x)

    with patched():
        PASS_REGISTRY["common::canonicalize_inplace_pattern"](program)
    kinds = [op.op_type for op in program.functions["main"].operations if op.op_type != "const"]
    assert kinds == ["mul", "read_state", "coreml_update_state", "add"]
