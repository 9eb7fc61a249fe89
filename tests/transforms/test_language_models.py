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
    least = steps + (form == "stateless")
    return {"causalMask": [1, 1, (steps, steps), (least, CONTEXT)], **(caches if form == "stateless" else {})}


@pytest.mark.parametrize(("name", "form", "steps", "more"), [
    ("llama", "states", 1, {"merge_states": "cache", "state_to_io": "all"}),
    ("llama", "states", 4, {"merge_states": "cache"}),
    ("llama", "stateless", 4, {}),
    ("gpt2", "states", 4, {"state_to_io": "all"}),
    ("gpt2", "stateless", 1, {}),
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
    left = sorted({row.op.op_type for row in found.plan.rows if not row.takes})
    assert left == ([] if more.get("merge_states") or form == "stateless" else left) and (
        found.summary()["ane_unsupported"] == 0), left
