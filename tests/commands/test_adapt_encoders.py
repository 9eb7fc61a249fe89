"""Encoders adapted to the ANE: packages without integers, results of real lengths, and what cannot be adapted."""

from __future__ import annotations

import ast
import json
import math
import re

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.package.helpers import make, normal, spec_of, write_spec

CONTEXT, WIDTH = 12, 4
SCALED_MASKS = {
    "1 shows": (lambda mask: mb.mul(x=mb.sub(x=np.float16(1), y=mask), y=np.float16(-1e4)), -3),
    "0 hides": (lambda mask: mb.mul(x=mb.sub(x=mask, y=np.float16(1)), y=np.float16(1e4)), -3),
    "1 hides": (lambda mask: mb.mul(x=mask, y=np.float16(-2e4)), 2),
    "0 hides, subtracted": (lambda mask: mb.mul(x=mb.sub(x=np.float16(1), y=mask), y=np.float16(1e4)), -3),
    "1 hides, subtracted": (lambda mask: mb.mul(x=mask, y=np.float16(2e4)), 2),
    "0 hides, by a sum": (lambda mask: mb.add(x=mb.mul(x=mask, y=np.float16(1e4)), y=np.float16(-1e4)), -3),
}
"Masks of floats that the model scales, by form: what is added or subtracted, and the padding that adapt chooses."


def run_folder(folder, feeds, length):
    """The results of an adapted encoder, called as its manifest says."""
    manifest = json.loads((folder / "manifest.json").read_text())
    padded = {"lookup.mlpackage": {}, "encoder.mlpackage": {}}
    for name, each in manifest["inputs"].items():
        array = np.full(each["shape"], each["padding"], each["dtype"])
        array[tuple(slice(0, size) for size in feeds[name].shape)] = feeds[name]
        padded[each["package"]][name] = array
    if manifest["length"]:
        padded["lookup.mlpackage"][manifest["length"]] = np.array([length + manifest["length_extra"]], np.int32)
    found = ane.runtime.predictor(str(folder / "lookup.mlpackage")).predict(padded["lookup.mlpackage"]) if manifest[
        "lookup"] else {}
    crossing = {name: found[name].astype(each["dtype"]) for name, each in manifest["lookups"].items()}
    return ane.runtime.predictor(str(folder / "encoder.mlpackage")).predict(padded["encoder.mlpackage"] | crossing)


@pytest.mark.parametrize("name", ["bert", pytest.param("roberta", marks=pytest.mark.slow), "clip_text"])
def test_an_encoder_gives_the_results_of_its_module_at_real_lengths(tmp_path, name):
    pytest.importorskip("transformers")
    import torch

    from tests.lab.language_models.builders import ENCODERS, EncoderOutputs, convert

    report = ane.adapt(convert(name, "encoder"), tmp_path / "out", context=32)
    assert report.status == "written" and report.kind == "encoder", str(report)
    assert report.after["unsupported"] == {} and report.after["unknown"] == 0
    assert report.before["unsupported"] and report.lengths == [1, 8, 16, 29, 32] and report.result_error < 0.01
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert all(int(np.prod(each["shape"])) <= 32 * 64 and each["shape"][-2:] != [32, 32]
               for each in manifest["lookups"].values()), "masks cross once, not for each query"
    encoder = ENCODERS[name]
    module = EncoderOutputs(encoder.make().double(), encoder.inputs)
    for length in (1, 5, 32):
        feeds = {"input_ids": np.random.default_rng(length).integers(2, 96, (1, length)),
                 "attention_mask": (np.arange(length)[None] < max(1, length - 2)).astype(int),
                 "token_type_ids": np.arange(length)[None] % 2}
        given = {each: feeds[each].astype(np.int32) for each in encoder.inputs}
        expected = module(*(torch.from_numpy(each).long() for each in given.values()))
        found = run_folder(tmp_path / "out", given, length)
        hidden, pooled = (value for value in found.values())
        seen = feeds["attention_mask"][0].astype(bool) if "attention_mask" in given else np.ones(length, bool)
        for value, wanted in ((hidden[:, :length][:, seen], expected[0][:, seen]), (pooled, expected[1])):
            assert value.shape == tuple(wanted.shape)
            assert np.abs(value - wanted.numpy()).max() < 0.03 * np.abs(wanted.numpy()).max()


