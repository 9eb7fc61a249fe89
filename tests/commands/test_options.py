"""The options of a command: one dataclass, from which flags, Python keywords and batch settings are derived."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.batch_jobs import COMMANDS
from mil_ane_passes.commands.calibrate import CalibrateOptions
from mil_ane_passes.commands.edit import EditOptions
from mil_ane_passes.commands.lint import LintOptions
from mil_ane_passes.commands.options import (
    NOT_IN_BATCH,
    add_options,
    argument,
    command,
    flag,
    get_batch_options,
    read_options,
)
from mil_ane_passes.commands.rewrite import RewriteOptions
from mil_ane_passes.commands.run import RunOptions
from mil_ane_passes.commands.verify import VerifyOptions

PUBLIC = {"calibrate": CalibrateOptions, "edit": EditOptions, "lint": LintOptions, "rewrite": RewriteOptions,
          "run": RunOptions, "trace": RunOptions, "verify": VerifyOptions}


@dataclass(frozen=True)
class _Options:
    src: Any = field(metadata=argument("IN"))
    "what to read"
    _: KW_ONLY
    share: float = field(default=0.5, metadata=flag(metavar="PCT", parse=lambda text: float(text) / 100))
    "at most 50% of it"
    keep: bool = field(default=True, metadata=flag())
    "keep it"
    deep: bool = field(default=False, metadata=flag(batch=False))
    "look into it"
    seeds: int = 3
    listener: Any = field(default=None, metadata=NOT_IN_BATCH)


@command(_Options)
def measure(options: _Options) -> _Options:
    """Return what it got."""
    return options


def parse(*words: str, batch: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, _Options, batch=batch)
    return parser.parse_args(words)


def test_a_field_is_a_flag_with_its_text_as_help(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert "IN " in text and "what to read" in text and "--share PCT" in text and "at most 50% of it" in text
    assert "--keep, --no-keep" in text and "--seeds" not in text and "--listener" not in text


def test_what_is_on_the_command_line_is_parsed_and_the_rest_left_to_the_dataclass():
    assert read_options(parse("a"), _Options) == {"src": "a"}
    arguments = parse("a", "--share", "20", "--no-keep", "--deep")
    assert read_options(arguments, _Options) == {"src": "a", "share": 0.2, "keep": False, "deep": True}
    assert read_options(arguments, _Options, batch=True, unparsed=("share",)) == {"share": "20", "keep": False}


def test_a_field_is_a_keyword():
    assert measure("a", share=1.0) == _Options("a", share=1.0)
    assert list(inspect.signature(measure).parameters) == [each.name for each in fields(_Options)]
    with pytest.raises(TypeError, match=r"^measure\(\) got an unexpected keyword argument 'shares'"):
        measure("a", shares=1.0)
    with pytest.raises(TypeError, match=r"^measure\(\) missing 1 required positional argument: 'src'"):
        measure()
    with pytest.raises(TypeError, match=r"^measure\(\) takes 1 positional argument but 3 were given"):
        measure("a", 1.0, 2)
    with pytest.raises(TypeError, match=r"but 2 positional arguments \(and 1 keyword-only argument\) were given"):
        measure("a", 1.0, keep=True)
    with pytest.raises(TypeError, match=r"^edit\(\) takes from 1 to 2 positional arguments but 4 were given"):
        ane.edit("in.mlpackage", "out.mlpackage", {"a": "b"}, True)


def test_a_field_is_a_setting_of_a_batch_unless_it_says_otherwise():
    assert get_batch_options(_Options) == {"share": 0.5, "keep": True, "seeds": 3}
    assert vars(parse("--share", "2", batch=True)).keys() == {"share", "keep"}
    assert set(COMMANDS["rewrite"]) == {each.name for each in fields(RewriteOptions)} - {
        "src", "dst", "diff", "overwrite", "progress", "ahead", "named"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_the_fields_as_parameters_and_their_defaults(name):
    function, options = getattr(ane, name), PUBLIC[name]
    parameters = inspect.signature(function).parameters
    assert parameters == inspect.signature(options).parameters and function.__name__ == name
    positional = {each for each in parameters.values() if each.kind is not each.KEYWORD_ONLY}
    assert len(positional) <= 2 and function.__doc__ and "options:" not in function.__doc__
