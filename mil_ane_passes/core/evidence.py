"""Who says what a rule rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Community", "Evidence", "Measured", "Vendor"]


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
