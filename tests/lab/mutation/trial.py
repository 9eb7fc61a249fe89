"""Tries one planted error: in a fork that imports the package with the error in it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .mutants import Mutant

__all__ = ["ROOT", "Verdict", "run_trial"]

ROOT = Path(__file__).parents[3]
_PACKAGE = "mil_ane_passes"


@dataclass(frozen=True)
class Verdict:
    """The outcome for one mutant: "caught", "missed" (effective, not noticed), "equivalent", or "not tried".

    `program` is the one on which it was caught or is known to be effective, `reason` how; `directed` says that only a
    directed program catches it, no example of the rewrite.
    """

    name: str
    outcome: str
    program: str = ""
    reason: str = ""
    directed: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "outcome": self.outcome, "program": self.program, "reason": self.reason,
                "directed": self.directed}


def run_trial(mutant: Mutant) -> Verdict:
    """Try `mutant` in a fork, so that its code is gone afterwards."""
    torch.set_num_threads(1)  # a fork has none of the threads that torch's pool may count on
    subjects, rejected = _collect_subjects(mutant)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            try:
                verdict = _try_in_fork(mutant, subjects, rejected)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                verdict = Verdict(mutant.name, "not tried", reason=f"{type(error).__name__}: {error} "
                                                                   f"({where.filename}:{where.lineno})")
            pipe.write(json.dumps(verdict.to_dict()))
            pipe.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Verdict(**json.loads(text)) if text else Verdict(mutant.name, "not tried", reason="its process died")


@dataclass
class _Subject:
    """A program that the mutant is tried on."""

    name: str
    build: Any
    options: dict[str, Any]
    within: float = float("inf")
    scale: float = 1.0
    directed: bool = False
    clean: Any = field(default=None)


def _try_in_fork(mutant: Mutant, subjects: Sequence[_Subject], rejected: str) -> Verdict:
    if not subjects:
        return Verdict(mutant.name, "not tried", reason=f"{mutant.rule} fires on no program that the check passes")
    _reimport_with_mutant(mutant)
    passed = []
    for subject in subjects:
        caught, result = _rewrite_subject(mutant.rule, subject)
        if caught:
            return Verdict(mutant.name, "caught", subject.name, caught[:300], subject.directed)
        if result is not None:
            passed.append((subject, result))
    from .judge import find_effective_feeds

    for subject, (program, promised) in passed:
        where = find_effective_feeds(subject.build(), subject.clean, program, promised, subject.within)
        if where:
            return Verdict(mutant.name, "missed", subject.name, where[:300])
    if rejected:
        return Verdict(mutant.name, "not tried", reason=f"the check rejects {rejected} without the error, too"[:300])
    return Verdict(mutant.name, "equivalent")


def _collect_subjects(mutant: Mutant) -> tuple[list[_Subject], str]:
    """The programs on which the rewrite fires and passes the check without the error; directed ones that do not pass,
    and why."""
    from .directed import DIRECTED_PROGRAMS

    good, rejected = list(_collect_examples(mutant.rule)), []
    for name in mutant.programs:
        subject = _Subject(name, DIRECTED_PROGRAMS[name], mutant.options, directed=True)
        caught, result = _rewrite_subject(mutant.rule, subject)
        if result is not None:
            subject.clean = result[0]
            good.append(subject)
        elif caught and not caught.startswith("InputError"):
            rejected.append(f"{name} ({caught})")
        else:
            raise AssertionError(f"{mutant.rule} on the directed program {name}: {caught or 'does not fire'}")
    return good, ", ".join(rejected)


@functools.cache
def _collect_examples(rule: str) -> tuple[_Subject, ...]:
    from mil_ane_passes.passes.registry import get_all_rules

    kind = get_all_rules()[rule]
    subjects = [_Subject(example.name, example.build, example.options, example.within,
                         example.scale if kind.measures else 1.0)
                for example in kind().examples() if example.reason is None]
    for subject in subjects:
        _, result = _rewrite_subject(rule, subject)
        subject.clean = None if result is None else result[0]
    return tuple(subject for subject in subjects if subject.clean is not None)


def _rewrite_subject(rule: str, subject: _Subject) -> tuple[str, Any]:
    """(how the error is noticed, "" if it is not; the rewritten program and what it promises, None where none)."""
    import mil_ane_passes as ane
    from mil_ane_passes.commands.rewrite_steps import combine_promises

    program = subject.build()
    settings: dict[str, Any] = {}
    if subject.scale != 1.0:
        settings["feeds"] = _make_scaled_feeds(program, subject.scale, subject.within)
    try:
        report = ane.rewrite(program, preset="safe", passes=[rule], options={rule: subject.options},
                             max_growth=None, strict=True, **settings)
    except Exception as error:  # the engine refuses it, which is noticed, too
        return f"{type(error).__name__}: {error}", None
    if not report.changed:
        return ("the pass was left out", None) if report.left_out_passes else ("", None)
    if report.status == "not verified" or report.left_out_passes:
        return str(report.faulty_pass or report.left_out_passes or report.verify), None
    return "", (report.package, combine_promises(report.traces))


def _make_scaled_feeds(program: Any, scale: float, within: float) -> dict[str, Any]:
    """Normal draws times the example's scale: what only large values reach."""
    import numpy as np
    from coremltools.converters.mil.mil import types
    from coremltools.converters.mil.mil.types.symbolic import is_symbolic

    random = np.random.default_rng(0)
    feeds = {}
    for name, var in program.functions["main"].inputs.items():
        shape = tuple(8 if is_symbolic(extent) else int(extent) for extent in var.shape)
        dtype = types.nptype_from_builtin(var.dtype)
        drawn = (random.standard_normal(shape) * scale).clip(-within, within)
        feeds[name] = drawn.astype(dtype) if types.is_float(var.dtype) else np.abs(drawn).clip(0, 1).astype(dtype)
    return feeds


class _MutantLoader(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports one module with the error in it."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.module = ".".join(mutant.path.with_suffix("").parts)
        super().__init__(self.module, str(ROOT / mutant.path))

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if fullname != self.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=self.path)

    def get_code(self, fullname: str) -> Any:
        return compile(self.mutant.patch(Path(self.path).read_text()), self.path, "exec", dont_inherit=True)


def _reimport_with_mutant(mutant: Mutant) -> None:
    """Forget the package and import it with the error; coremltools' registry forgets its passes, too."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
        del sys.modules[name]
    sys.modules.pop("tests.lab.mutation.judge", None)
    sys.modules.pop("tests.lab.mutation.directed", None)
    for name in [name for name in PASS_REGISTRY.passes if name.startswith("ane::")]:
        del PASS_REGISTRY.passes[name]
    planter = _MutantLoader(mutant)
    sys.meta_path.insert(0, planter)
    importlib.import_module(_PACKAGE)
    importlib.import_module(planter.module)
