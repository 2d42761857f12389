from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evenkeel.placement import Mode, PlanRequest, Runtime, Sharding, Step, Table, Topology, Zipf, builtin_profile
from evenkeel.placement.layouts import ROW_WISE, Layout, Scope
from evenkeel.placement.options import mixing_seconds, ratio_grid, table_layouts, table_options
from evenkeel.placement.problem import SLACK, UNIT, budgets, shared_caches


class Option(NamedTuple):
    layout: Layout
    mode: Mode
    dim: int
    ratio: float
    held: float
    rows: float
    seconds: float
    hbm: float
    host: float
    slot_bytes: float


def random_tables(count: int, seed: int, **same: object) -> tuple[Table, ...]:
    draw = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"table_{index}",
            rows=int(draw.lognormal(14, 1.5)) + 100,
            dim=int(draw.choice([32, 64, 128])),
            ids_per_sample=float(draw.choice([1, 1, 5, 20])),
            access=Zipf(exponent=float(draw.uniform(0.7, 1.2))),
            **same,  # type: ignore[arg-type]
        )
        for index in range(count)
    )


def request(
    tables: tuple[Table, ...], *, hbm_gib: float, host_gib: float | None = None, **fields: object
) -> PlanRequest:
    topology = Topology(
        ranks=int(str(fields.pop("ranks", 8))),
        ranks_per_host=fields.pop("ranks_per_host", None),  # type: ignore[arg-type]
        hbm_bytes=int(hbm_gib * 2**30),
        host_bytes=None if host_gib is None else int(host_gib * 2**30),
    )
    runtime = Runtime(str(fields.pop("runtime", "dynamicemb")))
    step = Step(samples_per_rank=2048)
    return PlanRequest(tables=tables, topology=topology, runtime=runtime, step=step, **fields)  # type: ignore[arg-type]


def mixed_request(seed: int) -> PlanRequest:
    """Two to four tables of mixed widths, some of them fused, in either runtime, with room for some of them."""
    draw = np.random.default_rng(seed)
    runtime = Runtime(draw.choice([runtime.value for runtime in Runtime]))
    count = int(draw.integers(2, 5))
    fused = draw.integers(0, 2, count)
    tables = tuple(
        Table(
            name=f"t{index}",
            rows=int(draw.lognormal(13, 2)) + 200,
            dim=int(draw.choice([8, 16, 64, 256, 1024])),
            ids_per_sample=float(draw.choice([0.1, 1, 5, 20])),
            access=Zipf(exponent=float(draw.uniform(0, 1.2))),
            pooled=True,
            group=f"g{fused[index]}",
        )
        for index in range(count)
    )
    size = sum(table.rows * table.dim * 12 for table in tables) / 4
    step, costs = Step(samples_per_rank=256), builtin_profile("h200").costs(runtime)
    topology = Topology(
        ranks=4,
        hbm_bytes=costs.workspace_bytes + int(size * draw.uniform(0.02, 1.0)) + (20 << 20),
        host_bytes=None if draw.random() < 0.5 else int(4 * size * draw.uniform(0.2, 1.2)),
    )
    return PlanRequest(tables=tables, topology=topology, runtime=runtime, step=step)


