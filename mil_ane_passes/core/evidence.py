"""Who says what a rule rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "PRIVATE_ROUTE",
    "Community",
    "Evidence",
    "Measured",
    "Vendor",
    "cite_2020_layer_list",
    "cite_apple_authoring_rules",
    "cite_m1_gpt_notes",
    "cite_m4_study",
    "cite_private_quirk",
    "cite_private_route",
    "cite_surgery_tip",
    "cite_xcode_notes",
]

PRIVATE_ROUTE = "(private route)"
"""Marks evidence that did not pass through Core ML, which may answer otherwise."""
_DISPATCH_NOTES = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"
_DISPATCH_TABLES = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/03_compile/opdispatch"


@dataclass(frozen=True)
class Evidence:
    """One source for a rule: what it says and where; chip, OS and date are None when the source does not state them."""

    says: str
    source: str
    chip: str | None = None
    os: str | None = None
    date: str | None = None
    kind: ClassVar[str] = "evidence"

    def to_dict(self) -> dict[str, str | None]:
        return {"kind": self.kind, "says": self.says, "source": self.source, "chip": self.chip, "os": self.os,
                "date": self.date}

    def __str__(self) -> str:
        where = f"{self.chip or 'chip not stated'}, {self.os or 'OS not stated'}, {self.date or 'date not stated'}"
        return f"{self.kind}: {self.says} ({where}) <{self.source}>"


class Measured(Evidence):
    """Measured by a third party who names device and OS."""

    kind = "measured"


class Vendor(Evidence):
    """Written by Apple."""

    kind = "vendor"


class Community(Evidence):
    """Reported in public, with or without a reproduction."""

    kind = "community"


def cite_m4_study(says: str, *, rows: bool = False) -> Measured:
    """What Core ML answered on an M4: as published in words, or (`rows`) in the tables beside them."""
    return Measured(
        says, source=_DISPATCH_TABLES if rows else _DISPATCH_NOTES, chip="M4", os="macOS 27.0.1", date="2026"
    )


def cite_m1_gpt_notes(says: str) -> Community:
    """What a user saw of GPT models of their own."""
    return Community(says, source="smpanaro/more-ane-transformers src/experiments/NOTES.md", chip="M1 Pro",
                     date="2023")


def cite_private_route(says: str, chip: str = "M1 to M5") -> Community:
    """What the ANE's compiler answered without Core ML."""
    return Community(f"{says} {PRIVATE_ROUTE}", source="sbryngelson/ANEForge docs/op-catalog.md", chip=chip,
                     date="2026")


def cite_private_quirk(says: str) -> Community:
    """What its users noted of single ops on that route; on which chips is not said."""
    return Community(f"{says} {PRIVATE_ROUTE}", source="sbryngelson/ANEForge docs/developer/op-quirks.md", date="2026")


def cite_apple_authoring_rules(says: str) -> Vendor:
    """What Apple tells authors of models for Core AI."""
    return Vendor(says, source="apple/coreai-models skills/skills/model-authoring/references/neural_engine_rules.md",
                  date="2026")


def cite_2020_layer_list(says: str) -> Community:
    """What a list of layers of the time before ML Programs says, some of which is guessed."""
    return Community(says, source="hollance/neural-engine docs/unsupported-layers.md", date="2020")


def cite_xcode_notes(says: str) -> Community:
    """What one user saw in Xcode's performance reports."""
    return Community(says, source="CoreML notes (in Chinese) on what falls back: cumsum, fill_like, fill, range_1d")


def cite_surgery_tip(says: str) -> Community:
    """What the author of a driver advises."""
    return Community(says, source="eiln, coreml102: Model Surgery Tips")
