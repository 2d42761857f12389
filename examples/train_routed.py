"""Train routed embeddings on adversarial keys, save, and resume under another routing and another number of ranks.

    python -m examples.train_routed --dist-type roundrobin --ranks 4
    python -m examples.train_routed --dist-type hash_roundrobin --ranks 4 --resume-as continuous --resume-ranks 2

Every key is a multiple of the number of ranks, so roundrobin puts all of them on one rank. Ranks are processes of this
machine: over NCCL with a GPU each where there are enough, over Gloo on the CPU otherwise.
"""

import argparse
import tempfile
from pathlib import Path

DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")
NUM_KEYS = 20_000


def run_rank(rank: int, world_size: int, arguments: argparse.Namespace, dist_type: str, store: str) -> None:
    """One rank: load if there is a checkpoint, train, print the balance, save."""
    import torch
    import torch.distributed as dist

    from trainer_client.embedding import checkpoint
    from trainer_client.embedding.routing import Routing, block_size, owners
    from trainer_client.embedding.tables import KeyBatch, RoutedEmbeddingCollection, RoutedTable

    on_gpu = arguments.on_gpu
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    seed = arguments.seed if dist_type == "hash_roundrobin" else 0
    table = RoutedTable(
        name="items",
        embedding_dim=arguments.dim,
        features=("item",),
        num_embeddings=NUM_KEYS * arguments.ranks,
        routing=Routing(dist_type=dist_type, seed=seed),  # type: ignore[arg-type]
        pooling="sum",
        capacity=NUM_KEYS,
    )
    collection = RoutedEmbeddingCollection([table], device=device, deduplicate=True)
    head = torch.nn.Linear(arguments.dim, 1, device=device)
    torch.nn.init.constant_(head.weight, 0.5)
    optimizer = torch.optim.Adam(collection.parameters(), lr=0.02)
    start, seen = 0, []
    if arguments.checkpoint.exists():
        rows = checkpoint.load(collection, arguments.checkpoint, optimizer=optimizer)["items"]
        start = arguments.steps
        if rank == 0:
            print(f"loaded {rows:,} rows into {table.resolved_routing} over {world_size} ranks")
    for step in range(start, start + arguments.steps):
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        popularity = torch.rand(arguments.batch * 8, generator=generator, dtype=torch.float64)
        keys = (NUM_KEYS**popularity).to(torch.int64) % NUM_KEYS * arguments.ranks
        seen.append(keys)
        batch = KeyBatch(
            features=["item"],
            values=keys.to(device),
            lengths=torch.full((arguments.batch,), 8, device=device),
            batch_sizes=[arguments.batch],
        )
        target = (keys.view(-1, 8) % 7 == 0).any(1).to(device, torch.float32)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(head(collection(batch)["item"])[:, 0], target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {float(loss.detach()):.4f}")
    block = block_size(table.num_embeddings, world_size)
    owner = owners(torch.unique(torch.cat(seen)), table.resolved_routing, world_size=world_size, block_size=block)
    counts = torch.bincount(owner, minlength=world_size).to(device)
    dist.all_reduce(counts)
    if rank == 0:
        print(f"{table.resolved_routing} over {world_size} ranks: keys asked of each rank {counts.tolist()}, "
              f"max/mean {float(counts.max() / counts.float().mean()):.2f}")  # fmt: skip
    checkpoint.save(collection, arguments.checkpoint, optimizer=optimizer, overwrite=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist-type", choices=DIST_TYPES, default="roundrobin", help="how keys choose their rank")
    parser.add_argument("--ranks", type=int, default=4, help="processes to train with")
    parser.add_argument("--resume-as", choices=DIST_TYPES, default="hash_roundrobin", help="routing to resume under")
    parser.add_argument("--resume-ranks", type=int, default=2, help="processes to resume with")
    parser.add_argument("--steps", type=int, default=20, help="steps before and after the change")
    parser.add_argument("--batch", type=int, default=256, help="rows of a rank's batch")
    parser.add_argument("--dim", type=int, default=16, help="columns of the table")
    parser.add_argument("--seed", type=int, default=0, help="seed of hash_roundrobin")
    parser.add_argument("--checkpoint", type=Path, help="directory to save to (a temporary one by default)")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    arguments = parser.parse_args()
    for name in ("ranks", "resume_ranks", "steps", "batch", "dim"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; use at least 1")

    import torch
    from torch.multiprocessing.spawn import start_processes

    import trainer_client.embedding.checkpoint
    import trainer_client.embedding.tables  # noqa: F401  (ranks that are forked have what is imported here)

    arguments.on_gpu = torch.cuda.device_count() >= max(arguments.ranks, arguments.resume_ranks) and not arguments.cpu
    start_method = "spawn" if arguments.on_gpu else "fork"
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.checkpoint is None:
            arguments.checkpoint = Path(scratch) / "checkpoint"
        phases = ((arguments.dist_type, arguments.ranks), (arguments.resume_as, arguments.resume_ranks))
        for number, (dist_type, world_size) in enumerate(phases):
            own = (world_size, arguments, dist_type, f"{scratch}/store{number}")
            start_processes(run_rank, own, world_size, start_method=start_method)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
