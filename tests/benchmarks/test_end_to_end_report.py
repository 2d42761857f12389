"""The end-to-end report's figures from times that are made up by a known rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.end_to_end_report import show, summarize

RANKS, STEPS, SAMPLES = 2, 24, 8
FIXED, PER_1000, PER_TFLOP, COMMUNICATION, OPTIMIZER = 3.0, 2.0, 5.0, 1.0, 0.5


def _setting(tokens: Any, flops: Any, *, data: float) -> dict[str, Any]:
    """A setting in which a rank computes by the rule and waits for the other, from (ranks, steps) sums."""
    compute = FIXED + PER_1000 * tokens / 1e3 + PER_TFLOP * flops / 1e12
    waiting = compute.max(axis=0) - compute
    phases = [np.full_like(compute, data), compute, waiting + COMMUNICATION, np.full_like(compute, OPTIMIZER)]
    return {
        "times": np.stack(phases, axis=2).tolist(), "tokens": tokens.tolist(), "flops": flops.tolist(),
        "imbalance": [1.0] * STEPS, "moved_share": [0.0] * STEPS, "modes": ["embedded"] * STEPS,
        "partition_seconds": [0.0], "exposed_seconds": [0.012] * RANKS, "peak_bytes": [2**30] * RANKS,
        "losses": [0.7] * STEPS, "compilations": [0] * RANKS,
    }  # fmt: skip


def test_gains_and_shares_follow_from_the_times() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 2000, (RANKS, STEPS, SAMPLES)).astype(float)
    flops = 1e9 * tokens + 1e6 * tokens**2
    total_tokens, total_flops = tokens.sum(axis=2), flops.sum(axis=2)
    even = [np.broadcast_to(sums.mean(axis=0), sums.shape) for sums in (total_tokens, total_flops)]
    raw = {
        "ranks": RANKS, "peak_tflops": 989.0, "machine": "none",
        "workloads": {"zipf": {
            "samples": [{"tokens": tokens[rank].tolist(), "flops": flops[rank].tolist()} for rank in range(RANKS)],
            "settings": {
                "off": _setting(total_tokens, total_flops, data=0.0),
                "embedded_fitted": _setting(*even, data=0.25) | {
                    "cost_fit": {"used": True, "explained": 0.9, "mean_error": 0.02}
                },
                "ideal": _setting(*even, data=0.0),
                "fixed": _setting(*(np.full_like(sums, sums.mean()) for sums in even), data=0.0),
            },
        }},
    }  # fmt: skip
    results = summarize(raw, skip=4)
    found = results["workloads"]["zipf"]
    off, fitted = found["settings"]["off"], found["settings"]["embedded_fitted"]
    assert found["fit"]["ms_per_1000_tokens"] == pytest.approx(PER_1000, rel=1e-3)
    assert found["fit"]["ms_per_tflop"] == pytest.approx(PER_TFLOP, rel=1e-3)
    assert fitted["compute_imbalance"] == pytest.approx(1.0)
    assert off["compute_imbalance"] > 1.02
    assert fitted["exposed_ms"] == pytest.approx(0.25)
    assert fitted["exposed_share"] == pytest.approx(0.25 / fitted["step_ms_mean"])
    assert fitted["exposed_agreement_ms_per_step"] == pytest.approx(0.5)
    # Even shares of whole samples do not exist everywhere, and the data costs a quarter of a millisecond.
    assert 0.95 < fitted["share_of_allowed"] < 1.05
    assert fitted["speedup"] == pytest.approx(off["step_ms_mean"] / fitted["step_ms_mean"])
    # Without balancing, the ideal is ahead by what ranks wait; with it, by the quarter of a millisecond for the data.
    ideal, fixed = found["settings"]["ideal"], found["settings"]["fixed"]
    assert fitted["share_of_ideal"] == pytest.approx(1 - 0.25 / fitted["step_ms_mean"])
    assert off["share_of_ideal"] == pytest.approx(ideal["step_ms_mean"] / off["step_ms_mean"])
    assert off["share_of_ideal"] < 0.98
    assert ideal["share_of_ideal"] == fixed["share_of_fixed"] == 1.0
    assert fitted["share_of_fixed"] == pytest.approx(fitted["tflops_per_rank"] / fixed["tflops_per_rank"])
    assert "loss_deviation" in fitted
    assert "loss_deviation" not in ideal  # it trains other samples
    raw["workloads"]["zipf"]["block_steps"] = 8
    counted = summarize(raw, skip=2)["workloads"]["zipf"]["settings"]["off"]["step_ms"]
    assert len(counted) == STEPS - 2 * STEPS // 8  # the first two steps of each block of eight are left out
    assert fitted["tflops_per_rank"] == pytest.approx(fitted["mfu"] * 989)
    console = Console(record=True, width=200)
    show(results, console)
    text = console.export_text()
    assert "the fit explains 90.0% of the variance of compute time, mean error 2.0%" in text
    assert f"{off['compute_imbalance']:.3f}" in text
