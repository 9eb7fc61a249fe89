"""ANE generations: one table, read by rules and reports.

`all`, the default target, means every generation that Core ML still supports: a rule that applies to any of them
applies. Sources: the device list of hollance/neural-engine, the generations of sbryngelson/ANEForge
`docs/cross-chip.md` (M1 to M5), and 751K/Apple-Neural-Engine-Microarchitecture-Study-M6 for M4 and M6. Apple does not
state which iPhone chip has the ANE of which Mac chip. A17 may go with M3 or, as Apple's phrase "A17 Pro, M4" suggests
(https://github.com/apple/coremltools/issues/2410), with M4; it is grouped with the older, stricter one. No source
measured A18, so it is a generation of its own between M4 and M5: support seen on an M4 does not count as support on it.
A chip's Pro, Max and Ultra have more cores, but the same limits (ANEForge).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..utils.errors import InputError, suggest_nearest
from ..utils.text_format import join_names
from .devices import EXAMPLE_DEVICES, find_chip, list_device_names

__all__ = [
    "ALL_TARGETS",
    "GENERATIONS",
    "Gate",
    "Generation",
    "format_generations",
    "get_generations_between",
    "is_applicable",
    "parse_target",
    "split_targets",
]


@dataclass(frozen=True, eq=False)
class Generation:
    """One ANE generation: its name here and the chips that have it. There is one object per generation."""

    name: str
    chips: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join(chip.upper() for chip in self.chips)


GENERATIONS = (
    Generation("a12", ("a12",)),
    Generation("a13", ("a13",)),
    Generation("a14", ("a14", "m1")),
    Generation("a15", ("a15", "m2")),
    Generation("a16", ("a16", "a17", "m3")),
    Generation("m4", ("m4",)),
    Generation("a18", ("a18",)),
    Generation("a19", ("a19", "m5")),
    Generation("m6", ("m6",)),
)
CHIPS = tuple(chip for generation in GENERATIONS for chip in generation.chips)


@dataclass(frozen=True)
class Gate:
    """The generations a rule applies to: from `first` to `last`, both included, by the name of any of their chips.

    An empty name means no bound.
    """

    first: str = ""
    last: str = ""

    @property
    def generations(self) -> tuple[Generation, ...]:
        return get_generations_between(self.first, self.last)

    def includes(self, generation: Generation) -> bool:
        return generation in self.generations


ALL_TARGETS = Gate()
"""Applies to every generation (also where the evidence does not state the chip)."""


@cache
def get_generations_between(first: str = "", last: str = "") -> tuple[Generation, ...]:
    """Return the generations from one chip's to another's, both included; an empty name means no bound."""
    start = GENERATIONS.index(parse_target(first)[0]) if first else 0
    end = GENERATIONS.index(parse_target(last)[0]) if last else len(GENERATIONS) - 1
    return GENERATIONS[start:end + 1]


def parse_target(name: str) -> tuple[Generation, ...]:
    """Return the generations of a target: `all`, a chip (m1, A17 Pro), a device (iPhone 15 Pro, Mac16,12).

    Raises InputError for an unknown one, and for a device without an ANE that Core ML uses.
    """
    if not isinstance(name, str):
        raise InputError(f"target: found {name!r}; expected a name such as 'all', 'm4' or 'iPhone 15 Pro'",
                         option="target")
    return _parse_name(name)


def split_targets(names: str) -> list[str]:
    """Split the names of several targets at commas; those of model identifiers (Mac16,12) stay. Checks no name."""
    return list(dict.fromkeys(name.strip() for name in re.split(r",(?!\s*\d+\s*(?:,|$))", names)))


@cache
def _parse_name(name: str) -> tuple[Generation, ...]:
    if name.strip().lower() == "all":
        return GENERATIONS
    chip = find_chip(name, CHIPS)
    for generation in GENERATIONS:
        if chip in generation.chips:
            return (generation,)
    near = suggest_nearest(name.strip().lower(), [*CHIPS, "all"]) or suggest_nearest(
        name.strip().lower(), list_device_names()
    )
    raise InputError(f"target '{name}' is unknown; expected all, {', '.join(CHIPS)}, or a device such as "
                     f"{EXAMPLE_DEVICES}{near}", option="target")


def is_applicable(gate: Gate, target: str) -> bool:
    """Return whether a rule with `gate` applies to any generation of `target`."""
    return any(gate.includes(generation) for generation in parse_target(target))


def format_generations(generations: Iterable[Generation]) -> str:
    """Format a list of generations, each by its best known chip."""
    return join_names(generation.chips[-1].upper() for generation in generations)
