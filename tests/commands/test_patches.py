"""The command that lists the patches of the torch frontend."""

from __future__ import annotations

import json
import re

import pytest

from mil_ane_passes.commands.main import main
from mil_ane_passes.commands.pages import describe_patch
from mil_ane_passes.commands.patches import Patches
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.torch_frontend.contract import Patch
from mil_ane_passes.torch_frontend.registry import PatchStatus, _check_distinct, load_patches
from mil_ane_passes.utils.errors import RuleError
from tests.without_torch import without_torch

LINK = "https://github.com/apple/coremltools/issues/12"
TWO = Patches([describe_patch(status) for status in (
    PatchStatus(Patch("a fault", (LINK, "none known"), name="one", code="TORCH198"), "not implemented: fmod"),
    PatchStatus(Patch("another", ("none known",), name="second", code="TORCH199"), None),
)])

WITHOUT_TORCH = """
import sys
from mil_ane_passes.commands.main import main
sys.exit(main(["patches"]))
"""


def test_it_lists_each_patch_and_why_it_is_needed(capsys):
    assert main(["patches"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert [line.split()[:2] for line in lines[::2]] == [[patch.code, patch.name] for patch in load_patches()]
    at = next(number for number, line in enumerate(lines) if " fmod " in line)
    assert lines[at].split()[2] == "needed" and lines[at + 1].strip() == "not implemented: fmod"


def test_json_has_a_version(capsys):
    assert main(["patches", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["command"]) == (1, "patches")
    keys = {"code", "name", "title", "severity", "needed", "why", "upstream"}
    assert [set(patch) for patch in report["patches"]] == [keys] * len(load_patches())
    for patch in report["patches"]:
        assert patch["needed"] == (patch["why"] is not None) and isinstance(patch["upstream"], list)


def test_a_patch_that_is_not_needed_is_off():
    assert str(TWO) == (
        "TORCH198  one     needed  a fault\n                          not implemented: fmod\n"
        "TORCH199  second  off     another\n                          the installed coremltools is correct"
    )
    assert TWO.to_dict()["patches"][1] == {
        "code": "TORCH199", "name": "second", "title": "another", "severity": "unsupported", "needed": False,
        "why": None,
        "upstream": ["none known"]}


def test_codes_are_the_patches_own():
    codes = [patch.code for patch in load_patches()]
    assert len(set(codes)) == len(codes) and all(re.fullmatch(r"TORCH1\d\d", code) for code in codes)
    assert not set(codes) & {rule.code for rule in get_all_rules().values()}


@pytest.mark.parametrize("key", ["fmod", "FMOD", "code"])
def test_a_patch_is_explained(key, capsys):
    (patch,) = (each for each in load_patches() if each.name == "fmod")
    assert main(["explain", patch.code if key == "code" else key]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{patch.code} fmod\npatch of the torch frontend; without it: {patch.title}\nseverity: "
                           "unsupported\nneeded here: ")
    assert patch.text in text and "\nconverts: fmod\n" in text and f"    {patch.upstream[0]}" in text
    assert main(["explain", patch.code, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["command"], data["patch"], data["needed"]) == (1, "explain", "fmod", True)
    assert data["text"] == patch.text and data["ops"] == sorted(patch.ops)


def test_a_code_that_no_patch_has(capsys):
    assert main(["explain", "TORCH100"]) == 2
    assert capsys.readouterr().err == (
        "mil-ane-passes: no patch 'TORCH100'; `mil-ane-passes patches` lists their codes and names\n"
    )


@pytest.mark.parametrize(("code", "other", "message"), [
    ("ANE301", "TORCH102", "the patch 'one' has the code 'ANE301'; expected TORCH1xx"),
    ("TORCH101", "TORCH101", "TORCH101 is used by the patches 'one' and 'second'; expected one"),
])
def test_a_patch_without_a_code_of_its_own_is_refused(code, other, message):
    with pytest.raises(RuleError, match=message):
        _check_distinct([Patch("a", ("b",), name="one", code=code), Patch("a", ("b",), name="second", code=other)])


def test_without_torch_it_says_so_in_one_line():
    done = without_torch(WITHOUT_TORCH)
    assert done.returncode == 2 and done.stdout == ""
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("Failed to load ")
    ]  # coremltools, off a Mac
    assert said == ["mil-ane-passes: the torch frontend needs PyTorch, which is not installed: "
                    "pip install 'mil-ane-passes[verify]'"]


@pytest.mark.parametrize("option", ["--format=yaml", "extra"])
def test_what_it_does_not_know_is_refused(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["patches", option])
    assert stopped.value.code == 2 and option.removeprefix("--format=") in capsys.readouterr().err
