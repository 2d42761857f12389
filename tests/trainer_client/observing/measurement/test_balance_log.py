import io
import json
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from rich.console import Console

from trainer_client.balancing import BalancedLoader, Balancer
from trainer_client.observing.measurement import BalanceLogger, ConsoleLines, JsonLines, PrometheusGauges, plot_balance


def _reports() -> list:
    loader = BalancedLoader([torch.ones(4)] * 6, Balancer.off(), cost=lambda batch: batch.numpy())
    return [loader.report for _ in loader]


def test_only_the_window_is_recorded(tmp_path: Path) -> None:
    text = io.StringIO()
    path, registry = tmp_path / "log.jsonl", CollectorRegistry()
    sinks = [JsonLines(path), ConsoleLines(Console(file=text, width=200), every=2), PrometheusGauges(registry)]
    log = BalanceLogger(sinks, start=1, stop=5)
    for step, report in enumerate(_reports()):
        log.log(step, report, step_ms=1.5, note=float("nan"))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["own_load"] == 4.0
    assert lines[0]["mode"] == "identity"
    assert lines[0]["note"] is None
    assert [line.split(":")[0] for line in text.getvalue().splitlines()] == ["step 1", "step 3"]
    assert registry.get_sample_value("evenkeel_rank_step_imbalance_ratio") == 1.0
    assert registry.get_sample_value("evenkeel_rank_step_seconds") == pytest.approx(0.0015)


def test_records_are_drawn(tmp_path: Path) -> None:
    log = BalanceLogger()
    for step, report in enumerate(_reports()):
        log.log(step, report)
    assert plot_balance(log.records, tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no records"):
        plot_balance([], tmp_path / "empty.png")


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValueError, match="every is 0; use at least 1"):
        ConsoleLines(every=0)
    registry = CollectorRegistry()
    PrometheusGauges(registry)
    with pytest.raises(ValueError, match=r"Duplicated .*; give a second PrometheusGauges a registry of its own"):
        PrometheusGauges(registry)
    with pytest.raises(ValueError, match="the window is 5 to 5"):
        BalanceLogger(start=5, stop=5)
