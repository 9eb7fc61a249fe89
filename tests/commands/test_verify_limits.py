"""`verify` with limits on the error, for models that are meant to differ, and with a torch module from a file."""

from __future__ import annotations

import json
import shutil
import sys

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.optimize import coreml as cto

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.verify import choose_snr_limit
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.errors import InputError

NET = """
import torch
from helper import WIDTH

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.tanh(self.layer(x)))

def make():
    return Net()

net = Net()
count = 3

def broken():
    raise RuntimeError("no weights here")

def leave():
    raise SystemExit(0)

def needs(size):
    return Net()

def kind():
    return Net

def empty():
    with torch.device("meta"):
        return Net()
"""


@pytest.mark.parametrize(("factor", "noted"), [(1 + 2.0**-11, True), (1 + 2.0**-7, False)])
def test_differences_as_small_as_rounded_constants_are_noted(factor, noted):
    weight = np.eye(4, dtype=np.float32)
    before, after = (build_program(lambda x, weight=each: mb.linear(x=x, weight=weight, name="y"), dtype=types.fp32,
                                   x=(2, 4)) for each in (weight, weight * np.float32(factor)))
    report = ane.verify(before, after)
    assert report.status == "different"
    assert any("as small as those of a rewrite that rounds constants again" in each for each in report.advice) == noted
    assert not ane.verify(before, after, exactness="bitwise").advice
    assert ane.verify(before, after, snr=30).equal
    if noted:
        verdict, words, advice, *_ = str(report).splitlines()
        assert verdict.startswith("different") and "4.9e-04 of the largest value" in words
        assert advice.endswith(" 66.2 dB, less 3 dB): snr=63"), "2^-11 is 66.2 dB"
        assert report.to_dict()["advice"] == report.advice


@pytest.mark.parametrize(("factor", "noted"), [(1 + 2.0**-11, True), (1 + 2.0**-7, False)])
def test_ops_may_enlarge_the_differences_of_rounded_constants(factor, noted):
    def build(weight):
        return build_program(lambda x: mb.exp(x=mb.mul(x=mb.linear(x=x, weight=weight, name="product"),
                                                       y=np.float32(20), name="scaled"), name="y"),
                             dtype=types.fp32, x=(2, 4))

    report = ane.verify(build(np.eye(4, dtype=np.float32)), build(np.eye(4, dtype=np.float32) * np.float32(factor)))
    assert report.status == "different"
    assert any(each.startswith("the first difference is at most 4.9e-04 of the largest value, as small as those of a "
                               "rewrite that rounds constants again") for each in report.advice) == noted
    assert "snr=" not in str(report), "the outputs differ by more than 1 %: a limit would accept other faults"
    assert min(report.noise.values()) < 40


@pytest.mark.parametrize(("noise", "limit"), [
    ({}, None), ({"float64": 66.2}, 63), ({"float64": 66.2, "float16": 50.9}, 47), ({"float64": 43.0}, 40),
    ({"float64": 42.9}, None), ({"float64": float("inf")}, None), ({"float64": float("-inf")}, None)])
def test_a_limit_is_suggested_where_it_tells_faults_apart(noise, limit):
    assert choose_snr_limit(noise) == limit


def test_small_outputs_are_measured_by_their_own_size():
    """The bound of the check has a floor for outputs near 0; the share of the largest value has none."""
    before, after = (build_program(lambda x, factor=each: mb.mul(x=x, y=np.float32(factor), name="y"), dtype=types.fp32,
                                   x=(2, 4)) for each in (1e-9, 1e-9 * (1 + 2.0**-5)))
    report = ane.verify(before, after, seeds=1)
    assert report.status == "different" and not report.advice, report.advice


