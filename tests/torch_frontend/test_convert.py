"""`ane.convert`: coremltools' convert, with the patches where they belong and our pipeline."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools import _deps
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.torch_frontend import NotConverted, active, decomposition
from mil_ane_passes.torch_frontend.convert import is_from_torch
from mil_ane_passes.utils.errors import InputError
from tests.without_torch import without_torch

from .checks import captured, input_types, outputs

X = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))


def lifted() -> torch.nn.Module:
    """What our pipeline rewrites."""
    torch.manual_seed(0)
    return torch.nn.ConvTranspose1d(4, 2, 3, stride=2).eval()


def ranks(program: Program) -> list[int]:
    return [op.x.rank for _, op in iterate_ops(program) if op.op_type == "conv_transpose"]


def with_fmod(x: torch.Tensor) -> torch.Tensor:
    return torch.fmod(x, 1.0)


def small(**how):
    return {"inputs": input_types([X]), "skip_model_load": True, "minimum_deployment_target": ct.target.iOS16} | how


def test_it_has_the_hosts_signature_and_three_more():
    ours, host = inspect.signature(ane.convert), inspect.signature(ct.convert)
    *given, check, feeds, ranges = ours.parameters.values()
    assert given == list(host.parameters.values())
    assert [(each.name, each.kind, each.default) for each in (check, feeds, ranges)] == [
        (name, inspect.Parameter.KEYWORD_ONLY, default)
        for name, default in (("check", False), ("feeds", None), ("ranges", None))]


@pytest.mark.parametrize("given", [{}, {"source": "pytorch"}], ids=["auto", "pytorch"])
def test_a_module_that_was_not_captured_is_named(given):
    with pytest.raises(ane.InputError, match=r"^convert: found the module ConvTranspose1d, which is not captured; "
                                             r"expected torch\.jit\.trace\(module\.eval\(\), example_inputs\), or "):
        ane.convert(lifted(), **small(), **given)


@pytest.mark.parametrize("given", [{}, {"source": "pytorch"}], ids=["auto", "pytorch"])
@pytest.mark.parametrize(("wrap", "kind"), [
    (lambda weights: weights, "OrderedDict"), (lambda weights: {"epoch": 3, "model": dict(weights)}, "dict")])
def test_a_dict_of_weights_is_named(wrap, kind, given):
    with pytest.raises(ane.InputError, match=rf"^convert: found a dict \({kind}\) with 2 tensors, which has weights, "
                                             r"but no computation; expected a module with these weights "
                                             r"\(module\.load_state_dict\(\.\.\.\)\) in torch\.jit\.trace\("):
        ane.convert(wrap(lifted().state_dict()), **small(), **given)


class RaisesWhenUnpickled:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.parametrize("make_path", [str, Path], ids=["str", "Path"])
@pytest.mark.parametrize("content", ["state dict", "module", "other", "old format"])
def test_a_file_of_torch_save_is_named_and_not_unpickled(content, make_path, tmp_path):
    path = make_path(tmp_path / "weights.pth")
    held = {"module": lifted(), "other": RaisesWhenUnpickled()}.get(content, lifted().state_dict())
    torch.save(held, path, _use_new_zipfile_serialization=content != "old format")
    kind = (r"neither a TorchScript nor another zip archive: of an old version of torch\.save, or damaged"
            if content == "old format" else
            r"a file of torch\.save, which contains a dict of weights or a whole module, not a TorchScript")
    with pytest.raises(ane.InputError, match=rf"^convert: found .*weights\.pth, {kind}; expected torch\.jit\.trace\("
                                             r".*of the module that torch\.load returns, or that has these weights"):
        ane.convert(path, **small())


def test_a_file_of_torch_export_is_named(tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(1, 2),)), path)
    with pytest.raises(ane.InputError, match=r"^convert: found .*model\.pt2, a file of torch\.export\.save; expected "
                                             r"torch\.export\.load\('.*model\.pt2'\)\.run_decompositions\(\{\}\)"):
        ane.convert(str(path), **small())


def test_a_traced_file_is_converted_by_a_path_of_type_str(tmp_path):
    path = tmp_path / "traced.pt"
    torch.jit.trace(torch.nn.ReLU(), torch.ones(1, 2)).save(str(path))
    inputs = [ct.TensorType(shape=(1, 2))]
    ane.convert(str(path), inputs=inputs, skip_model_load=True)
    with pytest.raises(ane.InputError, match=r"^convert: found a PosixPath; expected the path as a str: '.*traced.pt'"):
        ane.convert(path, inputs=inputs, skip_model_load=True)


def test_what_it_does_not_know_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'precision'"):
        ane.convert(None, precision="float32")
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        ane.convert()
    with pytest.raises(TypeError, match=r"^convert\(\) got an unexpected keyword argument 'preset'; expected "
                       r"pass_pipeline=ane\.pipeline\(preset=\.\.\., target=\.\.\.\)"):
        ane.convert(None, preset="full", target="m4")


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_it_converts_with_the_patches_and_leaves_none(frontend):
    example = X[0, 0]
    inputs = None if frontend == "export" else input_types([example])
    model = ane.convert(captured(with_fmod, [example], frontend), inputs=inputs, skip_model_load=True,
                        minimum_deployment_target=ct.target.iOS16, compute_precision=ct.precision.FLOAT32)
    assert isinstance(model, ct.models.MLModel) and not active()
    assert outputs(model, [example])[0] == pytest.approx(torch.fmod(example, 1.0).numpy(), abs=1e-6)


def test_our_pipeline_runs_and_the_hosts_alone_does_not():
    model = captured(lifted(), [X], "trace")
    assert ranks(ct.convert(model, **small())._mil_program) == [3]
    assert ranks(ane.convert(model, **small())._mil_program) == [4]


def test_ours_is_put_on_top_of_a_pipeline_that_is_given():
    base = ct.PassPipeline.EMPTY
    made = ane.convert(captured(lifted(), [X], "trace"), **small(pass_pipeline=base))
    assert ranks(made._mil_program) == [4]
    assert base.passes == [], "the user's own pipeline was changed"


def test_a_pipeline_with_our_passes_is_taken_as_it_is():
    given = ane.pipeline(passes="cancel_lift_pairs")
    assert ranks(ane.convert(captured(lifted(), [X], "trace"), **small(pass_pipeline=given))._mil_program) == [3]


def test_arguments_may_be_given_by_place():
    made = ane.convert(captured(lifted(), [X], "trace"), "pytorch", input_types([X]), skip_model_load=True)
    assert ranks(made._mil_program) == [4]


def test_to_milinternal_it_returns_the_program():
    program = ane.convert(captured(lifted(), [X], "trace"), convert_to="milinternal", inputs=input_types([X]))
    assert isinstance(program, Program) and ranks(program) == [4]


def test_a_neural_network_gets_the_patches_and_not_our_passes():
    assert ane.convert(captured(lifted(), [X], "trace"), convert_to="neuralnetwork", inputs=input_types([X])
                       ).get_spec().WhichOneof("Type") == "neuralNetwork"
    target = ct.target.iOS14
    made = ane.convert(captured(lifted(), [X], "trace"), minimum_deployment_target=target, inputs=input_types([X]))
    assert made.get_spec().WhichOneof("Type") == "neuralNetwork"


PROGRAM = mb.program(input_specs=[mb.TensorSpec(shape=(1, 4, 8))])(
    lambda x: mb.conv_transpose(x=x, weight=np.ones((4, 2, 3), np.float32), bias=np.ones(2, np.float32)))


def test_a_program_is_converted():
    made = ane.convert(PROGRAM, minimum_deployment_target=ct.target.iOS16, skip_model_load=True)
    assert ranks(made._mil_program) == [4]


def test_the_patches_hold_for_what_is_from_torch_only(monkeypatch):
    traced = captured(torch.relu, [X], "trace")
    monkeypatch.setattr(ct, "convert", lambda *arguments, **named: active())
    assert ane.convert(traced) is True
    assert ane.convert(PROGRAM) is False
    assert ane.convert("model.pb") is False and ane.convert(object(), source="tensorflow") is False


WITHOUT_TORCH = """
import sys
import coremltools as ct
from coremltools.converters.mil.mil import Builder as mb
import mil_ane_passes as ane

