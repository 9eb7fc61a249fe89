"""Who says what the ANE refuses and takes, for rewrites that replace ops it refuses."""

from __future__ import annotations

from ..core.contract import Community, Measured

__all__ = ["on_m4", "private"]


def on_m4(says: str) -> Measured:
    """What Core ML answered on an M4."""
    return Measured(says, source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md",
                    chip="M4", os="macOS 27.0.1", date="2026")


def private(says: str, chip: str = "M1 to M5") -> Community:
    """What the ANE's compiler answered without Core ML."""
    return Community(f"{says} (private route)", source="sbryngelson/ANEForge docs/op-catalog.md", chip=chip,
                     date="2026")
