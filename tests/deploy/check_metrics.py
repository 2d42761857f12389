"""What balancer, planner and a rank export, against Prometheus's own conventions (Debian's package `prometheus`)."""

from __future__ import annotations

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


def check(text: str, *names: str) -> None:
    for name in names:
        assert f"\n{name}" in text, name
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_balancer(tmp_path: Path) -> None:
    file = tmp_path / "port"
    with running_balancer("--metrics-port", "0", "--metrics-port-file", str(file)) as balancer:
        with RunningJob(lambda: channel(balancer.address, None), job="checked"):
            pass
        text = scrape(f"http://127.0.0.1:{int(file.read_text())}/metrics")
    check(
        text, 'evenkeel_balancer_rounds_total{job="checked"', "evenkeel_balancer_round_seconds_bucket",
        'evenkeel_balancer_imbalance_ratio_sum{job="checked"', "evenkeel_balancer_event_loop_lag_seconds",
        "evenkeel_build_info",
    )  # fmt: skip


def test_planner(tmp_path: Path) -> None:
    with served(tmp_path) as planner:
        scrape(f"{planner.url}/healthz")
        # A request is counted once its answer has gone out.
        until(lambda: "\nevenkeel_planner_requests_total{" in scrape(f"{planner.metrics_url}/metrics"))
        text = scrape(f"{planner.metrics_url}/metrics")
    check(
        text, "evenkeel_planner_requests_total", "evenkeel_build_info", "evenkeel_planner_infeasible_plans_total",
        "evenkeel_planner_solve_duration_seconds_bucket", "evenkeel_planner_plan_gap_ratio_bucket",
    )  # fmt: skip


def train(rank: int) -> Any:
    job = Job(steps=(4, 4), name="checked")
    with job.balancer() as balancer, RankExporter.start(job="checked", rank=rank) as exporter:
        loader = BalancedLoader(list(job.batches(rank)), balancer, cost=cost_of, spec=SPEC)
        for _batch in exporter.watch(loader):
            exporter.measures.key_skew("items", 1.25)
        return scrape(f"http://127.0.0.1:{exporter.port}/metrics")


def test_ranks() -> None:
    prefix = "evenkeel_trainer_"
    names = (
        "rounds_total", "exposed_wait_seconds_total", "agreement_wait_seconds_total", "service_wait_seconds_total",
        "redistribution_seconds_total", "moved_bytes_total", "breaker_open", "breaker_changes_total",
        "key_skew_ratio", "step_seconds_bucket",
    )  # fmt: skip
    for text in run_ranks(2, train):
        check(text, *(prefix + name for name in names))
