"""`ane.convert(check=True)`: the result is compared with the torch model, and the first part that differs is named."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterator
from typing import Any, Optional

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

import mil_ane_passes as ane
from mil_ane_passes.equivalence.callables import Caller
from mil_ane_passes.torch_frontend import NotEqual, conversion_check
from mil_ane_passes.torch_frontend.first_difference import GraphValue, select_first_difference
from mil_ane_passes.torch_frontend.registry import load_patches

from .checks import FRONTENDS, captured, input_types

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
ROWS = ct.RangeDim(1, 7, default=3)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Stack(torch.nn.Module):
    """`layer.1` is the only one whose relu is followed by a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleList([Block(), Block()])
        self.activation = torch.nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer[1](self.layer[0](x))
        return self.activation(x)


def stack() -> torch.nn.Module:
    torch.manual_seed(0)
    return Stack().eval()


def checked(model: Any, *example: torch.Tensor, frontend: str = "trace", **how: Any) -> Any:
    how.setdefault("inputs", None if frontend == "export" else input_types(example))
    how.setdefault("minimum_deployment_target", ct.target.iOS16)
    return ane.convert(captured(model, example, frontend), check=True, skip_model_load=True, **how)


@pytest.fixture
def lowered() -> Iterator[Any]:
    """Registers a lowering of the test's own: `lowered("relu", function of the input)`."""
    load_patches()  # a patch that is first loaded later would keep the test's lowering as the one it replaces
    table = _TORCH_OPS_REGISTRY.name_to_func_mapping
    kept = dict(table)

    def register(kind: str, function: Any) -> None:
        def lowering(context: Any, node: Any) -> None:
            made = function(context[node.inputs[0]])
            context.add(mb.identity(x=made, name=node.name))

        table[kind] = lowering

    yield register
    table.clear()
    table.update(kept)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_right_model_is_returned(frontend):
    assert isinstance(checked(stack(), X, frontend=frontend), ct.models.MLModel)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
def test_the_first_module_that_differs_is_named(lowered, frontend, precision):
    lowered("tanh", lambda x: mb.add(x=mb.tanh(x=x), y=0.001))
    with pytest.raises(NotEqual) as raised:
        checked(stack(), X, frontend=frontend, compute_precision=precision)
    said = str(raised.value)
    assert said.startswith("activation (Tanh): op 'aten") and "tanh" in said and "(differs by 0.001" in said
    assert ("activation.py:" if frontend == "script" else "test_checking.py:") in said
    assert "; at seed 0" in said and said.endswith("[3, 4])")
    assert raised.value.module == "activation" and isinstance(raised.value.mlmodel, ct.models.MLModel)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_of_modules_of_one_class_the_right_one_is_named(lowered, frontend):
    class Second(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer[1](torch.sigmoid(self.layer[0](x)) - 1)

    lowered("relu", lambda x: mb.select(cond=mb.less(x=x, y=-0.5), a=mb.sub(x=0.0, y=x), b=mb.relu(x=x)))
    torch.manual_seed(0)
    model = Second().eval()
    with torch.no_grad():  # the first is never below -0.5, the second always
        model.layer[0].linear.weight.fill_(0)
        model.layer[1].linear.bias.fill_(-9)
    with pytest.raises(NotEqual) as raised:
        checked(model, X, frontend=frontend)
    assert str(raised.value).startswith("layer.1 (Block): op 'aten") and "test_checking.py:" in str(raised.value)


def test_a_fault_at_an_end_of_the_range_is_found(lowered):
    def shifted(x: Any) -> Any:
        size = mb.slice_by_index(x=mb.shape(x=x), begin=[0], end=[1], squeeze_mask=[True])
        return mb.add(x=mb.tanh(x=x), y=mb.cast(x=mb.floor_div(x=size, y=7), dtype="fp32"))

    lowered("tanh", shifted)
    with pytest.raises(NotEqual, match=r"^activation \(Tanh\): op 'aten::tanh'.* largest shapes \(x0 \[7, 4\]\)"):
        checked(stack(), X, inputs=[ct.TensorType(name="x0", shape=(ROWS, 4))])


def test_a_fault_at_an_enumerated_size_is_found(lowered):
    def shifted(x: Any) -> Any:
        size = mb.slice_by_index(x=mb.shape(x=x), begin=[0], end=[1], squeeze_mask=[True])
        return mb.add(x=mb.tanh(x=x), y=mb.cast(x=mb.equal(x=size, y=5), dtype="fp32"))

    lowered("tanh", shifted)
    shapes = ct.EnumeratedShapes([(3, 4), (5, 4), (6, 4)], default=(3, 4))
    with pytest.raises(NotEqual, match=r"enumerated 1 shapes \(x0 \[5, 4\]\)"):
        checked(stack(), X, inputs=[ct.TensorType(name="x0", shape=shapes)])


def test_a_program_that_cannot_run_at_a_size_is_not_equal(lowered):
    lowered("tanh", lambda x: mb.reshape(x=mb.tanh(x=x), shape=[3, 4]))
    with pytest.raises(NotEqual, match=r"^the program: cannot be run: .*; at .*\(x0 \[1, 4\]\)"):
        checked(stack(), X, inputs=[ct.TensorType(name="x0", shape=(ROWS, 4))])


def test_a_size_that_the_torch_model_does_not_take_is_left_out(caplog):
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 2, 4) + 1

    example = X[:2].clone()
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        checked(halves, example, inputs=[ct.TensorType(name="x0", shape=(ct.RangeDim(1, 8, default=2), 4))])
    assert [record.message for record in caplog.records if "(x0 [1, 4]), which the torch model rejects: the "
            "callable" in record.message]


class Breaks(AbstractGraphPass):
    """A pass that is wrong."""

    def apply(self, prog: Any) -> None:
        main = prog.functions["main"]
        op = next(op for op in main.operations if op.op_type == "tanh")
        with main, mb.set_before_op(op):
            other = mb.sinh(x=op.x)
        main.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=other)


