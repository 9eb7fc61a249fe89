"""Write an .mlmodel (NeuralNetwork) of a given size, to time and weigh what `upgrade` does with large models.

Usage: python -m tests.lab.benchmarks.make_network OUT.mlmodel [--gigabytes 0.5] [--bits 32]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

WIDTH = 3072


def make_network(path: str | Path, gigabytes: float = 0.5, bits: int = 32, seed: int = 0) -> Path:
    """Write a network of fully connected layers with weights of fp32 or fp16."""
    from coremltools.models import datatypes, neural_network
    from coremltools.models.utils import save_spec

    from mil_ane_passes.package import wire

    features = [("data", datatypes.Array(WIDTH))]
    builder = neural_network.NeuralNetworkBuilder(features, [("out", datatypes.Array(WIDTH))])
    generator = np.random.default_rng(seed)
    count = max(1, round(gigabytes * 1e9 / (WIDTH * WIDTH * bits // 8)))
    for at in range(count):
        layer = builder.nn_spec.layers.add(name=f"linear{at}")
        layer.input.append("data" if not at else f"value{at}")
        layer.output.append("out" if at == count - 1 else f"value{at + 1}")
        layer.innerProduct.inputChannels = layer.innerProduct.outputChannels = WIDTH
        numbers = generator.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(WIDTH**-0.5)
        field, data = (1, numbers) if bits == 32 else (2, numbers.astype(np.float16))
        layer.innerProduct.weights.MergeFromString(wire.encode_field(field, data.tobytes()))
    save_spec(builder.spec, str(path))
    return Path(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--bits", type=int, choices=(16, 32), default=32)
    options = parser.parse_args(arguments)
    written = make_network(options.path, options.gigabytes, options.bits)
    print(f"{written}: {written.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