def test_the_main_package_reads_floats_alone_and_the_page_says_how_to_call_it(tmp_path, capsys):
    source = make_encoder(tmp_path / "source.mlpackage")
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), "--context", "8"]) == 0
    said = capsys.readouterr().out
    assert "results are those of the source at lengths 1, 2, 4, 8" in said and "README.md describes the calls" in said
    function = ane.load(tmp_path / "out" / "encoder.mlpackage").program.functions["main"]
    assert all(var.dtype == types.fp16 and None not in var.shape for var in function.inputs.values())
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["schema"], manifest["kind"], manifest["context"], manifest["vocabulary"]) == (1, "encoder", 8, 9)
    assert manifest["inputs"]["ids"] == {"shape": [1, 8], "dtype": "int32", "package": "lookup.mlpackage",
                                         "length_axes": [1], "padding": 0.0}
    assert manifest["outputs"]["out"]["length_axes"] == [1]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "@" not in page and 'lookup.predict({"ids": ids, "mask": mask})' in page
    assert not (tmp_path / "out" / "generate.py").exists()


def test_the_page_quotes_names_as_its_languages_do(tmp_path):
    """A name of an input, an output or a value that crosses is data: no code, markup or line of the page."""
    source = make_encoder(tmp_path / "source.mlpackage")
    names = {"ids": 'a": open("p", "w")})\n```\n<b>@OUTPUTS@\\(exit(0))|`\u202e', "mask": "a-b",
             "out": 'o"];import os;x["\n<b>', "mul_0": "```\n<b>"}
    spec = spec_of(source)
    for old, new in names.items():
        rename_value(spec, old, new)
    write_spec(source, spec)
    assert ane.adapt(source, tmp_path / "out", context=8).status == "written"
    page = (tmp_path / "out" / "README.md").read_text()
    prose = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", re.sub(r"(?ms)^```.*?^```$", "", page))
    assert "<b>" not in prose and "`" not in prose, prose
    assert not [line for line in page.splitlines() if line.lstrip().startswith("<b>")] and "\u202e" not in page
    code = re.search(r"(?ms)^```python\n(.*?)^```$", page)[1]
    found = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert names["ids"] in found and names["mask"] in found and names["out"] in found
    assert {node.func.attr for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)} == {
        "MLModel", "predict"}
    swift = re.search(r"(?ms)^```swift\n(.*?)^```$", page)[1]
    assert (r'["a\": open(\"p\", \"w\")})\u{a}```\u{a}<b>@OUTPUTS@\\(exit(0))|`\u{202e}": value0, "a-b": value1]'
            in swift)
    table = [line for line in page.splitlines() if "lookup.mlpackage |" in line]
    assert len(table) == 2 and all(len(re.split(r"(?<!\\)\|", line)) == 7 for line in table)


def rename_value(spec, old, new):
    """Rename a value of a package, which may be an input or output."""
    def rename_in(block):
        for op in block.operations:
            for argument in (each for bound in op.inputs.values() for each in bound.arguments):
                if argument.WhichOneof("binding") == "name" and argument.name == old:
                    argument.name = new
            for output in op.outputs:
                output.name = new if output.name == old else output.name
        block.outputs[:] = [new if each == old else each for each in block.outputs]

    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            rename_in(block)
    for named in (*function.inputs, *spec.description.input, *spec.description.output):
        named.name = new if named.name == old else named.name