@mb.program(input_specs=[mb.TensorSpec(shape=(2,))])
def program(x):
    return mb.relu(x=x)

assert type(ane.convert(program, skip_model_load=True)).__name__ == "MLModel"
assert "torch" not in sys.modules
try:
    ane.convert("model.pt")
except ane.InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_program_needs_no_torch():
    done = without_torch(WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("the torch frontend needs PyTorch, which is not installed: ")


def test_what_counts_as_from_torch():
    traced = captured(torch.relu, [X], "trace")
    assert is_from_torch(traced) and is_from_torch(captured(torch.relu, [X], "export"))
    assert is_from_torch("a/model.pt") and is_from_torch("model.pth") and is_from_torch(object(), "PyTorch")
    assert not is_from_torch("a/saved_model") and not is_from_torch(object()) and not is_from_torch(Program())
    assert not is_from_torch(traced, "tensorflow")


def test_a_file_is_converted_with_the_patches(tmp_path):
    captured(with_fmod, [X], "trace").save(str(tmp_path / "model.pt"))
    made = ane.convert(str(tmp_path / "model.pt"), **small(check=True, compute_precision=ct.precision.FLOAT32))
    assert outputs(made, [X])[0] == pytest.approx(torch.fmod(X, 1.0).numpy(), abs=1e-6)


def test_the_hosts_refusals_come_through():
    with pytest.raises(ValueError, match="Unable to determine the type of the model"):
        ane.convert(object())
    assert not active()


def test_an_exported_program_that_the_host_does_not_read_yet_is_refused(monkeypatch):
    """Before torch 2.5; coremltools asks for a `source` then."""
    exported = torch.export.export(lifted(), (X,))
    traced = torch.jit.trace(lifted(), X)
    monkeypatch.setattr(_deps, "_HAS_TORCH_EXPORT_API", False)
    with pytest.raises(ane.InputError) as error:
        ane.convert(exported, skip_model_load=True)
    assert str(error.value) == (
        f"convert: found a program of torch.export with torch {torch.__version__}; coremltools supports those from "
        f"torch 2.5 on: update torch, or use torch.jit.trace")
    assert ane.convert(traced, **small()).get_spec().WhichOneof("Type") == "mlProgram"


def test_sizes_that_an_exported_program_excludes_are_named(caplog):
    class Halved(torch.nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.zeros(2, int(x.shape[1] / 2))], 1)

    flexible = ({1: torch.export.Dim.AUTO},)
    exported = torch.export.export(Halved(), (torch.ones(2, 12),), dynamic_shapes=flexible)
    if not getattr(exported, "_guards_code", None):
        pytest.skip("this torch records no guards")
    with caplog.at_level("WARNING", logger="mil_ane_passes"):
        ane.convert(exported.run_decompositions({}), skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    assert "holds only where math.trunc(L['x'].size()[1] / 2) == 6; if the model accepts other sizes" in caplog.text


def test_guards_that_hold_for_all_sizes_are_not_named(caplog):
    """2h % (2h // 2) is 0 for each h."""
    class Shuffled(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.pixel_shuffle(torch.nn.functional.pixel_unshuffle(x, 2), 2) + x

    sizes = {axis: 2 * torch.export.Dim(name, min=2, max=32) for axis, name in ((2, "h"), (3, "w"))}
    exported = torch.export.export(Shuffled(), (torch.ones(1, 1, 32, 40),), dynamic_shapes=(sizes,))
    pinning = [guard for guard in getattr(exported, "_guards_code", None) or () if guard.endswith(("== 0", "== 2"))]
    if not pinning:
        pytest.skip("this torch records no such guards")
    with caplog.at_level("WARNING", logger="mil_ane_passes"):
        ane.convert(exported.run_decompositions({}), skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    assert "holds only where" not in caplog.text


def test_a_sparse_buffer_of_an_exported_program_is_named():
    class Aligned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3, 4).t())
            self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)

        def forward(self, x):
            return torch.relu(x) @ self.table

    exported = torch.export.export(Aligned().eval(), (torch.ones(1, 4),)).run_decompositions({})
    with pytest.raises(NotConverted, match=r"'heads' is a sparse tensor.*module\.heads = module\.heads\.to_dense\(\)"):
        ane.convert(exported, skip_model_load=True)
    first = next(iter(exported.graph.nodes))
    assert first.target == "b_table" and not first.meta["val"].is_contiguous(), "the program is not changed"


