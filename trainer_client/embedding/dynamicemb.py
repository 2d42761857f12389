"""DynamicEmb's own loading of its dumps, mended: every row comes to the rank that owns it."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_client.embedding.checkpoint.dumps import DynamicEmbDump, joined, table_of
from trainer_client.embedding.checkpoint.files import DUMP_FILE
from trainer_client.embedding.checkpoint.record import CheckpointError, Rows
from trainer_client.embedding.routing import owners

_READER, _COUNTERS = "_iter_batches_from_files", "LinearBucketTable"


@contextmanager
def dynamicemb_loads_by_owner(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, `DynamicEmbLoad` and `load` of DynamicEmb's tables put every row on the rank that owns it.

    DynamicEmb's release keeps, in each rank, the keys of a file with `key % ranks == rank`, whatever the routing. Here
    scores, optimizer state and counters come along with all rows, from a dump of any number of ranks, under
    `roundrobin` and `hash_roundrobin`. The table's routing has to be that of the dump; `evenkeel checkpoint convert`
    changes a dump's.

    Args:
        group: The ranks that share the tables; all by default.

    Raises:
        ModuleNotFoundError: If DynamicEmb is not installed.
        CheckpointError: If this release of DynamicEmb reads dumps in another way. Inside: if a dump is damaged, or a
            key is on a rank that does not own it.
    """
    values = importlib.import_module("dynamicemb.key_value_table")
    index = importlib.import_module("dynamicemb.scored_hashtable")
    for module, name in ((values, _READER), (index, _COUNTERS)):
        if not hasattr(module, name):
            raise CheckpointError(
                f"this release of DynamicEmb has no {module.__name__}.{name}, by which dumps were read; "
                "load without Evenkeel, and compare the number of rows with the dump's"
            )
    shared = dist.is_initialized()
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if shared else (0, 1)
    opened = cache(DynamicEmbDump)

    def local_rows(key_file: str) -> Iterator[Rows]:
        """Those of a file that this rank owns."""
        path = Path(key_file)
        match = DUMP_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(f"{path}: has no name of a DynamicEmb dump's file")
        dump, table = opened(path.parent), table_of(match)
        routing = dump.records[table].routing
        if routing.dist_type == "continuous":
            raise CheckpointError(
                f"{path}: table {match['table']} was dumped under continuous routing, whose keys are row numbers of "
                "one rank; route its table by roundrobin or hash_roundrobin"
            )
        for rows in dump.rows(table, int(match["rank"])):
            local = rows.take(owners(rows.keys, routing, world_size=world_size) == rank)
            if local.keys.numel():
                yield local

    def batches(
        emb_key_path: str,
        embedding_file_path: str,  # noqa: ARG001  # the dump knows its files by the keys' name
        score_file_path: str | None,
        opt_file_path: str | None,
        dim: int,
        optstate_dim: int,
        device: torch.device,
        batch_size: int = 65_536,  # noqa: ARG001  # as many as our reader's chunks have
        num_scores: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
        """In place of DynamicEmb's function, with its arguments: keys, embeddings, scores and optimizer state."""
        for rows in local_rows(emb_key_path):
            count, arrays = rows.keys.numel(), joined(rows.arrays)
            scores = state = None
            if score_file_path is not None and "scores" in arrays:
                scores = arrays["scores"].view((count, num_scores) if num_scores > 1 else (count,)).to(device)
            if opt_file_path is not None:
                state = arrays["opt_values"].view(count, optstate_dim).to(device)
            yield rows.keys.to(device), arrays["values"].view(count, dim).to(device), scores, state

    def load_counter(self: Any, key_file: str, score_files: Mapping[str, str], table_id: int | None = None) -> None:
        """In place of `LinearBucketTable.load`, with its arguments."""
        number = 0 if table_id is None else table_id
        (score,) = score_files
        for rows in local_rows(key_file):
            keys = rows.keys.to("cuda" if torch.cuda.is_available() else "cpu")  # where DynamicEmb puts what it reads
            frequencies = rows.arrays["frequencies"].flatten().to(keys.device)
            argument = index.ScoreArg(name=score, value=frequencies, policy=index.ScorePolicy.ASSIGN)
            self.insert(keys, torch.full_like(keys, number), argument)

    table: Any = getattr(index, _COUNTERS)
    replaced = getattr(values, _READER), table.load
    setattr(values, _READER, batches)
    table.load = load_counter
    try:
        yield
    finally:
        setattr(values, _READER, replaced[0])
        table.load = replaced[1]
