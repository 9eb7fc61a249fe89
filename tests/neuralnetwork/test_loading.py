"""NeuralNetworks in place of packages: every command and function reads them through the upgrade, and says so."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network
from coremltools.models.neural_network.quantization_utils import quantize_weights

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.neuralnetwork.loading import choose_target

RNG = np.random.default_rng(11)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def make_network():
    """A 3 x 3 convolution, a difference with a constant of channels, and a ReLU."""
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(1, 4, 8, 8))], [("out", None)], disable_rank5_shape_mapping=True)
    builder.add_convolution("conv", 4, 4, 3, 3, 1, 1, "same", 1, draw(3, 3, 4, 4), draw(4), True, input_name="data",
                            output_name="a")
    builder.add_load_constant_nd("mean", "m", draw(1, 4, 1, 1), (1, 4, 1, 1))
    builder.add_subtract_broadcastable("center", ["a", "m"], "b")
    builder.add_activation("relu", "RELU", "b", "out")
    return builder.spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("networks")
    spec = make_network()
    ct.models.utils.save_spec(spec, str(place / "net.mlmodel"))
    ct.models.MLModel(spec, skip_model_load=True).save(str(place / "held.mlpackage"))
    ane.upgrade(spec, place / "upgraded.mlpackage")
    np.savez(place / "feeds.npz", data=draw(1, 4, 8, 8))
    return place


SAID = ("is a NeuralNetwork; read as an ML Program, upgraded with `--deployment-target iOS16 --precision fp16`; the "
        "upgrade itself is not checked against the layers")


@pytest.mark.parametrize("name", ["net.mlmodel", "held.mlpackage"])
@pytest.mark.parametrize(
    "command",
    [
        ["lint", "IN", "--target", "m4"],
        ["verify", "IN", "upgraded.mlpackage", "--seeds", "1"],
        ["run", "IN", "--feeds", "feeds.npz", "-o", "OUT"],
        ["run", "IN", "--feeds", "feeds.npz", "--trace"],
        ["calibrate", "IN"],
        ["rewrite", "IN", "--dry-run", "--preset", "full"],
    ],
    ids=lambda words: " ".join(word for word in words if word.islower() or word.startswith("--")),
)
def test_a_command_reads_a_network_and_says_so(folder, tmp_path, capsys, monkeypatch, name, command):
    monkeypatch.chdir(folder)
    before = (folder / "net.mlmodel").read_bytes()
    words = [{"IN": name, "OUT": str(tmp_path / "out.npz")}.get(word, word) for word in command]
    assert main([*words, "--format", "json"]) in (0, 1)
    out, err = capsys.readouterr()
    (upgraded,) = json.loads(out)["upgraded"]
    assert upgraded == {"source": name, "kind": "neuralNetwork", "layers": 4, "deployment_target": "iOS16",
                        "precision": "fp16"}
    assert [line for line in err.splitlines() if SAID in line] == [f"mil-ane-passes: {name} {SAID}"]
    assert (folder / "net.mlmodel").read_bytes() == before


def test_an_ml_program_is_not_called_a_network(folder, capsys):
    main(["lint", str(folder / "upgraded.mlpackage"), "--format", "json"])
    out, err = capsys.readouterr()
    assert "upgraded" not in json.loads(out) and err == ""


def test_the_functions_read_paths_models_and_specs(folder):
    spec, feeds = make_network(), {"data": draw(1, 4, 8, 8)}
    model = ct.models.MLModel(spec, skip_model_load=True)
    held = ct.models.MLModel(str(folder / "held.mlpackage"), skip_model_load=True)
    package = ane.load(folder / "net.mlmodel")
    assert package.upgraded.layers == 4 and package.upgraded.source == str(folder / "net.mlmodel")
    assert ane.load(folder / "upgraded.mlpackage").upgraded is None
    assert ane.run(spec, feeds)["out"].tolist() == ane.run(model, feeds)["out"].tolist()
    assert ane.run(held, feeds)["out"].tolist() == ane.run(package, feeds)["out"].tolist()
    report = ane.verify(package, folder / "upgraded.mlpackage", seeds=1)
    assert report.equal_bits and [each.source for each in report.upgraded] == [str(folder / "net.mlmodel")]
    assert ane.lint(model).upgraded[0].source == "the MLModel"


def test_a_predictor_predicts_a_network(folder):
    x = draw(1, 4, 8, 8)
    found = ane.runtime.predictor(folder / "net.mlmodel").predict({"data": x})["out"]
    np.testing.assert_array_equal(found, ane.run(folder / "net.mlmodel", {"data": x}, precision="float16")["out"])


def test_inputs_whose_names_are_renamed_are_fed_by_their_new_names(tmp_path):
    builder = neural_network.NeuralNetworkBuilder([("in put", datatypes.Array(3))], [("out", None)])
    builder.add_activation("relu", "RELU", "in put", "out")
    model = ct.models.MLModel(builder.spec, skip_model_load=True)
    assert ane.runtime.predictor(model).predict({"in_put": np.float32([-1, 0, 2])})["out"].tolist() == [0, 0, 2]


def test_rewriting_to_a_package_upgrades_first(folder, tmp_path):
    report = ane.rewrite(folder / "net.mlmodel", tmp_path / "out.mlpackage", preset="full")
    assert report.status in ("written", "unchanged") and report.upgraded
    assert ane.verify(folder / "net.mlmodel", tmp_path / "out.mlpackage", seeds=1).equal


@pytest.mark.parametrize("name", ["net.mlmodel", "held.mlpackage"])
def test_edit_says_to_upgrade_first(folder, tmp_path, capsys, name):
    assert main(["edit", str(folder / name), "-o", str(tmp_path / "out.mlpackage"), "--rename", "data=x"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "convert it first with `mil-ane-passes upgrade " in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["lint", "rewrite"])
def test_batch_finds_networks_in_folders(folder, tmp_path, command):
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "below" / "net.mlmodel").write_bytes((folder / "net.mlmodel").read_bytes())
    (tmp_path / "in" / "cut.mlmodel").write_bytes((folder / "net.mlmodel").read_bytes()[:-7])
    for expected in ("findings" if command == "lint" else "unchanged", "up to date"):
        with contextlib.redirect_stderr(io.StringIO()):
            report = ane.batch(command, tmp_path / "in", tmp_path / "out")
        found = {item.name: item for item in report.items}
        assert found["below/net"].status == expected and found["below/net"].upgraded
        assert found["below/net"].report["upgraded"][0]["kind"] == "neuralNetwork"
        assert found["cut"].status == "failed" and "damaged" in found["cut"].error
        assert "upgraded from a NeuralNetwork" in str(report)


def test_the_folder_for_a_mac_has_a_note(folder, tmp_path, capsys):
    assert main(["mac-script", str(tmp_path / "mac"), str(folder / "net.mlmodel"), "--seeds", "1"]) == 0
    assert f"note: {folder / 'net.mlmodel'} {SAID}" in capsys.readouterr().out
    assert ane.load(tmp_path / "mac" / "before.mlpackage").upgraded is None


def test_scales_by_channel_raise_the_target_that_stores_them():
    spec = make_network()
    assert choose_target(spec) == "iOS16"
    linear = quantize_weights(ct.models.MLModel(spec, skip_model_load=True), 8, "linear")
    spec = getattr(linear, "get_spec", lambda: linear)()
    assert choose_target(spec) == "iOS18"
    assert ane.load.__doc__ and ane.lint(spec).upgraded[0].deployment_target == "iOS18"


@pytest.mark.parametrize("command", [["lint"], ["verify", "IN"], ["run", "--feeds", "F", "-o", "O"], ["calibrate"]],
                         ids=lambda words: words[0])
@pytest.mark.parametrize("kind", ["cut", "empty", "tree", "custom"])
def test_unreadable_networks_are_one_line_and_exit_code_2(folder, tmp_path, capsys, monkeypatch, command, kind):
    monkeypatch.chdir(tmp_path)
    np.savez("F.npz", data=draw(1, 4, 8, 8))
    spec = ct.proto.Model_pb2.Model()
    if kind == "tree":
        spec.treeEnsembleRegressor.treeEnsemble.numPredictionDimensions = 1
    if kind == "custom":
        spec.CopyFrom(make_network())
        spec.neuralNetwork.layers[-1].custom.className = "Mine"
    raw = (folder / "net.mlmodel").read_bytes()[:300] if kind == "cut" else spec.SerializeToString()
    (tmp_path / "x.mlmodel").write_bytes(raw)
    words = [{"IN": "x.mlmodel", "F": "F.npz", "O": "O.npz"}.get(word, word) for word in command]
    assert main([words[0], "x.mlmodel", *words[1:]]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("mil-ane-passes: x.mlmodel: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F.npz", "x.mlmodel"]


def test_names_do_not_depend_on_what_was_converted_before(folder, tmp_path):
    """A baseline of one network holds when another stands before it on the command line."""
    def get_names(source):
        return [row["output"] for row in ane.lint(source, target="m4").to_dict()["ops"]]

    path = folder / "net.mlmodel"
    assert get_names(path) == get_names(path)
    assert get_names(path) == [op.outputs[0].name for op in ane.upgrade(path).program.functions["main"].operations
                               if op.op_type != "const"]


@pytest.mark.parametrize("command", [["lint"], ["upgrade", "-o", "out.mlpackage"], ["rewrite", "-o", "out.mlmodel"]])
@pytest.mark.parametrize("way", ["overwritten", "replaced"])
def test_a_network_that_changes_while_it_is_read_is_refused(folder, tmp_path, capsys, monkeypatch, command, way):
    """Half of one file and half of another of the same size were read as one network."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "net.mlmodel", "x.mlmodel")
    ct.models.utils.save_spec(make_network(), "other.mlmodel")
    other, read = (tmp_path / "other.mlmodel").read_bytes(), Path.read_bytes
    assert len(other) == (tmp_path / "x.mlmodel").stat().st_size

    def read_half(path):
        first = read(path)
        if path.name != "x.mlmodel":
            return first
        if way == "replaced":
            os.replace("other.mlmodel", "x.mlmodel")
        else:
            path.write_bytes(other)
        return first[:len(first) // 2] + read(path)[len(first) // 2:]

    monkeypatch.setattr(Path, "read_bytes", read_half)
    assert main([command[0], "x.mlmodel", *command[1:]]) == 2
    assert "x.mlmodel: was modified while it was read; run again" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} <= {"x.mlmodel", "other.mlmodel"}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_network_is_compared_at_the_precision_of_the_program_beside_it(folder, tmp_path, precision):
    ane.upgrade(folder / "net.mlmodel", tmp_path / "out.mlpackage", precision=precision)
    for sides in ((folder / "net.mlmodel", tmp_path / "out.mlpackage"),
                  (tmp_path / "out.mlpackage", folder / "net.mlmodel")):
        report = ane.verify(*sides, seeds=1)
        assert report.equal_bits and [each.precision for each in report.upgraded] == [precision], str(report)
    assert ane.verify(folder / "net.mlmodel", folder / "net.mlmodel", seeds=1).upgraded[0].precision == "fp16"
