"""Per-rank streams that any number of ranks goes on with: files as shards, each with an offset of its own.

torchrun --nproc-per-node 4 -m examples.shards out/shards --write 40 --steps 6
torchrun --nproc-per-node 2 -m examples.shards out/shards

The first command writes 40 files of histories, trains 6 steps on them and saves each rank's state; the second one goes
on with other ranks, to the end of the epoch, and tells how often each record was trained. A source like Kafka is the
same: a partition is a shard, the offset is that of its next message, and there is no end.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from evenkeel.partitioning import partition
from examples.datasets.lengths import LogNormalLengths
from trainer_client import BalancedLoader, Balancer
from trainer_client.balancing.sampling import SampleOrder

VERSION = 1


class ShardLoader:
    """This rank's batches from files of one JSON record a line; each file is read by one rank, from begin to end.

    The state of a rank tells the shards that it has not finished, with the bytes of each that have been read. The same
    ranks go on with `load_state_dict`; other ones with `load_state_dicts`, which deals all unfinished shards out again.
    A batch may have records of two shards, and the last one of a rank may be smaller.
    """

    def __init__(self, paths: Sequence[Path], *, batch_size: int, rank: int, world_size: int, seed: int = 0) -> None:
        """Begins with epoch 0.

        Args:
            paths: All shards, in the same order on all ranks.
            batch_size: Records of a batch.
            rank: This one.
            world_size: Ranks that share the shards.
            seed: Of the order in which shards are dealt out.
        """
        self.paths = list(paths)
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.epoch = 0
        self._loaded: dict[int, int] | None = None  # where the next iteration begins
        self._left: dict[int, int] | None = None  # offsets of shards that are not finished, in the order of reading

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; that of a loaded state goes on, another one begins."""
        if epoch != self.epoch:
            self.epoch, self._loaded, self._left = epoch, None, None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._left = self._dealt({}) if self._loaded is None else dict(self._loaded)
        self._loaded = None
        return self._batches(self._left)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank is, behind the latest batch that was yielded."""
        left = self._loaded if self._loaded is not None else self._left
        return {
            "version": VERSION,
            "shards": len(self.paths),
            "seed": self.seed,
            "epoch": self.epoch,
            "rank": self.rank,
            "world_size": self.world_size,
            "offsets": {str(shard): offset for shard, offset in (self._dealt({}) if left is None else left).items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of this rank.

        Raises:
            ValueError: If it is another rank's, or of other data.
        """
        self._check(state, rank=self.rank, world_size=self.world_size)
        self._loaded, self.epoch = _offsets(state), state["epoch"]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from the states of all ranks of a job of any number of ranks. All ranks call it with the same states.

        Raises:
            ValueError: If some are missing, or they are not of one moment.
        """
        left: dict[int, int] = {}
        for rank, state in enumerate(states):
            self._check(state, rank=rank, world_size=len(states), epoch=states[0]["epoch"])
            for shard, offset in _offsets(state).items():
                if shard in left:
                    raise ValueError(f"shard {shard} is in two states, the later of rank {rank}; load one job's states")
                left[shard] = offset
        self.epoch = states[0]["epoch"]
        finished = {shard: -1 for shard in range(len(self.paths)) if shard not in left}
        self._loaded = self._dealt({**left, **finished})

    def _check(self, state: Mapping[str, Any], **expected: int) -> None:
        for name, own in {"version": VERSION, "shards": len(self.paths), "seed": self.seed, **expected}.items():
            if state.get(name) != own:
                raise ValueError(
                    f"state[{name!r}] is {state.get(name)!r} and should be {own!r}; load the state of this rank from a "
                    "job of the same shards, or with load_state_dicts those of all its ranks in order"
                )

    def _dealt(self, offsets: Mapping[int, int]) -> dict[int, int]:
        """This rank's part of the shards with their offsets (-1: finished): about as many bytes to read for each."""
        order = SampleOrder(len(self.paths), seed=self.seed, epoch=self.epoch).samples(np.arange(len(self.paths)))
        shards = [shard for shard in order.tolist() if offsets.get(shard, 0) >= 0]
        left = np.array([self.paths[shard].stat().st_size - offsets.get(shard, 0) for shard in shards], np.int64)
        homes = np.zeros(len(shards), np.int32)
        ranks = partition(left, homes, self.world_size, strategy="lpt", counts="free").destinations
        return {shard: offsets.get(shard, 0) for shard, at in zip(shards, ranks, strict=True) if at == self.rank}

    def _batches(self, left: dict[int, int]) -> Iterator[dict[str, torch.Tensor]]:
        records: list[dict[str, Any]] = []
        for shard in list(left):
            with self.paths[shard].open("rb") as file:
                file.seek(left[shard])
                while line := file.readline():
                    records.append(json.loads(line))
                    left[shard] = file.tell()
                    if len(records) == self.batch_size:
                        yield collate(records)
                        records = []
            del left[shard]
        if records:
            yield collate(records)


