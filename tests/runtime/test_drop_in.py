"""The predictor: signatures, coercions, refusals and results of `MLModel.predict` and `make_state`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.runtime import PredictError, memory_limits
from tests.package.helpers import with_functions

Image = pytest.importorskip("PIL.Image")


def convert(program: Any, **options: Any) -> Any:
    options.setdefault("compute_precision", ct.precision.FLOAT32)
    options.setdefault("minimum_deployment_target", ct.target.iOS16)
    return ct.convert(program, convert_to="mlprogram", skip_model_load=True, **options)


def doubled(**options: Any) -> Any:
    """y = 2 x for x of (2, 3), and z = ids + 1 for int ids of (2,)."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((2,), dtype=types.int32)],
                opset_version=ct.target.iOS16)
    def program(x: Any, ids: Any) -> Any:
        return mb.mul(x=x, y=2.0, name="y"), mb.add(x=ids, y=1, name="z")

    return convert(program, **options)


class TestInputs:
    @pytest.mark.parametrize("of", [
        lambda array: array, lambda array: array.tolist(), lambda array: torch.from_numpy(array),
        lambda array: array.astype(np.float64), lambda array: array.astype(np.float16), lambda array: array.astype(int),
    ], ids=["array", "list", "torch", "float64", "float16", "integers"])
    def test_everything_that_mlmodel_takes(self, of: Any) -> None:
        x = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
        found = ane.runtime.predictor(doubled()).predict({"x": of(x), "ids": of(np.array([3.0, 4.0], np.float32))})
        np.testing.assert_array_equal(found["y"], 2 * x)
        np.testing.assert_array_equal(found["z"], [4, 5])
        assert found["y"].dtype == np.float32 and found["z"].dtype == np.int32

    def test_the_callers_dictionary_stays_as_it_was(self) -> None:
        data = {"x": [[1.0, 2, 3], [4, 5, 6]], "ids": [0, 1]}
        ane.runtime.predictor(doubled()).predict(data)
        assert data == {"x": [[1.0, 2, 3], [4, 5, 6]], "ids": [0, 1]}

    def test_a_list_is_a_batch(self) -> None:
        batch = [{"x": np.full((2, 3), value), "ids": [value, value]} for value in (1, 2)]
        found = ane.runtime.predictor(doubled()).predict(batch)
        assert [each["y"][0, 0] for each in found] == [2, 4]

    def test_a_path(self, tmp_path: Path) -> None:
        doubled().save(str(tmp_path / "model.mlpackage"))
        found = ane.runtime.predictor(tmp_path / "model.mlpackage").predict({"x": np.ones((2, 3)), "ids": [1, 2]})
        np.testing.assert_array_equal(found["y"], np.full((2, 3), 2))

    def test_an_optional_input_takes_its_default(self) -> None:
        class Added(torch.nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return x[:, :2] + y

        traced = torch.jit.trace(Added(), (torch.ones(1, 3), torch.ones(1, 2)))
        model = ct.convert(traced, compute_precision=ct.precision.FLOAT32, skip_model_load=True, inputs=[
            ct.TensorType("x", (1, 3)), ct.TensorType("y", (1, 2), default_value=np.full((1, 2), 5, np.float32))])
        (found,) = ane.runtime.predictor(model).predict({"x": np.ones((1, 3))}).values()
        np.testing.assert_array_equal(found, [[6, 6]])


class TestRefusals:
    """What Python refuses is refused by coremltools' own words; what the framework refuses is a RuntimeError."""

    def test_names(self) -> None:
        with pytest.raises(KeyError, match='Provided key "w", in the input dict, does not match any of the'):
            ane.runtime.predictor(doubled()).predict({"w": np.ones((2, 3))})

    @pytest.mark.parametrize("data, said", [
        ([1], "must contain only dictionaries"), ("text", "must be either a dict or list of dict")])
    def test_types(self, data: Any, said: str) -> None:
        with pytest.raises(TypeError, match=said):
            ane.runtime.predictor(doubled()).predict(data)

    def test_shape(self) -> None:
        with pytest.raises(RuntimeError, match=r"feed 'x': found shape \(3, 2\), expected fp32 \(2, 3\)"):
            ane.runtime.predictor(doubled()).predict({"x": np.ones((3, 2)), "ids": [0, 0]})

    def test_a_missing_input(self) -> None:
        with pytest.raises(PredictError, match="input 'ids': not fed"):
            ane.runtime.predictor(doubled()).predict({"x": np.ones((2, 3))})

    def test_what_cannot_be_computed(self) -> None:
        @mb.program(input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((1,), dtype=types.int32)],
                    opset_version=ct.target.iOS17)
        def program(x: Any, ids: Any) -> Any:
            return mb.gather(x=x, indices=ids, axis=0, validate_indices=True, name="y")

        model = convert(program, minimum_deployment_target=ct.target.iOS17)
        with pytest.raises(RuntimeError, match="Unable to compute the prediction using ML Program"):
            ane.runtime.predictor(model).predict({"x": np.ones((2, 3)), "ids": [7]})

    def test_no_ml_program(self) -> None:
        spec = ct.proto.Model_pb2.Model()
        spec.treeEnsembleRegressor.treeEnsemble.numPredictionDimensions = 1
        with pytest.raises(ane.InputError, match="has no package on disk"):
            ane.runtime.predictor(ct.models.MLModel(spec, skip_model_load=True))


