"""A sample of the grid in the default run, all of it behind the marker."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from .grid.cases import cases, outcome
from .grid.run import LEAST, RESULTS

ONE_IN = 160
_PARTS = 8
"The slow test is cut, so that all processes have a part."


def test_the_grid_is_large_enough() -> None:
    every = list(cases())
    assert len(every) >= 600 and len({str(case) for case in every}) == len(every)
    assert {case.frontend for case in every} == {"trace", "script", "export"}
    assert RESULTS.exists()


def counted(one_in: int, start: int) -> None:
    verdicts: Counter[str] = Counter()
    for case in itertools.islice(cases(), start, None, one_in):
        found = outcome(case, patched=True)
        verdicts[found.verdict] += 1
        assert found.verdict != "wrong", f"{case}: {found.reason}"
        assert found.verdict != "refused" or found.reason, case
    judged = sum(verdicts.values()) - verdicts["torch"]
    assert judged >= 4000 // one_in * 0.8 and verdicts["right"] >= LEAST * judged, verdicts


def test_a_sample_is_right() -> None:
    counted(ONE_IN, 7)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(_PARTS))
def test_all_of_it_is_right(start: int) -> None:
    counted(_PARTS, start)


def test_the_host_alone_is_seen_to_be_wrong() -> None:
    """The grid can fail: what the issue tracker tells of coremltools shows."""
    verdicts = {outcome(case, patched=False).verdict for case in cases()
                if case.form.name in ("last element = 0", "clamp_", "% 1") and (case.rank, case.dtype) == (3, "float32")
                and not case.flexible and case.frontend == "trace"}
    assert verdicts == {"wrong"}
