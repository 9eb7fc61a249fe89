"""What `calibrate` found, as data, as JSON and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._version import __version__
from ..core.contract import Rule
from ..core.registry import all_rules
from ..core.spelling import option
from ..core.words import counted, lines_text, short_repr
from ..proof.calibrate import Calibrated, CalibratedRow
from .lint_finding import find_fix
from .table import aligned

__all__ = ["CalibrateReport"]


@dataclass
class CalibrateReport:
    """Ranges and room in fp16 for each value of `source` over `runs` runs; its text shows the `worst` tightest.

    `sampled`: neither feeds nor ranges were given, so that the runs are on random feeds.
    """

    source: str
    target: str
    runs: int
    found: Calibrated
    worst: int | None = None
    sampled: bool = False

    @property
    def first(self) -> CalibratedRow | None:
        """The first value that is beyond fp16 although what it is made of is not."""
        return next((row for row in self.found.rows if row.trace.starts), None)

    @property
    def beyond(self) -> list[CalibratedRow]:
        """The values that do not fit: fp16 itself, or the sums behind them."""
        return [row for row in self.found.rows if row.beyond]

    def to_dict(self) -> dict[str, Any]:
        """Exactly what `calibrate --format json` prints; headroom is null for integers and for what is all zeros."""
        rules = all_rules()
        return {
            "schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "calibrate",
            "source": self.source, "target": self.target, "runs": self.runs,
            "sampled": self.sampled,
            "first_overflow": self.first.trace.value if self.first else None,
            "rules": [{"rule": name, "pass": _pass_name(rules[name]), "code": rules[name].code,
                       "slug": rules[name].slug, "places": places}
                      for name, places in self.found.fires.items()],
            "ops": [row.to_dict() for row in self.found.rows],
            **({"failed_rules": [each.to_dict() for each in self.found.failed]} if self.found.failed else {}),
        }

    def __repr__(self) -> str:
        return short_repr(self, source=self.source, target=self.target, runs=self.runs, values=len(self.found.rows),
                          beyond_fp16=len(self.beyond))

    def __str__(self) -> str:
        rows = self.found.rows
        most = len(rows) if self.worst is None else self.worst
        kept = sorted(range(len(rows)), key=lambda place: (not rows[place].trace.starts, _room(rows[place])))[:most]
        shown = aligned(_HEAD, _ALIGNED, [_cells(rows[place], self._several) for place in sorted(kept)])
        if len(rows) > most:
            shown.append(f"  and {len(rows) - most} more values, with more room ({option('worst')} says how many are "
                         "shown)")
        origin = [f"on random feeds, as no {option('feeds')} or {option('ranges')} were given: values of your own "
                  "inputs may be larger"] if self.sampled else []
        return lines_text([*shown, *origin, *self._verdict()])

    @property
    def _several(self) -> bool:
        return len({row.function for row in self.found.rows}) > 1

    def _verdict(self) -> list[str]:
        lines, several = [], self._several
        if self.first is not None:
            lines += [f"first to overflow fp16: %{self.first.trace.value} in {' > '.join(self.first.trace.place)}",
                      f"  {self.found.first}"]
        for row in self.beyond[:self.worst]:
            what = "overflows fp16" if row.beyond == "overflow" else f"sums up to {row.partial:.4g}, beyond 32768"
            cures = ", ".join(f"ane::{name}" for name in row.cured_by) or "no rewrite alone"
            lines.append(f"{_named(row, several)} {what}; cured by {cures}")
        if self.worst is not None and len(self.beyond) > self.worst:
            lines.append(f"and {len(self.beyond) - self.worst} more values are beyond fp16")
        if (nan := self._nan()) is not None:
            lines.append(nan)
        if not lines:
            lines = [f"everything fits fp16 in {counted(self.runs, 'run')}"]
        lines += [f"{each.code} {each.slug} failed {each}" for each in self.found.failed]
        rules = all_rules()
        return lines + [f"{rules[name].code} {rules[name].slug}: {counted(places, 'place')}{_fix(rules[name])}"
                        for name, places in self.found.fires.items()]

    def _nan(self) -> str | None:
        """The first value that holds NaN, if one does."""
        trace = next((row.trace for row in self.found.rows if row.trace.nan), None)
        if trace is None:
            return None
        return (f"first NaN: %{trace.value} in {' > '.join(trace.place)}, {trace.nan} of "
                f"{counted(trace.elements, 'element')}; NaN is left out of min, max and headroom")


def _pass_name(rule: type[Rule]) -> str | None:
    fix = find_fix(rule)
    return None if fix is None else fix.name


def _fix(rule: type[Rule]) -> str:
    """The pass that fixes what `rule` finds, for a line of text; empty where no rewrite does."""
    name = _pass_name(rule)
    return "" if name is None else f" (ane::{name})"


def _room(row: CalibratedRow) -> float:
    sums = 32768.0 / row.partial if row.partial else math.inf
    return min(row.headroom, sums)


_HEAD = ("  value", "op", "type", "min", "max", "headroom", "sums up to", "overflow", "underflow", "rules")
_ALIGNED = (str.ljust, str.ljust, str.ljust, *(str.rjust,) * 6, str.ljust)


def _named(row: CalibratedRow, several: bool) -> str:
    """The value of a row, with its function where there are several."""
    return f"{row.function}:%{row.trace.value}" if several else f"%{row.trace.value}"


def _cells(row: CalibratedRow, several: bool) -> Sequence[str]:
    trace = row.trace
    name = f"{'> ' if trace.starts else '  '}{'  ' * (len(trace.place) - 1)}{_named(row, several)}"
    ends = ("" if end is None else f"{end:.4g}" for end in (trace.minimum, trace.maximum))
    room = "" if math.isinf(row.headroom) else f"{row.headroom:.3g}x"
    sums = "" if row.partial is None else f"{row.partial:.4g}"
    counts = (str(count) if count else "" for count in (trace.overflow + trace.inf, trace.underflow))
    return (name, trace.op_type, trace.type, *ends, room, sums, *counts, ", ".join(row.codes))
