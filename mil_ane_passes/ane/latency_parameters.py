"""Parameters of the latency model per chip, from `latency_parameters.json` (`python -m tests.lab.latency --fit`).

Each value there has its source, and says whether rows of that chip determine it. Each chip has the errors of the model
on rows held out of the fit, from which the ranges of estimates are made. A chip without rows takes over the parameters
of its nearest relative, and has the wider range that this costs on chips that do have rows.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .latency_terms import Chip, Interface

__all__ = ["API_NAMES", "MEASURED_CHIPS", "find_chips", "load_parameters"]

API_NAMES = ("coreml", "private", "coreai")
MEASURED_CHIPS = ("m1", "m2", "m3", "m4", "m5", "m6")
_FILE = Path(__file__).with_name("latency_parameters.json")


@functools.cache
def load_parameters() -> dict[str, Any]:
    """Read the file."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def find_chips(name: str) -> tuple[Chip, ...]:
    """Find the parameters of a chip ("m4", "a17").

    Returns those of all measured chips for a chip that was not measured and has no related one.
    """
    known = load_parameters()["chips"]
    return tuple(_make_chip(each) for each in ([name] if name in known else MEASURED_CHIPS))


@functools.cache
def _make_chip(name: str) -> Chip:
    entry = load_parameters()["chips"][name]
    values = {key: each["value"] for key, each in entry["parameters"].items()}
    measured = frozenset(key for key, each in entry["parameters"].items() if each["measured"])
    measured |= {f"kind:{kind}" for kind in entry["measured_kinds"]}
    interfaces = {}
    for api in API_NAMES:
        own = {key.split(".")[1]: values.pop(key) for key in list(values) if key.startswith(f"{api}.")}
        interfaces[api] = Interface(**own, measured=f"{api}.floor_us" in measured)
    for key in ("engines", "engine_elements"):
        values[key] = int(values[key])
    return Chip(name, **values, interfaces=interfaces, spread=entry["spread"], measured=measured)
