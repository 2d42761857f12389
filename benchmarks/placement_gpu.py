"""Plans of several planners in equal real HBM of one GPU: kernels' time, and wall clock beside a dense part, in turns.

python -m benchmarks.placement_gpu --json benchmarks/results/placement_gpu.json --keys clicks.npy --keys views.npy
python -m benchmarks.placement_gpu --device cpu --quick                                       # the way, without a GPU

A cell is a kind of keys (key traces from files, or power laws), a number of tables, and HBM for a share of them. In
each there are the planner by its model, with the clock (whose contenders train other batches than those of the
comparison), told nothing or the time of the dense part, all tables cached alike, TorchRec's planner, and TorchEasyRec's
where the path of a checkout is given. Each planner is asked again with another budget, until what its plan takes on the
GPU is the HBM of the cell or a little less. Statistics are those of the first half of the keys; plans are timed on the
second.
"""

from __future__ import annotations

import gc
import itertools
import json
import lzma
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, CacheStatistics

from benchmarks.harness.results import write
from benchmarks.peers.checkouts import load_torcheasyrec
from evenkeel.key_statistics import KeySampler, with_statistics
from evenkeel.placement import Eviction, MissCurve, Optimizer, Plan, PlanRequest, Runtime, Step, Table, Topology, plan
from evenkeel.placement.access import step_keys
from evenkeel.placement.hardware import HardwareProfile, builtin_profiles, parse_profile
from evenkeel.placement.whole_step import exchange_kernel_seconds, host_seconds, step_costs, step_work
from trainer_client.planning import sharding_plan
from trainer_client.planning.clock import as_cut, contenders, run_race
from trainer_client.planning.collective import process_group
from trainer_client.planning.trial import Batch, DenseWork, TableModel, Trial

Keys = npt.NDArray[Any]
Planner = Callable[[int], tuple[Any, Plan | None] | None]
"""From a budget of HBM in bytes to a plan for `Trial` and what the model says of it; None where there is no plan."""

