"""The picture of simulated and predicted miss rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

ACROSS = 4


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A field for each trace and policy, a colour for each number of lookups a step."""
    fields = list(dict.fromkeys((row["trace"], row["policy"]) for row in rows))
    down = -(-len(fields) // ACROSS)
    figure, axes = plt.subplots(down, ACROSS, figsize=(4 * ACROSS, 2.6 * down), squeeze=False, sharey=True)
    for one in axes.flat[len(fields) :]:
        one.set_visible(False)
    for one, (trace, policy) in zip(axes.flat, fields, strict=False):
        own = [row for row in rows if (row["trace"], row["policy"]) == (trace, policy)]
        for index, row in enumerate(own):
            sizes, predicted, told = row["cache_over_keys"], row["predicted"]["curve"], row["told"]["curve"]
            one.plot(sizes, row["simulated"], "o", ms=4, color=f"C{index}", label=f"{row['lookups_per_step']:,}")
            one.plot(sizes, predicted, "-", color=f"C{index}")
            low, high = ([min(1.0, max(0.0, rate + way * told)) for rate in predicted] for way in (-1, 1))
            one.fill_between(sizes, low, high, color=f"C{index}", alpha=0.15, lw=0)
        one.set(title=f"{trace}, {policy}", xscale="log", ylim=(0, 1))
        one.xaxis.set_major_formatter(PercentFormatter(1.0))
        one.legend(title="lookups a step", fontsize=7, title_fontsize=7)
    figure.supxlabel("cache over keys: points simulated, lines predicted, bands within the error told")
    figure.supylabel("miss rate")
    figure.tight_layout()
    figure.savefig(path, dpi=60)
    plt.close(figure)
