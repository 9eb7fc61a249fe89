"""`run`: the package as it is, on any machine; held against PyTorch's own output."""

from __future__ import annotations

import json
import stat

import coremltools as ct
import numpy as np
import pytest
import torch

from mil_ane_passes import load
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.query import iterate_ops
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
    for _, op in iterate_ops(program):
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


class Remembers(torch.nn.Module):
    """Adds what it gets to what it holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 3, dtype=torch.float16))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


@pytest.fixture(scope="module")
def stateful(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stateful")
    model = ct.convert(
        torch.jit.trace(Remembers().eval(), torch.zeros(2, 3, dtype=torch.float16)),
        inputs=[ct.TensorType("x", (2, 3), dtype=np.float16)], outputs=[ct.TensorType("y", dtype=np.float16)],
        states=[ct.StateType(ct.TensorType(shape=(2, 3), dtype=np.float16), name="total")],
        minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    model.save(str(folder / "stateful.mlpackage"))
    np.savez(folder / "x.npz", x=np.arange(6, dtype=np.float16).reshape(2, 3))
    np.savez(folder / "total.npz", total=np.full((2, 3), 10, np.float16))
    return folder


@pytest.mark.parametrize("given", [True, False])
def test_states_are_read_and_written(given, stateful, tmp_path, capsys):
    out, left = tmp_path / "y.npz", tmp_path / "left.npz"
    state = ["--state", str(stateful / "total.npz")] if given else []
    source, feeds = str(stateful / "stateful.mlpackage"), str(stateful / "x.npz")
    assert main(["run", source, "--feeds", feeds, "-o", str(out), *state, "--state-out", str(left)]) == 0
    total = np.arange(6).reshape(2, 3) + (10 if given else 0)
    np.testing.assert_array_equal(np.load(left)["total"], total)
    np.testing.assert_array_equal(np.load(out)["y"], 2 * total)
    assert np.load(left).files == ["total"] and capsys.readouterr().out == "y: float32[2, 3]\n"


STATES = {
    "missing": (["--state", "{tmp}/no.npz"], "state: no file '{tmp}/no.npz'; expected an .npz file with one array "
                                             "per state"),
    "another name": (["--state", "{feeds}"], "state 'x': no such state (states: total)"),
    "one file for both": (["--state-out", "{tmp}/out.npz"], "outputs and final states would both be written to "
                                                           "'{tmp}/out.npz'; expected two files"),
    "no folder": (["--state-out", "{tmp}/no/s.npz"], "no folder '{tmp}/no' to write 's.npz' to; create it first"),
}


@pytest.mark.parametrize(("asked", "message"), STATES.values(), ids=STATES)
def test_states_that_cannot_be_used(asked, message, stateful, tmp_path, capsys):
    words = {"tmp": tmp_path, "feeds": stateful / "x.npz"}
    arguments = ["run", stateful / "stateful.mlpackage", "--feeds", stateful / "x.npz", "-o", tmp_path / "out.npz",
                 *(each.format(**words) for each in asked)]
    assert main([str(each) for each in arguments]) == 2
    assert capsys.readouterr().err == f"mil-ane-passes: {message.format(**words)}\n"
    assert list(tmp_path.iterdir()) == []


def test_outputs_and_states_are_not_written_to_one_file_by_two_names(stateful, tmp_path, capsys):
    (tmp_path / "link.npz").symlink_to(tmp_path / "out.npz")
    for name in ("link.npz", f"../{tmp_path.name}/out.npz"):
        assert main(["run", str(stateful / "stateful.mlpackage"), "--feeds", str(stateful / "x.npz"), "-o",
                     str(tmp_path / "out.npz"), "--state-out", str(tmp_path / name)]) == 2
        assert "outputs and final states would both be written to" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()


def test_a_package_without_states_has_none_to_write(source, feeds, tmp_path, capsys):
    assert main(["run", source, "--feeds", feeds, "-o", str(tmp_path / "o.npz"), "--state-out",
                 str(tmp_path / "s.npz")]) == 2
    assert "the function has no states; remove this option" in capsys.readouterr().err
    assert not (tmp_path / "o.npz").exists()


def test_a_run_needs_somewhere_to_go(source, feeds, capsys):
    assert main(["run", source, "--feeds", feeds]) == 2
    assert capsys.readouterr().err == "mil-ane-passes: no output given; expected -o OUT.npz, or --trace\n"


def test_trace_shows_where_fp16_overflows(source, golden, tmp_path, capsys):
    np.savez(tmp_path / "loud.npz", mel=golden["mel"] * np.float32(1e4))
    for precision in ("float32", "float16"):
        assert main(["run", source, "--feeds", str(tmp_path / "loud.npz"), "--trace", "--precision", precision]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["value", "op", "type", "min", "max", "nan", "inf", "overflow", "underflow"]
        computed = [op for _, op in iterate_ops(load(source).program) if op.op_type != "const"]
        assert sum(line[2:].startswith("%") and " = " not in line for line in lines[1:]) == len(computed)
        assert lines[-1].startswith("no op overflows fp16: every value is within its range")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loud.npz"]


def test_trace_as_data_and_outputs_beside_it(source, feeds, tmp_path, capsys):
    out = tmp_path / "out.npz"
    assert main(["run", source, "--feeds", feeds, "--trace", "--format", "json", "-o", str(out)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["command"] == "run" and data["source"] == source and data["function"] == "main"
    assert data["outputs"] == {"waveform": {"dtype": "float32", "shape": [1, 4, 120]}}
    computed = {op.outputs[0].name for _, op in iterate_ops(load(source).program) if op.op_type != "const"}
    assert {row["value"] for row in data["trace"]} == computed
    last = data["trace"][-1]
    wave = np.load(out)["waveform"]
    assert (last["value"], last["min"], last["max"]) == ("waveform", float(wave.min()), float(wave.max()))


def test_a_run_as_data(source, feeds, tmp_path, capsys):
    assert main(["run", source, "--feeds", feeds, "-o", str(tmp_path / "out.npz"), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data) == ["schema", "tool", "version", "command", "source", "function", "precision", "quirks",
                          "outputs", "states", "first_overflow", "trace"]
    assert data["schema"] == 1 and data["trace"] is None and data["quirks"] == [] and data["states"] == {}


def test_run_with_a_fault(source, feeds, golden, tmp_path, capsys):
    arguments = ["run", source, "--feeds", feeds, "-o", str(tmp_path / "out.npz")]
    assert main([*arguments, "--quirk", "conv_transpose_1d_bias"]) == 0
    faulty = np.load(tmp_path / "out.npz")["waveform"]
    assert np.mean(np.abs(faulty - golden["waveform"]) > 0.01) > 0.5
    assert main([*arguments, "--quirk", "conv_transpose_bias"]) == 2
    assert "did you mean 'conv_transpose_1d_bias'?" in capsys.readouterr().err
