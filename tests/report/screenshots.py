"""Makes the pictures of the report that the README shows.

    python -m tests.report.screenshots [FOLDER]

Needs torch, selenium, Pillow, Chromium and its driver. The folder is fixtures/report, unless one is given. Fonts differ
between machines, and so do the pictures' bytes.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mil_ane_passes as ane
from mil_ane_passes.report.html import build_page
from tests.report.chromium import browser, complaints, missing, open_page

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "report"
SIZE = (1280, 1330)
MOST = 200_000
SHOWN = """
const [theme, part] = arguments;
document.documentElement.dataset.theme === theme || document.getElementById('theme').click();
const items = [...document.querySelectorAll('#finding-list .item')];
items.find((one) => one.textContent.includes(theme === 'light' ? 'cumsum' : 'lstm')).click();
document.getElementById(part).scrollIntoView();
scrollBy(0, part === 'summary' ? -200 : 0);
"""


def convert(path: Path) -> None:
    """The speech synthesiser as a package for iOS 18, in fp16."""
    import coremltools as ct
    import torch

    from tests.report.speaker import speaker

    model, example = speaker()
    with torch.no_grad():
        traced = torch.jit.trace(model, example)
    ct.convert(
        traced,
        inputs=[ct.TensorType("text", shape=example.shape)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    ).save(str(path))


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In `folder`, so that the page shows a short path."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def small(png: bytes) -> bytes:
    """The picture in 256 colours."""
    from PIL import Image

    made = io.BytesIO()
    picture: Any = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


def main(folder: Path) -> int:
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, inside(Path(work)), browser() as driver:
        convert(Path("speaker.mlpackage"))
        text = build_page(ane.lint("speaker.mlpackage", target="m4"))
        for theme, part in (("light", "summary"), ("dark", "graph")):
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False},
            )
            open_page(driver, text, Path(work))
            driver.execute_script(SHOWN, theme, part)
            driver.execute_async_script("setTimeout(arguments[0], 400)")
            picture = small(driver.get_screenshot_as_png())
            assert not complaints(driver) and len(picture) <= MOST, len(picture)
            (folder / f"{theme}.png").write_bytes(picture)
            print(f"{folder / theme}.png: {len(picture)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
