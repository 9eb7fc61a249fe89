"""Worked values of the 64-byte row rule."""

from __future__ import annotations

import pytest

from mil_ane_passes.passes.layout import ROW_BYTES, compute_padded_bytes, format_bytes


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((1, 768, 600, 1), 2, 29_491_200),
        ((1, 768, 1, 600), 2, 933_888),
        ((1, 768, 600), 2, 933_888),
        ((1, 384, 1, 1800), 2, 1_400_832),
        ((1, 384, 1800, 1), 2, 44_236_800),
        ((1, 4, 64), 1, 256),
        ((1, 4, 65), 1, 512),
        ((4, 1), 1, 256),
        ((1, 4, 16), 4, 256),
        ((1, 4, 17), 4, 512),
        ((), 2, 64),
        ((1,), 2, 64),
        ((32,), 2, 64),
        ((33,), 2, 128),
        ((3, 5), 2, 192),
        ((2, 3, 4, 5, 6), 2, 7_680),
        ((1, 0, 8), 2, 0),
    ],
)
def test_padded_bytes(shape, itemsize, expected):
    assert compute_padded_bytes(shape, itemsize) == expected


def test_a_last_axis_of_one_costs_32_times_at_fp16():
    assert compute_padded_bytes((1, 8, 32, 1), 2) == ROW_BYTES // 2 * (1 * 8 * 32 * 1 * 2)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (29_491_200, "29.5 MB"),
        (933_888, "933.9 kB"),
        (1_400_832, "1.40 MB"),
        (3_100, "3.10 kB"),
        (64, "64 B"),
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (1_000_000, "1.00 MB"),
    ],
)
def test_sizes_in_words(count, expected):
    assert format_bytes(count) == expected
