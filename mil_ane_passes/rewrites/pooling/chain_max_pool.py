"""Compute the maximum of a large window in steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_private_route
from ...passes.examples import build_program
from ...rules.pooling import MaxPoolKernel, OldPools
from . import _pool_windows as windows
from ._pool_windows import Pads


class ChainMaxPool(Rewrite):
    """Run a max_pool whose window is too large as a chain of smaller ones.

    why     An M4 takes windows of max_pool up to 8 wide (Core ML's message also allows 32, which was not tried), by a
            private route no side goes over 31 (29 on M1, which is not told apart: 30 and 31 stay), and iPhones of 2020
            refused 14 and strides over 2. The maximum over K elements is that over k2 neighbouring maxima of k1
            elements each, with k1 + k2 - 1 = K.
    when    A window, of fp16, that is too large for a chip looked at. What only chips up to A13 refuse is left alone
            unless no other chip is looked at. On an axis that one window covers the maximum is a reduce_max.
            A pool that has a window in the padding alone, or behind the input (ceil_mode), is left alone: what it holds
            there is not defined.
    exact   the same numbers; where zeros of both signs are the maximum, its sign may differ. The padding, which stands
            for minus infinity, is shared among the steps so that every window of each holds an element of the input;
            the last step has the stride. A stride that is unsupported becomes one of 1 and a slice that keeps each
            s-th.
    cost    Each step but the last is a pass over the input at its own size.

    before
        %y: fp16[1, 2, 16, 16] = max_pool(x=%x, kernel_sizes=[9, 9], pad_type=same)
    after
        %0: fp16[1, 2, 16, 20] = max_pool(x=%x, kernel_sizes=[1, 5], pad_type=custom, pad=[0, 0, 4, 4])
        %y: fp16[1, 2, 16, 16] = max_pool(x=%0, kernel_sizes=[9, 5], pad_type=custom, pad=[4, 4, 0, 0])
    """

    fixes = (MaxPoolKernel, OldPools)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "no rounding: the same numbers, but for the sign of a zero where zeros of both signs are the maximum"
    preset = "full"
    roots = ("max_pool",)
    evidence = (
        *collect_evidence("max-pool-width", "pool-kernel", "pool-stride"),
        cite_private_route("a pool's window ends at 29 on M1, at 31 later"),
        Community("kernel size > 13 is not supported in ANE", date="2020-07-14",
                  source="https://github.com/hollance/neural-engine/issues/1"),
    )

    always: bool = False
    "Chain pools that are unsupported only on chips up to A13 as well, whatever the target."
    max_steps: int = 16
    "The most steps one op may become."

    def match(self, op: Operation) -> Hit | Miss:
        looked_at = self.generations
        refused = windows.match_large_window(op, looked_at, self.always)
        if isinstance(refused, Miss):
            return refused
        large, pads = refused
        whole = windows.find_fully_covered_axes(op, pads)
        most = windows.find_max_window_sides(op, looked_at, self.always)
        count = max(_count_steps(op, whole, most))
        if count > self.max_steps:
            return Miss(op, f"would take {count} steps, max_steps is {self.max_steps}")
        steps = _plan_steps(op, whole, most)
        fine = windows.has_supported_strides(op, looked_at, self.always)
        return Hit(op, note=f"{large}: {_describe_steps(steps, whole)}", whole=whole, steps=steps, pads=pads, fine=fine)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, whole = hit.op, hit.whole
        x: Var = mb.reduce_max(x=op.x, axes=whole, keep_dims=True) if whole else op.x
        rest: Pads = [(0, 0) if 2 + axis in whole else pair for axis, pair in enumerate(hit.pads)]
        strides = [1 if 2 + axis in whole else stride
                   for axis, stride in enumerate(get_const_value(op.strides, [1] * len(rest)))]
        for number, sizes in enumerate(hit.steps):
            pads = [(min(before, size - 1), min(after, size - 1)) for (before, after), size in zip(rest, sizes)]
            rest = [(old[0] - new[0], old[1] - new[1]) for old, new in zip(rest, pads)]
            last = number == len(hit.steps) - 1
            how: dict[str, Any] = {"pad_type": "custom", "pad": windows.flatten_pads(pads)}
            x = mb.max_pool(x=x, kernel_sizes=sizes, strides=strides if last and hit.fine else [1] * len(sizes),
                            **(how if any(map(any, pads)) else {"pad_type": "valid"}))
        if not hit.fine and max(strides) > 1:
            x = mb.slice_by_index(x=x, begin=[0] * x.rank, end=[0] * x.rank, stride=[1, 1, *strides],
                                  end_mask=[True] * x.rank)
        return x

    def examples(self) -> Iterable[Example]:
        yield Example("9x9", lambda: _build_max_pool([9, 9]))
        yield Example(
            "one row, strided", lambda: _build_max_pool([1, 20], strides=[1, 2], pad_type="custom", pad=[0, 0, 7, 5])
        )
        yield Example(
            "more counted",
            lambda: _build_max_pool([3, 9], strides=[2, 4], pad_type="custom", pad=[1, 1, 2, 2], ceil_mode=True),
        )
        yield Example("all of one axis", lambda: _build_max_pool([3, 9], strides=[1, 9], pad_type="custom",
                                                        pad=[0, 0, 0, 1], shape=(1, 2, 16, 8)))
        yield Example("all", lambda: _build_max_pool([9, 9], pad_type="custom", pad=[0, 1, 0, 1], shape=(1, 2, 8, 8)))
        yield Example("1-D", lambda: _build_max_pool([10], pad_type="same_lower", shape=(1, 3, 30)))
        yield Example("3-D", lambda: _build_max_pool([2, 3, 9], shape=(1, 2, 3, 5, 12)))
        yield Example("a long stride", lambda: _build_max_pool([3, 3], strides=[3, 3], pad_type="valid"),
                      options={"always": True})
        yield Example("fits", lambda: _build_max_pool([9, 8]), reason="fits")
        yield Example("old chips only", lambda: _build_max_pool([3, 3], strides=[3, 3]),
                      reason="refused by A12 and A13 only; name one of them as the target")
        yield Example("too many steps", lambda: _build_max_pool([9, 9]), options={"max_steps": 1},
                      reason="would take 2 steps, max_steps is 1")
        yield Example("fp32", lambda: _build_max_pool([9, 9], dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)
        yield Example("padding alone", lambda: _build_max_pool([1, 9], pad_type="custom", pad=[0, 0, 9, 9]),
                      reason="a window may lie in the padding alone")
        yield Example("symbolic, same", lambda: _build_max_pool([9, 9], strides=[2, 2], shape=(1, 2, 16, None)),
                      reason="pad_type same pads by the input's size, which is symbolic")


def _compute_reaches(op: Operation, whole: list[int]) -> list[int]:
    """Compute how far the windows extend beyond one element, by axis."""
    return [0 if 2 + axis in whole else int(size) - 1 for axis, size in enumerate(get_const_value(op.kernel_sizes))]


def _count_steps(op: Operation, whole: list[int], most: list[int]) -> list[int]:
    """Count the windows of at most `most` elements that each axis needs."""
    return [-(-reach // (limit - 1)) for reach, limit in zip(_compute_reaches(op, whole), most)]


def _plan_steps(op: Operation, whole: list[int], most: list[int]) -> list[list[int]]:
    """Plan the windows of each step; an axis with fewer windows has them in the last steps, where the stride is."""
    parts = [[1 + reach // count + (number < reach % count) for number in range(count)]
             for reach, count in zip(_compute_reaches(op, whole), _count_steps(op, whole, most))]
    strided = any(stride > 1 and 2 + axis not in whole for axis, stride in enumerate(get_const_value(op.strides, [])))
    length = max(*map(len, parts), 1 if strided else 0) if len(parts) > 1 else max(len(parts[0]), int(strided))
    return [list(sizes) for sizes in zip(*([1] * (length - len(part)) + part for part in parts))]


def _describe_steps(steps: list[list[int]], whole: list[int]) -> str:
    reduced = [f"reduce_max over axes {', '.join(map(str, whole))}"] if whole else []
    return ", ".join(reduced + ["x".join(map(str, sizes)) for sizes in steps])


def _build_max_pool(
    sizes: list[int],
    *,
    shape: tuple[int | None, ...] = (1, 2, 16, 16),
    strides: list[int] | None = None,
    pad_type: str = "same",
    dtype: Any = types.fp16,
    **parameters: Any,
) -> Program:
    return build_program(lambda x: Builder.max_pool(x=x, kernel_sizes=sizes, strides=strides or [1] * len(sizes),
                                                    pad_type=pad_type, name="y", **parameters), dtype=dtype, x=shape)
