"""The balancer's page in a real browser, against a real balancer with a running job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

pytest.importorskip("tests.services.planner.browsing")

from selenium.webdriver.common.keys import Keys

from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from services.security.tokens import hash_token
from tests.services.balancer.watched import TROUBLE, WatchedJob
from tests.services.planner.browsing import browsing

if TYPE_CHECKING:
    from tests.services.planner.browsing import Page

JOB = "a-train-4711"
RANKS, LATE = 4, 2
TOKEN = "token-of-team-a-0123456789abcdef0123456789abcdef"
PIXELS = "const box = arguments[0].getBoundingClientRect(); return [box.width, document.documentElement.scrollWidth];"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def balancer(folder: Path) -> Iterator[ServiceProcess]:
    port, known = folder / "metrics_port", folder / "tokens.yml"
    known.write_text(yaml.safe_dump({"tokens": [{"name": "a", "sha256": hash_token(TOKEN), "jobs": ["a-*"]}]}))
    with running_balancer(
        "--metrics-port", "0", "--metrics-port-file", str(port), "--token-file", str(known)
    ) as running:
        yield running


@pytest.fixture(scope="module")
def opened(balancer: ServiceProcess, folder: Path) -> Iterator[Page]:
    port = (folder / "metrics_port").read_text().strip()
    with (
        WatchedJob(balancer.address, JOB, ranks=RANKS, late=LATE, slow=0, token=TOKEN) as job,
        browsing(f"http://127.0.0.1:{port}", folder) as page,
    ):
        page.wait(lambda: job.planned > 20)
        yield page


@pytest.fixture
def page(opened: Page) -> Page:
    """All jobs, signed in."""
    opened.resize(1300)
    emulate(opened)
    opened.browser.get(f"{opened.url}/page/icon.svg")
    opened.browser.get(opened.url)
    opened.run("sessionStorage.setItem('evenkeel-balancer-token', arguments[0])", TOKEN)
    opened.browser.refresh()
    opened.wait(lambda: opened.count("#streams tbody tr"))
    return opened


def text(page: Page, selector: str) -> str:
    """What is to be read now: the page draws its parts anew while it is looked at."""
    return str(page.run("return document.querySelector(arguments[0]).innerText", selector))


def texts(page: Page, selector: str) -> list[str]:
    """The same of all that match."""
    found: list[str] = page.run(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", selector
    )
    return found


def attribute(page: Page, selector: str, name: str) -> str:
    """An attribute of an element now."""
    return str(
        page.run("return document.querySelector(arguments[0])?.getAttribute(arguments[1]) ?? ''", selector, name)
    )


def emulate(page: Page, **features: str) -> None:
    wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})


def open_job(page: Page) -> None:
    page.click("#streams tbody a")
    page.wait(lambda: page.count("#ranks .rank") == RANKS)


def test_without_a_token_the_page_asks_for_one(opened: Page) -> None:
    page = opened
    page.browser.get(page.url)
    page.run("sessionStorage.clear()")
    page.browser.refresh()
    page.wait(lambda: page.run("return document.getElementById('login').open"))
    assert text(page, "#headline") == "Sign in to see jobs"
    assert page.count("#streams tbody tr") == 0
    page.find("#token").send_keys("wrong", Keys.ENTER)
    page.wait(lambda: "unknown token" in text(page, "#login-problem"))
    page.find("#token").send_keys(TOKEN, Keys.ENTER)
    page.wait(lambda: page.count("#streams tbody tr") == 1)
    assert page.run("return document.getElementById('login').open") is False
    page.click("#sign")  # out again
    page.wait(lambda: text(page, "#headline") == "Sign in to see jobs")


def test_jobs_are_listed_live(page: Page) -> None:
    assert text(page, "#headline") == "1 stream of jobs"
    cells = texts(page, "#streams tbody tr > *")
    assert cells[:3] == [f"{JOB} / train", "balanced", str(RANKS)]
    before, after, bound = (float(cell) for cell in cells[4:7])
    assert before > after >= bound >= 1.0
    assert int(cells[9]) >= 3  # by rank 0
    settled = page.settled
    page.wait(lambda: page.settled >= settled + 2)  # it goes on by itself


def test_one_job_is_shown_live_with_rounds_ranks_and_trouble(page: Page) -> None:
    open_job(page)
    assert text(page, "#one-title") == f"{JOB} / default / train"
    assert "balanced" in text(page, "#headline")
    assert page.count("#curve path.line.before") == page.count("#curve path.line.bound") == 1
    first = attribute(page, "#curve svg", "aria-label")
    page.wait(lambda: attribute(page, "#curve svg", "aria-label") != first)
    facts = dict(zip(text(page, "#facts").splitlines()[::2], text(page, "#facts").splitlines()[1::2], strict=True))
    assert facts["State"] == "balanced"
    assert float(facts["GPU-hours saved"]) > 0
    assert float(facts["Rounds a second"]) > 0
    assert int(facts["Planned by rank 0"]) >= 3
    assert TROUBLE in text(page, "#trouble")
    assert "No call of this job has failed here" in text(page, "#trouble")
    late = f"Rank {LATE} loads data too slowly since round 3, by 50.0 % of the median rank's computing time."
    slow = "Rank 0 computes at 80.0 % of the median rank's speed since round 5, and gets less work."
    assert f"{late} {slow}" in text(page, "#ranks-text")
    assert "slow" in attribute(page, f"#ranks .rank:nth-child({LATE + 1})", "class")
    widths = page.run("return [...document.querySelectorAll('.bars .after')].map((bar) => parseFloat(bar.style.width))")
    assert max(widths) / min(widths) < 1.2  # as planned they are even
    for kind in ("moved", "seconds"):
        page.click(f"[name=drawn][value={kind}]")
        assert page.count("#curve path.line.after") == 1
    assert attribute(page, "#curve svg", "aria-label").startswith("Seconds of rounds")
    errors = [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert [entry for entry in errors if not any(word in entry["message"] for word in ("401", "favicon"))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark_and_fits_narrow_windows(page: Page, scheme: str) -> None:
    emulate(page, prefers_color_scheme=scheme)
    for width in (360, 1300):
        page.resize(width)
        open_job(page)
        assert page.run(PIXELS, page.find("#one"))[1] <= width
        page.click("#one a[href='#']")
        page.wait(lambda: page.count("#streams tbody tr"))
        assert page.run(PIXELS, page.find("#overview"))[1] <= width
    contrast = page.run("""
        const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
          .map((part) => (part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4))
          .reduce((sum, part, at) => sum + part * [.2126, .7152, .0722][at], 0);
        const paper = light(getComputedStyle(document.body).backgroundColor);
        return [...document.querySelectorAll('h2, td, th, a, .hint, .state')].filter((one) => one.offsetParent)
          .map((one) => [light(getComputedStyle(one).color), paper].sort((a, b) => b - a))
          .map(([more, less]) => (more + .05) / (less + .05));
    """)
    assert min(contrast) >= 4.5


def test_all_of_it_is_reached_by_keyboard_and_named_for_screen_readers(page: Page) -> None:
    focus = page.run("""
        return [...document.querySelectorAll('a, button, input, summary, [tabindex="0"]')]
          .filter((one) => one.offsetParent && one.tabIndex < 0).map((one) => one.outerHTML);
    """)
    assert focus == []
    link = page.find("#streams tbody a")
    page.run("arguments[0].focus()", link)
    settled = page.settled
    page.wait(lambda: page.settled > settled)  # drawn again: the focus stays where it was
    assert page.run("return document.activeElement.textContent") == f"{JOB} / train"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait(lambda: page.count("#ranks .rank") == RANKS)
    assert page.run("return document.activeElement.id") == "one-title"
    tree: Any = page.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})
    nodes = [
        (node.get("role", {}).get("value"), node.get("name", {}).get("value", ""))
        for node in tree["nodes"] if not node.get("ignored")
    ]  # fmt: skip
    assert [name for role, name in nodes if role in ("button", "link", "radio", "textbox", "image") and not name] == []
    assert any(role == "image" and name.startswith("Max/mean load of rounds") for role, name in nodes)
    assert any(role == "listitem" and name.startswith(f"rank {LATE}: load") for role, name in nodes)
    assert any(role == "status" for role, _ in nodes)


def test_a_hidden_page_asks_for_nothing(page: Page) -> None:
    page.run("""
        window.opened = 0;
        const plain = window.fetch;
        window.fetch = (...given) => { window.opened++; return plain(...given); };
        Object.defineProperty(document, 'hidden', { configurable: true, get: () => window.away ?? false });
        window.away = true;
        document.dispatchEvent(new Event('visibilitychange'));
    """)
    settled = page.settled
    time.sleep(1.5)  # nothing comes
    assert page.settled == settled
    page.run("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(lambda: page.settled > settled)
    assert page.run("return window.opened") == 1


def test_a_job_that_has_ended_is_shown_again_when_it_comes_back(page: Page, balancer: ServiceProcess) -> None:
    page.run("location.hash = 'job=a-again'")
    page.wait(lambda: "a-again" in text(page, "#problem"))
    with WatchedJob(balancer.address, "a-again", ranks=2, late=1, token=TOKEN):
        page.wait(lambda: text(page, "#headline") == "a-again: balanced")
        assert text(page, "#problem") == ""
