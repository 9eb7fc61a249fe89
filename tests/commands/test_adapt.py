"""Decoders adapted to the ANE: the folder, the tokens that its script generates, and what cannot be adapted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import make, normal, spec_of, with_functions

pytest.importorskip("transformers")

PROMPT = np.random.default_rng(5).integers(0, 96, 40).tolist()
STEPS = 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    from tests.lab.language_models.builders import convert

    folder = tmp_path_factory.mktemp("adapted") / "llama"
    return ane.adapt(convert("llama", "states"), folder, prefill=16), folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The same in two parts, its logits in five tiles."""
    from tests.lab.language_models.builders import convert

    folder = tmp_path_factory.mktemp("parts") / "llama"
    return ane.adapt(convert("llama", "states"), folder, prefill=16, parts=2, head_tiles=5), folder


@functools.cache
def run_module(name):
    """Greedy tokens of the module behind PROMPT, without a cache, and its logits at each step."""
    from tests.lab.language_models.__main__ import make_encoded, run_torch

    return run_torch(name, PROMPT, STEPS, make_encoded(name))


@pytest.mark.slow
def test_the_script_generates_the_tokens_of_the_module_behind_a_prompt_in_chunks(llama):
    _, folder = llama
    command = [sys.executable, str(folder / "generate.py"), "--ids", ",".join(map(str, PROMPT)), "--steps", str(STEPS),
               "--runtime", "reference", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={
        "PYTHONPATH": str(Path(ane.__file__).parent.parent), "OMP_NUM_THREADS": "1"})
    assert json.loads(found.stdout)["tokens"] == run_module("llama")[0]


def test_logits_of_each_step_are_those_of_the_module(llama):
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    decoder = Decoder(llama[1], open_by("reference"))
    tokens, logits = run_module("llama")
    ids = PROMPT
    for token, expected in zip(tokens, logits, strict=True):
        found = decoder.feed(ids)
        assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
        assert int(np.argmax(found)) == token
        ids = [token]
    assert decoder.position == len(PROMPT) + STEPS - 1


def continue_by_script(folder, **arrays):
    """Tokens that generate.py continues PROMPT with on the reference runtime, or what it prints as an error."""
    from mil_ane_passes.report.decoder import generate

    np.savez(folder.parent / "inputs.npz", **arrays)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(generate, "__file__", str(folder / "generate.py"))
        code = generate.main(["--ids", ",".join(map(str, PROMPT)), "--steps", str(STEPS), "--runtime", "reference",
                              "--json", "--inputs", str(folder.parent / "inputs.npz")])
    assert code == (2 if err.getvalue() else 0)
    return err.getvalue() or json.loads(out.getvalue())["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    "t5_decoder", "bart_decoder", "whisper_decoder"])
def test_a_decoder_with_cross_attention_reads_what_an_encoder_returned(tmp_path, name):
    from tests.lab.language_models.__main__ import make_encoded
    from tests.lab.language_models.builders import CROSS_DECODERS, convert

    folder = tmp_path / "out"
    report = ane.adapt(convert(name, "cross"), folder, prefill=16)
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    assert report.before["unsupported"] and report.after["unsupported"] == {} and report.after["unknown"] == 0
    masked = CROSS_DECODERS[name].masked
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["fixed"]) == {"encoded", *(["encoderMask"] if masked else [])}
    assert list(manifest["once"]["inputs"]) == ["encoded"] and len(manifest["once"]["outputs"]) == 4
    for name_ in ("decode", "prefill"):
        read = ane.load(folder / "decoder.mlpackage").program.functions[name_].inputs
        assert set(manifest["once"]["outputs"]) <= set(read) and "encoded" not in read
    page = (folder / "README.md").read_text()
    assert "@" not in page and 'features(["encoded": encoded])' in page and "--inputs inputs.npz" in page
    encoded = make_encoded(name)
    assert continue_by_script(folder, **encoded) == run_module(name)[0]
    assert "no values for the input 'encoded' (1, 20, 128)" in continue_by_script(folder)
    wrong = {**encoded, "encoded": np.zeros((1, 3, 128))}
    assert "'encoded' is (1, 3, 128); expected (1, 20, 128)" in continue_by_script(folder, **wrong)


@pytest.mark.parametrize("prefill", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_states_that_are_replaced_at_each_step_go_in_and_out(tmp_path, capsys, prefill):
    from tests.lab.language_models.builders import convert

    source, folder = convert("mamba", "recurrent"), tmp_path / "out"
    report = ane.adapt(source, folder, prefill=prefill)
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    assert report.before["unsupported"] and report.after["unsupported"] == {} and report.after["unknown"] == 0
    if prefill is not None:
        functions = ane.load(folder / "decoder.mlpackage").program.functions.values()
        one, several = (sum(op.op_type == "linear" for op in each.operations) for each in functions)
        assert one == several
        assert ane.lint(folder / "decoder.mlpackage", target="m4").summary()["ane_unsupported"] == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["context"] is None and manifest["inputs"] == {"ids": "inputIds", "position": None, "mask": None}
    assert [(each["input"], each["output"], each["axis"]) for each in manifest["cache"]["arrays"]] == [
        ("convState", "convState_new", None), ("recurrentState", "recurrentState_new", None)]
    page = (folder / "README.md").read_text()
    assert "@" not in page and "The model is recurrent" in page and "position" not in page.partition("```swift")[2]
    assert continue_by_script(folder) == run_module("mamba")[0]
    for arguments, reason in ((["--context", "64"], "its states hold any number of tokens"),
                              (["--cache", "state"], "several states are reported to fail"),
                              (["--embedding", "npy"], "token ids alone are looked up")):
        assert main(["adapt", str(source), "-o", str(tmp_path / "none"), *arguments]) == 2
        said = capsys.readouterr().err
        assert reason in said and "the model is recurrent, it has states (convState, recurrentState)" in said, said
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_parts_of_a_recurrent_model_hand_on_what_the_last_one_returns(tmp_path):
    from tests.lab.language_models.builders import convert

    report = ane.adapt(convert("mamba", "recurrent"), tmp_path / "out", parts=2)
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list_packages(manifest["parts"][0]) == ["decode_1.mlpackage", "decode_2.mlpackage"]
    assert continue_by_script(tmp_path / "out") == run_module("mamba")[0]


@pytest.mark.slow
def test_a_step_of_a_recurrent_model_that_is_wrong_is_found(tmp_path, monkeypatch):
    from mil_ane_passes.transforms.unroll_steps import _Unrolling
    from tests.lab.language_models.builders import convert

    monkeypatch.setattr(_Unrolling, "_get_carried", lambda self, each, token, before: each.read)
    report = ane.adapt(convert("mamba", "recurrent"), tmp_path / "out", prefill=2)
    assert report.status == "rejected" and "prefill: 'logits' differs by" in report.reason, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["states, exported", "stateless, exported"])
def test_a_decoder_of_torch_export_generates_the_tokens_of_the_module(tmp_path, form):
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by
    from tests.lab.language_models.builders import convert

    report = ane.adapt(convert("llama", form), tmp_path / "out", prefill=16)
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    assert report.before["unsupported"] and report.after["unsupported"] == {}
    assert generate(Decoder(tmp_path / "out", open_by("reference")), PROMPT, STEPS) == run_module("llama")[0]


