from __future__ import annotations

import json
import subprocess
import sys
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
from services.security.tokens import hash_token
from tests.services.planner.serving import served
from trainer_client.cli.plan import plan_command

TABLES = """
- {name: user, rows: 4000000, dim: 64}
- {name: item, rows: 900000, dim: 64, ids_per_sample: 20, access: {kind: zipf, exponent: 0.9}}
"""


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command("plan")(plan_command)
    return app


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


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
    path.write_text("- {name: '2e5', rows: 4e6, dim: 6.4e1, ids_per_sample: 1.5e-1}")
    shown = CliRunner().invoke(command, [str(path), "--topology", "h200x8", "--json"])
    (table,) = loads(shown.stdout).request.tables
    assert (table.name, table.rows, table.dim, table.ids_per_sample) == ("2e5", 4_000_000, 64, 0.15)


def test_a_file_that_is_not_there_is_named(command: typer.Typer, tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, [str(tmp_path / "nowhere.yaml"), "--topology", "h200x8"])
    assert shown.exit_code == 2
    assert "does not exist" in shown.stderr
