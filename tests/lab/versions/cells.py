"""The combinations of versions that the fast tests run on, and what came of each."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CELLS", "Cell", "Result", "named"]


@dataclass(frozen=True)
class Cell:
    """One combination: a Python, and what pip is told besides `.[test]`."""

    name: str
    python: str
    pins: tuple[str, ...]


_TORCH = "torch==2.13.0"

CELLS = (
    Cell("py310", "3.10", ("coremltools==9.0", "numpy==1.26.*", _TORCH)),
    Cell("py310-newest", "3.10", ("coremltools==9.0", _TORCH)),
    Cell("py311-ct83", "3.11", ("coremltools==8.3.*", "numpy==1.26.*", _TORCH)),
    Cell("py311-newest", "3.11", ("coremltools==9.0", _TORCH)),
    Cell("py312", "3.12", ("coremltools==9.0", "numpy==1.26.*", _TORCH)),
    Cell("py312-newest", "3.12", ("coremltools==9.0", _TORCH)),
    Cell("py313-newest", "3.13", ("coremltools==9.0", _TORCH)),
    Cell("py313-ct91", "3.13", ("coremltools==9.1.dev1", _TORCH)),
    Cell("py314-ct91", "3.14", ("coremltools==9.1.dev1", _TORCH)),
)


@dataclass
class Result:
    """What came of one cell; `refused` says why no test ran."""

    cell: str
    python: str
    numpy: str = ""
    coremltools: str = ""
    torch: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    one_in: int = 1
    commit: str = ""
    again: str = ""
    "The commit at which what had failed ran once more; its outcome then is the one that is counted."
    failures: list[str] = field(default_factory=list)
    refused: str = ""


def named(names: list[str] | None) -> tuple[Cell, ...]:
    """The cells of these names, all for None. Raises ValueError for a name that none has."""
    known = {cell.name: cell for cell in CELLS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no cell {name!r}; expected some of {', '.join(known)}")
    return CELLS if names is None else tuple(known[name] for name in names)
