from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.planner.serving import served

pytest.importorskip("selenium", reason="the page is tested in a real browser through selenium")
if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
    pytest.skip("the page is tested in chromium, with chromedriver", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("planner")) as running:
        yield running.url


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1300,1500", "--no-proxy-server"):
        options.add_argument(flag)
    # Every name but the service's address leads nowhere: the page may need nothing else.
    options.add_argument("--host-resolver-rules=MAP * 127.0.0.1:9, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        driver.get(url)
        _settled(driver, 1)
        yield driver
    finally:
        driver.quit()


def _settled(browser: webdriver.Chrome, times: int) -> None:
    WebDriverWait(browser, 60).until(
        lambda b: int(b.find_element(By.TAG_NAME, "body").get_attribute("data-settled") or 0) >= times
    )


def _change(browser: webdriver.Chrome, element: str, value: str) -> None:
    body = browser.find_element(By.TAG_NAME, "body")
    before = int(body.get_attribute("data-settled") or 0)
    script = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'));"
    )
    browser.execute_script(script, element, value)
    _settled(browser, before + 1)


def _text(browser: webdriver.Chrome, element: str) -> str:
    return browser.find_element(By.ID, element).text


def _milliseconds(browser: webdriver.Chrome) -> float:
    return float(_text(browser, "headline").split(" ms")[0].replace(",", ""))


def test_the_example_is_planned_with_bars_curve_and_lines(browser: webdriver.Chrome, tmp_path: Path) -> None:
    assert "proved optimal" in _text(browser, "headline")
    rows = browser.find_elements(By.CSS_SELECTOR, "#plan tbody tr")
    assert len(rows) == 6
    assert browser.find_element(By.ID, "hbm-bar").rect["width"] > 0
    assert len(browser.find_elements(By.CSS_SELECTOR, "#curve polyline.line")) == 1
    assert "DynamicEmbTableOptions" in _text(browser, "code")
    assert browser.save_screenshot(str(tmp_path / "page.png"))


def test_moving_the_hbm_slider_changes_plan_bars_and_curve(browser: webdriver.Chrome) -> None:
    seen = []
    for position in ("380", "600", "1000"):
        _change(browser, "hbm", position)
        circle = browser.find_element(By.CSS_SELECTOR, "#curve circle.here").get_attribute("cy")
        seen.append((_milliseconds(browser), _text(browser, "hbm-text"), circle))
    times = [milliseconds for milliseconds, _, _ in seen]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert len({text for _, text, _ in seen}) == 3
    assert len({circle for _, _, circle in seen}) > 1


def test_too_small_budgets_and_wrong_tables_are_explained(browser: webdriver.Chrome) -> None:
    _change(browser, "hbm", "20")
    assert _text(browser, "headline") == "Nothing fits"
    assert "of HBM on every rank" in _text(browser, "problem")
    _change(browser, "hbm", "600")
    tables = browser.find_element(By.ID, "tables").get_attribute("value")
    _change(browser, "tables", "name,rows,dim\nbad,0,64")
    assert "tables[0].rows" in _text(browser, "problem")
    _change(browser, "tables", str(tables))
    assert not browser.find_element(By.ID, "problem").is_displayed()


def test_json_tables_and_torchrec_work_and_a_table_can_be_added(browser: webdriver.Chrome) -> None:
    _change(browser, "tables", '[{"name": "a", "rows": 1000000, "dim": 64}]')
    _change(browser, "runtime", "torchrec")
    assert "ParameterConstraints" in _text(browser, "code")
    _change(browser, "tables", "name,rows,dim\na,1000000,64")
    before = int(browser.find_element(By.TAG_NAME, "body").get_attribute("data-settled") or 0)
    browser.find_element(By.ID, "add").click()
    _settled(browser, before + 1)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#plan tbody tr")) == 2


def test_names_of_tables_are_text_not_markup(browser: webdriver.Chrome) -> None:
    _change(browser, "tables", '[{"name": "<img src=x onerror=document.title=1>", "rows": 1000, "dim": 8}]')
    assert browser.find_element(By.CSS_SELECTOR, "#plan tbody td").text.startswith("<img")
    assert browser.title == "Evenkeel planner"


def test_the_page_raised_no_error_and_asked_nobody_else(browser: webdriver.Chrome, url: str) -> None:
    script = "return performance.getEntriesByType('resource').map((e) => e.name)"
    assert all(str(name).startswith(url) for name in browser.execute_script(script))
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all(
        ("/v1/plans" in entry["message"] and "422" in entry["message"]) or "favicon" in entry["message"]
        for entry in severe
    )
