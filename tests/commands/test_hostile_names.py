"""Names of a package and its path reach a terminal escaped: none can colour it, turn text around or forge a line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.commands.main import main
from mil_ane_passes.utils.text_format import escape_text, format_lines, join_words, quote_word
from tests.package.helpers import MODEL, spec_of

FORGED = "mil-ane-passes: written to etc"
EVIL = f"\x1b]0;title\x07\x1b[31m\r\nx\n{FORGED}\n\x85\u2028\u202eabc\u2066\u200f\x9b1m\U000e0041"
RAW = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """A package that overflows fp16, has a state, findings and near misses, and a name in every place for one."""
    @mb.program(input_specs=[mb.TensorSpec((1, 8), dtype=types.fp16), mb.StateTensorSpec((1, 8), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def made(x, s):
        held = mb.read_state(input=s)
        tall = mb.square(x=mb.mul(x=x, y=np.float16(300)), name="tall")
        both = mb.softmax(x=mb.add(x=tall, y=held), axis=-1, name="inner")
        mb.coreml_update_state(state=s, value=both)
        root = mb.real_div(x=x, y=mb.sqrt(x=mb.add(x=mb.reduce_mean(
            x=mb.square(x=x), axes=[-1], keep_dims=True), y=np.float16(1e-7))), name="root")
        return mb.cumsum(x=both, axis=1, name="y"), mb.log(x=mb.exp(x=root), name="z")

    model = ct.convert(made, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18,
                       pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True)
    path = tmp_path_factory.mktemp("hostile") / f"a{EVIL}.mlpackage"
    model.save(str(path.with_name("plain.mlpackage")))
    path.with_name("plain.mlpackage").rename(path)
    spec = spec_of(path)
    _rename(spec)
    (path / MODEL).write_bytes(spec.SerializeToString())
    return path


def _rename(spec) -> None:
    """Append `EVIL` to every name of a value, of an op and of the metadata."""
    def named(text: str) -> str:
        return text + EVIL if text else text

    def block(each) -> None:
        for op in each.operations:
            for argument in (one for bound in op.inputs.values() for one in bound.arguments):
                if argument.WhichOneof("binding") == "name":
                    argument.name = named(argument.name)
            for output in op.outputs:
                output.name = named(output.name)
            if "name" in op.attributes:
                held = op.attributes["name"].immediateValue.tensor.strings.values
                held[:] = [named(text) for text in held]
            for inner in op.blocks:
                block(inner)
        each.outputs[:] = [named(text) for text in each.outputs]

    for function in spec.mlProgram.functions.values():
        for declared in function.inputs:
            declared.name = named(declared.name)
        for each in function.block_specializations.values():
            block(each)
    described = spec.description
    for feature in (*described.input, *described.output, *described.state):
        feature.name = named(feature.name)
        feature.shortDescription = EVIL
    described.metadata.shortDescription = described.metadata.author = EVIL
    described.metadata.userDefined[f"key{EVIL}"] = EVIL


@pytest.fixture
def feeds(hostile, tmp_path):
    np.savez(tmp_path / "f.npz", **{f"x{EVIL}": np.linspace(-2, 2, 8, dtype=np.float32).reshape(1, 8)})
    return str(tmp_path / "f.npz")


def printed(arguments, capsys, codes=(0, 1, 2)) -> tuple[str, str]:
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as stopped:
        code = stopped.code
    found = capsys.readouterr()
    assert code in codes, found.err
    for text in (found.out, found.err):
        assert not RAW.search(text), RAW.search(text)
        assert not any(line.startswith(FORGED) for line in text.splitlines())
    assert "internal error" not in found.err
    return found.out, found.err


COMMANDS = {
    "lint": ["lint", "{p}"], "lint all": ["lint", "{p}", "--all"], "lint after": ["lint", "{p}", "--after", "{p}"],
    "lint output": ["lint", "{p}", "--format", "html", "-o", "{t}/a.html"],
    "lint gate": ["lint", "{p}", "--fail-under", "100"],
    "run": ["run", "{p}", "--feeds", "{f}", "-o", "{t}/o.npz"],
    "trace": ["run", "{p}", "--feeds", "{f}", "--trace"],
    "calibrate": ["calibrate", "{p}", "--feeds", "{f}"],
    "rewrite": ["rewrite", "{p}", "-o", "{t}/out.mlpackage", "--diff"],
    "rewrite evil output": ["rewrite", "{p}", "-o", "{t}/b{e}.mlpackage", "--preset", "full", "--diff"],
    "dry run": ["rewrite", "{p}", "--dry-run", "--diff", "--preset", "full"],
    "verify": ["verify", "{p}", "{p}"], "verify quirk": ["verify", "{p}", "{p}", "--quirk", "exp_overflow"],
    "edit rename": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--rename", "x{e}=ok"],
    "edit expose": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--expose", "inner{e}"],
    "edit drop": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--drop-output", "z{e}"],
    "edit io": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--io", "fp32"],
    "edit split": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--split-at", "root{e}"],
    "mac-script": ["mac-script", "{t}/m{e}", "{p}", "--seeds", "1"],
    "batch lint": ["batch", "lint", "{p}", "-o", "{t}/reports", "--jobs", "0"],
    "batch rewrite": ["batch", "rewrite", "{p}", "-o", "{t}/rewritten", "--jobs", "0", "--preset", "full"],
}
WRONG = {
    "edit to evil": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--rename", "x{e}=a{e}"],
    "no such package": ["lint", "{t}/none{e}.mlpackage"],
    "no such output": ["edit", "{p}", "-o", "{t}/r.mlpackage", "--drop-output", "no{e}"],
    "no such pass": ["rewrite", "{p}", "--dry-run", "--passes", "no{e}"],
    "no such rule": ["explain", "no{e}"],
    "no such target": ["lint", "{p}", "--target", "no{e}"],
    "no such option": ["lint", "{p}", "--no{e}"],
    "no such choice": ["lint", "{p}", "--format", "no{e}"],
    "no such command": ["no{e}"],
    "no such function": ["run", "{p}", "--feeds", "{f}", "-o", "{t}/o.npz", "--function", "no{e}"],
    "no such feeds": ["run", "{p}", "--feeds", "{t}/no{e}.npz", "-o", "{t}/o.npz"],
    "wrong feeds": ["calibrate", "{p}", "--ranges", "no{e}=0:1"],
    "wrong range": ["calibrate", "{p}", "--ranges", "{e}"],
    "no such baseline": ["lint", "{p}", "--baseline", "{t}/no{e}.json"],
    "no such settings": ["lint", "{p}", "--config", "{t}/no{e}.toml"],
    "no such plan": ["calibrate-plan", "{t}/no{e}.json"],
    "two packages differ": ["verify", "{p}", "{o}"],
}


@pytest.mark.parametrize("case", [*COMMANDS, *WRONG])
def test_text_and_errors(case, hostile, feeds, fixtures, tmp_path, capsys):
    asked = COMMANDS.get(case) or WRONG[case]
    given = {"p": hostile, "f": feeds, "t": tmp_path, "e": EVIL, "o": fixtures / "nmp.mlpackage"}
    out, err = printed([each.format(**given) for each in asked], capsys, (0, 1) if case in COMMANDS else (1, 2))
    assert (out if case in COMMANDS else err or out)


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_json_has_the_exact_names(form, hostile, capsys):
    out, _ = printed(["lint", hostile, "--format", form], capsys)
    assert any(f"y{EVIL}" in text for text in _texts(json.loads(out)))


def _texts(data):
    if isinstance(data, str):
        yield data
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _texts(each)


def test_progress(hostile, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    assert main(["verify", str(hostile), str(hostile)]) == 0
    assert not RAW.search(screen.getvalue().replace("\r\x1b[K", ""))


def test_bytes_that_are_no_text_are_shown_as_bytes(tmp_path, capfd):
    path = str(tmp_path / "a\udcc3.mlpackage")
    assert main(["lint", path]) == 2
    assert "a\\xc3.mlpackage" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["naïve", "日本語", "a b", "a\\nb", "👩‍👩‍👧"])
def test_plain_text_stays(text):
    assert escape_text(text) == text


def test_a_line_stays_one():
    assert format_lines(["a\nb", "c\u2028d"]) == "a\\nb\nc\\u2028d"
    assert not RAW.search(escape_text("".join(map(chr, range(0x3000)))))


def test_the_folder_for_a_mac_prints_a_command_that_a_shell_reads_as_one(hostile, fixtures, tmp_path, capsys):
    folder = tmp_path / "m b;touch pwned"
    source = shutil.copytree(fixtures / "nmp.mlpackage", tmp_path / "in.mlpackage")
    out, _ = printed(["mac-script", folder, source, "--seeds", "1"], capsys, (0,))
    assert f"calibrate-plan '{folder}/result.json'" in out


def test_placeholders_and_links_in_names_are_literal_in_sarif(fixtures, tmp_path, capsys):
    name = "{0}{{x}}%s%n[link](https://evil)"
    path = tmp_path / "in.mlpackage"
    shutil.copytree(fixtures / "conv_transpose_1d.mlpackage", path)
    spec = spec_of(path)
    for block in spec.mlProgram.functions["main"].block_specializations.values():
        for op in block.operations:
            for output in op.outputs:
                _swap(block, output.name, f"{output.name}{name}" if op.type != "const" else output.name)
                break
    for feature in spec.description.output:
        feature.name += name
    (path / MODEL).write_bytes(spec.SerializeToString())
    out, _ = printed(["lint", path, "--format", "sarif"], capsys)
    texts = [result["message"]["text"] for result in json.loads(out)["runs"][0]["results"]]
    hit = [text for text in texts if "link" in text]
    assert hit
    for text in hit:
        assert "](" not in text.replace("\\](", "") and not re.search(r"(?<!\{)\{(\{\{)*\d", text)
        assert name in text.replace("\\](", "](").replace("{{", "{").replace("}}", "}")


def _swap(block, old: str, new: str) -> None:
    """Give the value `old` of a block the name `new`."""
    for op in block.operations:
        for argument in (one for bound in op.inputs.values() for one in bound.arguments):
            if argument.WhichOneof("binding") == "name" and argument.name == old:
                argument.name = new
        for output in op.outputs:
            output.name = new if output.name == old else output.name
    block.outputs[:] = [new if each == old else each for each in block.outputs]


@pytest.mark.parametrize("name", [
    "plain", "a b", "it's", "a\nb", "a\tb\x1b[31m", "\u202eback\\slash'", os.fsdecode(b"\xff\xfe'q"), "\x85", EVIL,
    "$HOME`id`"])
def test_a_printed_word_is_read_by_bash_as_the_name(name):
    command = join_words(["printf", "%s", name])
    assert escape_text(command) == command and quote_word(name) in command
    found = subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert found == os.fsencode(name)
