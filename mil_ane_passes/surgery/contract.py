"""What an edit is: asked for by an option, made to a document in place or by making two of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..core.errors import InputError

if TYPE_CHECKING:
    from .document import Document

__all__ = ["PART_SUFFIXES", "Edit", "EditRecord", "apply_edits", "build_part_path"]

PART_SUFFIXES = ("1", "2")
"What tells the two packages apart that `--split-at` makes of one."


@dataclass(frozen=True)
class EditRecord:
    """One thing an edit did: the option that asked for it, the function it was done to, the value, and the words.

    `changed` is false where there was nothing to do. `exact` says whether results stay the same bits (None where that
    is no question of numbers).
    """

    option: str
    function: str
    value: str
    note: str
    changed: bool = True
    exact: bool | None = True

    def to_dict(self) -> dict[str, object]:
        """As the report's JSON has it."""
        return {"option": self.option, "function": self.function, "value": self.value, "note": self.note,
                "changed": self.changed, "exact": self.exact}


class Edit(Protocol):
    """One edit, with all it is asked to do."""

    def apply(self, document: Document) -> list[Document]:
        """Make the edit. Returns the document, edited in place, or those that it became.

        What was done is added to `document.done`. Raises InputError when it cannot be done, with the reason; nothing is
        written then, so the document may be left half edited.
        """
        ...


def apply_edits(document: Document, edits: list[Edit]) -> list[Document]:
    """Make edits one after the other, each to all that the ones before it made.

    Raises InputError for a pipeline and an edit that does not say of itself that it can be made there.
    """
    documents = [document]
    for edit in edits:
        if not (document.functions or getattr(edit, "in_pipelines", False)):
            raise InputError(f"{document.where}: the model is a pipeline, whose parts take what others give; of all "
                             "edits only names can be changed there: edit the packages in it and build it again")
        documents = [made for each in documents for made in edit.apply(each)]
    return documents


def build_part_path(target: Path, part: str) -> Path:
    """Where a document goes: to `target`, or beside it with its part behind the name."""
    return target.with_name(f"{target.stem}_{part}{target.suffix}") if part else target
