"""Small packages that between them have all the reader knows: each as its files, by path."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ...package.helpers import make, with_functions

Files = dict[str, bytes]


def make_normal(*shape: int) -> Any:
    """The same numbers each time: a try is to be had again from its seed."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def make_conv(target: Any = ct.target.iOS15) -> Any:
    weight = make_normal(4, 2, 3, 3)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 6, 6))], opset_version=target)
    def program(x):
        y = mb.conv(x=x, weight=weight, bias=np.ones(4, np.float32), pad_type="same", name="conv")
        y = mb.reshape(x=mb.relu(x=y), shape=(1, 4, 36), name="flat")
        y = mb.transpose(x=mb.concat(values=[y, y], axis=1), perm=(0, 2, 1))
        return mb.softmax(x=y, axis=-1, name="out")

    return program


def make_conv_transpose() -> Any:
    weight = make_normal(2, 3, 4)

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 8))])
    def program(x):
        y = mb.conv_transpose(x=x, weight=weight, bias=np.ones(3, np.float32), strides=[2], name="up")
        return mb.layer_norm(x=mb.softplus(x=y), axes=[-1], epsilon=1e-5, name="out")

    return program


def make_branches() -> Any:
    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def program(x):
        total = mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False)
        many = mb.greater(x=total, y=1.0)
        y = mb.cond(
            pred=many, _true_fn=lambda: mb.add(x=x, y=1.0, name="one"),
            _false_fn=lambda: mb.cond(
                pred=many, _true_fn=lambda: mb.mul(x=x, y=2.0), _false_fn=lambda: mb.sub(x=x, y=3.0)))
        result = mb.while_loop(
            _cond=lambda a, b: mb.less(x=b, y=5),
            _body=lambda a, b: (mb.add(x=a, y=np.float32([[1, 2]])), mb.add(x=b, y=1)),
            loop_vars=(y, mb.cast(x=total, dtype="int32")))
        return mb.identity(x=result[0], name="out")

    return program


def make_lists() -> Any:
    @mb.program(input_specs=[mb.TensorSpec((3, 2))])
    def program(x):
        made = mb.make_list(init_length=3, elem_shape=(2,), dynamic_length=False)

        def body(i, held):
            return mb.add(x=i, y=1), mb.list_write(ls=held, index=i, value=mb.gather(x=x, indices=i, axis=0))

        _, made = mb.while_loop(_cond=lambda i, held: mb.less(x=i, y=3), _body=body, loop_vars=(0, made))
        return mb.list_gather(ls=made, indices=[0, 2], name="out")

    return program


