"""Baselines: earlier reports of `lint`, to distinguish new findings from known ones.

A baseline of several packages has a report of each, which is found by its path.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..passes.finding import Finding
from ..utils.errors import InputError
from ..utils.json_file import BASELINE_FORM, read_json

__all__ = ["LINT_SCHEMA", "Baseline", "BaselineComparison", "BaselineFile", "read_baseline"]

LINT_SCHEMA = 2
"The version of the JSON of `lint`. In 1, findings had a `level` (warning, note) in place of a `severity`."
_READABLE_SCHEMAS = (1, LINT_SCHEMA)
"A baseline needs only what these versions have in common."

FindingKey = tuple[str, str, str, str]


@dataclass(frozen=True)
class BaselineComparison:
    """`new` are the findings that the baseline lacks, `gone` the keys of those that only the baseline has.

    `missing`: the baseline has reports, but not of this package.
    """

    file: str
    target: str
    new: list[Finding]
    gone: list[FindingKey]
    missing: bool = False

    def to_dict(self) -> dict[str, Any]:
        names = ("code", "function", "op", "value")
        return {"file": self.file, "target": self.target, "new": [dict(zip(names, item.key)) for item in self.new],
                "gone": [dict(zip(names, key)) for key in self.gone], **({"missing": True} if self.missing else {})}


@dataclass(frozen=True)
class Baseline:
    """The findings of an earlier report, with their counts; none if the file is `missing` the package."""

    file: str
    target: str
    keys: Counter[FindingKey]
    missing: bool = False

    def compare(self, findings: Iterable[Finding]) -> BaselineComparison:
        """Compare `findings` with the baseline.

        A finding is known when the baseline has one of the same rule, function, op and value that is not matched yet.
        """
        left, new = Counter(self.keys), []
        for item in findings:
            if left[item.key]:
                left[item.key] -= 1
            else:
                new.append(item)
        return BaselineComparison(self.file, self.target, new, list(left.elements()), self.missing)


@dataclass(frozen=True)
class BaselineFile:
    """The reports in a file, by absolute path of the package; `several` if the file may hold more than one."""

    file: str
    reports: Mapping[str, Baseline]
    several: bool

    def select(self, model: str, target: str, *, several: bool) -> Baseline:
        """Return the baseline of a package, `several` if it is linted together with others.

        The report of one package is the baseline of any one package, whatever its path is now.
        """
        if not self.several and not several:
            only, = self.reports.values()
            return only
        return self.reports.get(os.path.abspath(model)) or Baseline(self.file, target, Counter(), missing=True)


def read_baseline(path: str | os.PathLike[str]) -> BaselineFile:
    """Read the output of `lint --format json`, of one package or of several.

    Raises InputError when the file is missing or has another format.
    """
    file, data = Path(path), read_json(path, "baseline", BASELINE_FORM)
    several = isinstance(data, dict) and isinstance(data.get("reports"), list)
    if not isinstance(data, dict) or data.get("command") != "lint" or not (several or "findings" in data):
        raise InputError(f"baseline: '{file}' is not a lint report; {BASELINE_FORM}",
                         option="baseline")
    if data.get("schema") not in _READABLE_SCHEMAS:
        raise InputError(f"baseline: '{file}' has schema {data.get('schema')!r}; expected at most {LINT_SCHEMA}; "
                         f"{BASELINE_FORM}",
                         option="baseline")
    reports = {}
    for each in data["reports"] if several else [data]:
        model = each.get("model") if isinstance(each, dict) else None
        if several and not isinstance(model, str):
            raise InputError(f"baseline: a report in '{file}' lacks its model; {BASELINE_FORM}", option="baseline")
        reports[os.path.abspath(str(model))] = _read_report(file, each)
    return BaselineFile(str(file), reports, several)


def _read_report(file: Path, data: Mapping[str, Any]) -> Baseline:
    found = data.get("findings")
    names = ("code", "function", "op", "value")
    if not isinstance(found, list) or not all(isinstance(item, dict) and all(isinstance(item.get(name), str)
                                                                            for name in names) for item in found):
        raise InputError(f"baseline: a finding in '{file}' lacks code, function, op or value; {BASELINE_FORM}",
                         option="baseline")
    return Baseline(str(file), str(data.get("target")),
                    Counter((item["code"], item["function"], item["op"], item["value"]) for item in found))
