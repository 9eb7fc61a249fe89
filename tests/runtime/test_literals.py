"""Values written out in coremltools' own op tests and op documentation."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import mil_list

from tests.runtime.helpers import close, draw, run

DATA = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
IMAGE = np.arange(1, 17, dtype=np.float32).reshape(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("add", [[9, 11, 13], [9, 11, 13]]),
        ("update", [[8, 9, 10], [5, 6, 7]]),
        ("sub", [[-7, -7, -7], [-1, -1, -1]]),
        ("mul", [[8, 18, 30], [20, 30, 42]]),
    ],
)
def test_scatter(mode: str, expected: list[list[float]]) -> None:
    def build(data: Any, updates: Any) -> Any:
        return mb.scatter(data=data, indices=np.array([1, 0], np.int32), updates=updates, axis=0, mode=mode)

    updates = np.array([[5, 6, 7], [8, 9, 10]], np.float32)
    close(run(build, {"data": DATA, "updates": updates})[0], expected)


def test_scatter_nd_and_gather_nd() -> None:
    indices, updates = np.array([[1, 0], [0, 2]], np.int32), np.array([5, 10], np.float32)

    def build(x: Any, updates: Any) -> Any:
        return (
            mb.scatter_nd(data=x, indices=indices, updates=updates, mode="add"),
            mb.gather_nd(x=x, indices=np.array([[0], [1]], np.int32), batch_dims=1),
            mb.gather_nd(x=x, indices=indices),
        )

    added, batched, plain = run(build, {"x": DATA, "updates": updates})
    close(added, [[1, 2, 13], [9, 5, 6]])
    close(batched, [1, 5])
    close(plain, [4, 3])


def test_the_last_of_several_updates_wins() -> None:
    def build(x: Any) -> Any:
        return mb.scatter(
            data=x, indices=np.array([0, 0], np.int32), updates=DATA + 10, axis=0, mode="update"
        )

    close(run(build, {"x": DATA})[0], [[14, 15, 16], [4, 5, 6]])


def test_one_hot() -> None:
    def build(x: Any) -> Any:
        return mb.one_hot(indices=x, one_hot_vector_size=3, axis=0, on_value=2, off_value=-1)

    close(run(build, {"x": np.array([1, 0, 7], np.int32)})[0], [[-1, 2, -1], [2, -1, -1], [-1, -1, -1]])


def test_exclusive_cumsum() -> None:
    def build(x: Any) -> Any:
        return mb.cumsum(x=x, axis=1, exclusive=True), mb.cumsum(x=x, axis=1, exclusive=True, reverse=True)

    forward, backward = run(build, {"x": DATA})
    close(forward, [[0, 1, 3], [0, 4, 9]])
    close(backward, [[5, 3, 0], [11, 6, 0]])


def test_interleaved_concat() -> None:
    first, second = np.array([[1, 2], [3, 4], [5, 6]], np.float32), np.array([[7, 8], [9, 10], [11, 12]], np.float32)
    found = run(lambda x, y: mb.concat(values=[x, y], axis=0, interleave=True), {"x": first, "y": second})[0]
    close(found, [[1, 2], [7, 8], [3, 4], [9, 10], [5, 6], [11, 12]])


def test_reverse_sequence() -> None:
    x = np.arange(1, 13, dtype=np.float32).reshape(3, 4)

    def build(x: Any) -> Any:
        return mb.reverse_sequence(x=x, lengths=np.array([0, 2, 4], np.int32), seq_axis=1, batch_axis=0)

    close(run(build, {"x": x})[0], [[1, 2, 3, 4], [6, 5, 7, 8], [12, 11, 10, 9]])


def test_space_to_batch_and_back() -> None:
    x = draw(0, 2, 1, 2, 4)

    def build(x: Any) -> Any:
        spread = mb.space_to_batch(x=x, block_shape=[2, 2], paddings=[[0, 0], [2, 0]])
        return spread, mb.batch_to_space(x=spread, block_shape=[2, 2], crops=[[0, 0], [2, 0]])

    spread, back = run(build, {"x": x})
    assert spread.shape == (8, 1, 1, 3)
    close(spread[2:4, 0, 0], np.pad(x, ((0, 0), (0, 0), (0, 0), (2, 0)))[:, 0, 0, 1::2])
    close(back, x)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("STRICT_ALIGN_CORNERS", [0, 0.25, 0.5, 0.75, 1]),
        ("DEFAULT", [0, 0.4, 0.8, 1, 1]),
        ("OFFSET_CORNERS", [0.1, 0.3, 0.5, 0.7, 0.9]),
        ("UNALIGN_CORNERS", [0, 0.1, 0.5, 0.9, 1]),
    ],
)
def test_resize_bilinear(mode: str, expected: list[float]) -> None:
    x = np.array([0, 1], np.float32).reshape(1, 1, 2)

    def build(x: Any) -> Any:
        return (
            mb.resize_bilinear(x=x, target_size_height=1, target_size_width=5, sampling_mode=mode),
            mb.resize(x=x, shape=[1, 0, 5], resized_dims=np.uint32(2), sampling_mode=mode),
        )

    for found in run(build, {"x": x}):
        close(found, [[expected]])


def test_resize_nearest_neighbor() -> None:
    x = np.array([-6.174, 9.371], np.float32).reshape(1, 1, 1, 2, 1)

    def build(x: Any) -> Any:
        return mb.resize(x=x, shape=[1, 1, 3, 2], resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR")

    close(run(build, {"x": x})[0].ravel(), [-6.174, -6.174, 9.371, 9.371, 9.371, 9.371])
    x = np.array([1.5, -2.5, 3.5], np.float32).reshape(1, 1, 1, 3)

    def upsampled(x: Any) -> Any:
        return mb.upsample_nearest_neighbor(x=x, scale_factor_height=3.17, scale_factor_width=0.67)

    close(run(upsampled, {"x": x})[0], np.tile(np.array([1.5, -2.5], np.float32), (1, 1, 3, 1)))


def test_crop_resize() -> None:
    def build(x: Any) -> Any:
        return mb.crop_resize(
            x=x, boxes=np.array([[0.1, 0.3, 1.3, 1.0], [0.5, 1.8, 1.0, 0.3], [0.0, 0.4, 0.6, 0.7]], np.float32),
            box_indices=np.zeros(3, np.int32), target_width=2, target_height=2, normalized_coordinates=True,
            sampling_mode="ALIGN_CORNERS", pad_value=10.0,
        )  # fmt: skip

    expected = [3.1, 5.2, 10.0, 10.0, 10.0, 7.9, 10.0, 13.9, 2.2, 3.1, 9.4, 10.3]
    close(run(build, {"x": IMAGE})[0].ravel(), expected)

    def regions(x: Any) -> Any:
        roi = np.array([1, 1, 2, 2], np.float32).reshape(1, 1, 4, 1, 1)
        return mb.crop_resize(x=x, roi=roi, target_width=1, target_height=1, sampling_mode="ALIGN_CORNERS")

    close(run(regions, {"x": IMAGE}, opset=ct.target.iOS15)[0], np.full((1, 1, 1, 1, 1), 8.5))


def test_affine() -> None:
    x = np.array([11.0, 22.0, 33.0, 44.0], np.float32).reshape(1, 1, 2, 2)
    matrix = np.array([[-1.0, -2.0, -3.7, -1.0, 3.5, 1.2]], np.float32)

    def build(x: Any, matrix: Any) -> Any:
        return mb.affine(
            x=x, transform_matrix=matrix, output_height=2, output_width=5, sampling_mode="bilinear",
            padding_mode="constant", padding_value=0.0, coordinates_mode="normalized_minus_one_to_one",
            align_corners=True,
        )  # fmt: skip

    expected = [10.752501, 5.94, 2.5025, 0.44000006, 0, 0, 0, 0, 0, 0]
    close(run(build, {"x": x, "matrix": matrix})[0].ravel(), expected)


def test_non_maximum_suppression() -> None:
    boxes = np.array([[[5, 5, 4, 4], [5.2, 5, 4, 4], [20, 20, 2, 2]]], np.float32)
    scores = np.array([[[0.6], [0.9], [0.3]]], np.float32)

    def build(boxes: Any, scores: Any) -> Any:
        return mb.non_maximum_suppression(
            boxes=boxes, scores=scores, iou_threshold=0.5, score_threshold=0.1, max_boxes=3
        )

    kept, best, indices, count = run(build, {"boxes": boxes, "scores": scores}, opset=ct.target.iOS15)
    close(kept, [[boxes[0, 1], boxes[0, 2], [0, 0, 0, 0]]])
    close(best, [[[0.9], [0.3], [0]]])
    np.testing.assert_array_equal(indices, [[1, 2, -1]])
    np.testing.assert_array_equal(count, [2])


def test_classify() -> None:
    def build(x: Any) -> Any:
        labels = mb.const(val=mil_list(["cat", "dog"]))
        return mb.classify(probabilities=x, classes=labels)

    label, probabilities = run(build, {"x": np.array([0.25, 0.75], np.float32)})
    assert label == "dog"
    assert probabilities == {"cat": 0.25, "dog": 0.75}


@pytest.mark.parametrize("name", ["random_uniform", "random_normal", "random_bernoulli"])
def test_random_numbers_are_reproducible(name: str) -> None:
    def build(x: Any) -> Any:
        return getattr(mb, name)(shape=[2000], seed=3), getattr(mb, name)(shape=[2000], seed=4)

    first, other = run(build, {"x": DATA})
    again, _ = run(build, {"x": DATA})
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    mean = {"random_uniform": 0.5, "random_normal": 0.0, "random_bernoulli": 0.5}[name]
    assert abs(first.mean() - mean) < 0.1


def test_random_categorical_draws_the_probable() -> None:
    def build(x: Any) -> Any:
        return mb.random_categorical(x=x, mode="probs", size=50, seed=1)

    found = run(build, {"x": np.array([[0.0, 1.0, 0.0]], np.float32)})[0]
    np.testing.assert_array_equal(found, np.ones((1, 50)))
