"""Reports in notebooks and files: HTML without markup of others, and a form by suffix."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from html.parser import HTMLParser

import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main

from .made import chain, report


class Reader(HTMLParser):
    """The tags and the text of some HTML; fails where a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.cells = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        if tag in ("td", "th", "p", "pre", "title"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "p", "pre", "title"):
            self.cells[-1] += data


@pytest.fixture
def source(fixtures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", tmp_path / "in.mlpackage")
    return "in.mlpackage"


@pytest.fixture
def rewritten(source):
    return ane.rewrite(source, "out.mlpackage", verify=False)


def test_a_notebook_shows_the_findings_by_rule():
    found = report(chain("tanh", "relu", "relu"))
    cells = Reader(found._repr_html_()).cells
    assert cells[0] == str(found).partition("\n")[0] and cells[-1] == str(found)
    assert cells[1:-1] == ["count", "code", "rule", "severity", "fixed by", "2", "ANE216", "no-relu", "unsupported",
                           "-", "1", "ANE391", "wrong-tanh", "wrong", "wrong_tanh"]


def test_without_findings_there_is_no_table():
    assert "table" not in Reader(report(chain("abs"))._repr_html_()).tags


def test_names_are_no_markup():
    found = report(chain("relu"))
    found.model = "<script>alert(1)</script>\n&amp;<b>"
    reader = Reader(found._repr_html_())
    assert {"script", "b"}.isdisjoint(reader.tags)
    assert reader.cells[0].startswith("<script>alert(1)</script>\\n&amp;<b> on ")


def test_a_notebook_shows_what_became_of_each_pass(rewritten):
    reader = Reader(rewritten._repr_html_())
    assert reader.cells[0].startswith("in.mlpackage: written to out.mlpackage, not verified")
    assert reader.cells[1:6] == ["pass", "code", "matches", "exactness", "outcome"]
    rows = [reader.cells[at:at + 5] for at in range(6, len(reader.cells) - 1, 5)]
    fired = [trace for trace in rewritten.traces if trace.fired]
    assert fired and [row for row in rows if row[4] == "rewritten"] == [
        [trace.rule, trace.fired[0].code, str(len(trace.fired)), trace.strength.value, "rewritten"] for trace in fired]
    assert reader.cells[-1] == str(rewritten)


def test_the_page_of_a_rewrite_loads_nothing(rewritten):
    rewritten.source = "</title><script>x</script>"
    page = rewritten.to_html()
    assert page.startswith("<!DOCTYPE html>") and "default-src 'none'" in page
    reader = Reader(page)
    assert "script" not in reader.tags and reader.cells[0] == "</title><script>x</script>: written"


@pytest.mark.parametrize("form,suffix", [("text", ".txt"), ("json", ".json"), ("sarif", ".sarif"), ("html", ".html")])
def test_a_saved_report_of_lint_is_what_the_command_writes(form, suffix, source, tmp_path):
    assert main(["lint", source, "--target", "m4", "--format", form, "-o", "wanted"]) == 1
    found = ane.lint(source, target="m4")
    (tmp_path / f"report{suffix}").write_text("old")
    assert found.save(tmp_path / f"report{suffix}") == tmp_path / f"report{suffix}"
    assert (tmp_path / f"report{suffix}").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_the_forms_as_values(source):
    found = ane.lint(source)
    assert found.to_sarif()["version"] == "2.1.0" and found.to_html().startswith("<!DOCTYPE html>")


def test_a_report_of_a_rewrite_is_saved(rewritten, tmp_path):
    for name in ("r.json", "r.HTML", "r.txt"):
        rewritten.save(name)
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(rewritten.to_dict()))
    assert (tmp_path / "r.HTML").read_text() == f"{rewritten.to_html()}\n"
    assert (tmp_path / "r.txt").read_text() == f"{rewritten}\n"


@pytest.mark.parametrize("name,message", [
    ("r", "r: found no suffix; expected .json, .html or .txt, which selects the format of the report"),
    ("r.sarif", "r.sarif: found the suffix .sarif; expected .json, .html or .txt, which "),
    ("r.htm", "r.htm: found the suffix .htm; expected .json, .html or .txt, which selects the format of the report; "
              "did "
              "you mean '.html'?"),
    ("no/r.json", "no folder 'no' to write 'r.json' to; create it first"),
    ("in.mlpackage/r.json", "'in.mlpackage/r.json' is in the package "),
])
def test_where_no_report_is_written(name, message, rewritten, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ane.InputError) as raised:
        rewritten.save(name)
    assert str(raised.value).startswith(message) and sorted(tmp_path.rglob("*")) == before


def test_the_report_of_a_rewrite_of_layers(fixtures, tmp_path):
    path = next((fixtures / "onnx_coreml").glob("dilated_conv_ios13.mlmodel"))
    made = ane.rewrite(path, tmp_path / "out.mlmodel", preset="full")
    cells = Reader(made._repr_html_()).cells
    fired = [trace.rule for trace in made.traces if trace.fired]
    assert fired and [cells[at] for at in range(6, len(cells) - 1, 5)] == fired
    assert made.save(tmp_path / "r.json").is_file()


def test_a_report_that_holds_programs_names_what_another_process_returns(rewritten):
    for made in (rewritten, report(chain())):
        with pytest.raises(TypeError, match="holds programs and cannot be pickled .*expected its to_dict"):
            pickle.dumps(made)
        assert vars(copy.copy(made)) == vars(made)
    assert pickle.loads(pickle.dumps(rewritten.to_dict())) == rewritten.to_dict()
