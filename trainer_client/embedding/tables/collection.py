"""A collection of row-wise sharded tables: bucketize, All2All, lookup at the owner, All2All back, unbucketize."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trainer_client.embedding.routing import block_bucketize, warm_up
from trainer_client.embedding.routing.ownership import as_int64
from trainer_client.embedding.tables.config import KeyBatch, RoutedTable, TableFactory, per_table
from trainer_client.embedding.tables.exchange import (
    Status,
    all_to_all,
    cut,
    differentiable_all_to_all,
    exchange_counts,
    exchange_group,
    raise_together,
)
from trainer_client.embedding.tables.hot import HotRows
from trainer_client.embedding.tables.part import RankLocal, module_name, rows_of_other_ranks
from trainer_client.embedding.tables.tables import BlockTable, KeyTable


def default_table(table: RoutedTable, rank: int, world_size: int, device: torch.device) -> nn.Module:
    """A block of rows under `continuous`, a table of keys under the others."""
    if table.resolved_routing.dist_type == "continuous":
        return BlockTable(table, rank=rank, world_size=world_size, device=device)
    return KeyTable(table, rank=rank, world_size=world_size, device=device)


def _as_group(ranks: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if not isinstance(ranks, DeviceMesh):
        return ranks
    if ranks.ndim != 1:
        raise ValueError(
            f"process_group is a mesh of {ranks.ndim} dimensions; pass the one whose ranks share the tables, such as "
            "mesh['dp']"
        )
    return ranks.get_group()


def _rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank among those that share the tables, and their number."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


class RoutedEmbeddingCollection(RankLocal):
    """Embeddings of several tables, each sharded by rows over the ranks under a routing of its own.

    `DistributedDataParallel` and `fully_shard` leave it as it is wherever it stands in a model. The gradient of a
    row is the sum over all ranks divided by `gradient_divide_factor`: with the default it is averaged over ranks, as
    those wrappers average the gradients of other parameters.

    Args:
        tables: The tables. Those of equal dimension share one exchange.
        process_group: Ranks that share the tables, as a group or a mesh of one dimension such as `mesh["dp"]`; the
            default group if there is one, else this process alone.
        device: Where the tables live.
        deduplicate: Send each distinct key of a table once per rank and batch. Pays where keys repeat, as in histories;
            costs a sort of the batch's keys.
        gradient_divide_factor: What the sum of all ranks' gradients is divided by; the number of ranks by default. Take
            1 for losses whose gradients are to be summed over ranks.
        make_table: Builds a rank's part of a table (table, rank, ranks, device), for other storage than this module's.

    Raises:
        ValueError: If two tables share a name or a feature, the factor is not positive, or a mesh has several
            dimensions.
    """

    hot: HotRows | None = None

    def __init__(
        self,
        tables: Sequence[RoutedTable],
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str = "cpu",
        deduplicate: bool = False,
        gradient_divide_factor: float | None = None,
        make_table: TableFactory = default_table,
    ) -> None:
        super().__init__()
        if not tables:
            raise ValueError("tables is empty; give at least one RoutedTable")
        for kind, names in (
            ("table", [table.name for table in tables]),
            ("feature", [feature for table in tables for feature in table.features]),
        ):
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise ValueError(f"{kind} {repeated!r} is named twice; names must be unique")
        self.configs = tuple(tables)
        self.group = _as_group(process_group)
        self.rank, self.world_size = _rank_of(self.group)
        if self.world_size > 1:
            exchange_group(self.group)  # made while all ranks are here
        self.deduplicate = deduplicate
        self.gradient_divide_factor = self.world_size if gradient_divide_factor is None else gradient_divide_factor
        if not self.gradient_divide_factor > 0:
            raise ValueError(f"gradient_divide_factor is {gradient_divide_factor}; give a number above 0")
        if torch.device(device).type == "cpu":
            warm_up()
        self._device = torch.device(device)
        self.tables: dict[str, Any] = {}
        for table in tables:
            built = make_table(table, self.rank, self.world_size, torch.device(device))
            name = module_name(table.name, self.rank, self.world_size)
            while name in self._modules:
                name += "_"
            self.add_module(name, built)
            self.tables[table.name] = built
        dims = sorted({table.embedding_dim for table in tables})
        self._groups = [[table for table in tables if table.embedding_dim == dim] for dim in dims]

    def hold_hot_rows(self, keys: Mapping[str, Tensor] | None) -> None:
        """Chooses the rows whose values all ranks get in each step, so that their lookups stay at home.

        Results, gradients and checkpoints are those without, to rounding. All ranks call it together, at any time
        between two steps, and again after `reset_parameters()` of a table of keys. They also load states together.

        Args:
            keys: By table, the keys of its hot rows, such as `choose_hot_rows` finds; those of rank 0 hold for all.
                None or nothing: no row is hot.

        Raises:
            ValueError: If there is no such table, a continuous one has no such row, or keys are no integers; on all
                ranks.
        """
        group = exchange_group(self.group) if self.world_size > 1 else None
        named = {} if keys is None else keys
        hot = HotRows(self.configs, named, rank=self.rank, world_size=self.world_size, group=group)
        self.hot = hot if self.world_size > 1 and any(map(len, hot.keys.values())) else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes come from other ranks: nothing to compile
    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Looks up a batch.

        Args:
            batch: A KeyBatch or KeyedJaggedTensor with all features of all tables.

        Returns:
            By feature: (keys x dim) in the order of the batch for tables without pooling, else (rows x dim).

        Raises:
            ValueError: If on one rank a feature is missing or a table does not take a key; on all in the same step.
        """
        if self.hot is not None:
            self.hot.refresh(self.tables, self._device, exchange_group(self.group))
        with self._raised_by_all(self._features(self._groups[0])):
            parts = self._parts(batch)
        results: dict[str, Tensor] = {}
        look_up = self._look_up
        if self.hot is not None:
            look_up = self._look_up_hot
        for part, tables in zip(parts, self._groups, strict=True):
            vectors, counts = look_up(part, tables)
            if vectors.requires_grad and self.gradient_divide_factor != 1:
                # Divided before any are added up, as a sum may not fit into a narrow type.
                vectors.register_hook(lambda gradient: gradient / self.gradient_divide_factor)  # type: ignore[no-untyped-call]
            results.update(self._pool(vectors, counts, part, tables))
        return results

    def _look_up_hot(self, part: KeyBatch, tables: Sequence[RoutedTable]) -> tuple[Tensor, list[int]]:
        """As `_look_up`, which gets the lookups of rows that are not hot."""
        assert self.hot is not None
        with self._raised_by_all(self._features(tables)):
            split = self.hot.split(part, tables)
        if split is None:
            return self._look_up(part, tables)
        others, order, counts = split
        # Whose gradients of a row, many of one that is hot, are added up on GPUs in float32 whatever the rows' type.
        return functional.embedding(order, self._look_up(others, tables)[0]), counts

    def _parts(self, batch: Any) -> list[KeyBatch]:
        """What each exchange is about."""
        keys = KeyBatch.of(batch)
        keys = replace(keys, values=as_int64(keys.values))  # what travels is the same on all ranks
        if keys.weights is not None and keys.weights.numel() != keys.values.numel():
            raise ValueError(f"weights has {keys.weights.numel()} elements, but there are {keys.values.numel()} keys")
        return [keys.select([feature for table in tables for feature in table.features]) for tables in self._groups]

    def _features(self, tables: Sequence[RoutedTable]) -> list[RoutedTable]:
        """The table of each column of an exchange: of each feature, or of each table where keys are sent once."""
        return list(tables) if self.deduplicate else [table for table in tables for _ in table.features]

    @contextmanager
    def _raised_by_all(self, columns: Sequence[RoutedTable]) -> Iterator[None]:
        """Raises an error that this rank has before an exchange, on all ranks."""
        try:
            yield
        except Exception as problem:
            if self.world_size == 1:
                raise
            group = exchange_group(self.group)
            counts = torch.zeros(self.world_size, len(columns) + 1, dtype=torch.int64)
            counts[:, -1] = 1
            exchange_counts(counts.to(self._device), group)
            raise_together(problem, group)

    def _look_up(self, part: KeyBatch, tables: Sequence[RoutedTable]) -> tuple[Tensor, list[int]]:
        """Embeddings (num_keys x dim) of a part's keys, in its order, then of hot rows; and keys of each feature."""
        columns = self._features(tables)
        if not self.deduplicate:
            return self._exchange(part.values, part.lengths, part.batch_sizes, columns), part.keys_per_feature()
        with self._raised_by_all(columns):
            counts = part.keys_per_feature()
            by_table = cut(part.values, per_table(counts, tables))
            unique = [torch.unique(keys, return_inverse=True) for keys in by_table]
            lengths = torch.tensor([keys.numel() for keys, _ in unique], device=part.values.device)
        vectors = self._exchange(torch.cat([keys for keys, _ in unique]), lengths, [1] * len(tables), columns)
        sizes = [keys.numel() for keys, _ in unique]
        *pieces, rest = cut(vectors, [*sizes, len(vectors) - sum(sizes)])
        rows = [piece.index_select(0, inverse) for piece, (_, inverse) in zip(pieces, unique, strict=True)]
        return torch.cat([*rows, rest]), counts

    def _exchange(
        self, values: Tensor, lengths: Tensor, batch_sizes: Sequence[int], tables: list[RoutedTable]
    ) -> Tensor:
        """Embeddings of keys whose features (one table each) have `batch_sizes` rows, then all hot rows."""
        with self._raised_by_all(tables):
            sent = block_bucketize(
                lengths,
                values,
                [table.rows_per_rank(self.world_size) for table in tables],
                self.world_size,
                [table.resolved_routing for table in tables],
                batch_sizes=list(batch_sizes),
            )
            rows = cut(sent.lengths.view(self.world_size, -1), batch_sizes, 1)
        assert sent.permutation is not None
        counts = torch.stack([cells.sum(1) for cells in rows] + [sent.lengths.new_zeros(self.world_size)], dim=1)
        if self.world_size == 1:
            vectors = self._look_up_owned(sent.indices, [column[:-1] for column in counts.tolist()], tables)
        else:
            vectors = self._look_up_at_owners(sent.indices, counts, tables)
        order = sent.permutation.to(torch.int64)
        if len(vectors) > len(order):
            order = torch.cat([order, torch.arange(len(order), len(vectors), device=order.device)])
        return vectors.index_select(0, order)

    def _look_up_at_owners(self, indices: Tensor, counts: Tensor, tables: list[RoutedTable]) -> Tensor:
        """Embeddings of keys in the order in which bucketize has put them for their owners, then all hot rows.

        See `exchange_counts`.
        """
        group = exchange_group(self.group)
        to_each, from_each = exchange_counts(counts, group)
        if any(count[-1] for count in from_each):
            raise_together(None, group)
        outgoing, incoming = [count[:-1] for count in to_each], [count[:-1] for count in from_each]
        send, receive = [sum(count) for count in outgoing], [sum(count) for count in incoming]
        keys = all_to_all(indices, receive, send, group)
        if self.hot is not None:
            keys, incoming = self.hot.with_hot(keys, incoming, tables)
        problem = None
        try:
            vectors = self._look_up_owned(keys, incoming, tables)
        except Exception as raised:  # the others wait for rows: they get some, and are told
            problem = raised
            vectors = torch.zeros(len(keys), tables[0].embedding_dim, dtype=tables[0].dtype, device=keys.device)
        refuses = any(getattr(self.tables[table.name], "refuses", True) for table in tables)
        status = Status(problem, keys.device, group) if refuses else None
        hot = vectors[sum(receive) :]
        vectors = differentiable_all_to_all(vectors[: sum(receive)], send, receive, group)
        if self.hot is not None:
            vectors = torch.cat([vectors, self.hot.gather(hot, tables, group)])
        if status is not None:
            status.check()
        elif problem is not None:
            raise problem
        return vectors

    def _look_up_owned(self, keys: Tensor, incoming: list[list[int]], tables: list[RoutedTable]) -> Tensor:
        """Embeddings of received keys, which come by source rank, then feature; one lookup a table."""
        names = [table.name for table in tables] * len(incoming)
        sizes = [count for counts in incoming for count in counts]
        segments = cut(keys, sizes)
        vectors: list[Tensor] = [keys.new_empty(0)] * len(segments)
        for name in dict.fromkeys(names):
            picked = [i for i, other in enumerate(names) if other == name]
            looked_up: Tensor = self.tables[name](torch.cat([segments[i] for i in picked]))
            for i, piece in zip(picked, cut(looked_up, [sizes[i] for i in picked]), strict=True):
                vectors[i] = piece
        return torch.cat(vectors)

    def _pool(
        self, vectors: Tensor, per_feature: list[int], part: KeyBatch, tables: Sequence[RoutedTable]
    ) -> dict[str, Tensor]:
        weights = cut(part.weights, per_feature) if part.weights is not None else [None] * len(per_feature)
        lengths = cut(part.lengths, part.batch_sizes)
        modes = [table.pooling for table in tables for _ in table.features]
        results = {}
        for name, rows, weight, length, mode in zip(
            part.features, cut(vectors, per_feature), weights, lengths, modes, strict=True
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

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name, module in self._modules.items():
            table = next(table for table in self.configs if self.tables[table.name] is module)
            problem = rows_of_other_ranks(table, state_dict, prefix, name)
            if problem is not None:
                lists[-1].append(problem)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        if self.hot is not None and any(key.startswith(prefix) for key in state_dict):
            self.hot.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # the copy's ranks are the same
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        rank, world_size = _rank_of(None)
        if (rank, world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the pickled collection has the rows of rank {self.rank} of {self.world_size}, and this is rank "
                f"{rank} of {world_size}; save with trainer_client.embedding.checkpoint.save and load with "
                "checkpoint.load"
            )
