"""Checks of the CUDA kernels, on a GPU: `python -m tests.trainer_client.embedding.routing.cuda_checks`.

Compares random batches with the definition bit for bit over poisoned memory, replays a CUDA graph with new inputs, and
compiles with Inductor. `--few` is a small set for compute-sanitizer.
"""

import argparse
import itertools

import torch

from benchmarks.references.bucketize import bucketize as reference
from tests.trainer_client.embedding.routing.batches import MODES, Batch, make_batch
from trainer_client.embedding.routing import Bucketized, block_bucketize, continuous


def check(batch: Batch, *, positions: bool = True, permutation: bool = True) -> None:
    expected, result = (
        batch.by_definition(),
        batch.bucketized(positions=positions, permutation=permutation, device="cuda"),
    )
    for field, mine, other in zip(Bucketized._fields, result, expected, strict=True):
        if mine is not None and other is not None and not torch.equal(mine.cpu(), other):
            wrong = int((mine.cpu() != other).sum())
            raise AssertionError(f"{field}: {wrong} of {other.numel()} differ, {batch}")


def random_batches(number: int) -> int:
    ranks = itertools.cycle([1, 2, 3, 4, 7, 8, 16, 63, 64, 100, 255, 256, 1000, 1024, 4095, 4096])
    shapes = itertools.cycle([(40, 70), (1, 5), (7, 1), (3000, 3), (300, 40), (20, 3000), (2, 30_000), (900, 0)])
    for seed, world_size, (rows, length) in zip(range(number), ranks, shapes, strict=False):
        num_features = seed % 6
        modes = (MODES, (MODES[0],), (MODES[2],))[seed % 3]
        batch = make_batch(
            seed,
            num_features=num_features,
            max_rows=rows,
            max_length=length,
            world_size=world_size,
            routings=[modes[(seed + f) % len(modes)] for f in range(num_features)],
            index_dtype=(torch.int64, torch.int32)[seed // 2 % 2],
            length_dtype=(torch.int64, torch.int32)[seed // 3 % 2],
            weight_dtype=(None, torch.float32, torch.float64, torch.float16)[seed // 5 % 4],
            variable=seed % 7 == 0,
            giant=seed % 11 == 0,
        )
        check(batch, positions=seed % 2 == 0, permutation=seed % 5 != 0)
    return number


def giant_rows() -> None:
    for world_size in (1, 3, 256, 4096):
        lengths = torch.tensor([5, 3_000_000, 0, 7, 1024, 1025, 4096, 0], dtype=torch.int32)
        keys = torch.arange(int(lengths.sum())) * 3
        batch = Batch(
            lengths=lengths,
            indices=keys,
            block_sizes=[1000, 5],
            routings=[MODES[2], MODES[0]],
            world_size=world_size,
            weights=None,
            batch_sizes=None,
        )
        check(batch)
        check(
            Batch(
                lengths=torch.ones(100_001, dtype=torch.int64),
                indices=keys[:100_001] * 2**40,
                block_sizes=[2**62],
                routings=[continuous()],
                world_size=world_size,
                weights=None,
                batch_sizes=None,
            )
        )


def graph() -> None:
    first = make_batch(1, num_features=3, max_rows=99, max_length=99, world_size=7, routings=list(MODES[:3]))
    lengths, keys = first.lengths.cuda(), first.indices.cuda()

    def call() -> Bucketized:
        return block_bucketize(lengths, keys, first.block_sizes, 7, first.routings, positions=True)

    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()
    for shift in (1, 12345):
        keys.add_(shift)
        lengths.copy_(lengths.flip(0))
        captured.replay()
        expected = reference(lengths.cpu(), keys.cpu(), first.block_sizes, 7, first.routings)
        for mine, other in zip(result, expected, strict=True):
            assert mine is None or other is None or torch.equal(mine.cpu(), other)


def no_synchronisation() -> None:
    batch = make_batch(2, num_features=2, max_rows=50, max_length=50, world_size=5, routings=list(MODES[:2]))
    lengths, keys = batch.lengths.cuda(), batch.indices.cuda()
    for _ in range(2):
        block_bucketize(lengths, keys, batch.block_sizes, 5, batch.routings)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def compiled() -> None:
    batch = make_batch(3, num_features=2, max_rows=50, max_length=50, world_size=5, routings=list(MODES[:2]))

    def step(lengths: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = block_bucketize(lengths, keys * 3, batch.block_sizes, 5, batch.routings)
        return result.lengths + 1, result.indices * 2

    inputs = batch.lengths.cuda(), batch.indices.cuda()
    for mine, other in zip(torch.compile(step, fullgraph=True)(*inputs), step(*inputs), strict=True):
        assert torch.equal(mine, other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="a small set, for compute-sanitizer")
    few = parser.parse_args().few
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    print(random_batches(24 if few else 480), "random batches equal the definition")
    if not few:
        giant_rows()
        graph()
        no_synchronisation()
        compiled()
        print("giant rows, CUDA graph, no synchronisation, torch.compile: fine")


if __name__ == "__main__":
    main()
