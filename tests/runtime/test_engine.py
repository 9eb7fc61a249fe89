"""The runtime's own promises: names, errors, precisions, states, control flow, memory."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types

import mil_ane_passes as ane
from mil_ane_passes.runtime import QUIRKS, Runtime, interpreter, missing_ops, numeric, registry
from mil_ane_passes.utils.errors import InputError, NotSupported
from tests.runtime.helpers import draw, program, run, same_bits
from tests.without_torch import without_torch

X = np.array([[1.0, -2.0, 3.0]], np.float32)


def _doubled() -> Any:
    return program(lambda x: mb.add(x=x, y=x, name="twice"), {"x": X})


def test_importing_the_runtime_does_not_import_torch() -> None:
    # coremltools imports torch itself when it finds it, so torch is hidden from it, not looked for afterwards.
    done = without_torch("import mil_ane_passes.runtime")
    assert done.returncode == 0, done.stderr


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    made = _doubled()
    monkeypatch.setattr(registry, "_loaded", False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"pip install 'mil-ane-passes\[verify\]'"):
        Runtime(made)


def test_outputs_keep_their_names() -> None:
    found = Runtime(_doubled())({"x": X})
    assert list(found) == ["twice"]
    np.testing.assert_array_equal(found["twice"], 2 * X)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, r"input 'x': not fed; expected fp32 \(1, 3\)"),
        ({"x": X, "y": X}, r"feed 'y': no such input \(inputs: x\)"),
        ({"xx": X}, r"feed 'xx': no such input; did you mean 'x'\? \(inputs: x\)"),
        ({"x": X[0]}, r"feed 'x': found shape \(3,\), expected fp32 \(1, 3\)"),
        ({"x": X[:, :2]}, r"feed 'x': found shape \(1, 2\), expected fp32 \(1, 3\); axis 1 differs"),
        ({"x": X.astype(np.int32)}, r"feed 'x': found dtype int32, expected fp32"),
    ],
)
def test_feeds_are_checked(feeds: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Runtime(_doubled())(feeds)


def test_an_integer_that_does_not_fit_is_refused() -> None:
    made = program(lambda x: mb.add(x=x, y=1), {"x": np.array([1], np.int32)})
    with pytest.raises(InputError, match=r"feed 'x': found values 1\.\.4294967296, expected -2147483648\.\.2147483647"):
        Runtime(made)({"x": np.array([1, 2**32])[:2]})


def test_symbolic_extents_match_any_size_but_one_size_each() -> None:
    symbol = get_new_symbol()
    feeds = {"x": draw(0, 4, 3), "y": draw(1, 4, 3)}
    made = program(lambda x, y: mb.add(x=x, y=y), feeds, shapes={"x": (symbol, 3), "y": (symbol, 3)})
    runtime = Runtime(made)
    for size in (1, 4):
        runtime({"x": draw(0, size, 3), "y": draw(1, size, 3)})
    with pytest.raises(InputError, match=r"feed 'y': found 5 on axis 0, expected 4: .* is 4 in feed 'x' axis 0"):
        runtime({"x": draw(0, 4, 3), "y": draw(1, 5, 3)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "float46"}, "precision 'float46': unknown; did you mean 'float64'"),
        ({"quirks": ["conv_transpose_bias"]}, "quirk 'conv_transpose_bias': unknown; did you mean 'conv_transpose_1d"),
        ({"function": "mian"}, "function 'mian': not in the program; did you mean 'main'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Runtime(_doubled(), **options)


def test_a_missing_op_is_named_before_anything_runs() -> None:
    def build(x: Any) -> Any:
        return mb.while_loop(
            _cond=lambda i: mb.less(x=i, y=3.0), _body=lambda i: mb.add(x=i, y=1.0, name="inside"), loop_vars=(x,)
        )

    made = program(build, {"x": X[0, 0]})
    (loop,) = made.functions["main"].find_ops(op_type="while_loop")
    (unknown,) = loop.blocks[1].find_ops(op_type="add")
    # What a package loader leaves for an op it does not know: an operation of an unheard-of type.
    unknown.__class__ = type("mystery", (type(unknown),), {})
    name = unknown.outputs[0].name
    assert missing_ops(made) == [("mystery", name)]
    with pytest.raises(NotSupported, match=f"no kernel for: mystery \\('{name}'\\)"):
        Runtime(made)


def test_float16_rounds_every_value_to_its_declared_dtype() -> None:
    x, y = draw(0, 50, dtype=np.float16), draw(1, 50, dtype=np.float16)

    def build(x: Any, y: Any) -> Any:
        return mb.mul(x=mb.add(x=x, y=y), y=y)

    expected = ((x.astype(np.float32) + y).astype(np.float16).astype(np.float32) * y).astype(np.float16)
    same_bits(run(build, {"x": x, "y": y}, precision="float16")[0], expected)
    exact = (x.astype(np.float64) + y) * y
    same_bits(run(build, {"x": x, "y": y}, precision="float64")[0], exact)
    same_bits(run(build, {"x": x, "y": y}, precision="float32")[0], exact.astype(np.float32))


def test_float16_keeps_float32_where_it_is_declared() -> None:
    x = np.array([1e-8, 70000.0], np.float32)

    def build(x: Any) -> Any:
        return mb.identity(x=x), mb.cast(x=x, dtype="fp16")

    wide, narrow = run(build, {"x": x}, precision="float16")
    same_bits(wide, x)
    same_bits(narrow, np.array([0.0, np.inf], np.float16))
    # in float64 a cast to fp16 keeps the value: the question is the algebra, not the rounding
    np.testing.assert_array_equal(run(build, {"x": x}, precision="float64")[1], x.astype(np.float64))


def test_float16_sums_in_float32() -> None:
    x = np.full((1, 4096), 1.0, np.float16)
    weight = np.full((1, 4096), 1.0, np.float16)
    assert run(lambda x: mb.linear(x=x, weight=weight), {"x": x}, precision="float16")[0].item() == 4096.0


def test_integers_are_exact_in_every_precision() -> None:
    x, y = np.array([2**31 - 1, -7, 7, -(2**31)], np.int32), np.array([1, 2, -2, -1], np.int32)

    def build(x: Any, y: Any) -> Any:
        return mb.add(x=x, y=y), mb.floor_div(x=x, y=y), mb.mod(x=x, y=y)

    for precision in ("float64", "float32", "float16"):
        added, divided, rest = run(build, {"x": x, "y": y}, precision=precision)
        np.testing.assert_array_equal(added, [-(2**31), -5, 5, 2**31 - 1])
        np.testing.assert_array_equal(divided, [2**31 - 1, -4, -4, -(2**31)])
        np.testing.assert_array_equal(rest, [0, 1, -1, 0])
        assert added.dtype == divided.dtype == rest.dtype == np.int32


def test_casts_of_floats_truncate_and_saturate() -> None:
    """What does not fit MIL leaves open; arm64 saturates, as the runtime does for int32, too."""
    x = np.array([-1.9, 1.9, 300.5], np.float32)

    def build(x: Any) -> Any:
        return mb.cast(x=x, dtype="int32"), mb.cast(x=x, dtype="uint8"), mb.cast(x=x, dtype="bool")

    found = run(build, {"x": x})
    np.testing.assert_array_equal(found[0], [-1, 1, 300])
    np.testing.assert_array_equal(found[1], np.array([0, 1, 255], np.uint8))
    assert found[1].dtype == np.uint8
    assert found[2].dtype == np.bool_


def test_cond_takes_one_branch() -> None:
    def build(flag: Any, x: Any) -> Any:
        return mb.cond(pred=flag, _true_fn=lambda: mb.add(x=x, y=1.0), _false_fn=lambda: mb.mul(x=x, y=2.0))

    for flag, expected in ((True, X + 1), (False, X * 2)):
        np.testing.assert_array_equal(run(build, {"flag": np.array(flag), "x": X})[0], expected)


def test_while_loop_reads_outer_values_on_every_round() -> None:
    def build(x: Any) -> Any:
        step = mb.mul(x=x, y=2.0)
        return mb.while_loop(
            _cond=lambda i, _: mb.less(x=i, y=5),
            _body=lambda i, total: (mb.add(x=i, y=1), mb.add(x=total, y=step)),
            loop_vars=(0, x),
        )

    count, total = run(build, {"x": X})
    assert count.item() == 5
    np.testing.assert_array_equal(total, 11 * X)


def test_lists() -> None:
    def build(x: Any) -> Any:
        made = mb.make_list(init_length=1, dynamic_length=True, elem_shape=(3,), dtype="fp32")
        made = mb.list_scatter(ls=made, indices=np.array([0, 2], np.int32), value=mb.concat(values=[x, x], axis=0))
        made = mb.list_write(ls=made, index=1, value=mb.squeeze(x=mb.mul(x=x, y=3.0), axes=[0]))
        gathered = mb.list_gather(ls=made, indices=np.array([2, 1], np.int32))
        return mb.list_read(ls=made, index=1), gathered, mb.list_length(ls=made)

    read, gathered, length = run(build, {"x": X})
    np.testing.assert_array_equal(read, 3 * X[0])
    np.testing.assert_array_equal(gathered, np.concatenate([X, 3 * X]))
    assert length.item() == 3


def _counter() -> Any:
    @mb.program(
        input_specs=[mb.TensorSpec((2,), dtype=types.fp16), mb.StateTensorSpec((2,), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def made(x: Any, total: Any) -> Any:
        added = mb.add(x=mb.read_state(input=total), y=x)
        return mb.coreml_update_state(state=total, value=added, name="now")

    return made


def test_states_start_at_zero_and_are_updated_in_place() -> None:
    runtime, state = Runtime(_counter(), precision="float16"), dict[str, Any]()
    feeds = {"x": np.array([1, 2], np.float16)}
    runtime(feeds, state)
    np.testing.assert_array_equal(runtime(feeds, state)["now"], [2, 4])
    same_bits(state["total"], np.array([2, 4], np.float16))
    np.testing.assert_array_equal(runtime(feeds)["now"], [1, 2])
    with pytest.raises(InputError, match="state 'totl': no such state; did you mean 'total'"):
        runtime(feeds, {"totl": np.zeros(2, np.float16)})


def test_several_functions() -> None:
    made = program(lambda x: mb.add(x=x, y=1.0, name="y"), {"x": X})
    made.add_function("other", program(lambda x: mb.mul(x=x, y=5.0, name="y"), {"x": X}).functions["main"])
    np.testing.assert_array_equal(Runtime(made)({"x": X})["y"], X + 1)
    np.testing.assert_array_equal(Runtime(made, function="other")({"x": X})["y"], X * 5)


def test_intermediates_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    keep = interpreter.Interpreter.keep

    def watched(self: Any, var: Any, value: Any) -> Any:
        nonlocal most
        kept = keep(self, var, value)
        alive.append(weakref.ref(kept))
        gc.collect()
        most = max(most, sum(each() is not None for each in alive))
        return kept

    def build(x: Any) -> Any:
        for _ in range(20):
            x = mb.relu(x=x)
        return x

    made = program(build, {"x": X})
    monkeypatch.setattr(interpreter.Interpreter, "keep", watched)
    Runtime(made)({"x": X})
    assert most <= 4


def test_weights_of_a_package_are_read_before_the_ops_of_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ops, they would take memory that values have left; those of a branch that is not taken are not read."""
    weights = [np.full((2000, 3), number, np.float32) for number in range(1, 5)]

    def build(x: Any, flag: Any) -> Any:
        for weight in weights[:2]:
            x = mb.relu(x=mb.linear(x=mb.linear(x=x, weight=weight), weight=weight.T.copy()))
        return mb.cond(pred=mb.cast(x=mb.squeeze(x=flag), dtype="bool"),
                       _true_fn=lambda: mb.linear(x=x, weight=weights[2]),
                       _false_fn=lambda: mb.linear(x=x, weight=weights[3]), name="y")

    feeds = {"x": X, "flag": np.ones(1, np.float32)}
    model = ct.convert(program(build, feeds), compute_precision=ct.precision.FLOAT32, skip_model_load=True,
                       minimum_deployment_target=ct.target.iOS17)
    model.save(str(tmp_path / "model.mlpackage"))
    events: list[Any] = []
    read = numeric.read_once

    def record_read(array: Any) -> Any:
        if array.flat[0]:  # a bias is 0
            events.append(float(array.flat[0]))
        return read(array)

    monkeypatch.setattr(numeric, "read_once", record_read)
    runtime = Runtime(ane.load(tmp_path / "model.mlpackage").program,
                      observer=lambda op, var, value: events.append(op.op_type), precision="float32")
    runtime(feeds)
    first = [each for each in events if each != "cast"].index("linear")
    assert sorted(events[:first]) == [1.0, 1.0, 2.0, 2.0], events
    assert [each for each in events[first:] if isinstance(each, float)] == [3.0], events
    events.clear()
    runtime(feeds | {"flag": np.zeros(1, np.float32)})
    assert [each for each in events if isinstance(each, float)] == [4.0], events


