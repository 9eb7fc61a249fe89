"""Measurements as cases for the model: the work of one call, and the time that was measured.

A row whose shapes are not stated, or that is an end-to-end figure of a model whose graph is not published, has a reason
instead of a case. A row that ran on the CPU is not a measurement of the ANE.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from coremltools.converters.mil.mil import Program

from mil_ane_passes.ane.latency import list_interface_bytes
from mil_ane_passes.ane.latency_terms import Work, describe_work
from mil_ane_passes.ane.sizes import Sizes

from . import programs

FIXTURE = Path(__file__).parents[3] / "fixtures" / "latency" / "measurements.tsv"
CHIPS = (("M1", "m1"), ("M2", "m2"), ("M3", "m3"), ("M4", "m4"), ("M5", "m5"), ("M6", "m6"))
_SHAPES = re.compile(r"(?:(\d+)\*)?in=(?:(\d+)\*)?([\dx]+)(?: w=([\dx]+))?")
_FLOORS = ("dispatch floor", "call floor", "tiny model floor")


@dataclass(frozen=True)
class Case:
    """One row that the model predicts.

    `works` are those of one layer, run `layers` times; `own`: each layer has a weight of its own. `slope`: the value is
    the time of one more layer. `group` is what is held out together: the file, chip and kind.
    """

    id: str
    group: str
    chip: str
    api: str
    kind: str
    works: tuple[Work, ...]
    layers: int
    own: bool
    io_bytes: int
    slope: bool
    value_us: float
    licence: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def get_chip(text: str) -> str | None:
    """Return the generation of a chip as a table spells it ("M5 Pro"), None for one that is not stated."""
    return next((chip for name, chip in CHIPS if re.match(rf"{name}\b", text)), None)


def get_api(text: str) -> str:
    """Return the interface of a table's api column."""
    return "coreml" if text.startswith("CoreML") else "coreai" if text.startswith("CoreAI") else "private"


def describe_program(program: Program) -> tuple[tuple[Work, ...], int]:
    """Describe the works of a program's main function, and the bytes of its inputs and outputs."""
    function = program.functions["main"]
    works = tuple(describe_work(op, Sizes()) for op in function.operations if op.op_type != "const")
    return works, sum(list_interface_bytes(function, Sizes()))


@functools.lru_cache(maxsize=None)
def _describe_conv(shape, weight, form, dilation):
    return describe_program(programs.conv_chain(shape, weight, form=form, dilation=dilation))


@functools.lru_cache(maxsize=None)
def _describe_linear(rows, inner, outer, form, inner_tile=0, outer_tile=0):
    return describe_program(programs.linear_chain(rows, inner, outer, form=form, inner_tile=inner_tile,
                                                  outer_tile=outer_tile))


def make_case(row: dict[str, str]) -> Case | str:
    """Make the case of a row, or return why there is none."""
    chip = get_chip(row["chip"])
    if "RAN ON CPU" in row["notes"] or "engines=0" in row["notes"]:
        return "ran on the CPU"
    if "left the ANE" in row["notes"]:
        return "left the ANE"
    if chip is None:
        return "chip without op-level rows" if re.match(r"A\d|iP", row["chip"]) else "chip not stated"
    try:
        made = _make_works(row)
    except (AttributeError, TypeError, ValueError):
        return "shapes not stated in a form that is read here"
    if isinstance(made, str):
        return made
    kind, works, io_bytes, layers = made
    value = _convert_value(row, works, layers)
    if value is None:
        return f"value is not a time ({row['metric']})"
    source = row["source"].split(" ")[0].removeprefix("751K/Apple-Neural-Engine-Microarchitecture-Study-M6:")
    group = f"{source}|{row['chip']}|{kind}"
    return Case(row["id"], group, chip, get_api(row["api"]), kind, works, layers,
                "own weights" in row["notes"] or kind == "linear", io_bytes, "slope" in row["repeat"], value,
                row["licence"])


def _make_works(row):
    op = row["op"]
    if op in _FLOORS:
        return "floor", (), 0, 1
    form = programs.parse_format(row["dtype"])
    if op.startswith(("conv chain", "conv single", "conv 3x3", "conv 1x1")) and "w=" in row["shapes"]:
        return _read_conv(row, form)
    if op.startswith("linear") and "in=" in row["shapes"]:
        return _read_linear(row, form)
    if "elementwise chain" in op or "alternating" in op:
        return _read_elementwise(row)
    return _read_special(row, form)


def _read_conv(row, form):
    found = _SHAPES.match(row["shapes"])
    if found is None:
        return "input shape not stated"
    if form is None:
        return f"format not built: {row['dtype']}"
    shape, weight = (tuple(map(int, found[place].split("x"))) for place in (3, 4))
    if len(shape) != 4 or len(weight) != 4:
        return "not a conv shape"
    dilation = 2 if "dil=2" in row["shapes"] else 1
    works, io_bytes = _describe_conv(shape, weight, form, dilation)
    return "conv", works, io_bytes, _parse_layers(row)


