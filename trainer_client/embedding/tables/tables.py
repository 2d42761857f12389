"""The part of a table that one rank owns: by blocks of rows, or by keys inserted on first sight."""

import torch
from torch import Tensor
from torch.nn import functional

from trainer_client.embedding.routing.ownership import as_int64
from trainer_client.embedding.routing.ownership import fmix64_of as mix
from trainer_client.embedding.tables.config import RoutedTable
from trainer_client.embedding.tables.part import TablePart


def initial_rows(keys: Tensor, table: RoutedTable) -> Tensor:
    """First values of rows, uniform in +-1/sqrt(num_embeddings); a function of seed, key and column only."""
    columns = torch.arange(1, table.embedding_dim + 1, device=keys.device)
    drawn = mix(mix(keys + table.seed * 0x5851F42D4C957F2D % (1 << 62))[:, None] + columns * 0x1F123BB5159A55E5)
    unit = ((drawn >> 40) & 0xFFFFFF).to(torch.float64) / (1 << 23) - 1
    rows: Tensor = unit / table.num_embeddings**0.5
    return rows.to(table.dtype)


def find(keys: Tensor, sorted_keys: Tensor, numbers: Tensor) -> Tensor:
    """The number of each of (n) keys in a map; -1 where it has none."""
    if not sorted_keys.numel():
        return torch.full_like(keys, -1)
    at = torch.searchsorted(sorted_keys, keys).clamp_(max=sorted_keys.numel() - 1)
    return torch.where(sorted_keys[at] == keys, numbers[at], -1)


class BlockTable(TablePart):
    """A block of consecutive rows of a `continuous` table.

    Args:
        table: The declaration.
        rank: Which block.
        world_size: Number of blocks.
        device: Where it lives.
    """

    def __init__(self, table: RoutedTable, *, rank: int, world_size: int, device: torch.device) -> None:
        block = table.rows_per_rank(world_size)
        first = min(rank * block, table.num_embeddings)
        rows = min(table.num_embeddings - first, block)
        super().__init__(table, rows, rank=rank, world_size=world_size, device=device)
        self.first = first
        self.reset_parameters()

    @property
    def refuses(self) -> bool:
        """Only on the CPU is a key that is outside of the table noticed by the host."""
        return self.weight.device.type == "cpu"

    def reset_parameters(self) -> None:
        """Gives all rows their first values."""
        self.weight.data.copy_(initial_rows(self.held_keys(), self.table))

    def forward(self, indices: Tensor) -> Tensor:
        """Embeddings of rows of this block.

        Raises:
            ValueError: If a row is outside of the table; checked on the CPU.
        """
        self.check_weight()
        if (
            indices.device.type == "cpu"
            and indices.numel()
            and not 0 <= int(indices.min()) <= int(indices.max()) < self.rows
        ):
            raise ValueError(
                f"table {self.table.name}: a key is outside of 0 to {self.table.num_embeddings - 1}; "
                "continuous routing takes row numbers only, the others take any key"
            )
        return functional.embedding(indices, self.weight)

    def held_keys(self) -> Tensor:
        """Keys held here, in the order of the rows."""
        return torch.arange(self.first, self.first + self.rows, device=self.weight.device)

    def place(self, keys: Tensor) -> Tensor:
        """Rows of keys.

        Raises:
            ValueError: If a key is not a row of this block.
        """
        rows = keys - self.first
        wrong = (rows < 0) | (rows >= self.rows)
        if bool(wrong.any()):
            raise ValueError(
                f"table {self.table.name}: key {int(keys[wrong][0])} is outside of this rank's rows {self.first} to "
                f"{self.first + self.rows - 1}; continuous tables hold row numbers only"
            )
        return rows