def test_a_program_that_coremltools_converted_runs() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.ConvTranspose1d(4, 3, 5, stride=2, padding=2)
            self.norm = torch.nn.LayerNorm(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.norm(self.up(x).transpose(1, 2)), -1)

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(1, 4, 10)
    made = ct.convert(
        torch.jit.trace(net, x),
        inputs=[ct.TensorType("x", shape=ct.Shape((1, 4, ct.RangeDim(5, 20, default=10))))],
        convert_to="milinternal",
        minimum_deployment_target=ct.target.iOS17,
    )
    for length in (10, 7):
        x = torch.randn(1, 4, length)
        (found,) = Runtime(made, precision="float64")({"x": x.numpy()}).values()
        # the weights were rounded to fp16 by the conversion
        np.testing.assert_allclose(found, net(x).detach().numpy(), atol=3e-3)


def test_every_quirk_names_its_source() -> None:
    for name, quirk in QUIRKS.items():
        assert quirk.name == name
        assert quirk.source.startswith("https://")
        assert quirk.__doc__


def test_an_op_that_cannot_be_computed_is_named() -> None:
    symbol, other = get_new_symbol(), get_new_symbol()
    feeds = {"x": draw(0, 4), "y": draw(1, 4)}
    made = program(lambda x, y: mb.add(x=x, y=y, name="sum"), feeds, shapes={"x": (symbol,), "y": (other,)})
    with pytest.raises(InputError, match=r"add 'sum': cannot be computed on these operands: .*size"):
        Runtime(made)({"x": draw(0, 4), "y": draw(1, 3)})