def test_a_fault_of_a_pass_is_not_laid_to_the_frontend():
    register_pass(namespace="tests", name="breaks", override=True)(Breaks)
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::breaks")
    try:
        with pytest.raises(NotEqual, match=r"^the result of the torch frontend is correct, but a later pass is not: "
                                           r"") as raised:
            checked(stack(), 3 * X, pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::breaks")
    assert raised.value.module == ""


class Counts(torch.nn.Module):
    """Writes into its input and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu_()
        self.calls.add_(1)
        return x + 1


@pytest.mark.parametrize("wrong", [False, True])
def test_the_model_is_left_as_it_was(lowered, wrong):
    model = captured(Counts().eval(), [X], "trace")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    arguments = {"inputs": input_types([X]), "minimum_deployment_target": ct.target.iOS18, "check": True,
                 "states": [ct.StateType(wrapped_type=ct.TensorType(shape=(1,)), name="calls")],
                 "skip_model_load": True}
    if wrong:
        lowered("relu", lambda x: mb.add(x=mb.relu(x=x), y=0.5))
        with pytest.raises(NotEqual, match="op 'aten::relu_'"):
            ane.convert(model, **arguments)
    else:
        ane.convert(model, **arguments)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_what_is_left_in_a_state_counts(frontend):
    class Cache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.mul_(0.5)
            self.cache.add_(x)
            return self.cache * 2

    states = [ct.StateType(wrapped_type=ct.TensorType(shape=(3, 4)), name="cache")]
    checked(Cache().eval(), X, frontend=frontend, states=states, minimum_deployment_target=ct.target.iOS18)


class Cached(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 8, 4))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.rows[:, place:place + 3] = x
        return self.rows * 2


@pytest.mark.parametrize("wrong", [False, True])
def test_a_state_in_a_part_of_the_module(wrong, lowered):
    """Core ML accepts no '0.rows', the name of the buffer, and three rows begin in 0 to 5."""
    class Model(torch.nn.Sequential):
        def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
            return self[0](torch.relu(x), place) + 1

    model = Model(Cached()).eval()
    example = torch.randn(1, 3, 4), torch.tensor([2], dtype=torch.int32)
    how = {"states": [ct.StateType(wrapped_type=ct.TensorType(shape=(1, 8, 4)), name="0.rows")],
           "minimum_deployment_target": ct.target.iOS18}
    mlmodel = checked(model, *example, **how)
    assert ane.verify(Model(Cached()).eval(), mlmodel).equal
    if wrong:
        lowered("relu", lambda x: mb.add(x=mb.relu(x=x), y=0.5))
        with pytest.raises(NotEqual, match="aten::relu"):
            checked(model, *example, **how)


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_a_buffer_of_integers_holds_integers(kind, shape):
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(shape, dtype=kind))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.count.to(x.dtype)
            self.count.copy_((before + 1).to(kind))
            return x + before

    model = checked(Counter().eval(), X, frontend="export", minimum_deployment_target=ct.target.iOS18)
    if shape:  # coremltools does not read states of rank 0 from a model
        assert ane.verify(Counter().eval(), model).equal


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("wrong", [False, True])
def test_bools_are_given_as_bools_and_both_are_drawn(frontend, wrong, lowered):
    def hide(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.masked_fill(hidden, -2.5) + 3)

    example = X, torch.zeros(3, 1, dtype=torch.bool)
    if wrong:  # differs where the mask does not hide alone
        lowered("relu", lambda x: mb.select(cond=mb.greater(x=x, y=0.6), a=mb.add(x=x, y=1.0), b=mb.relu(x=x)))
        with pytest.raises(NotEqual, match="relu"):
            checked(hide, *example, frontend=frontend)
    else:
        model = checked(hide, *example, frontend=frontend)
        assert ane.verify(captured(hide, example, frontend), model).equal


def test_drawn_masks_hide_no_row_entirely():
    def attend(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(hidden, float("-inf")).softmax(-1)

    checked(attend, torch.randn(64, 2), torch.zeros(64, 2, dtype=torch.bool), frontend="export")


@pytest.mark.parametrize("channel_first", [True, False])
def test_an_image_is_scaled_before_the_torch_model_sees_it(channel_first):
    image = torch.rand((1, 3, 4, 6) if channel_first else (1, 4, 6, 3))
    checked(torch.tanh, image, inputs=[ct.ImageType(
        name="image", shape=image.shape, scale=1 / 127.0, bias=[-1, -0.5, 0.25], channel_first=channel_first)])


def test_several_inputs_and_outputs_go_by_place():
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x - y, (x * 2).sum(0)

    checked(several, X, X + 1, inputs=[ct.TensorType(name="y", shape=(3, 4)), ct.TensorType(name="x", shape=(3, 4))],
            outputs=[ct.TensorType(name="b"), ct.TensorType(name="a")])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_an_op_of_several_results_may_return_the_last_alone(frontend):
    checked(lambda x: x.topk(2, -1).indices, X, frontend=frontend)


def test_inputs_in_tuples_are_packed_again():
    class Pairs(torch.nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return x - pair[0] * pair[1]

    traced = torch.jit.trace(Pairs().eval(), (X, (X + 1, X + 2)), check_trace=False)
    one, *two = input_types([X, X, X])
    ane.convert(traced, inputs=[one, tuple(two)], minimum_deployment_target=ct.target.iOS16, check=True)


class Defaults(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        y = torch.tanh(x) * scale
        return y if mask is None else y * mask


def test_inputs_that_are_not_given_have_their_defaults(lowered):
    scripted = torch.jit.script(Defaults().eval())
    ane.convert(scripted, inputs=input_types([X]), minimum_deployment_target=ct.target.iOS16, check=True)
    lowered("tanh", lambda x: mb.add(x=mb.tanh(x=x), y=0.1))
    with pytest.raises(NotEqual, match="op 'aten::tanh'"):
        ane.convert(scripted, inputs=input_types([X]), minimum_deployment_target=ct.target.iOS16, check=True)


def test_keywords_of_an_export_are_given_by_name():
    class Keyword(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
            return x - y

    exported = torch.export.export(Keyword().eval(), (X,), {"y": X + 1}).run_decompositions({})
    ane.convert(exported, minimum_deployment_target=ct.target.iOS16, check=True)


def test_a_model_in_half_precision_may_be_off_by_that():
    torch.manual_seed(0)
    checked(torch.nn.Linear(4, 4).half().eval(), X.half())


def test_ids_are_drawn_within_their_table():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(3, 4).eval()
    checked(embedding, torch.tensor([[0, 1, 2]]))


def test_masks_whose_sum_is_an_index_are_drawn_within_it():
    """The last of the tokens, as in models that embed texts."""
    class Pooled(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x[torch.arange(x.shape[0]), mask.sum(1) - 1]

    torch.manual_seed(0)
    assert checked(Pooled().eval(), torch.randn(2, 16, 4), torch.ones(2, 16, dtype=torch.int32))


@pytest.mark.parametrize(("name", "others", "message"), [
    ("imag", [], "feed 'imag': no such input; did you mean 'image'? (inputs: image)"),
    ("mask", ["image"], "feed 'mask': no such input (inputs: image)")])
@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_feeds_of_an_unknown_name_are_rejected_as_in_run(frontend, name, others, message):
    class Doubled(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image * 2

    example = torch.ones(1, 4)
    inputs = None if frontend == "export" else [ct.TensorType(name="image", shape=(1, 4))]
    with pytest.raises(ane.InputError) as refused:
        checked(Doubled(), example, frontend=frontend, inputs=inputs, feeds=dict.fromkeys([name, *others], example))
    assert str(refused.value) == message


def test_feeds_are_asked_for_where_no_draw_is_valid():
    def select(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x[(places.float().exp() + 20).long()]

    example = torch.randn(32, 3), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ane.InputError, match="found indices .*; none of the sampled inputs .* feeds=, .* ranges="):
        checked(lambda x, places: select(x[:21], places), *example[:1], example[1] - 40)
    assert checked(select, *example, ranges={"x1": (0, 2)})


def test_a_classifier_is_compared_before_its_label_is_made(lowered):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh()).eval()
    config = ct.ClassifierConfig(["cat", "dog"])
    checked(model, X[:1], classifier_config=config)
    lowered("tanh", lambda x: mb.add(x=mb.tanh(x=x), y=0.1))
    with pytest.raises(NotEqual, match=r"^1 \(Tanh\): op 'aten::tanh'"):
        checked(model, X[:1], classifier_config=config)


def test_what_cannot_be_checked_is_refused_before_it_is_converted(monkeypatch):
    traced = captured(stack(), [X], "trace")
    monkeypatch.setattr(ct, "convert", lambda *arguments, **named: pytest.fail("was converted"))
    with pytest.raises(ane.InputError, match="needs a torch model"):
        ane.convert(object(), check=True)
    for how in ({"convert_to": "milinternal"}, {"convert_to": "neuralnetwork"},
                {"minimum_deployment_target": ct.target.iOS14}):
        with pytest.raises(ane.InputError, match="expected convert_to='mlprogram'"):
            ane.convert(traced, check=True, **how)


def test_a_model_in_training_mode_is_refused_before_it_is_converted(monkeypatch):
    monkeypatch.setattr(conversion_check, "convert_and_check", lambda *_: pytest.fail("converted"))
    with pytest.raises(ane.InputError, match="is in training mode"):
        ane.convert(captured(torch.nn.Sequential(torch.nn.Dropout()).train(), [X], "script"), check=True,
                    inputs=input_types([X]), skip_model_load=True)


@pytest.mark.parametrize(("training", "x"), [
    (torch.nn.Dropout(), X), (torch.nn.BatchNorm1d(4), X),
    (torch.nn.InstanceNorm1d(4, track_running_stats=True), torch.randn(2, 4, 8)),
], ids=["dropout", "batch norm", "instance norm"])
def test_a_trace_made_in_training_mode_is_refused(training, x):
    traced = torch.jit.trace(torch.nn.Sequential(training).train(), x, check_trace=False).eval()
    with pytest.raises(ane.InputError, match="was made in training mode.*trace the module again after its eval"):
        ane.convert(traced, check=True, inputs=input_types([x]), skip_model_load=True)


def add_noise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, torch.tanh(x) + torch.rand_like(x)


def add_normal(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(3, 4)


@pytest.mark.parametrize(("function", "frontend", "op"), [
    (add_noise, "trace", "rand_like"), (add_noise, "script", "rand_like"), (add_noise, "export", "rand_like"),
    (add_normal, "trace", "randn"), (add_normal, "export", "randn")])
def test_a_torch_model_that_is_random_is_told_apart(function, frontend, op):
    fault = (rf"^check: the torch model is random: with the same inputs and states, '\w+' differs from run to run, "
             rf"first at op 'aten(::|\.){op}.*' \(.*\.py:\d+\), so that it cannot be compared; call eval\(\) "
             r"before the model is captured, or make the noise an input of the model$")
    with pytest.raises(ane.InputError, match=fault):
        checked(function, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "script"])
def test_code_that_passes_training_mode_itself_is_told_so(frontend):
    def drop(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True) * 2

    with pytest.raises(ane.InputError, match="'aten::dropout' .*; where its code passes training=True, pass self.tr"):
        checked(drop, X, frontend=frontend)


def test_noise_below_the_tolerance_is_compared(lowered):
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + torch.rand_like(x) * 1e-6

    checked(noisy, X)
    lowered("tanh", lambda x: mb.add(x=mb.tanh(x=x), y=0.1))
    with pytest.raises(NotEqual, match="^op 'aten::tanh'"):
        checked(noisy, X)


def test_the_mode_of_a_trace_that_no_op_reads_does_not_count():
    """A wrapper is in training mode until its eval() is called."""
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.inner(x), -1)

    traced = torch.jit.trace(Wrapper(), X)
    assert traced.training
    mlmodel = ane.convert(traced, check=True, inputs=input_types([X]), skip_model_load=True)
    assert ane.verify(traced, mlmodel).equal


@pytest.mark.parametrize(("freeze", "dtype"), [(torch.jit.freeze, torch.float32), (torch.jit.freeze, torch.float16),
                                               (torch.jit.optimize_for_inference, torch.float32)])
def test_frozen_traces_are_checked(freeze, dtype, lowered):
    """They have no mode, and their weights are constants."""
    frozen = freeze(captured(stack().to(dtype), [X.to(dtype)], "trace"))
    inputs = [ct.TensorType(name="x", shape=X.shape, dtype=np.float32 if dtype == torch.float32 else np.float16)]
    arguments = {"check": True, "inputs": inputs, "skip_model_load": True, "minimum_deployment_target": ct.target.iOS16}
    assert ane.verify(frozen, ane.convert(frozen, **arguments)).equal
    lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=1.1))
    with pytest.raises(NotEqual):
        ane.convert(frozen, **arguments)


def test_values_are_compared_as_they_were_before_later_writes(lowered):
    def written(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        z = y * 2
        y.relu_()
        return y + z

    lowered("relu", lambda x: mb.add(x=mb.relu(x=x), y=0.5))
    with pytest.raises(NotEqual, match=r"^op 'aten::relu_'"):
        checked(written, X)


def test_a_value_that_is_only_broadcast_early_is_not_blamed():
    def part(name: str, value: float, *readers: str) -> GraphValue:
        return GraphValue(name, "aten::mul", "", "", "", readers, np.full((), value))

    parts = [part("scale", 2.0), part("x", 3.0), part("y", 4.0)]
    early = {"scale": np.full(3, 2.0), "x": np.full(3, 3.0), "y": np.full(3, 5.0)}
    assert first_of(parts, early) == "y"
    assert first_of(parts, {**early, "y": np.full(3, 4.0)}) == "scale", "nothing but the shapes is wrong"
    assert first_of(parts, {"z": np.zeros(1)}) is None


def test_a_value_whose_readers_all_agree_is_not_blamed():
    parts = [
        GraphValue("a", "aten::mul", "", "", "", ("b",), np.ones(1)),
        GraphValue("b", "aten::add", "", "", "", (), np.ones(1)),
    ]
    assert first_of(parts, {"a": np.zeros(1), "b": np.ones(1)}) is None
    assert first_of(parts, {"a": np.zeros(1), "b": np.zeros(1)}) == "a"
    assert first_of(parts, {"a": np.zeros(1)}) == "a"


def first_of(parts: list[GraphValue], mine: dict[str, Any]) -> str | None:
    found = select_first_difference(parts, mine)
    return None if found is None else found.name


class Oscillator(torch.nn.Module):
    """Sounds only where the frequency is above 50: no sampled number is."""

    def forward(self, level: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
        phase = torch.cumsum(torch.where(frequency > 50, frequency, 0.0), 1) * 3.0
        return torch.tanh(level) * 0.01 + torch.sin(phase)


VOICED = {"frequency": np.full((1, 16), 100.3, np.float32), "level": np.zeros((1, 16), np.float32)}


def oscillator(**how: Any) -> Any:
    example = torch.zeros(1, 16), torch.full((1, 16), 100.3)
    inputs = [ct.TensorType(name=name, shape=(1, 16)) for name in ("level", "frequency")]
    return ane.convert(captured(Oscillator().eval(), example, "trace"), check=True, skip_model_load=True, inputs=inputs,
                       minimum_deployment_target=ct.target.iOS16, **how)


def test_what_sampled_inputs_do_not_reach_is_said(caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        oscillator()
    assert "ANE317 not decided at" in caplog.text and "pass feeds= or ranges=" in caplog.text


class Coefficient(torch.nn.Module):
    """The scaling of a consistency scheduler at a step: t / sqrt(t^2 + 0.25)."""

    def forward(self, x, t):
        steps = t * 10.0
        return x * (steps / (steps ** 2 + 0.25) ** 0.5)


@pytest.mark.parametrize(("given", "says"), [
    ({"feeds": {"x": np.ones((1, 4), np.float32), "t": np.array([499.0], np.float32)}}, "differs by 100%"),
    ({"ranges": {"t": (400.0, 999.0)}}, "differs by 100%"), ({"ranges": {"t": (0.0, 20.0)}}, ""), ({}, ""),
], ids=["feeds", "ranges", "within", "seeded"])
def test_overflows_of_fp16_that_change_results_are_named(given, says, caplog):
    inputs = torch.randn(1, 4), torch.tensor([1.0])
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        ane.convert(torch.jit.trace(Coefficient().eval(), inputs), check=True, skip_model_load=True, **given, inputs=[
            ct.TensorType("x", (1, 4)), ct.TensorType("t", (1,))], minimum_deployment_target=ct.target.iOS17)
    found = [record.message for record in caplog.records if "in fp16 a result" in record.message]
    assert len(found) == bool(says)
    assert not says or says in found[0] and re.search(r"\((pow|square)\) reaches \d.*e\+07, above 65504", found[0])


@pytest.mark.parametrize("how", [
    {"feeds": VOICED}, {"feeds": [VOICED, VOICED]}, {"ranges": {"frequency": (50, 100.3)}},
], ids=["feeds", "several", "ranges"])
def test_feeds_and_ranges_of_the_user_reach_it(how, caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        try:
            oscillator(**how)
        except NotEqual as error:
            assert "a later pass is not" in str(error) and "ANE317 at op" in str(error)
    assert "ANE317 at op" in caplog.text and "not decided" not in caplog.text


def test_a_result_that_is_wrong_on_the_feeds_alone_is_found(lowered):
    lowered("where", lambda condition: mb.cast(x=condition, dtype="fp32"))
    assert oscillator(compute_precision=ct.precision.FLOAT32)
    with pytest.raises(NotEqual, match=r"op 'aten::where'.* differs: .*; at given feeds"):
        oscillator(compute_precision=ct.precision.FLOAT32, feeds=VOICED)


@pytest.mark.parametrize(("kind", "function", "lowering", "at"), [
    ("relu", torch.relu, lambda x: mb.clip(x=x, alpha=0.0, beta=6.0), "large numbers"),
    ("sign", torch.sign, lambda x: mb.sub(x=mb.mul(x=mb.cast(x=mb.greater_equal(x=x, y=0.0), dtype="fp32"), y=2.0),
                                          y=1.0), "ties"),
    ("logical_not", lambda x: torch.logical_not(x).float(), lambda x: mb.less(x=x, y=-1e9), "ties"),
])
def test_a_lowering_that_is_wrong_for_rare_numbers_is_found(lowered, kind, function, lowering, at):
    def model(x):
        return function(x) * 2

    example = torch.randn(8, 16)
    assert checked(model, example, compute_precision=ct.precision.FLOAT32)
    lowered(kind, lowering)
    with pytest.raises(NotEqual, match=f"op 'aten::{kind}'.* differs: .*; at {at}"):
        checked(model, example, compute_precision=ct.precision.FLOAT32)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_wrong_bools_are_not_equal(lowered, frontend):
    lowered("logical_not", lambda x: mb.less(x=x, y=-1e9))
    with pytest.raises(NotEqual, match="op .aten.*logical_not.* differs: "):
        checked(torch.logical_not, torch.randn(8, 16).round(), frontend=frontend,
                compute_precision=ct.precision.FLOAT32)


class Waves(torch.nn.Module):
    """Signs as 2 and 3 of waves so short that moving the pitch by its rounding moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pitch", torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.abs(torch.where(torch.sin(x * self.pitch * 1e9) > 0, 3.0, 2.0)).to(torch.uint8)


def test_small_integers_do_not_wrap_in_what_rounding_explains(lowered):
    """Rounding moves the numbers by 1, of which a difference of uint8 may be 255, and the lowering by 100."""
    lowered("abs", lambda x: mb.add(x=x, y=100.0))
    with pytest.raises(NotEqual) as error:
        checked(Waves().eval(), torch.randn(8, 16), compute_precision=ct.precision.FLOAT32)
    assert "rounding decides it" not in str(error.value)


@pytest.mark.parametrize("size", [7, 16])
def test_rows_whose_keys_are_all_hidden_are_not_drawn(size):
    """Scores near -1e4 have three digits left: any other order of sums before them is a difference."""
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.norm(x + torch.nn.functional.gelu(self.q(x)))
            scores = self.q(x) @ x.transpose(1, 2) / 32 ** 0.5 + (1 - mask[:, None]) * -1e4
            return scores.softmax(-1) @ x

    for seed in range(3):
        torch.manual_seed(seed)
        assert checked(Attention().eval(), torch.randn(1, size, 32), torch.ones(1, size),
                       compute_precision=ct.precision.FLOAT32)


@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
@pytest.mark.parametrize("hide", [
    lambda scores, mask: scores.masked_fill(~mask.bool()[:, None], float("-inf")),
    lambda scores, mask: scores + (1 - mask[:, None].float()) * torch.finfo(torch.float32).min])
def test_queries_whose_keys_are_all_hidden_are_not_compared(hide, precision):
    """torch's result of such a query is NaN; the third of three sizes is tried with one."""
    rows = ct.RangeDim(1, 24, default=7)
    assert checked(lambda x, mask: hide(x @ x.transpose(1, 2), mask).softmax(-1) @ x,
                   torch.randn(1, 7, 16), torch.ones(1, 7, dtype=torch.int32), compute_precision=precision,
                   inputs=[ct.TensorType("x", (1, rows, 16)), ct.TensorType("mask", (1, rows), dtype=np.int32)])


_LOWEST = torch.finfo(torch.float32).min
FILLS = {
    "fill": lambda mask: (lambda hidden: hidden.masked_fill(hidden.bool(), _LOWEST))(1.0 - mask[:, None, None].float()),
    "where": lambda mask: torch.where(mask[:, None, None] > 0, 0.0, _LOWEST),
}


@pytest.mark.parametrize("ranges", [None, {"x1": (0, 1)}], ids=["seeded", "ranges"])
@pytest.mark.parametrize("form", FILLS)
def test_masks_of_the_lowest_number_are_compared_as_masks_of_fp16(form, ranges, caplog):
    """A query whose keys are all hidden has equal weights in torch, and the weights of its scores in fp16."""
    def attend(x, mask):
        q = torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], FILLS[form](mask))
        return torch.tanh(x + q[:, 0])

    example = torch.randn(1, 9, 8), torch.ones(1, 9, dtype=torch.int32)
    how = {"ranges": ranges, "minimum_deployment_target": ct.target.iOS18}
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        assert checked(attend, *example, **how)
    assert ("masks that fp16 can hold in place of larger ones" in caplog.text) or ranges is None
    register_pass(namespace="tests", name="breaks", override=True)(Breaks)
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::breaks")
    try:
        with pytest.raises(NotEqual, match="a later pass is not"):
            checked(attend, *example, pass_pipeline=given, **how)
    finally:
        PASS_REGISTRY.passes.pop("tests::breaks")


