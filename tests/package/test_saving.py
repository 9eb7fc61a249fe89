"""What cannot be saved is refused with a message that says who, what, and what to do; nothing is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import coremltools as ct
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.commands.edit import edit
from mil_ane_passes.package import check_destination, load, package_writer, save
from mil_ane_passes.package.program_reader import ProgramReader
from mil_ane_passes.utils.errors import AnePassesError, InputError, RuleError

from .helpers import WEIGHTS, make, normal, op_named, replace, tree


def edited(source):
    package = load(source)
    relu = op_named(package.program, "relu")
    replace(relu, lambda: mb.add(x=relu.x, y=normal(1, 16, 16, 16)), name="relu")
    return package


def snapshot(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def share_new_blobs_of_one_size(monkeypatch):
    monkeypatch.setattr("mil_ane_passes.package.weight_plan._compute_digest", lambda value: b"")


def share_blobs_of_equal_starts(monkeypatch):
    monkeypatch.setattr("mil_ane_passes.package.weight_plan.is_equal_to_blob", lambda file, blob, value: True)


def write_another_op(monkeypatch):
    emit = package_writer.Package.emit

    def emit_another(package, **how):
        model, plan = emit(package, **how)
        return model.replace(b"exp", b"cos"), plan

    monkeypatch.setattr(package_writer.Package, "emit", emit_another)


@pytest.mark.parametrize("plant", [None, share_new_blobs_of_one_size, share_blobs_of_equal_starts, write_another_op])
def test_a_verified_package_is_read_again_before_it_appears(plant, tmp_path, monkeypatch):
    """Faults of the writer are not seen in the program in memory, which is what a check compares."""
    weight = normal(64, 64)

    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS17)
    def program(x):
        first, other = mb.exp(x=x, name="first"), mb.sin(x=x, name="other")
        return mb.linear(x=mb.sub(x=first, y=other), weight=weight, name="out")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    package = load(source)
    linear, = package.program.functions["main"].find_ops(op_type="linear")
    changed = weight.copy()
    changed[-1] += 1  # the start is that of the weight in the file
    replace(linear, lambda: mb.add(x=mb.linear(x=linear.x, weight=changed), y=mb.linear(x=linear.x, weight=2 * weight)),
            name="out")
    if plant is not None:
        plant(monkeypatch)
        with pytest.raises(AnePassesError, match="not written, as its program would differ from the one in memory, in "
                                                 "function 'main', at '.*'; .*please report"):
            save(package, tmp_path / "out.mlpackage", read_back=True)
        assert snapshot(tmp_path) == snapshot(source.parent) and not (tmp_path / "out.mlpackage").exists()
        return
    save(package, tmp_path / "out.mlpackage", read_back=True)
    assert load(tmp_path / "out.mlpackage").functions == ("main",)


def test_existing_path_needs_overwrite(source, tmp_path):
    target = tmp_path / "saved.mlpackage"
    target.mkdir()
    (target / "Manifest.json").write_text("{}")
    (target / "old").write_text("old")
    package = edited(source)
    with pytest.raises(InputError, match=r"exists already.*overwrite"):
        save(package, target)
    assert (target / "old").exists()
    save(package, target, overwrite=True)
    assert not (target / "old").exists()
    assert sorted(os.listdir(tmp_path)) == ["in", "saved.mlpackage"]
    load(target)


def test_a_file_is_no_package_and_stays(source, tmp_path):
    (tmp_path / "saved.mlpackage").write_text("a file")
    with pytest.raises(InputError, match=r"exists and is not a package .*: move it away"):
        save(edited(source), tmp_path / "saved.mlpackage", overwrite=True)
    assert (tmp_path / "saved.mlpackage").read_text() == "a file"


@pytest.mark.parametrize("where", ["source.mlpackage", "source.mlpackage/Data/x.mlpackage", "."])
def test_source_is_never_the_target(source, where):
    before = tree(source)
    with pytest.raises(InputError, match="the source is never modified"):
        save(edited(source), source.parent / where, overwrite=True)
    with pytest.raises(InputError, match="the source is never modified"):
        check_destination(source, source.parent / where, True)
    assert tree(source) == before


def test_source_through_a_link_is_never_the_target(source, tmp_path):
    os.symlink(source.parent, tmp_path / "link")
    os.symlink(source, tmp_path / "linked.mlpackage")
    before = tree(source)
    for target in (tmp_path / "link" / "source.mlpackage", tmp_path / "linked.mlpackage"):
        with pytest.raises(InputError, match="the source is never modified"):
            save(edited(source), target, overwrite=True)
    package = load(tmp_path / "linked.mlpackage")
    with pytest.raises(InputError, match="the source is never modified"):
        save(package, source, overwrite=True)
    save(package, tmp_path / "copy.mlpackage")
    assert tree(source) == before == tree(tmp_path / "copy.mlpackage")
    assert not (tmp_path / "copy.mlpackage").is_symlink()


def test_link_is_not_overwritten_and_called_what_it_is(source, tmp_path):
    other = Path(shutil.copytree(source, tmp_path / "other.mlpackage"))
    link = tmp_path / "link.mlpackage"
    os.symlink(other, link)
    before = tree(other)
    with pytest.raises(InputError, match=r"is a link to .*, and links are not overwritten"):
        save(edited(source), link, overwrite=True)
    assert link.is_symlink() and tree(other) == before


def test_missing_folder_is_refused(source, tmp_path):
    with pytest.raises(InputError, match="does not exist; create it first"):
        save(edited(source), tmp_path / "no" / "saved.mlpackage")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder_is_refused(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="cannot be written"):
        save(edited(source), tmp_path / "locked" / "saved.mlpackage")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["copy_file", "sync_path", "copy_mode", "write_weights", "move_to_free_path"])
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

    monkeypatch.setattr(package_writer, "exchange_paths" if step == "move_to_free_path" and overwrite else step, full)
    stays = "existing files are unchanged" if overwrite else "nothing was written there"
    with pytest.raises(InputError, match=rf"cannot be written \(No space left on device\); {stays}: free some space"):
        save(package, target, overwrite=overwrite)
    assert snapshot(tmp_path) == everything
    assert tree(source) == before


def test_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    package, everything = edited(source), snapshot(tmp_path)

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(package_writer, "copy_mode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(package, tmp_path / "saved.mlpackage")
    assert snapshot(tmp_path) == everything


def test_source_changed_on_disk_is_refused(source, tmp_path):
    package = edited(source)
    os.utime(source / WEIGHTS, ns=(1, 1))
    with pytest.raises(InputError, match=r"modified or removed after it was loaded.*load the package again"):
        save(package, tmp_path / "saved.mlpackage")


def test_an_edit_of_a_package_that_was_deleted_is_refused_by_its_name(source, tmp_path):
    package = load(source)
    name = package.program.functions["main"].outputs[0].op.inputs["x"].name
    shutil.rmtree(source)
    with pytest.raises(InputError, match="was modified or removed after it was loaded") as refused:
        edit(package, tmp_path / "out.mlpackage", expose=[name])
    assert str(refused.value).startswith(str(source)) and not (tmp_path / "out.mlpackage").exists()


def test_changed_interface_is_refused(source, tmp_path):
    package = load(source)
    function = package.program.functions["main"]
    function._input_dict["renamed"] = function._input_dict.pop("x")
    assert not package.is_unchanged()
    with pytest.raises(InputError, match=r"inputs .'renamed'.; expected .'x'."):
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
    manifest = json.loads((source / "Manifest.json").read_text())
    items = manifest["itemInfoEntries"]
    manifest["itemInfoEntries"] = {key: item for key, item in items.items() if item["name"] != "weights"}
    (source / "Manifest.json").write_text(json.dumps(manifest))
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
    with pytest.raises(RuleError, match="op 'relu' uses 'late', which no earlier op defines"):
        save(package, tmp_path / "saved.mlpackage")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("call", ["copy_file_range", "lseek"])
def test_a_file_system_that_can_do_little_gets_the_same_bytes(source, tmp_path, monkeypatch, call):
    """One that does not copy by itself, one that does not tell where a file has no data."""
    def refused(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    sparse = source / "Data" / "com.apple.CoreML" / "sparse.bin"
    with open(sparse, "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    monkeypatch.setattr("mil_ane_passes.package.files.clone_file", lambda src, dst: False)
    if hasattr(os, call):
        monkeypatch.setattr(os, call, refused)
    save(load(source), tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)


def test_a_disk_that_does_not_confirm_is_told_of_and_the_package_is_there(source, tmp_path, monkeypatch):
    whole = package_writer.sync_path

    def failing(path):
        if path == tmp_path:
            raise error
        whole(path)

    monkeypatch.setattr(package_writer, "sync_path", failing)
    error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(InputError, match=r"saved.mlpackage: written, but the disk did not confirm it \(Input/output"):
        save(load(source), tmp_path / "saved.mlpackage")
    assert tree(tmp_path / "saved.mlpackage") == tree(source)
    error = PermissionError(errno.EACCES, "Permission denied")  # a folder that may not be opened for reading
    save(load(source), tmp_path / "other.mlpackage")
    assert tree(tmp_path / "other.mlpackage") == tree(source)


def overwrite_weights(source):
    """Overwrite the last bytes of the weight file, which keeps its size."""
    with open(source / WEIGHTS, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    os.utime(source / WEIGHTS, ns=(5, 5))  # the clock of a file system may still show the time before


def put_another_in_place(source):
    """Put another package, of equal bytes, in the place of the source."""
    shutil.copytree(source, source.with_name("other"))
    source.rename(source.with_name("old"))
    source.with_name("other").rename(source)


def test_a_source_that_is_replaced_while_it_is_loaded_is_refused(source, monkeypatch):
    """The model file is read before the weights are opened, so that the two could be those of two packages."""
    read = ProgramReader.read_program

    def replace_and_read(reader, *args):
        put_another_in_place(source)
        return read(reader, *args)

    monkeypatch.setattr(ProgramReader, "read_program", replace_and_read)
    fault = r"model.mlmodel was modified or removed after it was loaded.*load the package again"
    with pytest.raises(InputError, match=fault):
        load(source)


@pytest.mark.parametrize("change", [overwrite_weights, put_another_in_place, shutil.rmtree])
@pytest.mark.parametrize("command", ["save", "edit", "split"])
def test_a_source_that_changes_while_it_is_copied_is_refused(source, tmp_path, monkeypatch, change, command):
    """What is copied before the change and what is copied after it are not one package."""
    fill, changes, target = package_writer._fill_staged_folder, iter([change]), tmp_path / "saved.mlpackage"

    def fill_and_change(*args):
        fill(*args)
        next(changes, lambda _: None)(source)

    calls = {
        "save": lambda: save(edited(source), target),
        "edit": lambda: edit(source, target, rename={"x": "pixels"}),
        "split": lambda: edit(source, target, split_at="relu"),
    }
    monkeypatch.setattr(package_writer, "_fill_staged_folder", fill_and_change)
    with pytest.raises(InputError, match="was modified or removed after it was loaded|No such file or directory"):
        calls[command]()
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
