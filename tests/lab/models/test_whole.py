"""Real architectures after the preset full: fewer ops are refused wherever there were some, and none costs too much."""

from __future__ import annotations

import dataclasses

import pytest

from tests.lab.models.whole_table import TARGETS, ArchitectureResult, format_summary, read_record
from tests.lab.versions.needs import coremltools_from

ROWS = read_record()
UNCHANGED_UNSUPPORTED = {("BigVGAN", "m1"): "sin", ("DAC decoder", "m1"): "sin"}
"""Where as many ops are unsupported as before, and which: sin is unsupported on M1 and has no exact form."""
CORRECT_RESULT = ArchitectureResult(
    "name", "m4", (10, 8), (100, 100), (3, 1), (3, 1), (0.2, 0.1), 0.2, (2, 1), "rounding", (1e-3, 1e-3)
)


def test_sixty_architectures_are_recorded_for_each_target():
    for target in TARGETS:
        assert len({each.architecture for each in ROWS if each.target == target}) >= 60


@pytest.mark.parametrize("each", ROWS, ids=lambda each: f"{each.architecture} on {each.target}")
def test_what_was_recorded_is_as_it_should_be(each):
    stuck = UNCHANGED_UNSUPPORTED.get((each.architecture, each.target))
    assert [fault for fault in each.faults if not (stuck and fault.endswith("refused"))] == []
    assert not stuck or set(each.left) == {stuck}


@pytest.mark.parametrize(("change", "fault"), [
    ({"refused": (3, 3)}, "3 -> 3 refused"), ({"refused": (0, 1)}, "0 -> 1 refused"),
    ({"cost": (0.2, 0.21)}, "cost 0.200 -> 0.210 ms, fixes 0.200"), ({"proved": "different"}, "different"),
    ({"error": (1e-3, 2e-2)}, "error 1.0e-03 -> 2.0e-02")])
def test_the_check_can_fail(change, fault):
    assert CORRECT_RESULT.faults == [] and dataclasses.replace(CORRECT_RESULT, **change).faults == [fault]


def test_growth_by_fixes_of_wrong_numbers_counts_too():
    """A fix may cost more than the guard allows; a reader of the summary still wants to know."""
    fixed = dataclasses.replace(CORRECT_RESULT, cost=(0.2, 0.21), cures=0.21)
    assert not fixed.faults and fixed.costs_more and not CORRECT_RESULT.costs_more
    more = [each for each in ROWS if each.target == "m4" and each.cost[1] > each.cost[0] * 1.01]
    (line,) = (line for line in format_summary().splitlines() if line.startswith("| predicted to cost more than 1 %"))
    assert line.split(" | ")[1] == str(len(more))


NEEDS_COREMLTOOLS_9 = coremltools_from("9.0", "leaves the indices of a gather alone: fewer ops than are recorded")


@pytest.mark.parametrize("name", [
    "ViT", pytest.param("GPT-2", marks=[NEEDS_COREMLTOOLS_9, pytest.mark.slow]),
    pytest.param("DETR", marks=pytest.mark.slow)])
def test_a_few_are_still_as_recorded(name, tmp_path):
    pytest.importorskip("torch")
    from tests.lab.models.more import ALL_ARCHITECTURES
    from tests.lab.models.whole import measure_targets

    architecture = next(each for each in ALL_ARCHITECTURES if each.name == name)
    if architecture.missing():
        pytest.skip(architecture.missing())
    known = {each.target: each for each in ROWS if each.architecture == name}
    for found in measure_targets(architecture, tmp_path):
        row = known[found.target]
        for what in ("ops", "refused", "off", "switches", "proved", "fired", "undone", "left"):
            assert getattr(found, what) == getattr(row, what), what
        assert found.cost == pytest.approx(row.cost) and found.faults == []