def test_no_op_is_unsupported_and_the_report_says_so(llama):
    report, folder = llama
    assert sum(report.before["unsupported"].values()) > 100
    assert report.after["unsupported"] == {} and report.after["unknown"] == 0
    assert ane.lint(folder / "decoder.mlpackage", target="m4").summary()["ane_unsupported"] == 0
    for name in ("decode", "prefill"):
        function = ane.load(folder / "decoder.mlpackage").program.functions[name]
        assert all(var.dtype == types.fp16 and var.rank <= 4 for var in function.inputs.values())
    assert len(report.tokens) == 16 and report.logit_error is not None and report.logit_error < 0.01
    assert "0 unsupported on m4" in str(report) and "generated 16 tokens as the source does" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["status"] == "written"


def test_the_manifest_states_names_shapes_and_the_form_of_the_cache(llama):
    manifest = json.loads((llama[1] / "manifest.json").read_text())
    assert (manifest["schema"], manifest["context"], manifest["vocabulary"]) == (1, 64, 96)
    assert manifest["inputs"] == {"ids": "inputIds", "position": "position", "mask": "causalMask"}
    assert manifest["cache"] == {"form": "io", "arrays": [
        {"input": "cache", "output": "cache_rows", "axis": 2, "shape": [1, 8, 64, 32], "dtype": "float16"}]}
    assert [(part["tokens"], list_packages(part), part["function"]) for part in manifest["parts"]] == [
        (1, ["decoder.mlpackage"], "decode"), (16, ["decoder.mlpackage"], "prefill")]
    page = (llama[1] / "README.md").read_text()
    assert "@" not in page and '["cache": [1, 8, 64, 32]]' in page and "makeState" not in page
    assert not [each for each in llama[1].parent.iterdir() if each != llama[1]]


def test_functions_share_the_weights_of_the_source(llama):
    from tests.lab.language_models.builders import convert

    sizes = [sum(each.stat().st_size for each in package.rglob("weight.bin"))
             for package in (convert("llama", "states"), llama[1] / "decoder.mlpackage", llama[1] / "lookup.mlpackage")]
    assert sizes[1] + sizes[2] < 1.05 * sizes[0]
    assert sorted(each.name for each in llama[1].iterdir()) == [
        "README.md", "decoder.mlpackage", "generate.py", "lookup.mlpackage", "manifest.json"]
    for name in ("decoder", "lookup"):
        spec = spec_of(llama[1] / f"{name}.mlpackage")
        assert spec.description.defaultFunctionName == "decode"
        described = {each.name: [var.name for var in each.input] for each in spec.description.functions}
        assert set(described) == {"decode", "prefill"} and described["decode"] == described["prefill"]
    page = (llama[1] / "README.md").read_text()
    assert "`decode` takes 1 at a time, `prefill` takes 16 at a time" in page
    assert 'cpuAndNeuralEngine.functionName = "decode"' in page


def list_packages(part):
    return [each["package"] for each in part["main"]]


@pytest.mark.slow
def test_the_main_package_is_cut_between_its_layers(llama, parts):
    """Each part has its layer's weights and reads its channels of the cache; together they return the same logits."""
    from mil_ane_passes.report.decoder.generate import Decoder
    from mil_ane_passes.runtime import predictor

    report, folder = parts
    assert report.status == "written" and len(report.tokens) == 16, str(report)
    assert report.after["unsupported"] == {} and "part 2 of 2 has " in str(report)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = ["decoder_1.mlpackage", "decoder_2.mlpackage"]
    assert [list_packages(part) for part in manifest["parts"]] == [names, names]
    assert [each["caches"] for each in manifest["parts"][0]["main"]] == [
        {"cache": [[0, 2], [4, 6]]}, {"cache": [[2, 4], [6, 8]]}]  # keys and values of a layer
    sizes = [sum(file.stat().st_size for file in (folder / name).rglob("*.bin")) for name in names]
    whole = sum(file.stat().st_size for file in (llama[1] / "decoder.mlpackage").rglob("*.bin"))
    assert sum(sizes) < 1.05 * whole and max(sizes) < 0.7 * whole
    one, several = (Decoder(each, lambda path, function: predictor(path, function=function, precision="float32"))
                    for each in (llama[1], folder))
    for ids in (PROMPT, [3], [4]):
        expected = one.feed(ids)
        assert np.abs(several.feed(ids) - expected).max() <= 2e-3 * np.abs(expected).max()  # the cache is in fp16
    page = (folder / "README.md").read_text()
    assert "main model in 2 parts, `decoder_1.mlpackage`, `decoder_2.mlpackage`, in this order" in page


def test_parts_of_at_most_a_size(tmp_path, capsys):
    source = make_carrying(tmp_path / "source.mlpackage")
    whole = ["adapt", str(source), "-o", str(tmp_path / "whole"), "--max-part-size", "1GB"]
    assert main(whole) == 0 and "part 1 of" not in capsys.readouterr().out
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert len(list_packages(manifest["parts"][0])) == 1
    assert main([*whole, "--parts", "2", "--overwrite"]) == 2
    assert "--parts 2 and --max-part-size 1GB: each sets the number of parts" in capsys.readouterr().err
    assert main(["adapt", str(source), "-o", str(tmp_path / "none"), "--parts", "40"]) == 2
    assert "--parts 40: there is no place at which the function can be cut" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_size_of_parts_makes_several_that_generate_the_tokens_of_the_module(tmp_path):
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by
    from tests.lab.language_models.builders import convert

    folder = tmp_path / "out"
    report = ane.adapt(convert("gpt2", "states"), folder, max_part_size="300KB")
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    names = list_packages(json.loads((folder / "manifest.json").read_text())["parts"][0])
    assert names == [f"decode_{number}.mlpackage" for number in range(1, len(names) + 1)] and len(names) > 1
    sizes = [sum(file.stat().st_size for file in (folder / name).rglob("*.bin")) for name in names]
    assert max(sizes) <= 300_000 < sum(sizes) < len(names) * 300_000
    assert generate(Decoder(folder, open_by("reference")), PROMPT, STEPS) == run_module("gpt2")[0]


