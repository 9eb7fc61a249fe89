"""Weights of a NeuralNetwork: WeightParams as arrays, or as constants of an ML Program that stay compressed.

Linear and lookup-table quantization become `constexpr_lut_to_dense` where one table of at most 256 numbers holds every
value of the weight, which is exact; linear quantization with a scale for each output channel becomes
`constexpr_blockwise_shift_scale`, which needs iOS 18. A weight is never decompressed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values

__all__ = ["WeightReader"]

Array = np.ndarray[Any, Any]

_LUT_BITS = (1, 2, 4, 6, 8)
"Widths that `constexpr_lut_to_dense` of iOS 16 stores; indices of other widths are stored in the next one."


@dataclass
class WeightReader:
    """Reads the WeightParams of one model.

    `where` names the layer in errors; `expanded` lists the quantized vectors that were decompressed, with their sizes.
    """

    opset: Any
    where: str = ""
    expanded: dict[str, int] = field(default_factory=dict)

    def read(self, params: Any, shape: tuple[int, ...], what: str = "weights") -> Array:
        """Return `params` as float32 in `shape`. Raises InputError for quantized tensors and wrong counts.

        Quantized vectors (biases, statistics, scales of shape (1, C, 1)) are expanded, and listed in `expanded`: MIL's
        ops take floats for them.
        """
        size = max(shape, default=1)
        if is_quantized(params) and size == np.prod(shape):
            self.expanded[f"{self.where}: {what}"] = size
            codes, table, scale, bias = self._read_codes(params, (size,), what, 0)
            numbers: Array = codes * scale + bias if table is None else table[codes]
            return numbers.astype(np.float32).reshape(shape)
        if is_quantized(params):
            raise InputError(f"{self.where}: '{what}' is quantized, which the ML Program op of this layer does not "
                             f"support; expected float weights: convert the source model with coremltools instead")
        return self._read_numbers(params, shape, what)

    def read_optional(self, present: bool, params: Any, shape: tuple[int, ...], what: str) -> Array | None:
        return self.read(params, shape, what) if present else None

    def make(self, params: Any, shape: tuple[int, ...], what: str = "weights", *, axis: int = 0) -> Var | Array:
        """Return `params` in `shape`: an array, or the var of a `constexpr_*` op where they are quantized.

        Output channels, which may have a scale each, are on `axis` of `shape`.
        """
        if not is_quantized(params):
            return self._read_numbers(params, shape, what)
        return self._make_compressed(params, shape, what, axis)

    def _read_numbers(self, params: Any, shape: tuple[int, ...], what: str) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        if params.floatValue:
            found = np.array(params.floatValue, np.float32)
        elif params.float16Value:
            if len(params.float16Value) % 2:
                raise self._make_damage_error(what, f"{len(params.float16Value)} bytes of fp16", "an even number")
            found = np.frombuffer(params.float16Value, np.float16).astype(np.float32)
        else:
            found = np.zeros(0, np.float32)
        if found.size != count:
            raise self._make_damage_error(what, f"{found.size} numbers", f"{count} for the shape {shape}")
        return found.reshape(shape)

    def _read_codes(
        self, params: Any, shape: tuple[int, ...], what: str, axis: int
    ) -> tuple[Array, Array | None, Array, Array]:
        """Return the codes in `shape`, and their table, or None with the scale and bias of linear quantization."""
        bits = int(params.quantization.numberOfBits)
        if not 1 <= bits <= 8:
            raise self._make_damage_error(what, f"{bits} bits", "1 to 8")
        codes = self._unpack_codes(params, bits, int(np.prod(shape, dtype=np.int64)), what).reshape(shape)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        if params.quantization.WhichOneof("QuantizationType") == "lookupTableQuantization":
            table = np.array(params.quantization.lookupTableQuantization.floatValue, np.float32)
            if table.size != 2 ** bits:
                raise self._make_damage_error(what, f"a table of {table.size} numbers", f"{2 ** bits} for {bits} bits")
            return codes, table, one, zero
        linear = params.quantization.linearQuantization
        scale = np.array(linear.scale or one, np.float32)
        bias = np.array(linear.bias or zero, np.float32)
        for name, found in (("scales", scale), ("biases", bias)):
            if found.size not in (1, shape[axis]):
                raise self._make_damage_error(what, f"{found.size} {name}", f"1 or {shape[axis]}")
        return codes.view(np.int8) if params.int8RawValue else codes, None, scale, bias

    def _make_compressed(self, params: Any, shape: tuple[int, ...], what: str, axis: int) -> Var:
        bits = int(params.quantization.numberOfBits)
        codes, table, scale, bias = self._read_codes(params, shape, what, axis)
        if table is not None:
            return self._make_lut(codes, table, bits)
        if scale.size == 1 and bias.size == 1:
            levels = np.arange(2 ** bits, dtype=np.uint8).view(codes.dtype).astype(np.float32)
            return self._make_lut(codes.view(np.uint8), levels * scale + bias, bits)
        return self._make_scaled(codes, bits, scale, bias, what, axis)

    def _make_lut(self, codes: Array, table: Array, bits: int) -> Var:
        """Make a lookup of `codes` (uint8) in `table`."""
        wide = next(each for each in _LUT_BITS if each >= bits)
        table = np.concatenate([table, np.full(2 ** wide - table.size, table[-1], np.float32)])
        if self.opset >= ct.target.iOS18:
            from coremltools.converters.mil.mil.types import (
                np_uint1_dtype,
                np_uint2_dtype,
                np_uint4_dtype,
                np_uint6_dtype,
            )

            kinds = {1: np_uint1_dtype, 2: np_uint2_dtype, 4: np_uint4_dtype, 6: np_uint6_dtype, 8: np.uint8}
            lut = table.reshape((1,) * codes.ndim + (table.size, 1))
            result: Var = mb.constexpr_lut_to_dense(indices=codes.astype(kinds[wide]), lut=lut)
            return result
        packed = _pack_bits(codes.reshape(-1), wide)
        return mb.constexpr_lut_to_dense(indices=packed, lut=table, shape=np.array(codes.shape, np.uint32))

    def _make_scaled(self, codes: Array, bits: int, scale: Array, bias: Array, what: str, axis: int) -> Var:
        """Make `scale * (codes - offset)` with one scale for each output channel; offset = -bias / scale, in floats."""
        if self.opset < ct.target.iOS18:
            raise InputError(
                f"{self.where}: its {what} have a scale and a bias per output channel, which ML Programs support from "
                f"iOS18 on; expected {format_option_values('deployment_target', 'iOS18')}: they "
                "are not decompressed"
            )
        count = codes.shape[axis]
        scale, bias = (np.broadcast_to(each, (count,)).astype(np.float32) for each in (scale, bias))
        shape = tuple(count if each == axis else 1 for each in range(codes.ndim))
        if not scale.all():  # as coremltools quantizes a channel of equal weights: what is stored is its bias
            constant = scale == 0
            codes = np.where(constant.reshape(shape), np.array(1, codes.dtype), codes)
            scale, bias = np.where(constant, bias, scale), np.where(constant, 0, bias)
            scale, codes = np.where(scale == 0, 1, scale), np.where((scale == 0).reshape(shape), 0, codes)
        if bits <= 4:  # the op stores 4 or 8 bits
            from coremltools.converters.mil.mil.types import np_uint4_dtype

            codes = codes.astype(np_uint4_dtype)
        result: Var = mb.constexpr_blockwise_shift_scale(
            data=codes, scale=scale.reshape(shape),
            offset=(-bias / scale).reshape(shape))
        return result

    def _unpack_codes(self, params: Any, bits: int, count: int, what: str) -> Array:
        """Return the codes as uint8, one for each weight; they are stored in sequence, high bits first."""
        raw = np.frombuffer(params.int8RawValue or params.rawValue, np.uint8)
        expected = -(-count * bits // 8)
        if raw.size != expected:
            raise self._make_damage_error(what, f"{raw.size} bytes", f"{expected} for {count} weights of {bits} bits")
        if bits == 8:
            return raw
        unpacked = np.unpackbits(raw)[:count * bits].reshape(count, bits)
        powers = (1 << np.arange(bits - 1, -1, -1)).astype(np.uint8)
        codes: Array = (unpacked * powers).sum(axis=1, dtype=np.uint8)
        return codes

    def _make_damage_error(self, what: str, found: str, expected: str) -> InputError:
        return InputError(f"{self.where}: its {what} have {found}; expected {expected}: use a fresh copy of the model")


def is_quantized(params: Any) -> bool:
    """Return whether WeightParams hold codes instead of floats."""
    return bool(params.rawValue or params.int8RawValue) and params.HasField("quantization")


def _pack_bits(codes: Array, bits: int) -> Array:
    """Pack codes as `constexpr_lut_to_dense` of iOS 16 stores them: low bits first, over the bytes' ends."""
    if bits == 8:
        return codes.astype(np.uint8)
    single = ((codes[:, None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(-1)
    return np.packbits(single, bitorder="little")
