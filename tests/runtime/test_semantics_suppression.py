"""Non-maximum suppression of every version against a plain numpy one."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.helpers import Array, run
from tests.runtime.laws import law


def overlap(a: Array, b: Array) -> float:
    """Intersection over union of two boxes (x, y, width, height), x and y in the centre."""
    low, high = np.maximum(a[:2] - a[2:] / 2, b[:2] - b[2:] / 2), np.minimum(a[:2] + a[2:] / 2, b[:2] + b[2:] / 2)
    shared = np.prod(np.maximum(high - low, 0))
    return float(shared / (a[2] * a[3] + b[2] * b[3] - shared))


def survivors(boxes: Array, scores: Array, iou: float, least: float, per_class: bool) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda each: -scores[each].max()):
        rivals = [each for each in kept if not per_class or scores[each].argmax() == scores[index].argmax()]
        if scores[index].max() >= least and all(overlap(boxes[each], boxes[index]) <= iou for each in rivals):
            kept.append(index)
    return kept


def scene(seed: int, count: int) -> tuple[Array, Array]:
    """Boxes and scores of two images; scores repeat, so that there are ties and some equal the threshold 0.5."""
    rng = np.random.default_rng(seed)
    boxes = np.concatenate([rng.integers(0, 6, (2, count, 2)), rng.integers(1, 5, (2, count, 2))], -1)
    return boxes.astype(np.float32), (rng.integers(0, 5, (2, count, 3)) / 4).astype(np.float32)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@law
@given(seed=st.integers(0, 999), count=st.integers(1, 9), room=st.integers(1, 6), per_class=st.booleans())
def test_suppression(opset: Any, seed: int, count: int, room: int, per_class: bool) -> None:
    """What is left is padded with zeros and the index -1."""
    boxes, scores = scene(seed, count)
    new = opset >= ct.target.iOS17

    def build(boxes: Any, scores: Any) -> Any:
        threshold = {} if new else {"score_threshold": 0.5}
        return mb.non_maximum_suppression(
            boxes=boxes, scores=scores, iou_threshold=0.25, max_boxes=room, per_class_suppression=per_class, **threshold
        )

    feeds = {"boxes": boxes, "scores": scores}
    if new:  # the boxes are on the last axis
        feeds = {name: np.ascontiguousarray(value.swapaxes(1, 2)) for name, value in feeds.items()}
    found = run(build, feeds, opset=opset)
    kept_boxes, kept_scores = (each.swapaxes(1, 2) if new else each for each in found[:2])
    for image in range(2):
        least = -np.inf if new else 0.5
        kept = survivors(boxes[image], scores[image], 0.25, least, per_class)[:room]
        np.testing.assert_array_equal(found[2][image], kept + [-1] * (room - len(kept)))
        np.testing.assert_array_equal(kept_boxes[image, : len(kept)], boxes[image, kept])
        np.testing.assert_array_equal(kept_scores[image, : len(kept)], scores[image, kept])
        assert not kept_boxes[image, len(kept) :].any()
        assert not kept_scores[image, len(kept) :].any()
        assert new or found[3][image] == len(kept)