class KeyTable(TablePart):
    """Rows for arbitrary 64-bit keys, inserted on first sight while training.

    A small reference table: sorted keys with the row of each, kept on the device. Rows keep their place, so an
    optimizer's state stays with them. Where nothing is trained, in evaluation and under `torch.no_grad`, an unknown
    key reads as its initial values and takes no row.

    Args:
        table: The declaration.
        rank: Which part.
        world_size: Ranks that share the table.
        device: Where it lives.
    """

    sorted_keys: Tensor
    sorted_rows: Tensor
    refuses = True  # when it is full

    def __init__(self, table: RoutedTable, *, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(table, table.rows_per_rank(world_size), rank=rank, world_size=world_size, device=device)
        # As long as the table has rows from the start, so that copies and averages of a model can take them over.
        self.register_buffer("sorted_keys", torch.empty(self.rows, dtype=torch.int64, device=device))
        self.register_buffer("sorted_rows", torch.empty(self.rows, dtype=torch.int64, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forgets all keys."""
        self.weight.data.zero_()
        self.sorted_keys.zero_()
        self.sorted_rows.fill_(-1)
        self._keep(0)

    def _state(self) -> tuple[int, ...]:
        """Another value whenever the buffers are other ones or written to."""
        buffers = self.sorted_keys, self.sorted_rows
        return tuple(n for b in buffers for n in (id(b), 0 if b.is_inference() else b._version))

    def _keep(self, used: int) -> None:
        self._used, self._known = used, self._state()

    @property
    def used(self) -> int:
        """Rows that are taken.

        Raises:
            ValueError: If something else than this table wrote to its buffers, and what they hold is no map of keys.
        """
        if self._known != self._state():
            self._keep(self._count())
        return self._used

    def _count(self) -> int:
        used = int((self.sorted_rows >= 0).sum())
        keys, rows = self.sorted_keys[:used], self.sorted_rows[:used].sort().values
        fine = (rows == torch.arange(used, device=rows.device)).all() & (keys[1:] > keys[:-1]).all()
        if self.table.resolved_routing.dist_type != "continuous":
            fine &= (self.table.route(keys, self.world_size)[0] == self.rank).all()
        if not bool(fine):
            raise ValueError(
                f"table {self.table.name}: its keys were overwritten by something that is no part of it, such as a "
                "broadcast from another rank, or an average that includes buffers; leave the tables out of that, and "
                "load a checkpoint or call reset_parameters()"
            )
        return used

    def find(self, keys: Tensor) -> Tensor:
        """Rows of int64 keys (n); -1 where a key is unknown."""
        used = self.used
        return find(keys, self.sorted_keys[:used], self.sorted_rows[:used])

    def place(self, keys: Tensor) -> Tensor:
        """Rows of keys; new ones take the next free rows, in the order in which they come, with their initial values.

        Raises:
            ValueError: If the table is full.
        """
        rows = self.find(keys)
        new = _distinct(keys[rows < 0])
        if new.numel() == 0:
            return rows
        used, total = self.used, self.used + new.numel()
        if total > self.rows:
            raise ValueError(
                f"table {self.table.name}: {total} keys do not fit into the {self.rows} rows of this rank; raise its "
                "capacity"
            )
        taken = torch.arange(used, total, device=keys.device)
        self.weight.data[used:total] = initial_rows(new, self.table).to(self.weight.dtype)
        merged, order = torch.sort(torch.cat([self.sorted_keys[:used], new]))
        self.sorted_rows[:total] = torch.cat([self.sorted_rows[:used], taken])[order]
        self.sorted_keys[:total] = merged
        self._keep(total)
        return self.find(keys)

    def forward(self, indices: Tensor) -> Tensor:
        """Embeddings of keys."""
        self.check_weight()
        keys = as_int64(indices)
        if self.training and torch.is_grad_enabled():
            return functional.embedding(self.place(keys), self.weight)
        rows = self.find(keys)
        known = functional.embedding(rows.clamp(min=0), self.weight)
        return torch.where((rows < 0)[:, None], initial_rows(keys, self.table).to(known.dtype), known)

    def held_keys(self) -> Tensor:
        """Keys held here, in the order of the rows."""
        keys = torch.empty_like(self.sorted_keys[: self.used])
        keys[self.sorted_rows[: self.used]] = self.sorted_keys[: self.used]
        return keys


def _distinct(keys: Tensor) -> Tensor:
    """Each key once, in the order in which they first come."""
    distinct, place = torch.unique(keys, return_inverse=True)
    first = torch.full_like(distinct, keys.numel())
    first.scatter_reduce_(0, place, torch.arange(keys.numel(), device=keys.device), "amin")
    ordered: Tensor = distinct[first.argsort()]
    return ordered
