"""Rank above 5: done in fewer axes by `ane.convert`, or refused with the op, the module and the line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops

from ..checks import captured, input_types, outputs

X = torch.arange(120.).reshape(1, 6, 20) / 120


class Merged(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(1, 2, 3, 2, 2, 5) * 2).permute(0, 2, 1, 3, 5, 4).sum(3)


class Unmerged(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, 2, 3, 2, 2, 5).permute(0, 2, 1, 3, 5, 4) * 2


class Outer(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 1)


def converted(model: torch.nn.Module, frontend: str = "trace", **options: object):
    options = {"compute_precision": ct.precision.FLOAT32, "minimum_deployment_target": ct.target.iOS16} | options
    return ane.convert(captured(model.eval(), [X], frontend), skip_model_load=True,
                       inputs=None if frontend == "export" else input_types([X]), **options)


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("pipeline", [
    None, ct.PassPipeline.EMPTY, ct.PassPipeline.CLEANUP, "safe", "full", "cancel_lift_pairs"])
def test_a_value_of_rank_6_is_computed_in_fewer_axes(precision, pipeline):
    """Whatever the pipeline and the precision: Core ML loads no program of rank 6."""
    if pipeline in ("safe", "full"):
        pipeline = ane.pipeline(preset=pipeline)
    elif isinstance(pipeline, str):
        pipeline = ane.pipeline(passes=pipeline)
    before = list(pipeline.passes) if pipeline is not None else []
    model = converted(Merged(), pass_pipeline=pipeline, compute_precision=precision)
    assert max(var.rank for _, op in iterate_ops(model._mil_program) for var in op.outputs) <= 5
    np.testing.assert_allclose(outputs(model, [X])[0], Merged()(X).numpy(), rtol=2e-3)
    assert pipeline is None or pipeline.passes == before, "the user's own pipeline was changed"


def test_options_of_the_users_own_lower_rank_hold():
    pipeline = ane.pipeline(passes="lower_rank{max_transposes=1}")
    assert converted(Merged(), pass_pipeline=pipeline)
    assert [option.option_name for option in pipeline.get_options("ane::lower_rank")] == ["max_transposes"]


def test_axes_longer_than_the_ane_supports_are_merged_too():
    """A program on the CPU is better than none."""
    def long(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 1, 3, 2, 200, 100).permute(0, 1, 2, 3, 5, 4).sum(2) * 1

    x = torch.rand(6, 40000)
    model = ane.convert(captured(long, [x], "trace"), inputs=input_types([x]), skip_model_load=True,
                        compute_precision=ct.precision.FLOAT32)
    np.testing.assert_allclose(outputs(model, [x])[0], long(x).numpy(), rtol=1e-4)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_what_cannot_be_done_in_fewer_axes_is_refused_with_its_place(frontend):
    with pytest.raises(ane.torch_frontend.NotConverted) as refused:
        converted(Outer(Unmerged()), frontend)
    text = str(refused.value)
    assert text.startswith(f"op '{'view' if frontend == 'export' else 'reshape'}' in inner (")
    assert "test_high_ranks.py:" in text and ": makes a tensor of rank 6, but Core ML supports 5 at most" in text
    assert "cannot be done in fewer axes (" in text and "is an output)" in text and "; merge adjacent axes" in text
    assert "Core ML only supports tensors with rank <= 5" in str(refused.value.__cause__)


def test_what_is_not_of_torch_gets_the_pass_too():
    def body(x):
        high = mb.reshape(x=x, shape=[1, 2, 3, 2, 2, 5])
        return mb.reduce_sum(x=mb.transpose(x=high, perm=[0, 2, 1, 3, 5, 4]), axes=[3], keep_dims=False)

    program = mb.program(input_specs=[mb.TensorSpec(shape=(1, 6, 20))])(body)
    assert ane.convert(program, skip_model_load=True).get_spec().WhichOneof("Type") == "mlProgram"


class Windows(torch.nn.Module):
    """Windows of an image and back, as in Swin, where one size of the view is left to torch."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, c).relu()
        sizes = {"last": (b, h // 4, w // 4, 4, 4, -1), "first": (-1, h // 4, w // 4, 4, 4, c)}[self.sizes]
        return windows.view(sizes).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", ["first", "last"])
def test_a_size_that_torch_export_knows_of_an_image_of_flexible_height(sizes: str) -> None:
    model, rows = Windows(sizes).eval(), torch.export.Dim("rows", min=2, max=8)
    exported = torch.export.export(model, (torch.randn(1, 8, 12, 3),), dynamic_shapes=({1: 4 * rows},))
    mlmodel = ane.convert(exported, skip_model_load=True, compute_precision=ct.precision.FLOAT32, check=True)
    x = torch.randn(1, 20, 12, 3)
    np.testing.assert_array_equal(outputs(mlmodel, [x])[0], model(x).numpy())


class Correlation(torch.nn.Module):
    """Each pixel times all others, as in RAFT, where the sizes of the result of rank 6 are read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        rows = x.view(b, h * w, c)
        volume = (rows @ rows.transpose(1, 2)).view(b, h, w, 1, h, w) / torch.sqrt(torch.tensor(c))
        b, h, w, d, h2, w2 = volume.shape
        return torch.nn.functional.avg_pool2d(volume.reshape(b * h * w, d, h2, w2), 2)


class ReadWindows(torch.nn.Module):
    """Windows whose sizes are read after they are moved, as in SCUNet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        moved = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5)
        return (moved.reshape(b, -1, 16, c) * moved.size(1)).tanh() * moved.shape[2]


class SwappedAxis(torch.nn.Module):
    """A transpose that moves an axis of one element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 4, 4, w // 4, 4, c).tanh().transpose(0, 1).reshape(b, h, w, c)


FLEXIBLE = {"rows": {1}, "columns": {2}, "both": {1, 2}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("flexible", FLEXIBLE)
@pytest.mark.parametrize("model", [Windows("first"), Windows("last"), Correlation(), ReadWindows(), SwappedAxis()],
                         ids=["first", "last", "correlation", "read", "swapped"])
def test_several_flexible_sizes_are_read_from_the_view(
    model: torch.nn.Module, flexible: str, frontend: str
) -> None:
    x, at = torch.randn(1, 8, 12, 3), FLEXIBLE[flexible]
    if frontend == "export":
        program = torch.export.export(model.eval(), (x,), dynamic_shapes=(
            {axis: 4 * torch.export.Dim(f"size{axis}", min=1, max=8) for axis in at},))
    else:
        program = torch.jit.trace(model.eval(), x)
    inputs = [ct.TensorType("x", [ct.RangeDim(4, 32, default=size) if axis in at else size
                                  for axis, size in enumerate(x.shape)])]
    mlmodel = ane.convert(program, skip_model_load=True, compute_precision=ct.precision.FLOAT32, check=True,
                          inputs=None if frontend == "export" else inputs)
    assert max(var.rank for _, op in iterate_ops(mlmodel._mil_program) for var in op.outputs) <= 5
    for rows, columns in ((20, 12), (8, 16), (4, 28)):
        x = torch.randn(1, rows if 1 in at else 8, columns if 2 in at else 12, 3)
        np.testing.assert_allclose(outputs(mlmodel, [x])[0], model(x).numpy(), rtol=1e-5, atol=1e-5)


class LayerWindows(torch.nn.Module):
    """Windows of an image, with layers on the value of rank 6 before or after it is transposed."""

    def __init__(self, layer: str, is_first: bool) -> None:
        super().__init__()
        self.layer, self.is_first = layer, is_first
        self.norm, self.wide = torch.nn.LayerNorm(3), torch.nn.LayerNorm((4, 3))
        self.linear = torch.nn.Linear(3, 5)
        self.table = torch.nn.Parameter(torch.randn(4, 1, 4, 3))
        for each in (self.norm.weight, self.norm.bias, self.wide.weight, self.wide.bias):
            torch.nn.init.normal_(each)

    def apply_layer(self, x: torch.Tensor) -> torch.Tensor:
        inner = 2 if self.is_first else 3  # the axis of the rows in a window
        result: torch.Tensor = {
            "norm": lambda: self.norm(x),
            "norm of two axes": lambda: self.wide(x),
            "linear": lambda: self.linear(x),
            "product": lambda: x @ self.linear.weight.t(),
            "norm and linear": lambda: self.linear(self.norm(x)).relu(),
            "scale": lambda: x * self.norm.weight + 1,
            "table": lambda: x + (self.table if self.is_first else self.table.transpose(0, 1)),
            "residual": lambda: self.norm(x) + x,
            "softmax": lambda: x.softmax(inner),
            "centered": lambda: x - x.mean((inner, 4), keepdim=True),
            "repeated": lambda: torch.cat([x, x * 2], inner),
            "mean": lambda: x.mean((inner, 4)),
            "squeezed": lambda: self.linear(x).amax((inner, 4), keepdim=True).squeeze((inner, 4)),
        }[self.layer]()
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // 4, 4, w // 4, 4, c)
        x = self.apply_layer(x) if self.is_first else self.apply_layer(x.permute(0, 1, 3, 2, 4, 5))
        if x.dim() < 6:
            return x
        return (x.permute(0, 1, 3, 2, 4, 5) if self.is_first else x).reshape(-1, 16, x.shape[-1])


class NormedReverse(torch.nn.Module):
    """Windows back to an image, with a norm and a linear layer at rank 6, and one size of the view left to torch."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm, self.linear = torch.nn.LayerNorm(3), torch.nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c).relu()
        sizes = {"last": (b, h // 4, w // 4, 4, 4, -1), "first": (-1, h // 4, w // 4, 4, 4, c)}[self.sizes]
        return self.linear(self.norm(windows.view(sizes))).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, 5)


class ViewedAlike(torch.nn.Module):
    """A view by the sizes of a value of rank 6, which are read after a linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        windows = torch.nn.functional.linear(x.view(b, h // 4, 4, w // 4, 4, c), torch.eye(3) + 1)
        other = torch.nn.functional.layer_norm(x.tanh().view(windows.shape), (c,))
        return windows.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c) + other.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)


class MovedWindows(torch.nn.Module):
    """Windows that two transposes move, of which parts are read, or whose last axes are merged by `flatten`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        windows = x.view(b, h // 4, 4, w // 4, 4, c)
        moves: dict[str, Callable[[], torch.Tensor]] = {
            "grid": lambda: x.view(b, 4, h // 4, 4, w // 4, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 16, c),
            "channels first": lambda: x.permute(0, 3, 1, 2).reshape(b, c, h // 4, 4, w // 4, 4).permute(
                0, 2, 4, 1, 3, 5).reshape(-1, c, 16),
            "reversed": lambda: windows.permute(5, 3, 1, 4, 2, 0).reshape(-1),
            "cut": lambda: windows[:, :, 1:3].permute(0, 1, 3, 2, 4, 5).reshape(-1, 8, c),
            "cut after": lambda: windows.permute(0, 1, 3, 2, 4, 5)[:, :, :, 1:, ::2].reshape(-1, 6, c),
            "one row": lambda: windows[:, :, 1].flatten(3) * 2,
            "cut and read": lambda: x.view(windows[:, :, :, :, 1:].shape[0], -1, 4 * c) * 2,
            "flattened": lambda: windows.permute(0, 1, 3, 4, 2, 5).flatten(3),
        }
        return moves[self.form]()


LAYERS = ("norm", "norm of two axes", "linear", "product", "norm and linear", "scale", "table", "residual", "softmax",
          "centered", "repeated", "mean", "squeezed")
LAYERED: dict[str, Callable[[], torch.nn.Module]] = {
    **{f"{layer} {'before' if first else 'after'}": partial(LayerWindows, layer, first) for layer in LAYERS
       for first in (True, False)},
    "first": partial(NormedReverse, "first"), "last": partial(NormedReverse, "last"), "viewed": ViewedAlike,
    **{form: partial(MovedWindows, form) for form in (
        "grid", "channels first", "reversed", "cut", "cut after", "one row", "cut and read", "flattened")},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("batch", ["one", "flexible"])
@pytest.mark.parametrize("name", LAYERED)
def test_values_of_rank_6_with_several_flexible_sizes(
    name: str, batch: str, frontend: str, precision: ct.precision
) -> None:
    torch.manual_seed(0)
    model, at = LAYERED[name]().eval(), {0, 1, 2} if batch == "flexible" else {1, 2}
    x = torch.randn(2 if batch == "flexible" else 1, 8, 12, 3)
    if frontend == "export":
        dims = {0: torch.export.Dim("batch", min=1, max=8), 1: 4 * torch.export.Dim("rows", min=1, max=8),
                2: 4 * torch.export.Dim("columns", min=1, max=8)}
        program = torch.export.export(model, (x,), dynamic_shapes=({axis: dims[axis] for axis in at},))
    else:
        program = torch.jit.trace(model, x)
    inputs = [ct.TensorType("x", [ct.RangeDim(1 if axis == 0 else 4, 32, default=size) if axis in at else size
                                  for axis, size in enumerate(x.shape)])]
    mlmodel = ane.convert(program, skip_model_load=True, compute_precision=precision, check=True,
                          inputs=None if frontend == "export" else inputs)
    assert max(var.rank for _, op in iterate_ops(mlmodel._mil_program) for var in op.outputs) <= 5
    error = 1e-5 if precision == ct.precision.FLOAT32 else 2e-2
    for images, rows, columns in ((1, 20, 12), (3, 8, 16), (2, 4, 28)):
        x = torch.randn(images if 0 in at else 1, rows, columns, 3)
        found, true = outputs(mlmodel, [x])[0], model(x).detach().numpy()
        assert found.shape == true.shape
        np.testing.assert_allclose(found, true, rtol=error, atol=error)


def test_a_slice_of_a_flexible_axis_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 4, 4, w // 4, 4, c)[:, 1:].permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    with pytest.raises(ane.torch_frontend.NotConverted, match="slice_by_index '.*': a dynamic dimension is sliced"):
        ane.convert(captured(model, [torch.randn(2, 8, 12, 3)], "trace"), skip_model_load=True, inputs=[
            ct.TensorType("x", (2, ct.RangeDim(8, 32, default=8), ct.RangeDim(4, 32, default=12), 3))])
