"""What one rank does for the split samples of a step: which rows it sends and receives, and what attends to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from evenkeel.partitioning.splits import Piece, SplitSample


class Route(NamedTuple):
    """Consecutive rows of a tensor that travel to another rank, or arrive from it."""

    peer: int
    part: int  # which tensor, in the order in which an exchange names them
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What leaves this rank and what arrives at one time; a pair of ranks lists its routes in the same order."""

    leaving: list[Route] = field(default_factory=list)
    arriving: list[Route] = field(default_factory=list)

    def add(self, rank: int, source: int, target: int, parts: Sequence[int], size: int, begin: int, at: int) -> None:
        """Adds rows of some tensors that go from one rank to another, if `rank` is one of the two."""
        for part in parts:
            if rank == source:
                self.leaving.append(Route(target, part, begin, size))
            if rank == target:
                self.arriving.append(Route(source, part, at, size))


class Rows(NamedTuple):
    """Consecutive rows of this rank's pieces, or of those that have arrived."""

    arrived: bool
    begin: int
    size: int

    def of(self, local: Tensor, arrived: Tensor) -> Tensor:
        """These rows of one of the two."""
        return (arrived if self.arrived else local).narrow(0, self.begin, self.size)


class Block(NamedTuple):
    """Queries that see all of some keys of the same sample."""

    queries: Rows
    keys: tuple[Rows, ...]
    query_begin: int
    key_begin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Queries and keys, packed one block after the other; each query of a block sees every key of it.

    Attributes:
        query_offsets: (n + 1,) int32, where the blocks' queries begin.
        key_offsets: (n + 1,) int32, where their keys and values begin.
        query_begins: (n,) int32, position of each block's first query in its sample; the others follow it.
        key_begins: (n,) int32, position of each block's first key in its sample; the others follow it.
        max_queries: Of a block.
        max_keys: Of a block.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    query_begins: Tensor
    key_begins: Tensor
    max_queries: int
    max_keys: int


class Merge(NamedTuple):
    """Rows of a sample's contextual queries, and where the results of its later pieces are."""

    begin: int
    size: int
    results: list[Rows]


