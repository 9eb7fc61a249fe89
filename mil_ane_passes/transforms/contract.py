"""The interface of edits: each is requested by an option, and edits a document in place or makes two of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..utils.errors import InputError

if TYPE_CHECKING:
    from .document import Document

__all__ = ["PART_SUFFIXES", "Edit", "EditRecord", "apply_edits", "build_part_path"]

PART_SUFFIXES = ("1", "2")
"Suffixes of the names of the two packages that `--split-at` makes."


@dataclass(frozen=True)
class EditRecord:
    """One action of an edit: the option that requested it, the function and the value it was applied to, and the note.

    `changed` is false if there was nothing to do. `exact` is true if results keep the same bits (None where no numbers
    are affected).
    """

    option: str
    function: str
    value: str
    note: str
    changed: bool = True
    exact: bool | None = True

    def to_dict(self) -> dict[str, object]:
        """Return the record as in the report's JSON."""
        return {"option": self.option, "function": self.function, "value": self.value, "note": self.note,
                "changed": self.changed, "exact": self.exact}


class Edit(Protocol):
    """One edit with all of its arguments."""

    def apply(self, document: Document) -> list[Document]:
        """Make the edit. Returns the document, edited in place, or those that it became.

        Actions are added to `document.done`. Raises InputError with the reason when the edit cannot be done; nothing is
        written then, so the document may be left half edited.
        """
        ...


def apply_edits(document: Document, edits: list[Edit]) -> list[Document]:
    """Make edits one after the other, each on all documents that the ones before it made.

    Raises InputError for a pipeline and an edit without `in_pipelines`.
    """
    documents = [document]
    for edit in edits:
        if not (document.functions or getattr(edit, "in_pipelines", False)):
            raise InputError(f"{document.where}: the model is a pipeline, whose parts take what others give; of all "
                             "edits only names can be changed there: edit the packages in it and build it again")
        documents = [made for each in documents for made in edit.apply(each)]
    return documents


def build_part_path(target: Path, part: str) -> Path:
    """Return the path a document is written to: `target`, or beside it with the part appended to the name."""
    return target.with_name(f"{target.stem}_{part}{target.suffix}") if part else target
