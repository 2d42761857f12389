"""Takes the pictures of the planner's page for the documentation: `python -m scripts.take_pictures`.

Needs chromium and chromedriver. The pictures are reduced to a few colours, so that they stay small.
"""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from services.operations.launch import running_service
from tests.services.planner.browsing import Page, browsing

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 1240
COLOURS = 128
LARGEST_BYTES = 150_000


def take(page: Page, top: str, bottom: str, name: str) -> None:
    """Writes what the page shows from the beginning of one element to the end of another."""
    script = """
        const [first, last] = [...arguments].map((one) => document.querySelector(one).getBoundingClientRect());
        return [Math.max(0, first.left - 12), Math.max(0, first.top + scrollY), last.bottom + scrollY];
    """
    left, begin, end = page.run(script, top, bottom)
    clip = {"x": left, "y": begin, "width": WIDTH - left, "height": end - begin + 12, "scale": 1}
    wanted = {"format": "png", "captureBeyondViewport": True, "clip": clip}
    shot = page.browser.execute_cdp_cmd("Page.captureScreenshot", wanted)
    picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    path = FOLDER / name
    picture.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {picture.width} × {picture.height}, {size / 1000:.0f} kB")
    assert size < LARGEST_BYTES


def main() -> int:
    """Takes them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service("services.planner") as planner,
        browsing(f"http://{planner.address}", Path(folder)) as page,
    ):
        page.open()
        page.resize(WIDTH, 1900)
        page.wait(lambda: page.count("#curve path.line"))
        take(page, "header", "#placements", "planner_page.png")
        page.click("#keep")
        page.change("#hbm", "12.5")
        take(page, "#comparison", "#comparison .sides", "planner_compare.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
