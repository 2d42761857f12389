"""The planner's page in a real browser, against a real planner."""

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tests.services.planner.browsing")

import yaml
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.harness.balancer_process import fork
from evenkeel.placement import plan
from evenkeel.placement.plan_file import PlanFile, dumps, loads
from services.operations.launch import running_service
from tests.services.planner.browsing import GIB, SMALL, Page
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


pytest.importorskip("tests.services.planner.browsing")


def test_a_plan_is_downloaded_and_opened_again(page: Page, downloads: Path, tmp_path: Path) -> None:
    file = downloads / "plan.json"
    file.unlink(missing_ok=True)
    page.change("#hbm", "1.1")
    page.click("#download")
    page.wait(file.exists)
    saved = loads(file.read_text())
    assert saved.plan == plan(replace(saved.request, solver=replace(saved.request.solver, time_limit_s=30.0)))
    headline = page.text("#headline")
    page.open(request=replace(SMALL, tables=SMALL.tables[:1]))
    with page.answered():
        page.give_file(file)
    assert page.text("#headline") == headline
    assert page.find("#hbm").get_attribute("value") == "1.1"
    ours = tmp_path / "ours.json"
    other = replace(SMALL, topology=replace(SMALL.topology, ranks=4, ranks_per_host=2))
    ours.write_text(dumps(PlanFile(request=other, plan=plan(other))))
    with page.answered():
        page.give_file(ours)
    assert page.find("#ranks").get_attribute("value") == "4"
    assert page.count("#placements tbody tr") == 3


def test_files_that_others_write_are_read_and_garbage_is_refused_by_name(page: Page, tmp_path: Path) -> None:
    good = {
        "t.yaml": "# tables\n- name: user_id\n  rows: 4_000_000\n  dim: 128\n"
        "- name: item_id\n  rows: 500_000\n  dim: 128\n  access: {kind: zipf, exponent: 0.9}\n  modes: [CACHING]\n",
        "job.yaml": "tables:\n- {name: a, rows: 4e6, dim: 128}\n- {name: b, rows: 1e6, dim: 8}\n"
        "topology:\n  ranks: 8\n  hbm_bytes: 60GiB\n  host_bytes: 1536GiB\nsolver: {ratio_steps: 5}\n",
        "short.yaml": "tables:\n- {name: a, rows: 4M, dim: 128}\n- {name: b, rows: 1M, dim: 8}\ntopology: h200x16/8\n",
        "t.csv": 'name;rows;dim\n"a;b";1000000;64\nc;2000000;64\n',
    }
    for name, text in good.items():
        file = tmp_path / name
        file.write_text(text)
        with page.answered():
            page.give_file(file)
        assert page.text("#notice span") == f"{name} is open."
        assert page.count("#placements tbody tr") == 2, page.text("#problem")
        assert "a step" in page.text("#headline")
    bad = {
        "garbage.json": ("{]", "is no JSON"),
        "noise.bin": ("\x00\x01\ufffd\nPK", "garbage"),
        "answer.json": ('{"plan": {}, "code": ""}', "is an answer of the planner"),
        "newer.json": ('{"format": "evenkeel-plan", "version": 7, "request": {}}', "version 7"),
        "strange.json": ('{"tables": [], "topologie": {}}', "topologie"),
        "number.json": ("[1, 2]", "tables[0] is no object"),
        "empty.csv": ("", "is empty"),
        "short.json": ('{"tables": [], "topology": "z80x8"}', 'topology "z80x8" is not understood'),
        "anchors.yaml": ("- &a\n  name: x\n", "Line 1"),
    }
    before = page.find("#tables").get_attribute("value")
    for name, (text, wanted) in bad.items():
        file = tmp_path / name
        file.write_text(text)
        page.give_file(file)
        page.wait(lambda file=file: page.text("#notice span").startswith(file.name))
        if wanted != "garbage":
            assert wanted in page.text("#notice span")
        assert page.find("#tables").get_attribute("value") == before


def test_a_link_holds_the_request_and_other_links_are_refused(page: Page) -> None:
    page.change("#hbm", "1.2")
    headline = page.text("#headline")
    page.click("#share")
    page.wait(lambda: page.run("return location.hash").startswith("#p1="))
    link = page.run("return location.hash")
    page.open(link, SMALL)
    assert page.find("#hbm").get_attribute("value") == "1.2"
    assert page.text("#headline") == headline
    page.open("#p2=abc", SMALL)
    assert "another version of the page (p2; this one reads p1)" in page.text("#notice span")
    assert "a step" in page.text("#headline")
    page.open(link[:-9], SMALL)
    assert page.text("#notice span").startswith("This link is damaged")
    bomb = page.call("links.js", "m.unpack('#p1=' + a[0]).then(() => 'read')", _packed(b'"' + b" " * (9 << 20) + b'"'))
    assert bomb == {"error": "This link is damaged: copy it again, all of it."}


def _packed(text: bytes) -> str:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return base64.urlsafe_b64encode(packer.compress(text) + packer.flush()).decode().rstrip("=")


def test_yaml_is_read_as_python_reads_it(opened: Page) -> None:
    page = opened
    texts = [
        "- a: 1\n  b: [1, two, {c: 3.5}]\n-\n  d: 'x: # y'\n- e:\n  - 1\n  - {f: g}\n",
        "a: {b: {c: [null, ~, true]}}\nd:\n  e:\n    - f: 1\n      g: 2\n    - h\n# end\n",
        'name: "with, comma" # note\nlist:\n- a\n- b\nempty:\nlast: x y z\n',
        '- "ün/ic\\"ode # \\\\ \\u00e9"\n- {name: "a\\"b", other: \'it\'\'s\', "k\\"ey": 1}\n- \'it\'\'s # one\'\n',
        '- "a": 1\n  "b c": [2]\n- \'d\': x\n  e: y\n- "a: text"\n- - 1\n  - 2\n',
    ]
    found = page.call("yaml.js", "a[0].map(m.readYaml)", texts)
    assert found == [yaml.safe_load(text) for text in texts]
    sizes = "sizes: {a: 400M, b: 1_000K, c: 1.5B, d: 139GiB, e: 4 M, f: 5m, g: '4K', h: 1e3K, i: x4K}"
    wanted = {"a": 400_000_000, "b": 1_000_000, "c": 1_500_000_000, "d": 139 << 30, "h": 1_000_000}
    assert page.call("yaml.js", "m.readYaml(a[0])", sizes) == {
        "sizes": {**wanted, "e": "4 M", "f": "5m", "g": "4K", "i": "x4K"}
    }
    for wrong in ("a: [1, 2", "a: 1\n   b: 2", "- a\nb: 1", "a: *x", "- " * 300 + "a", "[" * 200, "a: }"):
        assert "Line" in page.call("yaml.js", "m.readYaml(a[0])", wrong)["error"], wrong
