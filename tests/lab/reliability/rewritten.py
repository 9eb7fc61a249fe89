"""Packages that `rewrite` wrote: of small models with every kind of contents, and of the examples of all rewrites."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types

import mil_ane_passes as ane
from mil_ane_passes.passes.contract import Rewrite
from mil_ane_passes.passes.registry import get_all_rules

from ...package.helpers import make, with_functions
from ..fuzz.fixtures import make_normal
from .widened import convert_program

FIXTURES = Path(__file__).parents[3] / "fixtures"


def make_vocoder(target: Any = ct.target.iOS16) -> Program:
    """A program that several rewrites match: a wide 1-D kernel, softplus, a cumsum and a biased transposed conv."""
    weight, up = make_normal(16, 16, 31), make_normal(16, 16, 4)

    @mb.program(input_specs=[mb.TensorSpec((1, 16, 64))], opset_version=target)
    def program(x):
        y = mb.conv(x=x, weight=weight, bias=np.ones(16, np.float32), pad_type="same", name="wide")
        y = mb.cumsum(x=mb.softplus(x=y), axis=-1, name="sum")
        return mb.conv_transpose(x=y, weight=up, bias=np.ones(16, np.float32), strides=[2], name="out")

    return program


def make_stateful() -> Program:
    """A program that sums up along time into a state."""
    @mb.program(input_specs=[mb.TensorSpec((1, 64)), mb.StateTensorSpec((1, 64), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, s):
        total = mb.cumsum(x=mb.cast(x=x, dtype="fp16"), axis=-1)
        stored = mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=total), name="stored")
        return mb.softplus(x=stored, name="out")

    return program


def make_branches() -> Program:
    """A program with a rewrite, and weights, in a branch."""
    weight = make_normal(16, 16, 31)

    @mb.program(input_specs=[mb.TensorSpec((1, 16, 64))])
    def program(x):
        many = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1, 2], keep_dims=False), y=1.0)
        return mb.cond(pred=many, _true_fn=lambda: mb.conv(x=x, weight=weight, pad_type="same"),
                       _false_fn=lambda: mb.softplus(x=x), name="out")

    return program


def _compress(path: Path, target: Any, *steps: tuple[Callable[..., Any], Any]) -> None:
    source = make(path.with_name("plain.mlpackage"), make_vocoder(target), target)
    model: Any = ct.models.MLModel(str(source), skip_model_load=True)
    for number, (compress, config) in enumerate(steps):
        joint = {"joint_compression": True} if number else {}
        model = compress(model, cto.coreml.OptimizationConfig(config), **joint)
    model.save(str(path))


def _make_functions(path: Path) -> None:
    source = make(path.with_name("single.mlpackage"), make_vocoder(ct.target.iOS18), ct.target.iOS18)
    with_functions(path, {"zeta": source, "alpha": source}, "zeta")


def _make_pipeline(path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 16, 64))])
    def first(x):
        return mb.softplus(x=x, name="middle")

    @mb.program(input_specs=[mb.TensorSpec((1, 16, 64))])
    def second(middle):
        return mb.conv(x=middle, weight=make_normal(4, 16, 31), name="out")

    parts = [make(path.with_name(f"{number}.mlpackage"), part) for number, part in enumerate((first, second))]
    ct.utils.make_pipeline(*(ct.models.MLModel(str(part), skip_model_load=True) for part in parts)).save(str(path))


_palettize = cto.coreml.palettize_weights, cto.coreml.OpPalettizerConfig("uniform", 4, weight_threshold=1)
_palettize_groups = cto.coreml.palettize_weights, cto.coreml.OpPalettizerConfig(
    "uniform", 3, granularity="per_grouped_channel", group_size=8, weight_threshold=1)
_quantize = cto.coreml.linear_quantize_weights, cto.coreml.OpLinearQuantizerConfig(weight_threshold=1)
_prune = cto.coreml.prune_weights, cto.coreml.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=1)


def _quantize_blocks(dtype: str) -> tuple[Callable[..., Any], Any]:
    return cto.coreml.linear_quantize_weights, cto.coreml.OpLinearQuantizerConfig(
        "linear", dtype=dtype, granularity="per_block", block_size=8, weight_threshold=1)


_OLD, _NEW = ct.target.iOS16, ct.target.iOS18
BUILDERS: dict[str, Callable[[Path], Any]] = {
    **{target.name: (lambda path, target=target: make(path, make_vocoder(target), target))
       for target in (ct.target.iOS15, ct.target.iOS16, ct.target.iOS17, ct.target.iOS18)},
    "float16": lambda path: make(path, make_vocoder(), _OLD, compute_precision=ct.precision.FLOAT16),
    "state": lambda path: make(path, make_stateful(), _NEW),
    "branches": lambda path: make(path, make_branches()),
    "functions": _make_functions,
    "pipeline": _make_pipeline,
    "flexible": lambda path: make(
        path, make_vocoder(), _OLD, inputs=[ct.TensorType("x", shape=(1, 16, ct.RangeDim(32, 96, 64)))]),
    "palettes16": lambda path: _compress(path, _OLD, _palettize),
    "integers16": lambda path: _compress(path, _OLD, _quantize),
    "sparse16": lambda path: _compress(path, _OLD, _prune),
    "palettes18": lambda path: _compress(path, _NEW, _palettize_groups),
    "int4": lambda path: _compress(path, _NEW, _quantize_blocks("int4")),
    "uint4": lambda path: _compress(path, _NEW, _quantize_blocks("uint4")),
    "sparse18": lambda path: _compress(path, _NEW, _prune),
    "sparse_palettes18": lambda path: _compress(path, _NEW, _prune, _palettize),
}


def write_rewritten(folder: Path, every: int = 1) -> list[Path]:
    """Write all rewritten packages into a new folder of `folder`; with `every`, of examples one of so many."""
    made = folder / "rewritten"
    made.mkdir()
    return [*write_rewritten_models(made), *write_rewritten_examples(made, every)]


def write_rewritten_models(folder: Path) -> list[Path]:
    """Make the models of `BUILDERS`, rewrite them and the fixtures with preset full, and return what changed.

    Raises AssertionError if one of `BUILDERS` is not rewritten.
    """
    written = []
    for name, build in BUILDERS.items():
        source = folder / name / "source.mlpackage"
        source.parent.mkdir()
        build(source)
        made = _rewrite(source, folder / f"{name}.mlpackage", preset="full", target="m4", max_growth=None)
        assert made, f"{name} was not rewritten"
        written += made
    for source in sorted(FIXTURES.glob("*.mlpackage")):
        written += _rewrite(source, folder / source.name, preset="full", target="m4", max_growth=None)
    return written


def write_rewritten_examples(folder: Path, every: int = 1) -> Iterator[Path]:
    """Rewrite each firing example of each rewrite, that coremltools can write as a package, by that rewrite alone.

    With `every`, of a rewrite's examples one of so many.
    """
    for name, rule in get_all_rules().items():
        if not issubclass(rule, Rewrite):
            continue
        firing = [example for example in rule().examples() if example.reason is None]
        for number, example in enumerate(firing[::every]):
            model = convert_program(example.build())
            if model is None:
                continue
            source = folder / "source.mlpackage"
            model.save(str(source))
            yield from _rewrite(source, folder / f"{name}_{number}.mlpackage", passes=[name],
                                options={name: example.options}, max_growth=None)
            shutil.rmtree(source)


def _rewrite(source: Path, path: Path, **options: Any) -> list[Path]:
    report = ane.rewrite(source, path, verify=False, **options)
    return [path] if report.status == "written" else []
