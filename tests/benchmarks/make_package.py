"""Write an .mlpackage of a given size, to time and weigh what the package layer does with large models.

Usage: python tests/benchmarks/make_package.py OUT.mlpackage [--gigabytes 1.0]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program, Var

WIDTH, LENGTH, KERNEL = 1024, 8, 4
LAYER_BYTES = 2 * WIDTH * WIDTH
SHIFT = 97  # values between the starts of two weights: odd and larger than a row's remainder, so no two are equal


class Weights:
    """Views of one random buffer: as many different weights as wanted for the memory of one."""

    def __init__(self, layers: int, seed: int) -> None:
        largest = WIDTH * WIDTH * KERNEL
        generator = np.random.default_rng(seed)
        scale = (2.0 / WIDTH) ** 0.5  # keeps the variance through a relu, however deep the chain
        self.buffer = (scale * generator.standard_normal(largest + SHIFT * (layers + 1), dtype=np.float32)).astype(
            np.float16
        )
        self.bias = np.full(WIDTH, 0.01, np.float16)
        self.taken = 0

    def __call__(self, *shape: int) -> np.ndarray:
        start = SHIFT * self.taken
        self.taken += 1
        return self.buffer[start : start + int(np.prod(shape))].reshape(shape)


def program(gigabytes: float, seed: int = 0) -> Program:
    """1x1 convolutions, one 1-D conv_transpose with a bias in the middle, then linears; a relu after each."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    layers = max(2, round(gigabytes * 1e9 / LAYER_BYTES) - KERNEL)
    weights = Weights(layers, seed)
    specs = [mb.TensorSpec(shape=(1, WIDTH, LENGTH), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def tower(x: Var) -> Var:
        for _ in range(layers // 2):
            x = mb.relu(x=mb.conv(x=x, weight=weights(WIDTH, WIDTH, 1), bias=weights.bias))
        x = mb.relu(x=_lift(mb, x, weights))
        x = mb.transpose(x=x, perm=[0, 2, 1])
        for _ in range(layers - layers // 2):
            x = mb.relu(x=mb.linear(x=x, weight=weights(WIDTH, WIDTH), bias=weights.bias))
        return mb.identity(x=x, name="output")

    return tower


def _lift(mb: Any, x: Var, weights: Weights) -> Var:
    bias = np.linspace(-0.5, 0.5, WIDTH, dtype=np.float16)
    return mb.conv_transpose(
        x=x, weight=weights(WIDTH, WIDTH, KERNEL), bias=bias, strides=[2], pad_type="custom", pad=[1, 1], name="lift"
    )


def make_package(path: str | Path, gigabytes: float = 1.0, seed: int = 0) -> Path:
    """Write the package; the passes are left out, as the program is already what they would make of it."""
    import coremltools as ct

    model = ct.convert(
        program(gigabytes, seed),
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,  # no fp16 pass: the weights are fp16 already
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return Path(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    written = make_package(options.path, options.gigabytes, options.seed)
    size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    print(f"{written}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
