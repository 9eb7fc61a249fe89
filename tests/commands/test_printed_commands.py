"""Every command that a report prints is run, on the package that it was printed for, as a user would paste it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program, make_weight
from tests.conversions import save_program

COMMAND = re.compile(r"mil-ane-passes [^`;\n]*?(?= \([\w ]+[;,] |$| says )", re.M)


def vocoder():
    """A cumsum and a 1-D conv with a wide kernel, which are unsupported on an M4, and a 1-D conv_transpose."""
    def body(x):
        x = mb.conv(x=x, weight=make_weight(16, 16, 31), pad_type="same", name="smooth")
        x = mb.cumsum(x=x, axis=2, name="sum")
        return mb.conv_transpose(x=x, weight=make_weight(16, 4, 8), bias=make_weight(4), strides=[4], name="y")

    return build_program(body, x=(1, 16, 64))


def lookups():
    """Two embedding lookups by token and position."""
    def body(ids, positions):
        one = mb.gather(x=make_weight(50, 16), indices=ids, axis=0, name="words")
        two = mb.gather(x=make_weight(20, 16), indices=positions, axis=0, name="places")
        return mb.linear(x=mb.add(x=one, y=two, name="both"), weight=make_weight(8, 16), name="y")

    return build_program(body, dtype=types.int32, opset=ct.target.iOS17, ids=(1, 8), positions=(1, 8))


def late():
    """Large layers on the ANE, then a random op and a cumsum on the CPU until the end."""
    def body(x):
        for number in range(6):
            x = mb.tanh(x=x, name=f"t{number}")
        return mb.add(x=mb.cumsum(x=x, axis=1, name="sum"), y=np.float16(1), name="y")

    return build_program(body, x=(1, 64, 256, 256))


def loop():
    """A loop whose end values decide, between two layers."""
    def body(x):
        first = mb.tanh(x=x, name="first")
        last = mb.while_loop(
            _cond=lambda v: mb.less(x=mb.reduce_sum(x=mb.abs(x=v), keep_dims=False), y=np.float16(100)),
            _body=lambda v: (mb.mul(x=v, y=np.float16(2)),), loop_vars=(first,), name="loop")
        return mb.relu(x=last, name="y")

    return build_program(body, x=(2, 8))


MODELS = {made.__name__: made for made in (vocoder, lookups, late, loop)}


@pytest.fixture(params=[*MODELS, "vocoder in a path with a dash"])
def package(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *dashed = request.param.split(" in ")
    path = Path("-model.mlpackage") if dashed else tmp_path / "a model's.mlpackage"
    save_program(MODELS[name](), path)
    return path


def printed(text):
    return list(dict.fromkeys(COMMAND.findall(text)))


def run(command, capsys, clean):
    """Run a printed line as a shell would; returns what it printed."""
    outs = []
    for step in command.split(" && "):
        name, *arguments = shlex.split(step)
        assert name == "mil-ane-passes"
        code = main(arguments)
        outs.append(capsys.readouterr().out)
        assert code == 0 or (code == 1 and arguments[0] == "lint"), (step, outs)
    for made in clean.glob("OUT*"):
        made.rename(clean / f"done {len(list(clean.iterdir()))} {made.name}")
    return "\n".join(outs)


def test_every_command_of_lint_and_rewrite_runs_as_printed(package, tmp_path, capsys):
    text = str(ane.lint(package, target="m4"))
    commands = printed(text)
    mentions = text.count("mil-ane-passes") - text.count(" && ")
    assert commands and len(COMMAND.findall(text)) >= mentions, text
    for command in commands:
        assert not re.search(r"\b(IN|VALUE|OUT)(?!\.mlpackage|_)\b", command), command
        shown = run(command, capsys, tmp_path)
        if "rewrite" in command:
            assert "--target m4" in command and "nothing to do" not in shown, shown
        for after in printed(shown):
            assert shlex.split(after)[1] == "lint" and "--target m4" in after or "--snr" in after


def test_a_model_that_was_not_saved_is_not_named_by_its_temporary_path(tmp_path):
    model = ct.convert(vocoder(), convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17,
                       skip_model_load=True)
    text = str(ane.lint(model, target="m4"))
    assert text.startswith("a model in memory on m4: ") and "mil_ane_passes.rewrite(..., " in text
    assert not printed(text) and model.package_path not in text
    report = ane.rewrite(model, tmp_path / "out.mlpackage", passes="product_by_parts")
    assert report.status == "unchanged" and not printed(str(report)), str(report)


def test_commands_for_a_rewritten_model_name_the_rewritten_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body(ids):
        words = mb.gather(x=make_weight(50, 16), indices=ids, axis=0, name="words")
        return mb.linear(x=mb.cumsum(x=words, axis=1), weight=make_weight(8, 16), name="y")

    program = build_program(body, dtype=types.int32, opset=ct.target.iOS17, ids=(1, 8))
    model = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17,
                       skip_model_load=True)
    text = str(ane.lint(model, target="m4"))  # a lookup, which commands for models on disk cut off
    assert "runtime-gather" in text and not printed(text)
    model.save("m.mlpackage")
    assert "--split-at" in str(ane.lint("m.mlpackage", target="m4"))
    for source in (model, "m.mlpackage"):
        made = ane.rewrite(source, "made.mlpackage", passes="triangle_cumsum", target="m4", overwrite=True)
        assert made.status == "written"
        text = str(ane.lint(made.package, target="m4"))
        assert text.startswith("made.mlpackage on m4: ") and printed(text)
        assert text == str(ane.lint("made.mlpackage", target="m4"))
        unsaved = ane.rewrite(source, passes="triangle_cumsum", target="m4")
        assert unsaved.status == "in memory"
        text = str(ane.lint(unsaved.package, target="m4"))
        assert text.startswith("a model in memory on m4: ") and not printed(text) and "m.mlpackage" not in text


def test_lookups_are_cut_off_by_one_command_and_what_is_left_has_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_program(lookups(), "m.mlpackage")
    report = ane.lint("m.mlpackage", target="m4")
    assert {item.split_at for item in report.findings if item.rule.name == "runtime_gather"} == {(("words", "places"),)}
    (command,) = [each for each in printed(str(report)) if "--split-at" in each]
    for step in command.split(" && "):
        assert main(shlex.split(step)[1:]) == 0
    capsys.readouterr()
    kinds = {op.op_type for op in ane.load("OUT_2.mlpackage").program.functions["main"].operations}
    assert "gather" not in kinds and "linear" in kinds


def test_a_late_departure_promises_what_the_first_part_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_program(late(), "m.mlpackage")
    report = ane.lint("m.mlpackage", target="m4")
    (found,) = [item for item in report.findings if item.rule.name == "late_departure"]
    (promised,) = re.findall(r"(\d+) of them predicted on the ANE", found.reason)
    (command,) = [each for each in printed(str(report)) if "--split-at" in each]
    assert main(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    assert ane.lint("OUT_1.mlpackage", target="m4").on_ane == int(promised) > 0


def test_a_cut_that_edit_refuses_is_not_printed(tmp_path, monkeypatch):
    """The lookup makes the model's output: nothing is left behind it to make a second part of."""
    monkeypatch.chdir(tmp_path)
    built = build_program(
        lambda ids: mb.gather(x=make_weight(50, 16), indices=ids, axis=0, name="y"),
        dtype=types.int32,
        opset=ct.target.iOS17,
        ids=(1, 8),
    )
    save_program(built, "m.mlpackage")
    report = ane.lint("m.mlpackage", target="m4")
    (found,) = [item for item in report.findings if item.rule.name == "runtime_gather"]
    assert found.split_at == () and "mil-ane-passes edit" not in str(report)


