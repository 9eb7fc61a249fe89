"""What only older chips refuse is left alone where a newer one is looked at."""

from __future__ import annotations

from coremltools.converters.mil.mil import Operation

from ..core.contract import Miss, Rule

__all__ = ["taken"]


def taken(rule: Rule, op: Operation, always: bool) -> Miss | None:
    """Why `op` stays: a chip that takes it is among those looked at. None where there is none, or where asked for."""
    if always or all(rule.targets.admits(generation) for generation in rule.generations):
        return None
    return Miss(op, "taken on M4: name an older target, or set always=true")
