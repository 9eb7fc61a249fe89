"""Write an .mlpackage of a given size, to time and weigh what the package layer does with large models.

Usage: python -m tests.lab.benchmarks.make_package OUT.mlpackage [--gigabytes 1.0] [--shape llm|llm-int4|tower]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.lab.benchmarks.shapes import SHAPES


def make_package(path: str | Path, gigabytes: float = 1.0, seed: int = 0, shape: str = "llm") -> Path:
    """Write the package; the passes are left out, as the program is already what they would make of it."""
    import coremltools as ct

    model = ct.convert(
        SHAPES[shape](gigabytes, seed),
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
    parser.add_argument("--shape", choices=SHAPES, default="llm")
    options = parser.parse_args(arguments)
    written = make_package(options.path, options.gigabytes, options.seed, options.shape)
    size = sum(file.stat().st_size for file in written.rglob("*") if file.is_file())
    print(f"{written}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
