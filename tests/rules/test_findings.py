"""Rules without a fix, asked about models as torch spells and coremltools converts them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

from tests.lab.versions.needs import older_than
from tests.rules.helpers import WAYS, converted, fired, notes

X = torch.rand(2, 8)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function,found", [
    (torch.round, True), (lambda x: torch.round(x * 255), True), (lambda x: torch.round(torch.sigmoid(x) * 255), False),
    (lambda x: torch.round(torch.clamp(x, -8, 7)), False), (lambda x: torch.round(torch.tanh(x) * 2000), True),
], ids=["round", "scaled", "pixels", "clamped", "beyond"])
def test_round(function, found, way):
    assert bool(fired("large_round", converted(function, X, way=way))) is found


def test_round_is_judged_by_what_was_seen():
    program = converted(lambda x: torch.round(x * 255), X)
    small = {"x": np.full((2, 8), 4.0, np.float32)}
    assert not fired("large_round", program, small)
    assert "reaches 1020" not in "".join(notes("large_round", program, small))
    (note,) = notes("large_round", program, {"x": np.full((2, 8), -8.0, np.float32)})
    assert "reaches 2040" in note


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function,found", [
    (lambda x: torch.sin(x * 100), True), (lambda x: torch.cos(torch.cumsum(x, -1)), True),
    (lambda x: torch.sin(torch.sigmoid(x) * 6.28), False), (lambda x: torch.sin(torch.remainder(x, 6.25)), False),
    (lambda x: torch.sin(x - 6.25 * torch.round(x / 6.25)), False),
], ids=["frequency", "phase", "bounded", "remainder", "reduced"])
def test_angle(function, found, way):
    assert bool(fired("large_angle", converted(function, X, way=way))) is found


def test_angle_is_judged_by_what_was_seen():
    program = converted(lambda x: torch.sin(x * 100), X)
    feeds = {"x": np.full((2, 8), 1.5, np.float32)}
    (note,) = notes("large_angle", program, feeds)
    assert "reaches 150" in note and "0.125 apart" in note
    assert not fired("large_angle", program, feeds, beyond=200.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function,asks", [
    (lambda x: torch.where(torch.isnan(x), 0.0, x), "test for NaN"), (lambda x: (x != x).float(), "test for NaN"),
    (torch.nan_to_num, "test for NaN"), (lambda x: (x.abs() == float("inf")).float(), "an infinity"),
    (lambda x: (x > -float("inf")).float(), "an infinity"),
    (lambda x: (torch.ones_like(x) / x < 0).float(), "the sign of a zero"),
    (lambda x: x.masked_fill(x > 0, float("nan")), "inserts NaN"),
    (lambda x: torch.where(x > 0, x, torch.full_like(x, float("nan"))), "inserts NaN"),
    (lambda x: torch.where(x > 0, x, torch.zeros_like(x)), None),
], ids=["isnan", "unequal to itself", "nan_to_num", "isinf", "above", "sign of zero", "masked", "puts in", "plain"])
def test_nan(function, asks, way):
    if asks == "an infinity" and way == "traced" and not older_than("9.1"):
        pytest.skip("coremltools 9.1 makes 65504 of the infinity that its frontend writes as 3.4e38")
    found = notes("nan_logic", converted(function, X, way=way))
    assert any(asks in note for note in found) if asks else not found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function,word", [
    (lambda x: x.argmax(1), "argmax"), (lambda x: x.max(1)[1], "argmax"), (lambda x: x.argmin(1), "argmin"),
    (lambda x: x.topk(2)[0], "only the values"), (lambda x: x.topk(2)[1], "whose indices"),
    (lambda x: torch.gather(x * 2, 1, x.topk(2)[1]), "the pattern that was reported wrong"),
], ids=["argmax", "max", "argmin", "values", "indices", "topk and gather"])
def test_ranking(function, word, way):
    assert any(word in note for note in notes("topk_argmax", converted(function, X, way=way)))


def test_a_ranking_in_fp32_is_none():
    assert not fired("topk_argmax", converted(lambda x: x.argmax(1), X, precision=ct.precision.FLOAT32))


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("module,words", [
    (torch.nn.Embedding(16, 4), ["index of 1 gather"]),
    (lambda ids: ids.float() * 2, ["cast to numbers for mul"]),
    (lambda ids: torch.arange(8.0)[ids + 1], ["index of 1 gather", "integer op"]),
], ids=["embedding", "numbers", "shifted"])
def test_integer_input(module, words, way):
    (note,) = notes("int_inputs", converted(module, IDS, way=way))
    assert "int32" in note and all(word in note for word in words), note


def test_an_unused_integer_input_is_found():
    (note,) = notes("int_inputs", converted(lambda x, ids: x * 2, X, IDS))
    assert note.endswith("no op computes with it")


def test_fp32_islands():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    assert not fired("fp32_compute_left", converted(module, X))
    (whole,) = notes("fp32_compute_left", converted(module, X, precision=ct.precision.FLOAT32))
    assert whole.startswith("3 ops compute in fp32 (2 linear, 1 relu)")
    kept = ct.transform.FP16ComputePrecision(op_selector=lambda op: op.op_type != "exp")
    apart = converted(lambda x: torch.exp(torch.relu(torch.exp(x))), X, precision=kept)
    assert notes("fp32_compute_left", apart) == [
        "1 exp computes in fp32; ane::fp16_compute{mixed=true} converts it to fp16"] * 2
