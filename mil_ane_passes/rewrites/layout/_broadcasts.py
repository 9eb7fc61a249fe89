"""Binary ops that broadcast, and shapes aligned for a broadcast."""

from __future__ import annotations

__all__ = ["BROADCASTING_OPS", "pad_shape_to_rank"]

BROADCASTING_OPS = (
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
)
"Binary ops that broadcast; select is excluded, because shapes are not inferred through it."


def pad_shape_to_rank(shape: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """Return `shape` as a broadcast to `rank` reads it: with ones in front."""
    return (*(1,) * (rank - len(shape)), *shape)
