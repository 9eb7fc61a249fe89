"""Latency of real architectures after the preset full: none is slower but for what is said."""

from __future__ import annotations

import dataclasses

import pytest

from tests.lab.models.whole_latency import (
    TARGETS,
    TRANSFORMERS,
    LatencyResult,
    compute_geometric_mean,
    format_latency_summary,
    format_slower,
    format_steps,
    read_latencies,
)
from tests.lab.models.whole_table import read_record

ROWS = read_latencies()
SAMPLE = LatencyResult("name", "m4", (100.0, 50.0, 200.0), (104.0, 52.0, 208.0), (2, 2),
                       (0.0, 0.0), {"scaled_rms_norm": 1.04, "split_dma_notch": 1.0}, ("scaled_rms_norm",))


def test_fifty_architectures_are_recorded_for_each_chip():
    names = {each.architecture for each in ROWS}
    for target in TARGETS:
        assert {each.architecture for each in ROWS if each.target == target} == names
    known = {each.architecture for each in read_record()}
    assert 50 <= len(names) <= len(known) and names <= known
    assert known >= TRANSFORMERS and 30 < len(TRANSFORMERS & names) < len(names)


@pytest.mark.parametrize("each", [each for each in ROWS if each.is_slower],
                         ids=lambda each: f"{each.architecture} on {each.target}")
def test_what_is_slower_has_a_reason(each):
    assert each.reason


def test_a_slower_row_needs_a_reason():
    assert SAMPLE.is_slower and SAMPLE.reason == "fixes of wrong numbers: `scaled_rms_norm`"
    other = dataclasses.replace(SAMPLE, steps={"split_dma_notch": 1.04}, fixes=())
    assert other.is_slower and not other.reason
    assert not dataclasses.replace(other, off=(3, 2)).reason, "that ops leave the CPU is no reason"
    assert not dataclasses.replace(other, extrapolated=(10.0, 14.0)).reason, "nor that nobody measured them"
    assert not dataclasses.replace(SAMPLE, after=(101.9, 50.0, 200.0)).is_slower


def test_the_mean_is_geometric():
    assert compute_geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0) and compute_geometric_mean([]) == 1.0


def test_the_tables_are_made_of_the_record():
    assert len(format_latency_summary().splitlines()) > 8
    names = {name for each in ROWS for name in each.steps}
    assert len(format_steps().splitlines()) == 2 + len(names)
    slower = {each.architecture for each in ROWS if each.is_slower}
    assert {line.split(" | ")[0].strip("| ") for line in format_slower().splitlines()[2:]} == slower
