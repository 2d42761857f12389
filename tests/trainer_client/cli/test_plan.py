"""`evenkeel plan`: files and flags that it takes, what it writes, whom it asks, and what it refuses."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.harness.authorities import write_certificate
from evenkeel.placement.fields import decode
from evenkeel.placement.plan_file import loads
from evenkeel.placement.report import Report
from evenkeel.placement.request import PlanRequest
from evenkeel.plan_cache import sealed
from tests.services.planner.serving import served
from tests.tokens import known, write_tokens
from tests.trainer_client.cli.conftest import Run
from trainer_client.cli import app

ON_EIGHT = ("--topology", "h200x8")
SMALL = ("--topology", "h200x2", "--hbm-gib", "0.6", "--host-gib", "0.1")
Plan = Callable[..., Result]


@pytest.fixture
def plan(run: Run, tables: Path) -> Plan:
    """Plans the tables, or another file."""

    def invoke(*flags: object, file: Path = tables) -> Result:
        return run("plan", file, *flags)

    return invoke


def test_tables_are_planned_and_written(plan: Plan, tmp_path: Path) -> None:
    output, report = tmp_path / "plan.json", tmp_path / "report.json"
    shown = plan("--topology", "h200x16/8", "--output", output, "--report", report)
    assert shown.exit_code == 0, shown.output
    for text in ("HBM_ONLY", "proved optimal", "0-15", "2 RW", f"plan written to {output}"):
        assert text in shown.stdout
    written, read = loads(output.read_text()), decode(Report, json.loads(report.read_text()))
    assert [p.table for p in written.plan.placements] == ["user", "item"]
    assert read.ranks[0].ranks == tuple(range(16))
    assert f"{read.ranks[0].seconds * 1e3:.3g}" in shown.stdout
    assert loads(plan("--topology", "h200x16/8", "--json").stdout) == written
    again = loads(plan("--json", "--hbm-gib", "1", file=output).stdout).request
    assert (again.tables, again.topology.hbm_bytes) == (written.request.tables, 1 << 30)


def test_what_does_not_fit_exits_with_three(plan: Plan) -> None:
    shown = plan(*SMALL)
    assert (shown.exit_code, "Nothing fits" in shown.stdout) == (3, True)
    code = plan(*SMALL, "--code")
    assert (code.exit_code, code.stdout, "Nothing fits" in code.stderr) == (3, "", True)
    nothing = plan(*ON_EIGHT, "--reserve", "100%")
    assert (nothing.exit_code, "proved the smallest" in nothing.stdout) == (3, False)


def test_hot_rows_are_counted_and_their_memory_is_kept(plan: Plan) -> None:
    shown = plan("--topology", "h200x16/8", "--hot-rows-gib", "0.001")
    assert shown.exit_code == 0, shown.output
    assert re.search(
        r"user: [\d,]+ hot rows in \S+ MiB of HBM; a rank sends \S+ MB by All2All, \S+ MB without", shown.stdout
    )
    written = loads(plan("--topology", "h200x16/8", "--hot-rows-gib", "0.001", "--json").stdout)
    assert 0 < written.request.topology.hbm_reserved_bytes <= 0.001 * 2**30


# What is refused: the file, the flags, and what the message says.
REFUSED: list[tuple[bytes, tuple[str, ...], str]] = [
    (b"", (), "is empty"),
    (b"5", (), "list of tables"),
    (b"a: [", (), "is no YAML"),
    (b"\x7fELF\x00\x01", (), "is no"),
    (b"- {name: caf\xe9, rows: 5, dim: 4}", (), "is no UTF-8 text"),
    (b"{tables: [{name: a, rows: 5, dim: 4}], step: 5}", ("--samples", "8"), "step: is no object"),
    (b"{format: evenkeel-plan, request: 5}", (), "request: is no object"),
    (b"- {name: a, rows: 400X, dim: 4}", (), "rows"),
    (b"a: &a [*a]", (), "unknown"),
    (b"[" * 5000, (), "holds itself, or too much in itself"),
    (b"- {name: a, rows: " + b"9" * 5000 + b", dim: 4}", (), "is no YAML"),
    (b"- !!python/object:os.system x", (), "is no YAML"),
    (b"{tables: [], topology: h200x\xc2\xb2}", (), "topology"),
    (b"- {name: a, rows: 5, dim: 4,\n   rows: 6}", (), "rows: is there twice in one object"),
    (b'[{"name": "a", "rows": 5, "dim": 4, "rows": 6}]', (), "rows: is there twice in one object"),
]
NOBODY = ("--planner", "http://127.0.0.1:9")  # where a plan that is asked for fails in another way
FLAGS: list[tuple[tuple[str, ...], str]] = [
    ((), "give --topology"),
    (("--topology", "z80x8"), "z80"),
    (("--hbm-gib", "nan"), "--hbm-gib: is out of range (got nan); give a number from 0 to"),
    (("--host-gib", "1e9"), "--host-gib: is out of range"),
    *((("--reserve", text), "--reserve: is no part of a rank's HBM") for text in ("101%", "NaN%", "-1", "much")),
    (("--hot-rows-gib", "nan"), "--hot-rows-gib: is out of range (got nan); give a number from 0 to"),
    (("--hot-rows-gib", "1", "--runtime", "torchrec"), "runtime: has no hot rows (got 'torchrec')"),
    (("--reserve", "40"), "write 40% or 40GiB"),
    (("--profile", "{}/empty"), "write a hardware profile into it"),
    (("--output", "{}/tables.yaml"), "is the file that is read"),
    (("--output", "{}/x", "--report", "{}/x"), "is the file of --output too"),
    (("--sharding-plan", "{}/sharding.py", *NOBODY), "add --runtime torchrec, or leave it out for --code"),
    (("--runtime", "torchrec", "--sharding-plan", "{}/sharding.py", *NOBODY), "tables[0].group: is empty"),
    (("--runtime", "torchrec", "--sharding-plan", "{}/my-plan.py"), "no name of a Python module"),
    (("--clock", "0", "--runtime", "torchrec"), "clock: is no time"),
    (("--clock", "1", "--device", "cpu"), "runtime: is not run by the clock"),
    (("--clock", "1", "--runtime", "torchrec"), "try it with --device cpu"),
    (("--planner", "https://127.0.0.1:9", "--tls-ca", "{}/empty"), "empty cannot be used"),
    *((("--planner", url), f"url is {url!r}; give http://host:port") for url in ("a:80", "http://[::1", "ftp://a")),
]


@pytest.mark.parametrize(("content", "flags", "message"), REFUSED, ids=[case[0][:30] for case in REFUSED])
def test_odd_files_end_in_a_sentence(
    run: Run, tmp_path: Path, content: bytes, flags: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    shown = run("plan", path, *(() if b"topology" in content else ON_EIGHT), *flags)
    assert (shown.exit_code, shown.stderr.startswith("error: "), message in shown.stderr) == (2, True, True), shown


@pytest.mark.parametrize(("flags", "message"), FLAGS, ids=[" ".join(case[0]) for case in FLAGS])
def test_odd_flags_end_in_a_sentence(
    plan: Plan, tables: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").write_text("")
    before = tables.read_text()
    named = ON_EIGHT if flags and "--topology" not in flags else ()
    shown = plan(*named, *(flag.replace("{}", str(tmp_path)) for flag in flags))
    assert (shown.exit_code, message in shown.stderr) == (2, True), shown.output
    assert tables.read_text() == before
    assert not (tmp_path / "x").exists()


def test_files_that_are_none_or_have_no_end(plan: Plan, tmp_path: Path) -> None:
    assert "holds more than" in plan(*ON_EIGHT, file=Path("/dev/zero")).stderr
    assert "does not exist" in plan(*ON_EIGHT, file=tmp_path / "nowhere.yaml").stderr


def test_a_plan_outlives_a_file_that_cannot_be_written(plan: Plan, tmp_path: Path) -> None:
    output = tmp_path / "no" / "plan.json"
    shown = plan(*ON_EIGHT, "--output", output)
    assert (shown.exit_code, "proved optimal" in shown.stdout) == (2, True)
    assert f"--output: {output}: No such file or directory; name a file" in shown.stderr


def request_of(text: str, *flags: str, suffix: str = ".yaml") -> PlanRequest:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"job{suffix}")
        path.write_text(text)
        shown = CliRunner().invoke(app, ["plan", str(path), "--json", *flags])
    assert shown.exit_code == 0, shown.output
    return loads(shown.stdout).request


UNITS = {"": 1, "K": 10**3, "M": 10**6, "KiB": 2**10, "e3": 10**3, "e+2": 100, ".0e1": 10}


@given(number=st.integers(1, 999), unit=st.sampled_from(list(UNITS)))
@settings(max_examples=8, deadline=None)
def test_quantities_are_numbers_and_names_are_not(number: int, unit: str) -> None:
    (table,) = request_of(f"- {{name: '2e5', rows: {number}{unit}, dim: 6.4e1}}", *ON_EIGHT).tables
    assert (table.name, table.rows, table.dim) == ("2e5", number * UNITS[unit], 64)


def test_json_may_have_units_and_a_byte_order_mark() -> None:
    (table,) = request_of('\ufeff[{"name": "a", "rows": "4M", "dim": 4}]', *ON_EIGHT, suffix=".json").tables
    assert table.rows == 4_000_000


@pytest.mark.parametrize(
    ("flags", "reserved"),
    [
        ([], (0.15, 0)),
        (["--reserve", "40%"], (0.4, 0)),
        (["--reserve", "24GiB"], (0.0, 24 << 30)),
        (["--reserve", "2e9"], (0.0, 2_000_000_000)),
        (["--reserve", "0"], (0.0, 0)),
        (["--hbm-gib", "60"], (0.0, 0)),
        (["--hbm-gib", "60", "--reserve", "10%"], (0.1, 0)),
    ],
)
def test_hbm_is_left_for_the_model(plan: Plan, flags: list[str], reserved: tuple[float, int]) -> None:
    machines = loads(plan(*ON_EIGHT, "--json", *flags).stdout).request.topology
    assert (machines.hbm_reserved_fraction, machines.hbm_reserved_bytes) == reserved


def test_a_file_keeps_the_reservation_that_it_says(run: Run, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("tables: [{name: 4M, rows: 4e6, dim: 8}]\ntopology: {ranks: 2, hbm_bytes: 60GiB}")
    kept = loads(run("plan", job, "--json").stdout).request.topology
    assert (kept.hbm_bytes, kept.hbm_reserved_fraction) == (60 << 30, 0.0)
    held = "{ranks: 2, hbm_bytes: 60GiB, hbm_reserved_fraction: 0.6, host_bytes: 9GiB, host_reserved_bytes: 8GiB}"
    job.write_text(f"tables: [{{name: a, rows: 4M, dim: 8}}]\ntopology: {held}")
    noted = run("plan", job, "--json", "--hbm-gib", "150", "--host-gib", "7")
    given = loads(noted.stdout).request.topology
    assert (given.hbm_budget, given.host_budget) == (150 << 30, 7 << 30), "what tables may use"
    for text in ("what the file reserves of HBM", "what the file reserves of host", "150 is more than the 139 GiB"):
        assert text in noted.stderr
    less = run("plan", job, "--json", "--hbm-gib", "60", "--reserve", "10%")
    assert loads(less.stdout).request.topology.hbm_reserved_fraction == 0.1
    assert not less.stderr
    named = request_of("tables: [{name: a, rows: 4M, dim: 8}]\ntopology: h100x16/8")
    assert (named.topology.ranks, named.topology.local_ranks, named.hardware) == (16, 8, "h100")
    assert named.topology.hbm_reserved_fraction == 0.15


def test_a_service_behind_tls_and_a_token_gives_the_same_plan(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = write_certificate(trustme.CA(), tmp_path, "planner")
    tokens, token = write_tokens(tmp_path / "tokens.yml", known("t" * 43)), tmp_path / "token"
    token.write_text("t" * 43)
    tls = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    flags = (*ON_EIGHT, "--json")
    with served(tmp_path, "--token-file", str(tokens), *tls) as running:
        url = running.url.replace("http://127.0.0.1", "https://localhost")
        trusted = ("--url", url, "--tls-ca", server.ca)
        for given, said in (
            (trusted, "give a token: --token-file or EVENKEEL_TOKEN_FILE"),
            (("--url", url.replace("https", "http")), "if it speaks TLS, use https://, or plan without a service"),
            (("--url", url), "set EVENKEEL_TLS_CA to the file of its authority"),
            (("--url", "http://planner:8080", "--token-file", token), "http://planner:8080 needs https:// for a token"),
        ):
            refused = plan(*flags, *given)
            assert (refused.exit_code, said in refused.stderr) == (2, True), refused.output
        by_flags = plan(*flags, *trusted, "--token-file", token)
        with monkeypatch.context() as behind:
            behind.setenv("https_proxy", "http://user:secret@127.0.0.1:1")
            shown = plan(*flags, *trusted, "--token-file", token)
            assert "through the proxy 127.0.0.1:1: add localhost to no_proxy" in shown.output
            assert "secret" not in shown.output
        monkeypatch.setenv("EVENKEEL_TLS_CA", str(server.ca))
        monkeypatch.setenv("EVENKEEL_TOKEN_FILE", str(token))
        lost = plan(*flags, "--url", f"{url}/nowhere")
        assert (lost.exit_code, "404" in lost.stderr) == (2, True)
        monkeypatch.setenv("EVENKEEL_PLANNER", url)
        by_environment = plan(*flags)
        found = {each["check"]: each for each in json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)}
        assert found["planner"]["text"] == "ready", found
    refused = plan(*flags)
    assert (refused.exit_code, f"{url}/v1/plans" in refused.stderr) == (2, True)
    here = plan(*flags, "--planner", "embedded")
    assert by_flags.stdout == by_environment.stdout == here.stdout, by_flags.output


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"ok": 1}', "no plan is in it"),
        (b"[1]", "no plan is in it"),
        (b'{"plan": {"status": "OPTIMAL"}}', "runtime: is missing"),
        (b"<html>", "no JSON"),
        (None, "check the address"),
    ],
)
def test_what_is_no_planner_is_named(plan: Plan, body: bytes | None, said: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if body is None:
                self.wfile.write(b"nonsense\r\n\r\n")
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        shown = plan(*ON_EIGHT, "--planner", url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"error: {url}/v1/plans")
    assert said in shown.stderr


def test_the_same_request_gets_its_kept_plan(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    flags = (*ON_EIGHT, "--json", "--cache", folder)
    assert plan(*flags).exit_code == 0
    (path,) = folder.iterdir()
    kept = path.read_bytes().partition(b"\n")[2]
    path.write_bytes(sealed(kept.replace(b'"status": "OPTIMAL"', b'"status": "FEASIBLE"')))
    assert json.loads(plan(*flags).stdout)["plan"]["status"] == "FEASIBLE"
    assert json.loads(plan(*flags, "--samples", "77").stdout)["plan"]["status"] == "OPTIMAL"


def test_the_clock_runs_the_plan_and_its_contenders(run: Run, tmp_path: Path) -> None:
    tables, output = tmp_path / "tables.yaml", tmp_path / "plan.json"
    tables.write_text("- {name: a, rows: 40K, dim: 16, ids_per_sample: 4}\n- {name: b, rows: 4000, dim: 16}\n")
    flags = ["--runtime", "torchrec", "--topology", "h200x1", "--hbm-gib", "2.01", "--samples", "32"]
    clock = ["--clock", "0.2", "--dense-ms", "0.5", "--device", "cpu"]
    shown = run("plan", tables, *flags, *clock, "--output", output)
    assert shown.exit_code == 0, shown.output
    assert "all cached alike" in shown.stdout
    content = json.loads(output.read_text())
    assert sum(one["chosen"] for one in content["measured"]) == 1
    assert content["request"]["step"]["dense_ms"] == 0.5
    again = run("plan", output, "--json")
    assert again.exit_code == 0, again.output
