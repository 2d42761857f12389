from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
import typer
import yaml
from typer.testing import CliRunner

from benchmarks.harness.authorities import write_certificate
from evenkeel.placement.codec import decode
from evenkeel.placement.plan_file import loads
from evenkeel.placement.report import Report
from evenkeel.plan_cache import sealed
from services.security.tokens import hash_token
from tests.services.planner.serving import served
from trainer_client.cli import main


def test_tables_are_planned_and_written(command: typer.Typer, tables: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--output", str(output)])
    assert shown.exit_code == 0, shown.output
    assert "HBM_ONLY" in shown.output
    assert "proved optimal" in shown.output
    written = loads(output.read_text())
    assert [p.table for p in written.plan.placements] == ["user", "item"]
    as_json = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--json"])
    assert loads(as_json.stdout) == written


def test_the_report_says_what_each_rank_takes_and_is_written(
    command: typer.Typer, tables: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x16/8", "--report", str(output)])
    assert shown.exit_code == 0, shown.output
    assert "0-15" in shown.stdout
    assert "2 RW" in shown.stdout
    report = decode(Report, json.loads(output.read_text()))
    assert report.ranks[0].ranks == tuple(range(16))
    assert [host.hosts for host in report.hosts] == [(0, 1)]
    assert f"{report.ranks[0].seconds * 1e3:.3g}" in shown.stdout


def test_what_does_not_fit_exits_with_three(command: typer.Typer, tables: Path) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x2", "--hbm-gib", "0.6", "--host-gib", "0.1"])
    assert shown.exit_code == 3
    assert "Nothing fits" in shown.output


def test_lines_to_paste_are_printed(command: typer.Typer, tables: Path) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--runtime", "torchrec", "--code"])
    assert shown.exit_code == 0
    compile(shown.stdout, "pasted", "exec")
    assert "ParameterConstraints" in shown.stdout


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("- {name: a, rows: 0, dim: 4}", ["--topology", "h200x8"], "rows"),
        ("- {name: a, rows: 5, dim: 4}", [], "--topology"),
        ("- {name: a, rows: 5, dim: 4}", ["--topology", "z80x8"], "z80"),
        ("5", ["--topology", "h200x8"], "list of tables"),
        ("a: [", ["--topology", "h200x8"], "YAML"),
    ],
)
def test_errors_name_the_field_and_exit_with_two(
    command: typer.Typer, tmp_path: Path, content: str, flags: list[str], message: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    shown = CliRunner().invoke(command, [str(path), *flags])
    assert shown.exit_code == 2
    assert message in shown.output


def test_a_file_of_another_encoding_is_named(command: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("- {name: café, rows: 5, dim: 4}".encode("latin-1"))
    shown = CliRunner().invoke(command, [str(path), "--topology", "h200x8"])
    assert shown.exit_code == 2
    assert "latin.yaml" in shown.output
    assert "is no UTF-8 text" in shown.output


def test_a_service_gives_the_same_plan(command: typer.Typer, tables: Path, tmp_path: Path) -> None:
    with served(tmp_path) as running:
        asked = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--json", "--url", running.url])
    own = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--json"])
    assert asked.exit_code == 0, asked.output
    assert asked.stdout == own.stdout


def test_a_service_behind_tls_and_a_token_gives_the_same_plan(
    command: typer.Typer, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = write_certificate(trustme.CA(), tmp_path, "planner")
    known, token = tmp_path / "tokens.yml", tmp_path / "token"
    token.write_text("t" * 43)
    known.write_text(yaml.safe_dump({"tokens": [{"name": "me", "sha256": hash_token("t" * 43)}]}))
    tls = ("--tls-certificate", str(server.certificate), "--tls-key", str(server.key))
    flags = [str(tables), "--topology", "h200x8", "--json"]
    with served(tmp_path, "--token-file", str(known), *tls) as running:
        url = running.url.replace("http://127.0.0.1", "https://localhost")
        without = CliRunner().invoke(command, [*flags, "--url", url, "--tls-ca", str(server.ca)])
        assert without.exit_code == 2
        assert "give a token: --token-file or EVENKEEL_TOKEN_FILE" in without.output
        named = [*flags, "--url", url, "--tls-ca", str(server.ca), "--token-file", str(token)]
        by_flags = CliRunner().invoke(command, named)
        for given, said in (
            ([url.replace("https", "http")], "if it speaks TLS, use https://, or plan without a service"),
            ([url], "set EVENKEEL_TLS_CA to the file of its authority"),
        ):
            shown = CliRunner().invoke(command, [*flags, "--url", *given])
            assert shown.exit_code == 2
            assert said in shown.output
        with monkeypatch.context() as behind:
            behind.setenv("https_proxy", "http://user:secret@127.0.0.1:1")
            shown = CliRunner().invoke(command, named)
            assert "through the proxy 127.0.0.1:1: add localhost to no_proxy" in shown.output
            assert "secret" not in shown.output
        monkeypatch.setenv("EVENKEEL_TLS_CA", str(server.ca))
        monkeypatch.setenv("EVENKEEL_TOKEN_FILE", str(token))
        by_environment = CliRunner().invoke(command, [*flags, "--url", url])
    own = CliRunner().invoke(command, flags)
    assert by_flags.stdout == by_environment.stdout == own.stdout, by_flags.output
    clear = CliRunner().invoke(command, [*flags, "--url", "http://planner:8080"])
    assert clear.exit_code == 2
    assert "http://planner:8080 needs https:// for a token" in clear.output


def test_the_command_needs_no_torch() -> None:
    check = "import trainer_client.cli.plan, trainer_client.cli.calibrate, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_plan_outlives_a_file_that_cannot_be_written(command: typer.Typer, tables: Path, tmp_path: Path) -> None:
    output = tmp_path / "no" / "plan.json"
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--output", str(output)])
    assert shown.exit_code == 2
    assert "proved optimal" in shown.stdout
    assert f"--output: {output}: No such file or directory; name a file" in shown.stderr
    assert "Traceback" not in shown.output


def test_an_output_that_is_full_is_an_error_in_a_sentence(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["evenkeel", "plan", str(tables), "--topology", "h200x8", "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: standard output cannot be written: No space left on device; ")


@pytest.mark.parametrize(
    ("flag", "value"), [("--hbm-gib", "nan"), ("--hbm-gib", "-1"), ("--host-gib", "inf"), ("--host-gib", "1e9")]
)
def test_sizes_of_memory_that_are_none(command: typer.Typer, tables: Path, flag: str, value: str) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", flag, value])
    assert shown.exit_code == 2
    assert f"{flag}: is out of range (got {float(value)}); give a number from 0 to" in shown.stderr


def test_a_plan_file_is_planned_again(command: typer.Typer, tables: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--output", str(output)])
    again = CliRunner().invoke(command, [str(output), "--json"])
    assert loads(again.stdout).request == loads(output.read_text()).request
    smaller = CliRunner().invoke(command, [str(output), "--hbm-gib", "1", "--json"])
    assert loads(smaller.stdout).request.topology.hbm_bytes == 1 << 30


def test_powers_of_ten_are_numbers_in_yaml(command: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "tables.yaml"
    path.write_text("- {name: '2e5', rows: 4e6, dim: 6.4e1, ids_per_sample: 1.5e-1, admission_rows: 1.5K}")
    shown = CliRunner().invoke(command, [str(path), "--topology", "h200x8", "--json"])
    (table,) = loads(shown.stdout).request.tables
    assert (table.name, table.rows, table.dim, table.ids_per_sample) == ("2e5", 4_000_000, 64, 0.15)
    assert table.admission_rows == 1500


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
def test_hbm_is_left_for_the_model(
    command: typer.Typer, tables: Path, flags: list[str], reserved: tuple[float, int]
) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--json", *flags])
    machines = loads(shown.stdout).request.topology
    assert (machines.hbm_reserved_fraction, machines.hbm_reserved_bytes) == reserved


@pytest.mark.parametrize("reserve", ["nan", "101%", "-1", "much", "1e30", "%", "NaN%", ""])
def test_reservations_that_are_none(command: typer.Typer, tables: Path, reserve: str) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--reserve", reserve])
    assert shown.exit_code == 2
    assert f"--reserve: is {'out of range' if reserve.endswith('%') else 'no size'}" in shown.stderr


def test_a_file_keeps_the_reservation_that_it_says(command: typer.Typer, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("tables: [{name: a, rows: 4M, dim: 8}]\ntopology: {ranks: 2, hbm_bytes: 60GiB}")
    kept = loads(CliRunner().invoke(command, [str(job), "--json"]).stdout).request.topology
    assert (kept.hbm_bytes, kept.hbm_reserved_fraction) == (60 << 30, 0.0)
    held = "{ranks: 2, hbm_bytes: 60GiB, hbm_reserved_fraction: 0.6, host_bytes: 9GiB, host_reserved_bytes: 8GiB}"
    job.write_text(f"tables: [{{name: a, rows: 4M, dim: 8}}]\ntopology: {held}")
    told = CliRunner().invoke(command, [str(job), "--json", "--hbm-gib", "150", "--host-gib", "7"])
    given = loads(told.stdout).request.topology
    assert (given.hbm_budget, given.host_budget) == (150 << 30, 7 << 30), "what tables may use"
    for noted in ("what the file reserves of HBM", "what the file reserves of host", "150 is more than the 139 GiB"):
        assert noted in told.stderr
    less = CliRunner().invoke(command, [str(job), "--json", "--hbm-gib", "60", "--reserve", "10%"])
    assert loads(less.stdout).request.topology.hbm_reserved_fraction == 0.1
    assert not less.stderr
    job.write_text("tables: [{name: a, rows: 4M, dim: 8}]\ntopology: h100x16/8")
    named = loads(CliRunner().invoke(command, [str(job), "--json"]).stdout).request
    assert (named.topology.ranks, named.topology.local_ranks, named.hardware) == (16, 8, "h100")
    assert named.topology.hbm_reserved_fraction == 0.15


def test_the_variable_names_the_planner_and_embedded_plans_here(
    command: typer.Typer, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [str(tables), "--topology", "h200x8", "--json"]
    monkeypatch.setenv("EVENKEEL_PLANNER", "http://127.0.0.1:9")
    refused = CliRunner().invoke(command, flags)
    assert refused.exit_code == 2
    assert "http://127.0.0.1:9/v1/plans" in refused.stderr
    here = CliRunner().invoke(command, [*flags, "--planner", "embedded"])
    assert here.exit_code == 0, here.output
    with served(tmp_path) as running:
        monkeypatch.setenv("EVENKEEL_PLANNER", running.url)
        assert CliRunner().invoke(command, flags).stdout == here.stdout
    monkeypatch.setenv("EVENKEEL_PLANNER", "embedded")
    assert CliRunner().invoke(command, flags).stdout == here.stdout


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
def test_what_is_no_planner_is_named(command: typer.Typer, tables: Path, body: bytes | None, said: str) -> None:
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
        shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--planner", url])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"error: {url}/v1/plans")
    assert said in shown.stderr


@pytest.mark.parametrize("url", ["planner:8080", "http://[::1", "http://a:99999", "ftp://a", "http://"])
def test_addresses_that_are_none(command: typer.Typer, tables: Path, url: str) -> None:
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--planner", url])
    assert shown.exit_code == 2
    assert f"url is {url!r}; give http://host:port" in shown.stderr


def test_the_same_request_gets_its_kept_plan(command: typer.Typer, tables: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    flags = [str(tables), "--topology", "h200x8", "--json", "--cache", str(folder)]
    first = CliRunner().invoke(command, flags)
    assert first.exit_code == 0, first.output
    (path,) = folder.iterdir()
    kept = path.read_bytes().partition(b"\n")[2]
    path.write_bytes(sealed(kept.replace(b'"status": "OPTIMAL"', b'"status": "FEASIBLE"')))
    assert json.loads(CliRunner().invoke(command, flags).stdout)["plan"]["status"] == "FEASIBLE"
    assert json.loads(CliRunner().invoke(command, [*flags, "--samples", "77"]).stdout)["plan"]["status"] == "OPTIMAL"


def test_the_clock_runs_the_plan_and_its_contenders(command: typer.Typer, tmp_path: Path) -> None:
    tables, output = tmp_path / "tables.yaml", tmp_path / "plan.json"
    tables.write_text("- {name: a, rows: 40K, dim: 16, ids_per_sample: 4}\n- {name: b, rows: 4000, dim: 16}\n")
    flags = ["--runtime", "torchrec", "--topology", "h200x1", "--hbm-gib", "2.01", "--samples", "32"]
    clock = ["--clock", "0.2", "--dense-ms", "0.5", "--device", "cpu"]
    shown = CliRunner().invoke(command, [str(tables), *flags, *clock, "--output", str(output)])
    assert shown.exit_code == 0, shown.output
    assert "all cached alike" in shown.stdout
    content = json.loads(output.read_text())
    assert sum(one["chosen"] for one in content["measured"]) == 1
    assert content["request"]["step"]["dense_ms"] == 0.5
    again = CliRunner().invoke(command, [str(output), "--json"])
    assert again.exit_code == 0, again.output
    for wrong, said in (
        (["--clock", "0"], "--clock: is no time"),
        (["--clock", "1", "--runtime", "dynamicemb"], "runtime"),
    ):
        refused = CliRunner().invoke(command, [str(tables), *flags, "--device", "cpu", *wrong])
        assert refused.exit_code == 2
        assert said in refused.stderr
