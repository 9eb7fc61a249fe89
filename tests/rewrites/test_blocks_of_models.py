"""Blocks of real models through the preset full for each chip: what fires, and none is predicted to be slower."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.passes.guard import is_guarded
from mil_ane_passes.passes.pipeline import select_rewrites
from tests.lab.versions.needs import older_than
from tests.rewrites import unet_blocks
from tests.rewrites.transformer_blocks import convert_block, convert_real_block

TARGETS = ("m1", "m2", "m4", "m5")
FIXES = {rule.name for rule in select_rewrites("full") if not is_guarded(rule)}
UNET = {
    "SD 1.5, down": (lambda: unet_blocks.Down(320, 320), (8, 320)),
    "SD 1.5, up": (lambda: unet_blocks.Up(640, 320), (4, 640, 320)),
    "SD 1.5, down, 1280 channels": (lambda: unet_blocks.Down(1280, 1280), (16, 1280)),
}
"The block, and the side and channels of its inputs."


def convert(name, path):
    if name not in UNET:
        return convert_real_block(name, path, precision="FLOAT16")
    torch.manual_seed(0)
    make, sizes = UNET[name]
    return convert_block(make(), unet_blocks.make_inputs(*sizes), path, precision="FLOAT16")


def rewrite_for_each_chip(path, folder, verify=True, targets=TARGETS):
    """Rewrite the package for each chip; programs that are the same on several chips are verified once."""
    reports, checked = {}, set()
    for target in targets:
        out, first = folder / f"{target}.mlpackage", verify and not reports
        reports[target] = ane.rewrite(path, out, preset="full", target=target, verify=first)
        text = format_program(ane.load(out).program)
        if verify and text not in checked:
            checked.add(text)
            assert (reports[target] if first else ane.rewrite(path, preset="full", target=target)).verified
    return reports


def list_fired(report):
    return {trace.rule: len(trace.fired) for trace in report.traces if trace.fired}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("targets", [("m1", "m4"), pytest.param(TARGETS, marks=pytest.mark.slow)], ids="-".join)
@pytest.mark.parametrize(("name", "fired"), [
    ("SD 1.5, down", {"fuse_linear_convs": 2, "group_norm_rank_4": 3}),
    ("SD 1.5, up", {"fuse_linear_convs": 2, "group_norm_rank_4": 3}),
    ("Llama", {"hoist_row_slice": 1, "scaled_rms_norm": 5, "fuse_linear_convs": 1, "drop_gqa_repeat": 3,
               "index_by_mod": 1}),
    ("Whisper", {"hoist_row_slice": 1, "fuse_linear_convs": 5, "index_by_mod": 1, "edge_integers": 1}),
    ("BERT", {"hoist_row_slice": 1, "index_by_mod": 1}),
    ("ViT", {"hoist_row_slice": 1, "split_wide_conv": 1}),
])
def test_what_fires_and_at_what_cost(name, fired, targets, tmp_path):
    if older_than("9.0"):  # which does not count ids from the end
        fired = {rule: count for rule, count in fired.items() if rule != "index_by_mod"}
    convert(name, tmp_path / "before.mlpackage")
    for target, report in rewrite_for_each_chip(tmp_path / "before.mlpackage", tmp_path, targets=targets).items():
        assert list_fired(report) == fired, target
        before, after = report.predicted
        assert after.latency_us <= 1.02 * before.latency_us or FIXES & set(fired), target
        assert after.ops - after.on_ane <= before.ops - before.on_ane and after.transitions <= before.transitions


@pytest.mark.slow
def test_parts_of_a_linear_of_the_deepest_block_gain_too_little(tmp_path):
    """1280 channels at 16 x 16: the second linear of the MLP streams 13 MB three times on an M2, of 148 MB in all."""
    convert("SD 1.5, down, 1280 channels", tmp_path / "before.mlpackage")
    for target, report in rewrite_for_each_chip(tmp_path / "before.mlpackage", tmp_path, verify=False).items():
        before, after = report.predicted
        assert after.latency_us <= before.latency_us, target
        reverted = {each.rule: each.reverted for each in report.reverted}
        assert list(reverted) == (["split_linear_inner"] if target == "m2" else []), target
        assert target != "m2" or "less than 5%" in reverted["split_linear_inner"]


def test_a_model_that_becomes_small_enough_for_the_cpu_stays_on_the_ane(tmp_path):
    """Of GPT-2's last token alone so little is left to compute that the segmenter would take all of it to the CPU."""
    convert("GPT-2", tmp_path / "before.mlpackage")
    for target in TARGETS:
        report = ane.rewrite(tmp_path / "before.mlpackage", preset="full", target=target, verify=False)
        assert {each.rule: each.reverted.split(" of ")[0] for each in report.reverted} == {
            "hoist_row_slice": f"latency on {target}"}


def test_the_blocks_are_torchs(tmp_path):
    """In double precision; what the tests above rewrite is the block."""
    torch.manual_seed(0)
    make, sizes = UNET["SD 1.5, down"]
    module, inputs = make(), unet_blocks.make_inputs(*sizes)
    program = convert_block(module, inputs, tmp_path / "m.mlpackage")
    with torch.no_grad():
        expected = module.double()(*(each.double() for each in inputs)).numpy()
    feeds = {name: each.numpy() for name, each in zip(program.functions["main"].inputs, inputs, strict=True)}
    (found,) = ane.run(tmp_path / "m.mlpackage", feeds, precision="float64").values()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
