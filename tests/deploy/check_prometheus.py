"""Rules and alerts, with promtool (Debian's package `prometheus`): each alert fires when it should, and not else."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS / "rules/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
BALANCER = 'job="evenkeel-balancer",instance="b"'
JOB = f'{BALANCER},exported_job="j"'
RANK = 'job="evenkeel-trainers",instance="r",exported_job="j",rank="0",loader="train"'
PLANNER = 'job="evenkeel-planner",instance="p"'
ROUNDS = f"evenkeel_balancer_rounds_total{{{JOB}}}"
BY_LEAD = f"evenkeel_balancer_rounds_by_lead_total{{{JOB}}}"
EVENNESS = f'evenkeel_balancer_imbalance_ratio_%s{{{JOB},when="%s"}}'
DONE = f'evenkeel_trainer_rounds_total{{{RANK},mode="%s",reason="%s"}}'

# By alert: series (a minute between values) under which it fires after half an hour, and under which it does not.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "EvenkeelBalancerDown": ({f"up{{{BALANCER}}}": "0x60"}, {f"up{{{BALANCER}}}": "1x60"}),
    "EvenkeelBalancersGone": ({f"up{{{PLANNER}}}": "1x60"}, {f"up{{{BALANCER}}}": "1x60"}),
    "EvenkeelBalancerRestarting": (
        {f"process_start_time_seconds{{{BALANCER}}}": "1x10 2x5 3x5 4x5 5x40"},
        {f"process_start_time_seconds{{{BALANCER}}}": "1x20 2x60"},
    ),
    "EvenkeelPlannerDown": ({f"up{{{PLANNER}}}": "0x60"}, {f"up{{{PLANNER}}}": "1x60"}),
    "EvenkeelTrainerDown": (
        {'up{job="evenkeel-trainers",instance="r"}': "0x60"},
        {'up{job="evenkeel-trainers",instance="r"}': "1x20 0x3 1x60"},
    ),
    "EvenkeelJobStalled": (
        {f"evenkeel_trainer_info{{{RANK}}}": "1x60"},
        {f"evenkeel_trainer_info{{{RANK}}}": "1x60", f"evenkeel_trainer_step_seconds_count{{{RANK}}}": "0+9x60"},
    ),
    "EvenkeelJobUnbalanced": (
        {EVENNESS % ("sum", "after"): "0+120x60", EVENNESS % ("count", "after"): "0+100x60",
         EVENNESS % ("sum", "bound"): "0+110x60", EVENNESS % ("count", "bound"): "0+100x60"},
        {EVENNESS % ("sum", "after"): "0+120x60", EVENNESS % ("count", "after"): "0+100x60",
         EVENNESS % ("sum", "bound"): "0+119x60", EVENNESS % ("count", "bound"): "0+100x60"},
    ),
    "EvenkeelRoundsUnbalanced": (
        {DONE % ("service", "none"): "0+90x60", DONE % ("identity", "partition_failed"): "0+10x60"},
        {DONE % ("embedded", "no_service"): "0+90x60", DONE % ("identity", "no_service"): "0+10x60"},
    ),
    "EvenkeelRoundsSlow": (
        {f'evenkeel_balancer_round_seconds_bucket{{{BALANCER},le="0.5"}}': "0+50x60",
         f'evenkeel_balancer_round_seconds_bucket{{{BALANCER},le="1.0"}}': "0+100x60",
         f'evenkeel_balancer_round_seconds_bucket{{{BALANCER},le="+Inf"}}': "0+100x60"},
        {f'evenkeel_balancer_round_seconds_bucket{{{BALANCER},le="0.25"}}': "0+100x60",
         f'evenkeel_balancer_round_seconds_bucket{{{BALANCER},le="+Inf"}}': "0+100x60"},
    ),
    "EvenkeelRoundsByLead": ({ROUNDS: "0+70x60", BY_LEAD: "0+30x60"}, {ROUNDS: "0+90x60", BY_LEAD: "0+3x60"}),
    "EvenkeelRankSlow": (
        {f"evenkeel_trainer_speed_ratio{{{RANK}}}": "0.8x60"},
        {f"evenkeel_trainer_speed_ratio{{{RANK}}}": "1x20 0.8x4 1x40"},
    ),
    **{
        alert: (
            {f'evenkeel_trainer_late_ratio{{{RANK},cause="{cause}"}}': "0.3x60"},
            {f'evenkeel_trainer_late_ratio{{{RANK},cause="{cause}"}}': "0x20 0.3x4 0x40",
             f'evenkeel_trainer_late_ratio{{{RANK},cause="{other}"}}': "0.3x60"},
        )
        for alert, cause, other in (
            ("EvenkeelRankLoadsSlowly", "loading", "network"), ("EvenkeelRankNetworkSlow", "network", "loading"),
        )
    },
    "EvenkeelBreakerOpen": (
        {f"evenkeel_trainer_breaker_open{{{RANK}}}": "1x60"},
        {f"evenkeel_trainer_breaker_open{{{RANK}}}": "0x20 1x3 0x40"},
    ),
    "EvenkeelWaitExposed": (
        {f"evenkeel_trainer_exposed_wait_seconds_total{{{RANK}}}": "0+12x60",
         f"evenkeel_trainer_step_seconds_sum{{{RANK}}}": "0+48x60"},
        {f"evenkeel_trainer_exposed_wait_seconds_total{{{RANK}}}": "0+2x60",
         f"evenkeel_trainer_step_seconds_sum{{{RANK}}}": "0+58x60"},
    ),
    "EvenkeelCostOfImbalance": (
        {f"evenkeel_trainer_lost_seconds_total{{{RANK}}}": "0+300x60"},
        {f"evenkeel_trainer_lost_seconds_total{{{RANK}}}": "0+30x60"},
    ),
    "EvenkeelKeysSkewed": (
        {f'evenkeel_trainer_key_skew_ratio{{{RANK},table="t"}}': "2x60"},
        {f'evenkeel_trainer_key_skew_ratio{{{RANK},table="t"}}': "1.4x60"},
    ),
    "EvenkeelEventLoopSlow": (
        {f'evenkeel_balancer_event_loop_lag_seconds_bucket{{{BALANCER},le="0.05"}}': "0+1x60",
         f'evenkeel_balancer_event_loop_lag_seconds_bucket{{{BALANCER},le="0.1"}}': "0+100x60",
         f'evenkeel_balancer_event_loop_lag_seconds_bucket{{{BALANCER},le="+Inf"}}': "0+100x60"},
        {f'evenkeel_balancer_event_loop_lag_seconds_bucket{{{BALANCER},le="0.01"}}': "0+100x60",
         f'evenkeel_balancer_event_loop_lag_seconds_bucket{{{BALANCER},le="+Inf"}}': "0+100x60"},
    ),
    "EvenkeelWorkersLost": (
        {f"evenkeel_balancer_worker_restarts_total{{{BALANCER}}}": "0x20 1x60"},
        {f"evenkeel_balancer_worker_restarts_total{{{BALANCER}}}": "1x60"},
    ),
    "EvenkeelQueueLong": (
        {f"evenkeel_balancer_waiting_calls{{{BALANCER}}}": "40x60"},
        {f"evenkeel_balancer_waiting_calls{{{BALANCER}}}": " ".join(["40x2 0"] * 12)},
    ),
    "EvenkeelCallsRefused": (
        {f'evenkeel_balancer_failed_calls_total{{{BALANCER},status="UNAUTHENTICATED",reason="token"}}': "0+120x60"},
        {f'evenkeel_balancer_failed_calls_total{{{BALANCER},status="UNAUTHENTICATED",reason="token"}}': "0+6x60"},
    ),
    "EvenkeelPlannerFailing": (
        {f'evenkeel_planner_requests_total{{{PLANNER},status="200"}}': "0+90x60",
         f'evenkeel_planner_requests_total{{{PLANNER},status="503"}}': "0+10x60"},
        {f'evenkeel_planner_requests_total{{{PLANNER},status="200"}}': "0+90x60",
         f'evenkeel_planner_requests_total{{{PLANNER},status="422"}}': "0+90x60"},
    ),
    "EvenkeelPlannerSlow": (
        {f'evenkeel_planner_request_duration_seconds_bucket{{{PLANNER},route="/v1/plans",le="10.0"}}': "0+1x60",
         f'evenkeel_planner_request_duration_seconds_bucket{{{PLANNER},route="/v1/plans",le="30.0"}}': "0+100x60",
         f'evenkeel_planner_request_duration_seconds_bucket{{{PLANNER},route="/v1/plans",le="+Inf"}}': "0+100x60"},
        {f'evenkeel_planner_request_duration_seconds_bucket{{{PLANNER},route="/v1/plans",le="1.0"}}': "0+100x60",
         f'evenkeel_planner_request_duration_seconds_bucket{{{PLANNER},route="/v1/plans",le="+Inf"}}': "0+100x60"},
    ),
}  # fmt: skip


def promtool(*arguments: str) -> str:
    try:
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.fail("promtool is missing: install Debian's package prometheus")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_and_configuration_are_valid() -> None:
    promtool("check", "rules", *map(str, RULES))
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_every_alert_has_a_case() -> None:
    assert sorted(CASES) == sorted(ALERTS)


# What an embedded job alone exports, without a balancer.
TRAINED = f'evenkeel_trainer_imbalance_excess_ratio_%s{{{RANK},when="%s"}}'
EMBEDDED: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "EvenkeelJobUnbalanced": (
        {TRAINED % ("sum", "after"): "0+20x60", TRAINED % ("count", "after"): "0+100x60",
         TRAINED % ("sum", "bound"): "0+10x60", TRAINED % ("count", "bound"): "0+100x60"},
        {TRAINED % ("sum", "after"): "0+20x60", TRAINED % ("count", "after"): "0+100x60",
         TRAINED % ("sum", "bound"): "0+19x60", TRAINED % ("count", "bound"): "0+100x60"},
    ),
    "EvenkeelJobStalled": (
        {f"evenkeel_trainer_info{{{RANK}}}": "1x60", f"evenkeel_trainer_step_seconds_count{{{RANK}}}": "7x60"},
        {f"evenkeel_trainer_info{{{RANK}}}": "1x60", f"evenkeel_trainer_step_seconds_count{{{RANK}}}": "0+9x60"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("alert", sorted(CASES))
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "silent"])
def test_alerts(alert: str, fires: bool, tmp_path: Path) -> None:
    check_alert(alert, CASES[alert][0 if fires else 1], fires, tmp_path / "test.yml")


@pytest.mark.parametrize("alert", sorted(EMBEDDED))
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "silent"])
def test_alerts_of_a_job_without_a_balancer(alert: str, fires: bool, tmp_path: Path) -> None:
    check_alert(alert, EMBEDDED[alert][0 if fires else 1], fires, tmp_path / "test.yml")


def check_alert(alert: str, series: dict[str, str], fires: bool, file: Path) -> None:
    query = {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)', "eval_time": "35m",
             "exp_samples": [{"labels": "{}", "value": int(fires)}]}  # fmt: skip
    test: dict[str, Any] = {
        "rule_files": [str(path) for path in RULES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [query],
            }
        ],
    }
    file.write_text(yaml.safe_dump(test))
    promtool("test", "rules", str(file))


def test_expressions_end_in_a_threshold() -> None:
    """Which is what the test of the whole stack takes off, to see that there is data behind every alert."""
    for alert in ALERTS.values():
        assert re.fullmatch(r".+ (==|>|<) [0-9.]+", alert["expr"]), alert["expr"]
