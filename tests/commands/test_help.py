"""Help: what each command is for, and an example that the command takes."""

from __future__ import annotations

import re
import shlex

import pytest

from mil_ane_passes.commands.main import _build_parser, main

COMMANDS = ["batch", "batch lint", "batch rewrite", "calibrate", "calibrate-plan", "edit", "explain", "lint",
            "mac-script", "passes", "patches", "rewrite", "run", "verify"]


def helped(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_a_call_that_it_takes(command, capsys):
    found = re.findall(r"example: mil-ane-passes (.*?)(?= quirks \(|$)", helped(capsys, *command.split()))
    assert len(found) == 1 and found[0].startswith(command)
    assert callable(_build_parser().parse_args(shlex.split(found[0])).run)


@pytest.mark.parametrize("command", ["run", "verify"])
def test_the_list_of_quirks_follows_the_example(command, capsys):
    text = helped(capsys, command)
    assert text.index("example: ") < text.index("quirks (models of published faults") < text.index("softplus_cliff An")


def test_all_commands_are_listed(capsys):
    text = helped(capsys)
    assert "2 could not run, 128 + N stopped by signal N" in text
    assert all(f" {command} " in text for command in COMMANDS if " " not in command)
