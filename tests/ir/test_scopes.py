"""Where an op came from: what coremltools' frontends note, kept in findings."""

from __future__ import annotations

import logging

import coremltools as ct
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.ir.scopes import Origin, find_origin


class Upsampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.deconv = torch.nn.ConvTranspose1d(4, 4, 4, stride=2)

    def forward(self, x):
        return torch.cumsum(self.deconv(x), -1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Upsampler()

    def forward(self, x):
        return torch.relu(self.up(x))


@pytest.fixture(scope="module", params=["traced", "exported"])
def converted(request):
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(1, 4, 8)
    target = {"convert_to": "mlprogram", "minimum_deployment_target": ct.target.iOS17}
    if request.param == "traced":
        return request.param, ct.convert(torch.jit.trace(model, x), inputs=[ct.TensorType(shape=x.shape)], **target)
    return request.param, ct.convert(torch.export.export(model, (x,)).run_decompositions({}), **target)


def found(findings, op):
    return next(item for item in findings if item.op == op)


def test_lint_right_after_convert_shows_where_an_op_came_from(converted):
    way, model = converted
    where = found(ane.lint(model).findings, "conv_transpose").origin
    if way == "traced":
        assert where == Origin("up.deconv", "ConvTranspose1d", "_convolution")
        assert str(where) == "up.deconv (ConvTranspose1d), aten op _convolution"
    else:
        assert where.module is None and where.source.startswith(__file__)
        assert where.source.endswith("return torch.cumsum(self.deconv(x), -1)")


def test_the_json_carries_it(converted):
    way, model = converted
    report = ane.lint(model).to_dict()
    shown = next(item for item in report["findings"] if item["op"] == "conv_transpose")["origin"]
    assert set(shown) == {"module", "module_type", "op", "source"}
    assert (shown["module"], shown["op"]) == (("up.deconv", "_convolution") if way == "traced" else (None, None))


def test_rewrites_carry_it_too(converted):
    _, model = converted
    fired = next(trace for trace in ane.rewrite(model, verify=False).traces if trace.fired).fired[0]
    assert fired.origin is not None and fired.to_dict()["origin"] == fired.origin.to_dict()


def test_a_package_on_disk_has_none(converted, tmp_path):
    _, model = converted
    model.save(str(tmp_path / "m.mlpackage"))
    report = ane.lint(tmp_path / "m.mlpackage")
    assert {item.origin for item in report.findings} == {None}
    assert all(item["origin"] is None for item in report.to_dict()["findings"])


def test_inside_convert_the_log_names_the_module(caplog):
    model, x = Model().eval(), torch.randn(1, 4, 8)
    with caplog.at_level(logging.INFO, logger="mil_ane_passes"):
        ct.convert(torch.jit.trace(model, x), inputs=[ct.TensorType(shape=x.shape)], convert_to="mlprogram",
                   pass_pipeline=ane.pipeline())
    assert "(up.deconv (ConvTranspose1d), aten op _convolution): " in caplog.text


def test_an_op_that_nobody_converted_has_none():
    @mb.program(input_specs=[mb.TensorSpec((1, 4), types.fp16)])
    def made(x):
        return mb.relu(x=x)

    assert [find_origin(op) for op in made.functions["main"].operations] == [None]
