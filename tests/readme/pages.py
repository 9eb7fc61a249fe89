"""The pages of documentation, and the generated tables of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from mil_ane_passes.commands.pages import PAGES_FILE, collect_pages
from mil_ane_passes.passes.coremltools_setup import ENTRY_POINT_GROUP
from tests.lab.converters import table as converters
from tests.lab.neuralnetwork import tables as networks
from tests.lab.neuralnetwork.__main__ import format_counts, format_failures
from tests.lab.versions.table import table as versions
from tests.torch_frontend.grid.run import table as grid

from . import tables
from .tables import ROOT

__all__ = ["PAGES", "write_stored_pages", "write_tables"]

Table = Callable[[], str]

PAGES: Mapping[str, Mapping[str, Table]] = {
    "README.md": {},
    "mil_ane_passes/README.md": {"converters": converters.format_table},
    "mil_ane_passes/commands/README.md": {},
    "mil_ane_passes/ane/README.md": {"latency-errors": tables.latency_errors, "latency-ranges": tables.latency_ranges,
                                     "latency-proof": tables.latency_proof},
    "mil_ane_passes/neuralnetwork/README.md": {
        "layer-rules": tables.layer_rules, "layer-rewrites": tables.layer_rewrites,
        "layer-kinds": networks.format_layers, "network-tests": format_counts, "network-failures": format_failures,
        "network-architectures": networks.format_architectures, "network-placements": networks.format_placements,
        "network-placed-worse": networks.format_placed_worse, "network-refusals": networks.format_refusals,
        "network-fuzz": networks.format_fuzz, "network-cost": networks.format_cost},
    "mil_ane_passes/rules/README.md": {
        "rules": tables.rules, "findings": tables.findings, "agreement": tables.agreement},
    "mil_ane_passes/rewrites/README.md": {
        "rewrites": tables.rewrites, "named": tables.asked_for, "whole": tables.whole,
        "whole-latency": tables.whole_latency, "whole-steps": tables.whole_steps,
        "whole-slower": tables.whole_slower},
    "mil_ane_passes/torch_frontend/README.md": {"grid": grid, "patches": tables.patches},
    "mil_ane_passes/runtime/README.md": {"upstream": tables.upstream},
    **{f"mil_ane_passes/{room}/README.md": {}
       for room in ("equivalence", "ir", "package", "passes", "report", "testing", "transforms", "utils")},
    "tests/README.md": {
        "reliability": tables.reliability, "start-up": tables.measured, "speed": tables.speed,
        "versions": versions},
}


def read_page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def write_tables(root: Path = ROOT) -> None:
    """Write the generated tables into their pages."""
    for name, made in PAGES.items():
        text = read_page(name)
        for marker, table in made.items():
            block = f"<!-- {marker} -->\n{table()}\n"
            text = re.sub(rf"<!-- {marker} -->\n(?:[|-].*\n)*", lambda found, block=block: block, text)
        (root / name).write_text(text, encoding="utf-8")


def write_stored_pages() -> None:
    """Write the pages of rules and patches that the commands print; they must have nothing of plugins."""
    plugins = [point.name for point in entry_points(group=ENTRY_POINT_GROUP)]
    if plugins:
        raise SystemExit(f"found the plugins {', '.join(plugins)}; expected none in the environment that writes pages")
    text = json.dumps(collect_pages(), indent=1, ensure_ascii=False, allow_nan=False)
    PAGES_FILE.write_text(f"{text}\n", encoding="utf-8")
