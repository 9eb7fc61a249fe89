"""The wheel holds the package and nothing else, the source distribution all that its tests need; both install."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from mil_ane_passes import __version__
from tests.packaging.conftest import ROOT, built, commands, copied, installed, need_setuptools, run

NAME = "mil_ane_passes"
NO_TORCH = 'import sys\nsys.modules["torch"] = None\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    need_setuptools()
    return tmp_path_factory.mktemp("distributions")


@pytest.fixture(scope="module")
def sdist(folder) -> Path:
    (folder / "copy").mkdir()
    return built("sdist", copied(folder / "copy"), folder)


@pytest.fixture(scope="module")
def unpacked(sdist, folder) -> Path:
    shutil.unpack_archive(sdist, folder / "unpacked")
    return folder / "unpacked" / f"{NAME}-{__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked, folder) -> Path:
    """Built as an index's user would: from the source distribution."""
    return built("wheel", unpacked, folder)


@pytest.fixture(scope="module")
def metadata(wheel) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_string(archive.read(f"{NAME}-{__version__}.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def site(wheel, folder) -> Path:
    """The wheel where there is no torch and no repository."""
    target = installed(wheel, folder / "site")
    (target / "sitecustomize.py").write_text(NO_TORCH)
    return target


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def sources(names: Iterable[str]) -> set[str]:
    """Without what comes of running tools."""
    return {name for name in names if not {"__pycache__"} & set(name.split("/"))}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"{NAME}-{__version__}.dist-info/"
    inside = {f"{NAME}/{name}" for name in sources(files_below(ROOT / NAME))}
    assert {name for name in names if not name.startswith(info)} == inside
    assert {f"{NAME}/py.typed", f"{NAME}/report/html/page.html", f"{NAME}/report/html/app/main.js"} <= names
    assert {f"{info}{name}" for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")} <= names


def test_the_source_distribution_is_what_is_kept_under_version_control(sdist):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout: there is nothing to compare with")
    asked = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    kept = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {name for name in kept if (ROOT / name).is_file()} - {".gitignore"}
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if not name.startswith(f"{NAME}.egg-info/")} - {"PKG-INFO"} == wanted


def test_what_tools_leave_behind_is_not_in_the_source_distribution(tmp_path):
    from tests.packaging.sources import extra_sources

    for name in ("tests/a.py", "tests/__pycache__/a.pyc", "tests/x.egg-info/PKG-INFO", "tests/p/build/lib/a.py",
                 "tests/.pytest_cache/v", "fixtures/m.mlpackage/Manifest.json", ".ci/run", "notes/a.txt", "README.md",
                 ".github/actions/a.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert extra_sources(tmp_path) == [".ci/run", ".github/actions/a.yml", "README.md",
                                       "fixtures/m.mlpackage/Manifest.json", "tests/a.py"]


def test_the_metadata_is_whole(metadata):
    assert (metadata["Name"], metadata["Version"]) == (NAME, __version__)
    assert metadata["License-Expression"] == "MIT" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10" and metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert set(metadata.get_all("Provides-Extra")) == {"dask", "executorch", "report", "test", "verify"}
    classifiers = metadata.get_all("Classifier")
    assert {"Typing :: Typed", "Programming Language :: Python :: 3 :: Only"} <= set(classifiers)
    assert not [each for each in classifiers if each.startswith("License ::")]  # the expression says it


def test_the_base_asks_for_no_torch(metadata):
    requires = metadata.get_all("Requires-Dist")
    base = {each.split(">")[0] for each in requires if "extra ==" not in each}
    assert base == {"coremltools", "numpy", "protobuf", "tomli"}
    assert [each for each in requires if "torch" in each and 'extra == "verify"' in each]


@pytest.mark.slow
def test_the_command_is_installed_and_reads_the_wheel(site, tmp_path):
    said = run(site / "bin" / "mil-ane-passes", "--version", cwd=tmp_path, path=site)
    assert said == f"mil-ane-passes {__version__}\n"
    where = run(sys.executable, "-c", f"import {NAME}; print({NAME}.__file__)", cwd=tmp_path, path=site)
    assert Path(where.strip()).is_relative_to(site)


@pytest.mark.slow
def test_without_torch_all_but_the_proof_works(site, tmp_path, fixtures):
    shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage")
    works = [
        (["passes"], 0, "ANE301  ane::lift_conv_transpose_1d"),
        (["explain", "ANE301"], 0, "pass: ane::lift_conv_transpose_1d"),
        (["lint", "in.mlpackage"], 1, "ANE301"),
        (["lint", "in.mlpackage", "--format", "html"], 1, "<!DOCTYPE html>"),
        (["lint", "in.mlpackage", "--format", "sarif"], 1, '"version": "2.1.0"'),
        (["edit", "in.mlpackage", "-o", "edited.mlpackage", "--dedup-weights"], 0, ""),
        (["rewrite", "in.mlpackage", "-o", "out.mlpackage", "--no-verify"], 0, "ane::lift_conv_transpose_1d"),
        (["batch", "lint", "in.mlpackage", "-o", "reports"], 1, "findings"),
        (["batch", "rewrite", "in.mlpackage", "-o", "rewritten", "--no-verify"], 0, "written"),
    ]
    found = commands([line for line, _, _ in works], tmp_path, site)
    for (line, code, says), done in zip(works, found):
        assert done.code == code and says in done.out, (line, done)
    for name in ("edited.mlpackage", "out.mlpackage", "rewritten/in.mlpackage"):
        assert (tmp_path / name / "Manifest.json").is_file()


@pytest.mark.slow
def test_without_torch_the_proof_says_what_to_install(site, tmp_path, fixtures):
    shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage")
    shutil.copy(fixtures / "conv_transpose_1d.npz", tmp_path / "feeds.npz")
    lines = [
        ["rewrite", "in.mlpackage", "-o", "out.mlpackage"], ["verify", "in.mlpackage", "in.mlpackage"],
        ["run", "in.mlpackage", "--feeds", "feeds.npz", "-o", "out.npz"], ["patches"],
        ["calibrate", "in.mlpackage", "--feeds", "feeds.npz"], ["mac-script", "mac", "in.mlpackage"],
    ]
    for line, done in zip(lines, commands(lines, tmp_path, site)):
        assert done.code == 2 and "[verify]'" in done.err and "Traceback" not in done.err, (line, done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done.json", "feeds.npz", "in.mlpackage"]


@pytest.mark.slow
def test_pip_brings_what_the_wheel_needs(wheel, tmp_path, fixtures):
    """In an environment of its own, from the index that pip is set to."""
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    listed = run(python, "-m", "pip", "list", "--format", "freeze", cwd=tmp_path)
    assert "coremltools==" in listed and "torch==" not in listed
    said = run(python.with_name("mil-ane-passes"), "rewrite", fixtures / "conv_transpose_1d.mlpackage", "-o",
               "out.mlpackage", "--no-verify", cwd=tmp_path)
    assert "lift_conv_transpose_1d" in said and (tmp_path / "out.mlpackage").is_dir()


@pytest.mark.slow
def test_the_tests_of_the_source_distribution_are_found_there(unpacked):
    """All that they import and read is there; one file is run."""
    found = run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", "-m", "slow or not slow", cwd=unpacked,
                path=unpacked)
    assert "error" not in found.splitlines()[-1], found[-1500:]
    run(sys.executable, "-m", "pytest", "-q", "-n0", "tests/test_fixtures.py", cwd=unpacked, path=unpacked)
