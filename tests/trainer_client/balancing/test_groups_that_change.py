"""Lives of balancers: beside others, beyond their process group, dropped without `close`, and in forked children."""

import atexit
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import SPEC, balancer_of, connect, cost_of, make_batch, run_in_turn
from trainer_client import BalancedLoader, BalanceOptions, Balancer
from trainer_client.balancing.groups import _ROOM, Bytes, read_membership, take_communicators


def batches(rank: int, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """Rank 0 has all the work."""
    return [{"id": torch.arange(8) + 100 * rank + 10 * step, "cost": torch.full((8,), 1 + 9 * (rank == 0))}
            for step in range(count)]  # fmt: skip


def make_loader(rank: int, balancer: Balancer, count: int = 4, name: str = "train") -> BalancedLoader[Any]:
    return BalancedLoader(batches(rank, count), balancer, cost=lambda batch: batch["cost"], name=name)


def over_groups(rank: int, folder: str) -> list[list[int]]:
    """What a loader trains before there is a group, then in two loops over one, then in one over another."""
    dist.destroy_process_group()
    with Balancer.embedded() as balancer:
        loader, loops = make_loader(rank, balancer), []
        for name, count in (("none", 1), ("first", 2), ("second", 1)):
            if name != "none":
                dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
            loops += [sorted(one for batch in loader for one in batch["id"].tolist()) for _ in range(count)]
            if name == "first":
                dist.destroy_process_group()
    return loops


def test_a_loader_balances_over_the_group_that_there_is(tmp_path: Path) -> None:
    everything = [[one for batch in batches(rank) for one in batch["id"].tolist()] for rank in range(2)]
    (alone, *first), (also_alone, *second) = run_ranks(2, over_groups, str(tmp_path))
    assert [alone, also_alone] == everything
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == sorted(everything[0] + everything[1])
        assert one != alone


def move_fails(rank: int) -> tuple[str, float, list[str]]:
    """Rank 1 takes longer in a step than the move of the next batch may."""
    balancer = Balancer.embedded(
        options=BalanceOptions(timeout=timedelta(seconds=0.5), group_timeout=timedelta(seconds=0.5))
    )
    try:
        for step, _ in enumerate(make_loader(rank, balancer, 8)):
            if rank == 1 and step == 2:
                time.sleep(2)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    started = time.monotonic()
    balancer.close()
    return error, time.monotonic() - started, [one.name for one in threading.enumerate() if "evenkeel" in one.name]


def test_closing_after_a_move_that_failed_wakes_whoever_waits() -> None:
    for error, seconds, threads in run_ranks(2, move_fails):
        assert error
        assert seconds < 3
        assert threads == []


def _rows_of_sizes(rank: int) -> list[bool]:
    communicators = take_communicators(read_membership(None, None), timedelta(seconds=60))

    def row(of: int, size: int) -> Bytes:
        return np.frombuffer(size.to_bytes(4, "little") + bytes([of]) * (size - 4), np.uint8).copy()

    right = []
    for size in (8, _ROOM - 1, _ROOM, _ROOM + 1, 9 * _ROOM, 12):
        rows = [row(of, (size, 8 + 8 * size, 16)[(of + size) % 3]) for of in range(3)]
        table = np.zeros((3, max(map(len, rows))), np.uint8)
        for of, one in enumerate(rows):
            table[of, : len(one)] = one
        if communicators.leads:
            gathered = communicators.gather(rows[0])
            right += [bool((gathered[of, : len(one)] == one).all()) for of, one in enumerate(rows)]
        else:
            communicators.send(rows[rank])
        found = communicators.scatter(table if communicators.leads else None)
        right.append(bool((found[: len(rows[rank])] == rows[rank]).all()))
    communicators.flush()
    return right


def test_rows_of_any_size_arrive_as_they_were_sent() -> None:
    lead, *others = run_ranks(3, _rows_of_sizes)
    assert lead == [True] * 24
    assert others == [[True] * 6] * 2


def threads_left() -> list[str]:
    """Threads of the library that do not end."""
    until = time.monotonic() + 20
    while (left := [one.name for one in threading.enumerate() if one.name.startswith("evenkeel")]) and (
        time.monotonic() < until
    ):
        time.sleep(0.02)
    return left


def one_after_the_other(rank: int, address: str | None, how: str) -> Any:
    """The modes of three loops and the communicators that they used; then what is left of them all.

    Only loops that are left may wait for the collector of cycles.
    """

    def batches() -> Any:
        for step in range(6):
            if how == "fails" and step == 4:
                raise OSError("the data end here")
            yield make_batch(rank, step, 5)

    modes, pairs = [], []
    gc.collect()
    gc.disable()
    for _ in range(3):
        balancer = balancer_of(address, f"dropped-{how}")
        loader = BalancedLoader(batches(), balancer, cost=cost_of, spec=SPEC)
        seen = []
        with contextlib.suppress(OSError):
            for step, _ in enumerate(loader):
                seen.append(loader.report.mode.value)
                if how == "left" and step == 2 + rank:
                    break
        modes.append(seen)
        opened = balancer.stream()._rounds
        pairs.append(id(opened.communicators))
        # what a stream remembers of rounds does not grow with them
        assert len(opened._open) <= balancer.stream().options.depth + 1
        del opened
        del balancer, loader  # and nothing else
        if how == "left":
            gc.collect()
    left = threads_left()
    gc.enable()
    return modes, pairs, left


def test_a_dropped_balancer_leaves_nothing_behind_and_its_successor_takes_its_place(balancer: ServiceProcess) -> None:
    ways = [(address, how) for address in (None, balancer.address) for how in ("ends", "left", "fails")]
    for (address, how), results in zip(
        ways, run_in_turn(2, *((one_after_the_other, *way) for way in ways)), strict=True
    ):
        for modes, pairs, left in results:
            assert {each for loop in modes for each in loop} == {"embedded" if address is None else "service"}
            assert how == "left" or {len(loop) for loop in modes} == {6 if how == "ends" else 4}
            assert len(set(pairs)) == 1
            assert left == []


SAMPLES = 48


def iterate(rank: int, address: str) -> list[list[int]]:
    own: Any = range(rank * SAMPLES, (rank + 1) * SAMPLES)
    data: Any = DataLoader(own, batch_size=8, num_workers=4, multiprocessing_context="fork", timeout=60)
    epochs = []
    options = BalanceOptions(timeout=timedelta(seconds=20))
    with connect(address, job="forked", options=options) as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda ids: ids % 7)
        for _ in range(3):  # the second and third fork while the stream's threads run
            epochs.append([sample for batch in loader for sample in batch.tolist()])
            assert loader.report.mode.value == "service"
            child = os.fork()  # one that ends in order must not take the parent's streams along
            if child == 0:
                atexit._run_exitfuncs()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    return epochs


@pytest.mark.timeout(180)
def test_four_forked_workers_and_three_epochs(balancer: ServiceProcess) -> None:
    results = run_ranks(2, iterate, balancer.address)
    for epoch in range(3):
        assert sorted(results[0][epoch] + results[1][epoch]) == list(range(2 * SAMPLES))


FORKING = """
import os, threading, time
import trainer_client.balancing.asking
import grpc
from concurrent import futures

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)

server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Echo()])
channel = grpc.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()

def talk():
    for _ in channel.stream_stream("/a/b")(iter(lambda: bytes(100), None)):
        pass

for _ in range(3):
    threading.Thread(target=talk, daemon=True).start()
time.sleep(0.5)
for _ in range(10):
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("forked", flush=True)
os._exit(0)
"""


def test_grpc_takes_no_part_in_forks() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120, check=True)
    assert "forked" in ran.stdout
    assert "fork() handlers" not in ran.stderr, "gRPC's ran, which abort a child now and then"