def test_a_label_among_the_outputs_is_rejected(tmp_path, capsys):
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8), types.fp32)])
    def program(x):
        scores = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
        mixed = mb.matmul(x=scores, y=x)
        return mb.softmax(x=mb.reduce_mean(x=mixed, axes=[1], keep_dims=False), axis=-1, name="probabilities")

    source = tmp_path / "source.mlpackage"
    ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS16, skip_model_load=True,
               classifier_config=ct.ClassifierConfig([f"label {i}" for i in range(8)])).save(str(source))
    assert main(["adapt", str(source), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the output 'classLabel' is not an array (op classify); expected arrays: for a classifier, return" in said
    assert not (tmp_path / "out").exists()


def test_an_encoder_of_features_is_one_package(tmp_path):
    source = make_encoder(tmp_path / "source.mlpackage", features=True, length=CONTEXT)
    report = ane.adapt(source, tmp_path / "out")
    assert report.status == "written" and report.lengths == [], str(report)
    assert "results are those of the source on random inputs" in str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["lookup"] is None and manifest["context"] is None
    assert manifest["inputs"]["ids"]["dtype"] == "float16"
    assert not (tmp_path / "out" / "lookup.mlpackage").exists()
    page = (tmp_path / "out" / "README.md").read_text()
    assert "lookup" not in page and 'encoder.predict({"ids": ids})' in page


def test_without_the_check_nothing_is_compared(tmp_path):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage"), tmp_path / "out", verify=False)
    assert report.status == "written" and report.result_error is None and report.lengths == []
    assert report.after["unsupported"] == {} and "results are those" not in str(report)


def test_what_is_left_unsupported_is_listed_with_its_reason(tmp_path):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", float32=True), tmp_path / "out")
    assert report.status == "written" and report.after["unsupported"]["softmax"] == 1
    lines = [each for each in str(report).splitlines() if each.startswith("still unsupported: ")]
    assert len(lines) == 1 and "matmul" in lines[0] and "compute in fp32" in lines[0]


def test_a_single_length_is_fixed(tmp_path):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", most=1), tmp_path / "out")
    assert report.status == "written" and report.lengths == [1], str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["outputs"]["out"]["length_axes"] == [1] and manifest["outputs"]["out"]["length_extra"] == [0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["select", "float mask", "pooled", "no mask", "rotary", "window"])
def test_forms_of_masks_and_pooled_rows(tmp_path, form):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form=form), tmp_path / "out", context=CONTEXT)
    assert report.status == "written", str(report)
    assert report.after["unsupported"] == {}, str(report)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", SCALED_MASKS)
def test_masks_of_floats_that_the_model_scales(tmp_path, form):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form=form), tmp_path / "out", context=CONTEXT)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["inputs"]["mask"]["padding"] == SCALED_MASKS[form][1]
    ids, shown = np.array([[3, 1, 4, 1, 5]], np.int32), np.array([1, 1, 0, 1, 1], np.float16)
    mask = (1 - shown if form.startswith("1 hides") else shown)[None, None, None]
    (expected,) = ane.run(tmp_path / "source.mlpackage", {"ids": ids, "mask": mask}).values()
    found = run_folder(tmp_path / "out", {"ids": ids, "mask": mask}, 5)["out"]
    np.testing.assert_allclose(found[:, :5], expected, atol=2e-2)


@pytest.mark.parametrize("form, hidden", [("float mask", -4e4), ("float mask, subtracted", 4e4)])
def test_masks_of_floats_that_are_added_or_subtracted(tmp_path, form, hidden):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form=form), tmp_path / "out", context=CONTEXT)
    assert report.status == "written", str(report)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]["mask"]["padding"] == hidden
    feeds = {"ids": np.array([[3, 1, 4, 1, 5]], np.int32), "mask": np.array([0, 0, hidden, 0, 0], np.float16)[
        None, None, None]}
    (expected,) = ane.run(tmp_path / "source.mlpackage", feeds).values()
    np.testing.assert_allclose(run_folder(tmp_path / "out", feeds, 5)["out"][:, :5], expected, atol=2e-2)


