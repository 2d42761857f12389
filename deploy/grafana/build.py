"""Writes the dashboards: `python deploy/grafana/build.py`; with `--check` it only compares.

Dashboards are JSON that nobody writes by hand; here each panel is a line, and all of them look alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script of this folder, run by its path
from writing import write

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "evenkeel-prometheus"}
JOB = 'exported_job=~"$job"'
ONE = 'exported_job="$job"'
LOADER = 'exported_job="$job",loader="$loader"'
BALANCER = 'job="evenkeel-balancer",instance=~"$balancer"'
PLANNER = 'job="evenkeel-planner",instance=~"$planner"'

Panel = dict[str, Any]


def panel(
    title: str, description: str, *queries: tuple[str, str], unit: str = "short", kind: str = "timeseries",
    width: int = 12, height: int = 8, minimum: float | None = 0, stacked: bool = False,
) -> Panel:  # fmt: skip
    """One panel; `queries` are (expression, legend)."""
    defaults: dict[str, Any] = {
        "unit": unit,
        "color": {"mode": "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
        "custom": {},
    }
    if minimum is not None:
        defaults["min"] = minimum
    options: dict[str, Any] = {}
    if kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1, "fillOpacity": 30 if stacked else 5, "showPoints": "never",
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        }  # fmt: skip
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    elif kind == "stat":
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value",
            "graphMode": "area", "justifyMode": "auto", "orientation": "auto", "textMode": "value_and_name",
        }  # fmt: skip
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height, "x": 0, "y": 0},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(65 + number), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend,
                "range": kind == "timeseries", "instant": kind != "timeseries", "editorMode": "code",
            }
            for number, (expression, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def table(title: str, description: str, *columns: tuple[str, str, str], width: int = 24, height: int = 9) -> Panel:
    """One row a job; `columns` are (name, expression, unit)."""
    made = panel(title, description, *((expression, name) for name, expression, _ in columns), kind="table",
                 width=width, height=height, minimum=None)  # fmt: skip
    for target in made["targets"]:
        target["format"] = "table"
    letters = [target["refId"] for target in made["targets"]]
    made["transformations"] = [
        {"id": "joinByField", "options": {"byField": "exported_job", "mode": "outer"}},
        {"id": "organize", "options": {
            "excludeByName": {f"Time {number}": True for number in range(1, len(columns) + 1)} | {"Time": True},
            "renameByName": {"exported_job": "Job"} | {
                f"Value #{letter}": name for letter, (name, _, _) in zip(letters, columns, strict=True)},
        }},
    ]  # fmt: skip
    made["fieldConfig"]["overrides"] = [
        {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
        for name, _, unit in columns
    ]
    made["fieldConfig"]["overrides"].append(
        {"matcher": {"id": "byName", "options": "Job"}, "properties": [{"id": "links", "value": [
            {"title": "Open this job", "url": "/d/evenkeel-one-job?var-job=${__value.text}&${__url_time_range}"}]}]}
    )  # fmt: skip
    return made


def variable(name: str, query: str, label: str, *, many: bool) -> dict[str, Any]:
    """A choice at the top of a dashboard, filled from the labels of a metric."""
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1,
        "query": {"query": query, "refId": name}, "includeAll": many, "multi": many,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]} if many else
                   {"selected": False, "text": "", "value": ""}, "options": [], "regex": "",
        "hide": 0, "skipUrlSync": False,
    }  # fmt: skip


def dashboard(
    uid: str, title: str, description: str, variables: list[dict[str, Any]], *panels: Panel
) -> dict[str, Any]:
    """Lays the panels out from left to right, row by row."""
    x = y = tallest = 0
    for number, each in enumerate(panels, start=1):
        width, height = each["gridPos"]["w"], each["gridPos"]["h"]
        if x + width > 24:
            x, y, tallest = 0, y + tallest, 0
        each["gridPos"] |= {"x": x, "y": y}
        each["id"] = number
        x, tallest = x + width, max(tallest, height)
    return {
        "uid": uid, "title": title, "description": description, "tags": ["evenkeel"], "schemaVersion": 39, "version": 1,
        "editable": True, "graphTooltip": 1, "refresh": "10s", "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser", "templating": {"list": variables}, "annotations": {"list": []}, "panels": list(panels),
        "links": [{
            "type": "dashboards", "tags": ["evenkeel"], "asDropdown": False, "title": "Evenkeel", "icon": "dashboard",
            "includeVars": False, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
        }],
    }  # fmt: skip


def mean_excess(metric: str, where: str, by: str) -> str:
    """1 + the mean of a histogram of (ratio - 1)."""
    return (
        f"1 + sum by ({by}) (rate({metric}_sum{{{where}}}[$__rate_interval]))"
        f" / (sum by ({by}) (rate({metric}_count{{{where}}}[$__rate_interval])) > 0)"
    )


def quantile(q: float, metric: str, where: str, by: str = "") -> str:
    """A quantile of a histogram."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def rate(metric: str, where: str, by: str) -> str:
    """A counter's increase per second."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


JOBS = dashboard(
    "evenkeel-jobs", "Evenkeel / Jobs", "Which job is unbalanced, why, and what it costs.",
    [variable("job", "label_values(evenkeel:job_imbalance:mean5m, exported_job)", "Job", many=True)],
    table(
        "Jobs", "One line a job. Imbalance is max/mean load over the ranks; 1 is even.",
        ("Before", f'evenkeel:job_imbalance:mean5m{{{JOB},when="before"}}', "none"),
        ("After", f'evenkeel:job_imbalance:mean5m{{{JOB},when="after"}}', "none"),
        ("Over the bound", f"evenkeel:job_imbalance_over_bound:mean5m{{{JOB}}}", "none"),
        ("Rounds without a plan", f"evenkeel:job_unbalanced_rounds:ratio5m{{{JOB}}}", "percentunit"),
        ("Planned by the lead", f"evenkeel:job_rounds_by_lead:ratio5m{{{JOB}}}", "percentunit"),
        ("GPUs saved", f"evenkeel:job_saved_gpus:rate5m{{{JOB}}}", "none"),
        ("GPUs lost", f"evenkeel:job_lost_gpus:rate5m{{{JOB}}}", "none"),
    ),
    panel("Imbalance after balancing", "Mean of the rounds; 1 is even.",
          (f'evenkeel:job_imbalance:mean5m{{{JOB},when="after"}}', "{{exported_job}}"), minimum=1),
    panel("Imbalance before balancing", "What the data would do to the ranks.",
          (f'evenkeel:job_imbalance:mean5m{{{JOB},when="before"}}', "{{exported_job}}"), minimum=1),
    panel("GPU-hours saved", "Over the range shown; an estimate: step time x (before / after - 1), summed over ranks.",
          (f"sum by (exported_job) (increase(evenkeel_trainer_saved_seconds_total{{{JOB}}}[$__range])) / 3600",
           "{{exported_job}}"), unit="h", kind="stat", width=6),
    panel("GPU-hours lost", "Over the range shown, for what imbalance is left.",
          (f"sum by (exported_job) (increase(evenkeel_trainer_lost_seconds_total{{{JOB}}}[$__range])) / 3600",
           "{{exported_job}}"), unit="h", kind="stat", width=6),
    panel("Rounds of the balancer", "Planned.", (f"evenkeel:job_rounds:rate5m{{{JOB}}}", "{{exported_job}}"),
          unit="reqps", stacked=True),
    panel("Rounds of the ranks", "The service's plan, the lead's own (embedded) or none (identity), and why.",
          (f'sum by (mode, reason) (rate(evenkeel_trainer_rounds_total{{{JOB},rank="0"}}[$__rate_interval]))',
           "{{mode}} {{reason}}"), unit="reqps", stacked=True),
    panel("Steps", "Of all ranks.", (f"evenkeel:job_steps:rate15m{{{JOB}}}", "{{exported_job}}"), unit="reqps"),
    panel("Rounds without a plan", "Share of each job's rounds.",
          (f"evenkeel:job_unbalanced_rounds:ratio5m{{{JOB}}}", "{{exported_job}}"), unit="percentunit"),
    panel("Planned by the lead", "Share of the rounds for which the balancer's plan did not come in time.",
          (f"evenkeel:job_rounds_by_lead:ratio5m{{{JOB}}}", "{{exported_job}}"), unit="percentunit"),
)  # fmt: skip

ONE_JOB = dashboard(
    "evenkeel-one-job", "Evenkeel / One job", "Loads of the ranks, what balancing saves, who is late.",
    [variable("job", "label_values(evenkeel_trainer_load, exported_job)", "Job", many=False),
     variable("loader", 'label_values(evenkeel_trainer_load{exported_job="$job"}, loader)', "Loader", many=False)],
    panel("Imbalance", "max/mean load as loaded, as trained, and the bound that no assignment beats.",
          (mean_excess("evenkeel_trainer_imbalance_excess_ratio", LOADER, "when"), "{{when}}"), minimum=1),
    panel("Saved", "GPUs' worth of time that balancing saves, and that the remaining imbalance costs.",
          (f"evenkeel:job_saved_gpus:rate5m{{{ONE}}}", "saved"), (f"evenkeel:job_lost_gpus:rate5m{{{ONE}}}", "lost"),
          unit="none"),
    panel("Load of each rank, as loaded", "Over the mean; the highest rank is the one that all wait for.",
          ((f'evenkeel_trainer_load{{{LOADER},when="before"}}'
           f" / on (exported_job, rank, loader, instance) group_left () evenkeel_trainer_mean_load{{{LOADER}}}"),
           "rank {{rank}}")),
    panel("Load of each rank, as trained", "The same after balancing.",
          ((f'evenkeel_trainer_load{{{LOADER},when="after"}}'
           f" / on (exported_job, rank, loader, instance) group_left () evenkeel_trainer_mean_load{{{LOADER}}}"),
           "rank {{rank}}")),
    panel("Step time", "Median over the ranks' steps, and the slowest hundredth.",
          (quantile(0.5, "evenkeel_trainer_step_seconds", LOADER), "p50"),
          (quantile(0.99, "evenkeel_trainer_step_seconds", LOADER), "p99"), unit="s"),
    panel("Step time of each rank", "Mean. A rank that is slower at equal load has a slower GPU, or waits for input.",
          ((f"rate(evenkeel_trainer_step_seconds_sum{{{LOADER}}}[$__rate_interval])"
           f" / rate(evenkeel_trainer_step_seconds_count{{{LOADER}}}[$__rate_interval])"), "rank {{rank}}"), unit="s"),
    panel("Exposed waiting", "Share of a rank's time in which training waits for its next batch.",
          (f"rate(evenkeel_trainer_exposed_wait_seconds_total{{{LOADER}}}[$__rate_interval])", "rank {{rank}}"),
          unit="percentunit"),
    panel("Where the waiting goes", "Mean over ranks: for the agreement, for moving, and (hidden) for the service.",
          (f"avg(rate(evenkeel_trainer_agreement_wait_seconds_total{{{LOADER}}}[$__rate_interval]))", "agreement"),
          (f"avg(rate(evenkeel_trainer_redistribution_seconds_total{{{LOADER}}}[$__rate_interval]))", "redistribution"),
          (f"avg(rate(evenkeel_trainer_service_wait_seconds_total{{{LOADER}}}[$__rate_interval]))", "service (hidden)"),
          unit="percentunit"),
    panel("Rounds", "What the ranks did: the service's plan, the lead's own, or nothing, and why.",
          ((f"sum by (mode, reason) (rate(evenkeel_trainer_rounds_total{{{LOADER}}}[$__rate_interval]))"
           f" / scalar(count(evenkeel_trainer_mean_load{{{LOADER}}}))"), "{{mode}} {{reason}}"),
          unit="reqps", stacked=True),
    panel("Moved", "Share of the bytes that change rank.",
          ((f"{rate('evenkeel_trainer_moved_bytes_total', LOADER, 'loader')}"
           f" / {rate('evenkeel_trainer_batch_bytes_total', LOADER, 'loader')}"), "{{loader}}"), unit="percentunit"),
    panel("Breaker", "1 while the lead does not ask the balancer.",
          (f"max by (loader) (evenkeel_trainer_breaker_open{{{LOADER}}})", "{{loader}}")),
    panel("Slow ranks", "That compute slowly, or get their batches late, by cause.",
          (f"sum by (cause) (evenkeel_balancer_slow_ranks{{{ONE}}})", "{{cause}}")),
    panel("Key skew", "Keys of the rank with the most over the mean, of each routed table.",
          (f"max by (table) (evenkeel_trainer_key_skew_ratio{{{ONE}}})", "{{table}}"), minimum=1),
)  # fmt: skip

SERVICES = dashboard(
    "evenkeel-services", "Evenkeel / Services", "Whether the balancers keep up.",
    [variable("balancer", 'label_values(up{job="evenkeel-balancer"}, instance)', "Balancer", many=True)],
    panel("Up", "1: answers its scrapes.", ('up{job=~"evenkeel-.*"}', "{{job}} {{instance}}"), kind="stat", width=8),
    panel("Version", "What runs.", ("count by (service, version) (evenkeel_build_info)", "{{service}} {{version}}"),
          kind="stat", width=8),
    panel("Jobs", "That have asked within ten minutes.", (f"evenkeel_balancer_jobs{{{BALANCER}}}", "{{instance}}"),
          width=8),
    panel("Rounds", "Planned.", (rate("evenkeel_balancer_rounds_total", BALANCER, "instance"), "{{instance}}"),
          unit="reqps"),
    panel("Calls", "Under way, and of those the ones that wait for a worker.",
          (f"evenkeel_balancer_calls{{{BALANCER}}}", "calls {{instance}}"),
          (f"evenkeel_balancer_waiting_calls{{{BALANCER}}}", "waiting {{instance}}")),
    panel("Time of a call", "From its begin to its plan.",
          (quantile(0.5, "evenkeel_balancer_round_seconds", BALANCER), "p50"),
          (quantile(0.99, "evenkeel_balancer_round_seconds", BALANCER), "p99"), unit="s"),
    panel("Search time", "Of that, in a worker.",
          (quantile(0.5, "evenkeel_balancer_search_seconds", BALANCER), "p50"),
          (quantile(0.99, "evenkeel_balancer_search_seconds", BALANCER), "p99"), unit="s"),
    panel("Workers replaced", "That died, or took too long.",
          (rate("evenkeel_balancer_worker_restarts_total", BALANCER, "instance"), "{{instance}}"), unit="reqps"),
    panel("Event loop lag", "p99; every round waits that much longer.",
          (f"evenkeel:balancer_event_loop_lag_seconds:p99_5m{{{BALANCER.split(',')[1]}}}", "{{instance}}"), unit="s"),
    panel("Failed calls", "By reason; their leads planned by themselves.",
          (rate("evenkeel_balancer_failed_calls_total", BALANCER, "status, reason"), "{{status}} {{reason}}"),
          unit="reqps"),
    panel("Bytes of requests", "Under way.", (f"evenkeel_balancer_request_bytes{{{BALANCER}}}", "{{instance}}"),
          unit="bytes"),
    panel("Memory", "Resident.", ('process_resident_memory_bytes{job=~"evenkeel-.*"}', "{{job}} {{instance}}"),
          unit="bytes"),
    panel("CPU", "Cores in use.", ('rate(process_cpu_seconds_total{job=~"evenkeel-.*"}[$__rate_interval])',
                                  "{{job}} {{instance}}")),
)  # fmt: skip

PLANNERS = dashboard(
    "evenkeel-planner", "Evenkeel / Planner", "Whether placements are found, how good and how fast.",
    [variable("planner", 'label_values(up{job="evenkeel-planner"}, instance)', "Planner", many=True)],
    panel("Requests", "By route and status.",
          (rate("evenkeel_planner_requests_total", PLANNER, "route, status"), "{{route}} {{status}}"), unit="reqps",
          stacked=True),
    panel("Time to the answer", "Of the requests that are solved.",
          (quantile(0.5, "evenkeel_planner_request_duration_seconds", f'{PLANNER},route=~"/v1/.*"', "route"),
           "p50 {{route}}"),
          (quantile(0.99, "evenkeel_planner_request_duration_seconds", f'{PLANNER},route=~"/v1/.*"', "route"),
           "p99 {{route}}"), unit="s"),
    panel("Plans", "By status: optimal is proven best, feasible has a gap, infeasible fits no budget.",
          (rate("evenkeel_planner_plans_total", PLANNER, "status"), "{{status}}"), unit="reqps", stacked=True),
    panel("Time of the search", "Waiting for a worker not included, by status of the plan.",
          (quantile(0.5, "evenkeel_planner_solve_duration_seconds", PLANNER, "status"), "p50 {{status}}"),
          (quantile(0.99, "evenkeel_planner_solve_duration_seconds", PLANNER, "status"), "p99 {{status}}"), unit="s"),
    panel("Gap", "Distance of a plan's time to the bound proved for it: median and largest hundredth.",
          (quantile(0.5, "evenkeel_planner_plan_gap_ratio", PLANNER), "p50"),
          (quantile(0.99, "evenkeel_planner_plan_gap_ratio", PLANNER), "p99"), unit="percentunit"),
    panel("Nothing fits", "Requests without a plan, by the budget that is too small.",
          (rate("evenkeel_planner_infeasible_plans_total", PLANNER, "binding"), "{{binding}}"), unit="reqps",
          stacked=True),
    panel("Tables of a request", "Median and largest hundredth.",
          (quantile(0.5, "evenkeel_planner_tables", PLANNER), "p50"),
          (quantile(0.99, "evenkeel_planner_tables", PLANNER), "p99")),
    panel("At work", "Requests being solved, and those that wait for a worker.",
          (f"evenkeel_planner_running_requests{{{PLANNER}}}", "running {{instance}}"),
          (f"evenkeel_planner_waiting_requests{{{PLANNER}}}", "waiting {{instance}}")),
    panel("Given up", "Searches ended because the client went away.",
          (rate("evenkeel_planner_cancelled_total", PLANNER, "instance"), "{{instance}}"), unit="reqps"),
)  # fmt: skip

DASHBOARDS = {"jobs": JOBS, "one_job": ONE_JOB, "services": SERVICES, "planner": PLANNERS}


def main() -> int:
    """Writes or compares; returns 1 if a file differs."""
    parser = argparse.ArgumentParser(description="Writes the dashboards.")
    parser.add_argument("--check", action="store_true", help="only compare")
    files = {FOLDER / f"{name}.json": json.dumps(content, indent=1) + "\n" for name, content in DASHBOARDS.items()}
    return write(files, builder="deploy/grafana/build.py", check=parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
