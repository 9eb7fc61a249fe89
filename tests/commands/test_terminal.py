"""What `lint` prints on a terminal: colors, line breaks, and evidence on request."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.report.terminal import TerminalStyle, choose_style
from tests.conversions import save_program

ESCAPE = re.compile(r"\x1b\[[\d;]*m")
UNSUPPORTED = "\x1b[1mANE205 cumsum\x1b[0m  \x1b[1;33munsupported\x1b[0m: 1 op"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "m.mlpackage"
    save_program(build_program(lambda x: mb.cumsum(x=mb.relu(x=x), axis=1, name="sums"), x=(1, 8, 16)), path)
    return path


@pytest.fixture
def on_terminal(package, monkeypatch):
    """A function that runs lint with a pseudo terminal as stdout; returns what it prints, with newlines of a pipe."""

    def run_lint(*options, columns=70, **variables):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        parts = []
        reader = threading.Thread(target=read_terminal, args=(ours, parts))
        reader.start()
        with monkeypatch.context() as patches, os.fdopen(theirs, "w") as terminal:
            for name in ("NO_COLOR", "COLUMNS"):
                patches.delenv(name, raising=False)
            for name, value in {"TERM": "xterm", **variables}.items():
                patches.setenv(name, value)
            patches.chdir(package.parent)
            for name in ("stdout", "__stdout__"):  # the width is that of the second
                patches.setattr(sys, name, terminal)
            found = main(["lint", package.name, "--target", "m4", "--no-config", *options])
        reader.join()
        os.close(ours)
        assert found == 1
        return b"".join(parts).decode().replace("\r\n", "\n")

    return run_lint


def read_terminal(file, parts):
    """Read until the terminal is closed, which holds some kilobytes at most."""
    with contextlib.suppress(OSError):
        while part := os.read(file, 65536):
            parts.append(part)


def test_on_a_terminal_there_are_colors_line_breaks_and_no_evidence(on_terminal):
    text = on_terminal()
    plain = ESCAPE.sub("", text)
    assert UNSUPPORTED in text and "confidence " not in plain
    assert "--verbose shows the evidence for each finding" in plain
    long = [line for line in plain.splitlines() if len(line) > 70]
    assert all("mil-ane-passes rewrite" in line for line in long), long


@pytest.mark.parametrize(("options", "variables"), [
    ([], {"NO_COLOR": "1"}), (["--color", "never"], {}), ([], {"TERM": "dumb"})], ids=str)
def test_without_color(on_terminal, options, variables):
    text = on_terminal(*options, **variables)
    assert "\x1b" not in text and max(map(len, text.splitlines()[:2])) <= 70


def test_the_option_comes_before_the_environment(on_terminal):
    assert UNSUPPORTED in on_terminal("--color", "always", NO_COLOR="1")


def test_verbose_shows_the_evidence(on_terminal):
    text = on_terminal("--verbose")
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
