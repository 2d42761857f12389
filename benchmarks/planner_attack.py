"""A search for the request that a planner answers worst: over its time limit, with most memory, or holding up others.

python -m benchmarks.planner_attack --json benchmarks/results/planner_attack.json     # five minutes
python -m benchmarks.planner_attack --quick                                           # half a minute

Requests are drawn at random (tables, groups, ratios, shardings, pins, histograms, budgets around what is needed, time
limits, all addresses), and the worst so far are changed a little and sent again. Meanwhile `/healthz` is asked for all
the time. At the end a hundred clients ask at once, and clients that go away are counted until their work has ended. It
runs its planner by itself, and asks nobody else.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
        "ranks": int(source.choice([1, 2, 8, 64, 1024])),
        "bins": int(source.choice([0, 0, 0, 50, 2000, 100_000])),
        "pins": float(source.choice([0, 0, 0.1, 1])),
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
    rows = np.exp(source.uniform(np.log(1e3), np.log(1e9), count)).astype(int)
    num_groups = max(1, round(parts["groups"] * count))
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    every = [*kinds, "table_row_wise", "grid_shard"]
    tables, size = [], 0.0
    for index in range(count):
        kind = str(source.choice(kinds)) if parts["sharding"] == "mixed" else parts["sharding"]
        table: dict[str, Any] = {"name": f"t{index}", "rows": int(rows[index]), "dim": int(2 ** source.integers(3, 9))}
        table |= {"group": f"g{index % num_groups}", "sharding": kind, "ids_per_sample": float(source.integers(1, 50))}
        if kind == "chosen":
            few = source.permutation(every)[: int(source.integers(2, 7))].tolist()
            table |= {"sharding": [*few, *(["row_wise"] if "row_wise" not in few else [])], "pooled": True}
        if kind == "column_wise":
            table["column_shards"] = int(2 ** source.integers(0, 3))
        if bins:
            observed = {"keys": [1] * bins, "lookups": source.integers(1, 9, bins).tolist()}
            table["access"] = {"kind": "histogram", **observed}
        if source.uniform() < parts["pins"]:
            table["ratio"] = float(source.choice([0.0, 0.25, 0.5, 1.0]))
        size += float(rows[index]) * table["dim"] * 12
        tables.append(table)
    hbm = int(min(2**52, size * parts["hbm"] / ranks + (2 << 30)))
    host = int(min(2**52, size * parts["host"]))
    topology = {"ranks": ranks, "hbm_bytes": hbm, "host_bytes": host}
    solver = {name: parts[name] for name in ("ratio_steps", "gap", "time_limit_s")}
    runtime = parts["runtime"] if parts["sharding"] == "row_wise" else "torchrec"  # DynamicEmb shards by rows only
    body: dict[str, Any] = {"tables": tables, "topology": topology, "runtime": runtime, "solver": solver}
    if parts["path"] == "/v1/plans:compare":
        body["own"] = [{"table": table["name"], "mode": "CACHING", "ratio": 0.1} for table in tables]
    if parts["path"] == "/v1/whatif":
        body["points"] = int(source.choice([1, 25, 256]))
    if parts["path"] == "/v1/hit-rates":
        body = {"rows": int(rows[0]), "lookups_per_step": 1e6, "cache_rows": rows[:1000].tolist()}
        body |= {"access": tables[0]["access"]} if bins else {}
        return parts["path"], json.dumps(body).encode(), 60.0
    return parts["path"], json.dumps(body).encode(), parts["time_limit_s"]


@dataclass(slots=True)
class Watcher:
    """Asks for `/healthz` all the time, and looks at the memory of the workers.

    Attributes:
        address: Of the planner.
        parent: Process id of the planner.
        waits: Seconds that each `/healthz` took.
        peaks: Most memory of each worker.
        alive: Workers that live.
    """

    address: str
    parent: int
    waits: list[float] = field(default_factory=list)
    peaks: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Until `over`."""
        connection = http.client.HTTPConnection(self.address, timeout=30)
        while not self.over.wait(0.01):
            begin = time.perf_counter()
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            self.waits.append(time.perf_counter() - begin)

    def look(self) -> None:
        """Until `over`."""
        while not self.over.wait(0.01):
            workers = [worker for zygote in children(self.parent) for worker in children(zygote)]
            for worker in workers:
                with contextlib.suppress(OSError, StopIteration, IndexError):
                    lines = Path(f"/proc/{worker}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10
                    self.peaks[worker] = max(peak, self.peaks.get(worker, 0))
            self.alive = set(workers)


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


@contextlib.contextmanager
def watching(address: str, parent: int) -> Iterator[Watcher]:
    """Watches during the block."""
    watcher = Watcher(address, parent)
    threads = [threading.Thread(target=each, daemon=True) for each in (watcher.ask, watcher.look)]
    for thread in threads:
        thread.start()
    try:
        yield watcher
    finally:
        watcher.over.set()
        for thread in threads:
            thread.join(30)


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
        watcher.peaks.clear()
        status, _, document, took = ask(address, path, body)
        outcome = document.get("plan", {}).get("status", "answered") if status == 200 else document["type"]
        peak = max(watcher.peaks.values(), default=0) / 2**20
        result = {"request": parts, "bytes": len(body), "status": status, "outcome": outcome, "took_s": round(took, 3)}
        sent.append({**result, "over_limit_s": round(took - limit, 3), "peak_mb": round(peak, 1)})
    return sorted(sent, key=_badness, reverse=True)


def _badness(result: dict[str, Any]) -> float:
    return float(max(result["over_limit_s"], result["peak_mb"] / 1024))


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


def _p99_ms(waits: list[float]) -> float:
    return round(1e3 * float(np.quantile(waits, 0.99)), 2) if waits else 0.0


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
        "most_memory_mb": max(each["peak_mb"] for each in sent),
        "healthz_p99_ms": {
            "search": _p99_ms(watcher.waits), "hundred clients": _p99_ms(crowded.waits), "left": _p99_ms(left.waits)
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
