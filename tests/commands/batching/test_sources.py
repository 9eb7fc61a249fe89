"""Which packages are meant, and what their results are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from coremltools.converters.mil.mil import Program

from mil_ane_passes import InputError
from mil_ane_passes.commands.batch_sources import find_sources


def make(top: Path, *names: str) -> None:
    for name in names:
        (top / name / "Data").mkdir(parents=True)
        (top / name / "Manifest.json").write_text("{}")


def names(given, folder=None) -> list[str]:
    return [source.name for source in find_sources(given, folder)]


def test_a_folder_is_searched_but_no_package_nothing_hidden_and_not_the_results(tmp_path):
    make(tmp_path, "b.mlpackage", "a/m.mlpackage", "a/x.mlpackage/Data/inner.mlpackage", ".hidden/h.mlpackage",
         "out/o.mlpackage", "plain")
    assert names([tmp_path], tmp_path / "out") == ["b", "plain", "a/m", "a/x"]
    assert names([tmp_path / "a", tmp_path / "b.mlpackage"]) == ["m", "x", "b"]


def test_a_package_is_taken_once_in_the_order_given(tmp_path, monkeypatch):
    make(tmp_path, "b.mlpackage", "a.mlpackage")
    (tmp_path / "link.mlpackage").symlink_to(tmp_path / "a.mlpackage")
    monkeypatch.chdir(tmp_path)
    assert names(["b.mlpackage/", "link.mlpackage", ".", tmp_path / "b.mlpackage"]) == ["b", "link"]
    assert names("a.mlpackage") == ["a"]
    monkeypatch.chdir(tmp_path / "a.mlpackage")
    assert names(["."]) == ["a"]


def test_a_link_in_a_folder_does_not_replace_the_package_beside_it(tmp_path):
    make(tmp_path, "v3.mlpackage", "sub/v1.mlpackage")
    (tmp_path / "latest.mlpackage").symlink_to("v3.mlpackage")
    make(tmp_path, ".hidden/other.mlpackage")
    (tmp_path / "sub" / "elsewhere.mlpackage").symlink_to(tmp_path / ".hidden" / "other.mlpackage")
    assert names([tmp_path]) == ["v3", "sub/elsewhere", "sub/v1"]
    assert names([f"{tmp_path}/*.mlpackage"]) == ["v3"]
    assert names([tmp_path / "latest.mlpackage"]) == ["latest"]


def test_what_is_named_as_a_package_and_is_none_is_found_and_fails(tmp_path):
    make(tmp_path, "a.mlpackage")
    (tmp_path / "gone.mlpackage").symlink_to("nowhere.mlpackage")
    (tmp_path / "text.mlpackage").write_text("version https://git-lfs.github.com/spec/v1")
    assert names([tmp_path]) == ["a", "gone", "text"]


def test_patterns_that_no_shell_expanded(tmp_path):
    make(tmp_path, "m1.mlpackage", "m2.mlpackage", "deep/er/m3.mlpackage", "odd[1].mlpackage")
    assert names([f"{tmp_path}/m?.mlpackage", f"{tmp_path}/**/m3.mlpackage"]) == ["m1", "m2", "m3"]
    assert names([f"{tmp_path}/odd[1].mlpackage"]) == ["odd[1]"]


def test_two_stars_go_where_a_search_goes(tmp_path, monkeypatch):
    """Not round and round through links, not into packages or hidden folders, and not to the results."""
    make(tmp_path, "a/x/m.mlpackage", "a/n.mlpackage", "a/n.mlpackage/Data/i.mlpackage", "a/.h/h.mlpackage",
         "out/o.mlpackage", "a/y[1]/deep/p.mlpackage")
    for name in ("one", "two", "three"):
        (tmp_path / "a" / name).symlink_to(tmp_path)
    found = ["m", "n", "p"]
    assert sorted(names([f"{tmp_path}/**/*.mlpackage"], tmp_path / "out")) == found
    assert sorted(names([f"{tmp_path}/**/deep/**/*.mlpackage"])) == ["p"]
    assert sorted(names([f"{tmp_path}/a/**"])) == ["n", "x/m", "y[1]/deep/p"]
    monkeypatch.chdir(tmp_path)
    assert sorted(names(["**/?.mlpackage"], tmp_path / "out")) == found
    assert names(["a/**/x/*.mlpackage"]) == ["m"]


def test_what_is_not_there_is_said_for_it_alone(tmp_path):
    make(tmp_path, "a.mlpackage")
    (tmp_path / "empty").mkdir()
    missing, nothing, pattern, found = find_sources(
        [tmp_path / "no.mlpackage", tmp_path / "empty", f"{tmp_path}/*.nothing", tmp_path / "a.mlpackage"], None)
    assert (missing.name, missing.error) == ("no", "") and found.error == ""
    assert "no .mlpackage or .mlmodel found" in nothing.error and "no path matches" in pattern.error


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    make(tmp_path, "a.mlpackage", "locked/b.mlpackage")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    package, locked = find_sources([tmp_path], None)
    assert package.name == "a" and locked.error == f"{tmp_path}/locked: cannot be searched (Permission denied)"


@pytest.mark.parametrize(("one", "other"), [("x/m.mlpackage", "y/m.mlpackage"), ("x/m.mlpackage", "y/M.mlpackage"),
                                            ("x/\u00e9.mlpackage", "y/e\u0301.mlpackage")])
def test_two_results_of_one_name_are_refused_with_both(one, other, tmp_path):
    make(tmp_path, one, other)
    with pytest.raises(InputError, match="would both become") as refused:
        find_sources([tmp_path / one, tmp_path / other], None)
    assert one in str(refused.value) and other in str(refused.value)
    assert len(names([tmp_path])) == 2


def test_a_network_beside_its_package_is_not_advised_to_pass_their_folder(tmp_path):
    make(tmp_path, "m.mlpackage")
    (tmp_path / "m.mlmodel").touch()
    with pytest.raises(InputError, match="different names: pass one of them, or run batch twice"):
        find_sources([tmp_path], None)


@pytest.mark.parametrize("given", [[], [" "], ""])
def test_nothing_given(given):
    with pytest.raises(InputError, match="no packages given"):
        find_sources(given, None)


@pytest.mark.parametrize("given", [Program(), 3, None, [None], ["a.mlpackage", 3]])
def test_what_is_no_path_is_named(given):
    with pytest.raises(InputError, match="found (Program|int|NoneType) among the packages; expected paths"):
        find_sources(given, None)