def test_what_the_model_rejects_of_rare_numbers_is_not_reported(caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        assert checked(lambda x, places: x[places.long()], torch.randn(8, 3), torch.arange(8, dtype=torch.int32))
    assert "not checked" not in caplog.text


def test_negative_integers_are_drawn(lowered):
    lowered("abs", lambda x: mb.identity(x=x))
    with pytest.raises(NotEqual, match="op 'aten::abs'.* differs: .*; at large numbers"):
        checked(lambda x: torch.abs(x) + 1, torch.arange(8, dtype=torch.int32), compute_precision=ct.precision.FLOAT32)


def test_few_wrong_integers_are_not_excused_by_rounding(lowered):
    """No number moves in a model of integers, so that each run gives the wrong ones again."""
    lowered("abs", lambda x: mb.mul(x=x, y=2))
    with pytest.raises(NotEqual, match="op 'aten::abs'.* differs: .*; at seed 0"):
        checked(lambda x: torch.abs(x) + 1, torch.arange(8, dtype=torch.int32), compute_precision=ct.precision.FLOAT32)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("model", [
    lambda s, x: torch.searchsorted(s, x, right=True), lambda s, x: torch.bucketize(x, s),
    lambda s, x: torch.searchsorted(torch.cumsum(s, 0), x), lambda s, x: torch.bucketize(x, s.cumsum(0), right=True),
    lambda s, x: torch.sort(s)[1] + torch.argsort(x)])
def test_what_torch_leaves_undefined_is_not_compared(model, frontend):
    """Places in a sequence that is not sorted, and the order of equal elements."""
    s = torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert checked(model, s, s.round() + 0.5, frontend=frontend, compute_precision=ct.precision.FLOAT32,
                   minimum_deployment_target=ct.target.iOS17)


def test_feeds_that_do_not_fit_are_refused():
    with pytest.raises(ane.InputError, match="frequency"):
        oscillator(feeds={"level": VOICED["level"]})
    with pytest.raises(ane.InputError, match="no input 'frequenzy'.*frequency"):
        oscillator(ranges={"frequenzy": (0, 1)})
    with pytest.raises(ane.InputError, match="check=True"):
        ane.convert(captured(stack(), [X], "trace"), feeds=VOICED, inputs=input_types([X]))


def test_outputs_that_are_never_finite_are_named(caplog):
    class Undefined(torch.nn.Module):
        def forward(self, x):
            return torch.log(-1 - x.abs()), x.relu()

    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        checked(Undefined().eval(), X)
    (said,) = [record.message for record in caplog.records if "nothing of" in record.message]
    assert "returns NaN or infinity for every element in every run; pass feeds=" in said


def test_sizes_that_guards_of_an_export_exclude_are_left_out(caplog):
    class Model(torch.nn.Module):
        def forward(self, x):
            x = torch.nn.functional.pad(x, (0, 0, 0, (4 - x.shape[1] % 4) % 4))
            return x.unflatten(1, (-1, 4)).mean(2)

    exported = torch.export.export(Model().eval(), (torch.randn(1, 6, 8),),
                                   dynamic_shapes=({1: torch.export.Dim.AUTO},))
    with caplog.at_level("WARNING", logger="mil_ane_passes"):
        mlmodel = ane.convert(exported, minimum_deployment_target=ct.target.iOS16, check=True)
    assert "which the torch model rejects" in caplog.text and "Guard failed" in caplog.text
    found = ane.verify(exported, mlmodel)
    assert found.equal and any("its sizes are rejected" in note for note in found.notes)


def test_the_sizes_of_an_export_are_among_those_checked():
    """Guards exclude all sizes that the ends of the ranges and the default give."""
    class Model(torch.nn.Module):
        def forward(self, x):
            x = torch.nn.functional.pad(x, (0, (4 - x.shape[2] % 4) % 4, 0, (4 - x.shape[1] % 4) % 4))
            return x.view(x.shape[0], x.shape[1] // 4, 4, x.shape[2]).mean(2)

    exported = torch.export.export(Model().eval(), (torch.randn(1, 14, 20),),
                                   dynamic_shapes=({1: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO},))
    mlmodel = ane.convert(exported, minimum_deployment_target=ct.target.iOS16, check=True)
    found = ane.verify(exported, mlmodel)
    assert found.equal and [case.feeds for case in found.cases][-1] == "seed 0, the export's shapes"


class Peaks(torch.nn.Module):
    """Places of the largest of many equal numbers: torch does not define which of them it chooses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x.relu(), 15, dim=-1).indices


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_equal_elements_that_topk_chooses_among_are_no_difference(frontend: str) -> None:
    x = torch.randn(1, 20)
    model = checked(Peaks().eval(), x, frontend=frontend, compute_precision=ct.precision.FLOAT32)
    assert ane.verify(model, Peaks().eval()).equal


def take_angles(x):
    spectrum = torch.stft(x, 256, hop_length=64, window=torch.hann_window(256), return_complex=True)
    return torch.angle(spectrum)


def test_noise_of_torch_is_left_out(caplog, lowered):
    """torch computes distances of many points by products, so that those of points from themselves are noise."""
    points = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        assert checked(lambda x: torch.cdist(x, x).tanh(), points, compute_precision=ct.precision.FLOAT32)
    assert "of 1600 elements of" in caplog.text and "they are decided by rounding" in caplog.text
    lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=np.float32(1.001)))
    with pytest.raises(NotEqual):
        checked(lambda x: torch.cdist(x, x).tanh(), points, compute_precision=ct.precision.FLOAT32)


class Chaotic(torch.nn.Module):
    """Steps that enlarge the rounding of their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixing", torch.softmax(torch.randn(64, 64), 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x)
        for _ in range(32):
            x = 3.9 * x * (1 - x)
            x = 0.7 * x + 0.3 * (x @ self.mixing)
        return x.tanh()


def test_differences_within_the_rounding_of_both_are_noted(caplog, lowered):
    torch.manual_seed(0)
    model, x = Chaotic().eval(), torch.randn(8, 64)
    one = np.float32(1)
    lowered("sigmoid", lambda x: mb.real_div(x=one, y=mb.add(x=mb.exp(x=mb.mul(x=x, y=-one)), y=one)))
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        assert checked(model, x, compute_precision=ct.precision.FLOAT32)
    assert "rounding to float32 changes results by up to" in caplog.text
    lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=np.float32(1.02)))
    with pytest.raises(NotEqual):
        checked(model, x, compute_precision=ct.precision.FLOAT32)


