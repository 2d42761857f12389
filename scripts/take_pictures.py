"""Takes the pictures of the services' pages for the documentation: `python -m scripts.take_pictures`.

Needs chromium and chromedriver. The pictures are reduced to a few colours, so that they stay small.
"""

from __future__ import annotations

import base64
import contextlib
import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.harness.authorities import channel
from services.operations.launch import running_service
from tests.services.balancer.jobs import RunningJob, watched
from tests.services.planner.browsing import Page, browsing

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 1240
COLOURS = 128
ROUNDS = 120
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


def take_planner(folder: Path) -> None:
    """The planner's page, with the example."""
    with running_service("services.planner") as planner, browsing(f"http://{planner.address}", folder) as page:
        page.open()
        page.resize(WIDTH, 1900)
        page.wait(lambda: page.count("#curve path.line"))
        take(page, "header", "#placements", "planner_page.png")
        page.click("#keep")
        page.change("#hbm", "12.5")
        take(page, "#comparison", "#comparison .sides", "planner_compare.png")


def take_balancer(folder: Path) -> None:
    """The balancer's page, with three jobs, one of which has a rank that loads slowly and one that computes slowly."""
    port = folder / "port"
    flags = ("--metrics-port", "0", "--metrics-port-file", str(port))
    with contextlib.ExitStack() as stack:
        balancer = stack.enter_context(running_service("services.balancer", *flags))
        for job, ranks in (("a-ranking-4711", 8), ("a-retrieval-4698", 4), ("b-hstu", 2)):
            slow = 2 if ranks == 8 else None
            facts = watched(5 if ranks == 8 else 0, slow)
            running = RunningJob(lambda: channel(balancer.address, None), job, ranks=ranks, facts=facts)
            stack.enter_context(running)
        page = stack.enter_context(browsing(f"http://127.0.0.1:{port.read_text().strip()}", folder))
        page.browser.get(page.url)
        page.resize(WIDTH, 1900)
        page.wait(lambda: page.count("#streams tbody tr") == 3 and running.planned > ROUNDS)
        take(page, "header", "#streams", "balancer_jobs.png")
        page.run("document.querySelector('#streams a[href*=ranking]').click()")
        page.wait(lambda: page.count("#ranks .rank") == 8)
        take(page, "header", "#ranks", "balancer_job.png")
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        take(page, "header", "#ranks", "balancer_job_dark.png")


def main() -> int:
    """Takes them: all, or those of the services that are named."""
    services = {"planner": take_planner, "balancer": take_balancer}
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or services:
            services[name](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
