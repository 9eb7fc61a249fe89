"""Who says what a rule rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Community", "Evidence", "Measured", "Vendor", "on_m4", "private"]

_DISPATCH = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md"
_ROWS = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 data/03_compile/opdispatch"


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


def on_m4(says: str, *, rows: bool = False) -> Measured:
    """What Core ML answered on an M4: as published in words, or (`rows`) in the tables beside them."""
    return Measured(says, source=_ROWS if rows else _DISPATCH, chip="M4", os="macOS 27.0.1", date="2026")


def private(says: str, chip: str = "M1 to M5") -> Community:
    """What the ANE's compiler answered without Core ML."""
    return Community(f"{says} (private route)", source="sbryngelson/ANEForge docs/op-catalog.md", chip=chip,
                     date="2026")
