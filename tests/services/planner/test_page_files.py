"""What the planner's page opens and gives away: files and links."""

import base64
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

pytest.importorskip("tests.services.planner.browsing")

from evenkeel.placement import plan
from evenkeel.placement.plan_file import PlanFile, dumps, loads
from tests.services.planner.browsing import SMALL, Page


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
