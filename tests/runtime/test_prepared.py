"""What a runtime keeps between calls, and that it neither shows in results nor outlives the program it was made for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.runtime import Runtime
from mil_ane_passes.runtime.numeric import Precision, ReusedMemory, have_equal_bits
from mil_ane_passes.runtime.quirks._operands import ReplacedInputs
from mil_ane_passes.runtime.quirks.base import Quirk
from tests.runtime.helpers import close, draw, program, run, same_bits


def test_a_program_changed_between_calls_runs_as_it_now_is() -> None:
    x = draw(0, 2, 3)

    def build(x: Any) -> Any:
        first, second = mb.add(x=x, y=1.0), mb.mul(x=x, y=3.0)
        return mb.sub(x=first, y=0.5, name="y"), second

    made = program(build, {"x": x})
    function, runtime = made.functions["main"], Runtime(made, precision="float64")
    close(runtime({"x": x})["y"], x + 0.5)
    (last,), (product,) = function.find_ops(op_type="sub"), function.find_ops(op_type="mul")
    last.set_inputs(x=product.outputs[0], type_inference=False)  # the same ops, read in another way
    close(runtime({"x": x})["y"], 3 * x - 0.5)
    function.set_outputs([last.outputs[0], function.find_ops(op_type="add")[0].outputs[0]])
    close(list(runtime({"x": x}).values())[1], x + 1)


def test_weights_and_biases_that_are_computed_are_not_kept() -> None:
    """From iOS17 on, a convolution may have a computed bias; coremltools cannot infer the type of a transposed one."""
    def draw_feeds(seed: int) -> dict[str, Any]:
        return {"x": draw(seed, 1, 3, 5), "weight": draw(seed + 1, 3, 3, 2), "bias": draw(seed + 2, 3)}

    built = program(lambda x, weight, bias: mb.conv(x=x, weight=weight, bias=bias, name="y"), draw_feeds(0),
                    opset=ct.target.iOS17)
    runtime = Runtime(built, precision="float64")
    for seed in (0, 10):
        feeds = draw_feeds(seed)
        x, weight, bias = (torch.from_numpy(value).double() for value in feeds.values())
        close(runtime(feeds)["y"], torch.nn.functional.conv1d(x, weight, bias).numpy())


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_later_calls_give_the_same_bits_and_leave_weights_alone(precision: str, dtype: Any) -> None:
    x, weight = draw(0, 4, 96, dtype=dtype), draw(1, 96, 96, dtype=dtype)
    before = weight.tobytes()

    def build(x: Any) -> Any:
        shared = mb.const(val=weight)
        y = mb.linear(x=mb.linear(x=x, weight=shared), weight=shared)
        return y, mb.identity(x=shared), mb.gelu(x=mb.reshape(x=shared, shape=[-1]), mode="EXACT")

    runtime = Runtime(program(build, {"x": x}), precision=precision)
    first = list(runtime({"x": x}).values())
    first[1][...] = 7  # results are the caller's own
    for _ in range(2):
        again = list(runtime({"x": x}).values())
        same_bits(again[0], first[0])
        same_bits(again[2], first[2])
        np.testing.assert_array_equal(again[1], weight)
    assert weight.tobytes() == before


@pytest.mark.parametrize("masked", [None, "bool", "float"])
@pytest.mark.parametrize("shape", [(2, 3, 700), (1, 1, 1100), (3, 700)])
def test_long_attention(shape: tuple[int, ...], masked: str | None) -> None:
    """Long enough that it is computed part by part; torch's own attention is the truth."""
    *batch, length = shape
    query, key, value = draw(0, *batch, length, 8), draw(1, *batch, length - 50, 8), draw(2, *batch, length - 50, 4)
    feeds: dict[str, Any] = {"query": query, "key": key, "value": value}
    if masked is not None:
        mask = draw(3, *(1 for _ in batch), length, length - 50)
        feeds["attn_mask"] = mask > -1 if masked == "bool" else mask
    found = run(lambda **given: mb.scaled_dot_product_attention(**given), feeds)[0]
    tensors = {name: torch.from_numpy(each) for name, each in feeds.items()}
    wide = {name: each if each.dtype == torch.bool else each.double() for name, each in tensors.items()}
    close(found, torch.nn.functional.scaled_dot_product_attention(**wide).numpy())


