"""Tells which figures of the pages are not those of the result files: `python -m scripts.check_figures`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/evidence/results.md")
PLANNERS = "with the clock,TorchRec,TorchEasyRec,all cached alike"
SHUFFLERS = ("off", "theirs_all_gather", "evenkeel", "evenkeel_drop_in")
SAME_RATE = "counts=equal/bytes_within=300000000000.0"
WAYS = "{whole,windows,split,windows and split}"
DRAWN = ("uniform", "lognormal", "zipf_1.2", "bimodal", "one_giant")
Choose = Callable[[list[float]], float]
Read = Callable[[Any], float]


def found_at(path: str, content: Any) -> list[Any]:
    """What is at a path of names, of which `{a,b}` stands for either in turn, `NAME=VALUE` for such records of a list.

    Without braces behind it, a list stands for all its records that have what is asked for.
    """
    if choices := re.search(r"\{(.*?)\}", path):
        before, after = path[: choices.start()], path[choices.end() :]
        return [one for choice in choices[1].split(",") for one in found_at(before + choice + after, content)]
    found = [content]
    for part in path.split("/"):
        name, _, value = part.partition("=")
        found = [record for one in found for record in (one if isinstance(one, list) else [one])]
        found = (
            [one for one in found if str(one[name]) == value] if value else [one[name] for one in found if name in one]
        )
    return found


def _of_turns(settings: list[Any]) -> float:
    return float(median(settings[0]))


# By result file: figures as the pages have them; where the file has them, one after the other or, behind functions,
# those of one list; what is 100 times as much on the pages.
FIGURES: list[tuple[str, str, str, Sequence[Choose], float]] = [
    ("end_to_end_2xh100", "55.5 48.2 34.8 34.4", "workloads/{zipf,lognormal}/settings/{off,grpc}/step_ms_mean", (), 1),
    ("end_to_end_2xh100", "32.0 36.1", "workloads/lognormal/settings/{window,fitted}/step_ms_mean", (), 1),
    ("end_to_end_2xh100", "1.15 1.01", "workloads/{zipf,lognormal}/settings/grpc/speedup", (), 1),
    ("end_to_end_2xh100", "1.194 1.137", "workloads/{zipf,lognormal}/settings/off/cost_imbalance", (), 1),
    (
        "end_to_end_replay",
        "1.432 1.446 1.421 1.204 1.243 1.201 1.513 1.518 1.500 1.172 1.287 1.215",
        "replays/{8,16}/workloads/{zipf,lognormal}/settings/{minimal_move,window,kk}/speedup", (), 1,
    ),
    *(
        ("peers_2xh100", text, f"shuffle/cases/case={case}/settings/{setting}/block_means_ms", (_of_turns,), 1)
        for case, texts in (
            ("zipf", "65.2 53.8 47.3 47.7"), ("lognormal", "45.0 46.6 41.6 41.4"), ("equal", "36.3 42.7 36.5 36.3"),
        )
        for setting, text in zip(SHUFFLERS, texts.split(), strict=True)
    ),
    ("balance_gap", "1.62", "rows/lengths=yambda/samples=8/evenkeel/gap", (max,), 100),
    ("balance_gap", "14.4 18.0", "rows/lengths=yambda/samples=8/recsys-examples/gap", (min, max), 100),
    ("balance_gap", "0.10", "rows/lengths=yambda/samples=32/evenkeel/gap", (max,), 100),
    ("balance_gap", "3.1", "rows/lengths=yambda/samples=32/recsys-examples/gap", (max,), 100),
    ("balance_gap", "0.00", "rows/lengths=yambda/samples=128/recsys-examples/gap", (max,), 100),
    ("partitioning", "704", "grid/ranks", (len,), 1),
    *(
        ("partitioning", text, f"grid/samples={samples}/lengths={lengths}/moved_share/minimal_move", (mean,), 100)
        for samples, texts in ((32, "5.5 11.6 24.5 72.3 2.2"), (128, "2.3 4.2 11.3 25.1 3.7"))
        for lengths, text in zip(DRAWN, texts.split(), strict=True)
    ),
    (
        "rounds", "1.77 0.32 0.70 15.3 10.0 2.1 74.5 57.1 5.3", "sizes/ranks={8,1024,4096}/{p50_ms,floor_ms,echo_ms}",
        (), 1,
    ),
    ("rounds", "1,458 3,163", "jobs/jobs=100/{rounds_per_second,echoes_per_second}", (), 1),
    ("redistribution_2xh100", "0.025 0.156", "rows/strategy=minimal_move/ours_ms", (min, max), 1),
    ("redistribution_2xh100", "0.024 0.086", "rows/strategy=minimal_move/all_to_all_ms", (min, max), 1),
    ("redistribution_2xh100", "0.508", "rows/strategy=shuffle/ours_ms", (max,), 1),
    ("redistribution_2xh100", "0.363", "rows/strategy=shuffle/all_to_all_ms", (max,), 1),
    *(
        ("giants", texts, f"rows/lengths={lengths}/ranks=8/{cell}/{SAME_RATE}/{WAYS}", (), 1)
        for lengths, cell, texts in (
            ("giants", "samples=32", "4.12 1.26 1.13 1.03"), ("long histories", "samples=2", "3.05 1.33 1.46 1.12"),
            ("long histories", "samples=8", "1.66 1.02 1.14 1.02"),
        )
    ),
    ("bucketize_h100", "3.1 196 10.1", "results/fbgemm_over_ours", (min, max, median), 1),
    ("faults", "1,245", "faults", (), 1),
    ("kills", "84 41", "{runs_with_another_number_of_ranks,jobs_compared_bit_by_bit}", (), 1),
    ("programs", "1,990", "right", (), 1),
    ("hot_rows", "1.18 1.01", "rows/stream=album_id/ranks=8/heaviest_owner/{once,once_hot}", (), 1),
    ("hot_rows", "1.11", "rows/stream=sessions/ranks=64/heaviest_owner/once_hot", (), 1),
    ("balance_gap", "0.44 1.30", "rows/lengths=yambda/samples=8/unirl/gap", (min, max), 100),
    ("balance_gap", "0.02", "rows/lengths=yambda/samples=32/unirl/gap", (max,), 100),
    ("balance_gap", "0.00", "rows/lengths=yambda/samples=128/unirl/gap", (max,), 100),
    *(
        ("placement_gpu_h100", texts, f"cells/keys={cell}/planners/{{{plans}}}/kernels_ms", (), 1)
        for cell, plans, texts in (
            ("traces/tables=26/hbm_share=0.1", PLANNERS, "1.08 1.52 1.54 1.08"),
            ("traces/tables=60/hbm_share=0.2", PLANNERS, "1.76 2.36 2.43 1.94"),
            ("power laws/tables=100/hbm_share=0.5", PLANNERS, "1.97 2.91 2.91 5.22"),
            ("power laws/tables=26/hbm_share=0.1", "by the model", "1.35"),
        )
    ),
    ("placement_gpu_h100", "0.71", "summary/with the clock, kernels/over_all_cached_alike_median", (), 1),
    *(
        ("placement_gpu_h100", text, f"summary/{what}/over_the_best_other_worst", (), 1)
        for what, text in (
            ("with the clock, kernels", "1.00"), ("by the model, kernels", "1.00"),
            ("with the clock, wall beside 0 ms", "1.14"), ("with the clock, wall beside 5 ms", "1.02"),
            ("with the clock, wall beside 20 ms", "1.00"), ("by the model, wall beside 0 ms", "1.40"),
        )
    ),
    (
        "placement_gpu_h100", "98", "summary/predictions/kernels_within_15_percent", (), 100,
    ),
    (
        "placement_gpu_h100", "69 100 100", "summary/predictions/steps_within_20_percent/{0,5,20}", (), 100,
    ),
    ("placement_gpu_h100", "95 98", "refitted/{before,after}/pairs_in_order", (), 100),
    ("placement_gpu_h100", "98 97", "refitted/held_out/after/pairs_in_order", (), 100),
]  # fmt: skip


def _saved(made: bool, choose: Choose, *, ranks: int = 64, what: str = "link_mb", ways: str = "once once_hot") -> Read:
    before, after = ways.split()
    return lambda d: (
        100
        * choose(
            [
                1 - row[what][after] / row[what][before]
                for row in d["rows"]
                if row["ranks"] == ranks and row["stream"].endswith("_id") == made
            ]
        )
    )


def _within(way: str) -> Read:
    return lambda d: sum(row["heaviest_owner"][way] <= 1.05 for row in d["rows"])


def _above_others(result: Any) -> float:
    loads = [cell["over_bound"] for cell in result["grid"]]
    return 100 * max(one["minimal_move"] / min(one["karmarkar_karp"], one["lpt"]) - 1 for one in loads)


def _lost_of_equal(run: int) -> Callable[[Any], float]:
    def lost(result: Any) -> float:
        settings = result["runs"][run]["cases"][0]["settings"]
        return 100 * float(settings["evenkeel"]["mean_ms"] / settings["off"]["mean_ms"] - 1)

    return lost


COMPUTED: dict[str, dict[str, Read]] = {
    "equal_2xh100": {"11": _lost_of_equal(0), "0.1": _lost_of_equal(1)},
    "balance_gap": {
        "14 of 45": lambda d: sum(row["evenkeel"]["ms"] > row["recsys-examples"]["ms"] for row in d["rows"])
    },
    "partitioning": {"0.18": _above_others},
    "faults": {
        "0 samples lost": lambda d: sum(d["violations"].values()),
        "15 to 34": lambda d: 1e3 * min(one["median"] for one in d["longest_by_kind"].values()),
        "34 ms": lambda d: 1e3 * max(one["median"] for one in d["longest_by_kind"].values()),
        "21 where": lambda d: 1e3 * d["longest_by_kind"]["none"]["median"],
    },
    "kills": {"273": lambda d: sum(d["kills"].values()), "0 samples lost": lambda d: d["lost"] + d["doubled"]},
    "hot_rows": {
        "99.5": _saved(True, min, what="all_to_all_mb", ways="all once"),
        "44 to": _saved(False, min, what="all_to_all_mb", ways="all once"),
        "57 %": _saved(False, max, what="all_to_all_mb", ways="all once"),
        "10.5": _saved(True, min, ways="once floor_of_homes"), "14.6": _saved(True, max, ways="once floor_of_homes"),
        "20.3": _saved(False, min, ways="once floor_of_homes"), "54.9": _saved(False, max, ways="once floor_of_homes"),
        "5.3": _saved(True, min), "7.1": _saved(True, max), "26.4": _saved(False, max),
        "12.2": _saved(False, lambda saved: sorted(saved)[1]), "25": lambda d: -_saved(False, min)(d),
        "15 of 16": _within("once_hot"), "10 without": _within("once"),
    },
}  # fmt: skip


def _all() -> Iterator[tuple[str, str, float]]:
    """Files, figures of the pages, and what they should be."""
    content = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    for file, texts, path, functions, factor in FIGURES:
        values = found_at(path, content[file])
        values = [function(values) for function in functions] if functions else values
        for text, value in zip(texts.split(), values, strict=True):
            yield file, text, factor * value
    for file, figures in COMPUTED.items():
        for text, read in figures.items():
            yield file, text, read(content[file])


def main() -> int:
    """Compares all of them; the exit status is 1 if one differs."""
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    status = 0
    for file, text, value in _all():
        number, *_ = text.split()
        found = f"{value:,.{len(number.partition('.')[2])}f}"
        if found != number or not re.search(rf"(?<![\d.]){re.escape(text)}(?!\d)", pages):
            print(f"{file}: the pages should have {text}, which is {found} there", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