def counter() -> Any:
    """A state of (1, 2) to which x is added."""

    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.fp16), mb.StateTensorSpec((1, 2), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x: Any, held: Any) -> Any:
        total = mb.add(x=mb.read_state(input=held), y=x, name="total")
        return mb.identity(x=mb.coreml_update_state(state=held, value=total), name="y")

    return convert(program, minimum_deployment_target=ct.target.iOS18, compute_precision=ct.precision.FLOAT16)


class TestStates:
    def test_two_states_go_their_own_ways(self) -> None:
        predictor = ane.runtime.predictor(counter())
        one, other = predictor.make_state(), predictor.make_state()
        x = np.array([[1, 2]], np.float16)
        for expected in ([[1, 2]], [[2, 4]], [[3, 6]]):
            np.testing.assert_array_equal(predictor.predict({"x": x}, state=one)["y"], expected)
        np.testing.assert_array_equal(predictor.predict({"x": x}, other)["y"], [[1, 2]])

    def test_read_and_write(self) -> None:
        predictor = ane.runtime.predictor(counter())
        state = predictor.make_state()
        assert isinstance(state, ct.models.model.MLState)
        state.write_state("held", np.array([[10, 20]], np.float32))
        predictor.predict({"x": np.ones((1, 2))}, state=state)
        np.testing.assert_array_equal(state.read_state("held"), [[11, 21]])

    def test_refusals(self) -> None:
        predictor = ane.runtime.predictor(counter())
        state = predictor.make_state()
        with pytest.raises(RuntimeError, match="state 'hold': no such state"):
            state.read_state("hold")
        with pytest.raises(RuntimeError, match=r"state 'held': found shape \(2,\), expected \(1, 2\)"):
            state.write_state("held", np.ones(2))
        with pytest.raises(RuntimeError, match=r"the model has states \(held\); pass state=make_state"):
            predictor.predict({"x": np.ones((1, 2))})


@pytest.mark.parametrize("layout, mode", [("RGB", "RGB"), ("BGR", "RGB"), ("GRAYSCALE", "L"),
                                          ("GRAYSCALE_FLOAT16", "F")])
def test_images_in_and_out(layout: str, mode: str) -> None:
    """The red plane of an image, halved: which plane that is depends on the layout."""
    channels, colour = (3 if mode == "RGB" else 1), getattr(ct.colorlayout, layout)
    red = 2 if layout == "BGR" else 0

    class Red(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[:, red : red + 1] * 0.5, x + 0.25

    traced = torch.jit.trace(Red(), torch.ones(1, channels, 4, 5))
    model = convert(traced, inputs=[ct.ImageType("x", (1, channels, 4, 5), color_layout=colour)],
                    outputs=[ct.TensorType("half"), ct.ImageType("same", color_layout=colour)])
    pixels = np.arange(20 * channels, dtype=np.uint8).reshape((4, 5, 3) if channels == 3 else (4, 5))
    image = Image.fromarray(pixels.astype(np.float32) if mode == "F" else pixels)
    found = ane.runtime.predictor(model).predict({"x": image})
    np.testing.assert_array_equal(found["half"][0, 0], (pixels[..., 0] if channels == 3 else pixels) / 2)
    assert found["same"].mode == mode
    np.testing.assert_array_equal(np.asarray(found["same"]), pixels + 0.25 if mode == "F" else pixels)
    with pytest.raises(TypeError, match=r"must be of type PIL\.Image\.Image"):
        ane.runtime.predictor(model).predict({"x": pixels})
    with pytest.raises(RuntimeError, match="height 5, width 4, expected height 4, width 5"):
        ane.runtime.predictor(model).predict({"x": image.transpose(Image.Transpose.ROTATE_90)})


def test_a_classifier_gives_a_label_and_probabilities() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 3))], opset_version=ct.target.iOS16)
    def program(x: Any) -> Any:
        return mb.softmax(x=x, axis=-1, name="p")

    model = convert(program, classifier_config=ct.ClassifierConfig(["a", "b", "c"]))
    found = ane.runtime.predictor(model).predict({"x": [[0.0, 2.0, 1.0]]})
    assert found["classLabel"] == "b"
    truth = torch.softmax(torch.tensor([0.0, 2.0, 1.0]), 0).tolist()
    assert found["classLabel_probs"] == pytest.approx(dict(zip("abc", truth)))


