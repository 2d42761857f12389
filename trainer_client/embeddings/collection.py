"""A collection of row-wise sharded tables: bucketize, All2All, lookup at the owner, All2All back, unbucketize."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_client.embeddings.config import KeyBatch, RoutedTable
from trainer_client.embeddings.exchange import all_to_all, cut, differentiable_all_to_all, exchange_counts
from trainer_client.embeddings.tables import BlockTable, KeyTable
from trainer_client.routing import block_bucketize, warm_up

TableFactory = Callable[[RoutedTable, int, int, torch.device], nn.Module]


def default_table(table: RoutedTable, rank: int, num_ranks: int, device: torch.device) -> nn.Module:
    """A block of rows under ``continuous``, a table of keys under the other modes."""
    if table.mode.dist_type == "continuous":
        return BlockTable(table, rank=rank, num_ranks=num_ranks, device=device)
    return KeyTable(table, num_ranks=num_ranks, device=device)


class RoutedEmbeddingCollection(nn.Module):
    """Embeddings of several tables, each sharded by rows over the ranks under a routing of its own.

    Args:
        tables: The tables. Those of equal dimension share one exchange.
        process_group: Ranks that share the tables; the default group if there is one, else this process alone.
        device: Where the tables live.
        deduplicate: Send each distinct key of a table once per rank and batch. Pays where keys repeat, as in histories;
            costs a sort of the batch's keys.
        make_table: Builds a rank's part of a table (table, rank, ranks, device), for other storage than this module's.

    Raises:
        ValueError: if two tables share a name or a feature.
    """

    def __init__(
        self,
        tables: Sequence[RoutedTable],
        *,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        deduplicate: bool = False,
        make_table: TableFactory = default_table,
    ) -> None:
        super().__init__()
        for kind, names in (
            ("table", [table.name for table in tables]),
            ("feature", [feature for table in tables for feature in table.features]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"{kind} {twice!r} is named twice; names must be unique")
        self.configs = tuple(tables)
        self.group = process_group
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(process_group)
        self.num_ranks = 1 if alone else dist.get_world_size(process_group)
        self.deduplicate = deduplicate
        if torch.device(device).type == "cpu":
            warm_up()
        built = [make_table(table, self.rank, self.num_ranks, torch.device(device)) for table in tables]
        self.owned = nn.ModuleList(built)
        self.tables: dict[str, Any] = {table.name: module for table, module in zip(tables, built, strict=True)}
        dims = sorted({table.embedding_dim for table in tables})
        self._groups = [[table for table in tables if table.embedding_dim == dim] for dim in dims]

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Looks up a batch.

        Args:
            batch: A KeyBatch or KeyedJaggedTensor with all features of all tables.

        Returns:
            By feature: (keys x dim) in the order of the batch for tables without pooling, else (rows x dim).

        Raises:
            ValueError: if a feature is missing, or a table does not take a key.
        """
        keys = KeyBatch.of(batch)
        results: dict[str, Tensor] = {}
        for tables in self._groups:
            part = keys.select([feature for table in tables for feature in table.features])
            results.update(self._pool(self._look_up(part, tables), part, tables))
        return results

    def _look_up(self, part: KeyBatch, tables: Sequence[RoutedTable]) -> Tensor:
        """Embeddings (num_keys x dim) of a part's keys, in its order."""
        if not self.deduplicate:
            return self._exchange(
                part.values, part.lengths, part.batch_sizes, [table for table in tables for _ in table.features]
            )
        sizes = [sum(counts) for counts in self._keys_per_feature(part, tables)]
        unique = [torch.unique(keys, return_inverse=True) for keys in cut(part.values, sizes)]
        lengths = torch.tensor([keys.numel() for keys, _ in unique], device=part.values.device)
        found = self._exchange(torch.cat([keys for keys, _ in unique]), lengths, [1] * len(tables), list(tables))
        pieces = cut(found, [keys.numel() for keys, _ in unique])
        return torch.cat([piece.index_select(0, inverse) for piece, (_, inverse) in zip(pieces, unique, strict=True)])

    def _keys_per_feature(self, part: KeyBatch, tables: Sequence[RoutedTable]) -> list[list[int]]:
        sums = iter(torch.stack([rows.sum() for rows in cut(part.lengths, part.batch_sizes)]).tolist())
        return [[next(sums) for _ in table.features] for table in tables]

    def _exchange(
        self, values: Tensor, lengths: Tensor, batch_sizes: Sequence[int], tables: list[RoutedTable]
    ) -> Tensor:
        """Embeddings of keys whose features (one table each) have ``batch_sizes`` rows."""
        sent = block_bucketize(
            lengths,
            values,
            [table.rows_per_rank(self.num_ranks) if table.mode.dist_type == "continuous" else 1 for table in tables],
            self.num_ranks,
            [table.mode for table in tables],
            batch_sizes=list(batch_sizes),
        )
        assert sent.permutation is not None
        rows = cut(sent.lengths.view(self.num_ranks, -1), batch_sizes, 1)
        counts = torch.stack([cells.sum(1) for cells in rows], dim=1)
        if self.num_ranks == 1:
            outgoing = incoming = counts.tolist()
            keys = sent.indices
        else:
            outgoing, incoming = exchange_counts(counts, self.group)
            keys = all_to_all(sent.indices, [sum(c) for c in incoming], [sum(c) for c in outgoing], self.group)
        found = self._look_up_owned(keys, incoming, tables)
        if self.num_ranks > 1:
            found = differentiable_all_to_all(found, [sum(c) for c in outgoing], [sum(c) for c in incoming], self.group)
        return found.index_select(0, sent.permutation.to(torch.int64))

    def _look_up_owned(self, keys: Tensor, incoming: list[list[int]], tables: list[RoutedTable]) -> Tensor:
        """Embeddings of received keys, which come by source rank, then feature; one lookup a table."""
        names = [table.name for table in tables] * len(incoming)
        sizes = [count for counts in incoming for count in counts]
        segments = cut(keys, sizes)
        found: list[Tensor] = [keys.new_empty(0)] * len(segments)
        for name in dict.fromkeys(names):
            mine = [i for i, other in enumerate(names) if other == name]
            looked_up: Tensor = self.tables[name](torch.cat([segments[i] for i in mine]))
            for i, piece in zip(mine, cut(looked_up, [sizes[i] for i in mine]), strict=True):
                found[i] = piece
        return torch.cat(found)

    def _pool(self, found: Tensor, part: KeyBatch, tables: Sequence[RoutedTable]) -> dict[str, Tensor]:
        per_feature = [count for counts in self._keys_per_feature(part, tables) for count in counts]
        weights = cut(part.weights, per_feature) if part.weights is not None else [None] * len(per_feature)
        lengths = cut(part.lengths, part.batch_sizes)
        modes = [table.pooling for table in tables for _ in table.features]
        results = {}
        for name, rows, weight, length, mode in zip(
            part.features, cut(found, per_feature), weights, lengths, modes, strict=True
        ):
            if mode == "none":
                results[name] = rows
                continue
            scaled = rows if weight is None else rows * weight[:, None].to(rows.dtype)
            row_ids = torch.repeat_interleave(
                torch.arange(length.numel(), device=rows.device), length, output_size=rows.shape[0]
            )
            pooled = rows.new_zeros(length.numel(), rows.shape[1]).index_add(0, row_ids, scaled)
            results[name] = pooled / length.clamp(min=1)[:, None] if mode == "mean" else pooled
        return results
