"""A collection of row-wise sharded tables: bucketize, All2All, lookup at the owner, All2All back, unbucketize."""

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from trainer_client.embedding.routing import warm_up
from trainer_client.embedding.tables.config import KeyBatch, RoutedTable, TableFactory, by_owner, cut, per_table
from trainer_client.embedding.tables.exchange import (
    all_to_all,
    differentiable_all_to_all,
    exchange_counts,
    exchange_group,
    start_telling,
)
from trainer_client.embedding.tables.hot import HotRows
from trainer_client.embedding.tables.part import module_name, rows_of_other_ranks
from trainer_client.embedding.tables.tables import BlockTable, KeyTable
from trainer_client.embedding.tables.wrappers import RankLocal


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


class _Request(NamedTuple):
    """What a rank asks of the owners of some tables' keys.

    Attributes:
        keys: (n): what is sent, in the order of their owners, then of columns.
        counts: (ranks x columns): how many of them go where.
        order: (keys of the batch): which of the rows that come back is that of each; n rows, then the hot ones.
    """

    keys: Tensor
    counts: Tensor
    order: Tensor


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
        try:
            keys = KeyBatch.of(batch)
            parts = [keys.split([name for table in tables for name in table.features]) for tables in self._groups]
            requests = [self._request(*each) for each in zip(parts, self._groups, strict=True)]
        except Exception as problem:
            if self.world_size == 1:
                raise
            nothing = torch.zeros(self.world_size, len(self._columns(self._groups[0])), dtype=torch.int64)
            exchange_counts(nothing.to(self._device), exchange_group(self.group), problem)
        results: dict[str, Tensor] = {}
        for features, request, tables in zip(parts, requests, self._groups, strict=True):
            # On GPUs its gradient adds up in float32 what a row gets from all of its keys, whatever the rows' type.
            vectors = functional.embedding(request.order, self._rows(request, self._columns(tables)))
            if vectors.requires_grad and self.gradient_divide_factor != 1:
                # Divided before any are added up, as a sum may not fit into a narrow type.
                vectors.register_hook(lambda gradient: gradient / self.gradient_divide_factor)  # type: ignore[no-untyped-call]
            poolings = [table.pooling for table in tables for _ in table.features]
            by_feature = cut(vectors, [len(part.values) for part in features])
            for part, rows, pooling in zip(features, by_feature, poolings, strict=True):
                results[part.features[0]] = _pool(part, rows, pooling)
        return results

    def _columns(self, tables: Sequence[RoutedTable]) -> list[RoutedTable]:
        """The table of each column of an exchange: of each feature, or of each table where keys are sent once."""
        return list(tables) if self.deduplicate else [table for table in tables for _ in table.features]

    def _request(self, parts: Sequence[KeyBatch], tables: Sequence[RoutedTable]) -> _Request:
        """What is asked of owners for the features of some tables."""
        keys, counts = torch.cat([part.values for part in parts]), [len(part.values) for part in parts]
        ask = self._ask
        if self.hot is not None:
            ask = self._ask_hot
        return ask(keys, counts, tables)

    def _ask_hot(self, keys: Tensor, counts: list[int], tables: Sequence[RoutedTable]) -> _Request:
        """As `_ask`, which gets the keys of rows that are not hot."""
        assert self.hot is not None
        slots = self.hot.slots(keys, per_table(counts, tables), tables)
        if slots is None:
            return self._ask(keys, counts, tables)
        others = slots < 0
        counts = torch.stack([each.sum() for each in cut(others, counts)]).tolist()
        request = self._ask(keys[others], counts, tables)
        order = slots + len(request.keys)
        order[others] = request.order
        return request._replace(order=order)

    def _ask(self, keys: Tensor, counts: list[int], tables: Sequence[RoutedTable]) -> _Request:
        """What is asked of owners for keys, so many of each feature of some tables."""
        inverse = None
        if self.deduplicate:
            by_table = cut(keys, per_table(counts, tables))
            distinct, places = zip(*(torch.unique(each, return_inverse=True) for each in by_table), strict=True)
            counts = [len(each) for each in distinct]
            firsts = accumulate(counts[:-1], initial=0)
            inverse = torch.cat([place + first for place, first in zip(places, firsts, strict=True)])
            keys = torch.cat(distinct)
        sent = by_owner(keys, counts, self._columns(tables), self.world_size)
        assert sent.permutation is not None
        order = sent.permutation if inverse is None else sent.permutation[inverse]
        return _Request(sent.indices, sent.lengths.view(self.world_size, -1), order)

    def _rows(self, request: _Request, columns: list[RoutedTable]) -> Tensor:
        """The rows asked for, in the order of the request, then all hot rows."""
        if self.world_size == 1:
            return self._look_up_owned(request.keys, request.counts.tolist(), columns)
        group = exchange_group(self.group)
        outgoing, incoming = exchange_counts(request.counts, group)
        send, receive = [sum(count) for count in outgoing], [sum(count) for count in incoming]
        keys = all_to_all(request.keys, receive, send, group)
        if self.hot is not None:
            keys, incoming = self.hot.with_hot(keys, incoming, columns)
        problem = None
        try:
            vectors = self._look_up_owned(keys, incoming, columns)
        except Exception as raised:  # the others wait for rows: they get some, and are told
            problem = raised
            vectors = torch.zeros(len(keys), columns[0].embedding_dim, dtype=columns[0].dtype, device=keys.device)
        refuses = any(getattr(self.tables[table.name], "refuses", True) for table in columns)
        check = start_telling(problem, keys.device, group) if refuses else None
        hot = vectors[sum(receive) :]
        vectors = differentiable_all_to_all(vectors[: sum(receive)], send, receive, group)
        if self.hot is not None:
            vectors = torch.cat([vectors, self.hot.gather(hot, columns, group)])
        if check is not None:
            check()
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


def _pool(part: KeyBatch, rows: Tensor, pooling: str) -> Tensor:
    """The rows of a feature's keys, or one of each row of its batch."""
    if pooling == "none":
        return rows
    if part.weights is not None:
        rows = rows * part.weights[:, None].to(rows.dtype)
    samples = torch.arange(len(part.lengths), device=rows.device)
    owners = torch.repeat_interleave(samples, part.lengths, output_size=len(rows))
    pooled = rows.new_zeros(len(samples), rows.shape[1]).index_add(0, owners, rows)
    return pooled / part.lengths.clamp(min=1)[:, None] if pooling == "mean" else pooled
