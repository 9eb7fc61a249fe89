"""Measures how many frames a second the graph of the report draws while it is dragged.

    python -m tests.report.panning [OPS ...]

Needs selenium, Chromium and its driver. Chromium draws without a GPU here, so that a machine with one is faster. The
figures say little while other programs run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import mil_ane_passes as ane
from mil_ane_passes.report.html import build_page
from tests.report import programs
from tests.report.chromium import browser, complaints, missing, open_page

SIZES = (2_500, 10_000)
MILLISECONDS = 3_000
DRAG = """
const [zooms, milliseconds, done] = arguments;
const canvas = document.getElementById('canvas');
canvas.scrollIntoView();
document.getElementById('zoom-fit').click();
for (let step = 0; step < zooms; step++) document.getElementById('zoom-in').click();
const box = canvas.getBoundingClientRect();
const send = (type, frame) => canvas.dispatchEvent(new PointerEvent(type, {
    pointerId: 1, bubbles: true, clientX: box.x + 300 + 200 * Math.sin(frame / 20), clientY: box.y + 150}));
canvas.setPointerCapture = () => {};
send('pointerdown', 0);
const seen = new Set();
const times = [];
let from = 0;
requestAnimationFrame(function next(now) {
    from ||= now;
    times.push(now);
    seen.add(canvas.dataset.centre);
    if (now - from < milliseconds) {
        send('pointermove', times.length);
        requestAnimationFrame(next);
        return;
    }
    send('pointerup', times.length);
    const gaps = times.slice(1).map((time, place) => time - times[place]).sort((a, b) => a - b);
    done({rate: 1000 * gaps.length / (now - from), slowest: gaps[Math.floor(gaps.length * 0.95)],
          drawn: Number(canvas.dataset.drawn), moved: seen.size});
});
"""


def measure_panning(driver: Any, zooms: int, milliseconds: int = MILLISECONDS) -> dict[str, float]:
    """Drag the graph of the open page, after so many steps of zoom from the whole graph.

    Returns frames a second (`rate`), the 95th percentile of the time between frames in ms (`slowest`), the number of
    ops `drawn` in the last one, and how many places were seen (`moved`).
    """
    found: dict[str, float] = driver.execute_async_script(DRAG, zooms, milliseconds)
    return found


def main(sizes: tuple[int, ...]) -> int:
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as work, browser() as driver:
        for size in sizes:
            open_page(driver, build_page(ane.lint(programs.large(size), target="m4")), Path(work))
            for zooms in (0, 4, 9):
                found = measure_panning(driver, zooms)
                print(f"{size:,} ops, {found['drawn']:,.0f} drawn: {found['rate']:.0f} frames a second, 95 % of them "
                      f"within {found['slowest']:.0f} ms")
            assert not complaints(driver)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tuple(map(int, sys.argv[1:])) or SIZES))