def test_a_lowering_that_rounds_more_than_torch_is_not_excused(lowered):
    lowered("tanh", lambda x: mb.sub(x=mb.add(x=mb.tanh(x=x), y=np.float32(1e4)), y=np.float32(1e4)))
    with pytest.raises(NotEqual, match="tanh"):
        checked(lambda x: torch.tanh(x) + 1, torch.randn(8, 8), compute_precision=ct.precision.FLOAT32)


def test_signs_that_rounding_decides_are_left_out(caplog):
    """Frames at the ends are symmetric, so that their imaginary parts are the rounding of sums."""
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        checked(take_angles, torch.randn(1, 2048), compute_precision=ct.precision.FLOAT32)
    assert "of 4257 elements of" in caplog.text and "they are decided by rounding" in caplog.text


@pytest.mark.parametrize("factor", [1.01, -1.0])
def test_wrong_angles_are_found_beside_those_that_rounding_decides(lowered, factor):
    with pytest.raises(NotEqual):
        lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=np.float32(factor)))
        checked(lambda x: torch.tanh(take_angles(x)), torch.randn(1, 2048), compute_precision=ct.precision.FLOAT32)


@pytest.mark.parametrize("tone", [np.sin(0.2 * np.pi * np.arange(2048)),
                                  np.sin(0.02 * np.arange(2048))], ids=["a tone", "a slow tone"])
