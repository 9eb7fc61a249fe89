"""ANE generations: one table, read by rules and reports.

`all`, the default target, stands for every generation Core ML still runs on: a rule that applies to any of them
applies. Sources: the device list of hollance/neural-engine, the generations of sbryngelson/ANEForge
`docs/cross-chip.md`, and 751K/Apple-Neural-Engine-Microarchitecture-Study-M6 for M4.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError, nearest

__all__ = ["ALL", "GENERATIONS", "Gate", "Generation", "applies", "parse_target"]


@dataclass(frozen=True)
class Generation:
    """One ANE generation: its name here and the chips that carry it."""

    name: str
    chips: tuple[str, ...]


GENERATIONS = (
    Generation("a12", ("a11", "a12")),
    Generation("a13", ("a13",)),
    Generation("a14", ("a14", "m1")),
    Generation("a15", ("a15", "m2")),
    Generation("a16", ("a16", "a17", "m3")),
    Generation("a18", ("a18", "m4")),
)

@dataclass(frozen=True)
class Gate:
    """The generations a rule applies to: from `first` to `last`, both included, by the name of any of their chips."""

    first: str = "a11"
    last: str = "m4"

    def admits(self, generation: Generation) -> bool:
        bounds = [parse_target(name)[0] for name in (self.first, self.last)]
        return GENERATIONS.index(bounds[0]) <= GENERATIONS.index(generation) <= GENERATIONS.index(bounds[1])


ALL = Gate()
"""Applies to every generation (also where the evidence does not state the chip)."""


def parse_target(name: str) -> tuple[Generation, ...]:
    """The generations a target name stands for. Raises InputError for an unknown one."""
    wanted = name.strip().lower().replace("·", "").replace(" ", "")
    if wanted == "all":
        return GENERATIONS
    for generation in GENERATIONS:
        if wanted in generation.chips:
            return (generation,)
    chips = [chip for generation in GENERATIONS for chip in generation.chips]
    near = nearest(wanted, [*chips, "all"])
    raise InputError(f"target '{name}' is not known; expected all, {', '.join(chips)}{near}")


def applies(gate: Gate, target: str) -> bool:
    """Whether a rule behind `gate` applies to any generation of `target`."""
    return any(gate.admits(generation) for generation in parse_target(target))