def brute_force(request: PlanRequest, grid: npt.NDArray[np.float64] | None = None) -> float:
    """Kernel time of the best of all choices of options and of places for every piece, cached widths as they come."""
    grid = ratio_grid(len(request.tables), request.solver.ratio_steps) if grid is None else grid
    fused: dict[object, list[int]] = {}
    for index, table in enumerate(request.tables):
        fused.setdefault(table.fuse_key, []).append(index)
    every: list[list[Option]] = [[] for _ in request.tables]
    for indices in fused.values():
        ratios = np.unique([*grid, *(r for i in indices if (r := request.tables[i].ratio) and r < 1)])
        shares = request.runtime is Runtime.TORCHREC and len(indices) > 1
        shared = shared_caches(request, indices, ratios) if shares else {}
        for index in indices:
            for layout in table_layouts(request, table := request.tables[index]):
                held = shared.get(index) if layout == ROW_WISE else None
                for own in table_options(request, table, ratios, layout, shared=held):
                    figures = zip(*(column.tolist() for column in own[3:]), strict=True)
                    every[index] += [Option(*own[:3], *each) for each in figures]
    budget, best = budgets(request), np.inf
    mixing = [(own, mixing_seconds(request, [request.tables[index] for index in own])) for own in fused.values()]
    for choice in itertools.product(*every):
        if not _is_agreed(request, choice):
            continue
        widths: dict[object, int] = {}
        for table, option in zip(request.tables, choice, strict=True):
            if option.mode is Mode.CACHING and request.runtime is Runtime.TORCHREC:
                cache = (table.fuse_key, option.layout.sharding)
                widths[cache] = max(widths.get(cache, 0), option.dim)
        total = np.zeros((1, 3, request.topology.ranks))
        for table, option in zip(request.tables, choice, strict=True):
            width = widths.get((table.fuse_key, option.layout.sharding), option.dim)  # slots are those of caches
            hbm = (option.hbm + (width - option.dim) * option.slot_bytes) / UNIT
            shard = np.array([option.seconds, hbm, option.host / UNIT]) * option.layout.shard(request.topology)
            load = _ways(request, option.layout.scope, option.layout.pieces, shard)
            total = (total[:, None] + load[None]).reshape(-1, 3, request.topology.ranks)
        hosts = total[:, 2].reshape(len(total), -1, request.topology.local_ranks).sum(axis=2)
        for indices, seconds in mixing:
            if len({choice[index].mode is Mode.CACHING for index in indices}) > 1:
                total[:, 0] += seconds
        fits = (total[:, 1].max(axis=1) <= budget[0] + SLACK) & (hosts.max(axis=1) <= budget[1] + SLACK)
        best = min(best, float(np.where(fits, total[:, 0].max(axis=1), np.inf).min()))
    return best


def _is_agreed(request: PlanRequest, choice: tuple[Option, ...]) -> bool:
    ratios: dict[object, set[object]] = {}
    widths: dict[object, set[object]] = {}
    for table, option in zip(request.tables, choice, strict=True):
        cached = option.mode is Mode.CACHING
        if request.runtime is Runtime.DYNAMICEMB:
            ratios.setdefault((table.fuse_key, cached), set()).add((option.mode, option.ratio))
        elif cached and option.layout == ROW_WISE:
            ratios.setdefault(table.fuse_key, set()).add(option.ratio)
        if option.layout.sharding is Sharding.COLUMN_WISE and not table.pooled:
            widths.setdefault(table.group, set()).add(option.dim)
    return all(len(own) == 1 for own in (*ratios.values(), *widths.values()))


def _ways(request: PlanRequest, scope: Scope, pieces: int, shard: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(ways, 3, ranks) what ranks hold; host memory counts on the first rank of a host."""
    ranks, local = request.topology.ranks, request.topology.local_ranks
    firsts = np.arange(ranks) % local == 0
    if scope is Scope.EVERYWHERE:
        return np.stack([np.full(ranks, shard[0]), np.full(ranks, shard[1]), np.where(firsts, shard[2], 0.0)])[None]
    places = ranks if scope is Scope.RANK else ranks // local
    found = []
    for chosen in itertools.combinations_with_replacement(range(places), pieces):
        if max(map(chosen.count, chosen)) > -(-pieces // places):
            continue
        load = np.zeros((3, ranks))
        for place in chosen:
            on = slice(place, place + 1) if scope is Scope.RANK else slice(place * local, (place + 1) * local)
            load[:2, on] += shard[:2, None]
            load[2, on.start // local * local] += shard[2]
        found.append(load)
    return np.array(found)