def test_logits_in_tiles_are_outputs_of_their_own(tmp_path, llama, parts, capsys):
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by
    from tests.lab.language_models.builders import convert

    report, folder = parts
    assert report.status == "written" and len(report.tokens) == STEPS, str(report)
    assert "'logits' (96 wide) is cut into 5 outputs of at most 20: logits_1 to logits_5" in str(report)
    assert "96 outputs fit m4 (65,536 along an axis)" in str(report) and "4.6 % slower (A19 Pro)" in str(report)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [f"logits_{number}" for number in range(1, 6)]
    assert manifest["outputs"] == {"logits": names}
    last = ane.load(folder / "decoder_2.mlpackage").program.functions["decode"]
    assert [int(var.shape[-1]) for var in last.outputs if var.name in names] == [19, 19, 20, 19, 19]
    assert not any(op.op_type == "concat" and int(op.outputs[0].shape[-1]) == 96 for op in last.operations)
    size, whole = (sum(each.stat().st_size for each in place.rglob("weight.bin")) for place in (folder, llama[1]))
    assert size < 1.05 * whole
    assert "joinLast([" in (folder / "README.md").read_text()
    assert generate(Decoder(folder, open_by("reference")), PROMPT, STEPS) == run_module("llama")[0]
    for arguments, reason in (
            (["--head-tiles", "97"], "97 tiles of the output 'logits', which is 96 wide; expected 2 to 96"),
            (["--head-tiles", "4", "--target", "a19"], "4.6 % slower (A19 Pro, CoreML-LLM)")):
        assert main(["adapt", str(convert("llama", "states")), "-o", str(tmp_path / "none"), *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_logits_that_are_no_product_are_not_cut(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", activation=True)
    with pytest.raises(ane.InputError, match="the output 'logits' is made by a tanh op; expected a linear or matmul"):
        ane.adapt(source, tmp_path / "out", head_tiles=2)


def test_tiles_of_a_compressed_head_end_where_its_blocks_do(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", palette=True)
    report = ane.adapt(source, tmp_path / "out", head_tiles=2)
    assert report.status == "written", str(report)
    function, = ane.load(tmp_path / "out" / "decode.mlpackage").program.functions.values()
    assert {var.name: int(var.shape[-1]) for var in function.outputs if "logits" in var.name} == {
        "logits_1": 4, "logits_2": 4}
    assert sum(op.op_type == "constexpr_lut_to_dense" for op in function.operations) == 2
    with pytest.raises(ane.InputError, match="which is 8 wide in blocks of 4; expected 2 to 2"):
        ane.adapt(source, tmp_path / "none", head_tiles=3)


def test_before_functions_there_are_two_packages(tmp_path):
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    source = make_carrying(tmp_path / "source.mlpackage", target=ct.target.iOS17)
    report = ane.adapt(source, tmp_path / "out", prefill=3)
    assert report.status == "written", str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [(part["lookup"], list_packages(part), part["function"]) for part in manifest["parts"]] == [
        (f"{name}_lookup.mlpackage", [f"{name}.mlpackage"], None) for name in ("decode", "prefill")]
    assert {name for name in ("decode_lookup", "decode", "prefill_lookup", "prefill") if ane.lint(
        tmp_path / "out" / f"{name}.mlpackage", target="m4").not_judged} == {"decode_lookup", "prefill_lookup"}
    chunks, singles = (Decoder(tmp_path / "out", open_by("reference")) for _ in range(2))
    for each in (1, 2, 3):
        single = singles.feed([each])
    assert np.abs(chunks.feed([1, 2, 3]) - single).max() < 0.01
    assert "see `parts` in `manifest.json`" in (tmp_path / "out" / "README.md").read_text()


def test_the_cache_as_one_state_that_the_functions_share(tmp_path, capsys):
    """A prompt in chunks leaves in the state what single tokens do."""
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by
    from tests.lab.language_models.builders import convert

    folder = tmp_path / "gpt2"
    arguments = ["adapt", str(convert("gpt2", "states")), "-o", str(folder), "--cache", "state", "--context", "60",
                 "--prefill", "16"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "before: " in said and "after: " in said and "0 unsupported on m4" in said and "generated 16 tokens" in said
    page = (folder / "README.md").read_text()
    assert "makeState" in page and "a state that one function made serves the other" in page
    functions = spec_of(folder / "decoder.mlpackage").description.functions
    assert [(each.name, [var.name for var in each.state]) for each in functions] == [
        ("decode", ["cache"]), ("prefill", ["cache"])]
    opened = open_by("reference")
    decoder = Decoder(folder, opened)
    assert generate(decoder, PROMPT, STEPS) == run_module("gpt2")[0]
    with pytest.raises(ValueError, match=r"tokens; the maximum \(context\) is 60"):
        decoder.feed(PROMPT)
    chunks, singles = (Decoder(folder, opened) for _ in range(2))
    chunked = chunks.feed(PROMPT)
    for each in PROMPT:
        single = singles.feed([each])
    assert np.abs(chunked - single).max() <= 5e-3 * np.abs(single).max()
    sampled = [generate(Decoder(folder, opened), PROMPT[:5], 4, 0.8, seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_figures_are_those_of_lint_and_no_fix_is_tried_for_them(llama, monkeypatch):
    from mil_ane_passes.commands import adapt_parts, lint
    from tests.lab.language_models.builders import convert

    source = convert("llama", "states")
    expected = ane.lint(source, target="m4")
    assert any(item.split_at for item in expected.findings)
    monkeypatch.setattr(lint, "_can_cut", lambda *given: pytest.fail("a fix is tried"))
    figures = adapt_parts.measure_package(source, "m4")
    assert figures["ops"] == len(expected.plan.rows) and figures["share"] == round(expected.share, 2)
    assert sum(figures["unsupported"].values()) == sum(row.ane == "no" for row in expected.plan.rows)
    assert set(figures["reasons"]) == set(figures["unsupported"]) and all(figures["reasons"].values())


def test_a_script_with_wrong_ids_says_what_is_expected(llama, monkeypatch, capsys):
    from mil_ane_passes.report.decoder import generate

    text = (llama[1] / "generate.py").read_text()
    assert text == Path(generate.__file__).read_text()
    monkeypatch.setattr(generate, "__file__", str(llama[1] / "generate.py"))
    assert generate.main(["--ids", "1,96", "--runtime", "reference"]) == 2
    assert "expected ids from 0 to 95" in capsys.readouterr().err
    assert generate.main(["--ids", "hello world", "--runtime", "reference"]) == 2
    assert capsys.readouterr().err == ("generate.py: --ids: found 'hello world'; expected token ids, which a tokenizer "
                                       "makes of text, separated by commas: 1,2,3\n")


@pytest.mark.parametrize("given", ["-1", "nan", "inf"])
def test_a_script_rejects_a_temperature_below_zero(tmp_path, monkeypatch, capsys, given):
    from mil_ane_passes.report.decoder import generate

    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    assert generate.main(["--ids", "1", "--temperature", given, "--runtime", "reference"]) == 2
    assert capsys.readouterr().err == (f"generate.py: --temperature: found {float(given):g}; expected 0, for the most "
                                       "likely token, or a larger number\n")


def write_cut_archive(path):
    np.savez(path, states=np.zeros((40, 40)))
    path.write_bytes(path.read_bytes()[:-200])


def write_damaged_archive(path):
    """An archive of compressed arrays, with other bytes in the middle."""
    np.savez_compressed(path, states=normal(40, 40))
    data = bytearray(path.read_bytes())
    data[600:700] = bytes(100)
    path.write_bytes(data)


@pytest.mark.parametrize(("name", "write", "reason"), [
    ("array.npy", lambda path: np.save(path, np.zeros((1, 4), np.float32)), "found one array of float32"),
    ("empty.npz", lambda path: path.write_bytes(b""), "No data left in file"),
    ("cut.npz", write_cut_archive, "is not a zip file"),
    ("damaged.npz", write_damaged_archive, ""),
    ("text.npz", lambda path: path.write_text("no array"), ""),
])
def test_a_script_rejects_inputs_that_are_no_arrays(llama, tmp_path, monkeypatch, capsys, name, write, reason):
    from mil_ane_passes.report.decoder import generate

    write(tmp_path / name)
    monkeypatch.setattr(generate, "__file__", str(llama[1] / "generate.py"))
    assert generate.main(["--ids", "1", "--inputs", str(tmp_path / name), "--runtime", "reference"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"generate.py: --inputs {tmp_path / name}: ") and reason in said
    assert said.endswith("; expected an .npz file, as written by np.savez(path, name=array)\n") and (
        len(said.splitlines()) == 1)


@pytest.mark.parametrize(("text", "reason"), [
    ('{"schema": 1}', "manifest.json lacks 'context'"),
    ("[]", "manifest.json has schema None; this script reads 1"),
    ("{", "manifest.json is not JSON"),
])
def test_a_script_rejects_another_manifest(tmp_path, monkeypatch, capsys, text, reason):
    from mil_ane_passes.report.decoder import generate

    (tmp_path / "manifest.json").write_text(text)
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    assert generate.main(["--ids", "1", "--runtime", "reference"]) == 2
    assert reason in capsys.readouterr().err


def test_the_printed_command_of_the_script_can_be_pasted(llama):
    said = str(dataclasses.replace(llama[0], output="/a folder/out")).splitlines()
    assert said[-1] == "next: python '/a folder/out/generate.py' --ids 1,2,3 --runtime reference"


def test_a_script_says_when_the_context_is_full(llama, monkeypatch, capsys):
    from mil_ane_passes.report.decoder import generate

    monkeypatch.setattr(generate, "__file__", str(llama[1] / "generate.py"))
    monkeypatch.setattr(generate, "generate", lambda *_: [4, 5])
    assert generate.main(["--ids", "1,2", "--steps", "2", "--runtime", "reference"]) == 0
    assert capsys.readouterr().err == ""
    assert generate.main(["--ids", "1,2", "--steps", "3", "--runtime", "reference"]) == 0
    context = json.loads((llama[1] / "manifest.json").read_text())["context"]
    assert capsys.readouterr().err == f"generate.py: stopped after 2 tokens, as the context of {context} is full\n"


def test_a_script_off_a_mac_names_the_runtime_to_use(llama, monkeypatch, capsys):
    from mil_ane_passes.report.decoder import generate

    monkeypatch.setattr(generate, "__file__", str(llama[1] / "generate.py"))
    monkeypatch.setattr(generate.sys, "platform", "linux")
    assert generate.main(["--ids", "1,2"]) == 2
    assert capsys.readouterr().err == ("generate.py: Core ML runs on macOS only; elsewhere, pass --runtime reference, "
                                       "which needs mil_ane_passes\n")


@pytest.mark.parametrize(("patched", "reason"), [("mask", "the logits differ by"), ("blend", "decode: different")])
def test_wrong_results_are_found_and_nothing_is_written(tmp_path, monkeypatch, patched, reason):
    from mil_ane_passes.report.decoder.generate import Decoder
    from mil_ane_passes.transforms.padding import Padding

    if patched == "mask":
        right = Decoder._make_mask
        monkeypatch.setattr(Decoder, "_make_mask", lambda self, mask, count: 0 * right(self, mask, count))
    else:
        write = Padding._blend
        monkeypatch.setattr(Padding, "_blend", lambda self, op, x, new, axis, start: write(self, op, x, new, axis,
                                                                                          start - 1))
    source = make_decoder(tmp_path / "source.mlpackage")
    report = ane.adapt(source, tmp_path / "out")
    assert report.status == "rejected" and reason in report.reason, str(report)
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


ROWS, WIDTH = 8, 4


def make_decoder(path, **options):
    """A package of a decoder with ranges for the number of tokens and the length of the mask."""
    batch = options.get("batch", 1)
    steps, length = (ct.RangeDim(1, ROWS, default=1) for _ in range(2))
    ids = ct.TensorType("ids", (batch, steps) if options.get("ids", True) else (batch, steps, WIDTH),
                        dtype=np.int32 if options.get("ids", True) else np.float16)
    mask = ct.TensorType("mask", (1, 1, steps, options.get("end") or length), dtype=np.float16)
    more = []
    if "extra" in options:
        rows = ct.RangeDim(1, ROWS, default=1) if options.get("extra_rows", 1) is None else 1
        more = [ct.TensorType("extra", (rows, WIDTH), dtype=types.nptype_from_builtin(options["extra"]))]
    return make(path, decoder(**options), ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY,
                inputs=[ids, mask, *more])


def decoder(*, batch=1, mask=True, ids=True, state=True, extra=None, extra_rows=1, outputs=1, end=None, write=True,
            ring=False, activation=False, palette=False, last=False, constant=""):
    """A decoder of one attention over its own cache, or one that lacks something."""
    steps, length = get_new_symbol(), get_new_symbol() if end is None else end
    specs = {"ids": mb.TensorSpec((batch, steps), dtype=types.int32) if ids else mb.TensorSpec(
        (batch, steps, WIDTH), dtype=types.fp16)}
    specs |= {"mask": mb.TensorSpec((1, 1, steps, length), dtype=types.fp16)}
    rows = get_new_symbol() if extra_rows is None else extra_rows
    specs |= {"extra": mb.TensorSpec((rows, WIDTH), dtype=extra)} if extra else {}
    specs |= {"cache": mb.StateTensorSpec((batch, 1, ROWS, WIDTH), dtype=types.fp16)} if state else {}

    def body(ids, mask_values, extra_values=None, cache=None):
        x = ids if not hasattr(ids, "dtype") or ids.dtype != types.int32 else mb.gather(
            x=normal(9, WIDTH).astype(np.float16), indices=ids, axis=0)
        if extra_values is not None:
            more = mb.reduce_sum(x=mb.cast(x=extra_values, dtype="fp16"), axes=[0], keep_dims=True)
            x = mb.add(x=x, y=more)
        keys = mb.expand_dims(x=mb.matmul(x=x, y=normal(WIDTH, WIDTH).astype(np.float16)), axes=[1])
        if cache is not None or constant:
            stop = mb.gather(x=mb.shape(x=mask_values), indices=3, axis=0)
            start = mb.sub(x=stop, y=mb.gather(x=mb.shape(x=mask_values), indices=2, axis=0))
            start = mb.mod(x=start, y=ROWS, name="place") if ring else start
            begin, until = (mb.concat(values=[np.int32([0, 0]), mb.expand_dims(x=each, axes=[0]), np.int32([last])],
                                      axis=0) for each, last in ((start, 0), (stop, WIDTH)))
            until = mb.add(x=until, y=np.int32([batch, 1, 0, 0]))
            if constant:
                held = mb.slice_update(x=mb.const(val=np.zeros((batch, 1, ROWS, WIDTH), np.float16),
                                                  name=f"{constant}_to_fp16"), update=keys, begin=begin, end=until,
                                       name="written")
            else:
                held = mb.read_state(input=cache)
            if write and not constant:
                held = mb.coreml_update_state(state=cache, value=mb.slice_update(x=held, update=keys, begin=begin,
                                                                                 end=until))
            keys = mb.slice_by_index(x=held, begin=[0, 0, 0, 0], end=until)
        scores = mb.matmul(x=mb.expand_dims(x=x, axes=[1]), y=keys, transpose_y=True)
        scores = mb.add(x=scores, y=mask_values) if mask else mb.mul(x=scores, y=mb.exp(x=mask_values))
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys)
        mixed = mb.squeeze(x=mixed, axes=[1])
        if last:
            mixed = mb.slice_by_index(x=mixed, begin=[0, -1, 0], end=[0, 0, 0], begin_mask=[True, False, True],
                                      end_mask=[True, True, True])
        if palette:
            codes = (np.arange(8 * WIDTH) * 5 % 16).reshape(8, WIDTH).astype(types.np_uint4_dtype)
            return mb.linear(x=mixed, weight=mb.constexpr_lut_to_dense(
                indices=codes, lut=normal(2, 1, 16, 1).astype(np.float16)), name="logits")
        logits = mb.matmul(x=mixed, y=normal(WIDTH, 9).astype(np.float16), name="product" if activation else "logits")
        logits = mb.tanh(x=logits, name="logits") if activation else logits
        return logits if outputs == 1 else (logits, mb.relu(x=logits, name="more"))

    named = {"ids": "ids", "mask": "mask_values", "extra": "extra_values", "cache": "cache"}
    scope: dict = {"body": body}
    given = ", ".join(f"{named[key]}={key}" for key in specs)
    exec(f"def call({', '.join(specs)}): return body({given})", scope)
    return mb.program(input_specs=list(specs.values()), opset_version=ct.target.iOS18)(scope["call"])


def make_carrying(path, *, form="stacked", mask_rows=None, batch=1, masks=1, returned="all", state=False, least=1,
                  float32=False, target=ct.target.iOS18, table=None, ids_read=False,
                  named="logits"):
    """A package of a decoder of two layers whose cache goes in and comes out with new rows."""
    kind, np_kind = (types.fp32, np.float32) if float32 else (types.fp16, np.float16)
    steps, length, past = (get_new_symbol() for _ in range(3))
    count = batch or get_new_symbol()
    names = ["cache"] if form in ("stacked", "split", "gathered") else ["cache_0", "cache_1"]
    lead = (2, 1, 1) if names == ["cache"] else (count, 1)
    specs = {"ids": mb.TensorSpec((1 if batch is None else batch, steps), dtype=types.int32)}
    specs |= {f"mask{number or ''}": mb.TensorSpec((1, 1, mask_rows or steps, length), dtype=kind)
              for number in range(masks)}
    specs |= {name: mb.TensorSpec((*lead, past, WIDTH), dtype=kind) for name in names}
    specs |= {"held": mb.StateTensorSpec((1, 1, ROWS, WIDTH), dtype=types.fp16)} if state else {}

    def body(ids, more):
        masks_, caches = [more[each] for each in specs if each.startswith("mask")], [more[name] for name in names]
        x = mb.gather(x=normal(9, WIDTH).astype(np_kind) if table is None else table(np_kind), indices=ids, axis=0)
        if ids_read:
            x = mb.add(x=x, y=mb.expand_dims(x=mb.cast(x=ids, dtype="fp16", name="kinds"), axes=[2]))
        new = []
        for layer in range(2):
            if form == "stacked":
                held = mb.slice_by_index(x=caches[0], begin=[layer, 0, 0, 0, 0], end=[layer + 1, 1, 1, 0, WIDTH],
                                         end_mask=[False, True, True, True, True],
                                         squeeze_mask=[True, False, False, False, False])
            elif form == "gathered":
                held = mb.gather(x=caches[0], indices=layer, axis=0)
            elif form == "split":
                held = mb.squeeze(x=mb.split(x=caches[0], num_splits=2, axis=0)[layer], axes=[0])
            else:
                held = caches[layer]
            held = mb.mul(x=held, y=np_kind(1)) if form == "scaled" else held
            weight = normal(WIDTH, WIDTH, seed=layer).astype(np_kind)
            keys = mb.expand_dims(x=mb.matmul(x=x, y=weight), axes=[1])
            keys = mb.concat(values=[held, keys], axis=2)
            new.append(keys)
            scores = mb.matmul(x=mb.expand_dims(x=x, axes=[1]), y=keys, transpose_y=True)
            for each in masks_:
                scores = mb.add(x=scores, y=each)
            x = mb.add(x=x, y=mb.squeeze(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys), axes=[1]))
        logits = mb.matmul(x=x, y=normal(WIDTH, 9).astype(np_kind), name=named)
        if returned == "window":
            new = [mb.slice_by_index(x=each, begin=[0, 0, 1, 0], end=[1, 1, 0, WIDTH], end_mask=[True] * 4,
                                     begin_mask=[True, True, False, True]) for each in new]
        if returned == "swapped":
            new = new[::-1]
        outputs = [mb.stack(values=new, axis=0, name="new")] if len(names) == 1 else [
            mb.identity(x=each, name=f"new_{number}") for number, each in enumerate(new)]
        if state:
            mb.coreml_update_state(state=more["held"], value=mb.mul(x=mb.read_state(input=more["held"]),
                                                                    y=np.float16(2)))
        return (logits, *(outputs if returned != "none" else ()))

    scope: dict = {"body": body}
    given = ", ".join(f"{each}={each}" for each in specs)
    exec(f"def call({', '.join(specs)}): return body(ids, dict({given}))", scope)
    program = mb.program(input_specs=list(specs.values()), opset_version=target)(scope["call"])
    steps_, length_ = (ct.RangeDim(1, ROWS, default=1) for _ in range(2))
    past_ = ct.RangeDim(least, ROWS - 1, default=1)
    count_ = batch or ct.RangeDim(1, 2, default=1)
    inputs = [ct.TensorType("ids", (1 if batch is None else batch, steps_), dtype=np.int32)]
    inputs += [ct.TensorType(each, (1, 1, mask_rows or steps_, length_), dtype=np_kind) for each in specs
               if each.startswith("mask")]
    inputs += [ct.TensorType(name, (*(lead if names == ["cache"] else (count_, 1)), past_, WIDTH), dtype=np_kind)
               for name in names]
    return make(path, program, target, pass_pipeline=ct.PassPipeline.EMPTY, inputs=inputs)


def make_written_in_one(path, form, convert):
    """A package of a decoder of torch that assigns rows of one layer of its cache in one statement."""
    import torch
    from torch import nn

    heads, width = 2, 8
    lead = (2, 1, heads) if form != "rank 4" else (2, heads)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table, self.logits = nn.Embedding(9, heads * width), nn.Linear(heads * width, 9)
            self.layers = nn.ModuleList([nn.Linear(heads * width, heads * width) for _ in range(6)])
            self.register_buffer("k", torch.zeros(*lead, ROWS, width))
            self.register_buffer("v", torch.zeros(*lead, ROWS, width))

        def forward(self, ids, mask):
            x, end = self.table(ids), mask.shape[-1]
            begin = end - ids.shape[-1]
            for layer in range(2):
                q, k, v = (self.layers[3 * layer + each](x).reshape(1, -1, heads, width).transpose(1, 2)
                           for each in range(3))
                for cache, new in ((self.k, k), (self.v, v)):
                    if form == "rank 5":
                        cache[layer, :, :, begin:end] = new
                    elif form == "rank 4":
                        cache[layer:layer + 1, :, begin:end] = new
                    else:
                        cache[layer, :, :new.shape[1], begin:end, :] = new
                k, v = (cache[layer:layer + 1, :, :end] if form == "rank 4" else cache[layer, :, :, :end]
                        for cache in (self.k, self.v))
                made = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
                x = x + made.transpose(1, 2).reshape(1, -1, heads * width)
            return self.logits(x)

    module = Decoder().eval()
    traced = torch.jit.trace(module, (torch.zeros((1, 2), dtype=torch.int32), torch.zeros(1, 1, 2, 5)),
                             check_trace=False)
    steps, length = (ct.RangeDim(1, ROWS, default=1) for _ in range(2))
    states = [ct.StateType(ct.TensorType(shape=tuple(held.shape), dtype=np.float16), name=name)
              for name, held in module.named_buffers()]
    convert(traced, inputs=[ct.TensorType("ids", (1, steps), dtype=np.int32),
                            ct.TensorType("mask", (1, 1, steps, length), dtype=np.float16)],
            outputs=[ct.TensorType("logits", dtype=np.float16)], states=states, skip_model_load=True,
            minimum_deployment_target=ct.target.iOS18).save(str(path))
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("form", "convert"), [("rank 5", ct.convert), ("rank 4", ct.convert),
                                               ("rank 5 up to its heads", ane.convert)])
def test_rows_of_a_layer_that_are_written_in_one_statement(tmp_path, form, convert):
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    source = make_written_in_one(tmp_path / "source.mlpackage", form, convert)
    report = ane.adapt(source, tmp_path / "out", prefill=3)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    decoder, state = Decoder(tmp_path / "out", open_by("reference")), {}
    for end, token in enumerate([3, 1, 8, 2, 5], 1):
        expected = ane.run(source, {"ids": np.int32([[token]]), "mask": np.zeros((1, 1, 1, end), np.float16)},
                           state=state)["logits"]
        assert np.abs(decoder.feed([token]) - expected.reshape(-1)).max() < 0.02 * np.abs(expected).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["stacked", "split", "gathered", "layers", "float32"])
def test_a_cache_that_goes_in_and_out_becomes_new_rows_alone(tmp_path, form):
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by

    source = make_carrying(tmp_path / "source.mlpackage", form="stacked" if form == "float32" else form,
                           float32=form == "float32")
    report = ane.adapt(source, tmp_path / "out", prefill=3)
    assert report.status == "written" and report.kind == "decoder", str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    names = ["cache_0", "cache_1"] if form == "layers" else ["cache"]
    assert [(each["input"], each["output"], each["shape"], each["dtype"]) for each in manifest["cache"]["arrays"]] == [
        (name, f"{name}_rows", [1, 1 if form == "layers" else 2, ROWS, WIDTH], "float16") for name in names]
    page = (tmp_path / "out" / "README.md").read_text()
    assert all(f'"{name}": [1, ' in page for name in names) and "@" not in page
    ids = [1, 2, 3, 4, 5]
    chunks, singles = (Decoder(tmp_path / "out", open_by("reference")) for _ in range(2))
    for each in ids[:-1]:
        singles.feed([each])
    assert np.abs(chunks.feed(ids) - singles.feed(ids[-1:])).max() < 0.01 and chunks.position == singles.position == 5
    assert len(report.tokens) == len(generate(chunks, [1], 2)) == 2


def test_a_stateless_decoder_generates_the_tokens_of_its_module_behind_a_prompt_in_chunks(tmp_path):
    from mil_ane_passes.report.decoder.generate import Decoder, generate, open_by
    from tests.lab.language_models.builders import convert

    report = ane.adapt(convert("gpt2", "stateless"), tmp_path / "out", prefill=16)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    decoder = Decoder(tmp_path / "out", open_by("reference"))
    assert generate(decoder, PROMPT, STEPS) == run_module("gpt2")[0]
    assert decoder.position == len(PROMPT) + STEPS - 1


CODES = np.random.default_rng(3).integers(0, 4, (9, WIDTH)).astype(np.uint8)


def affine(kind):
    return mb.constexpr_affine_dequantize(quantized_data=CODES.astype(np.int8), zero_point=np.int8(1),
                                          scale=np.linspace(0.5, 2, 9).astype(np.float16), axis=0)


def blocks(kind):
    return mb.constexpr_blockwise_shift_scale(
        data=CODES.astype(np.int8), scale=np.linspace(0.5, 2, 6).reshape(3, 2).astype(np.float16),
        offset=np.int8([[1, 0], [2, 1], [0, 3]]))


def small_blocks(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_uint4_dtype

    return mb.constexpr_blockwise_shift_scale(data=CODES.astype(np_uint4_dtype),
                                              scale=np.float16([[0.5, 1.5]]).reshape(1, 2))


def packed_palette(kind):
    bits = np.unpackbits(CODES.reshape(-1, 1), axis=1, bitorder="little")[:, :2].reshape(-1)
    return mb.constexpr_lut_to_dense(indices=np.packbits(bits, bitorder="little"), lut=np.float16([-1, 0.5, 1, 3]),
                                     shape=np.uint32([9, WIDTH]))


def palettes(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_uint2_dtype

    return mb.constexpr_lut_to_dense(indices=CODES.astype(np_uint2_dtype),
                                     lut=np.linspace(-2, 2, 12).reshape(3, 1, 4, 1).astype(np.float16))


def negative_blocks(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_int4_dtype

    return mb.constexpr_blockwise_shift_scale(data=(CODES.astype(np.int8) * 5 - 8).astype(np_int4_dtype),
                                              scale=np.float16([[0.5, 1.5]]).reshape(1, 2))


def sparse_mask():
    from coremltools.converters.mil.mil.types.type_mapping import np_uint1_dtype

    return (CODES > 1).astype(np.uint8).astype(np_uint1_dtype)


def sparse(kind):
    return mb.constexpr_sparse_to_dense(mask=sparse_mask(), nonzero_data=np.linspace(
        -2, 2, int((CODES > 1).sum())).astype(np.float16))


def packed_sparse(kind):
    return mb.constexpr_sparse_to_dense(mask=np.packbits((CODES > 1).reshape(-1), bitorder="little"), shape=np.uint32(
        [9, WIDTH]), nonzero_data=np.linspace(-2, 2, int((CODES > 1).sum())).astype(np.float16))


def sparse_palette(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_uint2_dtype

    codes = CODES[CODES > 1].astype(np_uint2_dtype)
    mask, values = mb.constexpr_lut_to_sparse(indices_mask=sparse_mask(), indices_nonzero_data=codes,
                                              lut=np.linspace(-2, 2, 12).reshape(3, 1, 4, 1).astype(np.float16))
    return mb.constexpr_sparse_to_dense(mask=mask, nonzero_data=values)


def sparse_blocks(kind):
    mask, values = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=sparse_mask(), nonzero_data=CODES[CODES > 1].astype(np.int8), offset=np.int8([[1]] * 9),
        scale=np.linspace(0.5, 2, 9).reshape(9, 1).astype(np.float16))
    return mb.constexpr_sparse_to_dense(mask=mask, nonzero_data=values)


def scaled_palette(kind):
    return mb.constexpr_blockwise_shift_scale(data=palettes(kind), scale=np.linspace(0.5, 2, 9).reshape(9, 1).astype(
        np.float16))


def quantized_palettes(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_uint2_dtype

    lut = mb.constexpr_blockwise_shift_scale(data=np.arange(-6, 6, dtype=np.int8).reshape(3, 1, 4, 1),
                                             scale=np.full((1, 1, 1, 1), 0.375, np.float16))
    return mb.constexpr_lut_to_dense(indices=CODES.astype(np_uint2_dtype), lut=lut)


def twice_scaled(kind):
    return mb.constexpr_blockwise_shift_scale(data=blocks(kind), scale=np.full((1, 1), 0.5, np.float16))


def vectors(kind):
    from coremltools.converters.mil.mil.types.type_mapping import np_uint2_dtype

    return mb.constexpr_lut_to_dense(indices=CODES[:, :2].astype(np_uint2_dtype), vector_axis=1,
                                     lut=np.linspace(-2, 2, 8).reshape(1, 1, 4, 2).astype(np.float16))


TABLES = {"dense": (None, ct.target.iOS18, [], (9, 4)),
          "affine": (affine, ct.target.iOS17, ["offset", "scale"], (9, 4)),
          "blocks": (blocks, ct.target.iOS18, ["offset", "scale"], (9, 4)),
          "small blocks": (small_blocks, ct.target.iOS18, ["scale"], (9, 2)),
          "negative blocks": (negative_blocks, ct.target.iOS18, ["scale"], (9, 2)),
          "packed palette": (packed_palette, ct.target.iOS17, ["lut"], (9, 1)),
          "palettes": (palettes, ct.target.iOS18, ["lut"], (9, 1)),
          "scaled palette": (scaled_palette, ct.target.iOS18, ["lut", "scale"], (9, 1)),
          "quantized palettes": (quantized_palettes, ct.target.iOS18, ["lut"], (9, 1)),
          "sparse": (sparse, ct.target.iOS18, ["mask", "starts"], None),
          "packed sparse": (packed_sparse, ct.target.iOS17, ["mask", "starts"], None),
          "sparse palette": (sparse_palette, ct.target.iOS18, ["lut", "mask", "starts"], None),
          "sparse blocks": (sparse_blocks, ct.target.iOS18, ["mask", "offset", "scale", "starts"], None)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TABLES)
def test_the_table_of_embeddings_is_a_file_that_the_script_reads(tmp_path, name):
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    table, target, more, shape = TABLES[name]
    source = make_carrying(tmp_path / "source.mlpackage", table=table, target=target)
    report = ane.adapt(source, tmp_path / "out", embedding="npy")
    assert report.status == "written" and report.logit_error < 0.01, str(report)
    assert "embedding as npy" in str(report) and "2-3 % slower" in str(report)
    assert sorted(each.name for each in (tmp_path / "out").glob("*.npy")) == sorted(
        ["embedding.npy", *(f"embedding_{each}.npy" for each in more)])
    data = np.load(tmp_path / "out" / "embedding.npy")
    assert shape is None and data.ndim == 1 or data.shape == shape
    assert data.dtype in ((np.float16,) if not {"lut", "scale"} & set(more) else (np.uint8, np.int8))
    assert ane.adapt(source, tmp_path / "other", verify=False).status == "written"
    ours, others = (Decoder(tmp_path / each, open_by("reference")) for each in ("out", "other"))
    for token in (8, 0, 3, 5):
        assert np.abs(ours.feed([token]) - others.feed([token])).max() < 0.01
    for package in (tmp_path / "out").glob("*.mlpackage"):
        function, = ane.load(package).program.functions.values()
        assert "ids" not in function.inputs
    assert "row(of: token)" in (tmp_path / "out" / "README.md").read_text()


def test_logits_of_the_last_token_alone(tmp_path):
    """As models return them to save the products of the others: this was an internal error."""
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    found = []
    for name, last in (("all", False), ("last", True)):
        source = make_decoder(tmp_path / f"{name}.mlpackage", last=last)
        report = ane.adapt(source, tmp_path / name, prefill=3)
        assert report.status == "written" and report.tokens, str(report)
        decoder = Decoder(tmp_path / name, open_by("reference"))
        found.append([decoder.feed([8, 0, 3, 5]), decoder.feed([1, 2, 7])])
    assert np.abs(np.subtract(*found)).max() < 0.01


def test_the_embedding_as_a_product_of_one_hot_rows(tmp_path):
    from mil_ane_passes.report.decoder.generate import Decoder, open_by

    source = make_decoder(tmp_path / "source.mlpackage")
    report = ane.adapt(source, tmp_path / "out", embedding="one-hot", prefill=3)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    assert "each call reads all 72 bytes of the table and multiplies 9 rows" in str(report)
    function = ane.load(tmp_path / "out" / "decoder.mlpackage").program.functions["prefill"]
    assert tuple(function.inputs["embedding"].shape) == (1, 3, 9)
    assert "oneHot(token)" in (tmp_path / "out" / "README.md").read_text()
    assert ane.adapt(source, tmp_path / "other", verify=False).status == "written"
    ours, others = (Decoder(tmp_path / each, open_by("reference")) for each in ("out", "other"))
    assert np.abs(ours.feed([8, 0, 3, 5]) - others.feed([8, 0, 3, 5])).max() < 0.01


@pytest.mark.parametrize(("options", "form", "reason"), [
    ({}, "one-hot", "the table has 9 rows; expected 8 at most"),
    ({"named": "embedding"}, "npy", "'embedding' is already an input or output; expected a free name"),
    ({"ids_read": True}, "npy", "the op 'kinds' (cast) reads the token ids 'ids' in addition to the lookup"),
    ({"table": twice_scaled}, "npy",
     "is compressed by constexpr_blockwise_shift_scale, or several times; expected one of constexpr_affine_dequantize"),
    ({"table": vectors}, "npy", "the table is compressed by palettes of vectors of 2; expected numbers"),
])
def test_an_embedding_that_cannot_be_taken_out_is_named(tmp_path, monkeypatch, options, form, reason):
    from mil_ane_passes.commands import adapt_decoder

    monkeypatch.setattr(adapt_decoder, "_MAX_ONE_HOT", 8)
    source = make_carrying(tmp_path / "source.mlpackage", **options)
    with pytest.raises(ane.InputError, match="expected") as refusal:
        ane.adapt(source, tmp_path / "out", embedding=form)
    assert reason in str(refusal.value), str(refusal.value)
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


@pytest.mark.parametrize(("options", "arguments", "reason"), [
    ({"returned": "window"}, [], "(slice_by_index) keeps some rows of the cache 'cache', as a sliding window does"),
    ({"returned": "none"}, [], "no output returns the cache 'cache' with the new rows"),
    ({"returned": "swapped"}, [], "is not the cache 'cache' with rows appended to each layer in order"),
    ({"form": "scaled"}, [], "the cache 'cache_0' is read by the op 'mul_0' (mul); expected layers of the cache"),
    ({"batch": 2, "form": "layers"}, [], "the token ids 'ids' are (2, ?); expected (1, T): no batch, and no beams"),
    ({"batch": None, "form": "layers"}, [], "the cache 'cache_0' is (?, 1, ?, 4); expected (..., rows, width) with "
                                            "flexible rows alone: no batch, and no beams"),
    ({"masks": 2}, [], "such as one for a sliding window; expected one mask of floats"),
    ({"mask_rows": 1}, [], "one row for all tokens of a call, so that each token attends to later ones; expected"),
    ({"state": True}, [], "the cache 'cache' is an input, and 'held' is a state; expected one form of cache"),
    ({}, ["--cache", "state"], "the cache of the source is an input and an output; expected --cache io"),
    ({}, ["--context", "9"], "the cache can have 8 rows; expected 3 to 8"),
    ({}, ["--context", "6", "--prefill", "6"], "--prefill 6: expected fewer tokens than the context, 6"),
])
def test_a_cache_that_is_carried_in_another_way_is_named(tmp_path, capsys, options, arguments, reason):
    source = make_carrying(tmp_path / "source.mlpackage", **options)
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


@pytest.mark.parametrize(("options", "reason"), [
    ({"batch": 2}, "the token ids 'ids' are (2, ?); expected (1, T): no batch, and no beams"),
    ({"ids": False}, "no input of token ids is looked up in a table by a gather op"),
    ({"mask": False}, "no input is added to what a softmax reads; expected one mask of floats"),
    ({"extra": types.int32}, "'extra' is an input of int32 besides token ids and a mask; expected these, the cache"),
    ({"extra": types.fp16, "extra_rows": None}, "'extra' is (?, 4), an input besides token ids and a mask, and no "
                                                "input that is added to scores can hide its padding; expected a "
                                                "fixed shape: --fix-shape extra=... of edit"),
    ({"outputs": 2}, "2 outputs (logits, more); expected logits alone"),
    ({"end": ROWS}, "the mask 'mask' is (1, 1, ?, 8); expected (1, 1, T, E) with flexible E"),
    ({"write": False}, "no rows are written to the cache at a position"),
    ({"ring": True}, "(slice_update) writes at a position modulo a number ('place', mod), as the cache of a"),
    ({"state": False, "constant": "buffer"}, "source.mlpackage: the model has no states, but the op 'written' "
     "(slice_update) writes rows into the constant buffer 'buffer'"),
])
def test_what_is_not_recognized_is_named(tmp_path, capsys, options, reason):
    source = make_decoder(tmp_path / "source.mlpackage", **options)
    assert main(["adapt", str(source), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert reason in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--context", "9"], "the cache has 8 rows; expected 2 to 8"),
    (["--prefill", "8"], "expected fewer tokens than the context, 8"),
    (["--target", "m99"], "m99"),
])
def test_sizes_that_do_not_fit_are_explained(tmp_path, capsys, arguments, reason):
    source = make_decoder(tmp_path / "source.mlpackage")
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), *arguments]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cache_without_states_says_how_to_convert_it(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", state=False, constant="buffer")
    with pytest.raises(ane.InputError, match="expected the cache in states") as refusal:
        ane.adapt(source, tmp_path / "out")
    assert ("states=[ct.StateType(wrapped_type=ct.TensorType(shape=(1, 1, 8, 4), dtype=np.float16), name='buffer')]"
            in str(refusal.value)), str(refusal.value)


def test_a_name_that_the_converter_chose_is_not_advised_as_that_of_a_buffer(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", state=False, constant="var_149")
    with pytest.raises(ane.InputError, match="the name of the buffer in the torch module") as refusal:
        ane.adapt(source, tmp_path / "out")
    assert "model.named_buffers()" in str(refusal.value) and "name='var_149'" not in str(refusal.value)
    assert "(1, 1, 8, 4)" not in str(refusal.value)


def test_caches_of_different_rows_are_those_of_a_sliding_window():
    from mil_ane_passes.transforms.decoder import recognize_decoder

    steps, length = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[
        mb.TensorSpec((1, steps), dtype=types.int32), mb.TensorSpec((1, 1, steps, length), dtype=types.fp16),
        mb.StateTensorSpec((1, 1, ROWS, WIDTH), dtype=types.fp16),
        mb.StateTensorSpec((1, 1, ROWS // 2, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(ids, mask, whole, window):
        x = mb.gather(x=normal(9, WIDTH).astype(np.float16), indices=ids, axis=0)
        held = mb.add(x=mb.reduce_sum(x=mb.read_state(input=whole)), y=mb.reduce_sum(x=mb.read_state(input=window)))
        weights = mb.softmax(x=mb.add(x=mb.mul(x=mask, y=held), y=mask), axis=-1)
        return mb.mul(x=x, y=mb.reduce_sum(x=weights, axes=[1, 3]), name="logits")

    with pytest.raises(ane.InputError, match="caches of 4 and 8 rows, such as those of a sliding window beside others"):
        recognize_decoder(program, "a program")


def test_rows_in_front_of_the_heads_are_named():
    """The heads were taken for the rows: 'the cache has 2 rows; convert the source model again for more'."""
    from mil_ane_passes.transforms.decoder import recognize_decoder

    steps, length = get_new_symbol(), get_new_symbol()

    @mb.program(input_specs=[
        mb.TensorSpec((1, steps), dtype=types.int32), mb.TensorSpec((1, 1, steps, length), dtype=types.fp16),
        mb.StateTensorSpec((1, ROWS, 2, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(ids, mask, cache):
        x = mb.gather(x=normal(9, WIDTH).astype(np.float16), indices=ids, axis=0)
        end, count = (mb.slice_by_index(x=mb.shape(x=mask), begin=[at], end=[at + 1]) for at in (3, 2))
        zero, keeps = np.zeros(1, np.int32), [True, False, True, True]
        begin, end = (mb.concat(values=[zero, at, zero, zero], axis=0) for at in (mb.sub(x=end, y=count), end))
        new = mb.slice_update(x=mb.read_state(input=cache), update=mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[
            1, 1, 2, 1]), begin=begin, end=end, begin_mask=keeps, end_mask=keeps, name="written")
        held = mb.reduce_sum(x=mb.coreml_update_state(state=cache, value=new))
        return mb.mul(x=x, y=mb.reduce_sum(x=mb.softmax(x=mb.add(x=mask, y=held), axis=-1), axes=[1, 3]), name="logits")

    with pytest.raises(ane.InputError, match="'written' .slice_update. writes the rows of new tokens along axis 1 of "
                                             ".*; expected a cache of .*rows, width., with the heads in front"):
        recognize_decoder(program, "a program")


def test_several_functions_are_refused(tmp_path, capsys):
    source = make_decoder(tmp_path / "source.mlpackage")
    both = with_functions(tmp_path / "both.mlpackage", {"one": source, "two": source}, "one")
    assert main(["adapt", str(both), "-o", str(tmp_path / "out")]) == 2
    assert "2 functions (one, two); expected one" in capsys.readouterr().err


def test_a_folder_that_exists_is_replaced_on_request_only(tmp_path, capsys):
    source, out = make_decoder(tmp_path / "source.mlpackage"), tmp_path / "out"
    arguments = ["adapt", str(source), "-o", str(out), "--prefill", "3"]
    assert main([*arguments, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["after"]["unsupported"] == {}
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    other = tmp_path / "other"
    other.mkdir()
    assert main(["adapt", str(source), "-o", str(other), "--overwrite"]) == 2
    assert "exists without a manifest.json" in capsys.readouterr().err
    assert main(["adapt", str(source), "-o", str(source)]) == 2
    assert "the source is never changed" in capsys.readouterr().err
    source.rename(out / "source.mlpackage")
    for each in sorted(out.glob("*.mlpackage")):
        assert main(["adapt", str(each), "-o", str(out), "--overwrite"]) == 2
        assert "the source is never changed" in capsys.readouterr().err and (each / "Manifest.json").is_file()


def test_a_folder_with_anything_else_is_not_replaced(tmp_path, capsys):
    source, out = make_decoder(tmp_path / "source.mlpackage"), tmp_path / "out"
    arguments = ["adapt", str(source), "-o", str(out), "--overwrite", "--no-verify"]
    out.mkdir()
    (out / "index.html").write_text("precious")
    for text in ('{"name": "an app"}', "[]", "{", '{"kind": "decoder"}'):
        (out / "manifest.json").write_text(text)
        assert main(arguments) == 2
        assert "exists without a manifest.json of an earlier run" in capsys.readouterr().err
        assert (out / "index.html").read_text() == "precious" and (out / "manifest.json").read_text() == text
    (out / "index.html").unlink()
    (out / "manifest.json").unlink()
    out.rmdir()
    assert main(arguments) == 0
    (out / "__pycache__").mkdir()
    (out / "notes.txt").write_text("precious")
    assert main(arguments) == 2
    assert "holds 'notes.txt', which no earlier run wrote" in capsys.readouterr().err
    (out / "notes.txt").unlink()
    assert main(arguments) == 0
    assert main([*arguments, "--embedding", "npy"]) == 0 and (out / "embedding.npy").is_file()
    assert main(arguments) == 0 and not (out / "embedding.npy").exists()


def test_nothing_is_written_into_another_package(tmp_path, capsys):
    source, other = (make_decoder(tmp_path / f"{name}.mlpackage") for name in ("source", "other"))
    assert main(["adapt", str(source), "-o", str(other / "Data" / "out")]) == 2
    error = capsys.readouterr().err
    assert f"is in the package {other}" in error and ".mil-ane-passes" not in error


def test_a_link_that_leads_to_itself_is_no_place_to_write_to(tmp_path, capsys):
    source, loop = make_decoder(tmp_path / "source.mlpackage"), tmp_path / "loop"
    loop.symlink_to(loop)
    assert main(["adapt", str(source), "-o", str(loop / "out")]) == 2
    assert "no folder" in capsys.readouterr().err


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_another_run_puts_there_meanwhile_stays(tmp_path, overwrite):
    """A run with `overwrite` replaces it only if an earlier run of `adapt` wrote it."""
    from tests.lab.language_models.builders import convert

    target = tmp_path / "out"

    def write_another(text):
        if not target.exists():
            target.mkdir()
            (target / "notes.txt").write_text("of another")

    said = "exists without a manifest.json" if overwrite else "another run has written a folder to this path"
    with pytest.raises(ane.InputError, match=said):
        ane.adapt(convert("llama", "states"), target, verify=False, overwrite=overwrite, progress=write_another)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (target / "notes.txt").read_text() == "of another"
