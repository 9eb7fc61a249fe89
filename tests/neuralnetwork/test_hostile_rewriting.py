"""Hostile networks given to lint and rewrite: one line and exit code 2, or a verified result; the source stays."""

import contextlib
import io
import random

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main

RNG = np.random.default_rng(1)


def make_spec():
    builder = neural_network.NeuralNetworkBuilder([("x", datatypes.Array(1, 4, 6, 5))], [("out", None)],
                                                  disable_rank5_shape_mapping=True)
    builder.add_load_constant_nd("constant", "c", RNG.standard_normal((1, 4, 1, 1)), (1, 4, 1, 1))
    builder.add_subtract_broadcastable("difference", ["x", "c"], "a")
    builder.add_pooling("pool", 4, 4, 4, 4, "MAX", "VALID", "a", "b")
    builder.add_concat_nd("concat", ["b", "b"], "d", 1)
    builder.add_softmax_nd("softmax", "d", "out", 1)
    return builder.spec


def set_custom(spec):
    spec.neuralNetwork.layers[-1].custom.className = "Mine"


def set_updatable(spec):
    spec.isUpdatable = True


def set_no_kind(spec):
    spec.neuralNetwork.layers[1].ClearField("subtractBroadcastable")


def set_large_constant(spec):
    del spec.neuralNetwork.layers[0].loadConstantND.shape[:]
    spec.neuralNetwork.layers[0].loadConstantND.shape.extend([1, 10**9, 1, 1])


def set_large_fill(spec):
    layer = spec.neuralNetwork.layers[0]
    layer.fillStatic.targetShape.extend([10**3, 10**3, 10**3])


def set_wrong_axis(spec):
    spec.neuralNetwork.layers[3].concatND.axis = 2**40


def set_no_inputs(spec):
    del spec.neuralNetwork.layers[1].input[:]


def set_third_input(spec):
    spec.neuralNetwork.layers[1].input.append("x")


def set_cycle(spec):
    spec.neuralNetwork.layers[1].input[0] = "out"


def set_zero_window(spec):
    spec.neuralNetwork.layers[2].pooling.kernelSize[:] = [0, 0]


def set_large_window(spec):
    spec.neuralNetwork.layers[2].pooling.kernelSize[:] = [2**62, 2**62]


def set_large_stride(spec):
    spec.neuralNetwork.layers[2].pooling.stride[:] = [2**62, 2**62]


def set_short_window(spec):
    spec.neuralNetwork.layers[2].pooling.kernelSize[:] = [4]


def set_short_borders(spec):
    spec.neuralNetwork.layers[2].pooling.valid.paddingAmounts.borderAmounts.add(startEdgeSize=1)


def set_no_layers(spec):
    del spec.neuralNetwork.layers[:]


def set_classic(spec):
    """Layers of Core ML 3 under the classic mapping, which the format forbids."""
    spec.neuralNetwork.arrayInputShapeMapping = 0


def set_tree(spec):
    network = ct.proto.Model_pb2.Model.FromString(spec.SerializeToString())
    spec.pipeline.models.add().CopyFrom(network)
    spec.pipeline.models.add().treeEnsembleRegressor.treeEnsemble.numPredictionDimensions = 1


DAMAGES = [each for name, each in sorted(globals().items()) if name.startswith("set_")]
REFUSED = {"set_custom", "set_updatable", "set_no_kind", "set_large_constant", "set_large_fill", "set_wrong_axis",
           "set_no_inputs", "set_cycle", "set_no_layers", "set_tree", "set_large_window"}


def run_on(path, tmp_path, words):
    """Run a command, which must not touch the file; returns its code and its lines on stderr."""
    raw = path.read_bytes()
    before = {each.name for each in tmp_path.iterdir()}
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert path.read_bytes() == raw
    made = {each.name for each in tmp_path.iterdir()} - before
    assert "Traceback" not in err.getvalue() and "internal error" not in err.getvalue(), err.getvalue()
    if code == 2:
        assert err.getvalue().count("\n") == 1 and err.getvalue().startswith(f"mil-ane-passes: {path}"), err.getvalue()
        assert out.getvalue() == "" and not made
    return code, err.getvalue(), made


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_damaged_networks_are_refused_or_verified(damage, tmp_path):
    spec = make_spec()
    damage(spec)
    path = tmp_path / "in.mlmodel"
    path.write_bytes(spec.SerializeToString())
    code, err, made = run_on(path, tmp_path, ["rewrite", str(path), "-o", str(tmp_path / "out.mlmodel"), "--preset",
                                              "full"])
    assert (code == 2) or not (damage.__name__ in REFUSED), damage.__name__
    assert made == ({"out.mlmodel"} if code == 0 else set())
    if code == 0:
        assert ane.verify(path, tmp_path / "out.mlmodel", seeds=1).equal
    assert (run_on(path, tmp_path, ["lint", str(path)])[0] == 2) == (code == 2)


def test_files_cut_anywhere_are_refused_or_verified(tmp_path):
    raw = make_spec().SerializeToString()
    picked = random.Random(4).sample(range(1, len(raw)), 25)
    for at in picked:
        path = tmp_path / "cut.mlmodel"
        path.write_bytes(raw[:at])
        code, _, made = run_on(path, tmp_path, ["rewrite", str(path), "-o", str(tmp_path / "out.mlmodel")])
        assert code == 2 and not made or made == {"out.mlmodel"}
        (tmp_path / "out.mlmodel").unlink(missing_ok=True)


@pytest.mark.parametrize("seed", range(3))
def test_files_with_flipped_bytes_are_refused_or_verified(tmp_path, seed):
    rng = random.Random(seed)
    raw = make_spec().SerializeToString()
    path = tmp_path / "flipped.mlmodel"
    for _ in range(12):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        code, _, made = run_on(path, tmp_path, ["rewrite", str(path), "-o", str(tmp_path / "out.mlmodel"),
                                                "--preset", "full"])
        assert made == ({"out.mlmodel"} if code == 0 else set())
        run_on(path, tmp_path, ["lint", str(path), "--format", "json"])
        (tmp_path / "out.mlmodel").unlink(missing_ok=True)


@pytest.mark.parametrize(("step", "options"), [
    ("os.replace", ["--overwrite"]), ("mil_ane_passes.package.file_replacement.move_to_free_path", [])])
def test_a_killed_write_leaves_nothing(tmp_path, monkeypatch, step, options):
    path = tmp_path / "in.mlmodel"
    path.write_bytes(make_spec().SerializeToString())

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, fail)
    assert run_on(path, tmp_path, ["lint", str(path), "--select", "NN104"])[0] == 0
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["rewrite", str(path), "-o", str(tmp_path / "out.mlmodel"), *options]) == 2
    assert "No space left" in err.getvalue() and [each.name for each in tmp_path.iterdir()] == ["in.mlmodel"]
