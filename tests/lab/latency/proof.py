"""Known models before and after the preset full, by the latency model, beside what others measured of them.

    python -m tests.lab.latency.proof [NAME ...] [--record]

The programs have the shapes of the models, spelled as torch code converts, and placeholder weights of one element: no
bytes. `--record` writes proof.json, from which the table in mil_ane_passes/ane/README.md is made. The measurements are
of whole models that no fit has seen; nobody measured a program of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program

import mil_ane_passes as ane
from mil_ane_passes.commands.pipeline import make_forecaster
from tests.lab import records

from .programs import build, fill_weight

RECORD = Path(__file__).with_name("proof.json")
TARGETS = ("m1", "m2", "m4", "m5", "a17")


@dataclass(frozen=True)
class Proof:
    """One program on one chip: milliseconds before and after, (estimate, low, high), and the rewrites that fired."""

    model: str
    target: str
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    extrapolated: tuple[bool, bool]
    fired: dict[str, int] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """How many times faster it is."""
        return self.before[0] / self.after[0]


@dataclass(frozen=True)
class Model:
    """A program, what it is, and what others measured of the model it stands for, in milliseconds by chip."""

    name: str
    build: Callable[[], Program]
    measured: dict[str, str]


def _linear(x, outer, *, bias=True):
    more = {"bias": fill_weight((outer,))} if bias else {}
    return mb.linear(x=x, weight=fill_weight((outer, int(x.shape[-1]))), **more)


def _layer_norm(x):
    width = int(x.shape[-1])
    return mb.layer_norm(x=x, axes=[-1], gamma=np.full(width, 0.5, np.float16), beta=np.full(width, 0.5, np.float16),
                         epsilon=np.float16(1e-5))


def _rms_norm(x, axis):
    shape = [1] * x.rank
    shape[axis] = int(x.shape[axis])
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[axis], keep_dims=True)
    scaled = mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-5)), epsilon=np.float16(1e-7)))
    return mb.mul(x=scaled, y=np.full(shape, 0.5, np.float16))


def _split_heads(x, heads):
    rows, width = int(x.shape[1]), int(x.shape[2]) // heads
    return mb.transpose(x=mb.reshape(x=x, shape=[1, rows, heads, width]), perm=[0, 2, 1, 3])


def _join_heads(x):
    _, heads, rows, width = x.shape
    return mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 1, 3]), shape=[1, rows, heads * width])


def _attend(query, key, value, mask=None):
    scaled = mb.mul(x=query, y=np.float16(int(query.shape[-1]) ** -0.5))
    scores = mb.matmul(x=scaled, y=key, transpose_y=True)
    scores = scores if mask is None else mb.add(x=scores, y=mask)
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=value)


def _rotate(x, cos, sin, axis=-1):
    half = int(x.shape[axis]) // 2
    low, high = mb.split(x=x, split_sizes=[half, half], axis=axis)
    turned = mb.concat(values=[mb.mul(x=high, y=np.float16(-1)), low], axis=axis)
    return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))


def _repeat_heads(x, times):
    _, groups, rows, width = x.shape
    each = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, times, 1, 1])
    return mb.reshape(x=each, shape=[1, groups * times, rows, width])


HIDDEN, INNER, HEADS, GROUPS, WIDTH, LAYERS = 2048, 8192, 32, 8, 64, 16
"Llama-3.2-1B."


def build_llama_decode(context: int = 512) -> Program:
    """Build one step of Llama-3.2-1B as 1x1 convs, with caches of `context` positions as inputs, without its head."""
    def conv(x, outer):
        return mb.conv(x=x, weight=fill_weight((outer, int(x.shape[1]), 1, 1)))

    def body(x, cos, sin, mask, *caches):
        made = []
        for layer in range(LAYERS):
            keys, values = caches[2 * layer], caches[2 * layer + 1]
            normed = _rms_norm(x, 1)
            query, key, value = (mb.reshape(x=conv(normed, count * WIDTH), shape=[1, count, 1, WIDTH])
                                 for count in (HEADS, GROUPS, GROUPS))
            key = mb.concat(values=[keys, _rotate(key, cos, sin)], axis=2)
            value = mb.concat(values=[values, value], axis=2)
            made += [key, value]
            found = _attend(_rotate(query, cos, sin), _repeat_heads(key, HEADS // GROUPS),
                            _repeat_heads(value, HEADS // GROUPS), mask)
            x = mb.add(x=x, y=conv(mb.reshape(x=found, shape=[1, HIDDEN, 1, 1]), HIDDEN))
            normed = _rms_norm(x, 1)
            gated = mb.mul(x=mb.silu(x=conv(normed, INNER)), y=conv(normed, INNER))
            x = mb.add(x=x, y=conv(gated, HIDDEN))
        return (_rms_norm(x, 1), *made)

    small = [(1, 1, 1, WIDTH), (1, 1, 1, WIDTH), (1, 1, 1, context)]
    return build([(1, HIDDEN, 1, 1), *small, *[(1, GROUPS, context - 1, WIDTH)] * (2 * LAYERS)], body)


def build_llama_prefill(rows: int = 512) -> Program:
    """Build Llama-3.2-1B over `rows` tokens as linears, causal, up to the hidden state of the last token."""
    causal = np.triu(np.full((1, 1, rows, rows), -1e4, np.float16), 1)

    def body(x, cos, sin):
        for _ in range(LAYERS):
            normed = _rms_norm(x, 2)
            query, key, value = (_split_heads(_linear(normed, count * WIDTH, bias=False), count)
                                 for count in (HEADS, GROUPS, GROUPS))
            found = _attend(_rotate(query, cos, sin), _repeat_heads(_rotate(key, cos, sin), HEADS // GROUPS),
                            _repeat_heads(value, HEADS // GROUPS), causal)
            x = mb.add(x=x, y=_linear(_join_heads(found), HIDDEN, bias=False))
            normed = _rms_norm(x, 2)
            gated = mb.mul(x=mb.silu(x=_linear(normed, INNER, bias=False)), y=_linear(normed, INNER, bias=False))
            x = mb.add(x=x, y=_linear(gated, HIDDEN, bias=False))
        return mb.slice_by_index(x=_rms_norm(x, 2), begin=[0, rows - 1, 0], end=[1, rows, HIDDEN])

    return build([(1, rows, HIDDEN), (1, 1, rows, WIDTH), (1, 1, rows, WIDTH)], body)


def _encode(x, heads, inner, layers):
    width = int(x.shape[-1])
    for _ in range(layers):
        normed = _layer_norm(x)
        query, key, value = (_split_heads(_linear(normed, width), heads) for _ in range(3))
        x = mb.add(x=x, y=_linear(_join_heads(_attend(query, key, value)), width))
        x = mb.add(x=x, y=_linear(mb.gelu(x=_linear(_layer_norm(x), inner)), width))
    return _layer_norm(x)


def build_whisper_encoder() -> Program:
    """Build the encoder of Whisper small: 80 x 3000 mel bands, 12 layers of 768 over 1500 positions."""
    def body(mel):
        x = mb.gelu(x=mb.conv(x=mel, weight=fill_weight((768, 80, 3)), bias=fill_weight((768,)), pad_type="custom",
                              pad=[1, 1]))
        x = mb.gelu(x=mb.conv(x=x, weight=fill_weight((768, 768, 3)), bias=fill_weight((768,)), strides=[2],
                              pad_type="custom", pad=[1, 1]))
        x = mb.add(x=mb.transpose(x=x, perm=[0, 2, 1]), y=fill_weight((1, 1500, 768)))
        return _encode(x, 12, 3072, 12)

    return build((1, 80, 3000), body)


def build_vit() -> Program:
    """Build ViT-B/16 for one image of 224 x 224, with its head of 1000 classes."""
    def body(image):
        x = mb.conv(x=image, weight=fill_weight((768, 3, 16, 16)), bias=fill_weight((768,)), strides=[16, 16])
        x = mb.transpose(x=mb.reshape(x=x, shape=[1, 768, 196]), perm=[0, 2, 1])
        x = mb.add(x=mb.concat(values=[fill_weight((1, 1, 768)), x], axis=1), y=fill_weight((1, 197, 768)))
        x = _encode(x, 12, 3072, 12)
        first = mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 1, 768], squeeze_mask=[False, True, False])
        return _linear(first, 1000)

    return build((1, 3, 224, 224), body)


def _group_norm(x, side):
    """Build what coremltools makes of a group norm with 32 groups."""
    channels = int(x.shape[1])
    grouped = mb.reshape(x=x, shape=[1, 32, channels // 32, side, side])
    mean = mb.reduce_mean(x=grouped, axes=[2, 3, 4], keep_dims=True)
    centred = mb.sub(x=grouped, y=mean)
    spread = mb.sqrt(x=mb.add(x=mb.reduce_mean(x=mb.square(x=centred), axes=[2, 3, 4], keep_dims=True),
                              y=np.float16(1e-5)))
    scaled = mb.reshape(x=mb.real_div(x=centred, y=spread), shape=[1, channels, side, side])
    gamma = np.full((1, channels, 1, 1), 0.5, np.float16)
    return mb.add(x=mb.mul(x=scaled, y=gamma), y=gamma)


def build_unet_block() -> Program:
    """Build the first down block of Stable Diffusion 1.5 at 64 x 64: a residual block and a transformer block."""
    channels, side, heads = 320, 64, 8

    def conv(x, size):
        return mb.conv(x=x, weight=fill_weight((channels, channels, size, size)), bias=fill_weight((channels,)),
                       pad_type="same")

    def body(x, time, text):
        hidden = conv(mb.silu(x=_group_norm(x, side)), 3)
        hidden = mb.add(x=hidden, y=mb.reshape(x=_linear(mb.silu(x=time), channels), shape=[1, channels, 1, 1]))
        x = mb.add(x=x, y=conv(mb.silu(x=_group_norm(hidden, side)), 3))
        inner = mb.transpose(x=mb.reshape(x=conv(_group_norm(x, side), 1), shape=[1, channels, side * side]),
                             perm=[0, 2, 1])
        normed = _layer_norm(inner)
        for source in (None, text):
            source = normed if source is None else source
            query = _split_heads(_linear(normed, channels, bias=False), heads)
            key, value = (_split_heads(_linear(source, channels, bias=False), heads) for _ in range(2))
            inner = mb.add(x=inner, y=_linear(_join_heads(_attend(query, key, value)), channels))
            normed = _layer_norm(inner)
        wide, gate = mb.split(x=_linear(normed, 8 * channels), num_splits=2, axis=-1)
        inner = mb.add(x=inner, y=_linear(mb.mul(x=wide, y=mb.gelu(x=gate)), channels))
        back = mb.reshape(x=mb.transpose(x=inner, perm=[0, 2, 1]), shape=[1, channels, side, side])
        return mb.add(x=x, y=conv(back, 1))

    return build([(1, channels, side, side), (1, 1280), (1, 77, 768)], body)


MODELS = (
    Model("Llama-3.2-1B, one token, 512 in cache", build_llama_decode, {
        "m4": "76.1 -> 31.7, K split alone (kasper0406/stablehlo-coreml#110)",
        "m5": "19.9 with its head, M5 Pro, without Core ML (MidasMulli/ane-compiler)"}),
    Model("Llama-3.2-1B, 512 tokens", build_llama_prefill, {}),
    Model("Whisper small, encoder", build_whisper_encoder, {"m1": "208, M1 Pro (whisper.cpp#566)"}),
    Model("ViT-B/16", build_vit, {}),
    Model("Stable Diffusion 1.5, first block at 64 x 64", build_unet_block, {}),
)


def measure_proof(model: Model, target: str) -> Proof:
    """Rewrite the program for `target` as a user's would be, and estimate it before and after."""
    report = ane.rewrite(model.build(), preset="full", target=target, verify=False)
    spent, marked = [], []
    for each in report.predicted or [make_forecaster(target)(model.build())] * 2:
        spent.append(tuple(round(1e-3 * (value or 0.0), 3)
                           for value in (each.latency_us, each.latency_low_us, each.latency_high_us)))
        marked.append(each.latency_extrapolated)
    fired = {trace.rule: len(trace.fired) for trace in report.traces if trace.fired}
    return Proof(model.name, target, spent[0], spent[1], (marked[0], marked[1]), fired)


