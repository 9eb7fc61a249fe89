"""Every failure of a conversion names the op, the module and the line, and says what can be done."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.frontend.torch import torch_op_registry
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import captured, input_types

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 0.1
V = X[:, 0, 0]

UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "lgamma": (lambda x: torch.lgamma(x), V),
    "digamma": (lambda x: torch.digamma(x), V),
    "erfinv": (lambda x: torch.erfinv(x * 0.5), V),
    "igamma": (lambda x: torch.igamma(x, x), V),
    "nextafter": (lambda x: torch.nextafter(x, x + 1), V),
    "frexp": (lambda x: torch.frexp(x)[0], V),
    "bincount": (lambda x: torch.bincount((x[0] * 3).long(), minlength=5), V),
    "mode": (lambda x: x.mode(1)[0], V),
    "nanmedian": (lambda x: torch.nanmedian(x), V),
    "trapezoid": (lambda x: torch.trapezoid(x * 2), V),
    "linalg_svd": (lambda x: torch.linalg.svd(x)[1], V),
    "linalg_inv": (lambda x: torch.linalg.inv(x[:, :2] + torch.eye(2)), V),
    "linalg_cholesky": (lambda x: torch.linalg.cholesky(x[:, :2] @ x[:, :2].T + torch.eye(2)), V),
    "multinomial": (lambda x: torch.multinomial(x, 2), V),
    "reshape|view": (lambda x: x.reshape(1, 2, 3, 2, 4, 2, 4).permute(0, 2, 1, 4, 3, 6, 5) * 2, X),
}


class Inner(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Outer(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def converted(program: Any, x: torch.Tensor, frontend: str = "trace", **options: Any) -> Any:
    return ane.convert(program, skip_model_load=True, inputs=None if frontend == "export" else input_types([x]),
                       **{"minimum_deployment_target": ct.target.iOS17, **options})


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_op_is_refused_in_our_words(name, frontend):
    function, x = UNSUPPORTED[name]
    program = captured(Outer(function).eval(), [x], frontend)
    with pytest.raises(NotConverted) as refused:
        converted(program, x, frontend)
    text = str(refused.value)
    assert text.startswith("op '") and any(kind in text.partition(" in ")[0] for kind in name.split("|")), text
    assert " in inner (" in text and ".py:" in text, "no module or no line"
    assert "; " in text, "no advice"
    assert (refused.value.__cause__ is None) == ("is implemented for constants only" in text)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize(("kind", "function"), [
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True)),
    ("native_layer_norm", lambda x: torch.native_layer_norm(x, (8,), None, None, 1e-5)),
])
def test_a_result_that_a_lowering_leaves_out_is_named(kind, function, frontend):
    program = captured(Outer(function).eval(), [X], frontend)
    with pytest.raises(NotConverted, match=rf"^op '{kind}' in inner \(.*py:\d+\): the lowering leaves out its result "
                                           r"2; use its other results only, or compute this one with other ops$"):
        converted(program, X, frontend)


def test_the_words_for_what_has_no_lowering_and_for_one_that_fails():
    with pytest.raises(
        NotConverted,
        match=r"op 'nextafter' in inner \(.*py:\d+\): is not implemented; write it with "
        r"ops that Core ML has, compute it outside of the model, or register a lowering",
    ):
        converted(captured(Outer(UNSUPPORTED["nextafter"][0]).eval(), [V], "trace"), V)
    with pytest.raises(NotConverted, match=r"op 'multinomial' in inner \(.*py:\d+\): cannot be converted; the "
                                           r"lowering of coremltools fails: ValueError: When num_samples is larger "
                                           r"than 1, only replacement=True is supported.; use other arguments") as bad:
        converted(captured(Outer(UNSUPPORTED["multinomial"][0]).eval(), [V], "trace"), V)
    assert isinstance(bad.value.__cause__, ValueError)


def convert_at(program: Any, *shapes: Any) -> str:
    """Convert with these shapes of the inputs; return the error."""
    with pytest.raises(NotConverted) as refused:
        ane.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS17,
                    inputs=[ct.TensorType(name=f"x{number}", shape=shape) for number, shape in enumerate(shapes)])
    return str(refused.value)


def scripted_lgamma(x: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(x)


CONV = torch.nn.Conv2d(80, 8, 3).eval()
CHANNELS = torch.zeros(1, 80, 8, 8)


@pytest.mark.parametrize(("shape", "written"), [
    ((1, 64, 8, 8), r"\[1, 64, 8, 8\]"), ((1, 80, 8), r"\[1, 80, 8\]"),
    ((1, np.int64(64), 8, 8), r"\[1, 64, 8, 8\]"),
    ((1, 64, ct.RangeDim(4, 9, default=5), 8), r"\[1, 64, 4 to 9, 8\]"),
    (ct.EnumeratedShapes([(1, 64, 8, 8), (1, 64, 9, 8)]), r"\[1, 64, 8, 8\] or \[1, 64, 9, 8\]"),
])
def test_a_shape_that_is_not_that_of_the_traced_example_is_named(shape, written):
    text = convert_at(captured(CONV, [CHANNELS], "trace"), shape)
    assert re.search(rf"fails: .*; the input 'x0' has the shape {written} in inputs=, but the model was traced with "
                     r"\[1, 80, 8, 8\]: pass a shape that includes it, or capture the model with an example of the "
                     r"other shape; otherwise use other arguments or another op", text), text


def test_of_several_inputs_the_one_of_another_shape_is_named():
    class Pairs(torch.nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return x @ pair[0] @ pair[1]

    traced = torch.jit.trace(Pairs().eval(), (torch.ones(2, 3), (torch.ones(3, 4), torch.ones(4, 5))))
    one, two, three = (ct.TensorType(name=name, shape=shape) for name, shape in
                       (("a", (2, 3)), ("b", (3, 4)), ("c", (6, 5))))
    with pytest.raises(NotConverted, match=r"the input 'c' has the shape \[6, 5\] in inputs=, but .* \[4, 5\]"):
        ane.convert(traced, inputs=[one, (two, three)], skip_model_load=True)


def test_an_exported_program_with_an_input_of_another_rank_is_told_so():
    text = convert_at(captured(CONV, [CHANNELS], "export"), (1, 80, 8))
    assert "'x0' has the shape [1, 80, 8] in inputs=, but the model was exported with [1, 80, 8, 8]" in text


@pytest.mark.parametrize("capture", ["script", "file", "frozen"])
def test_the_shapes_are_named_where_the_example_is_not_known(capture, tmp_path):
    program = captured(CONV, [CHANNELS], "script" if capture == "script" else "trace")
    if capture == "file":
        program.save(str(tmp_path / "model.pt"))
        program = str(tmp_path / "model.pt")
    elif capture == "frozen":
        program = torch.jit.freeze(program)
    text = convert_at(program, (1, 64, 8, 8))
    assert "; check that the model accepts the shapes in inputs= ('x0' [1, 64, 8, 8]); otherwise use other" in text


def test_the_shapes_are_not_named_where_they_are_no_reason(monkeypatch):
    program = captured(Outer(UNSUPPORTED["multinomial"][0]).eval(), [V], "trace")
    for shape in (V.shape, (2, ct.RangeDim(2, 9, default=4)), ct.EnumeratedShapes([(2, 4), (2, 8)])):
        assert "; use other arguments" in convert_at(program, shape)
    assert "inputs=" not in convert_at(captured(Outer(UNSUPPORTED["nextafter"][0]).eval(), [V], "trace"), (2, 4))

    def broken(context: Any, node: Any) -> None:
        raise KeyError("of the lowering")

    monkeypatch.setitem(torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping, "lgamma", broken)
    assert "inputs=" not in convert_at(captured(scripted_lgamma, [V], "script"), V.shape)


def test_a_custom_op_is_named():
    library = torch.library.Library("located_failures", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    program = captured(Outer(lambda x: torch.ops.located_failures.twice(x)).eval(), [V], "trace")
    with pytest.raises(NotConverted, match=r"op 'located_failures::twice' in inner \(.*\): is not implemented"):
        converted(program, V)


def test_a_lowering_of_the_user_that_fails_is_named(monkeypatch):
    def broken(context: Any, node: Any) -> None:
        raise LookupError("of the user's")

    monkeypatch.setitem(torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping, "lgamma", broken)
    with pytest.raises(NotConverted, match=r"op 'lgamma' .* the lowering of tests\.torch_frontend\.patches\."
                                           r"test_located_failures fails: LookupError: of the user's") as refused:
        converted(captured(Outer(UNSUPPORTED["lgamma"][0]).eval(), [V], "trace"), V)
    assert isinstance(refused.value.__cause__, LookupError)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, MemoryError, ane.InputError])
def test_what_says_nothing_of_the_model_passes_through(monkeypatch, raised):
    def stop(context: Any, node: Any) -> None:
        raise raised("now")

    monkeypatch.setitem(torch_op_registry._TORCH_OPS_REGISTRY.name_to_func_mapping, "lgamma", stop)
    with pytest.raises(raised, match="^now$"):
        converted(captured(Outer(UNSUPPORTED["lgamma"][0]).eval(), [V], "trace"), V)


@pytest.mark.parametrize("inputs, words", [
    ([], "at least one"), ([ct.TensorType(shape=(2, 8)), ct.TensorType(shape=(2, 8))], "Number of TorchScript inputs"),
    (None, "inputs")])
def test_wrong_arguments_are_reported_as_coremltools_does(inputs, words):
    with pytest.raises((ValueError, TypeError)) as refused:
        ane.convert(captured(torch.relu, [V], "trace"), inputs=inputs, skip_model_load=True)
    assert not isinstance(refused.value, NotConverted)


def test_a_pass_that_fails_is_named_with_the_op_it_was_at(monkeypatch):
    def fail(op: Any) -> None:
        raise KeyError("gone")

    def apply(self: Any, program: Any) -> None:
        for op in program.functions["main"].operations:
            if op.op_type == "relu":
                fail(op)

    name = "common::const_elimination"
    monkeypatch.setattr(type(PASS_REGISTRY[name]), "apply", apply)
    with pytest.raises(NotConverted, match=r"^op 'relu' in inner \(.*py:\d+\): the pass 'common::const_elimination' "
                                           r"fails: KeyError: 'gone'; use a pass_pipeline") as refused:
        converted(captured(Outer(torch.relu).eval(), [V], "trace"), V)
    assert isinstance(refused.value.__cause__, KeyError)


def test_a_pass_that_no_conversion_can_do_without_is_not_to_be_left_out():
    class Resized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.interpolate(F.avg_pool2d(x, 2), size=x.shape[2:], mode="bilinear", align_corners=False)

    size = ct.RangeDim(4, 16, default=8)
    fault = (r"^op 'upsample_bilinear2d' .*core_upsample' fails: .*target.iOS17 or newer, fixed input sizes, or a "
             r"constant scale_factor .*, or other ops in that part")
    with pytest.raises(NotConverted, match=fault) as refused:
        ane.convert(captured(Resized().eval(), [X], "trace"), inputs=[ct.TensorType(shape=(2, 3, size, size))],
                    skip_model_load=True)
    assert "compute_precision" not in str(refused.value)


def test_a_failure_while_the_program_is_written_is_named(monkeypatch):
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter

    def fail(self: Any, op: Any, *more: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(MILProtoExporter, "translate_generic_op", fail)
    with pytest.raises(NotConverted, match=r"writing the program fails: KeyError: 'gone'; ") as refused:
        converted(captured(Outer(torch.relu).eval(), [V], "trace"), V)
    assert isinstance(refused.value.__cause__, KeyError)


@pytest.mark.parametrize(("frontend", "target"), [
    ("trace", "coremltools.converters.mil.frontend.torch.converter.flatten_graph_output_values"),
    ("script", "mil_ane_passes.torch_frontend.patches.view_writes.functionalize_graph"),
    ("export", "coremltools.converters.mil.frontend.torch.converter.TorchConverter._construct_compression_info"),
])
def test_a_failure_while_the_graph_is_read_is_named(monkeypatch, frontend, target):
    def fail(*given: Any) -> None:
        raise KeyError("gone")

    model = captured(Outer(torch.relu).eval(), [V], frontend)
    monkeypatch.setattr(target, fail)
    expected = r"^reading the torch graph fails: KeyError: 'gone'; use other ops"
    with pytest.raises(NotConverted, match=expected) as refused:
        converted(model, V)
    assert isinstance(refused.value.__cause__, KeyError)


def choose_by_cond(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def loop_by_while(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda x: x.sum() < 9, lambda x: (x * 2,), (x,))[0]


@pytest.mark.parametrize(("function", "name"), [(choose_by_cond, "cond"), (loop_by_while, "while_loop")])
def test_an_op_with_regions_is_refused_with_its_line(function: Callable[..., Any], name: str) -> None:
    exported = captured(function, (V,), "export")
    with pytest.raises(NotConverted, match=rf"op '{name}' \(.*\.py:\d+\): has regions.*torch.where"):
        ane.convert(exported, minimum_deployment_target=ct.target.iOS16)


def test_an_input_named_as_an_output_is_told_how_to_name_both():
    class DoubledAndMore(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, y + 1

    traced = torch.jit.trace(DoubledAndMore().eval(), V)
    fault = r"'y'.* used both as function's input and output; give that input another name, or each output a name of"
    with pytest.raises(NotConverted, match=fault):
        ane.convert(traced, inputs=[ct.TensorType(name="y", shape=V.shape)], skip_model_load=True)
    outputs = [ct.TensorType(name="doubled"), ct.TensorType(name="more")]
    ane.convert(traced, inputs=[ct.TensorType(name="y", shape=V.shape)], outputs=outputs, skip_model_load=True)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total * 2


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_state_of_float32_gets_the_dtype_to_declare(frontend):
    program = captured(Counter().eval(), [torch.zeros(4)], frontend)
    wrong, right = ([ct.StateType(ct.TensorType(shape=(4,), dtype=dtype), name="total")]
                    for dtype in (np.float32, np.float16))
    inputs = None if frontend == "export" else [ct.TensorType(name="x", shape=(4,))]
    with pytest.raises(NotConverted) as refused:
        ane.convert(program, inputs=inputs, states=wrong, minimum_deployment_target=ct.target.iOS18,
                    skip_model_load=True)
    text = str(refused.value)
    assert text.endswith("Got input var total with dtype fp32.; declare the state with dtype=np.float16: "
                         "ct.StateType(ct.TensorType(shape=(4,), dtype=np.float16), name='total')"), text
    ane.convert(program, inputs=inputs, states=right, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)


@pytest.mark.parametrize(("config", "expected"), [
    (ct.ClassifierConfig([f"c{index}" for index in range(9)]),
     r"^writing the program fails: ValueError: In op 'classify', .*; classifier_config has 9 class labels, and the "
     r"output 'scores' that they are for has 10 elements: pass one label for each element, or the name of another "
     r"output as predicted_probabilities_output$"),
    (ct.ClassifierConfig(["a", "b"], predicted_probabilities_output="none"),
     r"^writing the program fails: ValueError: 'predicted_probabilities_output', 'none', .*does not exist[^;]*$"),
    (ct.ClassifierConfig("/no/labels.txt"),
     r"^writing the program fails: ValueError: Path to class labels \(/no/labels.txt\) does not exist.$")])
def test_a_fault_of_the_classifier_is_not_one_of_an_op(config, expected):
    net = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.Softmax(-1)).eval()
    with pytest.raises(NotConverted, match=expected):
        ane.convert(captured(net, [torch.ones(1, 4)], "trace"), inputs=[ct.TensorType(name="x", shape=(1, 4))],
                    outputs=[ct.TensorType(name="scores")], classifier_config=config, skip_model_load=True)


@pytest.mark.parametrize(("target", "expected"), [
    (None, "; use another form of that op, or a newer minimum_deployment_target"),
    (ct.target.iOS18, "; use another form of that op, or a newer minimum_deployment_target"),
    (max(ct.target), "; use another form of that op")])
def test_no_newer_target_than_the_newest_is_advised(monkeypatch, target, expected):
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter

    def fail(self: Any, op: Any, *more: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(MILProtoExporter, "translate_generic_op", fail)
    with pytest.raises(NotConverted) as refused:
        converted(captured(Outer(torch.relu).eval(), [V], "trace"), V, minimum_deployment_target=target)
    assert str(refused.value).startswith("op '") and str(refused.value).endswith(f"KeyError: 'gone'{expected}")


def test_a_torch_pass_that_fails_does_not_advise_the_target_it_has(monkeypatch):
    def apply(self: Any, program: Any) -> None:
        raise KeyError("gone")

    name = next(name for name in ct.PassPipeline.get_pipeline("frontend_pytorch").passes if name.startswith("torch::"))
    monkeypatch.setattr(type(PASS_REGISTRY[name]), "apply", apply)
    program = captured(Outer(torch.relu).eval(), [V], "trace")
    for target, advice in ((ct.target.iOS16, "use minimum_deployment_target=coremltools.target.iOS17 or newer, fixed"),
                           (ct.target.iOS17, "use fixed")):
        with pytest.raises(NotConverted, match=rf"KeyError: 'gone'; {advice} input sizes, or a constant scale_factor "):
            converted(program, V, minimum_deployment_target=target)


def test_a_failure_of_no_op_has_no_advice_about_ops(monkeypatch):
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter

    def fail(self: Any, *more: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setattr(MILProtoExporter, "export", fail)
    with pytest.raises(NotConverted, match=r"^writing the program fails: KeyError: 'gone'$"):
        converted(captured(Outer(torch.relu).eval(), [V], "trace"), V)