def test_most_angles_of_a_tone_are_left_out(tone, caplog, lowered):
    feeds = {"x0": np.float32(tone)[None]}

    def take_bounded_angles(x):
        return torch.tanh(take_angles(x))

    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        checked(take_bounded_angles, torch.randn(1, 2048), compute_precision=ct.precision.FLOAT32, feeds=feeds)
    assert "of 4257 elements of" in caplog.text and "they are decided by rounding" in caplog.text
    lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=np.float32(1.01)))
    with pytest.raises(NotEqual):
        checked(take_bounded_angles, torch.randn(1, 2048), compute_precision=ct.precision.FLOAT32, feeds=feeds)


def test_results_that_rounding_decides_entirely_are_named_so():
    def mix(x):
        return take_angles(x).sum((1, 2)).sin()

    tone = {"x0": np.float32(np.sin(0.2 * np.pi * np.arange(2048)))[None]}
    with pytest.raises(NotEqual, match="in their last bits, the torch model's own .* rounding decides it"):
        checked(mix, torch.randn(1, 2048), compute_precision=ct.precision.FLOAT32, feeds=tone)


class Half(torch.nn.Module):
    """A head of fp16 in a list, so that its weights are constants of the trace, or beside weights of fp32."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.heads = [torch.nn.Conv2d(8, 4, 1, dtype=torch.float16).requires_grad_(False)]
        self.norm = torch.nn.LayerNorm(8) if beside else torch.nn.Identity()
        self.last = torch.nn.Linear(4, 4, dtype=torch.float16) if beside else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.float() if isinstance(self.norm, torch.nn.LayerNorm) else x).half()
        return self.last(self.heads[0](x.permute(0, 2, 1).unsqueeze(2)).squeeze(2).transpose(1, 2))


@pytest.mark.parametrize("beside", [False, True])
def test_a_trace_with_weights_of_fp16_that_are_no_parameters(beside):
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8).half()
    inputs = [ct.TensorType(name="x", shape=x.shape, dtype=np.float16)]
    checked(Half(beside).eval(), x, inputs=inputs, outputs=[ct.TensorType(name="y", dtype=np.float16)])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
def test_a_cast_to_fp16_rounds_in_torch_and_not_in_the_check(frontend, precision, lowered):
    def halve(x):
        return torch.relu(x).to(torch.float16)

    x = torch.randn(3, 40)
    checked(halve, x, frontend=frontend, compute_precision=precision)
    lowered("relu", lambda x: mb.mul(x=mb.relu(x=x), y=1.1))
    with pytest.raises(NotEqual):
        checked(halve, x, frontend=frontend, compute_precision=precision)


def test_rounding_does_not_excuse_numbers_that_are_exact(lowered):
    """Numbers that fp16 holds are not moved: two of 40 are integers."""
    lowered("floor", lambda x: mb.sub(x=mb.ceil(x=x), y=1.0))
    x = torch.arange(40.0).reshape(1, 40) / 32
    with pytest.raises(NotEqual, match="at given feeds"):
        checked(torch.floor, x, compute_precision=ct.precision.FLOAT32, feeds={"x0": x.numpy()})


def test_rounding_does_not_excuse_most_of_an_output(lowered):
    lowered("tanh", lambda x: mb.mul(x=mb.tanh(x=x), y=-1.0))
    with pytest.raises(NotEqual):
        checked(lambda x: torch.atan2(torch.tanh(x * 0.1 - x / 10.0), -x.abs() - 1), torch.randn(4, 50),
                compute_precision=ct.precision.FLOAT32)


class PeaksOfPeaks(torch.nn.Module):
    """A top-k of a top-k, whose indices are viewed as rows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = torch.topk(torch.sigmoid(x), 10)
        best, rows = torch.topk(values.view(1, -1), 5)
        return best, places.view(1, -1).gather(1, rows)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
