"""What compressed weights would bring, and which formats are found that were measured to go wrong."""

from __future__ import annotations

import json

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ane.weight_formats import FORMATS, advise_on_weights
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program, make_weight
from tests.conversions import save_program
from tests.lab.latency.programs import linear_chain

NAMES = ["palette6", "palette4", "int8", "int4", "w8a8"]


def advise(program, target):
    """As if all ops were on the ANE."""
    return advise_on_weights(program, None, target)


def make_chain(rows, width, layers=4):
    return linear_chain(rows, width, width, layers=layers)


def test_what_streams_gains_by_its_bytes_and_what_computes_does_not():
    streams, computes = advise(make_chain(1, 4096), "m4"), advise(make_chain(4096, 512, 16), "m4")
    assert [each.format.name for each in streams.formats] == NAMES
    gains, none = ({each.format.name: each.change for each in advice.formats} for advice in (streams, computes))
    assert gains["palette4"] < gains["palette6"] < gains["int8"] < -0.3
    assert none["palette4"] == pytest.approx(0, abs=0.02), "nothing waits for weights"
    assert none["w8a8"] < -0.3, "int8 activations compute faster"


def test_bytes_are_those_that_coremltools_would_store():
    advice = advise(make_chain(1, 1024, layers=3), "m2")
    assert advice.weight_bytes == advice.dense_bytes == 3 * 2 * 1024 * 1024
    stored = {each.format.name: each.weight_bytes for each in advice.formats}
    assert stored == {"palette6": 3 * (1024 * 1024 * 6 // 8 + 2 * 64), "palette4": 3 * (1024 * 1024 // 2 + 2 * 16),
                      "int8": 3 * (1024 * 1024 + 2 * 1024), "int4": 3 * (1024 * 1024 // 2 + 2 * 1024),
                      "w8a8": 3 * (1024 * 1024 + 2 * 1024)}


def test_small_weights_and_compressed_ones_stay():
    table = np.linspace(-1, 1, 16).astype(np.float16)

    def body(x):
        packed = mb.constexpr_lut_to_dense(indices=np.zeros(96 * 96 // 2, np.uint8), lut=table,
                                           shape=np.uint32([96, 96]))
        x = mb.linear(x=mb.linear(x=x, weight=packed), weight=make_weight(96, 96))
        return mb.linear(x=x, weight=make_weight(16, 96), name="y")

    program = build_program(body, x=(64, 96))
    advice = advise(program, "m4")
    assert all(each.weight_bytes <= advice.weight_bytes for each in advice.formats)
    (packed,) = {FORMATS[1].apply(work) is work for work in list_works(program) if work.format == "palette"}
    assert packed, "a weight that is compressed stays as it is"
    small = [work for work in list_works(program) if work.outer == 16]
    assert small and all(form.apply(work) is work for work in small for form in FORMATS)


def list_works(program):
    works = []
    estimate_latency(program, None, "m4", change=lambda work: works.append(work) or work)
    return works


def make_palettized(shape, *, scale=None):
    def body(x):
        indices = types.np_uint4_dtype if hasattr(types, "np_uint4_dtype") else np.uint8
        lut = np.zeros(shape, np.float16)
        weight = mb.constexpr_lut_to_dense(indices=np.zeros((8, 8), np.uint8).astype(indices), lut=lut,
                                           **({"vector_axis": 0} if shape[-1] > 1 else {}))
        if scale is not None:
            weight = mb.constexpr_blockwise_shift_scale(data=weight, scale=np.ones(scale, np.float16))
        return mb.linear(x=x, weight=weight, name="y")

    return build_program(body, opset=ct.target.iOS18, x=(2, 8))


def make_integers(scale):
    return build_program(lambda x: mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(
        data=np.ones((8, 8), np.int8), scale=np.ones(scale, np.float16)), name="y"), opset=ct.target.iOS18, x=(2, 8))


@pytest.mark.parametrize(("make", "expected"), [
    (lambda: make_palettized((1, 1, 16, 1)), []),
    (lambda: make_palettized((4, 1, 16, 1)), ["grouped-palette"]),
    (lambda: make_palettized((1, 1, 16, 2)), ["vector-palette"]),
    (lambda: make_palettized((1, 1, 16, 1), scale=(8, 1)), ["scaled-palette"]),
    (lambda: make_integers((8, 1)), []),
    (lambda: make_integers((8, 2)), ["block-integers"]),
], ids=["one palette", "grouped", "vectors", "scaled", "per channel", "blocks"])
def test_formats_that_went_wrong_are_found(make, expected):
    advice = advise(make(), "m5")
    assert [each.name for each in advice.faults if each.found] == expected
    assert len(advice.faults) == 4 and all(each.evidence for each in advice.faults)


def test_every_figure_has_its_source():
    for form in FORMATS:
        assert form.evidence and all(each.source and each.chip for each in form.evidence), form.name


def test_the_command_and_its_json(tmp_path, capsys):
    path = save_program(make_chain(1, 2048), tmp_path / "m.mlpackage")
    main(["lint", path, "--target", "m4", "--sizes"])
    text = capsys.readouterr().out
    assert "weights of ops on the ANE: 33.6 MB, 0 B of it compressed" in text
    assert "  palette4" in text and "formats with measured failures:" in text and "none here" in text
    main(["lint", path, "--target", "m4", "--sizes", "--format", "json"])
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert sizes["schema"] == 1 and [each["format"] for each in sizes["formats"]] == NAMES
    assert all(each["latency_low_us"] <= each["latency_us"] <= each["latency_high_us"] for each in sizes["formats"])
    assert all(each["evidence"] for each in [*sizes["formats"], *sizes["went_wrong"]])
    main(["lint", path, "--target", "m4", "--format", "json"])
    assert "sizes" not in json.loads(capsys.readouterr().out)


def test_a_program_without_weights_has_nothing_to_estimate(tmp_path, capsys):
    path = save_program(build_program(lambda x: mb.relu(x=x, name="y"), x=(4, 8)), tmp_path / "m.mlpackage")
    main(["lint", path, "--sizes"])
    assert "weights of ops on the ANE: none" in capsys.readouterr().out
