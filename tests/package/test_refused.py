"""What cannot be loaded is refused with a message that says who, what, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from mil_ane_passes.package import load, package_of_mlmodel
from mil_ane_passes.utils.errors import InputError

from .helpers import (
    MODEL,
    WEIGHTS,
    conv_program,
    main_block,
    make,
    spec_of,
    write_spec,
)


def with_manifest(source, change):
    manifest = json.loads((source / "Manifest.json").read_text())
    change(manifest)
    (source / "Manifest.json").write_text(json.dumps(manifest))


def set_paths(path):
    def change(manifest):
        for item in manifest["itemInfoEntries"].values():
            item["path"] = path

    return change


def set_kind(kind):
    def change(source):
        spec = spec_of(source)
        getattr(spec, kind).SetInParent()
        write_spec(source, spec)

    return change


def first_blob(source):
    return next(
        op for op in main_block(spec_of(source)).operations
        if op.type == "const" and op.attributes["val"].WhichOneof("value") == "blobFileValue"
    )  # fmt: skip


def patch_blob(at, data):
    def change(source):
        offset = first_blob(source).attributes["val"].blobFileValue.offset
        with open(source / WEIGHTS, "r+b") as file:
            file.seek(offset + at)
            file.write(data)

    return change


def set_blob(**fields):
    def change(source):
        spec = spec_of(source)
        for op in main_block(spec).operations:
            if op.type == "const" and op.attributes["val"].WhichOneof("value") == "blobFileValue":
                for name, value in fields.items():
                    setattr(op.attributes["val"].blobFileValue, name, value)
        write_spec(source, spec)

    return change


def truncate(name, size):
    return lambda source: os.truncate(source / name, size)


def rename_input(source):
    spec = spec_of(source)
    for op in main_block(spec).operations:
        if op.type == "relu":
            op.inputs["x"].arguments[0].name = "nowhere"
    write_spec(source, spec)


def bad_inline(source):
    spec = spec_of(source)
    for op in main_block(spec).operations:
        if op.type == "const" and op.attributes["val"].immediateValue.tensor.ints.values:
            op.attributes["val"].immediateValue.tensor.ints.values.append(7)
    write_spec(source, spec)


def unname_function(source):
    """A function without a name was taken for a new one: the package was saved without it, and without its weights."""
    spec = spec_of(source)
    spec.mlProgram.functions[""].CopyFrom(spec.mlProgram.functions["main"])
    del spec.mlProgram.functions["main"]
    write_spec(source, spec)


def describe(change):
    def damage(source):
        spec = spec_of(source)
        change(spec.description)
        write_spec(source, spec)

    return damage


def other_opset(source):
    spec = spec_of(source)
    spec.mlProgram.functions["main"].opset = "CoreML99"
    write_spec(source, spec)


def item_is_a_link(source):
    shutil.move(source / MODEL, source.parent / "elsewhere.mlmodel")
    os.symlink(source.parent / "elsewhere.mlmodel", source / MODEL)


def link_to_nothing(source):
    shutil.rmtree(source)
    source.symlink_to("elsewhere.mlpackage")


BROKEN = {
    "gone": (shutil.rmtree, "no such file or folder"),
    "a link to nothing": (link_to_nothing, "is a link to elsewhere.mlpackage, which does not exist"),
    "no manifest": (lambda s: (s / "Manifest.json").unlink(), "not a package, it has no Manifest.json"),
    "compiled inside": (
        lambda s: ((s / "Manifest.json").unlink(), (s / "coremldata.bin").touch()),
        "it looks like a compiled model",
    ),
    "not json": (lambda s: (s / "Manifest.json").write_text("{"), "cannot be read as JSON"),
    "no root": (lambda s: with_manifest(s, lambda m: m.pop("rootModelIdentifier")), "no model is found"),
    "unknown root": (
        lambda s: with_manifest(s, lambda m: m.update(rootModelIdentifier="X")),
        "names 'X' as the root model",
    ),
    "no path": (lambda s: with_manifest(s, set_paths("")), "has no path"),
    "path up": (lambda s: with_manifest(s, set_paths("../../x")), "expected a path inside the package"),
    "path absolute": (lambda s: with_manifest(s, set_paths("/etc/passwd")), "expected a path inside the package"),
    "path linked": (item_is_a_link, "outside the package"),
    "no model": (lambda s: (s / MODEL).unlink(), "the model file .* is missing"),
    "model cut": (truncate(MODEL, 700), "not a Core ML model"),
    "neural network": (set_kind("neuralNetwork"), "is a NeuralNetwork .*convert it first with `mil-ane"),
    "classifier network": (set_kind("neuralNetworkClassifier"), "is a NeuralNetwork .*convert it first with `mil-ane"),
    "pipeline": (set_kind("pipeline"), "is a pipeline .pipeline. without an ML Program: it has no parts"),
    "other": (set_kind("normalizer"), "of type normalizer"),
    "opset": (other_opset, r"function 'main' is for opset 'CoreML99' but has blocks for 'CoreML\d'; expected one"),
    "function without a name": (unname_function, "a function of the program has no name; expected one, such as 'main'"),
    "output not described": (
        describe(lambda d: d.ClearField("output")), "'main': the model's description lacks the output '.*', which the "
        "function has; expected the same names in both"),
    "output of another name": (
        describe(lambda d: setattr(d.output[0], "name", "z")), "description lists the output 'z', which the function "
        "does not have"),
    "input not described": (describe(lambda d: d.ClearField("input")), "description lacks the input '.*'"),
    "an output too many": (describe(lambda d: d.output.add(name="w")), "description lists the output 'w'"),
    "an input too many": (describe(lambda d: d.input.add(name="w")), "description lists the input 'w'"),
    "unknown name": (rename_input, "refer to 'nowhere'"),
    "inline": (bad_inline, r"const .* inline value of \d elements; expected \d of int32"),
    "weights gone": (lambda s: (s / WEIGHTS).unlink(), "const '.*weight file .* is missing"),
    "weights empty": (truncate(WEIGHTS, 3), "3 bytes; expected a header of 64"),
    "weights cut": (truncate(WEIGHTS, 600), r"const '.*offset \d+: .*(bytes at byte 128 expected|past the end)"),
    "version": (lambda s: (s / WEIGHTS).write_bytes(struct.pack("<II56x", 1, 1) * 40), "storage version 1; expected 2"),
    "sentinel": (patch_blob(0, b"\0"), r"const '.*offset \d+: found sentinel 0xdeadbe00; expected 0xdeadbeef"),
    "dtype": (patch_blob(4, b"\x03"), "the blob has elements of uint8; expected fp32 as declared"),
    "dtype unknown": (patch_blob(4, b"\x63"), "the blob has elements of dtype 99; expected fp32"),
    "size": (patch_blob(8, struct.pack("<Q", 8)), r"has 8 bytes; expected \d+ \(\d+ elements of fp32"),
    "data offset": (patch_blob(16, struct.pack("<Q", 1 << 40)), "expected, but the file has"),
    "offset": (set_blob(offset=1 << 30), "past the end"),
    "file name": (set_blob(fileName="@model_path/../../x.bin"), "expected @model_path/<path inside the package>"),
    "file name free": (set_blob(fileName="weight.bin"), "expected @model_path/<path inside the package>"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_packages_are_refused(source, case):
    damage, message = BROKEN[case]
    damage(source)
    with pytest.raises(InputError, match=message) as caught:
        load(source)
    assert str(caught.value).startswith(str(source)), "says which package"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.mlmodel",
         "single-file .mlmodel.*: if it is a NeuralNetwork, convert it first "
         "with `mil-ane-passes upgrade .*x.mlmodel -o OUT.mlpackage`"),
        ("x.mlmodelc", "use the .mlpackage"),
        ("x.mil", "use the .mlpackage"),
        ("x.bin", "a file, not a package"),
    ],
)
def test_other_files_are_refused(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=message):
        load(tmp_path / name)


def test_mlmodel_without_a_package_is_refused():
    with pytest.raises(InputError, match=r"no package on disk.*save it as .mlpackage"):
        package_of_mlmodel(object())


def test_weights_that_may_not_be_read_are_not_called_missing(source, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mil_ane_passes.package.blobs.FileIO", refuse)  # root may read everything
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\); check its permissions") as found:
        load(source)
    assert "missing" not in str(found.value) and "damaged" not in str(found.value)


def test_a_model_behind_a_closed_folder_is_not_called_missing(source, monkeypatch):
    look = Path.stat

    def refuse(path, **options):
        if path.suffix == ".mlmodel":
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)  # root may enter every folder
    with pytest.raises(InputError, match=r"cannot be read \(Permission denied\); check the permissions of its folders"):
        load(source)


@pytest.mark.parametrize("version", [None, 1, {}, "../x", "", "x" * 1000])
def test_a_version_of_the_format_that_nothing_opens_is_named(tmp_path, version):
    source = make(tmp_path / "source.mlpackage", conv_program())
    manifest = json.loads((source / "Manifest.json").read_text())
    (source / "Manifest.json").write_text(json.dumps({**manifest, "fileFormatVersion": version}))
    with pytest.raises(InputError, match="fileFormatVersion .{0,42}, which neither .* expected one such as '1.0.0'"):
        load(source)
