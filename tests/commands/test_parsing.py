"""A slip on the command line is answered with what was meant, by the command that it was made in."""

from __future__ import annotations

import pytest

from mil_ane_passes.commands.main import _build_parser, main


@pytest.mark.parametrize("arguments, error", [
    (["rewrite", "a", "--presets", "full"],
     "mil-ane-passes rewrite: error: no option --presets; mil-ane-passes rewrite --help lists the options; "
     "did you mean '--preset'?"),
    (["edit", "a", "-o", "b", "--drop-outptu=c"],
     "mil-ane-passes edit: error: no option --drop-outptu; mil-ane-passes edit --help lists the options; "
     "did you mean '--drop-output'?"),
    (["lint", "a", "--html"],
     "mil-ane-passes lint: error: no option --html; mil-ane-passes lint --help lists the options; "
     "did you mean '--format html'?"),
    (["batch", "lint", "a", "--zzzz"],
     "mil-ane-passes batch lint: error: no option --zzzz; mil-ane-passes batch lint --help lists the options"),
])
def test_an_option_that_is_not_there(arguments, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said[-1] == error and said[0].startswith(error.partition(": error")[0].join(
        ("usage: ", " ")))


@pytest.mark.parametrize("arguments, near", [
    (["rewrit", "a"], "did you mean 'rewrite'?"),
    (["lint", "a", "--format", "htm"], "did you mean 'html'?"),
    (["verify", "a", "b", "--precision", "flt32"], "did you mean 'float32'?"),
    (["upgrade", "a", "--deployment-target", "iOS14"], "mil-ane-passes upgrade --help tells more"),
    (["upgrade", "a", "--deployment-target", "os17"], "did you mean 'iOS17'?"),
    (["trace", "a"], "did you mean 'run --trace'?"),
    (["edit", "a", "-o", "b", "--rename", "c=d", "e=f"],
     "unrecognized arguments: e=f; mil-ane-passes edit --help tells more"),
    (["qqqqqq"], "mil-ane-passes --help tells more"),
    (["verify", "a"], "required: B; mil-ane-passes verify --help tells more"),
])
def test_a_choice_that_is_not_there(arguments, near, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(f"{near}\n")


def test_no_command_shows_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert "rewrite a package and verify the result before writing it" in said.err and "Exit codes:" in said.err


@pytest.mark.parametrize("arguments, name, paths", [
    (["lint", "a", "--target", "m4", "b", "c"], "src", ["a", "b", "c"]),
    (["lint", "--target", "m4", "a", "b", "--all", "c"], "src", ["a", "b", "c"]),
    (["lint", "a", "--all"], "src", ["a"]),
    (["batch", "lint", "a", "-o", "r", "b"], "sources", ["a", "b"]),
    (["rewrite", "a", "b"], "out", "b"), (["rewrite", "a", "--preset", "full", "b"], "out", "b"),
    (["rewrite", "--preset", "full", "a", "b"], "out", "b"), (["rewrite", "a", "-o", "b"], "out", None),
    (["explain", "ANE205"], "code", "ANE205"),
])
def test_paths_may_stand_behind_options(arguments, name, paths):
    assert getattr(_build_parser().parse_args(arguments), name) == paths


@pytest.mark.parametrize("arguments", [["rewrite", "a", "b", "c"], ["rewrite", "a", "--diff", "b", "c"],
                                       ["verify", "a", "b", "--seeds", "1", "c"]])
def test_one_path_too_many(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "unrecognized arguments: c; " in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["verify", "a", "b", "--seeds", "abc"], "argument --seeds: found 'abc'; expected a whole number, at least 1"),
    (["verify", "a", "b", "--seeds", "0"], "argument --seeds: found '0'; expected a whole number, at least 1"),
])
def test_a_number_that_is_none(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("option", "said"), [
    (["--ranges="], "ranges: found ''; expected NAME=LOW:HIGH"), (["--ranges=,"], "ranges: found ','"),
])
def test_ranges_that_are_empty(fixtures, tmp_path, option, said, capsys):
    source = str(fixtures / "conv_transpose_1d.mlpackage")
    assert main(["rewrite", source, "-o", str(tmp_path / "out.mlpackage"), *option]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_more_seeds_than_there_is_memory_for(fixtures, capsys):
    source = str(fixtures / "conv_transpose_1d.mlpackage")
    assert main(["verify", source, source, "--seeds", "99999999999999999999"]) == 2
    assert "seeds: found 99999999999999999999; expected a whole number, from 1 to 10000" in capsys.readouterr().err
