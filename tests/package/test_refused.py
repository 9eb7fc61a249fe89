"""What cannot be loaded or saved is refused with a message that says who, what, and what to do; nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.core.errors import InputError, RuleError
from mil_ane_passes.package import check_destination, load, package_of_mlmodel, save, write

from .helpers import (
    MODEL,
    WEIGHTS,
    conv_program,
    main_block,
    make,
    normal,
    op_named,
    replace,
    spec_of,
    tree,
    write_spec,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make(tmp_path_factory.mktemp("built") / "source.mlpackage", conv_program())


@pytest.fixture
def source(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "in" / "source.mlpackage"))


def edited(source):
    package = load(source)
    relu = op_named(package.program, "relu")
    replace(relu, lambda: mb.add(x=relu.x, y=normal(1, 16, 16, 16)), name="relu")
    return package


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


def item_is_a_link(source):
    shutil.move(source / MODEL, source.parent / "elsewhere.mlmodel")
    os.symlink(source.parent / "elsewhere.mlmodel", source / MODEL)


BROKEN = {
    "gone": (shutil.rmtree, "no such file or folder"),
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
    "model cut": (truncate(MODEL, 700), "no Core ML model"),
    "neural network": (set_kind("neuralNetwork"), "is a NeuralNetwork .*convert the source model"),
    "classifier network": (set_kind("neuralNetworkClassifier"), "is a NeuralNetwork .*convert the source model"),
    "pipeline": (set_kind("pipeline"), "is a pipeline .*not rewritten yet"),
    "other": (set_kind("normalizer"), "of type normalizer"),
    "unknown name": (rename_input, "refer to 'nowhere'"),
    "inline": (bad_inline, r"const .* inline value of \d elements; expected \d of int32"),
    "weights gone": (lambda s: (s / WEIGHTS).unlink(), "const '.*weight file .* is missing"),
    "weights empty": (truncate(WEIGHTS, 3), "3 bytes; expected a header of 64"),
    "weights cut": (truncate(WEIGHTS, 600), r"const '.*offset \d+: .*(bytes from|past the end)"),
    "version": (lambda s: (s / WEIGHTS).write_bytes(struct.pack("<II56x", 1, 1) * 40), "storage version 1; expected 2"),
    "sentinel": (patch_blob(0, b"\0"), r"const '.*offset \d+: found sentinel 0xdeadbe00; expected 0xdeadbeef"),
    "dtype": (patch_blob(4, b"\x03"), "holds uint8; expected fp32 as declared"),
    "dtype unknown": (patch_blob(4, b"\x63"), "holds dtype 99; expected fp32"),
    "size": (patch_blob(8, struct.pack("<Q", 8)), r"has 8 bytes; expected \d+ \(\d+ elements of fp32"),
    "data offset": (patch_blob(16, struct.pack("<Q", 1 << 40)), "expected, the file has"),
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
        ("x.mlmodel", "single-file .mlmodel.*convert the source model"),
        ("x.mlmodelc", "use the .mlpackage"),
        ("x.mil", "use the .mlpackage"),
        ("x.bin", "not a package but a file"),
    ],
)
def test_other_files_are_refused(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=message):
        load(tmp_path / name)


def test_mlmodel_without_a_package_is_refused():
    with pytest.raises(InputError, match="no package on disk.*save it as .mlpackage"):
        package_of_mlmodel(object())


def snapshot(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_existing_path_needs_overwrite(source, tmp_path):
    target = tmp_path / "saved.mlpackage"
    target.mkdir()
    (target / "Manifest.json").write_text("{}")
    (target / "old").write_text("old")
    package = edited(source)
    with pytest.raises(InputError, match="exists already.*overwrite"):
        save(package, target)
    assert (target / "old").exists()
    save(package, target, overwrite=True)
    assert not (target / "old").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "saved.mlpackage"]
    load(target)


def test_a_file_is_no_package_and_stays(source, tmp_path):
    (tmp_path / "saved.mlpackage").write_text("a file")
    with pytest.raises(InputError, match=r"exists and is no package .*: move it away"):
        save(edited(source), tmp_path / "saved.mlpackage", overwrite=True)
    assert (tmp_path / "saved.mlpackage").read_text() == "a file"


@pytest.mark.parametrize("where", ["source.mlpackage", "source.mlpackage/Data/x.mlpackage", "."])
def test_source_is_never_the_target(source, where):
    before = tree(source)
    with pytest.raises(InputError, match="the source is never changed"):
        save(edited(source), source.parent / where, overwrite=True)
    with pytest.raises(InputError, match="the source is never changed"):
        check_destination(source, source.parent / where, True)
    assert tree(source) == before


def test_source_through_a_link_is_never_the_target(source, tmp_path):
    os.symlink(source.parent, tmp_path / "link")
    os.symlink(source, tmp_path / "linked.mlpackage")
    before = tree(source)
    for target in (tmp_path / "link" / "source.mlpackage", tmp_path / "linked.mlpackage"):
        with pytest.raises(InputError, match="the source is never changed"):
            save(edited(source), target, overwrite=True)
    package = load(tmp_path / "linked.mlpackage")
    with pytest.raises(InputError, match="the source is never changed"):
        save(package, source, overwrite=True)
    save(package, tmp_path / "copy.mlpackage")
    assert tree(source) == before == tree(tmp_path / "copy.mlpackage")
    assert not (tmp_path / "copy.mlpackage").is_symlink()


def test_missing_folder_is_refused(source, tmp_path):
    with pytest.raises(InputError, match="does not exist; make it first"):
        save(edited(source), tmp_path / "no" / "saved.mlpackage")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_refused(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="cannot be written"):
        save(edited(source), tmp_path / "locked" / "saved.mlpackage")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["copy_file", "sync", "copy_mode", "write_weights", "os.rename"])
def test_failure_leaves_nothing(source, tmp_path, monkeypatch, step, overwrite):
    target = tmp_path / "saved.mlpackage"
    if overwrite:
        target.mkdir()
        (target / "Manifest.json").write_text("{}")
        (target / "old").write_text("old")
    package = edited(source)
    before, everything = tree(source), snapshot(tmp_path)

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    if step == "os.rename":
        real = os.rename

        def rename(a, b):
            new = os.fspath(b) == os.fspath(target) and os.path.basename(a) == target.name
            return full() if new else real(a, b)

        monkeypatch.setattr(os, "rename", rename)
    else:
        monkeypatch.setattr(write, step, full)
    with pytest.raises(InputError, match="cannot be written .No space left on device.; nothing was left"):
        save(package, target, overwrite=overwrite)
    assert snapshot(tmp_path) == everything
    assert tree(source) == before


def test_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    package, everything = edited(source), snapshot(tmp_path)

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "copy_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(package, tmp_path / "saved.mlpackage")
    assert snapshot(tmp_path) == everything


def test_source_changed_on_disk_is_refused(source, tmp_path):
    package = edited(source)
    os.utime(source / WEIGHTS, ns=(1, 1))
    with pytest.raises(InputError, match="changed or removed after it was loaded.*load it again"):
        save(package, tmp_path / "saved.mlpackage")


def test_changed_interface_is_refused(source, tmp_path):
    package = load(source)
    function = package.program.functions["main"]
    function._input_dict["renamed"] = function._input_dict.pop("x")
    assert not package.is_unchanged()
    with pytest.raises(InputError, match="inputs .'renamed'.; expected .'x'."):
        save(package, tmp_path / "a.mlpackage")
    package = load(source)
    package.program.functions["extra"] = package.program.functions["main"]
    with pytest.raises(InputError, match="functions cannot be added or removed"):
        save(package, tmp_path / "a.mlpackage")


def test_read_only_source_saves(source, tmp_path):
    for path in [*source.rglob("*"), source]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    package = edited(source)
    save(package, tmp_path / "saved.mlpackage")
    assert load(tmp_path / "saved.mlpackage").program is not None
    assert (tmp_path / "saved.mlpackage" / WEIGHTS).stat().st_mode & 0o777 == 0o400
    for path in [source, *source.rglob("*")]:
        path.chmod(0o700)


def test_package_without_a_place_for_weights_gets_them_inline(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def program(x):
        return mb.relu(x=x, name="relu")

    source = make(tmp_path / "source.mlpackage", program)
    with_manifest(
        source,
        lambda m: [
            m["itemInfoEntries"].pop(k) for k, v in list(m["itemInfoEntries"].items()) if v["name"] == "weights"
        ],
    )
    shutil.rmtree((source / WEIGHTS).parent, ignore_errors=True)
    package = load(source)
    out = package.program.functions["main"].outputs[0]
    with package.program.functions["main"], mb.set_before_op(out.op):
        extra = mb.add(x=out.op.x, y=normal(50, 4), name="extra")
    out.op.set_inputs(x=extra, no_check_var_types=True)
    save(package, tmp_path / "saved.mlpackage")
    assert not (tmp_path / "saved.mlpackage" / WEIGHTS).exists()
    assert ct.utils.load_spec(str(tmp_path / "saved.mlpackage"))


def test_destination_is_checked_before_the_source_is_known(tmp_path):
    check_destination(tmp_path / "absent.mlpackage", tmp_path / "free.mlpackage", False)


def test_ops_out_of_order_are_refused(source, tmp_path):
    package = load(source)
    relu = op_named(package.program, "relu")
    with package.program.functions["main"]:
        late = mb.add(x=relu.x, y=relu.x, name="late")
    relu.set_inputs(x=late)
    with pytest.raises(RuleError, match="op 'relu' uses 'late', which no op before it makes"):
        save(package, tmp_path / "saved.mlpackage")
    assert os.listdir(tmp_path) == ["in"]
