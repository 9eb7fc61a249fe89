"""Real architectures: rewrites fire where their rules say, are verified equivalent there, and leave the rest alone."""

from __future__ import annotations

import dataclasses
from collections import Counter

import coremltools as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from mil_ane_passes.passes.pipeline import select_rewrites  # noqa: E402
from tests.lab.models import fired  # noqa: E402
from tests.lab.models.more import ALL_ARCHITECTURES  # noqa: E402

RECORDED = fired.read_record()
BY_NAME = {each.name: each for each in ALL_ARCHITECTURES}
QUICK = ("BERT, classic mask", "U-Net")
LAYER_COUNT = 3  # of the language models, where nothing else is said

SAFE_MATCHES: dict[str, dict[str, int]] = {
    # one mask is made for all layers; Gemma 2 and DETR make two, the one by hand has one in each layer
    "finite_mask": {
        **dict.fromkeys((
            "CLIP, text", "BERT, mask as input", "BERT, mask as input, exported", "BERT, classic mask",
            "DistilBERT, mask as input", "RoBERTa, mask as input", "MPNet, sentence embedding", "ELECTRA", "ALBERT",
            "GPT-2, mask as input", "GPT-2, its own mask", "Llama, mask as input", "Mistral", "Qwen2", "Qwen3",
            "Qwen3, exported", "Phi-3", "T5 encoder, mask as input"), 1),
        **dict.fromkeys(("DETR", "GPT by hand", "Gemma 2"), 2)},
    # two in a layer and one at the end; Qwen 3 also norms queries and keys, Gemma 2 what comes out of either half
    "scaled_rms_norm": {
        **dict.fromkeys(("Llama", "Gemma", "Llama, mask as input", "Mistral", "Qwen2", "Phi-3"), 2 * LAYER_COUNT + 1),
        **dict.fromkeys(("Qwen3", "Qwen3, exported", "Gemma 2"), 4 * LAYER_COUNT + 1),
        "T5": 12, "T5 encoder, mask as input": 5,  # of two layers; the decoder's have three
        "Mamba": 3, "Mamba 2": 5},  # of two layers; the second kind's gates have one as well
    "stable_softplus": {"Mamba": 2, "Mamba 2": 2},
    "stable_mish": {"CSPDarknet (mish)": 67},
    "hard_swish_rank_4": {"MobileNetV3": 1},
    "stable_log_softmax": dict.fromkeys(
        ("Wav2Vec2, CTC log probabilities", "HuBERT, log of softmax"), 1),
    "stable_log_sum_exp": {"ResNet-18, energy score": 1},
    "lift_conv_transpose_1d": {
        "HiFi-GAN": 4, "DAC decoder": 4, "EnCodec decoder": 4, "VITS vocoder": 4,
        "BigVGAN": 25},  # two that upsample, and one in each of 25 activations, two of which coremltools found twice
}
"""Where the passes of `safe` fire, and how often: what the architectures have of what the rules are about."""

CORRECT_RESULT = fired.RewriteResult(
    "name", "safe", "host", 10, 12, "rounding", {"finite_mask": 1}, {}, before=2e-3, after=2e-3
)


def get_match_counts(preset: str, name: str) -> dict[str, int]:
    """Which passes fired in an architecture, and how often."""
    found: dict[str, int] = RECORDED[preset][name]["fired"]
    return found


def measure_or_skip(name: str, tmp_path, presets=fired.PRESETS) -> list[fired.RewriteResult]:
    if BY_NAME[name].missing():
        pytest.skip(BY_NAME[name].missing())
    return fired.measure_presets(BY_NAME[name], tmp_path, presets)


@pytest.mark.parametrize("name", [pytest.param(QUICK[0], marks=pytest.mark.slow), QUICK[1]])
def test_a_quick_one_is_as_recorded(name, tmp_path):
    (found,) = measure_or_skip(name, tmp_path, ("safe",))
    assert fired.is_correct(found), str(found)
    recorded = RECORDED["safe"][name]
    if found.frontend != recorded["frontend"]:
        pytest.skip(f"coremltools {ct.__version__} with numpy {np.__version__} converts it with the {found.frontend} "
                    f"frontend; the record is of the {recorded['frontend']} one, which makes other ops")
    assert found.settled == recorded


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_one_is_right_and_as_recorded(name, tmp_path):
    for found in measure_or_skip(name, tmp_path):
        assert fired.is_correct(found), str(found)
        assert found.settled == RECORDED[found.preset][name]


@pytest.mark.parametrize("preset", fired.PRESETS)
def test_the_record_has_every_architecture_and_all_are_proved(preset):
    table = RECORDED[preset]
    assert list(table) == [each.name for each in ALL_ARCHITECTURES]
    kinds = Counter(BY_NAME[name].kind for name in table)
    assert kinds.total() >= 30
    assert min(kinds[kind] for kind in ("vision", "audio", "language")) >= 8
    for name, row in table.items():
        assert row["proved"] in (("bitwise", "rounding") if row["fired"] else ("nothing fired",)), name
        assert row["fired"] or row["ops"][0] == row["ops"][1], name


@pytest.mark.parametrize("preset", fired.PRESETS)
def test_the_record_names_passes_of_the_preset(preset):
    members = {rule.name for rule in select_rewrites(preset)}
    named = {name for row in RECORDED[preset].values() for name in (*row["fired"], *row["near"])}
    assert named <= members


def test_safe_fires_where_the_rules_say_and_nowhere_else():
    found: dict[str, dict[str, int]] = {}
    for name in RECORDED["safe"]:
        for rule, count in get_match_counts("safe", name).items():
            found.setdefault(rule, {})[name] = count
    assert found == SAFE_MATCHES


def test_full_fires_where_safe_does():
    """A lift that safe makes full may leave out, where it splits the bias off."""
    for name in RECORDED["safe"]:
        full = set(get_match_counts("full", name))
        fixed = full | {"lift_conv_transpose_1d"} if "split_conv_transpose_bias" in full else full
        assert set(get_match_counts("safe", name)) <= fixed, name


def test_the_command_prints_the_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(fired, "RECORD", tmp_path / "fired.json")
    assert fired.main(["U-Net", "--record"]) == 0
    printed = capsys.readouterr().out
    assert "| U-Net | host |" in printed
    assert "| nothing fired |" in printed
    assert list(fired.read_record()["safe"]) == ["U-Net"]


def test_an_unknown_name_is_said(capsys):
    assert fired.main(["U-Nets"]) == 1
    assert "U-Nets: unknown" in capsys.readouterr().err


@pytest.mark.parametrize("changes, right", [
    ({}, True),
    ({"before": float("inf")}, True),
    ({"before": float("inf"), "after": float("inf")}, True),
    ({"proved": "different, judged as rounding"}, False),
    ({"after": 0.02}, False),
    ({"after": float("inf")}, False),
])
def test_what_is_right(changes, right):
    assert fired.is_correct(dataclasses.replace(CORRECT_RESULT, **changes)) is right
