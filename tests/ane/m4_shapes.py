"""The cases that move data: shapes, resizing and sampling, indexing, sorting, and sources of values."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from .m4_build import W, fp16, table

__all__ = ["CASES"]

X = "1x64x32x32"
XX = f"{X} {X}"
_RANDOM = np.random.default_rng(0)
_SAMPLING = {"sampling_mode": "bilinear", "padding_mode": "constant", "padding_value": fp16(0),
             "coordinates_mode": "normalized_minus_one_to_one", "align_corners": True}


def _one(op: str, inputs: str = X, **attributes: Any) -> Any:
    return inputs, lambda x: getattr(mb, op)(x=x, **attributes)


def _concat(axis: int, **attributes: Any) -> Any:
    return XX, lambda x, y: mb.concat(values=(x, y), axis=axis, **attributes)


def _scaled(op: str, height: str, factor: Any, **attributes: Any) -> Any:
    return _one(op, **{height: factor, height.replace("height", "width"): factor}, **attributes)


def _gather(axis: int, count: int, size: int) -> Any:
    return X, lambda x: mb.gather(x=x, indices=_RANDOM.integers(0, size, count).astype(np.int32), axis=axis)


def _topk(inputs: str, k: int, axis: int) -> Any:
    return inputs, lambda x: mb.topk(x=x, k=k, axis=axis)[0]


def _scatter(op: str, indices: str, updates: str) -> Any:
    return f"{X} {indices}:int32 {updates}", lambda data, at, new: getattr(mb, op)(
        data=data, indices=at, updates=new, axis=3)


def _half(var: Any) -> Any:
    return mb.cast(x=var, dtype="fp16")


def _noise(x: Any) -> Any:
    return mb.add(x=x, y=_half(mb.random_normal(shape=np.array([1, 64, 32, 32], np.int32))))


_MOVES = {
    "reshape": _one("reshape", shape=[1, 64, 1024]), "reshape_split_c": _one("reshape", shape=[1, 8, 8, 32, 32]),
    "transpose_hw": _one("transpose", perm=[0, 1, 3, 2]), "transpose_cw": _one("transpose", perm=[0, 3, 2, 1]),
    "transpose_nc": _one("transpose", "8x64x16x16", perm=[1, 0, 2, 3]),
    "transpose_r5": _one("transpose", "1x4x16x16x16", perm=[0, 2, 1, 4, 3]),
    "concat_c": _concat(1), "concat_w": _concat(3), "concat_n": _concat(0),
    "concat_interleave": _concat(1, interleave=True),
    "split_c": (X, lambda x: mb.split(x=x, num_splits=2, axis=1)[0]),
    "stack": (XX, lambda x, y: mb.stack(values=(x, y), axis=1)),
    "slice_c": _one("slice_by_index", begin=[0, 8, 0, 0], end=[1, 40, 32, 32]),
    "slice_w_stride2": _one("slice_by_index", begin=[0, 0, 0, 0], end=[1, 64, 32, 32], stride=[1, 1, 1, 2]),
    "slice_by_size": _one("slice_by_size", begin=[0, 0, 4, 4], size=[1, 64, 16, 16]),
    "slice_dyn": (f"{X} 4:int32", lambda x, at: mb.slice_by_size(x=x, begin=at, size=[1, 32, 16, 16])),
    "reverse_w": _one("reverse", axes=[3]), "tile": _one("tile", reps=[1, 2, 1, 2]),
    "pad_const": _one("pad", pad=[1, 1, 1, 1], mode="constant", constant_val=fp16(0)),
    "pad_reflect": _one("pad", pad=[2, 2, 2, 2], mode="reflect"),
    "pad_replicate": _one("pad", pad=[2, 2, 2, 2], mode="replicate"),
    "pad_c": _one("pad", pad=[0, 0, 4, 4, 0, 0, 0, 0], mode="constant"),
    "space_to_depth": _one("space_to_depth", block_size=2), "depth_to_space": _one("depth_to_space", block_size=2),
    "pixel_shuffle": _one("pixel_shuffle", upscale_factor=2),
    "pixel_unshuffle": _one("pixel_unshuffle", downscale_factor=np.uint32(2)),
    "space_to_batch": _one("space_to_batch", block_shape=[2, 2], paddings=[[0, 0], [0, 0]]),
    "batch_to_space": _one("batch_to_space", "4x64x16x16", block_shape=[2, 2], crops=[[0, 0], [0, 0]]),
    "sliding_windows": _one("sliding_windows", "1x64x256", axis=2, size=8, stride=4),
    "band_part": _one("band_part", "1x128x128", lower=-1, upper=0),
    "squeeze_expand": ("1x64x1x32", lambda x: mb.expand_dims(x=mb.squeeze(x=x, axes=[2]), axes=[3])),
}

_RESIZES = {
    "upsample_nearest": _scaled("upsample_nearest_neighbor", "scale_factor_height", 2),
    "upsample_nearest_x3": _scaled("upsample_nearest_neighbor", "scale_factor_height", 3),
    "upsample_nearest_frac": _scaled("upsample_nearest_neighbor", "scale_factor_height", 1.5),
    "upsample_bilinear": _scaled("upsample_bilinear", "scale_factor_height", 2),
    "upsample_bilinear_ac": _scaled("upsample_bilinear", "scale_factor_height", 2, align_corners=True),
    "resize_bilinear": _scaled("resize_bilinear", "target_size_height", 48),
    "resize_nearest": _scaled("resize_nearest_neighbor", "target_size_height", 48),
    "resize_down": _one("resize", shape=np.array([20, 20], np.int32), resized_dims=np.uint32(2),
                        interpolation_mode="LINEAR"),
    "crop_resize": _one("crop_resize", boxes=np.array([[0, 0, 16, 16]] * 4, np.float16),
                        box_indices=np.zeros(4, np.int32), target_height=8, target_width=8,
                        box_coordinate_mode="CORNERS_HEIGHT_FIRST", normalized_coordinates=False),
    "affine": _one("affine", transform_matrix=np.array([[1, 0, 0, 0, 1, 0]], np.float16), output_height=32,
                   output_width=32, **_SAMPLING),
    "resample": (f"{X} 1x32x32x2", lambda x, at: mb.resample(x=x, coordinates=at, **_SAMPLING)),
}

_INDEXING = {
    "gather_c": _gather(1, 32, 64), "gather_w": _gather(3, 16, 32),
    "gather_dyn": ("1000x256 1x64:int32", lambda x, at: mb.gather(x=x, indices=at, axis=0)),
    "embedding": ("1x64:int32", lambda at: mb.gather(x=W(32000, 256), indices=at, axis=0)),
    "gather_along_axis": (f"{X} {X}:int32", lambda x, at: mb.gather_along_axis(x=x, indices=at, axis=3)),
    "gather_nd": (f"{X} 8x2:int32", lambda x, at: mb.gather_nd(x=x, indices=at)),
    "scatter": _scatter("scatter", "4", "1x64x32x4"), "scatter_along_axis": _scatter("scatter_along_axis", X, X),
    "topk_w": _topk(X, 4, 3), "topk_c": _topk(X, 4, 1), "topk_large": _topk("1x32000", 40, 1),
    "argsort_w": (X, lambda x: _half(mb.argsort(x=x, axis=3))),
    "nms": ("1x100x4 1x100x4", lambda boxes, scores: mb.non_maximum_suppression(
        boxes=boxes, scores=scores, iou_threshold=fp16(0.5), max_boxes=10)[0]),
    "argmax_flat": ("1x32000", lambda x: _half(mb.reduce_argmax(x=x, axis=1))),
}

_SOURCES = {
    "one_hot": ("1x64:int32", lambda at: mb.one_hot(indices=at, one_hot_vector_size=128)),
    "shape": (X, lambda x: _half(mb.shape(x=x))),
    "fill_like": (X, lambda x: mb.fill_like(ref_tensor=x, value=1.0)),
    "range_1d": ("1:int32", lambda end: _half(mb.range_1d(start=0, end=mb.squeeze(x=end), step=1))),
    "random_normal": (X, _noise),
    "nonzero": ("1x256", lambda x: _half(mb.non_zero(x=x))),
}

CASES = table(_MOVES | _RESIZES | _INDEXING | _SOURCES)
