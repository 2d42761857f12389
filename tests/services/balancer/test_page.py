"""The balancer's page in a real browser, against a real balancer with a running job."""

from __future__ import annotations

import json
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
from tests.services.balancer.watched import GAP, WatchedJob
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
        WatchedJob(balancer.address, JOB, ranks=RANKS, late=LATE, token=TOKEN) as job,
        browsing(f"http://127.0.0.1:{port}", folder) as page,
    ):
        page.wait(lambda: job.decided > GAP[1] + 5)
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
    opened.wait(lambda: opened.count("#sessions tbody tr"))
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
    page.click("#sessions tbody a")
    page.wait(lambda: page.count("#ranks .rank") == RANKS and page.count("#heaviest tbody tr"))


def test_without_a_token_the_page_asks_for_one(opened: Page) -> None:
    page = opened
    page.browser.get(page.url)
    page.run("sessionStorage.clear()")
    page.browser.refresh()
    page.wait(lambda: page.run("return document.getElementById('login').open"))
    assert text(page, "#headline") == "Sign in to see jobs"
    assert page.count("#sessions tbody tr") == 0
    page.find("#token").send_keys("wrong", Keys.ENTER)
    page.wait(lambda: "unknown token" in text(page, "#login-problem"))
    page.find("#token").send_keys(TOKEN, Keys.ENTER)
    page.wait(lambda: page.count("#sessions tbody tr") == 1)
    assert page.run("return document.getElementById('login').open") is False
    page.click("#sign")  # out again
    page.wait(lambda: text(page, "#headline") == "Sign in to see jobs")


def test_jobs_are_listed_live_and_found_by_name(page: Page) -> None:
    assert text(page, "#headline") == "1 stream of jobs"
    cells = texts(page, "#sessions tbody tr > *")
    assert cells[:3] == [f"{JOB} / train", "balanced", str(RANKS)]
    before, after, bound = (float(cell) for cell in cells[4:7])
    assert before > after >= bound >= 1.0
    page.wait(lambda: int(page.run("return document.body.dataset.settled")) >= 3)  # it goes on by itself
    page.fill("#find", "nothing of this name")
    assert page.count("#sessions tbody tr") == 0
    page.fill("#find", "TRAIN-47")
    assert page.count("#sessions tbody tr") == 1