def make_shapes() -> Any:
    """Ops that make much of little."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def program(x):
        filled = mb.fill(shape=mb.add(x=np.int32([1, 3]), y=np.int32([0, 1])), value=1.0)
        y = mb.tile(x=mb.mul(x=x, y=filled), reps=[2, 3])
        y = mb.pad(x=y, pad=[0, 0, 1, 1], mode="constant", constant_val=0.0)
        numbers = mb.range_1d(start=0, end=14, step=1)
        hot = mb.one_hot(indices=numbers, one_hot_vector_size=14)
        y = mb.matmul(x=y, y=mb.cast(x=hot, dtype="fp32"))
        first, second = mb.split(x=y, num_splits=2, axis=1)
        kept = mb.slice_by_index(x=mb.sub(x=first, y=second), begin=[0, 0], end=[2, 5])
        band = mb.band_part(x=np.ones((2, 5), np.float32), lower=1, upper=1)
        return mb.expand_dims(x=mb.mul(x=kept, y=band), axes=[0], name="out")

    return program


def make_state() -> Any:
    @mb.program(
        input_specs=[mb.TensorSpec((1, 4)), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
        opset_version=ct.target.iOS18)
    def program(x, s):
        v = mb.add(x=mb.read_state(input=s), y=mb.cast(x=x, dtype="fp16"), name="sum")
        v = mb.coreml_update_state(state=s, value=v, name="stored")
        return mb.mul(x=v, y=np.float16(2), name="out")

    return program


def make_linear(target: Any) -> Any:
    first, second = make_normal(32, 16), make_normal(16, 32)

    @mb.program(input_specs=[mb.TensorSpec((1, 16))], opset_version=target)
    def program(x):
        return mb.linear(x=mb.relu(x=mb.linear(x=x, weight=first, name="first")), weight=second, name="second")

    return program


def make_compressed(path: Path, target: Any, compress: Callable[..., Any], config: Any) -> None:
    source = make(path.with_name("plain.mlpackage"), make_linear(target), target)
    model = ct.models.MLModel(str(source), skip_model_load=True)
    compress(model, cto.coreml.OptimizationConfig(config)).save(str(path))


def make_classifier(path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 4, 4))])
    def program(image):
        flat = mb.reshape(x=image, shape=(1, 48))
        return mb.softmax(x=mb.linear(x=flat, weight=make_normal(3, 48)), axis=-1)

    make(path, program, classifier_config=ct.ClassifierConfig(["a", "b", "c"]),
         inputs=[ct.ImageType("image", shape=(1, 3, 4, 4), color_layout=ct.colorlayout.RGB)])


def make_functions(path: Path) -> None:
    source = make(path.with_name("single.mlpackage"), make_conv(ct.target.iOS18), ct.target.iOS18)
    with_functions(path, {"zeta": source, "alpha": source}, "zeta")


def make_pipeline(path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 16))])
    def again(second):
        return mb.linear(x=second, weight=make_normal(4, 16), name="third")

    parts = [
        make(path.with_name("a.mlpackage"), make_linear(ct.target.iOS15)),
        make(path.with_name("b.mlpackage"), again),
    ]
    models = [ct.models.MLModel(str(part), skip_model_load=True) for part in parts]
    ct.utils.make_pipeline(*models).save(str(path))


def make_flexible(path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8))])
    def program(x):
        return mb.softmax(x=mb.gelu(x=x), axis=-1, name="out")

    make(path, program, inputs=[ct.TensorType("x", shape=(1, ct.RangeDim(1, 9, 4), 8))])


_PALETTES = cto.coreml.OpPalettizerConfig
_INTEGERS = cto.coreml.OpLinearQuantizerConfig
BUILDERS: dict[str, Callable[[Path], Any]] = {
    "conv": lambda path: make(path, make_conv()),
    "conv18": lambda path: make(path, make_conv(ct.target.iOS18), ct.target.iOS18),
    "transposed": lambda path: make(path, make_conv_transpose()),
    "float16": lambda path: make(path, make_conv_transpose(), compute_precision=ct.precision.FLOAT16),
    "branches": lambda path: make(path, make_branches()),
    "lists": lambda path: make(path, make_lists()),
    "shapes": lambda path: make(path, make_shapes(), pass_pipeline=ct.PassPipeline.EMPTY),
    "state": lambda path: make(path, make_state(), ct.target.iOS18),
    "classifier": make_classifier,
    "functions": make_functions,
    "pipeline": make_pipeline,
    "flexible": make_flexible,
    "palettes16": lambda path: make_compressed(
        path, ct.target.iOS16, cto.coreml.palettize_weights, _PALETTES("uniform", 4, weight_threshold=1)),
    "integers16": lambda path: make_compressed(
        path, ct.target.iOS16, cto.coreml.linear_quantize_weights, _INTEGERS(weight_threshold=1)),
    "sparse16": lambda path: make_compressed(
        path, ct.target.iOS16, cto.coreml.prune_weights,
        cto.coreml.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=1)),
    "palettes18": lambda path: make_compressed(
        path, ct.target.iOS18, cto.coreml.palettize_weights,
        _PALETTES("uniform", 3, granularity="per_grouped_channel", group_size=8, weight_threshold=1)),
    "integers18": lambda path: make_compressed(
        path, ct.target.iOS18, cto.coreml.linear_quantize_weights,
        _INTEGERS("linear", dtype="uint4", granularity="per_block", block_size=8, weight_threshold=1)),
    "sparse18": lambda path: make_compressed(
        path, ct.target.iOS18, cto.coreml.prune_weights,
        cto.coreml.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=1)),
}


def build_fixtures(names: list[str] | None = None) -> dict[str, Files]:
    """The packages called `names` (all of them by default)."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or BUILDERS:
            path = Path(folder) / name / "source.mlpackage"
            path.parent.mkdir()
            BUILDERS[name](path)
            files = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
            found[name] = files | {"Manifest.json": _number_manifest_items(files["Manifest.json"])}
    return found


def _number_manifest_items(manifest: bytes) -> bytes:
    """A manifest whose items have numbers for names: coremltools draws new ones each time."""
    drawn_names = re.findall(rb"[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12}", manifest)
    for number, drawn in enumerate(dict.fromkeys(drawn_names)):
        manifest = manifest.replace(drawn, b"ITEM-%d" % number)
    return manifest
