"""The large decoder: its package is one that `adapt` recognizes, and the page has what was recorded last."""

from __future__ import annotations

import copy

import pytest

from tests.lab import records
from tests.lab.language_models import large

RECORD = {"run": {"machine": "a machine", "date": "2026-01-01", "versions": {"python": "3"}, "busy": False},
          "layers": 16, "bytes": 2_000_000_000, "costs": {
              large.COPY: {"seconds": 2.0, "megabytes": 2}, large.UNCHECKED: {"seconds": 31.0, "megabytes": 900},
              large.CHECKED: {"seconds": 500.0, "megabytes": 9_000}}}


def test_the_page_has_what_was_recorded():
    from tests.lab.language_models.__main__ import PAGE

    rest = PAGE.read_text(encoding="utf-8").partition("<!-- billion -->\n")[2]
    assert rest.partition("\n<!-- end of billion -->")[0] == large.format_section(records.read_record(large.RECORD, {}))


def test_a_bound_that_is_missed_is_marked():
    text = large.format_section(RECORD)
    assert "1,000,000,000 weights in 16 layers, 2.00 GB" in text and "MISSED" not in text
    assert "| `adapt --no-verify` | 31 s | 900 MB | 30 s beyond `cp -r`, 1,500 MB |" in text
    for name, key, value in ((large.UNCHECKED, "seconds", 33.0), (large.UNCHECKED, "megabytes", 1_600),
                             (large.CHECKED, "seconds", 901.0), (large.CHECKED, "megabytes", 12_001)):
        missed = copy.deepcopy(RECORD)
        missed["costs"][name][key] = value
        assert large.format_section(missed).count("MISSED") == 1 and not large.is_within_bounds(name, missed)


@pytest.mark.slow
def test_the_large_decoder_is_adapted(tmp_path):
    import mil_ane_passes as ane

    source = large.make_package(tmp_path / "source.mlpackage", layers=2, context=32, scale=16)
    report = ane.adapt(source, tmp_path / "out", prefill=4)
    assert report.status == "written" and report.after["unsupported"] == {}, str(report)
