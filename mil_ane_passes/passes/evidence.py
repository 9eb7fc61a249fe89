"""Evidence: the sources that rules are based on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "WITHOUT_CORE_ML",
    "Community",
    "Evidence",
    "Measured",
    "Vendor",
    "cite_2020_layer_list",
    "cite_apple_authoring_rules",
    "cite_m1_gpt_notes",
    "cite_m4_study",
    "cite_ane_compiler_quirk",
    "cite_ane_compiler",
    "cite_surgery_tip",
    "cite_xcode_notes",
    "format_evidence",
]

WITHOUT_CORE_ML = "(not through Core ML)"
"""Marks evidence from the ANE's compiler or runtime called without Core ML, which may decide otherwise."""
_DISPATCH_NOTES = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"
_DISPATCH_TABLES = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/03_compile/opdispatch"


@dataclass(frozen=True)
class Evidence:
    """One source for a rule: statement and location; chip, OS and date are None if the source does not state them."""

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
        return format_evidence(self.to_dict())


def format_evidence(data: Mapping[str, str | None]) -> str:
    """Format evidence, given as its `to_dict()`, in one line."""
    where = ", ".join(data[name] or f"{text} not stated"
                      for name, text in (("chip", "chip"), ("os", "OS"), ("date", "date")))
    return f"{data['kind']}: {data['says']} ({where}) <{data['source']}>"


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
    """Cite the M4 study on Core ML's answers: the published notes, or (`rows`) the tables published with them."""
    return Measured(
        says, source=_DISPATCH_TABLES if rows else _DISPATCH_NOTES, chip="M4", os="macOS 27.0.1", date="2026"
    )


def cite_m1_gpt_notes(says: str) -> Community:
    """Cite a user's notes on their own GPT models."""
    return Community(says, source="smpanaro/more-ane-transformers src/experiments/NOTES.md", chip="M1 Pro",
                     date="2023")


def cite_ane_compiler(says: str, chip: str = "M1 to M5") -> Community:
    """Cite answers of the ANE compiler, obtained without Core ML."""
    return Community(f"{says} {WITHOUT_CORE_ML}", source="sbryngelson/ANEForge docs/op-catalog.md", chip=chip,
                     date="2026")


def cite_ane_compiler_quirk(says: str) -> Community:
    """Cite user notes on single ops, obtained without Core ML; the source does not state the chips."""
    return Community(f"{says} {WITHOUT_CORE_ML}", source="sbryngelson/ANEForge docs/developer/op-quirks.md",
                     date="2026")


def cite_apple_authoring_rules(says: str) -> Vendor:
    """Cite Apple's instructions for authors of models for Core AI."""
    return Vendor(says, source="apple/coreai-models skills/skills/model-authoring/references/neural_engine_rules.md",
                  date="2026")


def cite_2020_layer_list(says: str) -> Community:
    """Cite a list of unsupported layers from before ML Programs, some of which is guessed."""
    return Community(says, source="hollance/neural-engine docs/unsupported-layers.md", date="2020")


def cite_xcode_notes(says: str) -> Community:
    """Cite one user's notes on Xcode's performance reports."""
    return Community(says, source="CoreML notes (in Chinese) on what falls back: cumsum, fill_like, fill, range_1d")


def cite_surgery_tip(says: str) -> Community:
    """Cite the advice of the author of a driver."""
    return Community(says, source="eiln, coreml102: Model Surgery Tips")
