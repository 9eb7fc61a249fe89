"""`run`: the package as it is, on any machine; held against PyTorch's own output."""

from __future__ import annotations

import stat

import numpy as np
import pytest
import torch

from mil_ane_passes.api import load
from mil_ane_passes.cli.main import main
from mil_ane_passes.core.query import all_ops
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.runtime.registry import load_kernels


@pytest.fixture
def source(fixtures):
    return str(fixtures / "conv_transpose_1d.mlpackage")


@pytest.fixture
def golden(fixtures):
    return np.load(fixtures / "conv_transpose_1d.npz")


@pytest.fixture
def feeds(golden, tmp_path):
    np.savez(tmp_path / "feeds.npz", mel=golden["mel"])
    return str(tmp_path / "feeds.npz")


def in_torch(program, feed, stored):
    """What PyTorch computes in double precision with the package's weights, and how far from that a run may be whose
    values are stored with a relative error of `stored` and whose weights are those before they were rounded to fp16.

    To first order, layer by layer: a weight or bias was rounded once (half a unit: 2**-11 of it, or 2**-25 where it is
    subnormal), a sum of n products in float32 is within n * 2**-24 of the sum of their sizes (twice: here, and in
    PyTorch's own run), and leaky_relu and tanh move two values no further apart. 1.01 covers the products of errors.
    """
    value, error = feed, stored * np.abs(feed)
    for _, op in all_ops(program):
        if op.op_type in ("conv", "conv_transpose"):
            weight, bias = op.weight.val.astype(np.float64), op.bias.val.astype(np.float64)
            apply = torch.conv1d if op.op_type == "conv" else torch.conv_transpose1d
            stride, pad = int(op.strides.val[0]), int(op.pad.val[0])

            def layer(x, kernel, shift, apply=apply, stride=stride, pad=pad):
                return apply(*map(torch.from_numpy, (x, kernel, shift)), stride=stride, padding=pad).numpy()

            half = [np.abs(each) * 2.0**-11 + 2.0**-25 for each in (weight, bias)]
            summed = (2 * (weight.size // bias.size + 1) * 2.0**-24) * layer(
                np.abs(value), np.abs(weight), np.abs(bias)
            )
            error = layer(error, np.abs(weight), 0 * bias) + layer(np.abs(value), *half) + summed
            value = layer(value, weight, bias)
        elif op.op_type == "leaky_relu":
            value = np.where(value > 0, value, value * float(op.alpha.val))
        elif op.op_type == "tanh":
            value = np.tanh(value)
        error = error + stored * np.abs(value) * (op.op_type not in ("const", "cast"))
    return value, 1.01 * error + 2.0**-22


@pytest.mark.parametrize(("precision", "stored"), [("float64", 0.0), ("float32", 2.0**-24), ("float16", 2.0**-11)])
def test_run_is_what_pytorch_computed(source, golden, feeds, precision, stored, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert main(["run", source, "--feeds", feeds, "-o", str(out), "--precision", precision]) == 0
    dtype = "float64" if precision == "float64" else "float32"
    assert capsys.readouterr().out == f"waveform: {dtype}[1, 4, 120]\n"
    found = np.load(out)
    assert found.files == ["waveform"] and found["waveform"].dtype == dtype
    exact, allowed = in_torch(load(source).program, golden["mel"].astype(np.float64), stored)
    assert np.all(np.abs(found["waveform"].astype(np.float64) - golden["waveform"]) <= allowed)
    if precision == "float64":
        np.testing.assert_allclose(found["waveform"], exact, rtol=0, atol=1e-14)


def test_the_bound_tells_a_lost_bias(source, golden):
    """The fault the package is about is far outside of what rounding explains."""
    program = load(source).program
    _, allowed = in_torch(program, golden["mel"].astype(np.float64), 2.0**-11)
    faulty = Runtime(program, quirks=("conv_transpose_1d_bias",))({"mel": golden["mel"]})["waveform"]
    assert np.mean(np.abs(faulty - golden["waveform"]) > 10 * allowed) > 0.5


def test_run_names_the_function(source, feeds, tmp_path, capsys):
    assert main(["run", source, "--feeds", feeds, "-o", str(tmp_path / "o.npz"), "--function", "mian"]) == 2
    assert capsys.readouterr().err == (
        "mil-ane-passes: function 'mian': not in the program; did you mean 'main'? (functions: main)\n"
    )


def test_what_run_writes_has_ordinary_permissions(source, feeds, tmp_path):
    assert main(["run", source, "--feeds", feeds, "-o", str(tmp_path / "out.npz")]) == 0
    assert stat.S_IMODE((tmp_path / "out.npz").stat().st_mode) == stat.S_IMODE((tmp_path / "feeds.npz").stat().st_mode)


def test_run_of_an_op_that_cannot_be_run_says_so(source, feeds, tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(load_kernels(), "tanh")
    assert main(["run", source, "--feeds", feeds, "-o", str(tmp_path / "out.npz")]) == 2
    assert capsys.readouterr().err.startswith("mil-ane-passes: the reference runtime has no kernel for: tanh ('")