def read_proofs() -> list[Proof]:
    """Read the recorded rows."""
    return [Proof(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
            for row in records.read_record(RECORD, [])]


def format_time(value: Sequence[float]) -> str:
    """Format an estimate with its range, in milliseconds."""
    central, low, high = (f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in value)
    return f"{central} ({low} to {high})"


def format_proofs() -> str:
    """Format the record as a table."""
    measured = {model.name: model.measured for model in MODELS}
    rows: list[list[Any]] = []
    for each in read_proofs():
        fired = ", ".join(f"`{name}` {count}" for name, count in sorted(each.fired.items())) or "none"
        rows.append([each.model, each.target, format_time(each.before), format_time(each.after),
                     f"{each.gain:.2f}", fired, measured[each.model].get(each.target, "")])
    return records.format_table(["model", "chip", "ms before", "ms after", "times faster", "rewrites", "measured, ms"],
                                rows)


def main(arguments: Sequence[str]) -> int:
    """Print the rows, and write the record if asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.latency.proof", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of models")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--record", action="store_true")
    chosen = parser.parse_args(arguments)
    table = {(each.model, each.target): each for each in read_proofs()}
    for model in MODELS:
        if chosen.names and not model.name.startswith(tuple(chosen.names)):
            continue
        for target in chosen.target or TARGETS:
            found = table[model.name, target] = measure_proof(model, target)
            print(model.name, target, format_time(found.before), "->", format_time(found.after), found.fired,
                  flush=True)
    if chosen.record:
        order = [(model.name, target) for model in MODELS for target in TARGETS]
        rows = [json.dumps(asdict(table[key])) for key in order if key in table]
        RECORD.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
