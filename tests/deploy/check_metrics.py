"""What balancer, planner and a rank export, against Prometheus's own conventions (Debian's package `prometheus`)."""

import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness.authorities import channel
from benchmarks.harness.balancer_process import running_balancer
from benchmarks.harness.ranks import run_ranks
from tests.asking import get
from tests.services.balancer.jobs import RunningJob
from tests.services.planner.serving import served
from tests.trainer_client.balancing.jobs import SPEC, Job, cost_of
from tests.waiting import until
from trainer_client import BalancedLoader
from trainer_client.observing.metrics import RankExporter


def scrape(url: str) -> str:
    return str(get(url)[1])


def check(text: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_balancer(tmp_path: Path) -> None:
    file = tmp_path / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(file)) as balancer:
        with RunningJob(lambda: channel(balancer.address, None), job="checked"):
            pass
        check(scrape(f"http://127.0.0.1:{int(file.read_text())}/metrics"))


def test_planner(tmp_path: Path) -> None:
    with served(tmp_path) as planner:
        scrape(f"{planner.url}/healthz")
        # A request is counted once its answer has gone out.
        until(lambda: "\nevenkeel_planner_requests_total{" in scrape(f"{planner.metrics_url}/metrics"))
        check(scrape(f"{planner.metrics_url}/metrics"))


def train(rank: int) -> Any:
    job = Job(steps=(4, 4), name="checked")
    with job.balancer() as balancer, RankExporter.start(job="checked", rank=rank) as exporter:
        loader = BalancedLoader(list(job.batches(rank)), balancer, cost=cost_of, spec=SPEC)
        for _batch in exporter.watch(loader):
            exporter.measures.key_skew("items", 1.25)
        return scrape(f"http://127.0.0.1:{exporter.port}/metrics")


def test_ranks() -> None:
    for text in run_ranks(2, train):
        check(text)