@pytest.mark.parametrize("arguments", [["--split-at", "%t2"], ["--expose", "%t1"], ["--rename", "%t0=first"],
                                       ["--io", "fp16", "%x"]])
def test_edit_takes_values_as_reports_print_them(tmp_path, capsys, arguments):
    source = tmp_path / "m.mlpackage"
    save_program(late(), source)
    assert main(["edit", str(source), "-o", str(tmp_path / "out.mlpackage"), *arguments]) == 0, capsys.readouterr()


def folded():
    """Two 1x1 convs in a row, which preset full makes one, with constants that it rounds again."""
    draw = np.random.default_rng(0).standard_normal

    def body(x):
        one = mb.conv(x=x, weight=draw((128, 64, 1, 1)).astype(np.float16), name="expand")
        two = mb.conv(x=one, weight=draw((64, 128, 1, 1)).astype(np.float16), name="reduce")
        return mb.conv(x=mb.relu(x=two), weight=draw((64, 64, 3, 3)).astype(np.float16), name="y")

    return build_program(body, x=(1, 64, 64, 64))


def test_constants_that_a_rewrite_rounds_again_are_verified_with_the_printed_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_program(folded(), "a model.mlpackage")
    assert main(["rewrite", "a model.mlpackage", "-o", "./-out.mlpackage", "--passes", "fuse_linear_convs", "--target",
                 "m4"]) == 0
    text = capsys.readouterr().out
    told, = (command for command in printed(text) if shlex.split(command)[1] == "verify")
    assert text.splitlines()[-1] == "  All ops are predicted on the ANE; this lists other findings, if there are any."
    line, = (line for line in text.splitlines() if told in line)
    assert "the changes that ane::fuse_linear_convs declares" in line
    assert main(["verify", "a model.mlpackage", "./-out.mlpackage"]) == 1, "without a limit it is different"
    text = capsys.readouterr().out
    verdict, words, advice = text.splitlines()[:3]
    assert verdict.startswith("different, judged as rounding") and "as small as those of a rewrite" in words
    command, = printed(text)
    assert advice.endswith(command) and shlex.split(command) == shlex.split(told), "both state the same limit"
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.startswith("equal in 3 runs at float64, within snr >= ")
    limit = int(shlex.split(command)[shlex.split(command).index("--snr") + 1])
    tighter = [str(limit + 4) if word == str(limit) else word for word in shlex.split(command)[1:]]
    assert main(tighter) == 1, "the limit is not looser than needed"
    capsys.readouterr()
    made = ane.rewrite("a model.mlpackage", "five.mlpackage", passes="fuse_linear_convs", seeds=5)
    assert made.verify_command and made.verify_command in str(made) and " --seeds 5" in made.verify_command
    assert main(shlex.split(made.verify_command)[1:]) == 0
    assert capsys.readouterr().out.startswith("equal in 5 runs")


