"""What `lint` prints on a terminal: colors, line breaks, and evidence on request."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.report.terminal import TerminalStyle, choose_style
from tests.conversions import save_program
from tests.readme.walk import environment

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
UNSUPPORTED = "\x1b[1mANE205 cumsum\x1b[0m  \x1b[1;33munsupported\x1b[0m: 1 op"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "m.mlpackage"
    save_program(build_program(lambda x: mb.cumsum(x=mb.relu(x=x), axis=1, name="sums"), x=(1, 8, 16)), path)
    return path


def on_terminal(package, *options, columns=70, **variables):
    """Run lint with a pseudo terminal as stdout; returns what it prints, with newlines as a pipe has them."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS")}
    command = [sys.executable, "-m", "mil_ane_passes", "lint", package.name, "--target", "m4", "--no-config", *options]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, cwd=package.parent,
                          env={**env, "TERM": "xterm", **variables}) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                parts.append(os.read(ours, 65536))
            except OSError:  # the terminal is closed
                break
            if not parts[-1]:
                break
    os.close(ours)
    assert process.returncode == 1
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_on_a_terminal_there_are_colors_line_breaks_and_no_evidence(package):
    text = on_terminal(package)
    plain = ESCAPE.sub("", text)
    assert UNSUPPORTED in text and "confidence " not in plain
    assert "--verbose shows the evidence for each finding" in plain
    long = [line for line in plain.splitlines() if len(line) > 70]
    assert all("mil-ane-passes rewrite" in line for line in long), long


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("options", "variables"), [
    ([], {"NO_COLOR": "1"}), (["--color", "never"], {}), ([], {"TERM": "dumb"})], ids=str)
def test_without_color(package, options, variables):
    text = on_terminal(package, *options, **variables)
    assert "\x1b" not in text and max(map(len, text.splitlines()[:2])) <= 70


def test_the_option_comes_before_the_environment(package):
    assert UNSUPPORTED in on_terminal(package, "--color", "always", NO_COLOR="1")


def test_verbose_shows_the_evidence(package):
    text = on_terminal(package, "--verbose")
    assert "  confidence high; " in text and "--verbose shows" not in text


def test_in_a_pipe_and_a_file_nothing_changes(package, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(package.parent)
    options = ["lint", package.name, "--target", "m4", "--no-config"]
    assert main(options) == 1
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and "  confidence high; " in plain
    assert main([*options, "--color", "always"]) == 1
    colored = capsys.readouterr().out
    assert UNSUPPORTED in colored and ESCAPE.sub("", colored) == plain
    assert main([*options, "--color", "always", "-o", str(tmp_path / "t.txt")]) == 1
    assert (tmp_path / "t.txt").read_text() == plain
    capsys.readouterr()
    assert main([*options, "--format", "concise", "--color", "always"]) == 1
    assert "\x1b[1mANE205 cumsum\x1b[0m \x1b[1;33munsupported\x1b[0m: cumsum is" in capsys.readouterr().out
    assert main([*options, "--format", "json", "--color", "always"]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_names_that_look_like_headings_bring_no_escapes_of_their_own():
    style = TerminalStyle(color=True, width=40)
    assert style.apply("  %ANE205 x  unsupported: \\x1b[2J") == "  %ANE205 x  unsupported: \\x1b[2J"
    assert style.apply("a " * 30).split("\n") == ["a " * 19 + "a", "  " + "a " * 9 + "a"]
    assert TerminalStyle(width=40).apply(f"  fix: mil-ane-passes rewrite {'a ' * 30}x").count("\n") == 0


def test_the_environment_decides_only_for_auto():
    assert not choose_style("auto", {}).color, "pytest's stdout is not a terminal"
    assert choose_style("always", {"NO_COLOR": "1"}).color and not choose_style("never", {}).color
