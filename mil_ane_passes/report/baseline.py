"""Baselines: earlier reports of `lint`, to distinguish new findings from known ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..passes.finding import Finding
from ..utils.errors import InputError
from ..utils.json_file import read_json

__all__ = ["Baseline", "BaselineComparison", "read_baseline"]

FindingKey = tuple[str, str, str, str]
_HOW_TO_MAKE = "make one with `mil-ane-passes lint IN --format json -o FILE`"


@dataclass(frozen=True)
class BaselineComparison:
    """`new` are the findings that the baseline lacks, `gone` the keys of those that only the baseline has."""

    file: str
    target: str
    new: list[Finding]
    gone: list[FindingKey]

    def to_dict(self) -> dict[str, Any]:
        names = ("code", "function", "op", "value")
        return {"file": self.file, "target": self.target, "new": [dict(zip(names, item.key)) for item in self.new],
                "gone": [dict(zip(names, key)) for key in self.gone]}


@dataclass(frozen=True)
class Baseline:
    """The findings of an earlier report, with their counts."""

    file: str
    target: str
    keys: Counter[FindingKey]

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
        return BaselineComparison(self.file, self.target, new, list(left.elements()))


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read the output of `lint --format json`. Raises InputError when the file is missing or has another format."""
    file, data = Path(path), read_json(path, "baseline", _HOW_TO_MAKE)
    if not isinstance(data, dict) or data.get("command") != "lint" or "findings" not in data:
        raise InputError(f"baseline: '{file}' is no report of lint; {_HOW_TO_MAKE}",
                         option="baseline")
    if data.get("schema") != 1:
        raise InputError(f"baseline: '{file}' has schema {data.get('schema')!r}; expected 1; {_HOW_TO_MAKE}",
                         option="baseline")
    found = data["findings"]
    names = ("code", "function", "op", "value")
    if not isinstance(found, list) or not all(isinstance(item, dict) and all(isinstance(item.get(name), str)
                                                                            for name in names) for item in found):
        raise InputError(f"baseline: a finding in '{file}' lacks code, function, op or value; {_HOW_TO_MAKE}",
                         option="baseline")
    return Baseline(str(file), str(data.get("target")),
                    Counter((item["code"], item["function"], item["op"], item["value"]) for item in found))
