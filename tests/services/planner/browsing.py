"""A browser on the planner's page: what a user does, and what they see then. Who imports it is skipped without one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested in a real browser through selenium")
if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
    pytest.skip("the page is tested in chromium, with chromedriver", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from evenkeel.placement import PlanRequest, SolverOptions, Table, Topology
from evenkeel.placement.fields import encode

GIB = 1 << 30
SMALL = PlanRequest(
    tables=tuple(Table(name=f"t{i}", rows=1_000_000 << i, dim=64, ids_per_sample=1.0 + i) for i in range(3)),
    topology=Topology(
        ranks=8, ranks_per_host=8, hbm_bytes=139 * GIB, hbm_reserved_bytes=138 * GIB, host_bytes=16 * GIB
    ),
    solver=SolverOptions(ratio_steps=10),
)
"""Planned in a moment: its tables fit into 1.4 GiB of HBM, with 0.9 GiB they need a host, with 0.5 nothing fits."""
ROOMY = replace(SMALL, topology=Topology(ranks=8, hbm_bytes=139 * GIB))

_SECONDS = 60
_REQUESTS = """
window.asked = [];
const plain = window.fetch;
window.fetch = (path, options) => {
  window.asked.push([String(path), options?.body ?? null]);
  return plain(path, options);
};
"""


class Page:
    """The page in a browser."""

    def __init__(self, browser: webdriver.Chrome, url: str) -> None:
        self.browser, self.url = browser, url

    def open(self, hash_part: str = "", request: PlanRequest | None = None) -> None:
        """Loads the page afresh and waits for its plan: of a request that the tab remembers, else of the example."""
        self.browser.get(f"{self.url}/page/planner.css")
        self.run("sessionStorage.clear()")
        if request is not None:
            self.run("sessionStorage.setItem('evenkeel-planner-request', arguments[0])", json.dumps(encode(request)))
        self.browser.get(f"{self.url}/{hash_part}")
        self.wait(lambda: self.settled >= 1)

    def open_again(self) -> None:
        """Loads the page again, as this tab remembers it."""
        self.browser.refresh()
        self.wait(lambda: self.settled >= 1)

    def resize(self, width: int, height: int = 1200) -> None:
        """Gives the page a window of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    @property
    def settled(self) -> int:
        """How often an answer, or a problem, has been shown."""
        return int(self.run("return document.body.dataset.settled ?? 0"))

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.browser.execute_script(script, *arguments)

    def call(self, module: str, expression: str, *arguments: Any) -> Any:
        """What an expression over the exports of one of the page's modules, as `m`, gives; errors as `{error}`."""
        script = (
            f"const [a, done] = arguments; import('/page/{module}').then((m) => {expression})"
            ".then(done, (error) => done({ error: error.message }));"
        )
        return self.browser.execute_async_script(script, list(arguments))

    def wait(self, condition: Any) -> None:
        """Until something is so."""
        WebDriverWait(self.browser, _SECONDS, 0.05).until(lambda _: condition())

    @contextmanager
    def answered(self) -> Iterator[None]:
        """What is done inside is answered when the block ends."""
        before = self.settled
        yield
        self.wait(lambda: self.settled > before and not self.run("return document.querySelector('[aria-busy]')"))

    def find(self, selector: str) -> WebElement:
        """An element."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        """How many elements there are."""
        return len(self.browser.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        """What is to be read in an element."""
        return self.find(selector).text

    def fill(self, selector: str, value: str) -> None:
        """Gives an input a value, as typing or choosing does."""
        script = (
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', { bubbles: true }));"
        )
        self.run(script, selector, value)

    def change(self, selector: str, value: str) -> None:
        """Gives an input a value, and waits for the answer."""
        with self.answered():
            self.fill(selector, value)

    def click(self, selector: str) -> None:
        """Clicks."""
        self.run("arguments[0].scrollIntoView({ block: 'center' })", self.find(selector))
        self.find(selector).click()

    def give_file(self, path: Path) -> None:
        """Opens a file."""
        self.run("document.getElementById('file').hidden = false")
        self.find("#file").send_keys(str(path))
        self.run("document.getElementById('file').hidden = true")

    @property
    def milliseconds(self) -> float:
        """The time of a step in the headline."""
        number, unit = self.text("#headline").split()[:2]
        return float(number.replace(",", "")) * {"µs": 1e-3, "ms": 1.0, "s": 1e3}[unit]

    def watch_requests(self) -> None:
        """Notes from now on what the page asks."""
        self.run(_REQUESTS)

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies that it has sent to an address since."""
        return [json.loads(body) for where, body in self.run("return window.asked") if where == path]


@contextmanager
def browsing(url: str, downloads: Path) -> Iterator[Page]:
    """A page in a browser of its own, which reaches nobody but this machine."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,1500", "--no-proxy-server"):
        options.add_argument(flag)
    # Every name but the service's address leads nowhere: the page may need nothing else.
    options.add_argument("--host-resolver-rules=MAP * 127.0.0.1:9, EXCLUDE 127.0.0.1")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield Page(driver, url)
    finally:
        driver.quit()