@pytest.mark.parametrize("scale", [lambda x: float(x.shape[0]), lambda x: 2.5], ids=["of the size", "fixed"])
def test_a_decomposition_with_a_constant_of_a_flexible_size_is_refused(monkeypatch, scale):
    table = decomposition._build_decomposition_table()
    defined = {torch.ops.aten.special_entr.default: lambda x: x * torch.tensor(scale(x))}
    monkeypatch.setattr(decomposition, "_build_decomposition_table", lambda: {**table, **defined})
    x = torch.rand(3, 4)
    traced = captured(torch.special.entr, [x], "trace")
    types = [ct.TensorType(name="x", shape=(ct.RangeDim(1, 9, default=3), 4))]
    if scale(x) == 3.0:
        with pytest.raises(NotConverted, match="special_entr.* depends on a flexible size in a way that has no"):
            ane.convert(traced, inputs=types, skip_model_load=True)
    else:
        (found,) = outputs(ane.convert(traced, inputs=types, skip_model_load=True), [x])
        assert found == pytest.approx(x.numpy() * 2.5, abs=5e-3)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_names_of_outputs_do_not_depend_on_earlier_conversions(kind):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, states = self.layer(x, (h, c) if kind == torch.nn.LSTM else h + c)
            return y, *(states if kind == torch.nn.LSTM else [states])

    example = torch.randn(1, 5, 4), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)
    traced, inputs = torch.jit.trace(Layer().eval(), example), input_types(example)
    settings = {"inputs": inputs, "skip_model_load": True, "minimum_deployment_target": ct.target.iOS16}
    one, other, theirs = (convert(traced, **settings) for convert in (ane.convert, ane.convert, ct.convert))
    names = [[output.name for output in model.get_spec().description.output] for model in (one, other, theirs)]
    assert names[0] == names[1] == names[2]
    assert ane.verify(one, other).equal