def _offsets(state: Mapping[str, Any]) -> dict[int, int]:
    return {int(shard): offset for shard, offset in state["offsets"].items()}


def collate(records: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of records."""
    lengths = torch.tensor([len(record["history"]) for record in records])
    values = torch.tensor([item for record in records for item in record["history"]])
    return {
        "id": torch.tensor([record["id"] for record in records]),
        "history": torch.nested.nested_tensor_from_jagged(values, lengths=lengths),
    }


def write_shards(folder: Path, count: int, *, seed: int = 0) -> int:
    """Writes files of very different lengths; the number of their records."""
    rng, written = np.random.default_rng(seed), 0
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(count):
        lengths = LogNormalLengths(mean=60, maximum=600).draw(rng, int(rng.integers(5, 200)))
        lines = [
            json.dumps({"id": written + number, "history": rng.integers(0, 1000, length).tolist()})
            for number, length in enumerate(lengths.tolist())
        ]
        (folder / f"{shard:04}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        written += len(lengths)
    return written


def train(folder: Path, *, batch_size: int, max_steps: int | None) -> Counter[int]:
    """Trains on until the epoch ends, or for some steps; how often this rank has trained each record."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shards = ShardLoader(sorted(folder.glob("*.jsonl")), batch_size=batch_size, rank=rank, world_size=world_size)
    trained: Counter[int] = Counter()
    with Balancer.embedded(job="shards") as balancer:
        loader = BalancedLoader(shards, balancer, cost=lambda batch: batch["history"].offsets().diff() ** 2)
        states = [json.loads(path.read_text()) for path in sorted(folder.glob("state.*.json"))]
        if states:
            loader.load_state_dict(states)
        for step, batch in enumerate(loader, 1):
            trained.update(batch["id"].tolist())
            if step == max_steps:
                break
        state = loader.state_dict()
    dist.barrier()  # all have read the old states
    if rank == 0:
        for path in folder.glob("state.*.json"):
            path.unlink()
    dist.barrier()
    (folder / f"state.{rank:04}.json").write_text(json.dumps(state))
    with (folder / f"trained.{rank:04}.txt").open("a") as ledger:
        ledger.writelines(f"{record}\n" for record in trained.elements())
    dist.barrier()
    return trained


def main() -> None:
    """The command line, on each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where shards, states and ledgers are; all ranks see it")
    parser.add_argument("--write", type=int, default=0, help="shards to write first")
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument("--batch-size", type=int, default=32, help="records of each rank in a step")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if options.write and dist.get_rank() == 0:
        print(f"{write_shards(options.folder, options.write)} records in {options.write} shards")
    dist.barrier()
    train(options.folder, batch_size=options.batch_size, max_steps=options.steps)
    if dist.get_rank() == 0:
        ledgers = [path.read_text().split() for path in options.folder.glob("trained.*.txt")]
        times = Counter(Counter(record for ledger in ledgers for record in ledger).values())
        print("; ".join(f"{records} records were trained {often} times" for often, records in sorted(times.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
