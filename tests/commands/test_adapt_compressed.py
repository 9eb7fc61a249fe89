"""Compressed weights through `adapt`: the same data, tokens and sizes, and packages that are compressed afterwards."""

from __future__ import annotations

import json
import shutil
from collections import Counter

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main

pytest.importorskip("transformers")

THRESHOLD = 512
"Weights of fewer numbers stay as they are: those of norms."
PROMPT, STEPS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 7, 9, 3, 23, 84, 62, 64], 4


def apply(call, config, **options):
    return lambda model: call(model, cto.OptimizationConfig(config), **options)


def prune(**options):
    return apply(cto.prune_weights, cto.OpMagnitudePrunerConfig(weight_threshold=THRESHOLD, **options))


def palettize(joint=False, **options):
    config = cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=THRESHOLD, **options)
    return apply(cto.palettize_weights, config, joint_compression=joint)


def quantize(joint=False, **options):
    config = cto.OpLinearQuantizerConfig(weight_threshold=THRESHOLD, **options)
    return apply(cto.linear_quantize_weights, config, joint_compression=joint)


GROUPS = {"granularity": "per_grouped_channel", "group_size": 16}
KINDS = {
    "int4 blocks": [quantize(dtype="int4", granularity="per_block", block_size=32)],
    "int8 channels": [quantize(dtype="int8", granularity="per_channel")],
    "palettes": [palettize()],
    "grouped palettes": [palettize(**GROUPS)],
    "sparse": [prune(target_sparsity=0.6)],
    "2:4": [prune(n_m_ratio=(2, 4))],
    "sparse palettes": [prune(target_sparsity=0.6), palettize(joint=True)],
    "sparse int8": [prune(target_sparsity=0.6), quantize(joint=True, dtype="int8")],
    "int8 palettes": [palettize(**GROUPS), quantize(joint=True, dtype="int8", granularity="per_tensor")],
}


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A model compressed in some way, made once."""
    from tests.lab.language_models.builders import convert

    folder, made = tmp_path_factory.mktemp("compressed"), {}

    def make(kind, name="llama", form="states"):
        key = name, form, kind
        if key not in made:
            model = ct.models.MLModel(str(convert(name, form)), skip_model_load=True)
            for step in KINDS[kind]:
                model = step(model)
            made[key] = folder / f"{len(made)}.mlpackage"
            model.save(str(made[key]))
        return made[key]

    return make


def list_compressed(package):
    """For each compressed weight the data of what makes it, whatever its shape."""
    found = Counter()
    for function in ane.load(package).program.functions.values():
        for op in function.operations:
            if op.op_type.startswith("constexpr_"):
                parts = [(name, str(np.asarray(var.val).dtype), np.asarray(var.val).tobytes())
                         for name, var in op.inputs.items() if var is not None and var.val is not None
                         and name not in ("shape", "axis")]
                found[op.op_type, tuple(sorted(parts))] += 1
    return found


def check_weights(source, folder, report, but=0):
    """Assert that all but some compressed weights are in the packages as they were, and that nothing else got large."""
    before = list_compressed(source)
    after = sum((list_compressed(each) for each in folder.glob("*.mlpackage")), Counter())
    assert before and len(set(before) - set(after)) == but and not set(after) - set(before)
    sizes = [sum(file.stat().st_size for file in place.rglob("*") if file.suffix in (".bin", ".npy"))
             for place in (source, folder)]
    assert sizes == [report.before["weight_bytes"], report.after["weight_bytes"]]
    assert sizes[1] <= 1.05 * sizes[0], sizes


def generate_source(path, steps=STEPS):
    """Tokens that the source generates, on the reference runtime; the cache is in states."""
    from mil_ane_passes.runtime import Runtime

    run, state, ids, end, found = Runtime(ane.load(path).program, precision="float32"), {}, PROMPT, 0, []
    for _ in range(steps):
        end += len(ids)
        mask = np.where(np.arange(end)[None] <= np.arange(end - len(ids), end)[:, None], 0, -4e4).astype(np.float16)
        logits = run({"inputIds": np.array([ids], np.int32), "causalMask": mask[None, None]}, state)["logits"]
        found.append(int(np.argmax(logits[0, -1])))
        ids = found[-1:]
    return found


def generate_folder(folder, steps=STEPS):
    from mil_ane_passes.report.decoder.generate import Decoder, generate
    from mil_ane_passes.runtime import predictor

    decoder = Decoder(folder, lambda path, function: predictor(path, function=function, precision="float32"))
    return generate(decoder, PROMPT, steps)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "sparse palettes"]


@pytest.mark.parametrize("kind", ["sparse palettes", *SLOW])
def test_compressed_weights_stay_and_the_tokens_are_those_of_the_source(compressed, tmp_path, kind):
    source = compressed(kind)
    report = ane.adapt(source, tmp_path / "out", prefill=16, verify=False)
    check_weights(source, tmp_path / "out", report)
    assert generate_folder(tmp_path / "out") == generate_source(source)
    assert not [each for each in report.done if "is not rewritten" in each or "unpacked" in each]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_check_of_adapt_holds_for_compressed_weights(compressed, tmp_path, kind):
    for form, options in (("states", {"parts": 2}), ("states", {"cache": "state"}), ("stateless", {})):
        source, folder = compressed(kind, form=form), tmp_path / f"{form} {' '.join(options)}"
        report = ane.adapt(source, folder, **options)
        assert report.status == "written" and len(report.tokens) == 16, str(report)
        check_weights(source, folder, report)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"parts": 2, "embedding": "npy"}, {"cache": "state"}], ids=str)
def test_with_parts_and_a_table_or_with_a_state(compressed, tmp_path, options):
    source = compressed("int4 blocks")
    report = ane.adapt(source, tmp_path / "out", verify=False, **options)
    check_weights(source, tmp_path / "out", report, but="embedding" in options)
    assert generate_folder(tmp_path / "out") == generate_source(source)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_as_a_file_is_as_small_as_the_source(compressed, tmp_path, kind):
    source = compressed(kind)
    report = ane.adapt(source, tmp_path / "out", verify=False, embedding="npy", prefill=16)
    # coremltools prunes no tables by 2:4; two ops with data make a weight of "sparse int8" and "int8 palettes".
    gone = {"2:4": 0, "sparse int8": 2, "int8 palettes": 2}.get(kind, 1)
    check_weights(source, tmp_path / "out", report, but=gone)
    assert generate_folder(tmp_path / "out") == generate_source(source)


@pytest.mark.slow
def test_a_stateless_decoder(compressed, tmp_path):
    source = compressed("grouped palettes", form="stateless")
    report = ane.adapt(source, tmp_path / "out", verify=False)
    check_weights(source, tmp_path / "out", report)
    assert len(generate_folder(tmp_path / "out")) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8 channels", "palettes", "sparse"])
def test_an_encoder(compressed, tmp_path, kind):
    source = compressed(kind, "bert", "encoder")
    report = ane.adapt(source, tmp_path / "out", context=32, verify=kind == "palettes")
    assert report.status == "written", str(report)
    check_weights(source, tmp_path / "out", report)
    assert "stay compressed" in str(report) and " of weights" in str(report)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of a decoder, one function a package."""
    from tests.lab.language_models.builders import convert

    folder = tmp_path_factory.mktemp("single") / "folder"
    ane.adapt(convert("llama", "states"), folder, verify=False)
    return folder