def make_biased_encoder(path, form="", precision="FLOAT16", hidden=-1e4):
    """An encoder with a bias by buckets of distances, as T5 has, and keys that the second input shows or hides."""
    torch = pytest.importorskip("torch")

    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.bias = torch.nn.Embedding(9, WIDTH), torch.nn.Embedding(16, 1)

        def forward(self, ids, given=None):
            x, places = self.table(ids), torch.arange(ids.shape[1])
            far = (places[None] - places[:, None]).abs()
            large = 8 + (torch.log(far.float() / 8) / math.log(16) * 8).long()
            bucket = torch.where(far < 8, far, torch.min(large, torch.full_like(large, 15)))
            product = torch.einsum("bqd,bkd->bqk", x, x) if form == "einsum" else x @ x.transpose(1, 2)
            scores = product + self.bias(bucket)[..., 0] * 4
            if form == "count":
                scores = scores.masked_fill(places[None, None] >= given[:, None, None], hidden)
            elif form == "1 hides":
                scores = scores.masked_fill(given[:, None] != 0, hidden)
                shown = 1 - given.float()[..., None]
                return (scores.softmax(-1) @ x * shown).sum(1) / shown.sum(1)
            if form == "einsum":
                heads = x.reshape(1, -1, 2, WIDTH // 2).transpose(1, 2)
                weights = torch.stack([scores, scores * 2], 1).softmax(-1)
                return torch.einsum("bhqk,bhkd->bhqd", weights, heads).transpose(1, 2).reshape(1, -1, WIDTH)
            return scores.softmax(-1) @ x

    torch.manual_seed(0)
    model, ids = Biased().eval(), torch.arange(40, dtype=torch.int32)[None] % 9
    length = ct.RangeDim(1, 64, 40)
    given = {"": (), "einsum": (), "count": (torch.tensor([40], dtype=torch.int32),), "1 hides": (ids * 0,)}[form]
    inputs = [ct.TensorType("ids", (1, length), dtype=np.int32)]
    inputs += [ct.TensorType("given", (1,) if form == "count" else (1, length), dtype=np.int32)] * len(given)
    ct.convert(torch.jit.trace(model, (ids, *given)), inputs=inputs, outputs=[ct.TensorType("out")],
               minimum_deployment_target=ct.target.iOS17, skip_model_load=True,
               compute_precision=getattr(ct.precision, precision)).save(str(path))
    return model, {"ids": ids} | dict(zip(["given"], given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["FLOAT32", "FLOAT16"])
@pytest.mark.parametrize("form", ["", "count", "1 hides", "einsum"])
def test_buckets_of_positions_are_those_of_the_floats_that_the_model_declares(tmp_path, precision, form):
    """The logarithm at a border between two buckets is an integer in exact arithmetic, and below it in float64."""
    model, feeds = make_biased_encoder(tmp_path / "source.mlpackage", form, precision)
    report = ane.adapt(tmp_path / "source.mlpackage", tmp_path / "out")
    assert report.status == "written" and report.result_error < 5e-3, str(report)
    found = run_folder(tmp_path / "out", {name: each.numpy() for name, each in feeds.items()}, 40)["out"]
    wanted = model(*feeds.values()).detach().numpy()
    found = found[:, :40] if wanted.ndim == 3 else found
    assert np.abs(found - wanted).max() < 5e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("hidden", [float("-inf"), -3.4e38])
def test_a_number_of_keys_is_never_drawn_as_0(tmp_path, hidden):
    """Without a key, a query has no defined result."""
    make_biased_encoder(tmp_path / "source.mlpackage", "count", "FLOAT32", hidden)
    report = ane.adapt(tmp_path / "source.mlpackage", tmp_path / "out")
    assert report.status == "written", str(report)


def test_keys_behind_the_first_are_compared_where_their_number_is_an_input(tmp_path, monkeypatch):
    from mil_ane_passes.commands import adapt_encoder

    evaluate = adapt_encoder.evaluate_values

    def shift_last_column(*given):
        return [each + (np.arange(each.shape[-1]) > 20) if each.dtype.kind == "f" and each.ndim > 1 else each
                for each in evaluate(*given)]

    make_biased_encoder(tmp_path / "source.mlpackage", "count")
    monkeypatch.setattr(adapt_encoder, "evaluate_values", shift_last_column)
    report = ane.adapt(tmp_path / "source.mlpackage", tmp_path / "out")
    assert report.status == "rejected" and "at length" in report.reason, str(report)


EXTRA_ROWS = {"before": (2, 0), "behind": (3, 0), "both": (5, 2), "both, pooled": (None, 2), "differences": (-1, 0)}
"Encoders whose rows are more or fewer than their tokens, with the excess of the rows and of the position."


@pytest.mark.parametrize("form", EXTRA_ROWS)
def test_rows_beside_those_of_tokens(tmp_path, form):
    torch = pytest.importorskip("torch")

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(9, WIDTH)
            self.before, self.behind = (torch.nn.Parameter(torch.randn(1, count, WIDTH)) for count in (2, 3))

        def forward(self, ids):
            x = self.table(ids)
            x = torch.cat([self.before, x], 1) if form.startswith(("before", "both")) else x
            x = torch.cat([x, self.behind], 1) if form.startswith(("behind", "both")) else x
            x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
            if form == "differences":
                return x[:, 1:] - x[:, :-1]
            return x.mean(1) if form.endswith("pooled") else x

    torch.manual_seed(0)
    model, length = Encoder().eval(), ct.RangeDim(2, 24, 9)
    ct.convert(torch.jit.trace(model, torch.ones(1, 9, dtype=torch.int32)), outputs=[ct.TensorType("out")],
               inputs=[ct.TensorType("ids", (1, length), dtype=np.int32)], minimum_deployment_target=ct.target.iOS17,
               skip_model_load=True).save(str(tmp_path / "source.mlpackage"))
    report = ane.adapt(tmp_path / "source.mlpackage", tmp_path / "out")
    assert report.status == "written", str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    rows, position = EXTRA_ROWS[form]
    assert manifest["outputs"]["out"]["length_extra"] == ([] if rows is None else [rows])
    assert manifest["length_extra"] == position
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ("the number of real tokens plus 2" in page) == (position == 2)
    assert (f"`out` has {abs(rows or 0)} {'more' if (rows or 0) > 0 else 'fewer'} than tokens" in page) == bool(rows)
    for count in (2, 9, 24):
        ids = np.random.default_rng(count).integers(0, 9, (1, count)).astype(np.int32)
        wanted = model(torch.from_numpy(ids)).detach().numpy()
        found = run_folder(tmp_path / "out", {"ids": ids}, count)["out"][:, :wanted.shape[1]]
        np.testing.assert_allclose(found, wanted, atol=2e-2)


@pytest.mark.parametrize("form", ["largest row", "logarithms"])
def test_padding_that_booleans_hide_in_the_main_package(tmp_path, form):
    """The largest row is that of real rows, and the logarithms of padding are not finite: both are selected."""
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form=form), tmp_path / "out", context=CONTEXT)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    function = ane.load(tmp_path / "out" / "encoder.mlpackage").program.functions["main"]
    assert {var.dtype for var in function.inputs.values()} == {types.fp16}
    assert [bool(ane.lint(tmp_path / "out" / f"{each}.mlpackage", target="m4").not_judged)
            for each in ("lookup", "encoder")] == [True, False]
    assert {"greater", "select"} <= {op.op_type for op in function.operations}
    ids, mask = np.array([[3, 1, 4, 1, 5]], np.int32), np.array([[1, 1, 0, 1, 1]], np.int32)
    (expected,) = ane.run(tmp_path / "source.mlpackage", {"ids": ids, "mask": mask}).values()
    found = run_folder(tmp_path / "out", {"ids": ids, "mask": mask}, 5)["out"]
    np.testing.assert_allclose(found, expected, atol=2e-2)


