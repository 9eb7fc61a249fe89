"""Programs with all that can be at a border between fp16 and fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types

from tests.package.helpers import normal


def made(body: Callable[..., Any], dtype: Any = types.fp32, inputs: int = 1, opset: Any = ct.target.iOS17) -> Program:
    """A program of `body` over inputs x, y, ... of (2, 4)."""
    specs = [mb.TensorSpec((2, 4), dtype=dtype) for _ in range(inputs)]
    two = (lambda x, y: body(x, y)) if inputs == 2 else (lambda x: body(x))
    return mb.program(input_specs=specs, opset_version=opset)(two)


def half(value: Any, name: str | None = None) -> Any:
    return mb.cast(x=value, dtype="fp16", **({"name": name} if name else {}))


def single(value: Any, name: str) -> Any:
    return mb.cast(x=value, dtype="fp32", name=name)


def bare(x: Any) -> Any:
    return single(mb.relu(x=half(x)), "out")


def inside(x: Any) -> Any:
    return mb.mul(x=mb.add(x=x, y=np.float32(0.1)), y=x, name="out")


def mixed(x: Any) -> Any:
    """Read as fp16, as fp32 and as integers; what is returned is read inside too."""
    low = mb.relu(x=half(x))
    out = single(low, "out")
    whole = mb.cast(x=x, dtype="int32")
    count = mb.mul(x=whole, y=2, name="count")
    return out, mb.add(x=mb.sub(x=out, y=x), y=np.float32(1), name="more"), count


def twice(x: Any) -> Any:
    """One fp16 value returned twice, and one that is also the input."""
    low = half(x)
    kept = mb.relu(x=low)
    return single(kept, "first"), single(kept, "second"), single(low, "third")


def nested(x: Any) -> Any:
    """Branches that capture the input and its cast."""
    low = half(x, "low")
    chosen = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float32(0))
    found = mb.cond(pred=chosen, _true_fn=lambda: mb.add(x=single(low, "wide"), y=x),
                    _false_fn=lambda: single(mb.add(x=low, y=half(x)), "narrow"))
    return mb.sub(x=found, y=x, name="out")


def joined(x: Any, y: Any) -> Any:
    return mb.concat(values=(x, y, x), axis=1, name="out"), mb.shape(x=y, name="shape")


def layers(x: Any) -> Any:
    weight = normal(4, 4).astype(np.float16)
    return single(mb.linear(x=mb.relu(x=mb.linear(x=half(x), weight=weight)), weight=weight), "out")


PROGRAMS: dict[str, Callable[[], Program]] = {
    "bare": lambda: made(bare),
    "inside": lambda: made(inside),
    "mixed": lambda: made(mixed),
    "twice": lambda: made(twice),
    "nested": lambda: made(nested),
    "joined": lambda: made(joined, inputs=2),
    "layers": lambda: made(layers),
}