def compress_afterwards(folder, kind, name="decode.mlpackage"):
    model = ct.models.MLModel(str(folder / name), skip_model_load=True)
    for step in KINDS[kind]:
        model = step(model)
    return model


@pytest.mark.parametrize(("kind", "snr"), [("int8 channels", 25), *(
    pytest.param(kind, -10, marks=pytest.mark.slow) for kind in KINDS if kind != "int8 channels")])
def test_a_package_of_the_folder_that_is_compressed_afterwards_runs(single, tmp_path, capsys, kind, snr):
    folder = shutil.copytree(single, tmp_path / "folder")
    model = compress_afterwards(folder, kind)
    shutil.rmtree(folder / "decode.mlpackage")
    model.save(str(folder / "decode.mlpackage"))
    assert len(generate_folder(folder)) == STEPS
    packages = [str(place / "decode.mlpackage") for place in (single, folder)]
    assert main(["verify", *packages, "--snr", str(snr)]) == 0
    assert "SNR" in capsys.readouterr().out
    assert main(["verify", *packages, "--snr", "90"]) == 1


def test_coremltools_compresses_no_package_of_several_functions(tmp_path):
    """The page of the transforms says so, and to compress the source instead."""
    from tests.commands.test_adapt import make_decoder

    ane.adapt(make_decoder(tmp_path / "source.mlpackage"), tmp_path / "out", prefill=3, verify=False)
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["parts"]) == 2
    with pytest.raises(ValueError, match="is not supported for a multifunction model"):
        compress_afterwards(tmp_path / "out", "int8 channels", "decoder.mlpackage")
