"""Odd files, and files that may not be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x00\x01", "is no"),
        (b"a: \x00", "is no YAML"),
        (b"{tables: [], step: 5}", "step: is no object"),
        (b"{format: evenkeel-plan, request: 5}", "request: is no object"),
        (b"- {name: a, rows: .nan, dim: 4}", "rows"),
        (b"- {name: a, rows: 1.5, dim: 4}", "rows"),
        (b"- {name: a, rows: 400X, dim: 4}", "rows"),
        (b"- {name: 400M, rows: 5, dim: 4}", "name"),
        (b"- {name: a, rows: 5, dim: 4, ratio: .nan}", "ratio"),
        (b"a: &a [*a]", "unknown"),
        (b"[" * 5000, "holds itself, or too much in itself"),
        (b"- {name: a, rows: " + b"9" * 5000 + b", dim: 4}", "is no YAML"),
        (b"- !!python/object:os.system x", "is no YAML"),
        (b"{tables: [], topology: h200x\xc2\xb2}", "topology"),
        (
            b"- {name: a, rows: 5, dim: 4}\n- {name: b, rows: 5, dim: 4,\n   rows: 6}",
            "rows: is there twice in one object",
        ),
        (b'[{"name": "a", "rows": 5, "dim": 4, "rows": 6}]', "rows: is there twice in one object"),
    ],
)
def test_odd_files_end_in_a_sentence(command: typer.Typer, tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    flags = [] if b"topology" in content else ["--topology", "h200x8"]
    shown = CliRunner().invoke(command, [str(path), *flags, "--samples", "8"])
    assert (shown.exit_code, type(shown.exception)) == (2, SystemExit)
    assert shown.stderr.startswith("error: ")
    assert said in shown.stderr


def test_an_empty_profile_and_a_useless_certificate_are_called_what_they_are(
    command: typer.Typer, tmp_path: Path
) -> None:
    tables, empty = tmp_path / "tables.yaml", tmp_path / "empty"
    tables.write_text("- {name: a, rows: 5, dim: 4}\n")
    empty.write_text("")
    flags = [str(tables), "--topology", "h200x8"]
    shown = CliRunner().invoke(command, [*flags, "--profile", str(empty)])
    assert shown.exit_code == 2
    assert "write a hardware profile" in shown.stderr
    shown = CliRunner().invoke(command, [*flags, "--planner", "https://127.0.0.1:9", "--tls-ca", str(empty)])
    assert shown.exit_code == 2
    assert f"ca {empty} cannot be used" in shown.stderr
    assert "JSON" not in shown.stderr


def test_a_reservation_without_its_unit_and_one_file_for_two_outputs_are_refused(
    command: typer.Typer, tmp_path: Path
) -> None:
    tables = tmp_path / "tables.yaml"
    tables.write_text("- {name: a, rows: 5, dim: 4}\n")
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--reserve", "40"])
    assert shown.exit_code == 2
    assert "write 40% or 40GiB" in shown.stderr
    twice = ["--output", str(tmp_path / "x"), "--report", str(tmp_path / "x")]
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", *twice])
    assert shown.exit_code == 2
    assert "is the file of --report too" in shown.stderr
    assert not (tmp_path / "x").exists()


def test_no_size_is_proved_where_all_is_reserved(command: typer.Typer, tmp_path: Path) -> None:
    tables = tmp_path / "tables.yaml"
    tables.write_text("- {name: a, rows: 5, dim: 4}\n")
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--reserve", "100%"])
    assert shown.exit_code == 3
    assert "proved the smallest" not in shown.stdout


def test_files_without_end_are_not_read_to_the_end(command: typer.Typer) -> None:
    shown = CliRunner().invoke(command, ["/dev/zero", "--topology", "h200x8"])
    assert shown.exit_code == 2
    assert "holds more than" in shown.stderr


def test_a_byte_order_mark_is_no_part_of_a_file(command: typer.Typer, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'[{"name": "a", "rows": 5, "dim": 4}]')
    assert CliRunner().invoke(command, [str(path), "--topology", "h200x8"]).exit_code == 0


def test_no_file_that_is_read_is_written_over(command: typer.Typer, tables: Path) -> None:
    before = tables.read_text()
    shown = CliRunner().invoke(command, [str(tables), "--topology", "h200x8", "--output", str(tables)])
    assert shown.exit_code == 2
    assert "is the file that is read" in shown.stderr
    assert tables.read_text() == before


def test_the_whole_sharding_plan_is_a_module(command: typer.Typer, tmp_path: Path) -> None:
    path, module = tmp_path / "tables.yaml", tmp_path / "sharding.py"
    path.write_text("- {name: a, rows: 40M, dim: 8, group: bags, sharding: table_wise}")
    flags = [str(path), "--topology", "h200x4", "--sharding-plan", str(module)]
    shown = CliRunner().invoke(command, [*flags, "--runtime", "torchrec"])
    assert shown.exit_code == 0, shown.output
    assert f"sharding plan written to {module}" in shown.stdout
    check = "from sharding import plan; import sys; assert 'evenkeel' not in sys.modules"
    check += "; print(plan.plan['bags']['a'].ranks)"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0]"
    for more, said in (
        ([], "is not what DynamicEmb does"),
        (["--runtime", "torchrec", "--sharding-plan", str(tmp_path / "my-plan.py")], "no name of a Python module"),
    ):
        refused = CliRunner().invoke(command, [*flags, *more])
        assert refused.exit_code == 2
        assert said in refused.stderr
    path.write_text("- {name: a, rows: 40M, dim: 8}")
    for more, said in (([], "the runtime is dynamicemb"), (["--runtime", "torchrec"], "tables[0].group: is empty")):
        refused = CliRunner().invoke(command, [*flags, *more])
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_lines_of_a_plan_that_does_not_fit_are_none_and_it_is_said_why(command: typer.Typer, tables: Path) -> None:
    small = ["--topology", "h200x2", "--hbm-gib", "0.6", "--host-gib", "0.1", "--code"]
    shown = CliRunner().invoke(command, [str(tables), *small])
    assert (shown.exit_code, shown.stdout) == (3, "")
    assert "Nothing fits" in shown.stderr


def test_a_file_that_is_not_there_is_named(command: typer.Typer, tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, [str(tmp_path / "nowhere.yaml"), "--topology", "h200x8"])
    assert shown.exit_code == 2
    assert "does not exist" in shown.stderr