def test_indices_of_topk_may_be_viewed(frontend: str) -> None:
    checked(PeaksOfPeaks().eval(), torch.randn(1, 2, 40), frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
def test_casts_of_floats_that_do_not_fit_give_the_nearest_integer(dtype, target, frontend):
    """torch does not define what such a cast gives, and sampled numbers are negative."""
    def halve(x):
        return (x[0] * 40000).to(dtype) // 2 + (x[1] * 255).to(dtype) // 2

    checked(halve, torch.rand(2, 9), frontend=frontend, minimum_deployment_target=target)


class Accumulates(torch.nn.Module):
    """Returns what it writes into its state; an exported program returns the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.h * 0.5 + x
        self.h.copy_(h)
        return h


def test_a_state_that_is_returned_is_compared() -> None:
    module, x = Accumulates().eval(), torch.randn(1, 4)
    model = checked(module, x, frontend="export", minimum_deployment_target=ct.target.iOS18)
    state: dict[str, Any] = {}
    for number in (1.0, 1.5, 1.75):
        (found,) = ane.run(model, {"x": x.numpy()}, state=state).values()
        np.testing.assert_allclose(found, x.numpy() * number, rtol=1e-2, atol=1e-3)
    exported = captured(module, (x,), "export")
    assert ane.verify(exported, model).equal and not ane.verify(captured(
        torch.nn.Sequential(module, torch.nn.Tanh()).eval(), (x,), "export"), model).equal


@pytest.mark.parametrize("precision", [ct.precision.FLOAT16, ct.precision.FLOAT32])
def test_images_of_fp16_are_scaled(precision: Any) -> None:
    image = ct.ImageType(name="image", shape=(1, 1, 8, 8), scale=1 / 255, bias=-0.3,
                         color_layout=ct.colorlayout.GRAYSCALE_FLOAT16)
    checked(lambda x: torch.nn.functional.avg_pool2d(x, 2) * 2, torch.randn(1, 1, 8, 8), inputs=[image],
            compute_precision=precision)


class Scores(torch.nn.Module):
    """Scores of 21 classes for each pixel, and what is made of them."""

    def __init__(self, finish) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.codes, self.finish = torch.nn.Conv2d(3, 21, 3), torch.nn.Embedding(21, 4), finish

    def forward(self, x):
        return self.finish(torch.tanh(self.scores(x)), self.codes)


CHOICES = {
    "classes": lambda x, codes: x.argmax(1),
    "codes of classes": lambda x, codes: codes(x.argmax(1)),
    "a mask": lambda x, codes: (x > 0).float(),
    "levels": lambda x, codes: torch.round(x * 8),
    "places": lambda x, codes: x.flatten(2).topk(20, -1).indices,
}
IMAGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_between_numbers_that_are_equal_in_fp16_are_left_out(choice, caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        model = checked(Scores(CHOICES[choice]).eval(), IMAGE)
    (said, *_) = [record.message for record in caplog.records if "decided by rounding" in record.message]
    left_out, size = map(int, re.search(r"check: (\d+) of (\d+) elements", said).groups())
    (output,) = ane.run(model, {"x0": IMAGE.numpy()}).values()
    assert size == output.size and 0 < left_out < size * (0.3 if choice == "places" else 0.05)


def test_choices_are_left_out_at_large_numbers_and_compared_at_ties(caplog):
    def choose(x):
        centered = x - x.mean(-1, keepdim=True)
        return torch.stack([x.var(-1, correction=0), centered.square().mean(-1)]).argmax(0)

    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    with caplog.at_level(logging.WARNING, "mil_ane_passes"), pytest.raises(NotEqual, match="at ties"):
        checked(choose, x, compute_precision=ct.precision.FLOAT32)
    assert any("not compared at large numbers" in record.message for record in caplog.records)


class Replaces(AbstractGraphPass):
    """A pass that puts something else in place of the tanh."""

    replace: Any = None

    def apply(self, prog: Any) -> None:
        main = prog.functions["main"]
        op = next(op for op in main.operations if op.op_type == "tanh")
        with main, mb.set_before_op(op):
            other = type(self).replace(op.x)
        main.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=other)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("replace", [
    lambda x: mb.mul(x=mb.tanh(x=x), y=np.float16(-1.0)), lambda x: mb.add(x=mb.tanh(x=x), y=np.float16(0.02)),
    lambda x: mb.sub(x=mb.tanh(x=x), y=mb.mul(x=mb.reduce_max(x=x, axes=[2], keep_dims=True), y=np.float16(0.01))),
], ids=["negated", "moved", "bent"])
def test_what_a_pass_does_wrong_is_not_excused_by_choices(choice, replace):
    if choice in ("classes", "codes of classes", "places") and "0.02" in str(replace.__code__.co_consts):
        pytest.skip("the largest one stays the largest")
    register_pass(namespace="tests", name="replaces", override=True)(type("replaces", (Replaces,), {
        "replace": staticmethod(replace)}))
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::replaces")
    try:
        with pytest.raises(NotEqual, match="a later pass is not"):
            checked(Scores(CHOICES[choice]).eval(), IMAGE, pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::replaces")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["module", "trace", "export"])
@pytest.mark.parametrize("choice", CHOICES)
def test_verify_beside_a_module_leaves_choices_out(choice, form):
    module = Scores(CHOICES[choice]).eval()
    given = module if form == "module" else captured(module, (IMAGE,), form)
    kept = [value.clone() for value in module.parameters()]
    model = ct.convert(captured(module, (IMAGE,), "trace"), inputs=input_types((IMAGE,)), skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16)
    report = ane.verify(given, model)
    counts = [map(int, re.findall(r"\d+", note)[:2]) for note in report.notes if "decided by rounding" in note]
    assert report.equal and counts
    assert all(0 < left_out < size * (0.3 if choice == "places" else 0.05) for left_out, size in counts)
    assert all(map(torch.equal, kept, module.parameters()))


class Areas(torch.nn.Module):
    """The number of pixels of the first `count` classes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.count = torch.nn.Conv2d(3, 5, 3), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        classes = self.scores(x).argmax(1, keepdim=True)
        return (classes == torch.arange(self.count).reshape(-1, 1, 1)).sum((2, 3))


@pytest.mark.parametrize("count", [1, 5])
def test_verify_takes_counts_that_rounding_moves(count):
    module = Areas(count).eval()
    model = ct.convert(captured(module, (IMAGE,), "trace"), inputs=input_types((IMAGE,)), skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16)
    notes = []
    for seed in range(8):
        x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
        report = ane.verify(module, model, feeds={"x0": x.numpy()})
        assert report.equal
        notes += report.notes
    assert any(re.match(rf"[1-5] of {count} elements .* are decided by rounding", note) for note in notes)
    with torch.no_grad():
        module.scores.bias[0] += 0.02
    assert ane.verify(module, model).status == "different"


class AreasAndNumbers(torch.nn.Module):
    """Areas of classes beside natural numbers that are exact, of which the first three are higher by `more`."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.areas, self.more = Areas(5), more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = (x[:, :1].flatten(1)[:, :40] < 1e9).sum(0) * 900
        return torch.cat([self.areas(x).flatten(), exact + self.more * (torch.arange(40) < 3)])


@pytest.mark.parametrize("more", [0, 5])
def test_integers_beside_those_that_rounding_decides_have_to_be_equal(more):
    """Torch has integers and the program floats, for which 905 is near 900."""
    model = ct.convert(captured(AreasAndNumbers(more).eval(), (IMAGE,), "trace"), inputs=input_types((IMAGE,)),
                       skip_model_load=True, minimum_deployment_target=ct.target.iOS16)
    report = ane.verify(AreasAndNumbers(0).eval(), model, feeds={"x0": IMAGE.numpy()})
    assert report.equal == (not more) and any("decided by rounding" in note for note in report.notes) == (not more)


class ReadsRows(torch.nn.Module):
    """Rows of a table, chosen by sums that have to be natural numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.parts = torch.nn.Parameter(torch.full((10,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(torch.ceil(-self.parts.sum() + 1).long() + torch.argmax(x, 1))


def test_verify_of_numbers_that_cannot_be_moved_says_different():
    module, x = ReadsRows().eval(), torch.randn(2, 8)
    model = ct.convert(captured(module, (x,), "trace"), inputs=input_types((x,)), skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16)
    assert ane.verify(module, model).equal
    with torch.no_grad():
        module.table.weight[0, 0] += 0.5
    assert ane.verify(module, model, feeds={"x0": np.eye(8, dtype=np.float32)[[0, 7]]}).status == "different"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("wrong", [torch.neg, lambda x: x - x.amax(2, keepdim=True) * 0.03], ids=["negated", "bent"])
def test_verify_does_not_excuse_wrong_programs_by_choices(choice, wrong):
    module, finish = Scores(CHOICES[choice]).eval(), CHOICES[choice]
    other = Scores(lambda x, codes: finish(wrong(x), codes)).eval()
    model = ct.convert(captured(other, (IMAGE,), "trace"), inputs=input_types((IMAGE,)), skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS16)
    assert ane.verify(module, model).status == "different"


@pytest.mark.parametrize("model", [
    lambda x: torch.sin(torch.cumsum(x.abs() * 700.7, -1)), lambda x: (1 / (x.relu() + 1e-9)) * (x < 0.3),
    lambda x: torch.floor(torch.cumsum(x.abs() * 700.7, -1)).int(),
    lambda x: torch.sin(torch.cumsum(x.abs() * 0.3331, -1)),
], ids=["a phase that grows", "a number below fp16", "integers of a sum that grows", "a phase whose end is wrong"])
def test_errors_that_grow_in_fp16_are_no_choices(model):
    with pytest.raises(NotEqual, match="a later pass is not"):
        checked(model, torch.randn(1, 500, generator=torch.Generator().manual_seed(0)))


class PatchPositions(torch.nn.Module):
    """Positions of image patches by their share of a mask, which is 0 / 0 where the mask hides all, as in SmolVLM."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shares = torch.arange(4.0) * (1.0 / mask.bool()[:, 0].sum(1))[:, None]
        return x + torch.bucketize(shares.clamp(max=0.999), torch.tensor([0.25, 0.5, 0.75]), right=True)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_choices_by_nan_are_not_compared(frontend, caplog):
    with caplog.at_level(logging.WARNING, logger="mil_ane_passes"):
        checked(PatchPositions().eval(), torch.randn(40, 4), torch.ones(40, 4, 4, dtype=torch.int32), frontend=frontend)
    assert "where the torch model chooses by a number that is NaN (aten.bucketize" in caplog.text


def test_choices_by_nan_of_the_users_feeds_are_compared():
    hidden = {"x0": np.zeros((1, 4), np.float32), "x1": np.zeros((1, 4, 4), np.int32)}
    with pytest.raises(NotEqual):
        checked(PatchPositions().eval(), torch.randn(1, 4), torch.ones(1, 4, 4, dtype=torch.int32), feeds=hidden)


def test_a_size_that_a_trace_rejects_is_named_in_one_line(caplog):
    grid = torch.arange(12.0).reshape(3, 4)
    with caplog.at_level(logging.WARNING, logger="mil_ane_passes"):
        checked(torch.nn.Sequential(torch.nn.Linear(4, 4), Added(grid)).eval(), X,
                inputs=[ct.TensorType(name="x", shape=(ROWS, 4))])
    (line,) = [record.getMessage() for record in caplog.records if "the torch model rejects" in record.getMessage()][:1]
    assert "\n" not in line and "The size of tensor a (" in line


class Added(torch.nn.Module):
    def __init__(self, grid: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("grid", grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.grid


@pytest.mark.parametrize("rounds", [True, False])
def test_rounding_to_fp16_is_named_where_it_may_explain_a_difference(rounds):
    class Turned(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turned = torch.sin(x * 2.7).cumsum(-1)
            return torch.sin(turned * 40) if rounds else torch.tanh(turned)

    register_pass(namespace="tests", name="breaks", override=True)(Breaks)
    given = ct.PassPipeline.DEFAULT
    if not rounds:
        given.append_pass("tests::breaks")
    try:
        with pytest.raises(NotEqual, match="a later pass is not: ") as raised:
            checked(Turned().eval(), torch.randn(3, 400), pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::breaks")
    assert bool(re.search(r"; rounding to fp16 may explain it: inputs and weights that move by one unit of fp16 move "
                          r"this output by up to [\d.]+; try", str(raised.value))) == rounds


class Adapted(torch.nn.Module):
    """A batch norm of one image by its own statistics, whose buffers are repeated, in a module in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, *x.shape[2:])
        return torch.nn.functional.batch_norm(
            rows, self.mean.repeat(x.shape[0]), self.variance.repeat(x.shape[0]), training=True).view(x.shape)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_batch_norm_by_the_statistics_of_an_image_is_compared(frontend):
    checked(Adapted().eval(), torch.randn(1, 4, 6, 6), frontend=frontend)


@pytest.mark.parametrize("norm", [
    lambda x, mean, variance: torch.nn.functional.batch_norm(x, mean, variance, training=True),
    lambda x, mean, variance: torch.nn.functional.instance_norm(x, mean, variance, use_input_stats=True),
], ids=["batch norm", "instance norm"])
def test_a_norm_whose_statistics_are_inputs_is_compared(norm):
    """They are not those of a module, which its eval() would use."""
    checked(norm, torch.randn(2, 4, 6, 6), torch.zeros(4), torch.ones(4))


class Buckets(torch.nn.Module):
    """Buckets of numbers, as those of distances in T5: a power of two is on the boundary of a bucket."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.log((x * 8).round().abs().clamp(1)) / math.log(16) * 8).long().float()


def test_buckets_without_a_mask_are_not_excused_by_masks(caplog):
    traced = torch.jit.trace(Buckets().eval(), torch.zeros(1, 40))
    ane.convert(traced, inputs=[ct.TensorType("x", (1, ct.RangeDim(4, 60, default=40)))], skip_model_load=True,
                minimum_deployment_target=ct.target.iOS17, check=True)
    assert "are decided by rounding" in caplog.text and "hide all keys" not in caplog.text


class MaskedAttention(torch.nn.Module):
    """Attention whose mask is the lowest float32, as in encoders of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.query, self.key = torch.nn.Embedding(60, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        for layer in (self.query, self.key):
            layer.weight.data *= 6

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        hidden = torch.where(mask[:, None, :].bool(), 0.0, torch.finfo(torch.float32).min)
        return torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) + hidden, -1) @ x


def test_sampled_masks_at_fp16_hide_no_row_entirely():
    """A query that sees no key has other weights at fp16."""
    module = MaskedAttention().eval()
    ids, mask = torch.arange(12)[None], torch.ones(1, 12, dtype=torch.int64)
    made = ane.convert(torch.jit.trace(module, (ids, mask)), skip_model_load=True, inputs=[
        ct.TensorType(name, (1, 12), dtype=np.int32) for name in ("ids", "mask")])
    assert ane.verify(module, made).equal


def test_indices_of_a_table_of_one_row_stay_zeros():
    """As the token types of RoBERTa, which look like a mask that hides all."""
    class Typed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.kinds = torch.nn.Embedding(50, 16), torch.nn.Embedding(1, 16)

        def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
            return self.words(ids) + self.kinds(kinds)

    module, example = Typed().eval(), (torch.zeros(1, 12, dtype=torch.int64),) * 2
    made = ane.convert(torch.jit.trace(module, example), skip_model_load=True, inputs=[
        ct.TensorType(name, (1, 12), dtype=np.int32) for name in ("ids", "kinds")])
    assert ane.verify(module, made).equal


class Curves(torch.nn.Module):
    """An iteration of Zero-DCE: it stays within 0 to 1 for pixels, and exceeds fp16 for most other numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.conv(x))
        for _ in range(8):
            x = x + y * (x * x - x)
        return x


def check_curves(**how: Any) -> Any:
    return checked(Curves().eval(), torch.rand(1, 3, 8, 8), minimum_deployment_target=ct.target.iOS17, **how)


def test_results_beyond_fp16_are_compared_on_numbers_from_0_to_1(caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        check_curves()
    assert [record for record in caplog.records if "fp16 cannot hold; compared on floats from 0 to 1" in record.message]


def test_a_fault_of_a_pass_is_found_on_numbers_from_0_to_1():
    register_pass(namespace="tests", name="breaks", override=True)(Breaks)
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::breaks")
    try:
        with pytest.raises(NotEqual, match="a later pass is not"):
            check_curves(pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::breaks")


class ConstantNorm(torch.nn.Module):
    """A norm of maps of one number each, as after a global pool."""

    def __init__(self, norm: torch.nn.Module, bias: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        if bias:
            torch.nn.init.constant_(norm.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.adaptive_avg_pool2d(x, 1)
        return self.norm(torch.nn.functional.interpolate(pooled, size=(8, 8)))


def repeat_last(x):
    return x[..., -1:].expand(*x.shape[:-1], 12)


def standardize(x):
    p = x[..., -1:].repeat(*[1] * (x.dim() - 1), 12)
    return (p - p.mean(-1, keepdim=True)) / (p.std(-1, keepdim=True) + 1e-5)


def crop_border(x):
    corner = torch.tensor([[[0.5, 0.0, 3.0], [0.0, 0.5, 3.0]]])
    grid = torch.nn.functional.affine_grid(corner, [1, 3, 8, 8], align_corners=False)
    return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False).flatten(2).std(-1)


CANCELLING = {
    "var": (lambda x: repeat_last(x).var(-1), (2, 3, 20)),
    "std": (lambda x: repeat_last(x).std(-1), (3, 20)),
    "std of a row": (lambda x: repeat_last(x).std(), (20,)),
    "var at rank 5": (lambda x: repeat_last(x).var(-1), (1, 2, 1, 3, 20)),
    "standardized": (standardize, (2, 3, 20)),
    "instance norm": (ConstantNorm(torch.nn.InstanceNorm2d(4)), (1, 4, 16, 16)),
    "group norm": (ConstantNorm(torch.nn.GroupNorm(4, 4)), (1, 4, 16, 16)),
    "relu of a norm": (torch.nn.Sequential(ConstantNorm(torch.nn.InstanceNorm2d(4)), torch.nn.ReLU()), (1, 4, 12, 12)),
    "std of grey": (lambda x: torch.nn.functional.adaptive_avg_pool2d(
        x.mean(1, keepdim=True).expand(-1, 3, -1, -1), 4).std(1), (1, 3, 16, 16)),
    "crop of 16": (crop_border, (1, 3, 16, 16)),
    "crop of 64": (crop_border, (1, 3, 64, 64)),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", CANCELLING)
def test_results_that_are_zero_up_to_rounding_are_compared_within_it(name, frontend, precision):
    """torch gives 0 or the rounding of numbers that cancel, and the program the other one."""
    model, shape = CANCELLING[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = checked(model, x, frontend=frontend, compute_precision=precision)
    module = model.eval() if isinstance(model, torch.nn.Module) else captured(model, (x,), "trace")
    assert ane.verify(module, made).equal


class Difference(torch.nn.Module):
    """A small difference of large numbers, as of a forecast and the last temperature, or of the sides of a box."""

    def __init__(self, form):
        super().__init__()
        self.form, self.layer = form, torch.nn.Linear(16, 8)

    def forward(self, x):
        y = self.layer(x)
        if self.form == "change":
            return (20 + x[:, -1:] + 0.2 * y) - (20 + x[:, -1:])
        if self.form == "centred":
            return (50 + 0.5 * y) - (50 + 0.5 * y).mean(-1, keepdim=True)
        return (100 + y) - (100 - y)


@pytest.mark.parametrize("factor", [0, -1, 1.5])
@pytest.mark.parametrize("form", ["change", "centred", "sides"])
def test_small_differences_of_large_numbers_are_no_zeros(form, factor):
    torch.manual_seed(3)
    module, x = Difference(form).eval().requires_grad_(False), torch.randn(2, 16)
    made = checked(module, x)
    assert ane.verify(module, made).equal
    for each in module.parameters():
        each.mul_(factor)
    assert not ane.verify(module, made).equal


def test_results_that_are_zero_up_to_rounding_are_named(caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        checked(CANCELLING["var"][0], torch.randn(2, 3, 20), compute_precision=ct.precision.FLOAT32)
    assert "6 of 6 elements of" in caplog.text and "are zero up to rounding at" in caplog.text


@pytest.mark.parametrize("feeds", [None, {"x0": np.float32(np.linspace(-2, 3, 60).reshape(3, 20))}])
def test_zeros_of_a_flexible_size_and_of_feeds_are_compared_within_rounding(feeds):
    checked(CANCELLING["std"][0], torch.randn(3, 20), compute_precision=ct.precision.FLOAT32, feeds=feeds,
            inputs=[ct.TensorType(name="x0", shape=(ROWS, 20))])


WRONG_NEAR_ZERO = {
    "a variance of ordinary numbers": (lambda x: torch.tanh(x).var(-1), lambda x: mb.mul(x=x, y=np.float32(1.005))),
    "a standard deviation of 1e-7": (lambda x: torch.tanh(repeat_last(x).std(-1)),
                                     lambda x: mb.add(x=x, y=np.float32(1e-4))),
    "a variance of 1e-14": (lambda x: torch.tanh(repeat_last(x).var(-1)), lambda x: mb.add(x=x, y=np.float32(1e-9))),
    "a quotient of noise": (lambda x: torch.tanh(standardize(x)), lambda x: mb.add(x=x, y=np.float32(0.1))),
    "more rounding than of what cancels": (
        lambda x: torch.tanh(x) - (2 * torch.sigmoid(2 * x) - 1),
        lambda x: mb.sub(x=mb.add(x=x, y=np.float32(1e4)), y=np.float32(1e4))),
}


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("name", WRONG_NEAR_ZERO)
def test_wrong_results_near_zero_are_found(lowered, name, frontend):
    function, change = WRONG_NEAR_ZERO[name]
    lowered("tanh", lambda x: change(mb.tanh(x=x)))
    with pytest.raises(NotEqual, match="tanh"):
        checked(function, torch.randn(2, 3, 20), frontend=frontend, compute_precision=ct.precision.FLOAT32)


@pytest.mark.parametrize(("norm", "bias", "wrong"), [
    (torch.nn.InstanceNorm2d(4, affine=True), 0.5, lambda x: mb.mul(x=x, y=np.float32(0))),  # without its bias
    (torch.nn.InstanceNorm2d(4), 0.0, lambda x: x),
    (torch.nn.InstanceNorm2d(4), 0.0, lambda x: mb.add(x=mb.mul(x=x, y=np.float32(0)), y=np.float32(1e-3))),
], ids=["no bias", "the maps themselves", "a small bias"])
def test_wrong_norms_of_equal_numbers_are_found(lowered, norm, bias, wrong):
    module, x = ConstantNorm(norm, bias).eval(), torch.rand(1, 4, 16, 16)
    checked(module, x, compute_precision=ct.precision.FLOAT32)
    lowered("instance_norm", wrong)
    with pytest.raises(NotEqual, match="instance_norm"):
        checked(module, x, compute_precision=ct.precision.FLOAT32)


def test_what_a_pass_does_wrong_near_zero_is_found():
    register_pass(namespace="tests", name="replaces", override=True)(type("replaces", (Replaces,), {
        "replace": staticmethod(lambda x: mb.add(x=mb.tanh(x=x), y=np.float16(0.02)))}))
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::replaces")
    try:
        with pytest.raises(NotEqual, match="a later pass is not"):
            checked(lambda x: torch.tanh(repeat_last(x).std(-1)), torch.randn(2, 3, 20), pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::replaces")


def test_an_op_whose_result_is_zero_up_to_rounding_is_not_blamed(lowered):
    """torch gives 0 and the program 4e-15 for the variance, before an op that is wrong."""
    lowered("tanh", lambda x: mb.add(x=mb.tanh(x=x), y=np.float32(0.01)))
    with pytest.raises(NotEqual, match="op 'aten::tanh'"):
        checked(lambda x: torch.tanh(repeat_last(x).var(-1) * 1e3 + x[..., 0]), torch.randn(2, 3, 20),
                compute_precision=ct.precision.FLOAT32)


class SquaredDistances(torch.nn.Module):
    """Squared distances from centres far from zero, whose products cancel: float32 keeps three digits."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.factor, self.centres = factor, torch.nn.Parameter(53 + 0.1 * torch.randn(8, 16))

    def forward(self, x):
        x = x + 53
        squares = (x ** 2).sum(-1, keepdim=True) + (self.centres ** 2).sum(-1)
        return self.factor * (squares - 2 * x @ self.centres.T)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_rounding_of_torch_at_float32_is_no_difference(frontend):
    example = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    module = SquaredDistances().eval().requires_grad_(False)
    captured_module = captured(module, (example,), frontend)
    made = checked(module, example, frontend=frontend, compute_precision=ct.precision.FLOAT32)
    given = module if frontend == "export" else captured_module
    report = ane.verify(given, made)
    assert report.equal
    assert any(re.search(r"compared with torch at float64, within \S+e-0[34] of the largest value, at .*: torch's "
                         r"float32 is off by", note) for note in report.notes)
    assert ane.verify(made, given).equal
    for factor in (0.99, 1.004, -1.0):
        assert ane.verify(SquaredDistances(factor).eval(), made).status == "different"


def test_float64_changes_neither_the_module_nor_the_default_dtype():
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.LSTM(16, 8, batch_first=True)
            self.register_buffer("kept", torch.full((8,), 0.3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept.add_(1.0)
            dtypes.append(torch.get_default_dtype())
            padded = torch.zeros(2, 5, 8)
            padded[:, 1:] = torch.sin(40 * self.layer(x)[0])
            return padded * self.kept[:2].sum()

    dtypes: list[torch.dtype] = []
    module = Recurrent().eval().requires_grad_(False)
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    x = np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32)
    found = [Caller(module, ["x"], ["y"])({"x": x}, {}, at_float64=each)["y"] for each in (False, True)]
    with torch.no_grad():
        expected = copy.deepcopy(module).double().layer(torch.from_numpy(x).double())[0]
    expected = torch.nn.functional.pad(torch.sin(40 * expected), (0, 0, 1, 0)).numpy() * np.float64(np.float32(1.3)) * 2
    assert np.max(np.abs(found[0] - expected)) > 1e-6 > 1e-12 > np.max(np.abs(found[1] - expected))
    assert set(dtypes) == {torch.float32}  # also while it runs, as all threads share it
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_outputs_that_torch_negates_later_are_compared(frontend):
    """The imaginary part of a conjugate is a view with a bit that negates it."""
    model = captured(lambda x: torch.fft.rfft(x).conj().imag, (torch.randn(2, 8),), "trace")
    made = checked(lambda x: torch.fft.rfft(x).conj().imag, torch.randn(2, 8), frontend=frontend)
    assert ane.verify(model, made).equal


def test_noise_changes_neither_the_module_nor_its_views():
    """Writes through a view reach what is read later, and buffers and weights are what they were."""
    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.full((3, 12), 0.3))
            self.scale = torch.nn.Parameter(torch.full((12,), 0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = repeat_last(x).clone()
            rows[:, 2:4] = self.kept[:, 2:4]
            self.kept.view(-1)[:2].add_(1.0)
            return (rows * self.scale)[:, 4:].std(-1) + self.kept[:, 3:].std(-1)

    module = Writes().eval()
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    caller = Caller(module, ["x"], ["y"])
    x = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    exact, noisy = (caller({"x": x}, {}, noise=noise)["y"] for noise in (None, (2.0**-24, 1)))
    assert 0 < np.max(np.abs(noisy - exact)) < 1e-6
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())


class MaskedActions(torch.nn.Module):
    """Log-probabilities of actions, of which a mask hides some by a large number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.log_softmax(self.scores(x) + (1 - mask.float()) * -1e8, 1)


def test_masks_beyond_fp16_that_are_returned_are_named():
    example = torch.randn(2, 8), torch.ones(2, 4, dtype=torch.int32)
    with pytest.raises(NotEqual, match=r"; the torch model returns numbers up to 1e\+08, beyond fp16 \(65504\): its "
                                       r"constants beyond it, such as masks, became numbers that fp16 can hold; try"):
        checked(MaskedActions().eval(), *example)
    checked(MaskedActions().eval(), *example, compute_precision=ct.precision.FLOAT32)


def test_masks_beyond_fp16_are_not_named_where_no_result_is_beyond_it():
    register_pass(namespace="tests", name="breaks", override=True)(Breaks)
    given = ct.PassPipeline.DEFAULT
    given.append_pass("tests::breaks")
    example = 3 * torch.randn(2, 8), torch.ones(2, 4, dtype=torch.int32)
    try:
        with pytest.raises(NotEqual, match="a later pass is not") as raised:
            checked(lambda x, mask: torch.tanh((x[:, :4] + (1 - mask.float()) * -1e8).softmax(1) * 3), *example,
                    pass_pipeline=given)
    finally:
        PASS_REGISTRY.passes.pop("tests::breaks")
    assert "beyond fp16" not in str(raised.value)
