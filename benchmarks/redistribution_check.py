"""Results of redistribution beside those of the reference gather, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.references.redistribution import redistribute_reference
from evenkeel.partitioning import slice_plan
from trainer_client.balancing.batches import BatchSpec, FlatBatch, flatten
from trainer_client.balancing.redistribution import start


def random_batch(rng: np.random.Generator, samples: int) -> FlatBatch:
    """Fields of all widths, jagged and dense, some without bytes, some not contiguous."""
    counts = rng.integers(0, 50, samples) * rng.integers(0, 2, samples)
    total = int(counts.sum())
    batch: dict[str, Any] = {"count": torch.from_numpy(counts)}
    dtypes = (torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128, torch.float8_e4m3fn)
    for index, dtype in enumerate(dtypes):
        for kind, rows in (("dense", samples), ("jagged", total)):
            for width in (1, 3, 0):
                data = rng.integers(0, 256, (rows, 2, width * dtype.itemsize), dtype=np.uint8)
                tensor = torch.empty((rows, 2, width), dtype=dtype)
                if data.size:
                    tensor.view(torch.uint8).numpy()[:] = data
                batch[f"{kind}_{index}_{width}"] = tensor if index % 2 else tensor[:, 0]
    return flatten(batch, BatchSpec(rows_per_sample={"jagged_*": "count"}))


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def check(device: torch.device, rounds: int) -> int:
    """Compares with the reference on random batches; returns how many it compared.

    On CUDA any operation that makes the host wait for the device is an error in the All2All path.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    compared = 0
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 30, world_size)
        batches = [random_batch(rng, int(count)) for count in counts]
        homes = np.repeat(np.arange(world_size), counts).astype(np.int32)
        keep = rng.random(homes.size) < (0.0, 0.8, 1.0)[seed % 3]
        destinations = np.where(keep, homes, rng.integers(0, world_size, homes.size)).astype(np.int32)
        piece = slice_plan(destinations, counts, np.concatenate([batch.lengths for batch in batches]))[rank]
        expected = redistribute_reference(batches, np.split(destinations, np.cumsum(counts)[:-1]))[rank]
        own = batches[rank].to(device)
        if device.type == "cuda" and seed:
            torch.cuda.set_sync_debug_mode("error")
        moved = [start(batch, piece, group=dist.group.WORLD, device=device) for batch in (own, batches[rank], own)]
        results = [one.wait() for one in moved]
        torch.cuda.set_sync_debug_mode("default") if device.type == "cuda" else None
        for result in results:
            assert np.array_equal(result.lengths_tensor.cpu().numpy(), expected.lengths.T), f"lengths, seed {seed}"
            pairs = zip(expected.structure.leaves, result.tensors, expected.tensors, strict=True)
            for leaf, found, wanted in pairs:
                assert found.shape == wanted.shape, f"{leaf.path}, seed {seed}"
                assert bytes_of(found) == bytes_of(wanted), f"{leaf.path}, seed {seed}"
                compared += 1
    return compared