def test_names_of_packed_and_exported_outputs_are_those_of_the_first_conversion():
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.GRU(4, 3, batch_first=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
            y, h = self.layer(packed)
            return torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0], h

    x = torch.randn(2, 3, 4)
    exported = torch.export.export(Packed().layer.eval(), (x,)).run_decompositions({})
    for model, inputs in ((torch.jit.trace(Packed().eval(), x), input_types([x])), (exported, None)):
        one, other = (ane.convert(model, inputs=inputs, skip_model_load=True, check=True,
                                  minimum_deployment_target=ct.target.iOS17) for _ in range(2))
        assert one.get_spec().description == other.get_spec().description


@pytest.mark.parametrize("dtype", [np.float32, np.float16, None])
def test_inputs_are_left_as_they_are_and_feeds_get_their_dtype(dtype):
    layer, x = torch.nn.Linear(4, 4).eval(), torch.randn(3, 4)
    inputs = [ct.TensorType(name="x", shape=(3, 4), dtype=dtype)]
    for target in (ct.target.iOS15, ct.target.iOS16) if dtype != np.float16 else (ct.target.iOS16, ct.target.iOS17):
        assert ane.convert(torch.jit.trace(layer, x), inputs=inputs, check=True, feeds={"x": x.numpy()},
                           minimum_deployment_target=target, skip_model_load=True)
        assert vars(inputs[0]) == vars(ct.TensorType(name="x", shape=(3, 4), dtype=dtype)) | {"shape": inputs[0].shape}


def test_inputs_of_other_sources_are_left_as_they_are(monkeypatch):
    def write_name(model, source, inputs, *more, **named):
        inputs[0].name = "written"

    monkeypatch.setattr(ct, "convert", write_name)
    inputs = [ct.TensorType(name="x", shape=(3, 4))]
    ane.convert("model.pb", inputs=inputs, source="tensorflow")
    assert inputs[0].name == "x"


@pytest.mark.parametrize("frontend", ["script", "export"])
@pytest.mark.parametrize("check", [False, True])
def test_a_model_without_outputs_is_rejected(frontend, check):
    class Forgets(torch.nn.Module):
        def forward(self, x: torch.Tensor):
            x * 2

    model = captured(Forgets().eval(), (torch.randn(2, 3),), frontend)
    inputs = input_types((torch.randn(2, 3),)) if frontend == "script" else None
    with pytest.raises(InputError, match="returns no tensor.* expected one or more .is a return statement missing"):
        ane.convert(model, inputs=inputs, check=check, minimum_deployment_target=ct.target.iOS16, skip_model_load=True)