class Pieces:
    """The pieces that this rank has in a step; made by a `PieceGroup`.

    Attributes:
        group: The communicator.
        shares: Keys (part 0), values (1) and contextual queries (2) that travel from the pieces' ranks.
        relayed: Keys and values that arrived and travel on, to other ranks of this node.
        returned: Results of contextual queries, which travel to where the queries came from.
        num_keys: Rows of keys and values that arrive.
        num_contexts: Rows of contextual queries that arrive.
        num_returned: Rows of results that arrive.
        num_rows: Rows of this rank's pieces.
        num_seeing: The first of them, which see earlier pieces.
        merges: Of the samples whose context is here.
        num_candidates: Most of a split sample.
        num_context: Most of a split sample.
        own: The samples that this rank's pieces are of, and the pieces.
    """

    def __init__(
        self, samples: Sequence[SplitSample], rank: int, group: dist.ProcessGroup | None, nodes: Sequence[int]
    ) -> None:
        """Plans a step of one rank that has a piece; see `PieceGroup.pieces`. `nodes` are the ranks'."""
        self.group = group
        self.num_candidates = max(sample.num_candidates for sample in samples)
        self.num_context = max(sample.num_context for sample in samples)
        self.shares, self.relayed, self.returned = Phase(), Phase(), Phase()
        self.num_keys = self.num_contexts = self.num_returned = self.num_rows = 0
        local = [
            (which, number)
            for which, sample in enumerate(samples)
            for number, piece in enumerate(sample.pieces)
            if piece.rank == rank
        ]
        # Pieces that see earlier ones come first, so that what is merged into them is one stretch.
        local.sort(key=lambda each: not any(map(samples[each[0]].num_keys, range(each[1]))))
        self.own: tuple[list[SplitSample], list[Piece]] = [], []
        begins: dict[tuple[int, int], int] = {}
        for which, number in local:
            piece = samples[which].pieces[number]
            self.own[0].append(samples[which])
            self.own[1].append(piece)
            begins[which, number] = self.num_rows
            self.num_rows += len(piece)
        arrived = self._route_keys(samples, rank, begins, nodes)
        self._blocks: list[Block] = []
        for which, number in local:
            sample, piece = samples[which], samples[which].pieces[number]
            keys = tuple(
                arrived.get((which, earlier), Rows(False, begins.get((which, earlier), 0), count))
                for earlier in range(number)
                if (count := sample.num_keys(earlier))
            )
            if keys:
                self._blocks.append(Block(Rows(False, begins[which, number], len(piece)), keys, piece.begin, 0))
        self.num_seeing = sum(block.queries.size for block in self._blocks)
        self.merges: list[Merge] = []
        self._route_contexts(samples, rank, begins)
        self._on: dict[torch.device, Blocks] = {}
        self._rows: tuple[Tensor, Tensor] | None = None

    def _route_keys(
        self, samples: Sequence[SplitSample], rank: int, begins: dict[tuple[int, int], int], nodes: Sequence[int]
    ) -> dict[tuple[int, int], Rows]:
        """Keys go to each node once, an equal share to each of its ranks, which passes it on to the others there.

        Gives where pieces of other ranks arrive, by sample and number.
        """
        arrived: dict[tuple[int, int], Rows] = {}
        for which, sample in enumerate(samples):
            for number, piece in enumerate(sample.pieces):
                later = sorted({other.rank for other in sample.pieces[number + 1 :]} - {piece.rank})
                count, begin, room = sample.num_keys(number), begins.get((which, number), 0), self.num_keys
                if count and rank in later:
                    arrived[which, number] = Rows(True, room, count)
                    self.num_keys += count
                for node in sorted({nodes[target] for target in later}):
                    targets = [target for target in later if nodes[target] == node]
                    ends = [count * share // len(targets) for share in range(len(targets) + 1)]
                    for relay, first, end in zip(targets, ends, ends[1:], strict=False):
                        for target in targets if first < end else ():
                            at, size = room + first, end - first
                            if target == relay:
                                self.shares.add(rank, piece.rank, target, (0, 1), size, begin + first, at)
                            else:
                                self.relayed.add(rank, relay, target, (0, 1), size, at, at)
        return arrived

    def _route_contexts(self, samples: Sequence[SplitSample], rank: int, begins: dict[tuple[int, int], int]) -> None:
        """Contextual queries over the history of later pieces: the few queries travel, not the many keys."""
        done = self.num_seeing
        for which, sample in enumerate(samples):
            later = [number for number in range(1, len(sample.pieces)) if sample.num_keys(number)]
            first, size, begin = sample.pieces[0].rank, sample.num_context, begins.get((which, 0), 0)
            if not size or not later:
                continue
            queries = Rows(False, begin, size)
            for target in sorted({sample.pieces[number].rank for number in later} - {first}):
                self.shares.add(rank, first, target, (2,), size, begin, self.num_contexts)
                if rank == target:
                    queries = Rows(True, self.num_contexts, size)
                    self.num_contexts += size
            results = []
            for number in later:
                piece = sample.pieces[number]
                if piece.rank == rank:
                    keys = Rows(False, begins[which, number], sample.num_keys(number))
                    self._blocks.append(Block(queries, (keys,), 0, piece.begin))
                result = Rows(False, done, size)
                if piece.rank != first:
                    self.returned.add(rank, piece.rank, first, (0, 1), size, done, self.num_returned)
                    if rank == first:
                        result = Rows(True, self.num_returned, size)
                        self.num_returned += size
                results.append(result)
                done += size if piece.rank == rank else 0
            if first == rank:
                self.merges.append(Merge(begin, size, results))
        self.merges.sort()

    def preceding(self, num_sequences: int, device: torch.device | str = "cpu") -> Tensor:
        """(num_sequences,) int64, how many positions of its sample come before each sequence of this rank's batch.

        Raises:
            ValueError: If a piece is a sequence beyond `num_sequences`.
        """
        result = torch.zeros(num_sequences, dtype=torch.int64)
        for piece in self.own[1]:
            if piece.sequence >= num_sequences:
                raise ValueError(f"a piece is sequence {piece.sequence} of {num_sequences}; pass all of the batch")
            result[piece.sequence] = piece.begin
        return _to(result, torch.device(device))

    def beginnings(self, num_sequences: int, device: torch.device | str = "cpu") -> Tensor:
        """(k,) int64, which sequences of this rank's batch have the first position of their sample."""
        return _all_but({piece.sequence for piece in self.own[1] if piece.begin}, num_sequences, device)

    def endings(self, num_sequences: int, device: torch.device | str = "cpu") -> Tensor:
        """(k,) int64, which sequences of this rank's batch have the last position of their sample."""
        earlier = {piece.sequence for sample, piece in zip(*self.own, strict=True) if piece.end < sample.pieces[-1].end}
        return _all_but(earlier, num_sequences, device)

    def rows(self, offsets: Tensor) -> Tensor:
        """(rows,) int64, where the rows of this rank's pieces are; those of pieces that see earlier ones first.

        Raises:
            ValueError: If a piece does not have as many rows as positions. On a GPU, which is not waited for, the
                process ends with a failed assertion of the device instead.
        """
        if self._rows is not None and self._rows[0] is offsets:
            return self._rows[1]
        if offsets.device.type == "cpu":
            self._check(offsets)
        counts = torch.tensor([len(piece) for piece in self.own[1]])
        numbers = torch.tensor([piece.sequence for piece in self.own[1]])
        sequences, before, counts = _to(torch.stack([numbers, counts.cumsum(0) - counts, counts]), offsets.device)
        if offsets.device.type == "cuda":
            actual = offsets[sequences + 1] - offsets[sequences]
            torch._assert_async((actual == counts).all(), "a piece does not have as many rows as positions")
        shift = torch.repeat_interleave(offsets[sequences].long() - before, counts, output_size=self.num_rows)
        rows = torch.arange(self.num_rows, device=offsets.device) + shift
        self._rows = offsets, rows
        return rows

    def _check(self, offsets: Tensor) -> None:
        for piece in self.own[1]:
            if piece.sequence + 1 >= offsets.shape[0]:
                raise ValueError(f"a piece is sequence {piece.sequence}, but offsets are of {offsets.shape[0] - 1}")
            actual = int(offsets[piece.sequence + 1]) - int(offsets[piece.sequence])
            if actual != len(piece):
                raise ValueError(
                    f"sequence {piece.sequence} has {actual} rows, but its piece has positions {piece.begin} to "
                    f"{piece.end} of its sample; give pieces in positions of the model's sequences"
                )

    def blocks(self, device: torch.device) -> Blocks | None:
        """What attends to what beside a sequence to itself; None if nothing does on this rank."""
        if not self._blocks:
            return None
        if device not in self._on:
            counts = [
                (block.queries.size, sum(rows.size for rows in block.keys), block.query_begin, block.key_begin)
                for block in self._blocks
            ]
            table = torch.tensor([(0, 0, 0, 0), *counts], dtype=torch.int32).T.contiguous()
            table[:2] = table[:2].cumsum(1)
            query_offsets, key_offsets, query_begins, key_begins = _to(table, device)
            self._on[device] = Blocks(
                query_offsets=query_offsets,
                key_offsets=key_offsets,
                query_begins=query_begins[1:],
                key_begins=key_begins[1:],
                max_queries=max(count[0] for count in counts),
                max_keys=max(count[1] for count in counts),
            )
        return self._on[device]

    def queries_of(self, local: Tensor, arrived: Tensor) -> Tensor:
        """The blocks' queries, packed."""
        return _pack([block.queries.of(local, arrived) for block in self._blocks])

    def keys_of(self, local: Tensor, arrived: Tensor) -> Tensor:
        """The blocks' keys or values, packed."""
        return _pack([rows.of(local, arrived) for block in self._blocks for rows in block.keys])

    def unpack_keys(self, packed: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of what `keys_of` packed: of this rank's rows, None if there are none, and of what arrived."""
        stretches = [rows for block in self._blocks for rows in block.keys]
        if stretches == [Rows(True, 0, self.num_keys)]:
            return None, packed
        local = packed.new_zeros(self.num_rows, *packed.shape[1:])
        arrived = packed.new_zeros(self.num_keys, *packed.shape[1:])
        for rows, gradient in zip(stretches, packed.split([rows.size for rows in stretches]), strict=True):  # type: ignore[no-untyped-call]
            rows.of(local, arrived).add_(gradient)
        return (None if all(rows.arrived for rows in stretches) else local), arrived


def _all_but(sequences: set[int], num_sequences: int, device: torch.device | str) -> Tensor:
    others = [number for number in range(num_sequences) if number not in sequences]
    return _to(torch.tensor(others, dtype=torch.int64), torch.device(device))


def _pack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to(table: Tensor, device: torch.device) -> Tensor:
    """A small table of the host on a device, which the host does not wait for."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
