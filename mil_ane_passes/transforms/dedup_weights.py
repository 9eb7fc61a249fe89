"""Deduplication of weights: equal bytes that a package stores several times are stored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..package.blob_refs import find_refs
from ..package.duplicates import DuplicateGroup, Duplicates, find_duplicates
from ..utils.errors import InputError
from .contract import Draft, EditRecord, Transform

__all__ = ["DedupWeights"]

_OPTION = "--dedup-weights"
_MAX_GROUPS_LISTED = 10


@dataclass(frozen=True)
class DedupWeights(Transform):
    """Redirects all references to equal bytes of one dtype to one blob, across functions and weight files.

    Consts of different shapes may share bytes. Values inside the model file are not changed. Only references in the
    model file change: the mapped values in pymil remain the same.
    """

    def apply(self, draft: Draft) -> list[Draft]:
        """Deduplicate; no value changes. Raises InputError if a weight file is damaged or cannot be read."""
        assert draft.package is not None
        model, plan = draft.emit()
        added = {(plan.target, blob.offset) for blob in plan.added} if plan is not None else set()  # in no file yet
        try:
            found = find_duplicates(draft.package.files, find_refs(model) - added)
        except OSError as error:
            raise InputError(f"{draft.where}: the weights cannot be read ({error.strerror or error})") from error
        if found.equal:
            places = {other: group.places[0] for group in found.equal for other in group.places[1:]}
            draft.redirected, draft.dead_limit = places, 0.0
        draft.done += [EditRecord(_OPTION, "", _format_blob_location(group), note, changed=changed)
                       for group, note, changed in _iterate_notes(found)]
        draft.done += _iterate_dtype_mismatches(found)
        return [draft]


def _iterate_notes(found: Duplicates) -> Iterator[tuple[DuplicateGroup | None, str, bool]]:
    """Yield the group (None for a total), the note, and whether the note is about a change."""
    if not found.equal:
        yield None, "the package has no duplicate weights", False
        return
    saved = sum(group.saved_bytes for group in found.equal)
    blobs = sum(len(group.places) for group in found.equal)
    yield None, f"{blobs:,} blobs hold {len(found.equal):,} different values; {saved:,} bytes are saved", True
    largest = sorted(found.equal, key=lambda group: -group.saved_bytes)[:_MAX_GROUPS_LISTED]
    for group in largest:
        yield group, f"{len(group.places):,} blobs of {group.nbytes:,} bytes are one", True
    if len(found.equal) > len(largest):
        yield None, f"and {len(found.equal) - len(largest):,} groups that save less", True


def _iterate_dtype_mismatches(found: Duplicates) -> Iterator[EditRecord]:
    if found.equal_with_other_dtype:
        nbytes = sum(group.saved_bytes for group in found.equal_with_other_dtype)
        yield EditRecord(
            _OPTION,
            "",
            "",
            f"left as they are: {len(found.equal_with_other_dtype):,} groups of blobs with equal bytes that are "
            f"of different dtypes ({nbytes:,} bytes)",
            changed=False,
        )


def _format_blob_location(group: DuplicateGroup | None) -> str:
    if group is None:
        return ""
    name, offset = group.places[0]
    return f"{name}:{offset}"
