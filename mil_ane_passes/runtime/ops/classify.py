"""The kernel of `classify`."""

from __future__ import annotations

from typing import Any

from ..registry import register_kernel


@register_kernel("classify")
def classify(op: Any, ins: Any) -> tuple[Any, dict[Any, float]]:
    """Return the label of the most probable class, and the probability of each class."""
    probabilities = ins["probabilities"].reshape(-1).tolist()
    classes = getattr(ins["classes"], "ls", ins["classes"])
    classes = [each.item() if hasattr(each, "item") else each for each in classes]
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return classes[best], dict(zip(classes, probabilities))
