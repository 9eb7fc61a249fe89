"""Copies begun ahead: of packages only, handed over once, and gone when nobody takes them."""

from __future__ import annotations

import pytest

from mil_ane_passes.package.copy_ahead import CopyAhead

LARGE = 9 << 20


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "in"
    made.mkdir()
    (made / "weights.bin").write_bytes(b"w" * LARGE)
    (made / "small.bin").write_bytes(b"s")
    return made


def test_a_folder_that_is_no_package_is_neither_searched_nor_copied(folder, tmp_path):
    with CopyAhead(folder, tmp_path / "out.mlpackage") as ahead:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
        assert not ahead.take_copy(folder / "weights.bin", tmp_path / "taken")


def test_a_large_file_is_handed_over_once_and_nothing_stays(folder, tmp_path):
    (folder / "Manifest.json").write_text("{}")
    with CopyAhead(folder, tmp_path / "out.mlpackage") as ahead:
        assert ahead.take_copy(folder / "weights.bin", tmp_path / "taken")
        assert not ahead.take_copy(folder / "weights.bin", tmp_path / "again")
        assert not ahead.take_copy(folder / "small.bin", tmp_path / "small")
    assert (tmp_path / "taken").read_bytes() == b"w" * LARGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "taken"]


def test_what_nobody_takes_is_removed(folder, tmp_path):
    (folder / "Manifest.json").write_text("{}")
    with pytest.raises(RuntimeError), CopyAhead(folder, tmp_path / "out.mlpackage"):
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_file_that_was_changed_since_is_not_handed_over(folder, tmp_path):
    (folder / "Manifest.json").write_text("{}")
    with CopyAhead(folder, tmp_path / "out.mlpackage") as ahead:
        assert ahead._thread is not None
        ahead._thread.join()
        (folder / "weights.bin").write_bytes(b"v" * LARGE)
        assert not ahead.take_copy(folder / "weights.bin", tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
