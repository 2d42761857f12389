"""The balancer's page in a real browser, against a real balancer with a running job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("tests.services.planner.browsing")

from selenium.webdriver.common.keys import Keys

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from tests.services.balancer.jobs import TROUBLE, RunningJob, watched
from tests.services.planner.browsing import browsing
from tests.tokens import known, write_tokens

if TYPE_CHECKING:
    from tests.services.planner.browsing import Page

JOB = "a-train-4711"
RANKS, LATE = 4, 2
TOKEN = "token-of-team-a-0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def balancer(folder: Path) -> Iterator[ServiceProcess]:
    port, tokens = folder / "metrics_port", write_tokens(folder / "tokens.yml", known(TOKEN, "a-*"))
    with running_balancer(
        "--metrics-port", "0", "--metrics-port-file", str(port), "--token-file", str(tokens)
    ) as running:
        yield running


def job(balancer: ServiceProcess, name: str, ranks: int = RANKS) -> RunningJob:
    facts = watched(ranks - 2, slow=0)
    return RunningJob(lambda: channel(balancer.address, None, token=TOKEN), name, ranks=ranks, facts=facts)


@pytest.fixture(scope="module")
def opened(balancer: ServiceProcess, folder: Path) -> Iterator[Page]:
    port = (folder / "metrics_port").read_text().strip()
    with job(balancer, JOB) as running, browsing(f"http://127.0.0.1:{port}", folder) as page:
        running.wait(20)
        yield page


@pytest.fixture
def page(opened: Page) -> Page:
    """All jobs, signed in."""
    opened.browser.get(f"{opened.url}/page/icon.svg")
    opened.browser.get(opened.url)
    opened.run("sessionStorage.setItem('evenkeel-balancer-token', arguments[0])", TOKEN)
    opened.browser.refresh()
    opened.wait(lambda: opened.count("#streams tbody tr"))
    return opened


def text(page: Page, selector: str) -> str:
    """What is to be read now: the page draws its parts anew while it is looked at."""
    return str(page.run("return document.querySelector(arguments[0]).innerText", selector))


def attribute(page: Page, selector: str, name: str) -> str:
    """An attribute of an element now."""
    return str(
        page.run("return document.querySelector(arguments[0])?.getAttribute(arguments[1]) ?? ''", selector, name)
    )


def test_without_a_token_the_page_asks_for_one(opened: Page) -> None:
    page = opened
    page.browser.get(page.url)
    page.run("sessionStorage.clear()")
    page.browser.refresh()
    page.wait(lambda: page.run("return document.getElementById('login').open"))
    assert page.count("#streams tbody tr") == 0
    page.find("#token").send_keys("wrong", Keys.ENTER)
    page.wait(lambda: "unknown token" in text(page, "#login-problem"))
    page.find("#token").send_keys(TOKEN, Keys.ENTER)
    page.wait(lambda: page.count("#streams tbody tr") == 1)
    assert page.run("return document.getElementById('login').open") is False


def test_jobs_and_one_of_them_are_shown_live(page: Page) -> None:
    cells = [str(cell) for cell in page.run(
        "return [...document.querySelectorAll('#streams tbody tr > *')].map((one) => one.innerText)"
    )]  # fmt: skip
    assert cells[:3] == [f"{JOB} / train", "balanced", str(RANKS)]
    before, after, bound = (float(cell) for cell in cells[4:7])
    assert before > after >= bound >= 1.0
    settled = page.settled
    page.wait(lambda: page.settled >= settled + 2)  # it goes on by itself
    page.click("#streams tbody a")
    page.wait(lambda: page.count("#ranks .rank") == RANKS)
    first = attribute(page, "#curve svg", "aria-label")
    page.wait(lambda: attribute(page, "#curve svg", "aria-label") != first)
    facts = dict(zip(text(page, "#facts").splitlines()[::2], text(page, "#facts").splitlines()[1::2], strict=True))
    assert facts["State"] == "balanced"
    assert float(facts["GPU-hours saved"]) > 0
    assert TROUBLE in text(page, "#trouble")
    for named in (f"Rank {LATE} loads data too slowly since round 3", "Rank 0 computes at 80.0 %"):
        assert named in text(page, "#ranks-text")
    for kind in ("moved", "seconds"):
        page.click(f"[name=drawn][value={kind}]")
        assert page.count("#curve path.line.after") == 1
    errors = [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [entry for entry in errors if not any(word in entry["message"] for word in ("401", "favicon"))] == []


def test_all_of_it_is_reached_by_keyboard_and_named_for_screen_readers(page: Page) -> None:
    link = page.find("#streams tbody a")
    page.run("arguments[0].focus()", link)
    settled = page.settled
    page.wait(lambda: page.settled > settled)  # drawn again: the focus stays where it was
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.wait(lambda: page.count("#ranks .rank") == RANKS)
    assert page.run("return document.activeElement.id") == "one-title"
    tree: Any = page.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})
    nodes = [
        (node.get("role", {}).get("value"), node.get("name", {}).get("value", ""))
        for node in tree["nodes"] if not node.get("ignored")
    ]  # fmt: skip
    assert [name for role, name in nodes if role in ("button", "link", "radio", "textbox", "image") and not name] == []
    assert any(role == "listitem" and name.startswith(f"rank {LATE}: load") for role, name in nodes)


def test_a_job_that_has_ended_is_shown_again_when_it_comes_back(page: Page, balancer: ServiceProcess) -> None:
    page.run("location.hash = 'job=a-again'")
    page.wait(lambda: "a-again" in text(page, "#problem"))
    with job(balancer, "a-again", ranks=3):
        page.wait(lambda: text(page, "#headline") == "a-again: balanced")
        assert text(page, "#problem") == ""