def _read_linear(row, form):
    found = _SHAPES.match(row["shapes"])
    if form is None:
        return f"format not built: {row['dtype']}"
    (rows, inner), (_, outer) = (tuple(map(int, found[place].split("x"))) for place in (3, 4))
    tiles = {name: int(value) for name, value in re.findall(r"\b(kt|nt)=(\d+)", row["shapes"])}
    works, io_bytes = _describe_linear(rows, inner, outer, form, tiles.get("kt", 0), tiles.get("nt", 0))
    return "linear", works, io_bytes, _parse_layers(row)


def _read_elementwise(row):
    shape = tuple(map(int, row["shapes"].removeprefix("in=").split("x")))
    single = row["op"].startswith("single")
    op = "mul" if "x*y" in row["op"] or single else "add"
    works, io_bytes = describe_program(programs.elementwise_chain(shape, 1, op, operand=not single))
    works = tuple(replace(work, kind="single" if single else "pair") for work in works)
    return "elementwise", works, 0 if "busy" in row["notes"] else io_bytes, _parse_layers(row)


def _read_special(row, form):
    op, shapes = row["op"], row["shapes"]
    found = _SHAPES.match(shapes)
    shape = tuple(map(int, found[3].split("x"))) if found else ()
    if op.startswith("sum of"):
        program = programs.sum_of_inputs(int(found[2] or found[1] or 1), shape, convs=4)
    elif op in ("a+b", "a*b", "a+b+c", "a+b+c+d", "x*1.5", "mul_const", "add2") and len(shape) == 4:
        program = programs.sum_of_inputs({"x*1.5": 1, "mul_const": 1, "add2": 2}.get(op, len(op) // 2 + 1), shape)
    elif op == "x+x (one tensor read twice)":
        program = programs.elementwise_chain(shape, 1, "add")
    elif op == "softmax":
        heads, (height, width) = int(shapes.split()[0][6:]), map(int, shapes.split("in=")[1].split("x"))
        program = programs.softmax_program((heads, height, width))
    elif op in ("causal attention", "attention core", "QK^T (two activations)"):
        heads, width, rows = (int(re.search(rf"{name}=(\d+)", shapes)[1]) for name in ("heads", "d", "M"))
        block = re.search(r"keyblock=(\d+)", shapes)
        program = programs.attention_program(heads, width, rows, block=int(block[1]) if block else 0,
                                             softmax=not op.startswith("QK"), values=not op.startswith("QK"))
    elif op.startswith("gate linear") and "positions" in op:
        rows = int(re.search(r"(\d+) positions", op)[1])
        if form is None:
            return f"format not built: {row['dtype']}"
        works, io_bytes = _describe_linear(rows, 2560, 10240, form)
        return "linear", works, io_bytes, 1
    elif op == "MLP pair stack, 1 token":
        works, io_bytes = describe_program(programs.build((1, 2560), lambda x: programs._add_linear(
            programs._add_linear(x, 2560, 9216, "fp16", 2560, 9216), 9216, 2560, "fp16", 9216, 2560)))
        return "linear", works, io_bytes, _parse_layers(row)
    elif op == "matmul weight-bound":
        side = int(re.search(r"K=N=(\d+)", shapes)[1])
        works, io_bytes = _describe_linear(1, side, side, form)
        return "linear", works, io_bytes, 1
    elif op == "matvec, const-weight conv":
        works, io_bytes = _describe_linear(1, 2560, 2560, form)
        return "linear", works, io_bytes, 1
    else:
        return _explain_missing(row)
    works, io_bytes = describe_program(program)
    if "ANE task time" in row["notes"]:
        return "time on the ANE alone of an op on graph inputs"
    if op == "softmax":
        io_bytes = 0  # a part of the attention core, by difference
    kind = "attention" if "head" in shapes else "elementwise"
    return kind, works, io_bytes, 1


def _explain_missing(row) -> str:
    if row["metric"] in ("TFLOPS", "GB/s", "Gelem/s", "GMAC/s") and "in=" not in row["shapes"]:
        return "a rate, without the shape"
    return "graph or shapes not published"


def _parse_layers(row) -> int:
    return int(row["repeat"]) if row["repeat"].isdigit() else 1


def _convert_value(row, works: Iterable[Work], layers: int) -> float | None:
    text = row["value"]
    if re.fullmatch(r"[\d.]+", text) is None:
        return None
    value, metric = float(text), row["metric"]
    if metric in ("us", "ms"):
        return value * {"us": 1.0, "ms": 1e3}[metric]
    if metric == "TFLOPS":
        operations = 2 * layers * sum(work.macs for work in works)
        return operations / value / 1e6 if operations else None
    if metric == "positions/s":
        return works[-1].positions / value * 1e6
    return None


def make_cases(rows: Iterable[dict[str, str]]) -> tuple[list[Case], dict[str, str]]:
    """Make the cases of all rows, and collect the reason for each row without one."""
    cases, reasons = [], {}
    for row in rows:
        made = make_case(row)
        if isinstance(made, str):
            reasons[row["id"]] = made
        else:
            cases.append(made)
    return cases, reasons
