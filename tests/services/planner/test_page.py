"""The planner's page in a real browser, against a real planner."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tests.services.planner.browsing")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.harness.balancer_process import fork
from evenkeel.placement import Runtime, SolverOptions
from services.operations.launch import running_service
from tests.services.planner.browsing import GIB, ROOMY, SMALL, Page
from tests.services.planner.serving import served
from tests.tokens import known, write_tokens


def test_the_example_is_planned_with_pictures_curves_advice_and_lines(opened: Page) -> None:
    page = opened
    assert "proved optimal" in page.text("#headline")
    assert page.count("#placements tbody tr") == 6
    bars = [bar.get_attribute("aria-label") or "" for bar in page.browser.find_elements(By.CSS_SELECTOR, ".stack")]
    assert [bar.split(",")[0].split(" of ")[0] for bar in bars[:2]] == ["HBM", "Host memory"]
    assert "user_id" in bars[0]
    assert "user_id" in bars[1]
    assert page.count("#curve path.line") == 1
    label = page.find("#curve svg").get_attribute("aria-label") or ""
    assert "today 60 GiB" in label
    assert "knee" in label
    assert "One more GiB of HBM on every rank saves" in page.text("#next")
    with page.answered():
        page.click("[name=over][value=host]")
    assert "today 1,536 GiB" in (page.find("#curve svg").get_attribute("aria-label") or "")
    page.click("[name=over][value=hbm]")
    assert "DynamicEmbTableOptions" in page.run("return document.getElementById('code').textContent")
    assert "0–7" in page.text("#ranks-report")
    for bar in ("#memory .row:nth-child(1)", "#memory .row:nth-child(2)", "#time .row:nth-child(1)"):
        script = (
            "return [...document.querySelectorAll(`${arguments[0]} .part`)].map((part) => parseFloat(part.style.width))"
        )
        widths = page.run(script, bar)
        assert sum(widths) == pytest.approx(100, abs=0.5)


def test_another_budget_changes_plan_and_marks_but_asks_for_no_curve_that_is_known(page: Page) -> None:
    page.watch_requests()
    seen = []
    for size in ("0.8", "1.1", "1.5"):
        page.change("#hbm", size)
        seen.append((page.milliseconds, page.find("#curve circle.today").get_attribute("cx")))
    assert [time for time, _ in seen] == sorted((time for time, _ in seen), reverse=True)
    assert seen[0][0] > seen[-1][0]
    assert len({x for _, x in seen}) == 3
    asked = page.asked("v1/whatif")
    assert [one["points"] for one in asked] == [0, 0, 0]
    assert page.find("#hbm-slider").get_attribute("aria-valuetext") == "1.5 GiB"
    bodies = page.asked("v1/plans")
    assert bodies[0]["topology"]["hbm_bytes"] - bodies[0]["topology"]["hbm_reserved_bytes"] == round(0.8 * GIB)
    assert all(one["solver"]["time_limit_s"] == 30 for one in bodies + asked)


def test_a_late_answer_of_an_older_question_is_not_shown(page: Page) -> None:
    page.run("""
        const plain = window.fetch;
        window.late = 0;
        window.fetch = async (path, options) => {
          if (window.late++ > 0) return plain(path, options);
          const response = await plain(path, { ...options, signal: undefined });  // as if it could not be taken back
          await new Promise((resolve) => setTimeout(resolve, 1500));
          window.late = "arrived";
          return response;
        };
    """)
    page.fill("#hbm", "0.8")
    page.wait(lambda: page.run("return window.late") == 1)
    page.change("#hbm", "1.5")
    quick = page.text("#headline")
    page.wait(lambda: page.run("return window.late") == "arrived")
    assert page.text("#headline") == quick
    assert "1.5 GiB" in (page.find("#curve svg").get_attribute("aria-label") or "")


def test_too_small_budgets_offer_what_would_do(page: Page) -> None:
    page.change("#hbm", "0.5")
    assert page.text("#headline") == "Nothing fits"
    assert "of HBM on every GPU" in page.text("#problem")
    assert not page.find("#answer").is_displayed()
    assert page.count("#curve path.line") == 1
    with page.answered():
        page.click("#problem button")
    assert "s a step, proved optimal" in page.text("#headline")
    assert not page.find("#problem").is_displayed()


def test_what_is_wrong_stands_beside_its_input(page: Page) -> None:
    page.change("#per-host", "3")
    assert page.text("#headline") == "This cannot be planned"
    note = page.find(f"#{page.find('#per-host').get_attribute('aria-describedby')}").text
    assert note.startswith("topology.ranks_per_host")
    assert "divisor of ranks=8" in note
    assert page.find("#per-host").get_attribute("aria-invalid") == "true"
    assert not page.find("#answer").is_displayed()
    page.change("#per-host", "4")
    assert page.count("[aria-invalid]") == 0
    page.change("#tables", "name,rows,dim\nbad,0,64")
    assert "tables[0].rows" in page.text("#tables-error")
    with page.answered():
        page.fill("#tables", "name,rows,dim\nbad,1,64,9")
    assert page.text("#tables-error").startswith("Line 2")
    page.change("#hbm", "much")
    assert page.text("#hbm-error")
    page.change("#tables", "")
    page.change("#tables", "name,rows,dim\ngood,1000,64")
    page.change("#hbm", "1")
    assert "a step" in page.text("#headline")


def test_a_table_is_edited_with_statistics_and_optimizer(page: Page) -> None:
    page.watch_requests()
    page.click("[data-row=edit-0]")
    page.fill("#table-dialog [data-field=rows]", "0")
    with page.answered():
        page.click("#table-dialog [type=submit]")
    page.wait(lambda: page.count("#table-dialog [data-field=rows][aria-invalid]") == 1)
    assert "tables[0].rows" in page.text("#table-dialog .error")
    page.fill("#table-dialog [data-field=rows]", "2M")
    page.fill("#table-dialog [data-field=optimizer]", "rowwise_adagrad")
    page.run("const kind = document.getElementById('kind'); kind.value = 'json'; kind.onchange()")
    page.fill("#table-dialog [data-json]", '{"kind": "histogram", "keys": [10, 1e5]')
    page.click("#table-dialog [type=submit]")
    assert "no JSON" in page.text("#table-dialog [data-json] ~ .error, #measured + .error")
    page.fill("#table-dialog [data-json]", '{"kind": "histogram", "keys": [10, 1e5], "lookups": [1e6, 1e6]}')
    with page.answered():
        page.click("#table-dialog [type=submit]")
    page.wait(lambda: not page.find("#table-dialog").is_displayed())
    sent = page.asked("v1/plans")[-1]["tables"][0]
    assert sent["optimizer"] == "rowwise_adagrad"
    assert sent["access"] == {"kind": "histogram", "keys": [10, 1e5], "lookups": [1e6, 1e6]}
    assert page.find("#tables").get_attribute("value").startswith("[")  # more than CSV can say
    assert "histogram" in page.text("#placements tbody tr")


def test_tables_are_added_removed_and_had_back(page: Page) -> None:
    page.click("#add")
    with page.answered():
        page.click("#table-dialog [type=submit]")
    page.wait(lambda: not page.find("#table-dialog").is_displayed())
    assert page.count("#placements tbody tr") == 4
    page.click("[data-row=edit-3]")
    with page.answered():
        page.click("#table-dialog [value=remove]")
    assert page.count("#placements tbody tr") == 3
    with page.answered():
        page.click("#undo")
    assert page.count("#placements tbody tr") == 4
    page.click("#all")
    page.fill("#all-dialog [data-field=optimizer]", "sgd")
    with page.answered():
        page.click("#all-dialog [type=submit]")
    assert page.run("return document.getElementById('tables').value").count("sgd") == 4


def test_two_budgets_and_two_pins_stand_side_by_side(page: Page) -> None:
    page.click("#keep")
    before = page.text("#headline").split(" a step")[0]
    page.change("#hbm", "1.4")
    assert page.find("#comparison").is_displayed()
    row = page.text("#comparison tbody tr")
    assert before in row
    assert page.text("#headline").split(" a step")[0] in row
    assert page.count("#comparison .sides .stack") == 8
    assert page.count("#curve circle.kept") == 1
    assert "placed differently" in page.text("#comparison")
    with page.answered():
        page.click("#comparison button")
    assert page.text("#headline").startswith(before)
    with page.answered():
        page.click("[data-row=pin-1]")
    assert page.find("[data-row=pin-1]").get_attribute("aria-pressed") == "true"
    assert "All tables have the same mode and ratio in both." in page.text("#comparison")
    page.click("#comparison button:nth-of-type(2)")
    assert not page.find("#comparison").is_displayed()


def test_the_page_fits_its_window_and_goes_by_keyboard(page: Page) -> None:
    width = 420
    page.resize(width)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached: list[str] = []
    while "hbm-slider" not in reached:
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("return document.activeElement.id || document.activeElement.className"))
        assert len(reached) < 10, reached
    assert reached[0] == "skip"
    before = page.text("#headline")
    with page.answered():
        page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT * 20)
    assert page.text("#headline") != before
    page.find("[data-row=edit-1]").send_keys(Keys.ENTER)
    assert page.find("#table-dialog").is_displayed()
    inside = page.run("const box = document.getElementById('table-dialog').getBoundingClientRect(); return box.right")
    assert inside <= width
    page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not page.find("#table-dialog").is_displayed()
    assert page.run("return document.activeElement.dataset.row") == "edit-1"


def test_everything_that_is_operated_has_a_name_and_names_are_text(page: Page) -> None:
    page.click("#keep")
    script = """
        const kinds = "button, input, select, textarea, [role=img], [role=region], dialog";
        const isNamed = (one) => one.labels?.length || one.getAttribute("aria-label")
          || one.getAttribute("aria-labelledby") || (one.tagName === "BUTTON" && one.textContent.trim());
        return [...document.querySelectorAll(kinds)].filter((one) => !isNamed(one)).map((one) => one.outerHTML);
    """
    assert page.run(script) == []
    page.change("#tables", json.dumps([{"name": "<img src=x onerror=document.title=1>", "rows": 1000, "dim": 8}]))
    assert page.text("#placements tbody th").startswith("<img")
    assert page.browser.title == "Evenkeel planner"


def test_many_tables_are_shown_in_parts(opened: Page) -> None:
    page = opened
    page.open(request=replace(ROOMY, solver=SolverOptions(ratio_steps=1)))
    rows = [f"table_{i},{1000 * (i + 1)},16,1" for i in range(120)]
    page.change("#tables", "\n".join(["name,rows,dim,ids_per_sample", *rows]))
    assert "a step" in page.text("#headline")
    assert page.count("#placements tbody tr") == 50
    page.click("#more")
    assert page.count("#placements tbody tr") == 120
    page.fill("#find", "table_11")
    assert page.count("#placements tbody tr") == 11
    assert page.count(".stack .part") < 300


def test_shards_on_single_ranks_are_drawn_rank_by_rank(opened: Page) -> None:
    page = opened
    tables = [{"name": f"t{i}", "rows": 3_000_000 * (i + 1), "dim": 64, "sharding": "table_wise"} for i in range(5)]
    page.open(request=replace(ROOMY, runtime=Runtime.TORCHREC))
    page.change("#tables", json.dumps(tables))
    assert page.count("#memory .column") == 8
    assert page.count("#ranks-report tbody tr") > 2
    assert "most over mean" in page.text("#ranks-report")


def test_a_token_is_asked_for_kept_and_given_up(opened: Page, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yml", known("good-token"))
    with served(tmp_path, "--token-file", str(tokens)) as closed:
        page = Page(opened.browser, closed.url)
        page.open()
        assert page.find("#login").is_displayed()
        page.find("#token").send_keys("bad-token", Keys.ENTER)
        page.wait(lambda: "unknown token" in page.text("#login-problem"))
        with page.answered():
            page.find("#token").send_keys("good-token", Keys.ENTER)
        assert not page.find("#login").is_displayed()
        busy = "return document.querySelector('[aria-busy]')"
        page.wait(lambda: "a step" in page.text("#headline") and not page.run(busy))
        assert "good-token" not in page.run("return location.href + JSON.stringify({ ...localStorage })")
        page.open_again()
        assert "a step" in page.text("#headline")
        with page.answered():
            page.click("#sign")
        assert page.find("#login").is_displayed()
        page.find("#token").send_keys(Keys.ESCAPE)
        page.browser.get_log("browser")


def test_a_service_that_goes_away_and_comes_back_is_asked_again(opened: Page) -> None:
    with running_service("services.planner", "--log-format", "json", spawn=fork) as planner:
        page = Page(opened.browser, f"http://{planner.address}")
        page.open(request=SMALL)
        assert planner.stop() == 0
        page.fill("#hbm", "1.5")
        page.wait(lambda: "cannot be reached. Trying again in" in page.text("#headline"))
        with page.answered():
            page.click("#stop")
        assert page.text("#headline").startswith("Stopped")
        page.fill("#hbm", "1.4")
        page.wait(lambda: "cannot be reached. Trying again in" in page.text("#headline"))
        planner.start()
        busy = "return document.querySelector('[aria-busy]')"
        page.wait(lambda: "a step" in page.text("#headline") and not page.run(busy))
        assert "1.4 GiB" in (page.find("#curve svg").get_attribute("aria-label") or "")
        page.browser.get_log("browser")


def test_the_page_raised_no_error_and_asked_nobody_else(page: Page, url: str) -> None:
    script = "return performance.getEntriesByType('resource').map((e) => e.name)"
    assert all(str(name).startswith((url, "blob:")) for name in page.run(script))
    severe = [entry["message"] for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert all(("/v1/" in message and "422" in message) or "favicon" in message for message in severe), severe
