"""A search for the request that a planner answers worst: over its time limit, with most memory, or holding up others.

python -m benchmarks.planner_attack --json benchmarks/results/planner_attack.json     # five minutes
python -m benchmarks.planner_attack --quick                                           # half a minute

Requests are drawn at random (tables, groups, ratios, shardings, hosts, pins, statistics, budgets around what is needed,
time limits, all addresses), and the worst so far are changed a little and sent again. Meanwhile a process of its own
asks for `/healthz` all the time. At the end a hundred clients ask at once, and clients that go away are counted until
their work has ended. It runs its planner by itself, and asks nobody else.

Where other programs keep the machine busy, waits are long whatever the planner does. So each is also told without the
time that the event loop and the asker were ready to run and had no core (`own`), and each request has its worker's CPU
time beside its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from services.operations.launch import running_service

_PATHS = ("/v1/plans", "/v1/plans", "/v1/plans", "/v1/whatif", "/v1/plans:compare", "/v1/hit-rates")
_FLAGS = ("--workers", "2", "--requests-per-second", "100000", "--log-level", "error")
_KEPT = 8
_CLIENTS = 100
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def draw(source: np.random.Generator) -> dict[str, Any]:
    """What a request is made of."""
    return {
        "path": str(source.choice(_PATHS)),
        "seed": int(source.integers(1 << 30)),
        "tables": int(np.exp(source.uniform(0, np.log(5000)))),
        "groups": float(source.uniform(0, 1)),
        "ratio_steps": int(source.choice([0, 1, 2, 20, 100, 200])),
        "hbm": float(np.exp(source.normal(-1.5, 1))),
        "host": float(source.choice([0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2, 100])),
        "runtime": str(source.choice(["dynamicemb", "torchrec"])),
        "sharding": str(source.choice(["row_wise", "table_wise", "column_wise", "mixed", "chosen"])),
        "ranks": int(source.choice([1, 2, 8, 16, 64, 1024])),
        "hosts": int(source.choice([1, 1, 2, 8])),
        "bins": int(source.choice([0, 0, 0, 50, 2000, 100_000])),
        "pins": float(source.choice([0, 0, 0.1, 1])),
        "even": float(source.choice([0, 0, 0.5, 1])),
        "pooled": float(source.choice([0, 0.5, 1])),
        "gap": float(source.choice([0, 1e-4, 0.01])),
        "time_limit_s": float(np.exp(source.uniform(np.log(0.05), np.log(3)))),
    }


def mutate(parts: dict[str, Any], source: np.random.Generator) -> dict[str, Any]:
    """The same with two parts drawn again."""
    fresh = draw(source)
    return {**parts, **{name: fresh[name] for name in source.choice(list(parts), 2, replace=False)}}


def request_of(parts: dict[str, Any]) -> tuple[str, bytes, float]:
    """Path, body and time limit (that of the service, where the request has none)."""
    source = np.random.default_rng(parts["seed"])
    count, ranks = parts["tables"], parts["ranks"]
    bins = min(parts["bins"], 1_500_000 // count)  # bodies are at most 8 MiB
    spread = 1 - parts["even"]
    rows = np.exp(source.uniform(np.log(1e9) - spread * np.log(1e6), np.log(1e9), count)).astype(int)
    num_groups = max(1, round(parts["groups"] * count))
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    every = [*kinds, "table_row_wise", "grid_shard"]
    tables, size = [], 0.0
    for index in range(count):
        kind = str(source.choice(kinds)) if parts["sharding"] == "mixed" else parts["sharding"]
        table: dict[str, Any] = {"name": f"t{index}", "rows": int(rows[index]), "dim": int(2 ** source.integers(3, 9))}
        table |= {"group": f"g{index % num_groups}", "sharding": kind, "ids_per_sample": float(source.integers(0, 50))}
        table["pooled"] = bool(source.uniform() < parts["pooled"])
        if kind == "chosen":
            few = source.permutation(every)[: int(source.integers(2, 7))].tolist()
            table |= {"sharding": [*few, *(["row_wise"] if "row_wise" not in few else [])]}
        if kind == "column_wise":
            table["column_shards"] = int(2 ** source.integers(0, 3))
        if bins:
            table |= _access(bins, int(rows[index]), source)
        if source.uniform() < parts["pins"]:
            table["ratio"] = float(source.choice([0.0, 0.25, 0.5, 1.0]))
        size += float(rows[index]) * table["dim"] * 12
        tables.append(table)
    hbm = int(min(2**52, size * parts["hbm"] / ranks + (2 << 30)))
    host = int(min(2**52, size * parts["host"]))
    hosts = min(parts["hosts"], ranks)
    topology = {"ranks": ranks, "hbm_bytes": hbm, "host_bytes": host // hosts, "ranks_per_host": ranks // hosts}
    solver = {name: parts[name] for name in ("ratio_steps", "gap", "time_limit_s")}
    runtime = parts["runtime"] if parts["sharding"] == "row_wise" else "torchrec"  # DynamicEmb shards by rows only
    body: dict[str, Any] = {"tables": tables, "topology": topology, "runtime": runtime, "solver": solver}
    if parts["path"] == "/v1/plans:compare":
        body["own"] = [{"table": table["name"], "mode": "CACHING", "ratio": 0.1} for table in tables]
    if parts["path"] == "/v1/whatif":
        body |= {"points": int(source.choice([0, 1, 25, 256])), "host_points": int(source.choice([0, 5, 256]))}
        if source.uniform() < 0.3:
            body["curve_hbm_bytes"] = [hbm * step // 128 for step in range(256)]
    if parts["path"] == "/v1/hit-rates":
        body = {"rows": int(rows[0]), "lookups_per_step": 1e6, "cache_rows": rows[:10_000].tolist()}
        body |= {name: tables[0][name] for name in ("access", "eviction") if name in tables[0]}
        return parts["path"], json.dumps(body).encode(), 60.0
    return parts["path"], json.dumps(body).encode(), parts["time_limit_s"]


def _access(bins: int, rows: int, source: np.random.Generator) -> dict[str, Any]:
    """Statistics of a table, as large as that."""
    if source.uniform() < 0.7:
        observed = {"keys": [rows / bins] * bins, "lookups": source.integers(1, 9, bins).tolist()}
        eviction = str(source.choice(["lru", "lfu"]))
        return {"access": {"kind": "histogram", **observed}, "eviction": eviction}
    points = (np.arange(1, bins + 1) / bins).tolist()
    rates = np.sort(source.uniform(0, 1, bins).round(3))[::-1].tolist()
    return {"access": {"kind": "miss_curve", "cache_fractions": points, "miss_rates": rates, "unique_fraction": 0.1}}


@dataclass(slots=True)
class Watcher:
    """What `/healthz` took meanwhile, and what the workers take.

    Attributes:
        parent: Process id of the planner.
        waits: Seconds that each `/healthz` took.
        own: The same, without those that the planner's event loop or the asker waited for a core.
        peaks: Most memory of each worker.
        busy: Seconds of CPU of each worker.
        alive: Workers that live.
    """

    parent: int
    waits: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Until `over`."""
        while not self.over.wait(0.01):
            workers = [worker for zygote in children(self.parent) for worker in children(zygote)]
            for worker in workers:
                with contextlib.suppress(OSError, StopIteration, IndexError):
                    lines = Path(f"/proc/{worker}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
                    self.peaks[worker] = max(peak, self.peaks.get(worker, 0))
                    ticks = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[11:13]
                    self.busy[worker] = sum(map(int, ticks)) * _TICK_S
            self.alive = set(workers)


def ask_health(address: str, planner: int, pipe: Connection) -> None:
    """Asks for `/healthz` until something comes over the pipe, then sends what each took, and its own part of it."""
    connection = http.client.HTTPConnection(address, timeout=30)
    waits, own = [], []
    while not pipe.poll(0.01):
        begin, delayed = time.perf_counter(), _delayed(planner) + _delayed(os.getpid())
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        waits.append(time.perf_counter() - begin)
        own.append(max(0.0, waits[-1] - (_delayed(planner) + _delayed(os.getpid()) - delayed)))
    pipe.send((waits, own))


def _delayed(pid: int) -> float:
    """Seconds that the first thread of a process was ready to run and had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


@contextlib.contextmanager
def watching(address: str, parent: int) -> Iterator[Watcher]:
    """Watches during the block; its process is forked before there are other threads."""
    watcher = Watcher(parent)
    ours, theirs = multiprocessing.Pipe()
    asker = multiprocessing.get_context("fork").Process(target=ask_health, args=(address, parent, theirs), daemon=True)
    asker.start()
    looker = threading.Thread(target=watcher.look, daemon=True)
    looker.start()
    try:
        yield watcher
    finally:
        watcher.over.set()
        looker.join(30)
        ours.send(None)
        if ours.poll(60):
            watcher.waits, watcher.own = ours.recv()
        asker.join(30)


def ask(address: str, path: str, body: bytes) -> tuple[int, dict[str, str], Any, float]:
    """Status, headers, document, and seconds from the request to the answer."""
    connection = http.client.HTTPConnection(address, timeout=200)
    begin = time.perf_counter()
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
    except ConnectionError as error:
        return 0, {}, {"type": repr(error)}, time.perf_counter() - begin
    return answer.status, dict(answer.headers), document, time.perf_counter() - begin


def search(address: str, watcher: Watcher, seconds: float) -> list[dict[str, Any]]:
    """All requests that were sent, with what came of them, the worst first."""
    source = np.random.default_rng(0)
    sent: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        worst = sorted(sent, key=_badness, reverse=True)[:_KEPT]
        fresh = not worst or source.uniform() < 0.5
        parts = draw(source) if fresh else mutate(worst[int(source.integers(len(worst)))]["request"], source)
        path, body, limit = request_of(parts)
        if len(body) > 8 << 20:
            continue
        others = set(watcher.peaks)  # workers of requests before, which may take a moment to end
        status, _, document, took = ask(address, path, body)
        outcome = document.get("plan", {}).get("status", "answered") if status == 200 else document["type"]
        own = watcher.peaks.keys() - others
        peak = max((watcher.peaks[worker] for worker in own), default=0) / 2**20
        result = {"request": parts, "bytes": len(body), "status": status, "outcome": outcome, "took_s": round(took, 3)}
        busy = max((watcher.busy.get(worker, 0.0) for worker in own), default=0.0)
        over = {"over_limit_s": round(took - limit, 3), "cpu_over_limit_s": round(busy - limit, 3)}
        sent.append({**result, **over, "peak_mb": round(peak, 1)})
    return sorted(sent, key=_badness, reverse=True)


def _badness(result: dict[str, Any]) -> float:
    return float(max(result["cpu_over_limit_s"], result["peak_mb"] / 1024))


def crowd(address: str) -> Counter[str]:
    """A hundred clients at once, half of them with long searches."""
    source = np.random.default_rng(1)

    def one(number: int) -> str:
        parts = {**draw(source), "path": "/v1/plans", "bins": 0, "time_limit_s": 2.0 if number % 2 else 0.2}
        status, headers, _, _ = ask(address, *request_of({**parts, "tables": 40})[:2])
        return f"{status}{' with Retry-After' if 'retry-after' in headers else ''}"

    with ThreadPoolExecutor(_CLIENTS) as pool:
        return Counter(pool.map(one, range(_CLIENTS)))


def leave(address: str, watcher: Watcher, times: int) -> list[float]:
    """Seconds until no worker is left, after a client went away."""
    source, waits = np.random.default_rng(2), []
    for _ in range(times):
        parts = {**draw(source), "path": "/v1/plans", "tables": 60, "groups": 0.2, "ratio_steps": 200, "gap": 0.0}
        _, body, _ = request_of({**parts, "bins": 0, "pins": 0, "sharding": "row_wise", "time_limit_s": 30.0})
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("POST", "/v1/plans", body)
        time.sleep(0.7)
        connection.close()
        begin = time.perf_counter()
        while watcher.alive and time.perf_counter() - begin < 30:
            time.sleep(0.005)
        waits.append(time.perf_counter() - begin)
    return waits


def _p99_ms(watcher: Watcher) -> dict[str, float]:
    found = {"all": watcher.waits, "own": watcher.own}
    return {name: round(1e3 * float(np.quantile(waits or [0.0], 0.99)), 2) for name, waits in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half a minute")
    parser.add_argument("--seconds", type=float, default=240.0, help="of the search")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    seconds = 15.0 if options.quick else options.seconds
    with running_service("services.planner", *_FLAGS) as planner:
        assert planner.running is not None
        with watching(planner.address, planner.running.pid) as watcher:
            sent = search(planner.address, watcher, seconds)
        with watching(planner.address, planner.running.pid) as crowded:
            outcomes = crowd(planner.address)
        with watching(planner.address, planner.running.pid) as left:
            waits = leave(planner.address, left, 3 if options.quick else 10)
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "requests": len(sent),
        "outcomes": dict(Counter(f"{each['status']} {each['outcome']}" for each in sent)),
        "most_over_limit_s": max(each["over_limit_s"] for each in sent),
        "most_cpu_over_limit_s": max(each["cpu_over_limit_s"] for each in sent),
        "most_memory_mb": max(each["peak_mb"] for each in sent),
        "healthz_p99_ms": {
            "search": _p99_ms(watcher), "hundred clients": _p99_ms(crowded), "left": _p99_ms(left)
        },
        "hundred_clients": dict(outcomes),
        "work_ends_after_client_left_s": [round(wait, 3) for wait in waits],
        "worst": sent[:_KEPT],
    }  # fmt: skip
    table = Table("what", "figure")
    for name, value in report.items():
        if name != "worst":
            table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
