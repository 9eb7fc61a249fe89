"""The cases of coremltools' own op tests that come to a prediction and do not pass here, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["EXPLAINED", "Explained", "explanation"]


@dataclass(frozen=True)
class Explained:
    """`pattern` is searched for in the case's name, `FILE::CLASS::TEST[parameters]`."""

    suite: str
    pattern: str
    reason: str

    def covers(self, case: str) -> bool:
        return re.search(self.pattern, case) is not None


EXPLAINED: tuple[Explained, ...] = (
    Explained("mil", r"iOS15/test_image_resizing\.py::TestCropResize::test_builder_to_backend_smoke",
              "the box [2, 2, 1, 1] lies outside the interval [0, 1] that the op documents for normalized boxes; the "
              "test expects the whole image, which no reading of the documentation gives"),
)


def explanation(case: str) -> str | None:
    """Why `case` does not pass, None when nobody has said."""
    return next((entry.reason for entry in EXPLAINED if entry.covers(case)), None)
