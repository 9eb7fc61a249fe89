"""Decoders with cross attention: keys and values of an encoder once for each prompt, and outputs of any length."""

from __future__ import annotations

import json

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.report.decoder.generate import Decoder, open_by, read_fixed
from tests.package.helpers import make, normal

ROWS, WIDTH, LONGEST = 8, 4, 6


def make_decoder(path, *, flexible=False, masked=True, projected=True, batch=1, most=LONGEST, repeats=2):
    """A decoder of one layer that attends to its cache, and to keys of an encoder, which it repeats for two heads."""
    steps, length, encoded = get_new_symbol(), get_new_symbol(), get_new_symbol() if flexible else LONGEST
    count = get_new_symbol() if batch is None else batch
    specs = {"ids": mb.TensorSpec((1, steps), dtype=types.int32),
             "mask": mb.TensorSpec((1, 1, steps, length), dtype=types.fp16),
             "encoded": mb.TensorSpec((count, encoded, WIDTH), dtype=types.fp16)}
    specs |= {"hidden": mb.TensorSpec((1, 1, 1, encoded), dtype=types.fp16)} if masked else {}
    specs |= {"cache": mb.StateTensorSpec((1, 1, ROWS, WIDTH), dtype=types.fp16)}

    def body(given):
        mask, held = given["mask"], given["cache"]
        x = mb.gather(x=normal(9, WIDTH).astype(np.float16), indices=given["ids"], axis=0)
        keys = mb.expand_dims(x=mb.matmul(x=x, y=normal(WIDTH, WIDTH).astype(np.float16)), axes=[1])
        stop = mb.gather(x=mb.shape(x=mask), indices=3, axis=0)
        start = mb.sub(x=stop, y=mb.gather(x=mb.shape(x=mask), indices=2, axis=0))
        begin, end = (mb.concat(values=[np.int32([0, 0]), mb.expand_dims(x=each, axes=[0]), np.int32([0])], axis=0)
                      for each in (start, stop))
        end = mb.add(x=end, y=np.int32([1, 1, 0, WIDTH]))
        held = mb.coreml_update_state(state=held, value=mb.slice_update(
            x=mb.read_state(input=held), update=keys, begin=begin, end=end))
        keys = mb.slice_by_index(x=held, begin=[0, 0, 0, 0], end=end)
        scores = mb.add(x=mb.matmul(x=mb.expand_dims(x=x, axes=[1]), y=keys, transpose_y=True), y=mask)
        x = mb.add(x=x, y=mb.squeeze(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys), axes=[1]))
        keys = given["encoded"] if not projected else mb.linear(
            x=given["encoded"], weight=normal(WIDTH, WIDTH, seed=2).astype(np.float16), name="projected")
        keys = mb.tile(x=mb.expand_dims(x=keys, axes=[1]), reps=[1, repeats, 1, 1])
        scores = mb.matmul(x=mb.expand_dims(x=x, axes=[1]), y=keys, transpose_y=True)
        scores = mb.add(x=scores, y=given["hidden"]) if masked else scores
        x = mb.add(x=x, y=mb.reduce_sum(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=keys), axes=[1]))
        return mb.matmul(x=x, y=normal(WIDTH, 9).astype(np.float16), name="logits")

    scope: dict = {"body": body}
    given = ", ".join(f"{each}={each}" for each in specs)
    exec(f"def call({', '.join(specs)}): return body(dict({given}))", scope)
    program = mb.program(input_specs=list(specs.values()), opset_version=ct.target.iOS18)(scope["call"])
    steps_, length_ = (ct.RangeDim(1, ROWS, default=1) for _ in range(2))
    long = ct.RangeDim(2, most, default=2) if flexible else LONGEST
    lead = ct.RangeDim(1, 2, default=1) if batch is None else batch
    inputs = [ct.TensorType("ids", (1, steps_), dtype=np.int32),
              ct.TensorType("mask", (1, 1, steps_, length_), dtype=np.float16),
              ct.TensorType("encoded", (lead, long, WIDTH), dtype=np.float16)]
    inputs += [ct.TensorType("hidden", (1, 1, 1, long), dtype=np.float16)] if masked else []
    return make(path, program, ct.target.iOS18, pass_pipeline=ct.PassPipeline.EMPTY, inputs=inputs)


def test_what_follows_from_the_encoder_alone_is_computed_once_before_it_is_repeated(tmp_path):
    report = ane.adapt(make_decoder(tmp_path / "source.mlpackage"), tmp_path / "out", prefill=3)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    assert "once.mlpackage computes the values that depend only on encoded once per prompt: 1 value, 48 bytes" in (
        str(report))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(manifest["once"]["outputs"].values()) == ["float16"] and manifest["once"]["inputs"] == {
        "encoded": {"shape": [1, LONGEST, WIDTH], "dtype": "float16"}}
    page = (tmp_path / "out" / "README.md").read_text()
    assert "@" not in page and 'features(["encoded": encoded])' in page and 'inputs["hidden"] = hidden' in page
    assert page.index("let once") < page.index("functionName")  # it has one function
    calls = []

    def open_model(path, function):
        calls.append((path.name, model := open_by("reference")(path, function)))
        predict = model.predict
        model.predict = lambda data: calls.append(path.name) or predict(data)
        return model

    rng = np.random.default_rng(0)
    fixed = {"encoded": rng.standard_normal((1, LONGEST, WIDTH)), "hidden": np.zeros((1, 1, 1, LONGEST))}
    Decoder(tmp_path / "out", open_model, fixed).feed([1, 2, 3, 4, 5])
    assert calls.count("once.mlpackage") == 1 and calls.count("decoder.mlpackage") == 3


