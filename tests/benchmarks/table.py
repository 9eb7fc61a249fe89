"""The README's table of what `python -m tests.benchmarks.bench_package --record` measured last."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "package.json"


def table() -> str:
    """A row for each package: medians of the times of whole processes, and what they are beside each other."""
    recorded: dict[str, Any] = json.loads(FIGURES.read_text())
    lines = ["| package | `cp -r` | and `sync` | `rewrite` | of `cp -r` | `lint` | `edit --rename` | with `--link` | "
             "most memory | coremltools' round trip |", f"|{'---|' * 10}"]
    return "\n".join([*lines, *(_row(size) for size in recorded["sizes"])])


def startup() -> str:
    """What a bare import takes, and what a command does on a package of a few kilobytes."""
    recorded: dict[str, Any] = json.loads(FIGURES.read_text())
    costs = recorded["sizes"][0]["costs"]
    bare, tiny = (_seconds(costs[name]) for name in ("import coremltools", "rewrite, tiny"))
    return (f"- {recorded['machine']}, runs of each command: {recorded['runs']}; a bare `import coremltools` takes "
            f"{bare:.1f} s, the start-up of `rewrite` {tiny:.1f} s; the table has what is beyond start-up, `rewrite` "
            "without proof.")


def _seconds(cost: Any) -> float:
    return statistics.median(cost["seconds"])


def _row(size: Any) -> str:
    costs = size["costs"]

    def beyond(name: str) -> float:
        return max(0.0, _seconds(costs[name]) - _seconds(costs[f"{name.split(' --')[0]}, tiny"]))

    copy = _seconds(costs["cp -r"])
    memory = max(costs[name]["memory_mb"] for name in ("rewrite", "lint", "edit", "edit --link"))
    host = costs.get("host's round trip")
    ratio = _seconds(host) / _seconds(costs["rewrite"]) if host else 0
    there = (f"{_seconds(host):.0f} s, {host['memory_mb'] / 1000:.1f} GB: {ratio:.1f} x the whole `rewrite`" if host
             else "not run: too little memory")
    times = [beyond(name) for name in ("lint", "edit", "edit --link")]
    return (f"| {size['bytes'] / 1e9:.1f} GB | {copy:.1f} s | {_seconds(costs['cp -r; sync']):.1f} s | "
            f"{beyond('rewrite'):.1f} s | {beyond('rewrite') / copy:.2f} x | "
            f"{' | '.join(f'{each:.1f} s' for each in times)} | {memory} MB | {there} |")
