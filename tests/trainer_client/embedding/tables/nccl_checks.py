"""The collection over NCCL against one process holding the whole tables.

`torchrun --nproc-per-node 2 -m tests.trainer_client.embedding.tables.nccl_checks [--json FILE]`
"""

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer_client.embedding.tables.whole import train_beside_whole
from tests.trainer_client.embedding.tables.wrapped import WRAPPERS, train_wrapped
from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable


def measure_deduplication(device: torch.device) -> dict[str, float]:
    """Milliseconds of a forward and backward pass over histories with repeating keys: with, without, and hot rows."""
    table = RoutedTable(
        name="items",
        embedding_dim=128,
        features=("item",),
        num_embeddings=200_000,
        routing="hash_roundrobin",
        pooling="sum",
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    keys = (200_000 ** torch.rand(400_000, generator=generator, dtype=torch.float64)).to(torch.int64)
    lengths = torch.full((800,), 500)
    batch = KeyBatch(features=["item"], values=keys.to(device), lengths=lengths.to(device), batch_sizes=[800])
    results: dict[str, float] = {"keys": keys.numel(), "distinct_keys": batch.values.unique().numel()}
    for name in ("plain", "deduplicated", "hot"):
        collection = RoutedEmbeddingCollection([table], deduplicate=name != "plain", device=device)
        if name == "hot":
            collection.hold_hot_rows({"items": torch.arange(1, 2_000)})
        times = []
        for _ in range(23):
            torch.cuda.synchronize()
            start = time.perf_counter()
            collection(batch)["item"].square().sum().backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(times[3:]) * 1000, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        results[f"{name}_ms"] = float(slowest)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    target = parser.parse_args().json
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    figures = measure_deduplication(device)
    for deduplicate, hot in itertools.product((False, True), repeat=2):
        train_beside_whole(
            dist.get_rank(), dist.get_world_size(), deduplicate=deduplicate, hot=hot, device=device, tolerance=1e-3
        )
    for name in WRAPPERS:
        train_wrapped(name, dist.get_rank(), dist.get_world_size(), device, 2e-3)
    if dist.get_rank() == 0:
        print(figures)
        if target is not None:
            about = {"device": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "torch": torch.__version__}
            target.write_text(json.dumps(about | figures, indent=1) + "\n")
        print("the collection over NCCL equals one process holding the whole tables, also under", ", ".join(WRAPPERS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