@pytest.mark.parametrize("length", [None, CONTEXT])
@pytest.mark.parametrize("form", ["no mask", "head"])
def test_a_language_model_without_a_cache_is_noted(tmp_path, form, length):
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form=form, length=length), tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    noted = "to generate text, convert the model with its cache in states"
    assert (f"output 'out' has a value for each of the 9 tokens of the vocabulary: {noted}" in str(report)) == (
        noted in page) == (form == "head"), str(report)
    assert report.to_dict()["notes"] == report.notes and len(report.notes) == (form == "head")


def test_lengths_at_which_the_source_cannot_run_are_left_out(tmp_path):
    """MobileBERT joins each token with the next one; of a single one there is no next."""
    report = ane.adapt(make_encoder(tmp_path / "source.mlpackage", form="joined"), tmp_path / "out")
    assert report.status == "written" and report.lengths[0] == 2, str(report)
    assert "real lengths are 2 or more" in str(report)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["shortest"] == 2


@pytest.mark.parametrize(("options", "arguments", "reason"), [
    ({"form": "joined to ten tokens"}, [], "is impossible: Incompatible dim 1 in shapes (1, 12, 4) vs. (1, 10, 4); "
                                           "expected sizes that the model can have"),
    ({"form": "joined", "most": 2}, [], "with ids = 1,1, mask = 1,1 the op 'concat_0' (concat) is impossible"),
    ({"attend": False}, [], "no op softmax whose result is multiplied with values"),
    ({"batch": 2}, [], "the token ids or mask 'ids' are (2, ?); expected one sequence, (1, S): no batch"),
    ({"batch": None}, [], "'ids' are (?, ?); expected one sequence"),
    ({"form": "integers in the middle"}, [], "(select) reads the integers 'kind' and floats that do not"),
    ({}, ["--context", "13"], "--context 13: the inputs ids, mask can be 1 to 12 long; expected a length from 2 to "
     "12"),
    ({"length": CONTEXT}, ["--context", "8"], "all inputs of"),
    ({}, ["--prefill", "4"], "--prefill 4:"),
    ({}, ["--embedding", "npy"], "--embedding npy:"),
    ({}, ["--cache", "state"], "has no cache; expected this for a decoder with a cache alone"),
    ({"form": "reversed"}, ["--context", "8"], "mil-ane-passes: step pad-shape of adapt: the op 'reverse_0' (reverse) "
     "cannot be padded: it has no rule for padded axes"),
])
def test_what_is_not_recognized_is_named(tmp_path, capsys, options, arguments, reason):
    source = make_encoder(tmp_path / "source.mlpackage", **options)
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert reason in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


