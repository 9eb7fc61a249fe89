"""Decoders of transformers, converted as applications do, through the transforms for language models."""

from __future__ import annotations

import pytest

import mil_ane_passes as ane

pytest.importorskip("transformers")

IDS = {1: [1, 1], 4: [1, 4]}


def pad_sizes(form, steps, heads):
    from tests.lab.language_models.builders import CONTEXT, LAYERS, WIDTH

    longest = CONTEXT - steps
    caches = {name: [LAYERS, 1, heads, (1, longest), WIDTH] for name in ("keys", "values")}
    least = steps + form.startswith("stateless")
    return {"causalMask": [1, 1, (steps, steps), (least, CONTEXT)], **(caches if form.startswith("stateless") else {})}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "form", "steps", "more"), [
    ("llama", "states", 1, {"merge_states": "cache", "state_to_io": "all"}),
    ("llama", "states", 4, {"merge_states": "cache"}),
    ("llama", "stateless", 4, {}),
    ("gpt2", "states", 4, {"state_to_io": "all"}),
    ("gpt2", "stateless", 1, {}),
    pytest.param("llama", "states, exported", 4, {"merge_states": "cache", "state_to_io": "all"},
                 marks=pytest.mark.slow),
    pytest.param("llama", "stateless, exported", 1, {}, marks=pytest.mark.slow),
])
def test_a_decoder_becomes_a_package_without_unsupported_ops(tmp_path, name, form, steps, more):
    from tests.lab.language_models.builders import DECODERS, convert

    target = tmp_path / "out.mlpackage"
    report = ane.edit(
        convert(name, form), target, fix_shape={"inputIds": IDS[steps]},
        pad_shape=pad_sizes(form, steps, DECODERS[name].heads), split_inputs=["inputIds", "position"], verify=True,
        **more)
    assert report.status == "written", str(report)
    found = ane.lint(tmp_path / "out_2.mlpackage", target="m4")
    assert not {row.op.op_type for row in found.plan.rows if not row.takes}
    assert found.summary()["ane_unsupported"] == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "form", "steps", "more"), [
    ("llama", "states", 4, {"merge_states": "cache", "state_to_io": "all", "split_inputs": "position"}),
    ("llama", "states", 1, {"state_to_io": "all", "split_parts": 2}),
    ("gpt2", "stateless", 4, {"rename": {"inputIds_rows": "embedding", "causalMask": "mask"}, "io": {
        "fp32": ["inputIds_rows"]}, "tile_output": {"logits": 3}, "max_part_size": "300kB"}),
])
def test_a_decoder_reads_rows_of_a_file_in_place_of_ids(tmp_path, name, form, steps, more):
    import json

    from tests.lab.language_models.builders import DECODERS, convert

    report = ane.edit(
        convert(name, form), tmp_path / "out.mlpackage", fix_shape={"inputIds": IDS[steps]}, verify=True,
        pad_shape=pad_sizes(form, steps, DECODERS[name].heads), embedding_file={"inputIds": tmp_path / "table.npy"},
        **more)
    assert report.status == "written" and len(report.verification.cases) >= 6, str(report)
    renamed = more.get("rename", {}).get("inputIds_rows", "inputIds_rows")
    described = json.loads((tmp_path / "table.json").read_text())
    assert described["input"] == renamed and described["dtype"] == ("float32" if "io" in more else "float16")
    assert len(report.outputs) >= (2 if len(more) > 1 else 1)
    inputs = [each for path in report.outputs for each in ane.load(path).program.functions["main"].inputs]
    assert inputs.count(renamed) == 1 and "inputIds" not in inputs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["bert", pytest.param("distilbert", marks=pytest.mark.slow), "t5-encoder"])
def test_the_mask_of_an_encoder_of_flexible_length_hides_the_padding(tmp_path, name):
    import coremltools as ct
    import numpy as np
    import torch

    from tests.lab.models.fired import silence_warnings
    from tests.torch_frontend.models.language import LANGUAGE

    model, length = LANGUAGE[name](), ct.RangeDim(1, 24, default=7)
    source = tmp_path / "source.mlpackage"
    with silence_warnings():
        traced = torch.jit.trace(model.module, tuple(each[:1] for each in model.example), check_trace=False)
        ane.convert(traced, skip_model_load=True, minimum_deployment_target=ct.target.iOS18, inputs=[
            ct.TensorType(each, (1, length), dtype=np.int32) for each in ("ids", "mask")]).save(str(source))
    report = ane.edit(source, dry_run=True, verify=True, pad_shape=["ids=1,24", "mask=1,24"])
    assert report.verification.equal, str(report)
    assert len(report.verification.cases) >= 6 and "input 'length' is new" not in str(report)