def test_one_job_is_shown_live_with_rounds_ranks_samples_and_reasons(page: Page) -> None:
    open_job(page)
    assert text(page, "#one-title") == f"{JOB} / default / train"
    assert "balanced" in text(page, "#headline")
    assert page.count("#curve path.line.before") == page.count("#curve path.line.bound") == 1
    first = text(page, "#moment-text")
    page.wait(lambda: text(page, "#moment-text") != first)
    assert "samples moved" in text(page, "#moment-facts")
    facts = dict(zip(text(page, "#facts").splitlines()[::2], text(page, "#facts").splitlines()[1::2], strict=True))
    assert facts["State"] == "balanced"
    assert facts["Breaker"].startswith("opened 1 ×, 5 rounds")
    assert float(facts["GPU-hours saved"]) > 0
    assert f"rounds {GAP[0]} to {GAP[1] - 1} did not come here" in text(page, "#fallbacks")
    # Of one round of a busy machine, another rank may come late as well.
    page.wait(lambda: f"Rank {LATE} on gpu01 comes last" in text(page, "#ranks-text"))
    said = f"Rank {LATE} on gpu01 loads data too slowly since round 3, by 50.0 % of the median rank's computing time."
    page.wait(lambda: said in text(page, "#ranks-text"))
    page.wait(lambda: "straggler" in attribute(page, f"#ranks .rank:nth-child({LATE + 1})", "class"))
    widths = page.run("return [...document.querySelectorAll('.bars .after')].map((bar) => parseFloat(bar.style.width))")
    assert max(widths) / min(widths) < 1.2  # as trained they are even
    costs = [float(cost.replace(",", "")) for cost in texts(page, "#heaviest tbody td:nth-child(2)")]
    assert costs == sorted(costs, reverse=True)
    for kind in ("moved", "wait"):
        page.click(f"[name=drawn][value={kind}]")
        assert page.count("#curve path.line.after") == 1
    label = attribute(page, "#curve svg", "aria-label")
    assert label.startswith("Seconds of rounds")
    errors = [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert [entry for entry in errors if not any(word in entry["message"] for word in ("401", "favicon"))] == []


def test_rounds_back_in_time_stay_while_new_ones_come(page: Page) -> None:
    open_job(page)
    page.wait(lambda: int(page.run("return document.getElementById('moment').max")) > 20)
    page.fill("#moment", "5")
    assert attribute(page, "#live", "aria-pressed") == "false"
    shown, facts = text(page, "#moment-text"), text(page, "#moment-facts")
    settled = page.settled
    page.wait(lambda: page.settled >= settled + 2)
    assert (text(page, "#moment-text"), text(page, "#moment-facts")) == (shown, facts)
    assert attribute(page, "#moment", "aria-valuetext") == f"round {shown}"
    assert page.count("#curve path.moment") == 1
    page.run("document.getElementById('rounds-table').open = true")
    page.wait(lambda: page.count("#rounds-table tbody tr") > 20)
    page.click("#live")
    page.wait(lambda: text(page, "#moment-text") != shown)


def test_a_pause_holds_what_is_shown_and_it_is_saved_as_it_is(page: Page, folder: Path) -> None:
    open_job(page)
    page.click("#pause")
    shown = text(page, "#moment-text")
    settled = int(page.run("return document.body.dataset.settled"))
    time.sleep(1.5)  # events that are not shown
    assert text(page, "#moment-text") == shown
    assert int(page.run("return document.body.dataset.settled")) == settled
    file = folder / f"evenkeel-{JOB}.json"
    file.unlink(missing_ok=True)
    page.click("#save")
    page.wait(file.exists)
    saved = json.loads(file.read_text())
    assert saved["session"]["job"] == JOB
    assert f"{saved['rounds']['round'][-1]:,}" == shown.split(",")[0]
    assert saved["rounds"]["number"] == list(range(saved["rounds"]["number"][0], saved["rounds"]["number"][-1] + 1))
    page.click("#pause")
    page.wait(lambda: text(page, "#moment-text") != shown)
    file.unlink()
    page.click("#save")
    page.wait(file.exists)
    numbers = json.loads(file.read_text())["rounds"]["number"]
    assert numbers == list(range(saved["rounds"]["number"][0], numbers[-1] + 1))  # those of the pause among them


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_in_light_and_dark_and_fits_narrow_windows(page: Page, scheme: str) -> None:
    emulate(page, prefers_color_scheme=scheme)
    for width in (360, 1300):
        page.resize(width)
        open_job(page)
        assert page.run(PIXELS, page.find("#one"))[1] <= width
        page.click("#one .back")
        page.wait(lambda: page.count("#sessions tbody tr"))
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
    page.find("body").send_keys(Keys.TAB)
    assert page.run("return document.activeElement.className") == "skip"
    focus = page.run("""
        return [...document.querySelectorAll('a, button, input, summary, [tabindex="0"]')]
          .filter((one) => one.offsetParent && one.tabIndex < 0).map((one) => one.outerHTML);
    """)
    assert focus == []
    link = page.find("#sessions tbody a")
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
    assert [
        name for role, name in nodes if role in ("button", "link", "slider", "radio", "textbox", "image") and not name
    ] == []
    assert any(role == "slider" and name.startswith("Round") for role, name in nodes)
    assert any(role == "listitem" and name.startswith(f"rank {LATE} on gpu01: load") for role, name in nodes)
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
    page.wait(lambda: "It may have ended" in text(page, "#problem"))
    with WatchedJob(balancer.address, "a-again", ranks=2, late=1, token=TOKEN):
        page.wait(lambda: text(page, "#headline") == "a-again: balanced")
        assert text(page, "#problem") == ""