def test_no_limit_is_suggested_for_infinities_integers_and_extreme_feeds():
    def build(body):
        return build_program(body, dtype=types.fp32, x=(2, 4))

    pairs = {
        "infinities": (lambda x: mb.real_div(x=x, y=mb.sub(x=x, y=x), name="y"),
                       lambda x: mb.mul(x=x, y=np.float32(1), name="y")),
        "integers": (lambda x: mb.cast(x=mb.mul(x=x, y=np.float32(9)), dtype="int32", name="y"),
                     lambda x: mb.cast(x=mb.mul(x=x, y=np.float32(9.5)), dtype="int32", name="y")),
        "extreme": (lambda x: mb.clip(x=x, alpha=np.float32(-100), beta=np.float32(1000), name="y"),
                    lambda x: mb.clip(x=x, alpha=np.float32(-100), beta=np.float32(1000.5), name="y")),
    }
    for name, bodies in pairs.items():
        report = ane.verify(*map(build, bodies))
        assert report.status == "different" and report.noise == {}, name
        assert "snr=" not in str(report), name


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A linear layer of 64 x 64 as it is, with weights of 8 bits, and with a palette of 2 bits."""
    folder = tmp_path_factory.mktemp("compressed")
    torch.manual_seed(0)
    traced = torch.jit.trace(torch.nn.Linear(64, 64).eval(), torch.zeros(1, 64))
    model = ct.convert(traced, inputs=[ct.TensorType("x", (1, 64))], minimum_deployment_target=ct.target.iOS17)
    model.save(str(folder / "plain.mlpackage"))
    for name, compressed in (
        ("int8", cto.linear_quantize_weights(model, cto.OptimizationConfig(
            cto.OpLinearQuantizerConfig(weight_threshold=0)))),
        ("palette2", cto.palettize_weights(model, cto.OptimizationConfig(
            cto.OpPalettizerConfig(mode="uniform", nbits=2, weight_threshold=0)))),
    ):
        compressed.save(str(folder / f"{name}.mlpackage"))
    return folder


def verify(capsys, *arguments):
    code = main(["verify", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize("limit,good,bad", [
    ("--snr", 35, 60), ("--cosine", 0.999, 0.9999999), ("--atol", 0.05, 1e-5), ("--rtol", 100, 1e-6),
])
def test_each_limit_decides(packages, capsys, limit, good, bad):
    plain, int8 = packages / "plain.mlpackage", packages / "int8.mlpackage"
    assert verify(capsys, plain, int8)[0] == 1, "without limits they are different"
    code, out, _ = verify(capsys, plain, int8, limit, good)
    assert code == 0 and "equal in 3 runs" in out and "SNR" in out and "cosine 0.9" in out
    code, out, _ = verify(capsys, plain, int8, limit, bad)
    assert code == 1 and out.startswith(f"different, judged by {limit.removeprefix('--')}")


def test_coarser_weights_fail_the_limit_that_finer_ones_hold(packages, capsys):
    plain = packages / "plain.mlpackage"
    assert verify(capsys, plain, packages / "int8.mlpackage", "--snr", 30)[0] == 0
    assert verify(capsys, plain, packages / "palette2.mlpackage", "--snr", 30)[0] == 1


def test_all_limits_have_to_hold_and_the_json_has_the_figures(packages):
    plain, int8 = packages / "plain.mlpackage", packages / "int8.mlpackage"
    data = ane.verify(plain, int8, snr=30, cosine=0.99, atol=1).to_dict()
    assert data["status"] == "equal" and data["accuracy"] == {"atol": 1, "rtol": None, "snr": 30, "cosine": 0.99}
    output = data["cases"][0]["outputs"][0]
    assert 30 < output["snr"] < 80 and 0.99 < output["cosine"] < 1 and data["first_difference"] is None
    assert ane.verify(plain, int8, snr=30, cosine=0.99, atol=1e-7).status == "different"
    assert ane.verify(plain, plain, snr=300).equal, "the same bits hold any limit"


def made(function, dtype=types.fp32):
    return build_program(function, dtype=dtype, opset=ct.target.iOS17, x=(2, 4))


def test_the_figures_are_those_of_numpy():
    one = made(lambda x: mb.mul(x=x, y=np.float32(3), name="y"))
    other = made(lambda x: mb.add(x=mb.mul(x=x, y=np.float32(3)), y=np.float32(0.25), name="y"))
    x = np.arange(8, dtype=np.float32).reshape(2, 4) - 3
    (case,) = ane.verify(one, other, feeds={"x": x}, snr=0).cases
    (output,) = case.outputs
    a, b = 3.0 * x, 3.0 * x + 0.25
    assert output.snr == pytest.approx(10 * np.log10((a ** 2).sum() / ((a - b) ** 2).sum()))
    assert output.cosine == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert output.absolute == pytest.approx(0.25)


def test_what_is_not_finite_has_to_be_the_same_and_integers_equal():
    one = made(lambda x: mb.log(x=x, epsilon=np.float32(1e-45), name="y"))
    other = made(lambda x: mb.real_div(x=x, y=x, name="y"))
    zeros = {"x": np.zeros((2, 4), np.float32)}
    assert not ane.verify(one, other, feeds=zeros, atol=1e9).equal, "-inf or finite against NaN"
    best = made(lambda x: mb.reduce_argmax(x=x, axis=1, name="y"))
    least = made(lambda x: mb.reduce_argmin(x=x, axis=1, name="y"))
    assert not ane.verify(best, least, cosine=-1).equal and ane.verify(best, best, cosine=1).equal


@pytest.mark.parametrize("limits,said", [
    ({"atol": -1}, "atol: found -1; expected a number of 0 or more"),
    ({"rtol": float("nan")}, "rtol: found nan; expected a number of 0 or more"),
    ({"snr": float("inf")}, "snr: found inf; expected a finite number of dB"),
    ({"cosine": 2}, "cosine: found 2; expected a number from -1 to 1"),
    ({"snr": 3, "exactness": "bitwise"}, "replace exactness"),
    ({"snr": 3, "fixes_nonfinite": True}, "replace exactness"),
])
def test_limits_that_nothing_can_hold_are_refused(limits, said):
    one = made(lambda x: mb.relu(x=x, name="y"))
    with pytest.raises(InputError, match=said):
        ane.verify(one, one, **limits)


@pytest.fixture
def net(tmp_path, monkeypatch):
    """A package, and the file with the module that it was made of, which imports its neighbour."""
    (tmp_path / "my_net.py").write_text(NET)
    (tmp_path / "helper.py").write_text("WIDTH = 8\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_net", "helper"):
        sys.modules.pop(name, None)


@pytest.fixture
def converted(net, monkeypatch):
    monkeypatch.syspath_prepend(str(net))
    import my_net

    traced = torch.jit.trace(my_net.Net().eval(), torch.zeros(1, 8))
    ct.convert(traced, inputs=[ct.TensorType("x", (1, 8))], minimum_deployment_target=ct.target.iOS17).save(
        "m.mlpackage"
    )
    for name in ("my_net", "helper"):
        sys.modules.pop(name)
    monkeypatch.undo()
    monkeypatch.chdir(net)


@pytest.mark.parametrize("factory", ["my_net:make", "my_net:Net", "my_net:net", "my_net.py:make"])
def test_a_torch_module_from_the_command_line(converted, capsys, factory):
    code, out, err = verify(capsys, "m.mlpackage", "--torch", factory)
    assert code == 0 and "of the output's scale" in out, (out, err)
    code, out, _ = verify(capsys, "m.mlpackage", "--torch", factory, "--snr", "40", "--format", "json")
    assert code == 0 and json.loads(out)["accuracy"]["snr"] == 40


@pytest.mark.parametrize("arguments,said", [
    (["m.mlpackage", "--torch", "my_net"], "--torch my_net: expected MODULE:FACTORY"),
    (["m.mlpackage", "--torch", "no_such_net:make"], "ModuleNotFoundError: No module named 'no_such_net'"),
    (["m.mlpackage", "--torch", "none.py:make"], "--torch: no file 'none.py'"),
    (["m.mlpackage", "--torch", "my_net:nothing"], "has no attribute 'nothing'"),
    (["m.mlpackage", "--torch", "my_net:broken"], "RuntimeError: no weights here"),
    (["m.mlpackage", "--torch", "my_net:needs"], "missing 1 required positional argument: 'size'"),
    (["m.mlpackage", "--torch", "my_net:count"], "TypeError: 'int' object is not callable"),
    (["m.mlpackage", "--torch", "my_net:leave"], "SystemExit: 0"),
    (["m.mlpackage", "--torch", "my_net:kind"], "found the class Net; expected a torch module, or a class or function"),
    (["m.mlpackage", "--torch", "my_net:empty"], "has no values for 'layer.weight', which is on the meta device"),
])
def test_what_is_no_torch_module_is_said(net, fixtures, capsys, arguments, said):
    """A script that ends the process with 0, too, which would pass for an equal result."""
    shutil.copytree(fixtures / "nothing_to_do.mlpackage", "m.mlpackage")
    code, _, err = verify(capsys, *arguments)
    assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments,said", [
    (["m.mlpackage"], "without --torch the following arguments are required: B"),
    (["m.mlpackage", "m.mlpackage", "--torch", "my_net:make"], "B and --torch exclude each other"),
])
def test_one_other_side_is_given(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err
