"""DynamicEmb's own loading with Evenkeel's reader in it: each rank keeps the rows that the table's routing gives it.

DynamicEmb's release keeps, in each rank, the keys of a file with `key % ranks == rank`, whatever the routing. Of a
`hash_roundrobin` dump that is about one key of as many as there are ranks, and under `roundrobin` negative keys are
lost where the number of ranks is no power of two.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.embedding.checkpoint.dynamicemb import COUNTER, DynamicEmbDump, table_and_rank
from trainer_client.embedding.checkpoint.record import CheckpointError, Rows
from trainer_client.embedding.routing import owners

READER, COUNTERS = "_iter_batches_from_files", "LinearBucketTable"
Batch = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, embeddings, scores and optimizer state, as DynamicEmb's loading wants them."""


@contextmanager
def dynamicemb_loads_by_owner(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, `DynamicEmbLoad` and `load` of DynamicEmb's tables put every row on the rank that owns it.

    Scores, optimizer state and counters come along, from a dump of any number of ranks, under `roundrobin` and
    `hash_roundrobin`. The table's routing has to be that of the dump; `evenkeel checkpoint convert` changes a dump's.

    Args:
        group: The ranks that share the tables; all by default.

    Raises:
        ModuleNotFoundError: If DynamicEmb is not installed.
        CheckpointError: If this release of DynamicEmb reads dumps in another way. Inside: if a dump is damaged, or a
            key is on a rank that does not own it.
    """
    values = importlib.import_module("dynamicemb.key_value_table")
    index = importlib.import_module("dynamicemb.scored_hashtable")
    for module, name in ((values, READER), (index, COUNTERS)):
        if not hasattr(module, name):
            raise CheckpointError(
                f"this release of DynamicEmb has no {module.__name__}.{name}, by which dumps were read; "
                "load without Evenkeel, and compare the number of rows with the dump's"
            )
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    reader = _Reader(dist.get_rank(group) if dist.is_initialized() else 0, world_size)
    table: Any = getattr(index, COUNTERS)
    theirs = getattr(values, READER), table.load

    def load_counter(self: Any, key_file: str, score_files: Mapping[str, str], table_id: int | None = None) -> None:
        number = 0 if table_id is None else table_id
        (score,) = score_files
        for rows in reader.rows(key_file):
            keys = rows.keys.to(_device())
            frequencies = rows.arrays["frequencies"].flatten().to(keys.device)
            argument = index.ScoreArg(name=score, value=frequencies, policy=index.ScorePolicy.ASSIGN)
            self.insert(keys, torch.full_like(keys, number), argument)

    setattr(values, READER, reader.batches)
    table.load = load_counter
    try:
        yield
    finally:
        setattr(values, READER, theirs[0])
        table.load = theirs[1]


class _Reader:
    """Rows of a dump's files that a rank owns.

    Args:
        rank: Which rank.
        world_size: Ranks that share the tables.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._dumps: dict[Path, DynamicEmbDump] = {}

    def rows(self, key_file: str) -> Iterator[Rows]:
        """The rows of one file, in chunks; none without rows.

        Raises:
            CheckpointError: If the dump is damaged, or continuous.
        """
        path = Path(key_file)
        name, file_rank = table_and_rank(path)
        if path.parent not in self._dumps:
            self._dumps[path.parent] = DynamicEmbDump(path.parent)
        dump = self._dumps[path.parent]
        record = dump.records[name]
        if record.routing.dist_type == "continuous":
            raise CheckpointError(
                f"{path}: table {name.removesuffix(COUNTER)} was dumped under continuous routing, whose keys are row "
                "numbers of one rank; route its table by roundrobin or hash_roundrobin"
            )
        for rows in dump.rows(name, file_rank):
            owner = owners(rows.keys, record.routing, world_size=self._world_size, block_size=0)
            mine = rows.take(owner == self._rank)
            if mine.keys.numel():
                yield mine

    def batches(
        self,
        emb_key_path: str,
        embedding_file_path: str,  # noqa: ARG002  # the dump knows its files by the keys' name
        score_file_path: str | None,
        opt_file_path: str | None,
        dim: int,
        optstate_dim: int,
        device: torch.device,
        batch_size: int = 65_536,  # noqa: ARG002  # as many as our reader's chunks have
        num_scores: int = 1,
    ) -> Iterator[Batch]:
        """In place of DynamicEmb's function, with its arguments."""
        for rows in self.rows(emb_key_path):
            count, arrays = rows.keys.numel(), rows.arrays
            scores = arrays["scores"] if score_file_path is not None and "scores" in arrays else None
            state = arrays["opt_values"].view(count, optstate_dim) if opt_file_path is not None else None
            if scores is not None:
                scores = (scores.view(count, num_scores) if num_scores > 1 else scores.flatten()).to(device)
            yield (
                rows.keys.to(device),
                arrays["values"].view(count, dim).to(device),
                scores,
                state.to(device) if state is not None else None,
            )


def _device() -> torch.device:
    """Where DynamicEmb puts what it reads."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