def test_a_limit_of_another_precision_and_function_is_printed_with_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_program(folded(), "m.mlpackage")
    ane.rewrite("m.mlpackage", "out.mlpackage", passes="fuse_linear_convs")
    assert main(["verify", "m.mlpackage", "out.mlpackage", "--function", "main", "--precision", "float32"]) == 1
    command, = printed(capsys.readouterr().out)
    assert " --function main --precision float32" in command
    assert main(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    np.savez("feeds.npz", x=np.ones((1, 64, 64, 64), np.float16))
    assert main(["verify", "m.mlpackage", "out.mlpackage", "--feeds", "feeds.npz"]) == 1
    text = capsys.readouterr().out
    option, = re.findall(r"less 3 dB\): (--snr \d+)$", text, re.M)
    assert main(["verify", "m.mlpackage", "out.mlpackage", "--feeds", "feeds.npz", *option.split()]) == 0


@pytest.mark.parametrize("passes", ["split_conv_transpose_bias", "lift_conv_transpose_1d"])
def test_a_rewrite_that_verify_accepts_without_a_limit_names_none(tmp_path, passes):
    save_program(vocoder(), tmp_path / "m.mlpackage")
    report = ane.rewrite(tmp_path / "m.mlpackage", tmp_path / "out.mlpackage", passes=passes)
    assert report.changed and report.verify_command is None and "--snr" not in str(report)
    assert ane.verify(tmp_path / "m.mlpackage", tmp_path / "out.mlpackage").equal


def test_an_upgrade_is_compared_with_its_module_by_the_printed_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(1, 3, 8, 8))], [("out", None)], disable_rank5_shape_mapping=True)
    builder.add_convolution("conv", 3, 4, 3, 3, 1, 1, "same", 1, weight.transpose(2, 3, 1, 0), None, False,
                            input_name="data", output_name="out")
    ct.models.utils.save_spec(builder.spec, "net.mlmodel")
    np.save("weight.npy", weight)
    Path("net.py").write_text("""
import numpy as np
import torch

class Net(torch.nn.Module):
    sign = 1

    def forward(self, data):
        return self.sign * torch.nn.functional.conv2d(data, torch.tensor(np.load("weight.npy")), padding=1)

class Other(Net):
    sign = -1
""")
    assert main(["upgrade", "net.mlmodel", "-o", "a model.mlpackage"]) == 0
    text = capsys.readouterr().out
    command, following = printed(text)
    assert f"not compared with the network, whose layers run in Core ML only; with the torch module that it was " \
           f"converted from: {command}\n" in text and shlex.split(following)[1] == "lint"
    for module, code in (("net.py:Net", 0), ("net.py:Other", 1)):
        assert main(shlex.split(command.replace("MODULE:FACTORY", module))[1:]) == code
        capsys.readouterr()
    run(following, capsys, tmp_path)
