"""What the pytest plugins of the lab share: a seed and a time limit for each case, and one JSON line of its outcome."""

from __future__ import annotations

import json
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

__all__ = ["append_case", "draw_anew", "get_case_name", "limit_time"]


def draw_anew(case: str) -> None:
    """Seed numpy and torch by the name of a case, which draws its own numbers then, whichever ran before it."""
    seed = zlib.crc32(case.encode())
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def limit_time(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block when it is not done after so many seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def get_case_name(item: Any) -> str:
    """Return the name from the test's folder on: paths differ between machines."""
    return f"{'/'.join(item.path.parts[-2:])}::{item.nodeid.split('::', 1)[1]}"


def append_case(path: str, item: Any, call: Any, report: Any, reached: int, longest: int = 600) -> None:
    """Append the outcome of a case to a file of JSON lines; `reached` counts its predictions."""
    message = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
    line = {"case": get_case_name(item), "outcome": report.outcome, "reached": reached,
            "seconds": round(report.duration, 2), "message": message[:longest]}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
