"""What cannot be used ends with one clear line, exit code 2 and nothing written."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.commands.main import main
from tests.package.helpers import make

WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def listing(folder: Path) -> dict[str, tuple[bool, bytes]]:
    return {
        str(path.relative_to(folder)): (path.is_symlink(), path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def refused(arguments, folder, capsys) -> str:
    """Runs the command, which must fail in the one way; returns its line."""
    before = listing(folder)
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    assert printed.err.startswith("mil-ane-passes: ") and printed.err.count("\n") == 1 and printed.err.endswith("\n")
    assert listing(folder) == before
    return printed.err.removeprefix("mil-ane-passes: ").rstrip("\n")


@pytest.fixture
def source(fixtures, tmp_path):
    return Path(shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage"))


def broken_manifest(path, **changes):
    manifest = json.loads((path / "Manifest.json").read_text())
    (path / "Manifest.json").write_text(json.dumps({**manifest, **changes}))
    return path


def edit_weights(path, edit):
    (path / WEIGHTS).write_bytes(edit(bytearray((path / WEIGHTS).read_bytes())))
    return path


def bad_sentinel(data):
    struct.pack_into("<I", data, 64, 0xBADC0DE)
    return data


def written(path, text):
    path.write_text(text)
    return path


def saved(path):
    spec = ct.proto.Model_pb2.Model(specificationVersion=4)
    spec.treeEnsembleRegressor.treeEnsemble.numPredictionDimensions = 1
    ct.models.MLModel(spec, skip_model_load=True).save(str(path))
    return path


def arrays(source):
    np.savez(source.with_name("a.npz"), x=np.zeros(2))
    return source.with_name("a.npz")


def torch_model(source):
    """PyTorch saves archives."""
    with zipfile.ZipFile(source.with_name("m.pt"), "w") as archive:
        archive.writestr("data.pkl", b"")
    return source.with_name("m.pt")


def made(path):
    path.mkdir()
    return path


def without(path, name):
    (path / name).unlink()
    return path


PACKAGES = {
    "missing": (lambda s: s.with_name("no.mlpackage"), "no such file or folder; expected an .mlpackage folder"),
    "a file": (lambda s: written(s.with_name("f.mlpackage"), "x"), "a file, not a package; "),
    "misspelt": (lambda s: s.with_name(f"{s.stem}s.mlpackage"), "in.mlpackage'?"),
    "arrays": (arrays, "numpy arrays, not a model; pass inputs with --feeds"),
    "a torch model": (torch_model, "a PyTorch model; convert it first"),
    "an ONNX model": (lambda s: written(s.with_name("m.onnx"), "x"), "an ONNX model; convert it first"),
    "data of a program": (lambda s: written(s.with_name("m.ptd"), "x"), "pass the .pte that it belongs to"),
    "an archive": (lambda s: Path(shutil.make_archive(str(s.with_name("z")), "zip", s)), "an archive; unpack it first"),
    "the file in a package": (lambda s: s / "Data/com.apple.CoreML/model.mlmodel", "a part of the package "),
    "a folder in a package": (lambda s: s / "Data", "in.mlpackage; pass that folder"),
    "an empty folder": (lambda s: made(s.with_name("e.mlpackage")), "not a package, it has no Manifest.json; "),
    "no manifest": (lambda s: without(s, "Manifest.json"), "not a package, it has no Manifest.json; "),
    "manifest not json": (
        lambda s: (written(s / "Manifest.json", "{"), s)[1],
        "Manifest.json cannot be read as JSON (",
    ),
    "manifest a list": (
        lambda s: (written(s / "Manifest.json", "[]"), s)[1],
        "Manifest.json lacks 'itemInfoEntries' or",
    ),
    "manifest of nothing": (lambda s: broken_manifest(s, itemInfoEntries={}), "as the root model, which is not among"),
    "model missing": (
        lambda s: without(s, "Data/com.apple.CoreML/model.mlmodel"),
        "model.mlmodel is missing, but",
    ),
    "model not a model": (
        lambda s: (written(s / "Data/com.apple.CoreML/model.mlmodel", "\xff" * 99), s)[1],
        "the model file is not a Core ML model (",
    ),
    "weights missing": (lambda s: without(s, WEIGHTS), "weight.bin is missing ("),
    "weights empty": (lambda s: edit_weights(s, lambda data: b""), "has 0 bytes; expected a header of 64; "),
    "weights cut short": (
        lambda s: edit_weights(s, lambda data: data[: len(data) // 2]),
        "the package is damaged or truncated: use a fresh copy",
    ),
    "weights cut in the last blob": (lambda s: edit_weights(s, lambda data: data[:-64]), "expected, but the file has "),
    "bad sentinel": (lambda s: edit_weights(s, bad_sentinel), "found sentinel 0x0badc0de; expected 0xdeadbeef; "),
    "bad version": (lambda s: edit_weights(s, lambda d: d[:4] + b"\1" + d[5:]), "has storage version 1; expected 2; "),
    "tree package": (
        lambda s: saved(s.with_name("tree.mlpackage")),
        "the model is of type treeEnsembleRegressor; expected an ML Program",
    ),
    "tree file": (
        lambda s: saved(s.with_name("tree.mlmodel")),
        "the model is of type treeEnsembleRegressor; expected a NeuralNetwork",
    ),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_package_that_cannot_be_used(case, source, tmp_path, capsys):
    make, message = PACKAGES[case]
    path = make(source)
    line = refused(["rewrite", path, "-o", tmp_path / "out.mlpackage"], tmp_path, capsys)
    assert message in line
    assert str(path) in line


@pytest.mark.parametrize("case", ["missing", "weights cut short", "tree package"])
@pytest.mark.parametrize("command", ["verify", "verify second", "run", "dry run"])
def test_every_command_refuses_it(case, command, source, fixtures, tmp_path, capsys):
    make, message = PACKAGES[case]
    np.savez(tmp_path / "f.npz", mel=np.zeros(1))
    path, good = make(source), fixtures / "conv_transpose_1d.mlpackage"
    arguments = {
        "verify": ["verify", path, good],
        "verify second": ["verify", good, path],
        "run": ["run", path, "--feeds", tmp_path / "f.npz", "-o", tmp_path / "o.npz"],
        "dry run": ["rewrite", path, "--dry-run"],
    }[command]
    assert message in refused(arguments, tmp_path, capsys)


def linked(source):
    source.with_name("link.mlpackage").symlink_to(source)
    return source.with_name("link.mlpackage")


SAME = "the source is never modified"


EXISTS = "exists already; expected a path that does not exist, or --overwrite to replace it"
OUTPUTS = {
    "same": (lambda s: s, SAME),
    "slash": (lambda s: f"{s}/", SAME),
    "link": (linked, SAME),
    "link and slash": (lambda s: f"{linked(s)}/", SAME),
    "dots": (lambda s: s.parent / "x" / ".." / s.name, SAME),
    "inside": (lambda s: s / "out.mlpackage", SAME),
    "around": (lambda s: s.parent, SAME),
    "exists": (lambda s: made(s.with_name("out.mlpackage")), EXISTS),
    "file exists": (lambda s: written(s.with_name("out.mlpackage"), ""), EXISTS),
    "no folder": (lambda s: s.with_name("no") / "out.mlpackage", "does not exist; create it first"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_that_cannot_be_used(case, source, tmp_path, capsys):
    make, message = OUTPUTS[case]
    assert message in refused(["rewrite", source, "-o", make(source)], tmp_path, capsys)


@pytest.mark.parametrize("case", [name for name, (_, message) in OUTPUTS.items() if message != EXISTS])
def test_overwrite_does_not_help(case, source, tmp_path, capsys):
    make, message = OUTPUTS[case]
    assert message in refused(["rewrite", source, "-o", make(source), "--overwrite"], tmp_path, capsys)


def test_the_source_through_a_link_is_the_source(source, tmp_path, capsys):
    assert SAME in refused(["rewrite", linked(source), "-o", source], tmp_path, capsys)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ["--passes", "lift_conv_transpose1d"],
            "no pass 'lift_conv_transpose1d'; `mil-ane-passes passes` lists them; did you "
            "mean 'lift_conv_transpose_1d'?",
        ),
        (
            ["--passes", "lift_conv_1d{axes=2}"],
            "ane::lift_conv_1d: no option 'axes'; it has axis, always; did you mean 'axis'?",
        ),
        (["--passes", "lift_conv_1d{axis=3}"], "ane::lift_conv_1d: option 'axis' is '3'; expected auto or -1 or 2"),
        (
            ["--passes", "lift_conv_1d{axis"],
            "passes: cannot read 'lift_conv_1d{axis'; expected names like 'a,b{option=value}'",
        ),
        (["--preset", "fulll"], "no preset 'fulll'; expected safe or full; did you mean 'full'?"),
        (
            ["--target", "m"],
            "target 'm' is unknown; expected all, a12, a13, a14, m1, a15, m2, a16, a17, m3, m4, a18",
        ),
    ],
)
def test_words_that_are_not_known(asked, message, source, tmp_path, capsys):
    line = refused(["rewrite", source, "-o", tmp_path / "out.mlpackage", *asked], tmp_path, capsys)
    assert line.startswith(message)


def test_no_output(source, tmp_path, capsys):
    assert refused(["rewrite", source], tmp_path, capsys) == "no output given; expected -o OUT.mlpackage, or --dry-run"


@pytest.mark.parametrize("key", ["ANE3001", "lift_conv_transpose_2d", "nonsense of a word"])
def test_an_unknown_rule(key, tmp_path, capsys):
    line = refused(["explain", key], tmp_path, capsys)
    assert line.startswith(f"no rule '{key}'; `mil-ane-passes passes` lists codes and names")
    assert ("did you mean" in line) == (key != "nonsense of a word")


def test_packages_that_do_not_fit_one_another(fixtures, tmp_path, capsys):
    one, other = fixtures / "conv_transpose_1d.mlpackage", fixtures / "nothing_to_do.mlpackage"
    line = refused(["verify", one, other], tmp_path, capsys)
    assert line.startswith("the two programs have different inputs or outputs: the first ")
    assert "'mel'" in line and "'image'" in line


def test_packages_with_one_input_in_common(tmp_path, capsys):
    paths = []
    for size, name in ((4, "first"), (5, "second")):
        @mb.program(input_specs=[mb.TensorSpec((1, size))], opset_version=ct.target.iOS17)
        def program(x):
            return mb.relu(x=x, name=name)

        paths.append(make(tmp_path / f"{name}.mlpackage", program, ct.target.iOS17))
    capsys.readouterr()
    line = refused(["verify", *paths], tmp_path, capsys)
    assert line.startswith("the two programs have different inputs or outputs: the first ")
    assert "'first'" in line and "'second'" in line


def test_a_function_to_compare_that_is_not_there(fixtures, tmp_path, capsys):
    source = fixtures / "conv_transpose_1d.mlpackage"
    line = refused(["verify", source, source, "--function", "mean"], tmp_path, capsys)
    assert line == f"{source}: no function 'mean'; expected main; did you mean 'main'?"
    assert main(["verify", str(source), str(source), "--function", "main"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["rewritten"],
        ["rewrite"],
        ["rewrite", "a", "--format", "xml"],
        ["verify", "a"],
        ["verify", "a", "b", "--precision", "float8"],
        ["run", "a", "-o", "b"],
    ],
)
def test_a_command_line_that_cannot_be_read(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: mil-ane-passes")