def test_keys_that_the_source_reads_are_read_as_they_are(tmp_path):
    """What only repeats an input is no reason for a package."""
    source = make_decoder(tmp_path / "source.mlpackage", projected=False)
    report = ane.adapt(source, tmp_path / "out")
    assert report.status == "written", str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["once"] is None and not (tmp_path / "out" / "once.mlpackage").exists()
    assert 'inputs["encoded"] = encoded' in (tmp_path / "out" / "README.md").read_text()


def test_an_encoder_of_flexible_length_is_padded_and_hidden(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", flexible=True)
    report = ane.adapt(source, tmp_path / "out", prefill=3)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    found = {name: (each["shape"], each["length_axes"], each["padding"]) for name, each in manifest["fixed"].items()}
    assert found == {
        "encoded": ([1, LONGEST, WIDTH], [1], 0.0), "hidden": ([1, 1, 1, LONGEST], [3], -40000.0)}
    assert "`encoded` (1, 6, 4) may be shorter" in (tmp_path / "out" / "README.md").read_text()
    program = ane.load(source).program
    rng = np.random.default_rng(1)
    for length in (2, 5, LONGEST):
        fixed = {"encoded": rng.standard_normal((1, length, WIDTH)).astype(np.float16),
                 "hidden": np.zeros((1, 1, 1, length), np.float16)}
        decoder, runtime = Decoder(tmp_path / "out", open_by("reference"), fixed), ane.runtime.Runtime(program)
        state: dict = {}
        for end, token in enumerate((3, 1, 4, 1), 1):
            feeds = {"ids": np.int32([[token]]), "mask": np.zeros((1, 1, 1, end), np.float16), **fixed}
            expected = runtime(feeds, state)["logits"].reshape(-1)
            assert np.abs(decoder.feed([token]) - expected).max() <= 0.01 * np.abs(expected).max()


@pytest.mark.parametrize(("options", "reason"), [
    ({"masked": False}, "no input that is added to scores can hide its padding; expected a fixed shape: --fix-shape "
                        "encoded=... of edit, or a mask of floats (1, 1, 1, S) beside it"),
    ({"batch": None}, "'encoded' is (?, ?, 4), an input besides token ids and a mask; expected one flexible axis"),
    ({"most": 1 << 30}, "'encoded' is (1, ?, 4), an input besides token ids and a mask, without a largest size"),
])
def test_a_length_that_cannot_be_padded_is_named(tmp_path, capsys, options, reason):
    source = make_decoder(tmp_path / "source.mlpackage", flexible=True, **options)
    assert main(["adapt", str(source), "-o", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert reason in said, said
    assert [each.name for each in tmp_path.iterdir()] == ["source.mlpackage"]


def test_values_of_fixed_inputs_are_padded_or_refused():
    inputs = {"x": {"shape": [1, 4, 2], "dtype": "float16", "length_axes": [1], "padding": 0.0},
              "hidden": {"shape": [1, 4], "dtype": "float16", "length_axes": [1], "padding": -9.0}}
    found = read_fixed(inputs, {"x": np.ones((1, 3, 2)), "hidden": np.zeros((1, 3))})
    assert found["x"].shape == (1, 4, 2) and found["hidden"].tolist() == [[0, 0, 0, -9]]
    for x, hidden, reason in (((1, 5, 2), (1, 4), r"'x' is \(1, 5, 2\); expected \(1, 4, 2\) or shorter along axis 1"),
                              ((1, 3, 3), (1, 3), "'x' is"), ((1, 0, 2), (1, 3), "'x' is"),
                              ((1, 3, 2), (1, 2), "inputs of 2 and 3 elements; expected the same for all: x, hidden")):
        with pytest.raises(ValueError, match=reason):
            read_fixed(inputs, {"x": np.ones(x), "hidden": np.zeros(hidden)})


def test_what_is_computed_once_goes_with_a_cache_in_a_state(tmp_path):
    source = make_decoder(tmp_path / "source.mlpackage", flexible=True)
    report = ane.adapt(source, tmp_path / "out", cache="state")
    assert report.status == "written" and len(report.tokens) == 2, str(report)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["once"] is not None and manifest["cache"]["form"] == "state"
    page = (tmp_path / "out" / "README.md").read_text()
    assert "@" not in page and "makeState" in page and "inputs.merge(copy(of: kept))" in page