def test_a_length_without_an_end_has_to_be_given(tmp_path, capsys):
    source = make_encoder(tmp_path / "source.mlpackage")
    spec = spec_of(source)
    for each in spec.description.input:
        each.type.multiArrayType.shapeRange.sizeRanges[1].upperBound = -1
    write_spec(source, spec)
    assert main(["adapt", str(source), "-o", str(tmp_path / "out")]) == 2
    assert "the inputs ids, mask have no largest size; expected --context" in capsys.readouterr().err
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), "--context", "20"]) == 0


@pytest.mark.parametrize("broken", ["padding", "mask", "mask of a rotary one", "mask that is added", "table"])
def test_wrong_results_are_found_and_nothing_is_written(tmp_path, monkeypatch, broken):
    from mil_ane_passes.commands import adapt_encoder
    from mil_ane_passes.transforms import encoder, padding

    if broken == "padding":
        monkeypatch.setattr(adapt_encoder, "_get_padding", lambda var: 1.0)
    elif broken == "mask that is added":
        monkeypatch.setattr(encoder, "MASKED", 0.0)
    elif broken == "table":
        evaluate = adapt_encoder.evaluate_values
        monkeypatch.setattr(adapt_encoder, "evaluate_values", lambda *given: [
            each + 0.1 if each.dtype.kind == "f" else each for each in evaluate(*given)])
    else:
        monkeypatch.setattr(padding.Padding, "_hide", lambda self, op, x, axis: x)
    form = {"padding": "select", "mask": "no mask", "mask of a rotary one": "rotary", "mask that is added": "window",
            "table": "rotary"}[broken]
    source = make_encoder(tmp_path / "source.mlpackage", form=form)
    report = ane.adapt(source, tmp_path / "out", context=8)
    assert report.status == "rejected", str(report)
    assert ("differs by" if broken in ("padding", "table") else "different") in report.reason
    assert "nothing written: " + report.reason in str(report) and "\\n" not in str(report)
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


