"""Dicts and ModelOutputs as results: an output for each tensor, named by its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import coremltools as ct
import pytest
import torch

import mil_ane_passes as ane

from ..checks import captured, input_types, outputs

X = torch.arange(6.).reshape(2, 3)


class Flat(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x + 1, "probabilities": torch.softmax(x, -1)}


class Clashing(torch.nn.Module):
    """An output named as an input, and one tensor twice."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x * 2
        return {"x0": y, "same": y}


class Nested(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 5, {"layers": (x + 1, x + 2), "inner": {"deep": x - 1}, "nothing": None}


class Inside(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {"a": x + 1, "b": x + 2}
        return found["a"] * found["b"]


def taken(model: torch.nn.Module, frontend: str) -> Any:
    if frontend == "trace":
        return torch.jit.trace(model.eval(), X, strict=False)
    return captured(model.eval(), [X], frontend)


def converted(program: Any, frontend: str, **options: Any) -> Any:
    return ane.convert(program, inputs=None if frontend == "export" else input_types([X]), skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16, compute_precision=ct.precision.FLOAT32, **options)


def names(model: Any) -> list[str]:
    return [output.name for output in model.get_spec().description.output]


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_keys_are_names(frontend: str) -> None:
    model = converted(taken(Flat(), frontend), frontend)
    assert names(model) == ["logits", "probabilities"]
    for found, expected in zip(outputs(model, [X]), Flat()(X).values(), strict=True):
        assert found == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_a_name_that_is_taken_and_a_tensor_twice(frontend: str) -> None:
    model = converted(taken(Clashing(), frontend), frontend)
    assert names(model) == ["x0" if frontend == "export" else "x0_out", "same"]
    assert [found.tolist() for found in outputs(model, [X])] == [(X * 2).tolist()] * 2


def test_nested_containers_and_what_is_outside_of_a_dict() -> None:
    model = converted(taken(Nested(), "export"), "export")
    assert names(model) == ["mul", "layers_0", "layers_1", "inner_deep"]
    expected = [X * 5, X + 1, X + 2, X - 1]
    assert [found.tolist() for found in outputs(model, [X])] == [each.tolist() for each in expected]


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_model_output_of_transformers(frontend: str) -> None:
    utils = pytest.importorskip("transformers.utils")

    @dataclass
    class Output(utils.ModelOutput):
        last: torch.Tensor | None = None
        first: torch.Tensor | None = None

    class Model(torch.nn.Module):
        def forward(self, x):
            return Output(last=x + 1, first=x * 2)

    assert names(converted(taken(Model(), frontend), frontend)) == ["last", "first"]


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_the_users_own_names_win(frontend: str) -> None:
    given = [ct.TensorType(name="one"), ct.TensorType(name="two")]
    assert names(converted(taken(Flat(), frontend), frontend, outputs=given)) == ["one", "two"]


def test_a_result_that_is_checked() -> None:
    assert names(converted(taken(Flat(), "trace"), "trace", check=True)) == ["logits", "probabilities"]


def test_a_dict_inside_of_a_script_is_read_at_conversion() -> None:
    model = converted(taken(Inside(), "script"), "script")
    assert outputs(model, [X])[0].tolist() == Inside()(X).tolist()


class Filled(torch.nn.Module):
    """A dict that is filled key by key, read in between, with a key that is set twice."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {"last": x}
        found["first"] = x + 1
        found["second"] = found["first"] * x
        found["last"] = found["second"] - found["last"]
        return found


class FilledInALoop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 2), "two": torch.nn.Linear(3, 4)})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, head in self.heads.items():
            found[name + "_logits"] = head(x)
        return found


@pytest.mark.parametrize("model", [Filled(), FilledInALoop()])
def test_a_dict_of_a_script_that_is_filled_key_by_key(model: torch.nn.Module) -> None:
    expected = model(X)
    made = converted(taken(model, "script"), "script")
    assert names(made) == list(expected)
    for found, wanted in zip(outputs(made, [X]), expected.values(), strict=True):
        assert found == pytest.approx(wanted.detach().numpy(), abs=1e-6)


class FilledByCondition(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if bool(x.sum() > 0):
            found["a"] = x
        return found


class Comprehended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name + "_x": each + 1 for name, each in {"a": x, "b": x * 2}.items()}


class Empty(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        return found


@pytest.mark.parametrize(("model", "reason"), [
    (FilledByCondition(), "uses a dict inside of the model"), (Comprehended(), "uses a dict inside of the model"),
    (Empty(), "the model returns a dict without tensors; return one tensor or more")])
def test_a_dict_whose_items_are_not_known_is_refused(model: torch.nn.Module, reason: str) -> None:
    with pytest.raises(ane.torch_frontend.NotConverted, match=reason):
        converted(taken(model, "script"), "script")