def scaled(factor: float) -> Any:
    @mb.program(input_specs=[mb.TensorSpec((2,))], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        return mb.mul(x=x, y=factor, name="y")

    return convert(program, minimum_deployment_target=ct.target.iOS18)


def test_the_function_the_model_was_loaded_with(tmp_path: Path) -> None:
    parts = {name: tmp_path / f"{name}.mlpackage" for name in ("double", "triple")}
    for name, factor in (("double", 2.0), ("triple", 3.0)):
        scaled(factor).save(str(parts[name]))
    path = str(with_functions(tmp_path / "both.mlpackage", parts, "double"))
    for name, factor in ((None, 2), ("double", 2), ("triple", 3)):
        model = ct.models.MLModel(path, function_name=name, skip_model_load=True)
        np.testing.assert_array_equal(ane.runtime.predictor(model).predict({"x": [1.0, 2.0]})["y"],
                                      [factor, 2 * factor])


class TestStrangeInputs:
    """What is no array, no model or no name is said to be so."""

    @pytest.mark.parametrize("value, said", [("text", "could not convert"), (np.ones((2, 3)) * 1j, "complex numbers")])
    def test_no_numbers(self, value: Any, said: str) -> None:
        with pytest.raises(PredictError, match=f"feed 'x': .*{said}.*expected an array of float32"):
            ane.runtime.predictor(doubled()).predict({"x": value, "ids": [0, 0]})

    def test_no_model(self) -> None:
        with pytest.raises(ane.InputError, match="found a NoneType; expected an MLModel or the path"):
            ane.runtime.predictor(None)  # the signature says so, users may not
        with pytest.raises(ane.InputError, match="no file or folder '/nowhere"):
            ane.runtime.predictor("/nowhere.mlpackage")

    def test_one_quirk_by_its_name(self) -> None:
        assert ane.runtime.predictor(doubled(), quirks="exp_overflow").predict({"x": np.ones((2, 3)), "ids": [0, 0]})


def test_an_image_output_without_pillow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = torch.jit.trace(torch.nn.ReLU().eval(), torch.zeros(1, 3, 4, 4))
    model = ane.runtime.predictor(convert(
        traced, inputs=[ct.TensorType("x", (1, 3, 4, 4))], outputs=[ct.ImageType("y", color_layout="RGB")]))
    shown = model.predict({"x": np.full((1, 3, 4, 4), 7, np.float32)})["y"]
    assert np.asarray(shown).tolist() == np.full((4, 4, 3), 7).tolist()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ane.InputError, match="an image output needs Pillow, which is not installed: pip install"):
        model.predict({"x": np.zeros((1, 3, 4, 4), np.float32)})


def test_a_machine_that_does_not_tell_its_memory_counts_as_one_of_64_gb(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    @mb.program(input_specs=[mb.TensorSpec(shape=(1 << 16, 1))])
    def program(x: Any) -> Any:
        return mb.matmul(x=x, y=x, transpose_y=True, name="y")  # 2 ** 32 values, 34.4 GB

    monkeypatch.delattr("os.sysconf")
    memory_limits._get_machine_bytes.cache_clear()  # what an earlier run was told
    request.addfinalizer(memory_limits._get_machine_bytes.cache_clear)
    ane.runtime.Runtime(program)  # half of it is just enough
    program.functions["main"].find_ops(op_type="matmul")[0].outputs[0]._sym_type = types.tensor(
        types.fp32, (1 << 16, (1 << 16) + 1))
    with pytest.raises(ane.NotSupported, match=r"value 'y' .* takes 34.4 GB; .* holds at most 34.4 GB for one value"):
        ane.runtime.Runtime(program)
