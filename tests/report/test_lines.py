"""Findings in lines: concise, and as annotations that GitHub reads."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import mil_ane_passes as ane
from mil_ane_passes.report.baseline import Baseline
from mil_ane_passes.report.lint_lines import format_concise_lines, format_github_line, format_github_lines

from .made import chain, report, two_functions

COMMAND = re.compile(r"::(error|warning|notice) ((?:\w+=[^,:\n]*)(?:,\w+=[^,:\n]*)*)::([^\n]*)")


def parse(line):
    """Read a workflow command as GitHub's runner does: severity, properties, message."""
    severity, properties, message = COMMAND.fullmatch(line).groups()
    return severity, {name: decode(value, {"%3A": ":", "%2C": ","}) for name, _, value in
                      (each.partition("=") for each in properties.split(","))}, decode(message, {})


def decode(text, more):
    codes = {"%25": "%", "%0D": "\r", "%0A": "\n", **more}
    return re.sub("%[0-9A-F]{2}", lambda found: codes[found[0]], text)


def test_a_line_for_each_finding():
    found = report(chain("relu", "tanh", "sigmoid"))
    assert format_concise_lines(found) == [
        f"{found.model}:tanh_1: ANE391 wrong-tanh wrong: tanh 'tanh_1' is wrong; fix: wrong_tanh (same bits)",
        f"{found.model}:relu_0: ANE216 no-relu unsupported: relu of rank 2",
        f"{found.model}:sigmoid_2: ANE191 by-name suggestion: could be another; fix: by_name (same bits)"]


def test_of_several_functions_the_function_is_named():
    lines = format_concise_lines(report(two_functions()))
    assert lines and {re.search(":(main|other)/", line)[1] for line in lines} == {"main", "other"}


def test_annotations_have_the_same_words():
    found = report(chain("relu", "tanh", "sigmoid"))
    parsed = [parse(line) for line in format_github_lines(found)]
    assert [severity for severity, _, _ in parsed] == ["error", "warning", "notice"]
    assert [message for _, _, message in parsed] == format_concise_lines(found)
    assert parsed[0][1] == {"title": "ANE391 wrong-tanh", "file": found.model}


def test_known_findings_are_left_out():
    old, new = report(chain("relu", "tanh")), report(chain("relu", "square"))
    new.baseline = Baseline("old.json", "m4", Counter(item.key for item in old.findings)).compare(new.findings)
    (line,) = format_concise_lines(new)
    assert line.endswith(":square_1: ANE591 remark suggestion: a square") and len(format_github_lines(new)) == 1


@pytest.mark.parametrize("text", ["100 % of a: b, c::d", "%25", "::error::x", "a,file=b", "plain"])
def test_what_github_would_read_is_encoded(text):
    assert parse(format_github_line("error", text, text, text)) == ("error", {"title": text, "file": text}, text)


def test_findings_of_a_delegate_are_annotated_at_its_program(tmp_path):
    (tmp_path / "model.pte").write_bytes(b"")
    found = report(chain("relu"))
    found.model = str(tmp_path / "model.pte" / "forward" / "0")
    (line,) = format_github_lines(found)
    assert parse(line)[1]["file"] == str(tmp_path / "model.pte")
    assert parse(line)[2].startswith(f"{found.model}:relu_0: ANE216")


def test_no_name_ends_a_line():
    found = report(chain("relu"))
    found.model = "a\n::error::forged\r\x1b[2J\u2028.mlpackage"
    shown = "a\\n::error::forged\\r\\x1b[2J\\u2028.mlpackage"
    (line,) = format_concise_lines(found)
    assert line.startswith(f"{shown}:relu_0: ")
    (line,) = format_github_lines(found)
    assert parse(line)[1]["file"] == shown


def test_annotations_of_a_delegate_are_at_its_program(fixtures):
    found = report(chain("relu"))
    program = str(fixtures / "executorch" / "mixed.pte")
    found.model = f"{program}/forward/0"
    (line,) = format_github_lines(found)
    assert parse(line)[1]["file"] == program and parse(line)[2].startswith(f"{program}/forward/0:relu_0: ")


def test_the_layers_of_a_network_are_named(fixtures):
    path = next((fixtures / "onnx_coreml").glob("dilated_conv_ios13.mlmodel"))
    found = ane.lint(path)
    layers = [
        f"{path}:{each.layer}: {each.code} {each.slug} unsupported: {each.reason}"
        for each in found.network.findings]
    lines = format_concise_lines(found)
    assert layers and all(any(line.startswith(layer) for line in lines) for layer in layers)
    assert len(lines) == len(found.findings) + len(layers)
