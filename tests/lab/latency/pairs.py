"""Pairs of forms that somebody timed, built as MIL programs: which one the model calls faster.

A pair that cannot be built has a reason instead: shapes that are not stated, a graph that is not published, or a
difference that is not in the program (the number of programs, buffers, the runtime).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program

from . import programs
from .rows import get_api

FIXTURE = Path(__file__).parents[3] / "fixtures" / "latency" / "pairs.tsv"
_CONV = re.compile(r"in=([\dx]+) w=([\dx]+)")
_QWEN3_14B = dict(hidden=5120, inner=17408, heads=40, groups=8, width=128)
_QWEN3_4B = dict(hidden=2560, inner=9728, heads=32, groups=8, width=128)
_QWEN3_2B = dict(hidden=2048, inner=6144, heads=16, groups=8, width=128, layers=28, vocabulary=151936)
_QWEN25_05B = dict(hidden=896, inner=4864, heads=14, groups=2, width=64, layers=24, vocabulary=151936)
_LLAMA_1B = dict(hidden=2048, inner=8192, heads=32, groups=8, width=64, layers=16)
_GPT2_MEDIUM = dict(hidden=1024, inner=4096, heads=16, groups=16, width=64, layers=24, gated=False, vocabulary=50257)
_QWEN3VL_FORMS = {"INT8 per_tensor": "int8", "INT6 g=32": "6-bit palette", "INT4 g=32 palette": "4-bit palette",
                  "INT4 g=16": "4-bit palette", "INT4 g=8": "4-bit palette", "INT4 linear per_channel": "4-bit palette"}
_RESNET_FORMS = {"fp16": "fp16", "W8A8": "w8a8", "int8 weights, fp16 act": "int8", "LUT8": "8-bit palette",
                 "LUT4": "4-bit palette", "LUT4 fp16": "4-bit palette", "W4A8": "a8w4", "LUT4 (A8W8)": "a8w4"}


@dataclass(frozen=True)
class Pair:
    """Two programs, the chip and interface of each, and how much faster the second one was."""

    id: str
    category: str
    chip: str
    first: Program
    second: Program
    apis: tuple[str, str]
    speedup: float


def make_pair(row: dict[str, str]) -> Pair | str:
    """Build the two programs of a row, or return why that cannot be done."""
    chip = re.match(r"([AM]\d+)\b", row["chip"])
    if chip is None:
        return "the chip is not stated"
    maker = _MAKERS.get(row["category"])
    try:
        made = maker(row) if maker is not None else "the difference is not in the program"
    except (AttributeError, TypeError, ValueError):
        made = "shapes not stated in a form that is read here"
    if isinstance(made, str):
        return made
    api = get_api(row["api"])
    apis = ("coreml", "private") if row["category"] == "api" else (api, api)
    return Pair(row["id"], row["category"], chip[1].lower(), *made, apis, float(row["speedup_B_over_A"]))


def _make_k_split(row):
    shapes, text = row["shapes"], row["form_A"] + row["form_B"]
    if "2048x4096" in shapes:
        return (programs.linear_chain(1, 2048, 4096), programs.linear_chain(1, 2048, 4096, inner_tile=1024))
    if "Llama-1B" in text:
        return programs.transformer(1, **_LLAMA_1B), programs.transformer(1, **_LLAMA_1B, parts=3)
    if "Qwen3-14B" in shapes:
        tiles = [int(re.search(r"kt=(\d+)", row[form])[1]) for form in ("form_A", "form_B")]
        return tuple(programs.transformer(1024, **_QWEN3_14B, layers=1, inner_tile=tile) for tile in tiles)
    rows, side = int(re.search(r"M=(\d+)", shapes)[1]), int(re.search(r"K=N=(\d+)", shapes)[1])
    layers = int(found[1]) if (found := re.search(r"L=(\d+)", shapes)) else 1
    form = programs.parse_format(shapes.split()[-1])
    tile = int(re.search(r"kt=(\d+)", row["form_B"])[1])
    return (programs.linear_chain(rows, side, side, layers=layers, form=form),
            programs.linear_chain(rows, side, side, layers=layers, form=form, inner_tile=tile))


def _make_n_split(row):
    found = re.search(r"M=(\d+) K=N=(\d+)", row["shapes"])
    tile = re.search(r"nt=(\d+)", row["form_B"])
    if found is None or tile is None:
        return "shapes not stated"
    rows, side = map(int, found.groups())
    return (programs.linear_chain(rows, side, side), programs.linear_chain(rows, side, side, outer_tile=int(tile[1])))


def _make_attention(row):
    found = re.search(r"(\d+) heads d=(\d+) S=(\d+)", row["shapes"])
    block = re.search(r"blocks of (\d+)", row["form_B"])
    if found is None or block is None:
        return "graphs of the two runtimes not published"
    heads, width, rows = map(int, found.groups())
    if int(block[1]) >= rows:
        return "one block of all keys is the same program"
    return (programs.attention_program(heads, width, rows),
            programs.attention_program(heads, width, rows, block=int(block[1])))


def _make_layout(row):
    found = [re.search(r"(\d+)x(\d+)$", row[form]) for form in ("form_A", "form_B")]
    if "8x 1x1 conv 512ch" not in row["shapes"] or None in found:
        return "graph not published"
    return tuple(programs.conv_chain((1, 512, int(each[1]), int(each[2])), (512, 512, 1, 1), layers=8, shared=True)
                 for each in found)


def _make_formats(row):
    shapes, names = row["shapes"], (row["form_A"], row["form_B"])
    if shapes.startswith("ResNet50"):
        missing = [name for name in names if not _RESNET_FORMS.get(name) and not programs.parse_format(name)]
        if missing:
            return f"format not built: {missing[0]}"
        return tuple(programs.resnet50(_RESNET_FORMS.get(name) or programs.parse_format(name)) for name in names)
    if shapes.startswith("Qwen3-VL 2B"):
        form = _QWEN3VL_FORMS.get(row["form_B"])
        if form is None or row["form_A"] != "fp16":
            return f"format not built: {row['form_B']}"
        return programs.transformer(1, **_QWEN3_2B), programs.transformer(1, **_QWEN3_2B, form=form)
    if shapes.startswith("Qwen 0.5B seq128"):
        return programs.transformer(128, **_QWEN25_05B), programs.transformer(128, **_QWEN25_05B, form="int8")
    forms = [programs.parse_format(name) for name in names]
    if None in forms:
        return f"format or graph not stated: {names[forms.index(None)]}"
    makers = [_parse_operation(row, form) for form in forms]
    return "shapes not stated" if None in makers else tuple(makers)


def _parse_operation(row, form):
    shapes, own = row["shapes"], "own weights" in row["notes"] or "slope" in row["notes"]
    number = {name: int(found[1]) for name in "LMK" if (found := re.search(rf"\b{name}=(\d+)", shapes))}
    if found := _CONV.search(shapes):
        shape, weight = (tuple(map(int, found[place].split("x"))) for place in (1, 2))
        return programs.conv_chain(shape, weight, layers=number.get("L", 16), form=form, shared=not own,
                                   dilation=2 if "dil=2" in shapes else 1)
    if found := re.match(r"(\d+)x (?:1x1 )?conv (\d+)ch (\d+)x(\d+)", shapes):
        layers, channels, height, width = map(int, found.groups())
        return programs.conv_chain((1, channels, height, width), (channels, channels, 1, 1), layers=layers, form=form,
                                   shared=True)
    if found := re.search(r"(?:(\d+)x )?linear (\d+)\^2 M=(\d+)", shapes):
        return programs.linear_chain(int(found[3]), int(found[2]), int(found[2]), layers=int(found[1] or 1), form=form)
    if found := re.search(r"linear K=(\d+) M=(\d+)", shapes):
        return programs.linear_chain(int(found[2]), int(found[1]), (1 << 24) // int(found[1]), form=form)
    if found := re.search(r"^matmul (\d+)", shapes):
        return programs.linear_chain(1, int(found[1]), int(found[1]), form=form)
    if found := re.search(r"gate(?: 2560x10240,)? (\d+) pos", shapes):
        return programs.linear_chain(int(found[1]), 2560, 10240, form=form)
    return None


def _make_kernel_transpose(row):
    found = [re.search(r"(\d+)x(\d+) conv on (\d+)x(\d+)", row[form]) for form in ("form_A", "form_B")]
    if None in found:
        return "shapes not stated"
    return tuple(programs.conv_chain((1, 256, int(each[3]), int(each[4])), (256, 256, int(each[1]), int(each[2])),
                                     layers=12, shared=True) for each in found)


def _make_linear_or_conv(row):
    if "dynamic mul+reduce" not in row["form_A"]:
        return "graph not published"
    side = int(row["shapes"].split("x")[0])

    def multiply(weight, x):
        return mb.reduce_sum(x=mb.mul(x=weight, y=x), axes=[-1])
    return programs.build([(side, side), (1, side)], multiply), programs.linear_chain(1, side, side)


def _make_work_order(row):
    if "gpt2-medium" not in row["shapes"]:
        return "graph not published"
    return programs.transformer(128, **_GPT2_MEDIUM), programs.transformer(128, **_GPT2_MEDIUM, last=1)


def _make_capacity(row):
    found = re.search(r"decode in 32K-capacity graph, N=(\d+)", row["form_A"])
    if found is None:
        return "the number of tokens a call is not stated"
    return tuple(programs.transformer(1, **_QWEN3_4B, layers=36, vocabulary=151936, context=context)
                 for context in (32768, int(found[1])))


def _make_elementwise(row):
    if "8 adds in parallel" not in row["form_A"]:
        return "graph not published"
    shape = (1, 512, 1, 128)

    def parallel(x, y):
        made = [mb.add(x=x, y=y) for _ in range(8)]
        return tuple(made)
    return programs.build([shape, shape], parallel), programs.elementwise_chain(shape, 8, "add")


def _make_api(row):
    found = re.search(r"(\d+)\^2 M=(\d+)", row["shapes"])
    if found is None:
        return "the difference is not in the program"
    side, rows = map(int, found.groups())
    return (programs.linear_chain(rows, side, side),) * 2


_MAKERS = {
    "k_split": _make_k_split, "n_split": _make_n_split, "attention_tile": _make_attention, "layout": _make_layout,
    "quant": _make_formats, "sparse": _make_formats, "palette": _make_formats,
    "kernel_transpose": _make_kernel_transpose, "linear_vs_conv": _make_linear_or_conv, "work_order": _make_work_order,
    "shape_capacity": _make_capacity, "elementwise": _make_elementwise, "api": _make_api,
}


def make_pairs(rows: Iterable[dict[str, str]], least: float = 0.1) -> tuple[list[Pair], dict[str, str]]:
    """Build the pairs that differ by more than `least`, and collect the reason for each other row."""
    pairs, reasons = [], {}
    for row in rows:
        speedup = float(row["speedup_B_over_A"])
        if max(speedup, 1 / speedup) <= 1 + least:
            reasons[row["id"]] = f"differs by no more than {100 * least:.0f} %"
            continue
        made = make_pair(row)
        if isinstance(made, str):
            reasons[row["id"]] = made
        else:
            pairs.append(made)
    return pairs, reasons
