"""The table of other converters' models, from the record of `python -m tests.lab.converters --record`."""

from __future__ import annotations

from pathlib import Path

from tests.lab import records

from .cases import PLAIN, SETTINGS, UNGUARDED, Result

RECORD = Path(__file__).parent / "record.json"


def read_record() -> list[Result]:
    """What was measured last."""
    return [Result(**row) for row in records.read_record(RECORD)["results"]]


def format_table() -> str:
    """Counts of ops off the ANE before and after, what is left, and errors, a line for each model."""
    rows: dict[tuple[str, str], dict[str, Result]] = {}
    for result in read_record():
        rows.setdefault((result.converter, result.name), {})[result.way] = result
    head = ("converter", "model", f"unsupported (unmeasured) ops on {SETTINGS['target']}", "with our passes",
            "without guard", "unsupported that are left", "error at float16", "with our passes")
    return records.format_table(head, (_format_row(*key, ways) for key, ways in rows.items()))


def _format_row(converter: str, name: str, ways: dict[str, Result]) -> tuple[str, ...]:
    plain, unguarded = ways[PLAIN], ways[UNGUARDED]
    ours = [result for way, result in ways.items() if way not in (PLAIN, UNGUARDED)]
    left = ", ".join(f"{op_type} {count}" for op_type, count in ours[0].unsupported.items())
    counts = dict.fromkeys(map(_format_counts, ours))
    return (converter, name, _format_counts(plain), " / ".join(counts), _format_counts(unguarded), left or "-",
            f"{plain.float16:.1e}", f"{max(result.float16 for result in ours):.1e}")


def _format_counts(result: Result) -> str:
    unknown = sum(result.unknown.values())
    return f"{sum(result.unsupported.values())}{f' ({unknown})' if unknown else ''} of {result.ops}"
