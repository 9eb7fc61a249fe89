"""The cases of the grid, and what becomes of one: right, refused with a reason, or silently wrong."""

from __future__ import annotations

import functools
import linecache
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import coremltools as ct
import numpy as np
import torch

from ..checks import captured, convert_captured, outputs, silence
from .forms import FORMS, Form

__all__ = ["Case", "Outcome", "cases", "outcome"]

_SIZES = {1: (5,), 2: (5, 5), 3: (3, 4, 5), 4: (3, 4, 3, 5)}
_OTHER_SIZES = {1: (7,), 2: (6, 7), 3: (4, 4, 7), 4: (4, 4, 3, 8)}
_TARGETS = {"iOS16": ct.target.iOS16, "iOS18": ct.target.iOS18}
_LOWEST = 3


@dataclass(frozen=True)
class Case:
    form: Form
    rank: int
    dtype: str
    flexible: bool
    frontend: str
    target: str

    def __str__(self) -> str:
        sizes = "flexible" if self.flexible else "fixed"
        return f"{self.form.name}, rank {self.rank}, {self.dtype}, {sizes}, {self.frontend}, {self.target}"


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "right", "refused" or "wrong"; "torch" where PyTorch itself cannot run or capture the form."""

    verdict: str
    reason: str = ""


def cases() -> Iterator[Case]:
    """Every case, in a fixed order."""
    for form in FORMS:
        for rank in form.ranks:
            for dtype in form.dtypes:
                for flexible in (False, True)[:1 + form.flexible]:
                    for frontend in form.frontends:
                        for target in _TARGETS:
                            yield Case(form, rank, dtype, flexible, frontend, target)


@functools.cache
def function_of(form: Form, rank: int, dtype: str) -> Any:
    """The form as a Python function whose source can be read, as TorchScript needs."""
    body = form.body.format(reversed=", ".join(str(axis) for axis in reversed(range(rank))))
    results = "x, y" if "y = " in body else "x"
    as_float = ".to(torch.float32)" if dtype == "bool" else ""
    lines = ["def form(x: torch.Tensor):", "    x = x > 0" if dtype == "bool" else "", f"    {body}",
             f"    return {results}{as_float}", ""]
    source = "\n".join(line for line in lines if line) + "\n"
    name = f"<form {form.name}, rank {rank}, {dtype}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(compile(source, name, "exec"), space)  # the text is that of forms.py
    return space["form"]


def outcome(case: Case, patched: bool) -> Outcome:
    """Convert one case and compare its values with PyTorch at one size, or at two when it is flexible."""
    function = function_of(case.form, case.rank, case.dtype)
    axes = tuple(sorted({0, case.rank - 1})) if case.flexible else ()
    feeds = [_feed(case, _SIZES)] + ([_feed(case, _OTHER_SIZES)] if case.flexible else [])
    with warnings.catch_warnings(), redirect_stderr(StringIO()), silence():
        warnings.simplefilter("ignore")
        try:
            expected = [function(feed.clone()) for feed in feeds]
            program = captured(function, feeds[:1], case.frontend, axes, _LOWEST)
            if case.frontend == "trace" and _compared([_as_arrays(program(feeds[-1].clone()))], expected[-1:]).reason:
                return Outcome("torch", "the trace holds for the traced size only")
        except Exception as error:
            return Outcome("torch", str(error).strip().splitlines()[0] if str(error).strip() else "")
        try:
            # Not read again: coremltools neither reads nor converts an element of small vectors that are joined.
            model = convert_captured(program, feeds[:1], case.frontend, flexible=axes, target=_TARGETS[case.target],
                                     patched=patched, lowest=_LOWEST, readable=False)
            found = [outputs(model, [feed]) for feed in feeds]
        except Exception as error:
            text = str(error).strip()
            return Outcome("refused", f"{type(error).__name__}: {text.splitlines()[0] if text else ''}")
    return _compared(found, expected)


def _as_arrays(results: Any) -> list[Any]:
    return [tensor.numpy() for tensor in ([results] if isinstance(results, torch.Tensor) else results)]


def _compared(found: list[list[Any]], expected: list[Any]) -> Outcome:
    for ours, theirs in zip(found, expected, strict=True):
        wanted = [theirs] if isinstance(theirs, torch.Tensor) else list(theirs)
        if len(ours) != len(wanted):
            return Outcome("wrong", f"{len(ours)} outputs instead of {len(wanted)}")
        for one, tensor in zip(ours, wanted, strict=True):
            other = tensor.numpy()
            if np.shape(one) != other.shape and np.shape(one) != (other.shape or (1,)):
                return Outcome("wrong", f"shape {np.shape(one)} instead of {other.shape}")
            if not np.allclose(np.reshape(one, other.shape), other, rtol=1e-4, atol=1e-5, equal_nan=True):
                apart = np.nanmax(np.abs(np.reshape(one, other.shape) - other))
                return Outcome("wrong", f"values differ by up to {apart}")
    return Outcome("right")


def _feed(case: Case, sizes: dict[int, tuple[int, ...]]) -> torch.Tensor:
    shape = sizes[case.rank]
    count = int(np.prod(shape))
    numbers = np.random.default_rng(case.rank).permutation(count).reshape(shape) - count // 2
    return torch.tensor(numbers) if case.dtype == "int32" else torch.tensor(numbers / 4, dtype=torch.float32)
