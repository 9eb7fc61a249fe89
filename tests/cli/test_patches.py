"""The command that lists the patches of the torch frontend."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from mil_ane_passes.cli.main import main
from mil_ane_passes.report.patches import Patches, patches_table
from mil_ane_passes.torch_frontend.contract import Patch
from mil_ane_passes.torch_frontend.registry import all_patches
from tests.without_torch import without_torch


@dataclass
class Found:
    patch: Patch
    reason: str | None


LINK = "https://github.com/apple/coremltools/issues/12"
TWO = Patches([
    Found(Patch("a fault", (LINK, "none known"), name="one"), "not implemented: fmod"),
    Found(Patch("another", ("none known",), name="second"), None),
])

WITHOUT_TORCH = """
from mil_ane_passes.cli.main import main
sys.exit(main(["patches"]))
"""


def test_it_lists_each_patch_and_why_it_is_needed(capsys):
    assert main(["patches"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == [patch.name for patch in all_patches()]
    at = next(number for number, line in enumerate(lines) if line.startswith("fmod "))
    assert lines[at].split()[1] == "needed" and lines[at + 1].strip() == "not implemented: fmod"


def test_json_has_a_version(capsys):
    assert main(["patches", "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["command"]) == (1, "patches")
    assert [set(patch) for patch in report["patches"]] == [{"name", "title", "needed", "why", "upstream"}] * len(
        all_patches())
    for patch in report["patches"]:
        assert patch["needed"] == (patch["why"] is not None) and isinstance(patch["upstream"], list)


def test_a_patch_that_is_not_needed_is_off():
    assert str(TWO) == ("one     needed  a fault\n                not implemented: fmod\n"
                        "second  off     another\n                the installed coremltools is right")
    assert TWO.to_dict()["patches"][1] == {
        "name": "second", "title": "another", "needed": False, "why": None, "upstream": ["none known"]}


def test_the_table_shortens_links():
    assert patches_table([Patch("`x | y`", ("a",), name="z")]).endswith("| `z` | `x \\| y` | a |")
    rows = patches_table(each.patch for each in TWO.findings).splitlines()
    assert rows[2] == f"| `one` | a fault | [coremltools#12]({LINK}), none known |"
    assert patches_table([Patch("x", (f"{LINK} (in part)", "https://example.org/a"), name="y")]).endswith(
        f"[coremltools#12]({LINK}) (in part), https://example.org/a |")


def test_without_torch_it_says_so_in_one_line():
    done = without_torch(WITHOUT_TORCH)
    assert done.returncode == 2 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("Failed to load ")]  # the host, off a Mac
    assert said == ["mil-ane-passes: the torch frontend needs torch, which is not installed; "
                    "`pip install 'mil_ane_passes[verify]'` brings it"]


@pytest.mark.parametrize("option", ["--format=yaml", "extra"])
def test_what_it_does_not_know_is_refused(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["patches", option])
    assert stopped.value.code == 2 and option.removeprefix("--format=") in capsys.readouterr().err
