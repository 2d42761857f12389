"""DataLoaders that fork their workers, before and after gRPC threads have started."""

import gc
import multiprocessing
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.balancer_process import ServiceProcess
from benchmarks.harness.ranks import run_ranks
from tests.trainer_client.balancing.jobs import connect
from trainer_client import BalancedLoader, BalanceOptions, Balancer

SAMPLES = 48


class Samples(Dataset[torch.Tensor]):
    """Ids of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.rank * SAMPLES + index)


def iterate(rank: int, address: str) -> list[list[int]]:
    data: DataLoader[Any] = DataLoader(
        Samples(rank), batch_size=8, num_workers=4, multiprocessing_context="fork", timeout=60
    )
    epochs = []
    options = BalanceOptions(timeout=timedelta(seconds=20))
    with connect(address, job="forked", options=options) as balancer:
        loader = BalancedLoader(data, balancer, cost=lambda ids: ids % 7)
        for _ in range(3):  # the second and third fork while the stream's threads run
            epochs.append([sample for batch in loader for sample in batch.tolist()])
            assert loader.report.mode.value == "service"
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
for _ in range(40):
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


def _fork_after_a_stream_with_peers(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = [{"id": torch.arange(3) + 10 * mesh["dp"].get_local_rank()}] * 2
    with Balancer.embedded(process_group=mesh["dp"]) as balancer:
        trained = [len(batch["id"]) for batch in BalancedLoader(batches, balancer, cost=lambda batch: batch["id"])]
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join(20)
    child.kill()  # one that hangs would hold this process up
    return trained, child.exitcode


def test_a_child_leaves_alone_what_closed_streams_have_left() -> None:
    for trained, exit_code in run_ranks(4, _fork_after_a_stream_with_peers):
        assert len(trained) == 2
        assert exit_code == 0
