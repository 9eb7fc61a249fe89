"""The latency model on the measurements that may be passed on, with the shipped parameters."""

from __future__ import annotations

import numpy as np
import pytest

from mil_ane_passes.ane.latency import estimate_latency
from mil_ane_passes.ane.latency_parameters import MEASURED_CHIPS, find_chips

from . import fit, pairs, programs, rows
from .report import collect_errors, format_pairs, format_report, judge_pairs


@pytest.fixture(scope="module")
def cases():
    return rows.make_cases(rows.read_rows(rows.FIXTURE))[0]


def test_the_shipped_parameters_meet_the_target_on_conv_and_linear_rows(cases):
    shipped = {name: find_chips(name)[0] for name in MEASURED_CHIPS}
    errors = collect_errors(cases, {case.id: fit.predict(case, shipped[case.chip]) for case in cases})
    found = np.abs(errors["all", "conv and linear"])
    assert len(found) > 380 and np.median(found) <= 0.15 and np.percentile(found, 90) <= 0.45


@pytest.mark.slow
def test_the_faster_form_of_a_pair_is_chosen():
    table = rows.read_rows(pairs.FIXTURE)
    judged, reasons = judge_pairs(table)
    assert len(judged) + len(reasons) == len(table) and len(judged) > 40
    assert sum(pair.right for pair in judged) >= 0.85 * len(judged)
    text = format_pairs(judged, reasons)
    assert all(name in text for name in reasons)


def test_held_out_groups_are_not_in_their_own_fit(cases, monkeypatch):
    seen = []
    fitted = {name: {key: prior.value for key, prior in {**fit.PRIORS[name], **fit.FIXED.get(name, {})}.items()}
              for name in fit.PRIORS}

    def record(name, mine):
        seen.append({case.group for case in mine})
        return fitted[name]
    monkeypatch.setattr(fit, "fit_chip", record)
    found = fit.hold_out(cases)
    assert set(found) == {case.id for case in cases}
    groups = {case.group for case in cases}
    assert len(seen) == len(groups) and all(any(group not in used for used in seen) for group in groups)


def test_the_fit_is_deterministic_and_stays_near_what_is_cited(cases):
    one, other = (fit.fit_chip("m3", cases) for _ in range(2))
    assert one == other
    assert all(0.5 < one[key] / prior.value < 2 for key, prior in fit.PRIORS["m3"].items())


def test_a_row_and_its_program_have_the_same_estimate():
    row = next(row for row in rows.read_rows(rows.FIXTURE)
               if "in=1x512x1x256 w=512x512x1x1" in row["shapes"] and row["repeat"] == "16")
    case = rows.make_case(row)
    program = programs.conv_chain((1, 512, 1, 256), (512, 512, 1, 1), layers=16, shared=not case.own)
    chip, = find_chips(case.chip)
    assert fit.predict(case, chip) == pytest.approx(estimate_latency(program, target="m6").latency_us)


def test_rows_that_say_nothing_of_the_ane_have_a_reason():
    row = {"id": "x", "source": "s", "licence": "MIT", "chip": "M6", "api": "CoreML", "op": "conv chain",
           "shapes": "in=1x8x1x8 w=8x8x1x1", "dtype": "fp16", "repeat": "4", "metric": "us", "value": "10",
           "notes": "RAN ON CPU"}
    assert rows.make_case(row) == "ran on the CPU"
    assert rows.make_case({**row, "notes": "", "chip": "Mac"}) == "chip not stated"
    assert rows.make_case({**row, "notes": "", "dtype": "blockwise int4"}) == "format not built: blockwise int4"
    assert rows.make_case({**row, "notes": "", "value": "17-19"}).startswith("value is not a time")
    assert rows.make_case({**row, "notes": ""}).layers == 4


def test_the_report_names_each_chip_and_reason(cases):
    found = {case.id: case.value_us * 1.1 for case in cases}
    text = format_report(cases, {"x": "chip not stated"}, {"held out": found}, {})
    assert "| all | conv and linear |" in text and "10.0 % | 10.0 %" in text and "- 1: chip not stated" in text
