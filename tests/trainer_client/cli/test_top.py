"""`evenkeel top` beside a running job."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from rich.console import Console
from trainer_client.cli.calls import connected
from trainer_client.cli.sessions import Rates, Row, lines, look, printable, read_row, render
from trainer_client.cli.watching import Seen, render_job, slow_ranks
from typer.testing import CliRunner

from benchmarks.harness.authorities import channel, write_certificate
from benchmarks.harness.balancer_process import ServiceProcess, running_balancer
from evenkeel.addresses import endpoints
from evenkeel.credentials import Credentials
from evenkeel.protocol import balancer_pb2 as pb
from tests.services.balancer.watched import GAP, WatchedJob
from tests.services.security.jobs import RunningJob
from trainer_client.cli import app


@pytest.fixture(scope="module")
def balancer() -> Iterator[ServiceProcess]:
    with running_balancer() as running:
        yield running


def test_a_running_job_is_shown(balancer: ServiceProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLS", "TLS_CA", "TLS_CERTIFICATE", "TLS_KEY", "TOKEN_FILE"):
        monkeypatch.delenv(f"EVENKEEL_{name}", raising=False)
    flags = ["--balancer", balancer.address, "--count", "3", "--interval", "0.5"]
    with RunningJob(lambda: channel(balancer.address, None), job="watched") as job:
        result = CliRunner().invoke(app, ["top", "--json", *flags])
        piped = CliRunner().invoke(app, ["top", *flags])
        job.check(3)
    assert result.exit_code == 0, result.output
    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(looks) == 3
    (first,), (last,) = looks[0], looks[-1]
    assert (last["name"], last["joined"], last["world_size"]) == ("watched/default/train", 2, 2)
    assert first["rounds_per_second"] > 0  # also at the first look
    assert last["rounds_per_second"] == pytest.approx((last["round"] - looks[1][0]["round"]) / 0.5, rel=0.5)
    assert last["balanced"] == 1.0
    assert 1.0 <= last["after"] <= last["before"]
    assert -1e-9 <= last["over_bound"] < 0.01
    assert piped.exit_code == 0
    assert len(piped.stdout.splitlines()) == 3  # a line a session and look, without control characters
    for line in piped.stdout.splitlines():
        assert re.fullmatch(r"\S+T\S+ watched/default/train ranks=2/2 round=\d+ rounds/s=[\d.]+ .*planned=100.0%", line)


def test_one_job_is_shown_with_rounds_and_ranks_and_saved(balancer: ServiceProcess, tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    flags = ["--balancer", balancer.address, "--interval", "0.5", "--save", str(file)]
    with WatchedJob(balancer.address, "a-slow-one", ranks=4, late=2) as job:
        while job.decided < GAP[1] + 5:
            time.sleep(0.02)
        every = CliRunner().invoke(app, ["top", "--count", "1", *flags])
        assert every.exit_code == 0, every.output
        everything = json.loads(file.read_text())
        one = CliRunner().invoke(app, ["top", "--count", "4", "--job", "a-slow-one", *flags])
        assert one.exit_code == 0, one.output
        looked = CliRunner().invoke(app, ["top", "--count", "1", "--job", "a-slow-one", "--json", *flags[:4]])
        assert looked.exit_code == 0, looked.output
    assert "state=balanced" in one.stdout
    assert all("(rank 2 on gpu01: loading +50%" in line for line in one.stdout.splitlines())
    (watched,) = json.loads(looked.stdout)
    assert watched["slow_ranks"] == [{"rank": 2, "node": "gpu01", "cause": "loading", "share": 0.5, "or_more": False}]
    assert "rank 2" not in every.stdout
    assert everything["jobs"] == []
    assert "a-slow-one" in [session["job"] for session in everything["sessions"]]
    saved = json.loads(file.read_text())
    assert (saved["format"], saved["version"]) == ("evenkeel-watch", 1)
    (document,) = saved["jobs"]
    numbers = document["rounds"]["number"]
    assert numbers == list(range(len(numbers)))  # of all looks, each once
    assert document["gaps"][0]["first"] == GAP[0]
    for width in (60, 140):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render_job(document, width))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
        assert "a-slow-one/default/train" in text
        assert f"rounds {GAP[0]} to {GAP[1] - 1} did not come here" in " ".join(text.split())
        ranks = text.partition("ranks, the latest first")[2].splitlines()
        first = next(line for line in ranks if "gpu0" in line)
        assert first.replace("│", " ").split()[:2] == ["2", "gpu01"]  # who comes last stands first
        assert "█" in first
        assert "loading +50%" in first
        slow = {**document, "ranks": {**document["ranks"], "speed": [0.5, 1.0, 1.0, 1.0]}}
        console.print(render_job(slow, width))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
        assert "computing 0.50×" in text


def test_a_file_keeps_what_was_seen_of_jobs_that_are_over(balancer: ServiceProcess, tmp_path: Path) -> None:
    """One look while the job runs, then one once the balancer has forgotten it."""
    file, seen, rates = tmp_path / "seen.json", Seen(), Rates()
    (place,) = endpoints(balancer.address)
    with connected(place, Credentials(), timeout=20.0) as calls:
        with WatchedJob(balancer.address, "soon-over", ranks=4, late=2) as job:
            while job.decided < 5:
                time.sleep(0.02)
            assert len(look([calls], "soon-over", rates, seen)[0]) == 1
        while look([calls], "soon-over", rates, seen)[0]:
            time.sleep(0.05)
    time.sleep(0.01)
    seen.save(file, time.time())
    saved = json.loads(file.read_text())
    (row,), (document,) = saved["sessions"], saved["jobs"]
    assert (row["job"], row["balancer"], document["session"]["job"]) == ("soon-over", balancer.address, "soon-over")
    assert row["seen"] < saved["time"]
    assert len(document["rounds"]["round"]) >= 5


def test_what_is_unknown_is_told_so() -> None:
    session = pb.SessionStats(job="new", group="default", loader="train", world_size=4, joined_ranks=3)
    found = read_row(session, None, 0.0, "10.0.0.1:50051")
    unknown = ("balanced", "before", "after", "over_bound", "moved", "wait_seconds", "rounds_per_second")
    assert {name: getattr(found, name) for name in unknown} == dict.fromkeys(unknown)
    (line,) = lines([found], False, [], datetime(2030, 1, 1))
    for name in ("before", "after", "over_bound", "moved", "wait", "planned", "rounds/s"):
        assert f" {name}=unknown" in line, name
    assert "0.000" not in line
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render([found], "balancer:50051", False, [], 200))
    text = console.export_text()
    assert "–" in text
    assert "0.000" not in text


def test_a_file_that_cannot_be_written_is_named(balancer: ServiceProcess, tmp_path: Path) -> None:
    flags = ["--balancer", balancer.address, "--count", "1", "--save", str(tmp_path / "no" / "folder.json")]
    done = CliRunner().invoke(app, ["top", *flags])
    assert done.exit_code == 1
    assert "folder.json" in done.output


def test_the_slowest_ranks_are_named_in_a_line() -> None:
    speeds = [1.0, 0.5, 1.0, 0.8, 0.8, 0.9, 0.95]
    ranks = {"rank": list(range(7)), "node": ["a\nb", *[None] * 6], "speed": speeds,
             "delay": ["loop", "network", *[None] * 5], "delay_share": [2.375, 0.1, *[None] * 5]}  # fmt: skip
    slow = slow_ranks({"ranks": ranks})
    assert [one.rank for one in slow] == [0, 1, 3, 4, 5, 6]
    (line,) = lines([row(slow_ranks=slow, reasons={"deadline": 3})], False, [], datetime(2030, 1, 1))
    named = r"rank 0 on a\nb: loop +238%, rank 1: computing 0.50×, rank 3: computing 0.80×, rank 4: computing 0.80×"
    assert line.endswith(f"({named}, 2 more ranks, deadline 3)")
    floor = {"rank": [0, 1], "node": [None] * 2, "speed": [1.0, 0.3], "speed_at_floor": [False, True]}
    assert [str(one) for one in slow_ranks({"ranks": floor})] == ["computing ≤0.30×"]


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "balancer": "10.0.0.1:50051", "name": "train-of-a-team-42/default/train", "run": "r:0", "joined": 64,
        "world_size": 64, "round": 123456, "rounds_per_second": 21.3, "balanced": 0.999, "before": 1.534,
        "after": 1.001, "over_bound": 0.0004, "moved": 0.12, "wait_seconds": 0.0042,
        "silent_seconds": 0.1, "reasons": {},
    }  # fmt: skip
    return Row(**values | changes)


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("several", [False, True])
def test_the_table_fits_the_terminal(width: int, several: bool) -> None:
    rows = [row(), row(name="x/default/eval", joined=63, after=1.2, reasons={"deadline": 3})]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(rows, "balancer:50051", several, [], width))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert text.index("63/64") < text.index("64/64")  # the least even one first
    always = ("after", "1.001", "1.200", "64/64", "deadline 3")
    for whole in (*always, *(() if several and width == 60 else ("rounds/s", "21.3", "planned", "99.9%"))):
        assert whole in text, whole  # neither cut nor folded
    assert ("over bound" in text) == (width == 140)
    assert ("10.0.0.1:50051" in text) == several


def test_a_name_cannot_move_the_cursor() -> None:
    assert printable("träin/grüppe/训练") == "träin/grüppe/训练"
    assert printable("a\x1b[2J\nforged/default/train") == r"a\x1b[2J\nforged/default/train"


def test_errors_say_what_to_do(balancer: ServiceProcess) -> None:
    assert CliRunner().invoke(app, ["top", "--balancer", "nonsense"]).exit_code == 2
    result = CliRunner().invoke(app, ["top", "--balancer", "127.0.0.1:1", "--count", "1"])
    assert result.exit_code == 1
    assert "evenkeel doctor --balancer 127.0.0.1:1" in result.output
    for more in ([], ["--json"]):
        nobody = CliRunner().invoke(
            app, ["top", "--balancer", balancer.address, "--count", "1", "--job", "nosuch", *more]
        )
        assert nobody.exit_code == 1
        assert "there is no job 'nosuch'; evenkeel top without --job" in nobody.stderr
        assert not nobody.stdout


def test_jobs_are_found_on_whichever_balancer_they_live(
    balancer: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PLANNER", "JOB", "TLS", "TLS_CA", "TLS_CERTIFICATE", "TLS_KEY", "TOKEN_FILE"):
        monkeypatch.delenv(f"EVENKEEL_{name}", raising=False)
    with running_balancer() as second:
        address = f"spread://{balancer.address},{second.address}"
        jobs = {"on-first": balancer.address, "on-second": second.address}
        with contextlib.ExitStack() as stack:
            for job, place in jobs.items():
                stack.enter_context(RunningJob(lambda place=place: channel(place, None), job=job))
            result = CliRunner().invoke(app, ["top", "--json", "--balancer", address, "--count", "1"])
            shown = CliRunner().invoke(app, ["top", "--balancer", address, "--count", "1"])
            one = CliRunner().invoke(
                app, ["top", "--json", "--balancer", address, "--count", "1", "--job", "on-second"]
            )
        assert result.exit_code == 0, result.output
        found = {row["name"].partition("/")[0]: row["balancer"] for row in json.loads(result.stdout)}
        assert {job: found[job] for job in jobs} == jobs
        assert [row["name"] for row in json.loads(one.stdout)] == ["on-second/default/train"]
        assert second.address in shown.stdout
        examined = {}
        for job in (f"job-{number}" for number in range(16)):
            doctor = CliRunner().invoke(app, ["doctor", "--json", "--balancer", f"grpc://{address}", "--job", job])
            assert doctor.exit_code == 0, doctor.output
            findings = {finding["check"]: finding for finding in json.loads(doctor.stdout)}
            examined[job] = findings["job"]["text"]
            if len(set(examined.values())) > 1 and len({text.rpartition(" ")[2] for text in examined.values()}) == 2:
                break
        assert {f"health {place}" for place in jobs.values()} <= set(findings)
        assert {text.rpartition(" ")[2] for text in examined.values()} == set(jobs.values())
        assert all(text.startswith(f"{job} belongs to") for job, text in examined.items())
        # One that is gone is told apart from those that answer.
        second.kill()
        left = CliRunner().invoke(app, ["top", "--balancer", address, "--count", "1"])
        assert left.exit_code == 0, left.output
        assert f"no answer from {second.address}" in left.stdout
        doctor = CliRunner().invoke(app, ["doctor", "--json", "--balancer", address])
        assert doctor.exit_code == 1
        broken = [finding["check"] for finding in json.loads(doctor.stdout) if finding["status"] == "fail"]
        assert broken == [f"address {second.address}"]
    for command in ("top", "doctor"):
        wrong = CliRunner().invoke(app, [command, "--json", "--balancer", "spread://balancer:1,other:2"])
        assert "several balancers give the IPs" in " ".join(wrong.output.split())


def test_it_ends_quietly_when_nobody_reads_on(balancer: ServiceProcess) -> None:
    top = f"{shlex.quote(sys.executable)} -m trainer_client.cli top --interval 0.1 --balancer {balancer.address}"
    awaited = (
        f"note: {balancer.address}: there is no job 'to-come'; evenkeel top without --job shows those there are; "
        "waiting for it\n"
    )
    commands = {f"{top} --job to-come | head -n 1; exit ${{PIPESTATUS[0]}}": awaited, f"{top} --count 1 >&-": ""}
    for command, told in commands.items():
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, told), command


def test_with_a_wrong_authority_only_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    server, stranger = (write_certificate(trustme.CA(), tmp_path / name, name) for name in ("server", "stranger"))
    with running_balancer("--tls-certificate", str(server.certificate), "--tls-key", str(server.key)) as secured:
        command = ["top", "--balancer", f"127.0.0.1:{secured.port}", "--tls-ca", str(stranger.ca), "--count", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "trainer_client.cli", *command], capture_output=True, text=True, timeout=300,
            env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: 127.0.0.1:{secured.port}: UNAVAILABLE")


def test_without_an_address_it_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENKEEL_BALANCER", raising=False)
    result = CliRunner().invoke(app, ["top", "--count", "1"])
    assert result.exit_code == 2
    assert result.stderr == "error: no balancer is named; give --balancer host:port, or set EVENKEEL_BALANCER\n"
