"""Staging folders, the swap at the end, clones and links: each also where the system does not help."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mil_ane_passes.package import CopyAhead, contents, file_clone, files, load, package_writer, save, staging, swap
from mil_ane_passes.package.staging import REPLACED, Staging
from mil_ane_passes.utils.errors import InputError
from tests.without_torch import hide_torch

from .helpers import WEIGHTS, tree

HOLD = """
import sys, time
from pathlib import Path
from mil_ane_passes.package.staging import Staging
held = Staging(Path(sys.argv[1]))
(held.folder / "new").mkdir()
print(held.folder, flush=True)
sys.stdin.read()
"""


def holding(target: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that stages something for `target`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True, env=hide_torch())
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_run_still_alive_stages_stays_and_what_a_killed_one_left_goes(tmp_path):
    target = tmp_path / "out.mlpackage"
    process, folder = holding(target)
    with Staging(target):
        assert folder.is_dir()
    process.kill()
    process.communicate()
    assert folder.is_dir()
    other = tmp_path / ".out.mlpackage.abc.tmp"
    other.mkdir()
    with Staging(tmp_path / "other.mlpackage"):
        assert folder.is_dir(), "that of another path is not looked at"
    with Staging(target) as held:
        assert not folder.exists() and held.folder.is_dir()
    assert os.listdir(tmp_path) == [other.name]


def test_threads_of_one_process_do_not_take_each_others_folders(tmp_path):
    with Staging(tmp_path / "out.mlpackage") as one, Staging(tmp_path / "out.mlpackage") as two:
        assert one.folder.is_dir() and two.folder.is_dir() and one.folder != two.folder


@pytest.mark.parametrize("when", ["before the lock is made", "before it is taken"])
def test_a_folder_that_is_not_held_yet_is_made_again(tmp_path, monkeypatch, when):
    target, opened = tmp_path / "out.mlpackage", staging._open_lock

    def slow(folder):
        monkeypatch.setattr(staging, "_open_lock", opened)
        handle = opened(folder) if when == "before it is taken" else None
        staging.remove_stale_stagings(target)  # another run starts in just this moment
        return opened(folder) if handle is None else handle

    monkeypatch.setattr(staging, "_open_lock", slow)
    with Staging(target) as held:
        assert held.folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_without_locks_nothing_of_others_is_removed(tmp_path, monkeypatch):
    def flock(*_args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(staging.fcntl, "flock", flock)
    with Staging(tmp_path / "out.mlpackage") as one:
        with Staging(tmp_path / "out.mlpackage"):
            assert one.folder.is_dir()
        assert one.folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_remove_what_its_parent_stages(tmp_path):
    with Staging(tmp_path / "out.mlpackage") as held:
        process = os.fork()
        if not process:
            staging.close_all_stagings()
            os._exit(0)
        os.waitpid(process, 0)
        assert held.folder.is_dir()
        staging.close_all_stagings()
        assert not held.folder.exists()


def test_what_was_put_aside_comes_back_when_a_run_died_between_two_renames(tmp_path):
    target = tmp_path / "out.mlpackage"
    process, folder = holding(target)
    (folder / REPLACED).mkdir()
    (folder / REPLACED / "old").touch()
    process.kill()
    process.communicate()
    with Staging(target):
        assert os.listdir(target) == ["old"]
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("name", ["n" * 245, "é" * 120, "a'b*[c]?.mlpackage", "-rf .mlpackage"])
def test_names_of_any_kind(source, tmp_path, name):
    target = tmp_path / "to" / (name if name.endswith(".mlpackage") else f"{name}.mlpackage")
    target.parent.mkdir()
    save(load(source), target)
    assert tree(target) == tree(source) and os.listdir(target.parent) == [target.name]


def test_a_name_that_is_too_long_is_refused(source, tmp_path):
    everything = os.listdir(tmp_path)
    with pytest.raises(InputError, match="File name too long"):
        save(load(source), tmp_path / f"{'n' * 250}.mlpackage")
    assert os.listdir(tmp_path) == everything


def no_call(_platform):
    return None


def refusing(_platform):
    def call(_old, _new, _flag):
        ctypes.set_errno(22)
        return -1

    return call


@pytest.mark.parametrize("call", [no_call, refusing])
def test_two_renames_where_the_system_cannot_swap(source, tmp_path, monkeypatch, call):
    monkeypatch.setattr(swap, "_load_rename_call", call)
    target = tmp_path / "out.mlpackage"
    save(load(source), target)
    with pytest.raises(InputError, match="exists already"):
        save(load(source), target)
    (target / "old").touch()
    save(load(source), target, overwrite=True)
    assert tree(target) == tree(source)
    assert sorted(os.listdir(tmp_path)) == ["in", "out.mlpackage"]


@pytest.mark.parametrize("call", [no_call, swap._load_rename_call])
@pytest.mark.parametrize("put", [Path.mkdir, Path.touch])
def test_nothing_is_replaced_where_the_place_must_be_free(tmp_path, monkeypatch, call, put):
    monkeypatch.setattr(swap, "_load_rename_call", call)
    (tmp_path / "new").mkdir()
    put(tmp_path / "there")
    with pytest.raises(FileExistsError):
        swap.move_to_free_path(tmp_path / "new", tmp_path / "there")
    assert sorted(os.listdir(tmp_path)) == ["new", "there"]


def test_the_old_package_comes_back_when_the_second_rename_fails(source, tmp_path, monkeypatch):
    monkeypatch.setattr(swap, "_load_rename_call", no_call)
    target, real = Path(shutil.copytree(source, tmp_path / "out.mlpackage")), os.rename
    (target / "old").touch()
    before = tree(target)

    def rename(old, new):
        if os.path.basename(old) == "new":
            raise OSError(5, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(InputError, match="existing files are unchanged"):
        save(load(source), target, overwrite=True)
    assert tree(target) == before
    assert sorted(os.listdir(tmp_path)) == ["in", "out.mlpackage"]


def test_a_package_that_another_run_puts_there_meanwhile_stays(source, tmp_path, monkeypatch):
    target, real = tmp_path / "out.mlpackage", package_writer.move_to_free_path

    def late(staged, path):
        path.mkdir()
        (path / "theirs").touch()
        real(staged, path)

    monkeypatch.setattr(package_writer, "move_to_free_path", late)
    with pytest.raises(InputError, match="another run has written a package to this path in the meantime"):
        save(load(source), target)
    assert os.listdir(target) == ["theirs"]


def test_an_old_package_that_another_run_removes_meanwhile_is_no_error(source, tmp_path, monkeypatch):
    target, real = Path(shutil.copytree(source, tmp_path / "out.mlpackage")), package_writer.exchange_paths

    def late(staged, path, aside):
        shutil.rmtree(path, ignore_errors=True)
        real(staged, path, aside)

    monkeypatch.setattr(package_writer, "exchange_paths", late)
    save(load(source), target, overwrite=True)
    assert tree(target) == tree(source)


def test_a_clone_of_macos_is_taken_and_what_it_refuses_is_copied(tmp_path, monkeypatch):
    """With a stand-in for clonefile: nobody ran this on a Mac."""
    asked = []

    def clonefile(old, new, flags):
        asked.append((old, new, flags.value))
        if old.endswith(b"refused"):
            return -1
        shutil.copyfile(old, new)
        return 0

    monkeypatch.setattr(file_clone.sys, "platform", "darwin")
    monkeypatch.setattr(file_clone, "_load_clonefile", lambda: clonefile)
    for name in ("taken", "refused"):
        (tmp_path / name).write_bytes(b"data")
        files.copy_file(tmp_path / name, tmp_path / f"{name} copy")
        assert (tmp_path / f"{name} copy").read_bytes() == b"data"
    assert asked[0] == (os.fsencode(tmp_path / "taken"), os.fsencode(tmp_path / "taken copy"), 0)
    with pytest.raises(FileExistsError):
        files.copy_file(tmp_path / "refused", tmp_path / "taken")
    monkeypatch.setattr(file_clone, "_load_clonefile", lambda: None)
    assert not file_clone.clone_file(tmp_path / "taken", tmp_path / "not made")


def test_holes_stay_holes(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"in the midst")
    files.copy_file(tmp_path / "sparse", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size == 64 << 20
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "sparse").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= (tmp_path / "sparse").stat().st_blocks + 16


def test_linked_files_are_shared_and_changed_ones_are_not(source, tmp_path):
    extra = source / "Data" / "extra.bin"
    extra.write_bytes(b"extra")
    extra.chmod(0o640)
    before = {path: path.stat().st_mode for path in source.rglob("*")}
    save(load(source), tmp_path / "out.mlpackage", link=True)
    assert tree(tmp_path / "out.mlpackage") == tree(source)
    assert os.path.samefile(extra, tmp_path / "out.mlpackage" / "Data" / "extra.bin")
    assert os.path.samefile(source / WEIGHTS, tmp_path / "out.mlpackage" / WEIGHTS)
    assert {path: path.stat().st_mode for path in source.rglob("*")} == before
    shutil.rmtree(tmp_path / "out.mlpackage")
    assert extra.read_bytes() == b"extra"


def test_without_links_nothing_is_shared(source, tmp_path, monkeypatch):
    save(load(source), tmp_path / "plain.mlpackage")
    assert not os.path.samefile(source / WEIGHTS, tmp_path / "plain.mlpackage" / WEIGHTS)

    def link(*_args, **_options):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    save(load(source), tmp_path / "linked.mlpackage", link=True)
    assert tree(tmp_path / "linked.mlpackage") == tree(source)
    assert not os.path.samefile(source / WEIGHTS, tmp_path / "linked.mlpackage" / WEIGHTS)


def test_links_inside_a_package_stay_links(source, tmp_path):
    os.symlink("../Manifest.json", source / "Data" / "inside")
    os.symlink("nowhere", source / "Data" / "dangling")
    save(load(source), tmp_path / "out.mlpackage")
    assert os.readlink(tmp_path / "out.mlpackage" / "Data" / "inside") == "../Manifest.json"
    assert os.readlink(tmp_path / "out.mlpackage" / "Data" / "dangling") == "nowhere"


def far_link(path):
    os.symlink("/etc/passwd", path)


def round_link(path):
    os.symlink("../../source.mlpackage/Manifest.json", path)


def listening(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(path))


def deep(path):
    path.joinpath(*["d"] * 70).mkdir(parents=True)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (far_link, "Data/odd is a link to /etc/passwd, outside the package.*cp -rL"),
        (round_link, "Data/odd is a link to .*, outside the package"),
        (os.mkfifo, "Data/odd is a pipe, a device or a socket"),
        (listening, "Data/odd is a pipe, a device or a socket"),
        (deep, "nested more than 64 levels deep"),
    ],
)
def test_what_no_copy_would_hold_is_refused_at_once(source, tmp_path, monkeypatch, put, message):
    package, everything = load(source), os.listdir(tmp_path)
    monkeypatch.chdir(source)  # names of sockets are short
    put(Path("Data/odd"))
    with pytest.raises(InputError, match=message):
        save(package, tmp_path / "out.mlpackage")
    with pytest.raises(InputError, match=message):
        CopyAhead(source, tmp_path / "out.mlpackage")
    with pytest.raises(InputError, match=message):
        contents.list_contents(source)
    assert os.listdir(tmp_path) == everything


def test_names_that_the_other_file_system_does_not_tell_apart_are_named(source, tmp_path, monkeypatch):
    (source / "Data" / "A.bin").touch()
    (source / "Data" / "a.bin").touch()
    real = package_writer.copy_file

    def folded(path, copy):
        real(path, copy.with_name(copy.name.lower()))

    monkeypatch.setattr(package_writer, "copy_file", folded)
    monkeypatch.setattr(package_writer, "copy_mode", lambda *_: None)
    monkeypatch.setattr(package_writer, "sync_path", lambda *_: None)
    with pytest.raises(InputError, match=r"File exists: a\.bin.*two names differ only in a way"):
        save(load(source), tmp_path / "out.mlpackage")


def test_a_folder_removed_meanwhile_is_an_error(source, tmp_path, monkeypatch):
    where, real = tmp_path / "where", package_writer.copy_file
    where.mkdir()

    def removing(path, copy):
        shutil.rmtree(where, ignore_errors=True)
        real(path, copy)

    monkeypatch.setattr(package_writer, "copy_file", removing)
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory.*removed during the run"):
        save(load(source), where / "out.mlpackage")
    assert not where.exists()


def test_a_file_that_changes_while_it_is_copied_is_an_error(source, tmp_path, monkeypatch):
    real, times = files.copy_range, iter(range(100))

    def changing(*args):
        real(*args)
        os.utime(source / WEIGHTS, ns=(now := next(times), now))

    monkeypatch.setattr(files, "copy_range", changing)
    with pytest.raises(InputError, match=r"\(the file was changed while it was copied: weight\.bin\); nothing was"):
        save(load(source), tmp_path / "out.mlpackage")
    assert os.listdir(tmp_path) == ["in"]


def test_what_cannot_be_read_is_not_blamed_on_the_output(source, tmp_path, monkeypatch):
    def unreadable(path, _copy):
        raise OSError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(package_writer, "copy_file", unreadable)
    with pytest.raises(InputError, match=r"\(Permission denied: \S+\); nothing .*: check that it is readable"):
        save(load(source), tmp_path / "out.mlpackage")


@pytest.mark.skipif(sys.platform != "linux", reason="FICLONE is Linux's")
def test_files_are_cloned_where_the_file_system_can(tmp_path, monkeypatch):
    def ioctl(new, request, old):
        assert request == 0x40049409
        os.write(new, os.read(old, 100))

    monkeypatch.setattr(file_clone.fcntl, "ioctl", ioctl)
    (tmp_path / "one").write_bytes(b"data")
    files.copy_file(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == b"data"


def test_where_no_folder_can_be_made_the_target_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        Staging(tmp_path / "gone" / "out")
    assert error.value.filename == str(tmp_path / "gone" / "out")
