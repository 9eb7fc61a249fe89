"""A decoder of a billion weights: what `adapt` takes of time and memory, beside `cp -r`.

    python -m tests.lab.language_models.large OUT.mlpackage [--layers 16] [--context 512]

writes the package: a Llama of random weights (2048 wide, 32 heads, 8 for keys, a vocabulary of 32,000, one matrix for
both ends; 1.04 billion weights in 16 layers), with its cache in two states, as Apple's recipe converts one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.lab import records
from tests.lab.benchmarks.processes import run_and_measure
from tests.lab.benchmarks.rounds import describe_machine
from tests.lab.benchmarks.shapes import WeightViews

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program, Var

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY = 2048, 8192, 32, 8, 64, 32_000
LAYERS, CONTEXT, PREFILL = 16, 512, 16
RECORD = Path(__file__).parent / "record.json"
BOUNDS = {"with the check": (900.0, 12_000.0), "without": (30.0, 1_500.0)}
"The most seconds (of `without`: beyond `cp -r`) and MB that `adapt` may take on 2 cores."
COPY, CHECKED, UNCHECKED = "cp -r", "with the check", "without"


def make_decoder(layers: int = LAYERS, context: int = CONTEXT, seed: int = 0, scale: int = 1) -> Program:
    """Build the decoder; `scale` divides its widths, for tests."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    hidden, vocabulary = HIDDEN // scale, VOCABULARY // scale
    heads, groups = HEADS // scale, max(1, KEY_HEADS // scale)
    views = WeightViews.draw(max(vocabulary, INNER // scale) * hidden, 12 * layers + 2, hidden, seed)
    frequencies = 10_000.0 ** -np.linspace(0, 1, HEAD // 2, endpoint=False)
    steps, length = get_new_symbol(), get_new_symbol()
    shape = (layers, 1, groups, context, HEAD)
    entire = {"begin_mask": [False] + [True] * 4, "end_mask": [False] + [True] * 4}

    def norm(x: Var) -> Var:
        squares = mb.reduce_mean(x=mb.pow(x=x, y=np.float16(2)), axes=[-1], keep_dims=True)
        return mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=squares, y=np.float16(1e-5)), epsilon=np.float16(1e-7))),
                      y=1 + views(hidden))

    def project(x: Var, count: int) -> Var:
        made = mb.linear(x=x, weight=views(count * HEAD, hidden))
        return mb.transpose(x=mb.reshape(x=made, shape=[1, -1, count, HEAD]), perm=[0, 2, 1, 3])

    def turn(x: Var, angles: tuple[Var, Var]) -> Var:
        first, second = mb.split(x=x, num_splits=2, axis=-1)
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=-1)
        return mb.add(x=mb.mul(x=x, y=angles[0]), y=mb.mul(x=turned, y=angles[1]))

    def keep(state: Var, new: Var, layer: int, begin: Var, end: Var) -> Var:
        """Write new rows of a layer to a state; returns all rows up to the end."""
        held = mb.slice_by_index(x=mb.read_state(input=state), begin=[layer, 0, 0, 0, 0], end=[layer + 1, 0, 0, 0, 0],
                                 squeeze_mask=[True] + [False] * 4, **entire)
        places = [mb.concat(values=[np.int32([0, 0]), mb.expand_dims(x=each, axes=[0]), np.int32([0])], axis=0)
                  for each in (begin, end)]
        masks = {name: [True, True, False, True] for name in ("begin_mask", "end_mask")}
        held = mb.slice_update(x=held, update=new, begin=places[0], end=places[1], **masks)
        whole = mb.slice_update(x=mb.read_state(input=state), update=mb.expand_dims(x=held, axes=[0]),
                                begin=[layer, 0, 0, 0, 0], end=[layer + 1, 0, 0, 0, 0], **entire)
        mb.coreml_update_state(state=state, value=whole)
        return mb.slice_by_index(x=held, begin=[0, 0, 0, 0], end=places[1], begin_mask=[True] * 4,
                                 end_mask=[True, True, False, True])

    def repeat(x: Var) -> Var:
        tiled = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, heads // groups, 1, 1])
        return mb.reshape(x=tiled, shape=[1, heads, -1, HEAD])

    @mb.program(input_specs=[
        mb.TensorSpec((1, steps), dtype=types.int32), mb.TensorSpec((1, 1, steps, length), dtype=types.fp16),
        mb.StateTensorSpec(shape, dtype=types.fp16), mb.StateTensorSpec(shape, dtype=types.fp16)],
        opset_version=ct.target.iOS18)
    def program(inputIds: Var, causalMask: Var, keyCache: Var, valueCache: Var) -> Var:
        table = mb.const(val=views(vocabulary, hidden), name="embedding")
        end = mb.gather(x=mb.shape(x=causalMask), indices=3, axis=0)
        begin = mb.sub(x=end, y=mb.gather(x=mb.shape(x=inputIds), indices=1, axis=0))
        places = mb.cast(x=mb.expand_dims(x=mb.range_1d(start=begin, end=end, step=1), axes=[0, 1, 3]), dtype="fp16")
        angle = mb.mul(x=places, y=frequencies.astype(np.float16))
        angle = mb.concat(values=[angle, angle], axis=-1)
        angles = mb.cos(x=angle), mb.sin(x=angle)
        x = mb.gather(x=table, indices=inputIds, axis=0)
        for layer in range(layers):
            entered = norm(x)
            query = turn(project(entered, heads), angles)
            keys = keep(keyCache, turn(project(entered, groups), angles), layer, begin, end)
            values = keep(valueCache, project(entered, groups), layer, begin, end)
            scores = mb.mul(x=mb.matmul(x=query, y=repeat(keys), transpose_y=True), y=np.float16(HEAD**-0.5))
            weights = mb.softmax(x=mb.add(x=scores, y=causalMask), axis=-1)
            mixed = mb.transpose(x=mb.matmul(x=weights, y=repeat(values)), perm=[0, 2, 1, 3])
            mixed = mb.reshape(x=mixed, shape=[1, -1, heads * HEAD])
            x = mb.add(x=x, y=mb.linear(x=mixed, weight=views(hidden, heads * HEAD)))
            entered = norm(x)
            gate = mb.silu(x=mb.linear(x=entered, weight=views(INNER // scale, hidden)))
            wide = mb.mul(x=gate, y=mb.linear(x=entered, weight=views(INNER // scale, hidden)))
            x = mb.add(x=x, y=mb.linear(x=wide, weight=views(hidden, INNER // scale)))
        return mb.linear(x=norm(x), weight=table, name="logits")

    return program


def make_package(path: str | Path, layers: int = LAYERS, context: int = CONTEXT, scale: int = 1) -> Path:
    """Write the decoder as a package whose number of tokens and mask are flexible."""
    import coremltools as ct

    steps, length = (ct.RangeDim(1, context, default=1) for _ in range(2))
    ct.convert(
        make_decoder(layers, context, scale=scale), minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32, pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True, inputs=[
            ct.TensorType("inputIds", (1, steps), dtype=np.int32),
            ct.TensorType("causalMask", (1, 1, steps, length), dtype=np.float16)]).save(str(path))
    return Path(path)


def measure(folder: Path, layers: int = LAYERS) -> dict[str, Any]:
    """Run `cp -r` and `adapt` with and without its check, each as a process of its own; returns what is recorded."""
    run = describe_machine()
    source, target, python = folder / "source.mlpackage", folder / "adapted", sys.executable
    run_and_measure([python, "-m", "tests.lab.language_models.large", str(source), "--layers", str(layers)])
    adapt = [python, "-m", "mil_ane_passes", "adapt", str(source), "-o", str(target)]
    commands = {COPY: ["cp", "-r", str(source), str(target)], UNCHECKED: [*adapt, "--no-verify"], CHECKED: adapt}
    found = {}
    for name, command in commands.items():
        cost = run_and_measure(command)
        found[name] = {"seconds": round(cost.seconds, 2), "megabytes": round(cost.memory)}
        shutil.rmtree(target)
    return {"run": run, "layers": layers, "bytes": sum(each.stat().st_size for each in source.rglob("weight.bin")),
            "costs": found}


def is_within_bounds(name: str, record: Mapping[str, Any]) -> bool:
    seconds, megabytes = BOUNDS[name]
    copied = record["costs"][COPY]["seconds"] if name == UNCHECKED else 0.0
    cost = record["costs"][name]
    return bool(cost["seconds"] - copied <= seconds and cost["megabytes"] <= megabytes)


def format_section(record: Mapping[str, Any]) -> str:
    """Format what the page says of the last run."""
    if not record:
        return "Nothing is recorded yet."
    rows = [[COPY, f"{record['costs'][COPY]['seconds']:.1f} s", "", ""]]
    for name, (seconds, megabytes) in BOUNDS.items():
        cost = record["costs"][name]
        beyond = "" if name == CHECKED else f" beyond `{COPY}`"
        missed = "" if is_within_bounds(name, record) else ": MISSED"
        rows.append([f"`adapt{' --no-verify' if name == UNCHECKED else ''}`", f"{cost['seconds']:.0f} s",
                     f"{cost['megabytes']:,} MB", f"{seconds:.0f} s{beyond}, {megabytes:,.0f} MB{missed}"])
    run = record["run"]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    busy = "; the machine was BUSY" if run["busy"] else ""
    return (f"{record['bytes'] / 2:,.0f} weights in {record['layers']} layers, {record['bytes'] / 1e9:.2f} GB. "
            f"{run['machine']}, {run['date']}, {versions}{busy}.\n\n"
            + records.format_table(("run", "time", "most memory", "allowed"), rows))


def record_costs(page: Path, record: Mapping[str, Any]) -> None:
    """Write the record, and the section of `page` that is made of it."""
    records.write_record(RECORD, record)
    write_section(page, record)


def write_section(page: Path, record: Mapping[str, Any]) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- billion -->\n")
    _, end, after = rest.partition("<!-- end of billion -->\n")
    page.write_text(f"{before}{begin}{format_section(record)}\n{end}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.language_models.large", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    options = parser.parse_args(arguments)
    make_package(options.path, options.layers, options.context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