def test_wrong_numbers_that_remain_are_stated_of_the_main_package(tmp_path, capsys):
    """A test for NaN is in the main package; no pass fixes it."""
    source = make_encoder(tmp_path / "source.mlpackage", length=8, form="test for NaN")
    assert main(["adapt", str(source), "-o", str(tmp_path / "out"), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    linted = {name: [each.value for each in ane.lint(tmp_path / "out" / name, target="m4").findings
                     if each.code == "ANE319"] for name in ("encoder.mlpackage", "lookup.mlpackage")}
    assert len(linted["encoder.mlpackage"]) == 1 and not linted["lookup.mlpackage"]
    found, = data["after"]["wrong_numbers"]
    assert (found["code"], found["slug"], found["value"]) == (
        "ANE319", "nan-and-signed-zero-logic", *linted["encoder.mlpackage"])
    page = (tmp_path / "out" / "README.md").read_text()
    rows = [line for line in page.splitlines() if ", 1 finding of wrong numbers (ANE319), " in line]
    assert [row.split(" | ")[0] for row in rows] == ["| source", "| `encoder.mlpackage`"]
    assert main(["adapt", str(source), "-o", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert (f"still wrong numbers: ANE319 nan-and-signed-zero-logic: %{found['value']}: compares a value with "
            "itself") in out


def make_encoder(path, *, batch=1, length=None, most=CONTEXT, features=False, form="additive", attend=True,
                 float32=False):
    """A package of one attention over embedded tokens, or of features, that lacks something on request."""
    size = get_new_symbol() if length is None else length
    range_ = ct.RangeDim(1, most, default=1) if length is None else length
    count = get_new_symbol() if batch is None else batch
    many = ct.RangeDim(1, 3, default=1) if batch is None else batch
    kind = types.fp16 if features else types.int32
    shape = (count, size, WIDTH) if features else (count, size)
    specs = [mb.TensorSpec(shape, dtype=kind)]
    inputs = [ct.TensorType("ids", (many, range_, WIDTH) if features else (many, range_),
                            dtype=np.float16 if features else np.int32)]
    masked = not features and form not in ("no mask", "rotary")
    if masked:
        float_mask = form.startswith("float mask") or form in SCALED_MASKS
        specs.append(mb.TensorSpec((1, 1, 1, size) if float_mask else (1, size), dtype=types.fp16 if float_mask
                                   else types.int32))
        inputs.append(ct.TensorType("mask", (1, 1, 1, range_) if float_mask else (1, range_),
                                    dtype=np.float16 if float_mask else np.int32))

    def body(ids, mask=None):
        x = ids if features else mb.gather(x=normal(9, WIDTH).astype(np.float16), indices=ids, axis=0)
        x = mb.cast(x=x, dtype="fp32") if float32 else x
        places = mb.range_1d(start=0, end=mb.gather(x=mb.shape(x=ids), indices=1, axis=0), step=1)
        if form == "joined":
            later = mb.slice_by_index(x=x, begin=[0, 1, 0], end=[1, 0, WIDTH], end_mask=[True] * 3)
            later = mb.pad(x=later, pad=[0, 1, 0, 0], constant_val=np.float16(0))
            x = mb.linear(x=mb.concat(values=[x, later], axis=2), weight=normal(WIDTH, 2 * WIDTH).astype(np.float16))
        if form == "joined to ten tokens":
            x = mb.add(x=x, y=normal(1, 10, WIDTH).astype(np.float16))
        if form == "rotary":
            angles = mb.mul(x=mb.cast(x=mb.expand_dims(x=places, axes=[1]), dtype="fp16"), y=np.float16(0.7))
            x = mb.mul(x=x, y=mb.cos(x=angles))
        query = mb.matmul(x=x, y=normal(WIDTH, WIDTH).astype(np.float32 if float32 else np.float16))
        scores = mb.matmul(x=query, y=x, transpose_y=True)
        if form.startswith("float mask"):
            combine = mb.sub if form.endswith("subtracted") else mb.add
            scores = combine(x=scores, y=mb.squeeze(x=mask, axes=[1]))
        elif form in SCALED_MASKS:
            combine = mb.sub if form.endswith("subtracted") else mb.add
            scores = combine(x=scores, y=SCALED_MASKS[form][0](mb.squeeze(x=mask, axes=[1])))
        elif form in ("select", "window"):
            hidden = mb.expand_dims(x=mb.equal(x=mask, y=0), axes=[1])
            if form == "window":
                distance = mb.sub(x=mb.expand_dims(x=places, axes=[0]), y=mb.expand_dims(x=places, axes=[1]))
                hidden = mb.logical_or(x=hidden, y=mb.greater(x=mb.abs(x=distance), y=1))
            scores = mb.select(cond=hidden, a=np.float16(-3e4), b=scores)
        elif mask is not None:
            hidden = mb.sub(x=np.float16(1), y=mb.cast(x=mb.expand_dims(x=mask, axes=[1]), dtype="fp16"))
            hidden = mb.mul(x=hidden, y=np.float16(-2e4))
            scores = mb.add(x=scores, y=mb.cast(x=hidden, dtype="fp32") if float32 else hidden)
        if not attend:
            return mb.relu(x=query, name="out")
        weights = mb.softmax(x=scores, axis=-1)
        if form == "integers in the middle":
            kind = mb.cast(x=mb.expand_dims(x=mb.greater(x=ids, y=3), axes=[2]), dtype="int32", name="kind")
            positive = mb.greater(x=scores, y=np.float16(0))
            weights = mb.add(x=weights, y=mb.cast(x=mb.select(cond=positive, a=kind, b=mb.mul(x=kind, y=2),
                                                              name="chosen"), dtype="fp16"))
        mixed = mb.matmul(x=weights, y=x)
        if form == "largest row":
            return mb.reduce_max(x=mixed, axes=[1], keep_dims=False, name="out")
        if form == "logarithms":
            mixed = mb.log(x=mb.mul(x=mixed, y=mixed), epsilon=np.float16(0))
            return mb.reduce_sum(x=mixed, axes=[1], keep_dims=False, name="out")
        if form == "reversed":
            mixed = mb.reverse(x=mixed, axes=[1])
        if form == "test for NaN":
            pooled = mb.reduce_mean(x=mixed, axes=[1], keep_dims=False)
            return mb.select(cond=mb.not_equal(x=pooled, y=pooled), a=np.float16(0), b=pooled, name="out")
        if form == "head":
            return mb.linear(x=mixed, weight=normal(9, WIDTH).astype(np.float16), name="out")
        if form == "pooled":
            return mb.gather(x=mixed, indices=mb.reduce_argmax(x=ids, axis=1, keep_dims=False), axis=1, name="out")
        return mb.relu(x=mixed, name="out")

    names = {"ids": "ids", **({"mask": "mask"} if masked else {})}
    scope: dict = {"body": body}
    exec(f"def call({', '.join(names)}): return body({', '.join(names)})", scope)
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(scope["call"])
    return make(path, program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY, inputs=inputs)


@pytest.mark.parametrize("name", ["t5_encoder", pytest.param("mpnet", marks=pytest.mark.slow)])
def test_buckets_at_borders_are_compared_without_the_rounding_of_all_layers(tmp_path, name):
    """At float16 the layers of T5 round by more than the packages may differ."""
    pytest.importorskip("transformers")
    from tests.lab.language_models.builders import convert

    report = ane.adapt(convert(name, "encoder"), tmp_path / "out")
    assert report.status == "written" and report.result_error < 2e-3, str(report)