SEED = 7
HELD_BYTES = 4
_KERNELS = ["fused", "fused_uvm_caching", "fused_uvm"]
_LOAD_FACTOR = 0.2
_TRIES, _CLOSE = 6, 0.02
ALIKE = "all cached alike"
MODEL, CLOCK = "by the model", "with the clock"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run.

    Attributes:
        tables: Numbers of tables.
        shares: HBM over the bytes of all weights.
        dense_ms: Milliseconds of the dense part beside the tables.
        gib: Weights of the tables of power laws.
        samples: Samples of a batch.
        steps: Batches that statistics are taken of; as many others are timed, in a cycle.
        seconds: For which a plan is trained before it is timed, and each contender of the clock.
        blocks: Timed blocks of each plan and dense part, in turns.
    """

    tables: tuple[int, ...] = (26, 60, 100)
    shares: tuple[float, ...] = (0.1, 0.2, 0.5)
    dense_ms: tuple[float, ...] = (0.0, 5.0, 20.0)
    gib: float = 4.0
    samples: int = 4096
    steps: int = 96
    seconds: float = 3.0
    blocks: int = 21


QUICK = Size((3,), (0.5,), (0.0, 2.0), 1e-4, 32, 10, 0.2, 2)


@dataclass(frozen=True, slots=True)
class Job:
    """Tables, and batches of their keys.

    Attributes:
        request: The tables, of which nothing is known but their sizes.
        batches: The first half is for statistics and the clock, the second for the comparison.
    """

    request: PlanRequest
    batches: Sequence[Batch]

    @property
    def seen(self) -> Sequence[Batch]:
        """What planners may know."""
        return self.batches[: len(self.batches) // 2]

    @property
    def unseen(self) -> Sequence[Batch]:
        """What plans are timed on."""
        return self.batches[len(self.batches) // 2 :]


def read_keys(path: Path) -> Keys:
    """(lookups,) the keys of a file, numbered in the order of their first lookups."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        keys = np.load(file)
    _, first, inverse = np.unique(keys.ravel(), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def make_job(tables: int, size: Size, traces: Sequence[Keys], profile: HardwareProfile) -> Job:
    """Few large tables and many small ones, as of click logs; or those that traces are of, in turn.

    Tables of one trace begin at places evenly apart, each with the keys renamed by a permutation of its own. Lookups of
    a sample are fewer where a table would come twice to the same place of its trace.
    """
    draw = np.random.default_rng(SEED + tables)
    weight = np.exp(draw.normal(0, 2.0, tables))
    dims = draw.choice([32, 64, 128], tables)
    rows = np.maximum(1_000, weight / (weight * dims * 4).sum() * size.gib * 2**30).astype(np.int64)
    ids = draw.choice([1, 1, 1, 2, 5, 20], tables)
    exponents = draw.choice([0.7, 0.9, 1.05, 1.2], tables)
    count = 2 * size.steps
    described: list[Table] = []
    batches: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(count)]
    for index in range(tables):
        if traces:
            trace = traces[index % len(traces)]
            rows[index] = int(trace.max()) + 1
            ids[index] = max(1, min(ids[index], len(trace) // (count * size.samples)))
            lookups = count * size.samples * int(ids[index])
            sharing = len(range(index % len(traces), tables, len(traces)))
            begin = len(trace) * (index // len(traces)) // sharing
            keys = draw.permutation(rows[index])[trace[(begin + np.arange(lookups)) % len(trace)]]
        else:
            lookups, power = count * size.samples * int(ids[index]), 1 - exponents[index]
            ranks = (((rows[index] + 1.0) ** power - 1) * draw.random(lookups) + 1) ** (1 / power)
            keys = (np.clip(ranks, 1, rows[index]).astype(np.int64) - 1) * 2_654_435_761 % rows[index]
        name = f"t{index}"
        lengths = torch.full((size.samples,), int(ids[index]), dtype=torch.int64)
        for batch, part in zip(batches, np.split(keys, count), strict=True):
            batch[name] = torch.from_numpy(part), lengths
        described.append(
            Table(
                name=name, rows=int(rows[index]), dim=int(dims[index]), ids_per_sample=float(ids[index]),
                optimizer=Optimizer.ROWWISE_ADAGRAD, pooled=True,
            )
        )  # fmt: skip
    request = PlanRequest(
        tables=tuple(described), topology=Topology(ranks=1, hbm_bytes=1 << 36), hardware=profile,
        runtime=Runtime.TORCHREC, step=Step(samples_per_rank=size.samples),
    )  # fmt: skip
    return Job(with_seen(request, batches[: size.steps]), batches)


def with_seen(request: PlanRequest, seen: Sequence[Batch]) -> PlanRequest:
    """The request with statistics of some batches."""
    names = [table.name for table in request.tables]
    sampler = KeySampler(names)
    for batch in seen:
        parts = [
            (values.numpy(), np.array([[names.index(name), 0, len(values)]])) for name, (values, _) in batch.items()
        ]
        sampler.observe(parts, request.step.samples_per_rank)
    return with_statistics(request, sampler.traces())[0]


def planners(job: Job, device: torch.device, torcheasyrec: Any) -> dict[str, Planner]:
    """Planners by name; each is asked with a budget."""

    def by_model(hbm: int) -> Any:
        request = budgeted(job, hbm)
        made = plan(request)
        return (_sharded(request, made, device), made) if made.placements else None

    def all_cached(hbm: int) -> Any:
        request = budgeted(job, 1 << 45)
        weights = sum(table.rows * table.dim * HELD_BYTES for table in request.tables)
        share = min(1.0, max(0.001, hbm / weights))
        tables = tuple(replace(table, modes=("CACHING",), ratio=min(share, 0.999)) for table in request.tables)  # type: ignore[arg-type]
        request = replace(request, tables=tables)
        made = plan(request)
        return _sharded(request, made, device), made

    def torchrecs(hbm: int) -> Any:
        proposers = [GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer(), GridSearchProposer()]
        if device.type == "cuda":  # these divide by the HBM
            proposers += [DynamicProgrammingProposer(), EmbeddingOffloadScaleupProposer()]
        return _torchrec_plan(job.request, hbm, device, proposers)

    found: dict[str, Planner] = {MODEL: by_model, ALIKE: all_cached, "TorchRec": torchrecs}
    if torcheasyrec is not None:
        found["TorchEasyRec"] = lambda hbm: _torchrec_plan(
            job.request, hbm, device, [torcheasyrec.DynamicProgrammingProposer(), UniformProposer()], torcheasyrec
        )
    return found


def budgeted(job: Job, hbm: int) -> PlanRequest:
    """The request with so much HBM for tables."""
    workspace = job.request.profile.costs(Runtime.TORCHREC).workspace_bytes
    return replace(job.request, topology=replace(job.request.topology, hbm_bytes=hbm + workspace))


def clock_choices(job: Job, hbm: int, size: Size, device: torch.device) -> dict[str, str]:
    """Which contender is the quickest, if the clock is told nothing, and if it is told the time of the dense part."""
    request = budgeted(job, hbm)
    plans = contenders(request, plan(request))
    found = {}
    for dense_ms in (None, *size.dense_ms):
        told = replace(request, step=replace(request.step, dense_ms=dense_ms))
        _, measured = run_race(told, plans, job.seen, device, seconds=size.seconds / 2)
        found[told_dense(dense_ms)] = next(one.name for one in measured if one.chosen)
    return found


def told_dense(dense_ms: float | None) -> str:
    """How the clock is called that was told so much."""
    return CLOCK if dense_ms is None else f"{CLOCK}, told {dense_ms:g} ms"


def contender(job: Job, name: str, device: torch.device) -> Planner:
    """Plans as the clock chose one, at any budget."""

    def planner(hbm: int) -> Any:
        request = budgeted(job, hbm)
        made = plan(request)
        if not made.placements:
            return None
        chosen = contenders(request, made).get(name, made)
        return _sharded(request, chosen, device), chosen

    return planner


def _sharded(request: PlanRequest, made: Any, device: torch.device) -> Any:
    return lambda model: sharding_plan(model, request, made, device=device.type)


class _Statistics(CacheStatistics):  # type: ignore[misc]
    """A table's measured curve, in the form that TorchRec's planner takes."""

    def __init__(self, curve: MissCurve, rows: int, lookups: float) -> None:
        self._keys, self._rows = step_keys(curve, rows, lookups, Eviction.LRU), rows

    @property
    def expected_lookups(self) -> float:
        return self._keys.unique

    def expected_miss_rate(self, clf: float) -> float:
        return float(self._keys.misses(np.array([clf * self._rows]))[0])

    @property
    def cacheability(self) -> float:
        return float(np.mean([self.expected_miss_rate(part / 20) for part in range(1, 21)]))


def _torchrec_plan(
    request: PlanRequest, hbm: int, device: torch.device, proposers: list[Any], enumerates: Any = None
) -> Any:
    """The plan of a planner made of TorchRec's parts, with the measured statistics and no reservation."""
    topology = TorchRecTopology(
        world_size=1, local_world_size=1, compute_device=device.type, hbm_cap=hbm, ddr_cap=1 << 42
    )
    constraints = {}
    for table in request.tables:
        assert isinstance(table.access, MissCurve)
        lookups = table.ids_per_sample * request.step.samples_per_rank
        known = _Statistics(table.access, table.rows, lookups)
        constraints[table.name] = ParameterConstraints(
            compute_kernels=_KERNELS if device.type == "cuda" else None,
            sharding_types=["table_wise", "row_wise"],
            pooling_factors=[table.ids_per_sample],
            cache_params=CacheParams(load_factor=_LOAD_FACTOR, stats=known) if device.type == "cuda" else None,
        )
    samples = request.step.samples_per_rank
    given: dict[str, Any] = {"topology": topology, "batch_size": samples, "constraints": constraints}
    enumerator = None if enumerates is None else enumerates.EmbeddingEnumerator(**given)
    free_of_reserve = FixedPercentageStorageReservation(0.0)
    planner = EmbeddingShardingPlanner(
        **given, enumerator=enumerator, proposer=proposers, storage_reservation=free_of_reserve
    )
    try:
        model = TableModel(request, device)
        made = planner.plan(model, [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()])
    except PlannerError:
        return None
    parameters = {name: each for module in made.plan.values() for name, each in module.items()}
    free = replace(request, topology=replace(request.topology, hbm_bytes=1 << 45))
    return (lambda _: made), as_cut(free, parameters)


@dataclass(frozen=True, slots=True)
class Try:
    """What came of asking a planner for a plan.

    Attributes:
        asked: HBM in bytes that the planner was given.
        used: HBM in bytes that its plan took; `None` where it found no plan.
        built: The plan in training.
        predicted: What the model says of it.
    """

    asked: int
    used: int | None
    built: Any = None
    predicted: Plan | None = None


def fit_to_budget(attempt: Callable[[int], Try], budget: int, *, start: int | None = None) -> Try | None:
    """The plan that takes most of `budget`, among those of some requests that take no more.

    Args:
        attempt: Asks the planner with a budget, and measures what its plan takes.
        budget: HBM that a plan may take, in bytes.
        start: The first request; `budget` by default.

    Returns:
        `None` where no request gave a plan within the budget.
    """
    best: Try | None = None
    asked, low, high = start or budget, 0, 0  # the largest request known to fit; the smallest known not to, 0: none
    for _ in range(_TRIES):
        found = attempt(asked)
        used = found.used
        if used is not None and used > budget:
            high = min(high or asked, asked)
        else:
            low = max(low, asked)
            if used is not None and (best is None or used > (best.used or 0)):
                best = found
        del found  # what was built for it may be large
        if used is not None and budget * (1 - _CLOSE) <= used <= budget:
            break
        asked = round(1.25 * asked if used is None else asked + budget * (1 - _CLOSE / 2) - used)
        if high and not low < asked < high:
            asked = (low + high) // 2
        elif asked <= low:
            asked = round(low * 1.1)
    return best


def compare(job: Job, share: float, size: Size, device: torch.device, torcheasyrec: Any) -> dict[str, Any]:
    """All planners in one budget: figures by name."""
    budget = round(share * sum(table.rows * table.dim * HELD_BYTES for table in job.request.tables))
    dense = DenseWork(0.0, device)
    trials: dict[str, Trial] = {}
    found: dict[str, Any] = {}

    def enter(name: str, planner: Planner, start: int | None = None) -> None:
        def attempt(asked: int) -> Try:
            made = planner(asked)
            if made is None:
                return Try(asked, None)
            gc.collect()  # of the plan before this, so that it does not count as negative
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            built, predicted = made
            trial = Trial(job.request, built, job.unseen, device, dense=dense)
            used = torch.cuda.memory_allocated() - before if device.type == "cuda" else budget
            return Try(asked, used, trial, predicted)

        best = fit_to_budget(attempt, budget, start=start)
        gc.collect()
        found[name] = {"hbm_bytes": None if best is None else best.used}
        if best is not None:
            found[name]["asked_bytes"] = best.asked
            if best.predicted is not None and best.predicted.seconds is not None:
                step, costs = step_work(job.request, best.predicted), step_costs(job.request)
                kernels = best.predicted.seconds + exchange_kernel_seconds(step, costs)
                found[name]["predicted_kernels_ms"] = kernels * 1e3
                found[name]["predicted_host_ms"] = host_seconds(step, costs) * 1e3
            trials[name] = best.built

    for name, planner in planners(job, device, torcheasyrec).items():
        enter(name, planner)
    choices: dict[str, str] = {}
    if MODEL in trials:  # the clock runs its contenders where the model's plan takes the HBM of the cell
        start = found[MODEL]["asked_bytes"]
        choices = clock_choices(job, start, size, device)
        for name in set(choices.values()) - {"plan"}:
            enter(f"{CLOCK}: {name}", contender(job, name, device), start)
    for trial in trials.values():
        trial.run(size.seconds)
    for milliseconds in size.dense_ms:
        work = DenseWork(milliseconds, device)
        for trial in trials.values():
            trial.dense, trial.steps, trial.launches = work, [], []
        for _ in range(size.blocks):
            for trial in trials.values():
                trial.block()
        for name, trial in trials.items():
            found[name].setdefault("wall_ms", {})[f"{milliseconds:g}"] = statistics.median(trial.steps) * 1e3
    for name, trial in trials.items():
        timing = trial.timing()
        found[name]["kernels_ms"] = None if timing.kernels_s is None else timing.kernels_s * 1e3
        found[name]["host_ms"] = timing.host_s * 1e3
    for clock, name in choices.items():
        row = MODEL if name == "plan" else f"{CLOCK}: {name}"
        found[clock] = found[row] | {"contender": name}
    return {name: figures for name, figures in found.items() if not name.startswith(f"{CLOCK}: ")}


def cells(size: Size, traces: Sequence[Keys]) -> Iterator[tuple[str, int, float]]:
    """Kinds of keys, numbers of tables, and shares of HBM."""
    for kind in (["traces"] if traces else []) + ["power laws"]:
        for tables in size.tables:
            for share in size.shares:
                yield kind, tables, share


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    keys: Annotated[list[Path] | None, typer.Option(help="Key traces: `.npy`, or packed as `.npy.xz`.")] = None,
    torcheasyrec: Annotated[Path | None, typer.Option(help="A checkout of TorchEasyRec.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the way.")] = "cuda",
    hardware: Annotated[str, typer.Option(help="Profile of the GPU, or the file of one.")] = "h200",
    tables: Annotated[list[int] | None, typer.Option(help="Only cells of so many tables.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Only cells of HBM for such a share of the tables.")] = None,
    quick: Annotated[bool, typer.Option(help="Tiny tables.")] = False,
) -> None:
    """Compare planners cell by cell; the file is written after each."""
    size, place = QUICK if quick else Size(), torch.device(device, 0) if device == "cuda" else torch.device(device)
    size = replace(size, tables=tuple(tables or size.tables), shares=tuple(share or size.shares))
    traces = [read_keys(path) for path in keys or ()]
    theirs = None if torcheasyrec is None else load_torcheasyrec(torcheasyrec)
    known = builtin_profiles()
    profile = known[hardware] if hardware in known else parse_profile(json.loads(Path(hardware).read_text("utf-8")))
    rows: list[dict[str, Any]] = []
    on_cpu = f"cpu: {platform.processor()}, times mean nothing"
    named = torch.cuda.get_device_name() if device == "cuda" else on_cpu
    about = {"device": named, "keys": [path.name for path in keys or ()]}
    with process_group(place):
        for keys_of, number, part in cells(size, traces):
            job = make_job(number, size, traces if keys_of == "traces" else (), profile)
            found = compare(job, part, size, place, theirs)
            rows.append({"keys": keys_of, "tables": number, "hbm_share": part, "planners": found})
            show(rows[-1])
            write(json_path, about | {"cells": rows, "summary": summary(rows)})
            gc.collect()
    Console().print_json(data=summary(rows))


def show(cell: Mapping[str, Any]) -> None:
    """Prints a cell."""
    table = RichTable(title=f"{cell['keys']}, {cell['tables']} tables, HBM for {cell['hbm_share']:g}")
    walls = list(next((figures["wall_ms"] for figures in cell["planners"].values() if "wall_ms" in figures), ()))
    for heading in ("planner", "HBM MiB", "kernels ms", "host ms", *(f"wall, dense {ms}" for ms in walls)):
        table.add_column(heading, justify="left" if heading == "planner" else "right")
    for name, figures in cell["planners"].items():
        if figures["hbm_bytes"] is None:
            table.add_row(name, "no plan")
            continue
        values = [figures["kernels_ms"], figures["host_ms"], *figures["wall_ms"].values()]
        shown = ["" if value is None else f"{value:.3f}" for value in values]
        table.add_row(name, f"{figures['hbm_bytes'] / 2**20:.1f}", *shown)
    Console().print(table)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How our plans stand beside the best of the others and all tables cached alike; how right predictions are."""
    found: dict[str, Any] = {}
    for ours, dense_ms in itertools.product((MODEL, CLOCK), (None, *Size().dense_ms)):
        figure = "kernels" if dense_ms is None else f"wall beside {dense_ms:g} ms"
        name = told_dense(dense_ms) if ours == CLOCK else ours
        values = [{each: _figure(row["planners"][each], dense_ms) for each in row["planners"]} for row in rows]
        others = [min((one[each] for each in one if is_other(each) and one[each]), default=None) for one in values]
        best = [one[name] / other for one, other in zip(values, others, strict=True) if one.get(name) and other]
        alike = [one[name] / one[ALIKE] for one in values if one.get(name) and one[ALIKE]]
        if best and alike:
            found[f"{ours}, {figure}"] = {
                "over_the_best_other_worst": max(best),
                "over_all_cached_alike_median": statistics.median(alike),
                "cells": len(best),
            }
    return found | {"predictions": predictions(rows)}


def _figure(planner: Mapping[str, Any], dense_ms: float | None) -> Any:
    """Kernels, or steps beside a dense part, in milliseconds; None where there is no plan."""
    return planner.get("kernels_ms") if dense_ms is None else planner.get("wall_ms", {}).get(f"{dense_ms:g}")


def is_other(planner: str) -> bool:
    """Whether a row is none of ours."""
    return not planner.startswith((MODEL, CLOCK))


def predictions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Predicted kernels and steps over measured ones; nothing is prefetched, so half of the launches are waited for.

    What the clock chose counts once in a cell, and not where it is the model's plan.
    Pairs are plans of one cell whose kernels differ by more than 3 %, the noise of the measurement.
    """
    kernels: list[float] = []
    steps: dict[str, list[float]] = {}  # by the time of the dense part
    right: list[bool] = []
    for row in rows:
        planners = row["planners"].values()
        chosen = {each["contender"]: each for each in planners if each.get("contender", "plan") != "plan"}
        plans = [*(each for each in planners if "contender" not in each), *chosen.values()]
        known = [each for each in plans if each.get("predicted_kernels_ms") and each["kernels_ms"]]
        kernels += [each["predicted_kernels_ms"] / each["kernels_ms"] for each in known]
        for each in known:
            for dense, wall in each["wall_ms"].items():
                step = float(dense) + each["predicted_kernels_ms"] + each["predicted_host_ms"] / 2
                steps.setdefault(dense, []).append(max(each["predicted_host_ms"], step) / wall)
        for one, other in itertools.combinations(known, 2):
            measured, predicted = (one[key] - other[key] for key in ("kernels_ms", "predicted_kernels_ms"))
            if abs(measured) > 0.03 * min(one["kernels_ms"], other["kernels_ms"]):
                right.append(measured * predicted > 0)
    if not kernels:
        return {}
    return {
        "kernels_within_15_percent": statistics.mean(abs(ratio - 1) <= 0.15 for ratio in kernels),
        "kernels_worst": [min(kernels), max(kernels)],
        "steps_within_20_percent": {
            dense: statistics.mean(abs(ratio - 1) <= 0.2 for ratio in ratios) for dense, ratios in steps.items()
        },
        "steps_worst": {dense: [min(ratios), max(ratios)] for dense, ratios in steps.items()},
        "pairs_in_order": statistics.mean(right) if right else None,
        "pairs": len(right),
        "plans": len(kernels),
    }


if __name__ == "__main__":
    typer.run(main)
