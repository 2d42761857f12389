import json
from pathlib import Path

import pytest

from tests.trainer_client.cli.conftest import Run
from tests.trainer_client.embedding.checkpoint.dumps import KEYS, check_rows, opened, write_dump
from trainer_client.embedding.routing import hash_roundrobin, roundrobin


def test_inspect_and_convert(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dump(tmp_path / "old", roundrobin(), 3)
    shown = run("checkpoint", "inspect", tmp_path / "old", "--json", "--check")
    assert shown.exit_code == 0, shown.output
    tables = {table["name"]: table for table in json.loads(shown.stdout)["tables"]}
    assert tables["items"]["dist_type"] == "roundrobin"
    assert sum(tables["items"]["rows"]) == len(KEYS)
    command = ["checkpoint", "convert", tmp_path / "old", tmp_path / "new", "--ranks", "4", "--to", "dcp"]
    done = run(*command, "--routing", "items=hash_roundrobin", "--seed", "8", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tables"][1]["seed"] == 8
    check_rows(opened(tmp_path / "new"), hash_roundrobin(8), 4)
    monkeypatch.chdir(tmp_path / "new")
    for arguments in (["checkpoint", "inspect", "."], [*command, "--overwrite"]):
        human = run(*arguments)
        assert (human.exit_code, "items" in human.stdout) == (0, True), human.output


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ["inspect", "{}/none"], "no such directory"),
        (1, ["inspect", "{}"], "neither a torch.distributed.checkpoint directory"),
        (2, ["inspect", "{}/old", "--num-embeddings", "items=many"], "items=many: give a whole number of rows"),
        (2, ["convert", "{}/old", "{}/new", "--ranks", "2", "--to", "odd"], "'odd'"),
        (2, ["convert", "{}/old", "{}/new", "--ranks", "0"], "'--ranks'"),
        (1, ["convert", "{}/old", "{}/old", "--ranks", "2"], "old exists"),
        (1, ["convert", "{}/old", "{}/new", "--ranks", "2", "--routing", "odd"], "routing is 'odd'"),
        (1, ["convert", "{}/old", "{}/new", "--ranks", "2", "--routing", "users=roundrobin"], "no table users"),
    ],
)
def test_errors_name_what_to_mend(run: Run, code: int, arguments: list[str], message: str, tmp_path: Path) -> None:
    write_dump(tmp_path / "old", roundrobin(), 1)
    result = run("checkpoint", *(argument.format(tmp_path) for argument in arguments))
    assert result.exit_code == code
    assert message in result.output.replace("\n", " ")
