"""8 and 16-bit integers have the values of torch, which wrap around, at every target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime

from ..checks import captured, check, convert, convert_captured, input_types

TARGETS = [ct.target.iOS16, ct.target.iOS17, ct.target.iOS18]
X = torch.tensor([[0.0, 3.0, 128.0, 255.0], [200.0, 17.0, 100.0, 31.0]])
Y = torch.tensor([[-128.0, 3.0, 127.0, -1.0], [100.0, 17.0, -100.0, 31.0]])
Integers = Callable[[torch.Tensor], Any]

UNSIGNED: dict[str, Integers] = {
    "sums": lambda u: (u + 1, u - 1, u + u, 255 - u, 3 - u, u + 300, torch.add(u, u, alpha=3),
                       u.sub(u.flip(1), alpha=2)),
    "products": lambda u: (u * 3, u * u, -u, ~u, u.square(), u ** 2, u ** 3, torch.addcmul(u, u, u), u @ u.t()),
    "shifts": lambda u: (u << 1, u << 9, u >> 4, u >> 9, u & 15),
    "quotients": lambda u: (u % 16, u // 16, torch.div(u, 3, rounding_mode="trunc"), torch.fmod(u, 7), u / 2),
    "numbers that do not fit": lambda u: (u // -1, u % 300, u > 300, u > -1, u == 300, u + torch.tensor(300)),
    "comparisons": lambda u: (u > 100, (u == 3).float(), u.bool(), torch.where(u > 3, u, 7), u.masked_fill(u > 3, 7)),
    "choices": lambda u: (u.clamp(3, 90), u.amax(1), u.max(1)[0], u.min(), u.argmax(1), u.sort(1)[0], u.topk(2)[0]),
    "wider results": lambda u: (u.sum(), u.cumsum(1), u.prod(1), u.float() / 2, u.mean(dtype=torch.float32), u.sqrt()),
    "shapes": lambda u: (u.repeat(2, 1), torch.cat([u, u + 1], 1), u[:, 1:] + u[:, :-1], u.expand(3, -1, -1),
                         u.roll(1, 1)),
    "casts": lambda u: ((u + 1).float(), u.to(torch.int8), (u.to(torch.int8) + 1).byte(), (u.int() * 3).byte(),
                        u.to(torch.int16) * 300, u.type_as(u.float()) * 300),
    "two dtypes": lambda u: (u + u.char(), u * u.char(), u > u.char(), u + u.int(), torch.maximum(u, u.char())),
    "written in place": lambda u: u.add_(200).mul_(2),
}
SIGNED: dict[str, Integers] = {
    "sums": lambda i: (i + 1, i - 100, 100 - i, -1 - i, -i, ~i, i.abs()),
    "products": lambda i: (i * i, i * -1, i << 1, i ** 2),
    "quotients": lambda i: (i >> 1, i // -1, i // 7, torch.div(i, -1, rounding_mode="trunc"), i % -3),
    "comparisons": lambda i: (i > 5, i.amax(1), i.clamp(-5, 5), i.sign(), i.float(), i.byte()),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("flexible", [(), (0,)])
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("function", UNSIGNED.values(), ids=UNSIGNED)
def test_unsigned_values_are_those_of_torch(function: Integers, frontend: str, flexible: tuple[int, ...],
                                            target: Any) -> None:
    check(lambda x: function(x.to(torch.uint8)), X, frontend=frontend, flexible=flexible, target=target)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("function", SIGNED.values(), ids=SIGNED)
def test_signed_values_are_those_of_torch(function: Integers, frontend: str, target: Any) -> None:
    check(lambda x: function((x * 1).to(torch.int8)), Y, frontend=frontend, target=target)


def add_in_script(x: torch.Tensor):
    u = x.to(torch.uint8)
    return u + 200 + 30, (u + 1 > 3).float(), u.clamp(3, 90) * 3, u.sum(1)


@pytest.mark.parametrize("target", TARGETS[1:])
def test_scripts_know_the_dtype_from_ios17_on(target: Any) -> None:
    check(add_in_script, X, frontend="script", target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", [lambda u: 255 - u, lambda u: ~u, lambda u: u // 16])
def test_results_that_fit_need_no_remainder(function: Integers, target: Any) -> None:
    mlmodel = convert(lambda x: function(x.to(torch.uint8)).float(), (X,), target=target)
    assert not mlmodel._mil_program.functions["main"].find_ops(op_type="mod")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", [lambda x: x.int() + 1, lambda x: x * 2 - 1, lambda x: x.int() * 3 > 4])
def test_models_without_them_have_the_same_ops(function: Integers, target: Any) -> None:
    ops = [[op.op_type for op in convert(function, (X,), target=target, patched=patched)
            ._mil_program.functions["main"].operations] for patched in (True, False)]
    assert ops[0] == ops[1]


def test_the_default_pipeline_keeps_the_values() -> None:
    program = captured(lambda x: (255 - (x * 255).to(torch.uint8)) + 30, (X / 300,), "trace")
    mlmodel = ane.convert(program, inputs=input_types((X,)), minimum_deployment_target=ct.target.iOS17,
                          compute_precision=ct.precision.FLOAT32)
    (found,) = ane.run(mlmodel, {"x0": (X / 300).numpy()}).values()
    assert found.tolist() == ((255 - (X / 300 * 255).to(torch.uint8)) + 30).tolist()


EXAMPLES = {dtype: torch.tensor([[[[0, 3], [100, 127]], [[200, 17], [255, 128]], [[99, 1], [254, 31]]]]).to(dtype)
            for dtype in (torch.uint8, torch.int8, torch.int16)}
INPUT_MODELS: dict[str, Integers] = {
    "floats": lambda u: u.float() / 255,
    "division": lambda u: u / 255 * u,
    "wraps around": lambda u: (u + 200).float(),
    "wraps around in a concat": lambda u: (torch.cat([u, u.flip(1)], 1) * 3).float() / 255,
    "moved": lambda u: (u.permute(0, 2, 3, 1).float(), u.reshape(3, 4) * 2, u[:, 1:].float()),
    "returned": lambda u: (u, u + 200, u.sum(), u > 300, u.bool()),
}


def run_at(mlmodel: Any, value: torch.Tensor) -> list[Any]:
    (name, declared), = mlmodel._mil_program.functions["main"].inputs.items()
    feed = value.numpy().astype(types.nptype_from_builtin(declared.dtype))
    return list(Runtime(mlmodel._mil_program, precision="float32")({name: feed}).values())


@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
@pytest.mark.parametrize("declared", [None, np.int32, np.float32, "image"])
@pytest.mark.parametrize("dtype", EXAMPLES)
@pytest.mark.parametrize("function", INPUT_MODELS.values(), ids=INPUT_MODELS)
def test_exported_inputs_of_narrow_integers(function: Integers, dtype: torch.dtype, declared: Any, target: Any) -> None:
    x = EXAMPLES[dtype]
    if declared == "image" and dtype == torch.int8:
        return
    inputs = None if declared is None else [ct.ImageType("tensors_0", x.shape) if declared == "image" else
                                            ct.TensorType("tensors_0", x.shape, dtype=declared)]
    mlmodel = convert_captured(captured(function, (x,), "export"), (x,), "export", inputs=inputs, target=target)
    (var,) = mlmodel._mil_program.functions["main"].inputs.values()
    assert var.dtype == (types.fp32 if declared in (np.float32, "image") else types.int32)
    expected = function(x)
    for found, wanted in zip(run_at(mlmodel, x), expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(np.reshape(found, wanted.shape).astype(float), wanted.numpy().astype(float),
                                   rtol=1e-6)


@pytest.mark.parametrize("declared", [None, np.int32, "image"])
def test_flexible_exported_inputs_of_uint8(declared: Any) -> None:
    x, size = torch.arange(75, dtype=torch.uint8).reshape(1, 3, 5, 5), ct.RangeDim(2, 64)
    inputs = None if declared is None else [
        ct.ImageType("tensors_0", (1, 3, size, 5)) if declared == "image" else
        ct.TensorType("tensors_0", (1, 3, size, 5), dtype=declared)]
    mlmodel = convert_captured(captured(lambda u: (u * 5).float() / 255, (x,), "export", flexible=[2]), (x,), "export",
                               inputs=inputs)
    for feed in (x, torch.cat([x, x + 100], 2)):
        (found,) = run_at(mlmodel, feed)
        np.testing.assert_allclose(found, (feed * 5).numpy() / np.float32(255), rtol=1e-6)


def test_numbers_of_rank_0_as_exported_inputs() -> None:
    x = torch.tensor(200, dtype=torch.uint8)
    mlmodel = convert_captured(captured(lambda u: (u + 100).float(), (x,), "export"), (x,), "export", readable=False)
    assert run_at(mlmodel, x.reshape(1))[0] == 44


@pytest.mark.parametrize("image", [True, False])
def test_exported_uint8_is_checked(image: bool) -> None:
    x = EXAMPLES[torch.uint8]
    inputs = [ct.ImageType("image", x.shape)] if image else [ct.TensorType("image", x.shape, dtype=np.int32)]
    program = captured(lambda u: (u + 200).float() / 255, (x,), "export")
    mlmodel = ane.convert(program, inputs=inputs, skip_model_load=True, check=True)
    assert mlmodel.get_spec().description.input[0].type.WhichOneof("Type") == ("imageType" if image else
                                                                                "multiArrayType")


def test_images_of_int8_are_refused() -> None:
    x = EXAMPLES[torch.int8]
    with pytest.raises(ane.torch_frontend.NotConverted, match="input 'tensors_0' is torch.int8.*torch.uint8"):
        ane.convert(captured(lambda u: u.float(), (x,), "export"), inputs=[ct.ImageType("x", x.shape)])


def test_inputs_of_other_dtypes_are_named() -> None:
    x = torch.ones(3, dtype=torch.uint16)
    with pytest.raises(ane.torch_frontend.NotConverted, match="input 'tensors_0' is torch.uint16.*another dtype"):
        ane.convert(captured(lambda u: u.float(), (x,), "export"))