@pytest.mark.parametrize("length", [7, 600])
@pytest.mark.parametrize("planted", [1.0, 3e5, 1e30, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_attention_of_numbers_that_are_not_finite(where: str, planted: float, length: int) -> None:
    """Equal to its ops one by one: torch's fused kernel answers zeros for a row of which all scores are NaN."""
    feeds = {name: draw(seed, 2, length, 8) for seed, name in enumerate(("query", "key", "value"))}
    feeds[where][1, 3, 5] = planted
    found = run(lambda **given: mb.scaled_dot_product_attention(**given), feeds)[0]
    query, key, value = (torch.from_numpy(feeds[name]) for name in ("query", "key", "value"))
    expected = (torch.matmul(query, key.mT) / 8 ** 0.5).softmax(-1) @ value
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pad", [[1, 1, 1, 1], [0, 1, 2, 0], [2, 2, 0, 0]])
def test_max_pool_of_minus_infinity_and_nan(pad: list[int]) -> None:
    x = draw(0, 1, 2, 9, 9)
    x[0, 0, :4] = -np.inf
    x[0, 1, 5, 5] = np.nan
    options: Any = {"kernel_sizes": [3, 3], "strides": [2, 2], "pad_type": "custom", "pad": pad}
    padded = np.pad(x, ((0, 0), (0, 0), pad[:2], pad[2:]), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    same_bits(run(lambda x: mb.max_pool(x=x, **options), {"x": x}, precision="float32")[0], windows.max((-2, -1)))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_program_does_not_spread_over_the_heap() -> None:
    """The process, not only torch's allocator: small things kept between large ones keep the heap from shrinking."""
    code = (
        "import numpy as np\n"
        "from mil_ane_passes.runtime import Runtime\n"
        "from tests.lab.benchmarks.bench_runtime import measure_resident_growth\n"
        "from tests.lab.benchmarks.make_models import make_chain_program, make_small_program\n"
        "Runtime(make_small_program())({'x': np.ones((1, 8, 32, 32), np.float32)})\n"
        "runtime = Runtime(make_chain_program(200))\n"
        "x = np.ones((1, 64, 2**14), np.float32)\n"
        "print(measure_resident_growth(lambda: [runtime({'x': x}) for _ in range(2)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    # Two values of 4 MB are alive at once. With constants kept as they were first read, it grew by 525 MB; now by 43.
    assert int(done.stdout.splitlines()[-1]) < 150e6


BITS = np.arange(5000, dtype=np.float16)


@pytest.mark.parametrize(("one", "other", "expected"), [
    (BITS, BITS.copy(), True),
    (BITS, np.where(BITS == BITS[1234], np.float16(0.5), BITS), False),
    (np.where(BITS < 9, np.float16(0), BITS), np.where(BITS < 9, np.float16(-0.0), BITS), False),
    (np.array([0x7E00, 0x7E00], np.uint16).view(np.float16), np.array([0x7E00, 0x7E00], np.uint16).view(np.float16),
     True),
    (np.array([0x7E00], np.uint16).view(np.float16), np.array([0x7E01], np.uint16).view(np.float16), False),
    (BITS, BITS.reshape(50, 100), False),
    (np.zeros(3, np.float32), np.zeros(3, np.int32), False),
    (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), True),
    (np.array(True), np.array(False), False),
], ids=["equal", "one element of many", "-0", "the same NaN", "another NaN", "shape", "dtype", "nothing", "bools"])
def test_tensors_of_equal_bits(one: Any, other: Any, expected: bool) -> None:
    assert have_equal_bits(torch.from_numpy(one), torch.from_numpy(other)) is expected


def test_memory_of_large_constants_is_used_again_unless_a_value_still_lies_in_it() -> None:
    memory = ReusedMemory()
    first = memory.allocate((600, 1000), torch.float32)
    place = first.data_ptr()
    row = first[1]
    del first
    second = memory.allocate((300, 1000), torch.float64)
    assert second.data_ptr() != place and second.data_ptr() % 64 == 0
    places = {place, second.data_ptr()}
    del second, row
    third, fourth = (memory.allocate((400, 1000), torch.float32) for _ in range(2))
    assert {third.data_ptr(), fourth.data_ptr()} == places
    small = memory.allocate((300_000,), torch.float32)
    assert small.data_ptr() not in places
    del third, fourth
    large = memory.allocate((4000, 1000), torch.float64)  # the free pieces are too small, and freed
    assert large.numel() == 4_000_000 and small.numel() == 300_000
    assert memory.allocate((3,), torch.int32).shape == (3,)


def test_constants_that_are_returned_are_not_overwritten() -> None:
    weights = [np.full((1024, 1024), value, np.float16) for value in (1, 2, 3)]

    def build(x: Any) -> Any:
        # opaque to pymil, which would compute a reshape of a constant itself
        kept = [mb.slice_by_index(x=weight, begin=x, end=[1024, 1024], end_mask=[True, True]) for weight in weights]
        return (*kept, mb.gather(x=weights[0], indices=x, axis=1))

    feeds = {"x": np.zeros(2, np.int32)}
    for precision in ("float64", "float16"):
        found = list(Runtime(program(build, feeds), precision=precision)(feeds).values())
        assert [each.min() for each in found[:3]] == [each.max() for each in found[:3]] == [1, 2, 3]


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", ["whole", "strided", "infinite"])
def test_products_with_large_weights_are_computed_in_blocks(
    precision: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a weight is never converted as a whole, and the results are those of one that is."""
    from mil_ane_passes.runtime import numeric

    weight = draw(1, 41, 64, dtype=np.float16)
    weight = weight[:, 5:30] if kind == "strided" else weight
    if kind == "infinite":
        weight[3, 2], weight[4, 1] = np.inf, -np.inf
    x, bias = draw(0, 2, 3, weight.shape[1], dtype=np.float16), draw(2, 41, dtype=np.float16)

    def build(x: Any) -> Any:
        return (mb.linear(x=x, weight=weight, bias=bias), mb.matmul(x=x, y=weight, transpose_y=True),
                mb.matmul(x=x, y=np.ascontiguousarray(weight.T)))

    def compute() -> list[Any]:
        made = Runtime(program(build, {"x": x}), precision=precision, finite_constants=kind == "infinite")
        return [value for _ in range(2) for value in made({"x": x}).values()]

    expected = compute()
    monkeypatch.setattr(numeric, "_BLOCK_ELEMENTS", 4 * weight.shape[1])
    sizes: list[int] = []
    convert = numeric.Precision.constant
    monkeypatch.setattr(numeric.Precision, "constant", lambda self, value, passing=False: (
        sizes.append(np.size(value)) or convert(self, value, passing)))
    monkeypatch.setattr("mil_ane_passes.runtime.prepared_function._MAX_EAGER_BYTES", 512)
    found = compute()
    assert sizes.count(weight.size) == 2  # the one that is not turned: for the first call, and to be kept
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(one).all() == np.isfinite(other).all()
        tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3}[precision]
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max())


def test_runtimes_of_one_function_share_what_they_prepare() -> None:
    """Constants too, but for those whose numbers are rounded at one precision alone."""
    x, weight = draw(0, 4, 96, dtype=np.float16), draw(1, 96, 96, dtype=np.float16)
    numbers = np.arange(96 * 96, dtype=np.int8).reshape(96, 96) % 100

    def build(x: Any) -> Any:
        packed = mb.constexpr_blockwise_shift_scale(data=numbers, scale=np.full((96, 1), 0.0123, np.float16))
        return mb.linear(x=x, weight=weight, bias=weight[0]), mb.linear(x=x, weight=packed)

    made = program(build, {"x": x}, opset=ct.target.iOS18)
    plain = Runtime(made, keeps_constants=True)
    plain({"x": x})
    for precision in ("float16", "float64", "float32"):
        runtime, alone = Runtime(made, precision=precision, like=plain), Runtime(made, precision=precision)
        for _ in range(3):
            for one, other in zip(runtime({"x": x}).values(), alone({"x": x}).values(), strict=True):
                same_bits(one, other)
    function = made.functions["main"]
    (first, second) = function.find_ops(op_type="linear")
    function.set_outputs([second.outputs[0], first.outputs[0]])
    first.set_inputs(x=first.x, weight=first.weight, bias=second.bias, type_inference=False)
    for one, other in zip(Runtime(made, precision="float16", like=plain)({"x": x}).values(),
                          Runtime(made, precision="float16")({"x": x}).values(), strict=True):
        same_bits(one, other)


def test_constants_are_kept_when_they_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(0, 4, 96, dtype=np.float16), draw(1, 96, 96, dtype=np.float16)
    made = program(lambda x: mb.linear(x=x, weight=weight), {"x": x})
    converted = []
    constant = Precision.constant
    monkeypatch.setattr(Precision, "constant", lambda self, value, passing=False: (
        converted.append(np.size(value)), constant(self, value, passing))[1])
    for keeps, expected in ((False, 2), (True, 1)):
        converted.clear()
        runtime = Runtime(made, keeps_constants=keeps)
        for _ in range(3):
            runtime({"x": x})
        assert converted.count(weight.size) == expected


def test_parameters_that_a_quirk_replaces_are_not_those_of_the_program() -> None:
    x = draw(0, 1, 2, 3, 4, dtype=np.float32)

    class Crop(Quirk):
        name, source, op_types, any_float = "crop", "", ("transpose",), True

        def operands(self, op: Any, inputs: Any) -> Any:
            return ReplacedInputs(inputs, {"perm": torch.tensor([0, 1, 3, 2])})

    made = program(lambda x: mb.transpose(x=x, perm=[0, 3, 1, 2], name="y"), {"x": x})
    runtime = Runtime(made)
    for _ in range(2):
        assert runtime({"x": x})["y"].shape == (1, 4, 2, 3)
        assert Runtime(made, departure=Crop(), like=runtime)({"x": x})["y"].shape == (1, 2, 4, 3)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_a_row_is_normalized_alike_wherever_it_is(axis: int) -> None:
    """On any axis, beside any other rows, and with scale and offset."""
    x, gamma, beta = draw(0, 3, 8, 8, 8, dtype=np.float32), draw(1, 8, dtype=np.float32), draw(2, 8, dtype=np.float32)

    def normalize(x: Any, axis: int) -> Any:
        return run(lambda x: mb.layer_norm(x=x, axes=[axis], gamma=gamma, beta=beta), {"x": x}, precision="float32")[0]

    whole = normalize(np.moveaxis(x, -1, axis).copy(), axis)
    same_bits(np.moveaxis(whole, axis, -1), normalize(x, 3))
    same_bits(normalize(x[1:2, 3:4], 3), normalize(x, 3)[1:2, 3:4])