def test_a_reshape_to_the_sizes_of_a_trace_says_so() -> None:
    symbol = get_new_symbol()
    feeds = {"x": draw(0, 1, 4)}
    made = program(lambda x: mb.reshape(x=x, shape=[2, 2], name="y"), feeds, shapes={"x": (symbol, 4)})
    with pytest.raises(InputError, match=r"reshape 'y': .*the sizes \(2, 2\) are constants: a trace fixes the number "
                       r"of tokens .*trace with several tokens.*attn_implementation=\"eager\""):
        Runtime(made)({"x": draw(0, 3, 4)})


@pytest.mark.parametrize("axis", [0, -2])
def test_rows_of_a_replaced_constant_are_those_of_the_other(axis: int) -> None:
    """A lookup along axis 0 reads rows from the stored table, but not if a run replaces the table or limits it."""
    table, places = np.triu(np.full((8, 4), -np.inf, np.float16), 1), np.int32([0, 3, 1])
    made = program(lambda x: mb.gather(x=mb.const(val=table, name="table"), indices=x, axis=axis, name="y"),
                   {"x": places})
    np.testing.assert_array_equal(Runtime(made)({"x": places})["y"], table[places])
    replaced = Runtime(made, constants={"table": np.full((8, 4), 2.0)})
    np.testing.assert_array_equal(replaced({"x": places})["y"], np.full((3, 4), 2.0))
    assert np.isfinite(Runtime(made, finite_constants=True)({"x": places})["y"]).all()
