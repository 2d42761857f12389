"""Figures of the pages are those of the result files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/evidence/results.md")


def _step(lengths: str, setting: str) -> Callable[[Any], float]:
    return lambda d: d["workloads"][lengths]["settings"][setting]["step_ms_mean"]


def _replayed(lengths: str, ranks: str, setting: str) -> Callable[[Any], float]:
    return lambda d: d["replays"][ranks]["workloads"][lengths]["settings"][setting]["speedup"]


def _shuffled(case: str, setting: str) -> Callable[[Any], float]:
    return lambda d: next(c for c in d["shuffle"]["cases"] if c["case"] == case)["settings"][setting]["mean_ms"]


def _moved(samples: int, lengths: str, strategy: str = "minimal_move") -> Callable[[Any], float]:
    return lambda d: (
        100
        * mean(
            cell["moved_share"][strategy]
            for cell in d["grid"]
            if (cell["samples"], cell["lengths"]) == (samples, lengths)
        )
    )


def _served(ranks: int, field: str) -> Callable[[Any], float]:
    return lambda d: next(entry[field] for entry in d["sizes"] if entry["ranks"] == ranks)


def _jobs(result: Any) -> Any:
    return next(entry for entry in result["jobs"] if entry["jobs"] == 100)


def _above_others(result: Any) -> float:
    loads = [cell["over_bound"] for cell in result["grid"]]
    return 100 * max(one["minimal_move"] / min(one["karmarkar_karp"], one["lpt"]) - 1 for one in loads)


def _kernels(keys: str, tables: int, share: float, plan: str) -> Callable[[Any], float]:
    return lambda d: next(
        cell["planners"][plan]["kernels_ms"]
        for cell in d["cells"]
        if (cell["keys"], cell["tables"], cell["hbm_share"]) == (keys, tables, share)
    )


def _giant(cell: str, setting: str) -> Callable[[Any], float]:
    return lambda d: d["cells"][cell][setting]["median_ms"]


def _bucketized(choose: Callable[[list[float]], float]) -> Callable[[Any], float]:
    return lambda d: choose([row["fbgemm_over_ours"] for row in d["results"]])


def _gap(samples: int, balancer: str, choose: Callable[[list[float]], float] = max) -> Callable[[Any], float]:
    return lambda d: (
        100
        * choose([row[balancer]["gap"] for row in d["rows"] if (row["lengths"], row["samples"]) == ("yambda", samples)])
    )


def _saved(ranks: int, what: str, made: bool, choose: Callable[[list[float]], float] = max) -> Callable[[Any], float]:
    return lambda d: (
        100
        * choose(
            [
                1 - row[what]["once_hot"] / row[what]["once"]
                for row in d["rows"]
                if row["ranks"] == ranks and row["stream"].endswith("_id") == made
            ]
        )
    )


def _owner(stream: str, ranks: int, way: str) -> Callable[[Any], float]:
    return lambda d: next(
        row["heaviest_owner"][way] for row in d["rows"] if (row["stream"], row["ranks"]) == (stream, ranks)
    )


ALIKE = "all cached alike"
FIGURES: dict[str, dict[str, Callable[[Any], float]]] = {
    "end_to_end_2xh200": {
        "52.2": _step("zipf", "off"), "44.2": _step("zipf", "grpc"), "26.2": _step("lognormal", "off"),
        "24.1": _step("lognormal", "grpc"), "1.18": lambda d: d["workloads"]["zipf"]["settings"]["grpc"]["speedup"],
        "1.09": lambda d: d["workloads"]["lognormal"]["settings"]["grpc"]["speedup"],
        "1.243": lambda d: d["workloads"]["zipf"]["settings"]["off"]["cost_imbalance"],
        "1.139": lambda d: d["workloads"]["lognormal"]["settings"]["off"]["cost_imbalance"],
    },
    "end_to_end_replay": {
        text: _replayed(lengths, ranks, setting)
        for lengths, ranks, texts in (
            ("zipf", "8", ("1.446", "1.460", "1.419")), ("zipf", "16", ("1.525", "1.531", "1.510")),
            ("lognormal", "8", ("1.053", "1.076", "0.981")), ("lognormal", "16", ("1.116", "1.140", "1.126")),
        )
        for text, setting in zip(texts, ("minimal_move", "window", "kk"), strict=True)
    },
    "peers_2xh200": {
        text: _shuffled(case, setting)
        for case, texts in (
            ("zipf", ("58.8", "51.0", "49.2", "49.5")), ("lognormal", ("42.7", "41.7", "39.0", "40.5")),
            ("equal", ("34.1", "35.9", "34.3", "34.1")),
        )
        for text, setting in zip(texts, ("off", "theirs_all_gather", "evenkeel", "evenkeel_drop_in"), strict=True)
    },
    "balance_gap": {
        "31 of 45": lambda d: sum(row["evenkeel"]["ms"] <= row["recsys-examples"]["ms"] for row in d["rows"]),
        "1.62": _gap(8, "evenkeel"), "14.4": _gap(8, "recsys-examples", min), "18.0": _gap(8, "recsys-examples"),
        "0.10": _gap(32, "evenkeel"), "3.1": _gap(32, "recsys-examples"), "0.00": _gap(128, "recsys-examples"),
    },
    "partitioning": {
        "704": lambda d: len(d["grid"]), "0.18": _above_others,
        "5.5": _moved(32, "uniform"), "11.6": _moved(32, "lognormal"),
        "24.5": _moved(32, "zipf_1.2"), "72.4": _moved(32, "bimodal"), "2.2": _moved(32, "one_giant"),
        "2.3": _moved(128, "uniform"), "4.2": _moved(128, "lognormal"), "11.3": _moved(128, "zipf_1.2"),
        "25.1": _moved(128, "bimodal"), "3.7": _moved(128, "one_giant"),
    },
    "rounds": {
        **{
            text: _served(ranks, field)
            for ranks, texts in (
                (8, ("1.75", "0.28", "0.72")), (1024, ("15.1", "9.3", "2.2")), (4096, ("59.1", "45.1", "5.1")),
            )
            for text, field in zip(texts, ("p50_ms", "floor_ms", "echo_ms"), strict=True)
        },
        "1,683": lambda d: _jobs(d)["rounds_per_second"], "3,207": lambda d: _jobs(d)["echoes_per_second"],
    },
    "redistribution_2xh200": {
        "1.76": lambda d: min(row["ratio"] for row in d["rows"] if row["strategy"] == "minimal_move"),
        "4.08": lambda d: max(row["ratio"] for row in d["rows"] if row["strategy"] == "minimal_move"),
        "1.24": lambda d: min(row["ratio"] for row in d["rows"] if row["strategy"] == "shuffle"),
        "2.55": lambda d: max(row["ratio"] for row in d["rows"] if row["strategy"] == "shuffle"),
    },
    "giants_2xh200": {
        text: _giant(cell, setting)
        for cell, texts in (
            ("65536 x 4", ("950.5", "511.3", "486.4")), ("131072 x 4", ("3,749.4", "1,960.2", "1,870.8")),
            ("long x 2", ("26.1", "33.4", "25.9")), ("long x 4", ("60.2", "64.6", "53.1")),
            ("long x 32", ("366.3", "365.7", "356.2")),
        )
        for text, setting in zip(texts, ("whole", "split", "even"), strict=True)
    },
    "bucketize_h200": {"3.4": _bucketized(min), "196": _bucketized(max), "8.9": _bucketized(median)},
    "faults": {"1,280": lambda d: d["faults"], "0 samples lost": lambda d: sum(d["violations"].values())},
    "kills": {
        "2,571": lambda d: sum(d["kills"].values()), "825": lambda d: d["runs_with_another_number_of_ranks"],
        "501": lambda d: d["jobs_compared_bit_by_bit"], "0 samples lost": lambda d: d["lost"] + d["doubled"],
    },
    "hot_rows": {
        "0.5": _saved(8, "all_to_all_mb", True, min), "3.2": _saved(8, "all_to_all_mb", True),
        "10.8": _saved(64, "all_to_all_mb", True, min), "11.7": _saved(64, "all_to_all_mb", True),
        "12.6": _saved(8, "busiest_link_mb", True), "21.1": _saved(64, "busiest_link_mb", True),
        "57.1": _saved(64, "all_to_all_mb", False), "38.6": _saved(64, "busiest_link_mb", False),
        "1.18": _owner("album_id", 8, "once"), "1.01": _owner("album_id", 8, "once_hot"),
        "1.11": _owner("sessions", 64, "once_hot"),
    },
    "programs": {"1,208": lambda d: d["right"]},
    "placement_gpu_h100": {
        "1.78": _kernels("traces", 60, 0.2, "with the clock"), "2.31": _kernels("traces", 60, 0.2, "TorchRec"),
        "1.92": _kernels("traces", 60, 0.2, ALIKE), "1.07": _kernels("traces", 26, 0.1, "with the clock"),
        "1.50": _kernels("traces", 26, 0.1, "TorchRec"), "1.06": _kernels("traces", 26, 0.1, ALIKE),
        "0.95": _kernels("traces", 26, 0.2, "by the model"), "9.80": _kernels("power laws", 100, 0.1, ALIKE),
        "0.75": lambda d: d["summary"]["with the clock, kernels"]["over_all_cached_alike_median"],
        "1.03": lambda d: d["summary"]["with the clock, kernels"]["over_the_best_other_worst"],
        "1.01": lambda d: d["summary"]["by the model, kernels"]["over_the_best_other_worst"],
        "1.04": lambda d: d["summary"]["with the clock, wall beside 0 ms"]["over_the_best_other_worst"],
        "1.02": lambda d: d["summary"]["with the clock, wall beside 5 ms"]["over_the_best_other_worst"],
        "1.00": lambda d: d["summary"]["with the clock, wall beside 20 ms"]["over_the_best_other_worst"],
        "1.42": lambda d: d["summary"]["by the model, wall beside 0 ms"]["over_the_best_other_worst"],
        "99 %": lambda d: 100 * d["summary"]["predictions"]["kernels_within_15_percent"],
        "96 %": lambda d: 100 * d["summary"]["predictions"]["steps_within_20_percent"],
    },
}  # fmt: skip
"""By result file: a figure as the pages have it, and what the file has."""


def _cases() -> Iterator[Any]:
    for file, figures in FIGURES.items():
        for text, read in figures.items():
            yield pytest.param(file, text, read, id=f"{file}-{text}")


@pytest.mark.parametrize(("file", "text", "read"), list(_cases()))
def test_a_figure_is_that_of_its_file(file: str, text: str, read: Callable[[Any], float]) -> None:
    pages = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert re.search(rf"(?<![\d.]){re.escape(text)}(?!\d)", pages)
    value, (number, *_) = read(json.loads((RESULTS / f"{file}.json").read_text())), text.split()
    decimals = len(number.partition(".")[2])
    assert f"{value:,.{decimals}f}" == number


def test_files_that_the_pages_name_exist() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"`(?:benchmarks/results/)?(\w+\.json)`", page.read_text(encoding="utf-8")):
            if page.parent.name == "evidence" or name.endswith("h200.json"):
                assert (RESULTS / name).exists(), f"{page}: {name}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_names_its_making(path: Path) -> None:
    made = json.loads(path.read_text(encoding="utf-8"))["provenance"]
    assert re.fullmatch(r"[0-9a-f]{7,40}(\+changes)?", made["commit"])
    assert re.match(r"20\d\d-\d\d-\d\d", made["date"])
    assert made["machine"].keys() <= {"cores", "cpu", "gpus", "load"}
    assert made["command"]
