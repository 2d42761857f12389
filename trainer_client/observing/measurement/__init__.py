"""Tools that show what balancing does to a training job, without disturbing it."""

from trainer_client.observing.measurement.balance_log import (
    BalanceLogger,
    ConsoleLines,
    JsonLines,
    PrometheusGauges,
    Sink,
    plot_balance,
)
from trainer_client.observing.measurement.flops import AttentionWork, ProductWork, Work, peak_tflops
from trainer_client.observing.measurement.steps import Breakdown, StepTimer, StepTimes, gather_breakdown
from trainer_client.observing.measurement.tracker import ModulePerf, PerfTracker

__all__ = [
    "AttentionWork",
    "BalanceLogger",
    "Breakdown",
    "ConsoleLines",
    "JsonLines",
    "ModulePerf",
    "PerfTracker",
    "ProductWork",
    "PrometheusGauges",
    "Sink",
    "StepTimer",
    "StepTimes",
    "Work",
    "gather_breakdown",
    "peak_tflops",
    "plot_balance",
]
