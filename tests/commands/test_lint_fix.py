"""`lint --fix`: the passes that fix the findings, verified, to another path or in place with a backup."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.commands import rewrite_steps
from mil_ane_passes.commands.main import main
from mil_ane_passes.equivalence.equivalence import VerifyReport
from mil_ane_passes.package import load, package_writer, replace_source, swap
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.utils.errors import InputError
from tests.conversions import save_program

OPTIONS = ("--target", "m4", "--no-config", "--fix")


@pytest.fixture
def models(made, tmp_path, monkeypatch):
    """The working directory, with models/a.mlpackage (clean) and models/b/c.mlpackage (a finding)."""
    shutil.copytree(made / "clean.mlpackage", tmp_path / "models" / "a.mlpackage")
    shutil.copytree(made / "found.mlpackage", tmp_path / "models" / "b" / "c.mlpackage")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def ran(capsys, *arguments, code):
    given = main(["lint", *map(str, arguments), *OPTIONS])
    printed = capsys.readouterr()
    assert given == code, printed
    return printed.out, printed.err


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kinds(path) -> list[str]:
    return [op.op_type for op in load(path).program.functions["main"].operations if op.op_type != "const"]


def test_in_place_the_source_is_replaced_and_kept(models, capsys):
    package = models / "b" / "c.mlpackage"
    before = content(package)
    out, _ = ran(capsys, package, "--in-place", code=0)
    assert "ane::triangle_cumsum" in out and "equal in " in out
    assert out.splitlines()[-1] == f"the original is kept as {package}.bak"
    assert "cumsum" not in kinds(package) and content(Path(f"{package}.bak")) == before
    assert sorted(os.listdir(package.parent)) == ["c.mlpackage", "c.mlpackage.bak"]
    assert "cumsum" in kinds_of_backup(package)
    out, _ = ran(capsys, package, "--in-place", code=0)
    assert out == f"{package}: no pass fixes a finding\n", "the backup of the first time is not in the way"


def kinds_of_backup(package) -> list[str]:
    other = package.parent / "again.mlpackage"
    shutil.copytree(f"{package}.bak", other)
    return kinds(other)


def test_the_result_is_that_of_the_listed_command(models, capsys):
    source = "models/b/c.mlpackage"
    ran(capsys, source, "-o", "fixed.mlpackage", code=0)
    ane.rewrite(source, "named.mlpackage", passes="triangle_cumsum", target="m4")
    assert kinds("fixed.mlpackage") == kinds("named.mlpackage") and "cumsum" in kinds(source)
    assert not os.path.exists(f"{source}.bak")


def test_several_in_place_as_json_and_text(models, capsys):
    before = content(models / "a.mlpackage")
    data = json.loads(ran(capsys, "models", "--in-place", "--format", "json", code=0)[0])
    assert (data["schema"], data["command"], data["target"]) == (1, "lint --fix", "m4")
    clean, fixed = data["packages"]
    assert (clean["status"], clean["passes"], clean["backup"], clean["rewrite"]) == ("unchanged", [], None, None)
    assert (fixed["status"], fixed["passes"]) == ("written", ["ane::triangle_cumsum"])
    assert fixed["backup"] == "models/b/c.mlpackage.bak" and fixed["rewrite"]["verified"]
    assert content(models / "a.mlpackage") == before
    shutil.rmtree(models / "b" / "c.mlpackage")
    shutil.copytree(models / "b" / "c.mlpackage.bak", models / "b" / "c.mlpackage")
    out, err = ran(capsys, "models", "--in-place", code=2)
    assert "models/b/c.mlpackage.bak: exists already, and a backup is never overwritten" in err
    assert out.splitlines()[-1] == "2 packages: 1 unchanged, 1 failed"


def test_what_is_not_verified_is_not_written(models, capsys, monkeypatch):
    monkeypatch.setattr(rewrite_steps, "_verify", lambda *_, **__: VerifyReport("not verified", reason="no reason"))
    before = content(models)
    out, _ = ran(capsys, "models/b/c.mlpackage", "--in-place", code=1)
    assert "nothing written" in out and content(models) == before


def test_a_pass_that_breaks_the_check_is_left_out_as_one_of_a_preset(
        models, capsys, monkeypatch, leaving_out):
    check = rewrite_steps._verify

    def verify(plan, before, made, **options):
        found = check(plan, before, made, **options)
        return VerifyReport("different", found.exactness, reason="made up") if made.changed else found

    monkeypatch.setattr(rewrite_steps, "_verify", verify)
    before = content(models)
    out, _ = ran(capsys, "models/b/c.mlpackage", "--in-place", code=0)
    assert "left out because it breaks the equivalence check" in out and content(models) == before


def test_the_guard_judges_passes_that_the_user_did_not_name():
    source = build_program(lambda x: mb.cumsum(x=x, axis=1, name="y"), x=(1, 1024, 64))
    judged, named = (ane.rewrite(source, passes="triangle_cumsum", target="m4", named=named, verify=False)
                     for named in (False, True))
    assert named.changed and not named.reverted
    assert [trace.rule for trace in judged.reverted] == ["triangle_cumsum"]


def test_ignored_and_minor_findings_are_not_fixed(models, capsys):
    for options in (["--ignore", "ANE205"], ["--fail-on", "wrong"]):
        out, _ = ran(capsys, "models/b/c.mlpackage", "--in-place", *options, code=0)
        assert out == "models/b/c.mlpackage: no pass fixes a finding\n"


def test_a_second_run_finds_nothing_to_fix_beside_the_backup_of_the_first(models, capsys):
    ran(capsys, "models", "--in-place", code=0)
    before = content(models)
    out, err = ran(capsys, "models", "--in-place", code=0)
    assert out.endswith("2 packages: 2 unchanged\n") and err == "" and content(models) == before


def test_what_runs_only_by_name_is_left_to_the_user(tmp_path, capsys):
    import numpy as np
    from coremltools.converters.mil.mil import types

    def body(x):
        return mb.matmul(x=x, y=np.ones((8, 8), np.float32), name="y")

    save_program(build_program(body, dtype=types.fp32, x=(4, 8)), tmp_path / "fp32.mlpackage")
    out, _ = ran(capsys, tmp_path / "fp32.mlpackage", "--in-place", code=0)
    assert ("not applied: ane::fp16_compute (approximates the function; only by name: rewrite --passes fp16_compute)"
            in out)


REFUSED = {
    "no place": (["a"], "--fix: expected one of -o OUT.mlpackage and --in-place"),
    "two places": (["a", "--in-place", "-o", "b.mlpackage"], "--fix: expected one of -o OUT.mlpackage and --in-place"),
    "several to one": (["models", "-o", "b.mlpackage"], "--fix: -o names one output for 2 packages; "),
    "a form": (["a", "--in-place", "--format", "sarif"], "--fix: found --format sarif; expected text or json"),
    "statistics": (["a", "--in-place", "--statistics"], "--fix: found --statistics, which applies to reports"),
}


@pytest.mark.parametrize("given,words", REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit(given, words, models, capsys):
    before = content(models)
    paths = ["models/b/c.mlpackage" if each == "a" else each for each in given]
    out, err = ran(capsys, *paths, code=2)
    assert out == "" and err.startswith(f"mil-ane-passes: {words}") and content(models) == before


def test_in_place_without_fix_is_refused(models, capsys):
    assert main(["lint", "models", "--in-place"]) == 2
    assert capsys.readouterr().err == "mil-ane-passes: --in-place has no effect without --fix; expected both\n"


def test_nothing_is_replaced_if_every_pass_that_fired_is_reverted(tmp_path, capsys):
    """Convolutions with a cumsum in between are predicted to be slower on the ANE: the guard reverts both passes."""
    def build(x):
        weight = np.random.default_rng(0).standard_normal((64, 64, 31)).astype(np.float16)
        x = mb.cumsum(x=mb.conv(x=x, weight=weight[..., :7], pad_type="same"), axis=-1)
        return mb.tanh(x=mb.conv(x=x, weight=weight, pad_type="same"), name="y")

    package = tmp_path / "in.mlpackage"
    save_program(build_program(build, x=(1, 64, 128)), package, ct.target.iOS18)
    before = content(tmp_path)
    report = ane.rewrite(package, passes=["triangle_cumsum"], target="m4", named=False)
    assert [trace.rule for trace in report.traces if trace.reverted] == ["triangle_cumsum"]
    assert not report.changed and not any(trace.fired for trace in report.traces), str(report)
    for _ in range(2):
        out, _ = ran(capsys, package, "--in-place", code=0)
        assert "nothing left to write: all rewrites that matched were reverted" in out and content(tmp_path) == before


def test_in_place_a_package_is_fixed_beside_a_link_to_it(models, capsys):
    os.symlink("c.mlpackage", models / "b" / "a link.mlpackage")
    ran(capsys, models, "--in-place", code=0)
    assert "cumsum" not in kinds(models / "b" / "c.mlpackage") and os.path.islink(models / "b" / "a link.mlpackage")


def test_a_link_and_a_network_are_not_replaced(models, fixtures, capsys):
    os.symlink("b/c.mlpackage", models / "link.mlpackage")
    assert "is a link to b/c.mlpackage, and a link is not replaced" in ran(
        capsys, models / "link.mlpackage", "--in-place", code=2)[1]
    network = next((fixtures / "onnx_coreml").glob("dilated_conv_ios13.mlmodel"))
    shutil.copy(network, models / "n.mlmodel")
    assert "n.mlmodel: is not a package; only an .mlpackage is replaced in place" in ran(
        capsys, models / "n.mlmodel", "--in-place", code=2)[1]


@pytest.mark.parametrize("step", ["save", "_fill_staged_folder", "exchange_paths"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_step_leaves_the_source_alone(step, error, models, monkeypatch):
    def fail(*_, **__):
        raise error

    package, before = load(models / "b" / "c.mlpackage"), content(models)
    monkeypatch.setattr(package_writer, step, fail)
    with pytest.raises(InputError if isinstance(error, OSError) else KeyboardInterrupt):
        replace_source(package, models / "b" / "c.mlpackage.bak")
    assert content(models) == before and os.listdir(models / "b") == ["c.mlpackage"]


def test_a_backup_that_appears_meanwhile_is_not_overwritten(models, monkeypatch):
    backup = models / "b" / "c.mlpackage.bak"
    fill = package_writer._fill_staged_folder

    def fill_slowly(*arguments, **options):
        fill(*arguments, **options)
        backup.mkdir(exist_ok=True)

    monkeypatch.setattr(package_writer, "_fill_staged_folder", fill_slowly)
    before = content(models)
    with pytest.raises(InputError, match="exists already, and a backup is never overwritten"):
        replace_source(load(models / "b" / "c.mlpackage"), backup)
    assert content(models) == before and list(backup.iterdir()) == []


def test_what_another_puts_in_the_place_of_the_source_stays_and_so_does_the_source(models, monkeypatch):
    """Where a file system cannot swap two paths, the place is free for a moment."""
    source, backup = models / "b" / "c.mlpackage", models / "b" / "c.mlpackage.bak"
    package, before = load(source), content(source)
    rename = os.rename

    def rename_slowly(old, new):
        rename(old, new)
        if Path(old) == source:
            source.mkdir()
            (source / "theirs").touch()

    monkeypatch.setattr(swap, "_rename_with_flag", lambda *_: False)
    monkeypatch.setattr(os, "rename", rename_slowly)
    with pytest.raises(InputError, match=r"another run has written to this path in the meantime; its result is kept, "
                                         r"and the source is kept as .*c\.mlpackage\.bak"):
        replace_source(package, backup)
    assert content(backup) == before and os.listdir(source) == ["theirs"]


def test_a_source_that_a_killed_run_has_moved_away_is_found(models, capsys):
    (models / "b" / "c.mlpackage").rename(models / "b" / "c.mlpackage.bak")
    _, error = ran(capsys, models / "b" / "c.mlpackage", "--in-place", code=2)
    assert "no such file or folder; a run that was killed has left it as" in error
    assert "c.mlpackage.bak: rename that" in error


def test_a_path_without_a_package_is_said_to_be_so(models, capsys):
    _, error = ran(capsys, models / "absent.mlpackage", "--in-place", code=2)
    assert "absent.mlpackage: no such file or folder" in error
    _, error = ran(capsys, models / "b" / "c.mlpackage", "-o", models / "a.mlpackage", code=2)
    assert "a.mlpackage: exists already; expected a path that does not exist" in error and "--overwrite" not in error
