"""Topics of `explain` besides rules: pages about parts of the tool, which are the docstrings of their modules."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["TOPICS", "Contents", "Topic"]

TOPICS = {
    "equivalence": "equivalence",
    "prediction": "ane",
    "guard": "passes.guard",
    "numbers": "api.calibration",
    "packages": "package",
    "runtime": "runtime",
    "frontend": "torch_frontend",
    "threads": "utils.locking",
}
"""Topics, and the modules whose docstrings are their pages; imported by name to avoid a dependency on them."""


@dataclass(frozen=True)
class Topic:
    """One part of the tool: what it guarantees, and what it does not."""

    name: str

    @property
    def text(self) -> str:
        package = __name__.partition(".")[0]
        return inspect.getdoc(import_module(f"{package}.{TOPICS[self.name]}")) or ""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain", "topic": self.name, "text": self.text}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Contents:
    """The list of all topics."""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "explain",
                "topics": {name: Topic(name).text.splitlines()[0] for name in TOPICS}}

    def __str__(self) -> str:
        width = max(map(len, TOPICS))
        lines = [f"  {name:<{width}}  {Topic(name).text.splitlines()[0]}" for name in TOPICS]
        return "\n".join(["topics", *lines, "",
                          "Rules by code, slug or pass name (explain ANE301); mil-ane-passes passes lists them.",
                          "Patches of the torch frontend by code or name (explain TORCH114); mil-ane-passes patches "
                          "lists them."])
