"""`evenkeel top` beside a running job."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group
from typer.testing import CliRunner

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import running_balancer
from tests.services.balancer.jobs import TROUBLE, RunningJob, watched
from trainer_client.cli import app
from trainer_client.cli.top import renderables

GONE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Metrics port of a balancer with a job whose rank 2 loads late and whose rank 1 is slow."""
    port = tmp_path_factory.mktemp("balancer") / "port"
    with (
        running_balancer("--metrics-port", "0", "--metrics-port-file", str(port)) as balancer,
        RunningJob(lambda: channel(balancer.address, None), "a-slow-one", ranks=4, facts=watched(2, slow=1)) as job,
    ):
        job.wait(8)
        yield f"127.0.0.1:{port.read_text().strip()}"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["top", *arguments])


def test_jobs_and_a_replica_that_is_gone(page: str) -> None:
    """JSON and lines, of a replica that answers beside one that does not."""
    looks = run("--json", page, GONE, "--count", "2", "--interval", "0.2")
    assert looks.exit_code == 0, looks.output
    first, last = map(json.loads, looks.stdout.splitlines())
    (row,) = last[0]["streams"]
    assert (row["job"], row["ranks"], row["state"]) == ("a-slow-one", 4, "balanced")
    assert row["round"] > first[0]["streams"][0]["round"]
    assert 1.0 <= row["imbalance_bound"] <= row["imbalance_after"] <= row["imbalance_before"]
    assert last[1]["replica"] == GONE
    assert "refused" in last[1]["error"]
    shown = run(page, GONE, "--count", "1")
    assert shown.exit_code == 0, shown.output
    (of_job,) = (line for line in shown.stdout.splitlines() if "a-slow-one/default/train" in line)
    assert "state=balanced ranks=4 round=" in of_job
    assert f"{GONE}: no answer" in shown.stdout


def test_a_table_with_the_ranks_of_a_job(page: str) -> None:
    (document,) = json.loads(run("--json", page, "--count", "1", "--job", "a-slow-one").stdout)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(Group(*renderables([document])))
    text = console.export_text()
    ranks = text.partition("holds the others up")[2].split()
    assert ranks[0] == "2"  # who comes last stands first
    for part in ("loading +50%", "computes at 0.80 of the median", TROUBLE, "█"):
        assert part in text


def test_errors_say_what_to_do(page: str, tmp_path: Path) -> None:
    for arguments, code, text in (
        (["nonsense"], 2, "give the host and the metrics port"),
        (["no.such.host.invalid:1"], 1, "check the name and the DNS"),
        ([GONE, "--count", "1"], 1, "no answer from 127.0.0.1:1"),
        ([page, "--count", "1", "--job", "nosuch"], 1, "there is no job 'nosuch' here"),
        ([page, "--tls-ca", str(tmp_path / "none")], 2, "cannot be used"),
    ):
        done = run(*arguments)
        assert (done.exit_code, text in done.stderr, done.stdout) == (code, True, ""), done.output


def test_it_ends_quietly_when_nobody_reads_on(page: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m trainer_client.cli top --interval 0.1 {page} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
