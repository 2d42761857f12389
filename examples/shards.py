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
from trainer_client import BalancedLoader, Balancer, BatchSpec
from trainer_client.balancing.sampling import SampleOrder

VERSION = 1
SPEC = BatchSpec(jagged=("history",))


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
