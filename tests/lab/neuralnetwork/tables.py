"""The generated tables of `mil_ane_passes/neuralnetwork/README.md` about `upgrade`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coremltools.proto import NeuralNetwork_pb2

from mil_ane_passes.neuralnetwork.layer_converter import CONVERTERS
from mil_ane_passes.neuralnetwork.program import _load_converters
from tests.lab.benchmarks.command import RECORD as SPEEDS
from tests.lab.benchmarks.command import format_heading, read_rows
from tests.lab.neuralnetwork.explained import PLACED_WORSE
from tests.lab.records import format_table, read_record

HERE = Path(__file__).parent
ARCHITECTURES, FUZZ = HERE / "architectures.json", HERE.parent / "fuzz" / "networks.json"
_FACTOR, _BOUND = 1.5, 1e-4


def format_layers() -> str:
    """List the layer kinds of the format, those of one converter in a row, with what they become."""
    _load_converters()
    fields = NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields
    rows: dict[Any, list[str]] = {}
    for each in fields:
        rows.setdefault(CONVERTERS.get(each.name), []).append(each.name)
    table = []
    for function, kinds in rows.items():
        if function is None:
            table.append([", ".join(f"`{kind}`" for kind in kinds), "refused by name: its code is in an app"])
            continue
        said = (function.__doc__ or "").strip().splitlines()
        what = said[0].removeprefix("Convert ").rstrip(".") if said else "the op of that name"
        table.append([", ".join(f"`{kind}`" for kind in kinds), what])
    return format_table([f"layers ({len(fields)} kinds, {len(fields) - 1} converted)", "what is converted"], table)


def _read_architectures() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(ARCHITECTURES)
    return found


def is_right(row: dict[str, Any]) -> bool:
    """Return whether a row of the record is within the bounds."""
    bounds = max(_BOUND, _FACTOR * row["float32_direct"]), max(row["bound"], _FACTOR * row["float16_direct"])
    return row["float32"] <= bounds[0] and row["float16"] <= bounds[1]


def is_placed_as_well(row: dict[str, Any]) -> bool:
    """Return whether of each type of op at most as many stay off the ANE as in the direct conversion."""
    upgraded, direct = row["upgraded"]["left"], row["direct"]["left"]
    return all(count <= direct.get(name, 0) for name, count in upgraded.items())


def format_architectures() -> str:
    """Count the architectures by what became of them."""
    rows = _read_architectures()
    made = [row for row in rows if not row["refused"]]
    alike = [row for row in made if row["upgraded"]["left"] == row["direct"]["left"]]
    better = [row for row in made if row not in alike and is_placed_as_well(row)]
    return format_table(
        ["architectures", "coremltools converts to a NeuralNetwork", "upgraded", "within the bounds",
         "largest error at fp32", "placed as the direct conversion", "better", "worse"],
        [[len(rows), sum(row["by"] != "coremltools" for row in rows), len(made), sum(map(is_right, made)),
          f"{max(row['float32'] for row in made):.1e}", len(alike), len(better), len(made) - len(alike) - len(better)]])


def format_placements() -> str:
    """List each architecture: errors, and what of its ops stays off the ANE on both ways."""
    table = []
    for row in _read_architectures():
        if row["refused"]:
            continue
        ways = [row["upgraded"], row["direct"]]
        table.append([row["name"], row["layers"], f"{row['float32']:.0e}",
                      f"{row['float16']:.0e} / {row['float16_direct']:.0e}",
                      *(f"{way['ops'] - way['off_ane']} of {way['ops']}" for way in ways),
                      _format_difference(row["upgraded"]["left"], row["direct"]["left"])])
    return format_table(["architecture", "layers", "error at fp32", "at fp16: upgraded / direct",
                         "ops on the ANE: upgraded", "direct", "off the ANE: upgraded against direct"], table)


def format_placed_worse() -> str:
    """List the architectures that are placed worse than by the direct conversion, with the reason."""
    return format_table(["architecture", "why it is placed worse"], [list(each) for each in PLACED_WORSE.items()])


def _format_difference(upgraded: dict[str, int], direct: dict[str, int]) -> str:
    parts = [f"{upgraded.get(name, 0) - direct.get(name, 0):+d} {name}" for name in sorted({*upgraded, *direct})
             if upgraded.get(name, 0) != direct.get(name, 0)]
    return ", ".join(parts) or "same"


def format_refusals() -> str:
    """List the architectures of which coremltools makes no NeuralNetwork, or upgrade no ML Program."""
    rows = [[row["name"], row["by"], row["refused"]] for row in _read_architectures() if row["refused"]]
    return format_table(["architecture", "refused by", "reason"], rows)


def format_fuzz() -> str:
    """Return the figures of the fuzzer on .mlmodel files."""
    record = read_record(FUZZ)
    return format_table(
        ["damaged files", "upgraded", "refused in one line", "failures", "slowest", "most memory", "command"],
        [[f"{record['tries']:,}", record["loaded"], record["refused"], record["failures"],
          f"{record['slowest_seconds']} s", f"{record['most_megabytes']} MB", f"`{record['command']}`"]])


def format_cost() -> str:
    """Return the rows of the benchmark, and where they were measured."""
    entry = read_record(SPEEDS)["upgrade"]
    rows = [row.cells() for row in read_rows(entry)]
    table = format_table(["upgrade", "beside", "ours takes", "the other", "ratio", "spread", "allowed"], rows)
    return table + f"\n- {format_heading(entry['run'])}"
