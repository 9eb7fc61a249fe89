"""The result of `edit`, as data, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..transforms.contract import EditRecord
from ..utils.text_format import format_lines, format_short_repr

__all__ = ["EditReport"]

_MAX_CHANGES_LISTED = 12
"The most changes that the text lists per option; the JSON has all."


@dataclass
class EditReport:
    """The outcome of one edit of a package.

    `status`: "written", "unchanged" (nothing to do; the package was copied as it is) or "dry run". `outputs` are the
    paths written (or that would be), `done` the changes by option. `weight_bytes_*` are the sizes of all weight files
    of the source and of the outputs, in bytes (after: None in a dry run), `seconds` wall time.
    """

    source: str
    outputs: list[str] = field(default_factory=list)
    status: str = "dry run"
    done: list[EditRecord] = field(default_factory=list)
    weight_bytes_before: int = 0
    weight_bytes_after: int | None = None
    seconds: float = 0.0

    @property
    def changed(self) -> bool:
        return any(each.changed for each in self.done)

    @property
    def exact(self) -> bool:
        """True unless an edit reports that results may change: all results then have the same bits."""
        return all(each.exact is not False for each in self.done)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `--format json` prints."""
        return {
            "schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "edit",
            "source": self.source, "outputs": self.outputs, "status": self.status, "changed": self.changed,
            "exact": self.exact, "done": [each.to_dict() for each in self.done],
            "weight_bytes": {"before": self.weight_bytes_before, "after": self.weight_bytes_after},
            "seconds": round(self.seconds, 6),
        }

    def __repr__(self) -> str:
        return format_short_repr(
            self, source=self.source, status=self.status, outputs=self.outputs, changes=len(self.done)
        )

    def __str__(self) -> str:
        lines: list[str] = []
        for option in dict.fromkeys(each.option for each in self.done):
            notes = [
                f"{option}  {_format_function_prefix(each.function)}{each.note}"
                for each in self.done
                if each.option == option
            ]
            lines += notes[:_MAX_CHANGES_LISTED]
            if len(notes) > _MAX_CHANGES_LISTED:
                lines.append(f"{option}  ... and {len(notes) - _MAX_CHANGES_LISTED} more")
        if self.weight_bytes_after not in (None, self.weight_bytes_before):
            lines.append(f"weights: {self.weight_bytes_before} -> {self.weight_bytes_after} bytes")
        return format_lines([*lines, self._format_outcome()])

    def _format_outcome(self) -> str:
        where = f" to {', '.join(self.outputs)}" if self.outputs else ""
        if self.status == "dry run":
            return "dry run: nothing written"
        if self.status == "unchanged":
            return f"nothing to do; the package was copied as it is{where}"
        return f"written{where} in {self.seconds:.1f} s"


def _format_function_prefix(function: str) -> str:
    return "" if function in ("", "main") else f"{function}: "
