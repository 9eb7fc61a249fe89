"""Random chains of the ops that coremltools' passes fuse, move or remove, with constants of many shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, Var

__all__ = ["Chain", "draw_chain"]

Array = np.ndarray[Any, Any]

_SHAPES = ((1, 4, 6, 4), (2, 4, 4, 6), (1, 3, 8), (2, 6, 4), (4, 4), (3, 6), (1, 2, 1, 8), (6, 2, 4, 2))
_TARGETS = (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18)
_MOST_ELEMENTS, _TRIES = 4000, 5


@dataclass
class Chain:
    """A drawn program, the shape of its input, and the constants that it holds, each with a copy."""

    program: Program
    shape: tuple[int, ...]
    constants: list[tuple[Array, Array]] = field(repr=False)

    def list_changed_constants(self) -> list[int]:
        """List the places of constants whose values are no longer those that were drawn."""
        return [place for place, (value, drawn) in enumerate(self.constants) if not np.array_equal(value, drawn)]


def draw_chain(seed: int) -> Chain | None:
    """Draw a program of two to five links with one or two outputs; None where pymil rejects it."""
    links = _Links(np.random.default_rng(seed))
    shape = links.pick(*_SHAPES)

    def build(x: Var) -> tuple[Var, ...]:
        values = [x]
        for _ in range(links.pick(2, 3, 3, 4, 5)):
            start = values[-1] if links.chance(0.85) else values[links.random.integers(len(values))]
            value = next((each for each in (links.draw_link(start) for _ in range(_TRIES)) if each is not start), start)
            if value.rank > 5 or np.prod(value.shape) > _MOST_ELEMENTS:
                break
            values.append(value)
        outputs = [values[-1], *([values[links.random.integers(len(values))]] if links.chance(0.25) else [])]
        return tuple(mb.identity(x=each) if each is x else each for each in dict.fromkeys(outputs))

    try:
        program = mb.program(input_specs=[mb.TensorSpec(shape=shape)], opset_version=links.pick(*_TARGETS))(build)
    except (ValueError, IndexError, TypeError):
        return None
    return Chain(program, shape, links.constants)


class _Links:
    """Draws the links of one chain; each method returns its operand where it does not fit."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.constants: list[tuple[Array, Array]] = []

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def draw_link(self, x: Var) -> Var:
        link: Callable[[Var], Var] = self.pick(
            self.combine, self.combine, self.multiply, self.convolve, self.convolve, self.convolve_and_combine,
            self.transpose_convolution, self.normalize_batch, self.activate, self.reduce, self.normalize, self.view,
            self.view, self.transpose_twice, self.pad, self.join, self.choose)
        return link(x)

    def make_array(self, shape: tuple[int, ...], positive: bool = False) -> Array:
        kind = self.pick("normal", "normal", "normal", "integer", "equal")
        value = {"normal": lambda: self.random.normal(size=shape),
                 "integer": lambda: self.random.integers(-3, 4, shape),
                 "equal": lambda: np.full(shape, self.pick(0.5, 2, -1, 0.1))}[kind]()
        array = np.asarray(np.abs(value) + 0.1 if positive else value, np.float32)
        self.constants.append((array, array.copy()))
        return array

    def make_constant(self, x: Var, positive: bool = False) -> Any:
        """Make a constant that broadcasts with `x`: a number, of its channels, of its last axis, of its shape, ...

        In some, axes of one element are larger, so that the result is larger than `x`.
        """
        shape = tuple(x.shape)
        if self.chance(0.2) and np.prod(shape) < 200:
            shape = tuple(self.pick(1, 2, 3) if size == 1 else size for size in shape)
        channels = shape[1:2] + (1,) * (x.rank - 2)
        drawn = self.make_array(self.pick(
            (), (1,), channels, (1, *channels), shape[-1:], shape,
            tuple(size if self.chance(0.5) else 1 for size in shape)), positive)
        return drawn if drawn.ndim else np.float32(drawn)

    def combine(self, x: Var) -> Var:
        name = self.pick("add", "sub", "mul", "real_div", "maximum", "minimum", "pow")
        if name == "pow":
            return mb.pow(x=mb.abs(x=x), y=np.float32(self.pick(2, 0.5, 1, 3)))
        constant = self.make_constant(x, positive=name == "real_div")
        if self.chance(0.6):
            return getattr(mb, name)(x=x, y=constant)
        return getattr(mb, name)(x=constant, y=mb.add(x=mb.abs(x=x), y=np.float32(0.5)) if name == "real_div" else x)

    def multiply(self, x: Var) -> Var:
        if x.rank < 2:
            return x
        if self.chance(0.3):
            size = self.pick(x.shape[-1], 3)
            bias = {"bias": self.make_array((size,))} if self.chance(0.6) else {}
            return self.combine(mb.linear(x=x, weight=self.make_array((size, x.shape[-1])), **bias))
        turned, transposed = self.chance(0.5), self.chance(0.5)
        if self.chance(0.4):
            size = x.shape[-1] if turned else x.shape[-2]
            rows = self.pick(size, 3)
            weight = self.make_array((size, rows) if transposed else (rows, size))
            product = mb.matmul(x=weight, y=x, transpose_x=transposed, transpose_y=turned)
        else:
            size = x.shape[-2] if turned else x.shape[-1]
            columns = self.pick(size, 3)
            weight = self.make_array((columns, size) if transposed else (size, columns))
            product = mb.matmul(x=x, y=weight, transpose_x=turned, transpose_y=transposed)
        return self.combine(product) if self.chance(0.6) else product

    def convolve(self, x: Var) -> Var:
        if x.rank not in (3, 4):
            return x
        channels, spatial = x.shape[1], x.rank - 2
        groups = self.pick(1, 1, channels)
        if self.chance(0.4):
            results = self.pick(1, 2)
            bias = {"bias": self.make_array((results * groups,))} if self.chance(0.5) else {}
            kernel = tuple(self.pick(1, 2, 3) for _ in range(spatial))
            return mb.conv_transpose(x=x, weight=self.make_array((channels, results, *kernel)), groups=groups,
                                     strides=[self.pick(1, 2) for _ in range(spatial)], **bias)
        results = groups * self.pick(1, 2, 3)
        kernel = tuple(min(self.pick(1, 2, 3), size) for size in x.shape[2:])
        bias = {"bias": self.make_array((results,))} if self.chance(0.5) else {}
        pads = self.pick({"pad_type": "valid"}, {"pad_type": "same"},
                         {"pad_type": "custom", "pad": [self.pick(0, 1) for _ in range(2 * spatial)]})
        return mb.conv(x=x, weight=self.make_array((results, channels // groups, *kernel)), groups=groups,
                       strides=[self.pick(1, 1, 2) for _ in range(spatial)], **pads, **bias)

    def convolve_and_combine(self, x: Var) -> Var:
        result = self.convolve(x)
        if result is x:
            return x
        return self.normalize_batch(result) if self.chance(0.3) else self.combine(result)

    def transpose_convolution(self, x: Var) -> Var:
        result = self.convolve(x)
        return x if result is x else self.combine(mb.transpose(x=result, perm=self.make_order(result)))

    def normalize_batch(self, x: Var) -> Var:
        if x.rank not in (3, 4):
            return x
        size = x.shape[1:2]
        scaled = dict(gamma=self.make_array(size), beta=self.make_array(size)) if self.chance(0.6) else {}
        return mb.batch_norm(x=x, mean=self.make_array(size), variance=self.make_array(size, positive=True), **scaled)

    def activate(self, x: Var) -> Var:
        kind = self.pick("relu", "relu6", "tanh", "sigmoid", "leaky", "as leaky", "as prelu", "as gelu", "two relus")
        if kind == "two relus":
            return mb.relu(x=mb.relu(x=x))
        if kind == "leaky":
            return mb.leaky_relu(x=x, alpha=np.float32(self.pick(0.1, 2, -0.5, 0, 1)))
        if kind == "as leaky":
            scaled = mb.mul(x=x, y=self.pick(np.float32(0.3), np.float32(1.5), np.float32(-0.4), self.make_constant(x)))
            return self.pick(mb.maximum, mb.maximum, mb.minimum)(x=scaled, y=x)
        if kind == "as prelu" and x.rank >= 3:
            slopes = self.make_array((x.shape[1],) + (1,) * (x.rank - 2))
            negative = mb.relu(x=mb.mul(x=x, y=np.float32(self.pick(-1, -1, -2))))
            return mb.add(x=mb.relu(x=x), y=mb.mul(x=negative, y=slopes))
        if kind == "as gelu":
            inner = mb.add(x=mb.erf(x=mb.real_div(x=x, y=np.float32(self.pick(2 ** 0.5, 2 ** 0.5, 2)))),
                           y=np.float32(self.pick(1, 1, 1.1)))
            return mb.mul(x=mb.mul(x=x, y=np.float32(self.pick(0.5, 0.5, 0.6))), y=inner)
        return getattr(mb, kind if kind in ("relu6", "tanh", "sigmoid") else "relu")(x=x)

    def reduce(self, x: Var) -> Var:
        if x.rank < 2:
            return x
        axes = sorted({int(self.random.integers(x.rank)) for _ in range(self.pick(1, 2))})
        keeps = self.chance(0.7) or len(axes) >= x.rank - 1
        count = np.float32(np.prod([x.shape[axis] for axis in axes]) * self.pick(1, 1, 2))
        total = mb.reduce_sum(x=x, axes=axes, keep_dims=keeps)
        return self.pick(lambda: mb.reduce_mean(x=x, axes=axes, keep_dims=keeps),
                         lambda: mb.reduce_max(x=x, axes=axes, keep_dims=keeps),
                         lambda: mb.mul(x=total, y=1 / count), lambda: mb.real_div(x=total, y=count))()

    def normalize(self, x: Var) -> Var:
        axes = self.pick([-1], [1], [-2, -1], [1, 2], [0])
        if x.rank < 2 or max(map(abs, axes)) > x.rank - (axes[0] >= 0):
            return x
        mean = mb.reduce_mean(x=x, axes=axes, keep_dims=True)
        centered = mb.sub(x=x, y=mean) if self.chance(0.85) else mb.sub(x=mean, y=x)
        square = self.pick(lambda: mb.square(x=centered), lambda: mb.mul(x=centered, y=centered),
                           lambda: mb.pow(x=centered, y=np.float32(2)))()
        variance = mb.reduce_mean(x=square, axes=self.pick(axes, axes, axes, [-1]), keep_dims=True)
        shifted = mb.add(x=variance, y=np.float32(self.pick(1e-5, 1e-3, 0.5)))
        result = self.pick(
            lambda: mb.mul(x=centered, y=mb.rsqrt(x=shifted, epsilon=np.float32(self.pick(1e-12, 1e-12, 0.1)))),
            lambda: mb.real_div(x=centered, y=mb.sqrt(x=shifted)),
            lambda: mb.mul(x=centered, y=mb.pow(x=shifted, y=np.float32(-0.5))))()
        first, second = self.pick(("mul", "add"), ("add", "mul"), ("", ""))
        for name in filter(None, (first, second)):
            result = getattr(mb, name)(x=result, y=self.make_constant(x))
        return result

    def make_order(self, x: Var) -> list[int]:
        return [int(axis) for axis in self.random.permutation(x.rank)]

    def view(self, x: Var) -> Var:
        kind = self.pick("reshape", "transpose", "squeeze", "expand", "two reshapes", "expand and squeeze", "blocks")
        if kind == "transpose":
            return mb.transpose(x=x, perm=self.make_order(x))
        if kind == "expand" and x.rank < 4:
            return mb.expand_dims(x=x, axes=[int(self.random.integers(x.rank + 1))])
        if kind == "squeeze" and 1 in x.shape and x.rank > 2:
            return mb.squeeze(x=x, axes=[x.shape.index(1)])
        if kind == "expand and squeeze" and x.rank < 4:
            expanded = self.activate(mb.expand_dims(x=x, axes=[int(self.random.integers(x.rank + 1))]))
            return mb.squeeze(x=expanded, axes=[expanded.shape.index(1)])
        if kind == "blocks" and x.rank == 4 and all(size % 2 == 0 for size in x.shape[1:]):
            sizes = [x.shape[0], *(part for size in x.shape[1:] for part in (2, size // 2))]
            blocks = mb.reshape(x=x, shape=sizes)
            return mb.reshape(x=mb.transpose(x=blocks, perm=self.make_order(blocks)), shape=list(x.shape))
        if kind in ("reshape", "two reshapes"):
            sizes = [int(np.prod(x.shape))]
            for factor in (2, 3, 2):
                if sizes[-1] % factor == 0 and self.chance(0.6):
                    sizes[-1:] = [factor, sizes[-1] // factor]
            reshaped = mb.reshape(x=x, shape=sizes)
            return reshaped if kind == "reshape" else mb.reshape(x=reshaped, shape=list(x.shape))
        return x

    def transpose_twice(self, x: Var) -> Var:
        inner = mb.transpose(x=x, perm=self.make_order(x))
        inner = self.pick(self.activate, self.combine, lambda each: each)(inner)
        return mb.transpose(x=inner, perm=self.make_order(inner))

    def pad(self, x: Var) -> Var:
        if x.rank < 3:
            return x
        modes = ["constant", *(["reflect", "replicate"] if min(x.shape[-2:]) > 1 else [])]
        for _ in range(self.pick(1, 2)):
            x = mb.pad(x=x, pad=[self.pick(0, 1) for _ in range(4)], mode=self.pick(*modes),
                       constant_val=np.float32(self.pick(0, 0, 1)))
        return self.convolve(x) if self.chance(0.5) else x

    def join(self, x: Var) -> Var:
        axis, other = int(self.random.integers(x.rank)), self.activate(x)
        kind = self.pick("concat", "interleave", "split", "ends", "stack and split", "stack and reshape")
        if kind == "split" and x.shape[axis] % 2 == 0:
            first, second = mb.split(x=x, num_splits=2, axis=axis)
            return mb.mul(x=first, y=mb.sigmoid(x=second))
        if kind == "ends" and x.rank >= 3 and x.shape[-1] >= 3:
            places = [self.pick(0, 1), x.shape[-1] - self.pick(1, 2)]
            left, right = (mb.slice_by_size(x=x, begin=[0] * (x.rank - 1) + [place], size=[-1] * (x.rank - 1) + [1])
                           for place in places)
            return mb.concat(values=[left, x, right], axis=x.rank - 1)
        if kind == "stack and split":
            first, second = mb.split(x=mb.stack(values=[x, other], axis=axis), num_splits=2, axis=axis)
            return mb.sub(x=first, y=second)
        if kind == "stack and reshape" and x.rank < 5:
            sizes = [size * (2 if place == axis else 1) for place, size in enumerate(x.shape)]
            return mb.reshape(x=mb.stack(values=[x, other], axis=self.pick(axis, axis + 1)), shape=sizes)
        return mb.concat(values=[x, other], axis=axis, interleave=kind == "interleave")

    def choose(self, x: Var) -> Var:
        kind = self.pick("select", "infinity", "casts", "one hot")
        if kind == "casts":
            for dtype in (self.pick("int32", "fp16", "fp32", "bool"), self.pick("int32", "fp32", "fp16"), "fp32"):
                x = mb.cast(x=x, dtype=dtype)
            return x
        if kind == "one hot" and x.rank <= 3:
            places = mb.cast(x=mb.mod(x=mb.round(x=mb.abs(x=x)), y=np.float32(3)), dtype="int32")
            chosen = mb.one_hot(indices=places, one_hot_vector_size=3, axis=-1, on_value=np.float32(self.pick(1, 1, 2)),
                                off_value=np.float32(self.pick(0, 0, 0.5)))
            return mb.matmul(x=chosen, y=self.make_array((3, 4)))
        condition = np.asarray(self.make_constant(x) > 0)
        condition = condition if condition.ndim else np.bool_(condition)
        if kind == "infinity":
            hidden = np.full(np.shape(condition), -np.inf, np.float32) if np.ndim(condition) else np.float32(-np.inf)
            return mb.softmax(x=mb.select(cond=condition, a=hidden, b=x), axis=-1)
        return mb.select(cond=condition, a=self.make_constant(x), b=x)
