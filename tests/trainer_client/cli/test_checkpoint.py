import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.trainer_client.embedding.checkpoint.dumps import KEYS, check_rows, opened, write_dump
from trainer_client.cli.checkpoint import app
from trainer_client.embedding.routing import hash_roundrobin, roundrobin

RUNNER = CliRunner()


def test_inspect_and_convert(tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 3)
    shown = RUNNER.invoke(app, ["inspect", str(tmp_path / "old"), "--json", "--check"])
    assert shown.exit_code == 0, shown.output
    tables = {table["name"]: table for table in json.loads(shown.stdout)["tables"]}
    assert tables["items"]["dist_type"] == "roundrobin"
    assert sum(tables["items"]["rows"]) == len(KEYS)
    command = ["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--ranks", "4", "--to", "dcp"]
    done = RUNNER.invoke(app, [*command, "--routing", "items=hash_roundrobin", "--seed", "8", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tables"][1]["seed"] == 8
    check_rows(opened(tmp_path / "new"), hash_roundrobin(8), 4)
    for arguments in (["inspect", str(tmp_path / "new")], [*command, "--overwrite"]):
        human = RUNNER.invoke(app, arguments)
        assert human.exit_code == 0
        assert "items" in human.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{}/none"], "no such directory"),
        (["convert", "{}/old", "{}/new", "--ranks", "0"], "world_size is 0"),
        (["convert", "{}/old", "{}/old", "--ranks", "2"], "old exists"),
        (["convert", "{}/old", "{}/new", "--ranks", "2", "--routing", "odd"], "'odd'"),
        (["convert", "{}/old", "{}/new", "--ranks", "2", "--routing", "users=roundrobin"], "no table users"),
    ],
)
def test_errors_are_one_line_and_exit_code_one(arguments: list[str], message: str, tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 1)
    result = RUNNER.invoke(app, [argument.format(tmp_path) for argument in arguments])
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")


def test_the_folder_one_stands_in_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "old", roundrobin(), 1)
    monkeypatch.chdir(tmp_path / "old")
    assert RUNNER.invoke(app, ["inspect", "."]).exit_code == 0
    monkeypatch.chdir(tmp_path)
    assert "neither a torch.distributed.checkpoint directory" in RUNNER.invoke(app, ["inspect", "."]).output


def test_sizes_that_are_none_are_named(tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 1)
    shown = RUNNER.invoke(app, ["inspect", str(tmp_path / "old"), "--num-embeddings", "items=many"])
    assert shown.exit_code == 2
    assert "items=many: give a whole number of rows" in shown.output
