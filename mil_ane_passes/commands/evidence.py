"""Evidence files of equivalence checks, with which others can repeat a check."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..package.executorch_program import find_read_file
from ..package.output_file import check_output_file, write_text_file
from ..utils.errors import InputError
from ..utils.json_file import read_json
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import format_count
from .batch_records import Fingerprint, refresh_if_unchanged, take_fingerprint

if TYPE_CHECKING:
    from ..equivalence.equivalence import VerifyReport

__all__ = [
    "check_evidence_file",
    "check_digested_models",
    "check_models",
    "compare_with_evidence",
    "describe_evidence",
    "digest_models",
    "read_evidence",
    "write_evidence",
]

_SCHEMA = 1
_KIND = "mil_ane_passes equivalence check"
_RUN_KEYS = ("function", "feeds", "precision")
"The fields that identify a run of a check."
_PACKAGES = ("coremltools", "numpy", "torch")


@dataclasses.dataclass(frozen=True)
class DigestedModel:
    """The path of a model, and the SHA-256 of what was there before the check."""

    path: str
    sha256: str
    files: Fingerprint = dataclasses.field(default_factory=dict, repr=False, compare=False)
    "Stamps of the files, to detect later changes."

    def to_dict(self) -> dict[str, str]:
        return {"path": self.path, "sha256": self.sha256}


def describe_evidence() -> str:
    """Describe the expected file, for error messages."""
    return f"expected a file written by `verify` with {format_option('report')}"


def check_models(who: str, models: Mapping[str, Any]) -> None:
    """Raise InputError, in the name of the option `who`, for models that are not files: they have no digest."""
    for name, model in models.items():
        if not isinstance(model, (str, os.PathLike)):
            raise InputError(f"{who}: {name} is of type {type(model).__name__}; evidence identifies files by digest, "
                             f"so both models must be paths")


def check_evidence_file(
    path: str | os.PathLike[str], models: Mapping[str, Any], replayed: str | os.PathLike[str] | None
) -> Path:
    """Check, before a long run, that evidence of `models` can be written to `path`. Raises InputError if not.

    `replayed` is the evidence that the run reads, if any.
    """
    check_models(format_option_values("report", path), models)
    return check_output_file(os.fspath(path), [*models.values(), replayed])


def write_evidence(
    path: Path, models: Mapping[str, DigestedModel], options: Mapping[str, Any], report: VerifyReport
) -> None:
    """Write the digests of models and runs, the options, versions and the verdict as JSON."""
    found = {
        "schema": _SCHEMA, "kind": _KIND, "versions": _list_versions(),
        "models": {name: model.to_dict() for name, model in models.items()},
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "report": report.to_dict(), "runs": [dataclasses.asdict(run) for run in report.runs],
        "regions": [region.to_dict() for region in report.regions],
    }
    write_text_file(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def read_evidence(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read evidence. Raises InputError for another file, or one of a later schema."""
    who, expected = format_option_values("replay", path), describe_evidence()
    found = read_json(path, who, expected)
    if not isinstance(found, dict) or found.get("kind") != _KIND:
        raise InputError(f"{who}: not a report of `verify`; {expected}")
    if found.get("schema") != _SCHEMA:
        raise InputError(f"{who}: schema {found.get('schema')!r}; expected {_SCHEMA}, that of version {__version__}")
    kinds = {"models": dict, "options": dict, "report": dict, "runs": list, "versions": dict}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            raise InputError(f"{who}: '{name}' is missing or has the wrong type; {expected}")
    for number, run in enumerate(found["runs"], 1):
        for name in _RUN_KEYS:
            if not isinstance(run, dict) or not isinstance(run.get(name), str):
                raise InputError(f"{who}: run {number} of 'runs' has no string '{name}'; {expected}")
    return found


def compare_with_evidence(
    recorded: Mapping[str, Any], models: Mapping[str, DigestedModel], report: VerifyReport
) -> None:
    """Record in `report` which parts of the `recorded` check were reproduced: models, verdict, feeds, output bits."""
    departed = []
    for name, model in models.items():
        known = recorded["models"].get(name)
        if not isinstance(known, dict) or known.get("sha256") != model.sha256:
            departed.append(f"{name} is not the recorded model (its SHA-256 differs)")
    status = recorded["report"].get("status")
    if status != report.status:
        departed.append(f"the verdict was {status!r}, now {report.status!r}")
    same_inputs, same_bits = _count_same(recorded["runs"], [dataclasses.asdict(run) for run in report.runs])
    count = max(len(recorded["runs"]), len(report.runs))
    if same_inputs < count:
        departed.append(f"{same_inputs} of {format_count(count, 'run')} had the recorded feeds")
    changed = [f"{name} {known} recorded, {now} here" for name, now in _list_versions().items()
               if (known := recorded["versions"].get(name)) != now]
    versions = f" ({'; '.join(changed)})" if changed else ""
    if not departed:
        report.repeated = (f"the recorded models, verdict and feeds; outputs had the same bits in {same_bits} of "
                           f"{format_count(count, 'run')}{versions}")
    report.departed = "; ".join(departed) + (versions if departed else "")


def _count_same(recorded: list[Any], found: list[dict[str, Any]]) -> tuple[int, int]:
    """Count the runs that had the recorded feeds, and of these those whose outputs had the recorded bits."""
    known = {tuple(run[key] for key in _RUN_KEYS): run for run in recorded}
    pairs = [(run, known.get(tuple(run[key] for key in _RUN_KEYS), {})) for run in found]
    pairs = [(run, was) for run, was in pairs if run["inputs"] == was.get("inputs")]
    return len(pairs), sum(run == was for run, was in pairs)


def digest_models(models: Mapping[str, str | os.PathLike[str]]) -> dict[str, DigestedModel]:
    """Digest models before they are read: while a long check runs, others may take their places."""
    return {name: _digest_model(model) for name, model in models.items()}


def check_digested_models(models: Mapping[str, DigestedModel]) -> None:
    """Raise InputError for a model that has changed since it was digested: the check may have read another."""
    for model in models.values():
        try:
            same = refresh_if_unchanged(model.files, find_read_file(model.path)) is not None
        except OSError:
            same = False
        if not same:
            raise InputError(f"{model.path}: was modified during the check; run again when no other process writes to "
                             f"it")


def _digest_model(model: str | os.PathLike[str]) -> DigestedModel:
    """Digest the names and contents of a package's files, or a file's content; of a delegate, that of its program."""
    read = find_read_file(model)
    if not os.path.lexists(read):
        raise InputError(f"{os.fspath(model)}: no such file or package; give both paths, as in verify A B "
                         f"{format_option('replay')} FILE")
    digest, files = hashlib.sha256(), take_fingerprint(read, deep=True)
    for name, each in sorted(files.items()):
        digest.update(f"{name}\0{each['sha256']}\0".encode("utf-8", "surrogateescape"))
    return DigestedModel(os.fspath(model), digest.hexdigest(), files)


def _list_versions() -> dict[str, str]:
    found = {"mil_ane_passes": __version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
