"""Errors name options as those wrote them who gave them: a command with dashes, a caller by the name in Python."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.utils.option_spelling import (
    choose_spelling,
    describe_as_steps,
    format_advised_option,
    format_option,
    format_option_values,
    is_command,
    use_command_spelling,
)

HOME = Path(ane.__file__).parent
CONV = "conv_transpose_1d.mlpackage"
OPTION = re.compile(r"(?<![\w-])--[a-z]")


def test_an_option_is_called_as_it_was_given():
    assert (format_option("fix_shape"), format_option_values("io", "fp16", "x"), format_option_values("io")) == (
        "fix_shape=",
        "io fp16 x",
        "io",
    )
    with use_command_spelling():
        assert (format_option("fix_shape"), format_option_values("io", "fp16", "x"), choose_spelling("a", "b")) == (
            "--fix-shape",
            "--io fp16 x",
            "a",
        )
        with use_command_spelling(False):
            assert not is_command()
        assert is_command()
    assert not is_command() and choose_spelling("a", "b") == "b"


def test_options_that_were_not_given_are_steps_of_the_command():
    """A transform's own option is a step of the command that runs it; other options are advice about `edit`."""
    with describe_as_steps("adapt", {"io", "fix_shape"}):
        assert format_option_values("io", "fp16", "x") == "step io of adapt (fp16 x)"
        assert format_option_values("fix_shape") == "step fix_shape of adapt"
        assert format_option_values("context", 3) == "context 3"
        assert format_advised_option("fix_shape", "x=...") == "fix_shape x=... of edit"
        with use_command_spelling():
            assert format_option_values("fix_shape") == "step fix-shape of adapt"
            assert format_advised_option("fix_shape", "x=...") == "--fix-shape x=... of edit"
            assert format_advised_option("context") == "--context"
    assert format_option_values("io", "fp16", "x") == "io fp16 x" and format_advised_option("io") == "io"


@pytest.mark.parametrize(("words", "named"), [
    (["--drop-output", "absent"], {"drop_output": "absent"}),
    (["--rename", "absent=other"], {"rename": {"absent": "other"}}),
    (["--expose", "absent"], {"expose": "absent"}),
    (["--io", "fp16", "absent"], {"io": {"fp16": "absent"}}),
    (["--fix-shape", "mel=1,2"], {"fix_shape": {"mel": (1, 2)}}),
    (["--split-at", "absent"], {"split_at": "absent"}),
    ([], {}),
])
def test_a_command_and_a_caller_are_told_the_same_in_their_own_words(fixtures, tmp_path, capsys, words, named):
    assert main(["edit", str(fixtures / CONV), "-o", str(tmp_path / "out.mlpackage"), *words]) == 2
    said = capsys.readouterr().err.strip().removeprefix("mil-ane-passes: ")
    with pytest.raises(ane.InputError) as refused:
        ane.edit(fixtures / CONV, tmp_path / "out.mlpackage", **named)
    told = str(refused.value)
    assert OPTION.search(said) and not OPTION.search(told)
    assert re.sub(r"--([a-z-]+)", lambda found: found[1].replace("-", "_"), said) == told


def test_a_batch_says_it_as_the_one_who_asked_does(fixtures, tmp_path, capsys):
    (tmp_path / "out" / CONV).mkdir(parents=True)
    assert main(["batch", "rewrite", str(fixtures / CONV), "-o", str(tmp_path / "out")]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().out
    report = ane.batch("rewrite", fixtures / CONV, tmp_path / "out")
    assert "overwrite=True replaces it" in report.items[0].error and "--" not in report.items[0].error


def raised(tree: ast.AST) -> list[str]:
    """The texts of errors, except what is said in either way, and what functions of the command line say."""
    found: list[str] = []
    command_line = {inner for node in ast.walk(tree)
                    if isinstance(node, ast.FunctionDef) and "argparse" in ast.unparse(node.args)
                    for inner in ast.walk(node)}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "choose_spelling":
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for node in ast.walk(tree):
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) and node not in command_line else ""
        if name.endswith(("Error", "NotSupported", "refused")):
            visit(node)
    return found


def test_no_error_of_the_library_spells_an_option_itself():
    sources = {str(file.relative_to(HOME)): file.read_text(encoding="utf-8")
               for file in sorted(HOME.rglob("*.py")) if file.relative_to(HOME).parts[0] != "testing"
               and file.name != "generate.py"}  # a script that adapt writes: it has only a command line
    read = {name: raised(ast.parse(source)) for name, source in sources.items() if OPTION.search(source)}
    assert sum(map(len, read.values())) > 100
    assert not {(file, text) for file, texts in read.items() for text in texts if OPTION.search(text)}
    assert raised(ast.parse("raise InputError(f'{x}: use --this')")) == [": use --this"]
