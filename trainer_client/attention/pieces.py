"""What one rank does for the split samples of a step: which rows it sends and receives, and what attends to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from evenkeel.partitioning.splits import SplitSample


class Route(NamedTuple):
    """Rows that travel between this rank and another in each attention.

    Attributes:
        peer: The other rank, in the group.
        begin: The first row: of what is passed on or arrives among all rows that arrive, else among own pieces' rows.
        size: Rows.
        tag: Tells a pair of ranks their routes apart.
    """

    peer: int
    begin: int
    size: int
    tag: int


class Rows(NamedTuple):
    """Consecutive rows of own pieces, or of those that have arrived."""

    arrived: bool
    begin: int
    size: int


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

    query_offsets: torch.Tensor
    key_offsets: torch.Tensor
    query_begins: torch.Tensor
    key_begins: torch.Tensor
    max_queries: int
    max_keys: int


@dataclass(slots=True)
class Routes:
    """What leaves and what arrives in each attention.

    Attributes:
        leaving: Rows that leave.
        arriving: Rows that arrive.
        num_arriving: Rows that there must be room for.
    """

    leaving: list[Route] = field(default_factory=list)
    arriving: list[Route] = field(default_factory=list)
    num_arriving: int = 0

    def take(self, count: int) -> Rows:
        """Room for rows that arrive."""
        self.num_arriving += count
        return Rows(True, self.num_arriving - count, count)

    def add(self, rank: int, source: Route, target: Route) -> None:
        """Notes rows that go from one rank to another, of which each is the other's peer."""
        if rank == target.peer:
            self.leaving.append(source)
        if rank == source.peer:
            self.arriving.append(target)

    def note(self, rank: int, source: int, target: int, begin: int, count: int, tag: int) -> Rows | None:
        """Notes rows that go from one rank to another; where they arrive, if they do here."""
        rows = self.take(count) if rank == target else None
        self.add(rank, Route(target, begin, count, tag), Route(source, rows.begin if rows else 0, count, tag))
        return rows


class Pieces:
    """The pieces that this rank has in a step; made by a `PieceGroup`.

    Attributes:
        group: The communicator.
        keys: Rows of keys and values that travel from where they are.
        passed_on: Those that arrived and travel on, to other ranks of this node.
        contexts: Rows of contextual queries that travel to later pieces.
        partials: Rows that these queries get back from there.
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
        self.keys, self.passed_on, self.contexts, self.partials = Routes(), Routes(), Routes(), Routes()
        self._own = [
            (which, number)
            for which, sample in enumerate(samples)
            for number, piece in enumerate(sample.pieces)
            if piece.rank == rank
        ]
        # Pieces that see earlier ones come first, so that what is merged into them is one stretch.
        self._own.sort(key=lambda own: not _num_earlier(samples[own[0]], own[1]))
        self._pieces = [samples[which].pieces[number] for which, number in self._own]
        self.own = [samples[which] for which, _ in self._own], self._pieces
        begins, begin = {}, 0
        for own, piece in zip(self._own, self._pieces, strict=True):
            begins[own] = begin
            begin += len(piece)
        self.num_rows = begin
        self._arrived: dict[tuple[int, int], Rows] = {}
        self._blocks: list[Block] = []
        # By sample whose context is here: its begin, its size, and where what later pieces know of it comes from.
        self.merged: list[tuple[int, int, list[Rows]]] = []
        self._route(samples, rank, begins, nodes)
        self.num_seeing = sum(block.queries.size for block in self._blocks)
        self._blocks += self._context_blocks(samples, rank, begins)
        self._on: dict[torch.device, Blocks] = {}
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def _route(
        self, samples: Sequence[SplitSample], rank: int, begins: dict[tuple[int, int], int], nodes: Sequence[int]
    ) -> None:
        """Keys go to each node once, an equal share to each of its ranks, which passes it on to the others there."""
        tag = 0
        for which, sample in enumerate(samples):
            for number, piece in enumerate(sample.pieces):
                later = sorted({other.rank for other in sample.pieces[number + 1 :]} - {piece.rank})
                count, begin, room = sample.num_keys(number), begins.get((which, number), 0), 0
                if count and rank in later:
                    self._arrived[which, number] = self.keys.take(count)
                    room = self._arrived[which, number].begin
                for node in sorted({nodes[target] for target in later}):
                    targets = [target for target in later if nodes[target] == node]
                    ends = [count * share // len(targets) for share in range(len(targets) + 1)]
                    for relay, first, end in zip(targets, ends, ends[1:], strict=False):
                        for target in targets if first < end else ():
                            arrives = Route(relay, room + first, end - first, tag)
                            if target == relay:
                                leaves = Route(target, begin + first, end - first, tag)
                                self.keys.add(rank, leaves, arrives._replace(peer=piece.rank))
                            else:
                                self.passed_on.add(rank, arrives._replace(peer=target), arrives)
                            tag += 1
        for which, number in self._own:
            sample, begin = samples[which], begins[which, number]
            keys = tuple(
                self._arrived.get((which, earlier), Rows(False, begins.get((which, earlier), 0), count))
                for earlier in range(number)
                if (count := sample.num_keys(earlier))
            )
            if keys:
                piece = sample.pieces[number]
                self._blocks.append(Block(Rows(False, begin, len(piece)), keys, piece.begin, 0))

    def _context_blocks(
        self, samples: Sequence[SplitSample], rank: int, begins: dict[tuple[int, int], int]
    ) -> list[Block]:
        """Contextual queries over the history of later pieces: the few queries travel, not the many keys."""
        blocks: list[Block] = []
        tag, done = 0, self.num_seeing
        for which, sample in enumerate(samples):
            later = [number for number in range(1, len(sample.pieces)) if sample.num_keys(number)]
            first, size = sample.pieces[0].rank, sample.num_context
            if not size or not later:
                continue
            at_home = Rows(False, begins.get((which, 0), 0), size)
            queries = {first: at_home}
            for target in sorted({sample.pieces[number].rank for number in later} - {first}):
                rows = self.contexts.note(rank, first, target, at_home.begin, size, tag)
                queries[target] = rows or at_home
                tag += 1
            answers = []
            for number in later:
                piece = sample.pieces[number]
                if piece.rank == rank:
                    keys = Rows(False, begins[which, number], sample.num_keys(number))
                    blocks.append(Block(queries[rank], (keys,), 0, piece.begin))
                answer: Rows | None = Rows(False, done, size)
                if piece.rank != first:
                    answer = self.partials.note(rank, piece.rank, first, done, size, tag)
                    tag += 1
                if piece.rank == rank:
                    done += size
                answers.append(answer)
            if first == rank:
                self.merged.append((at_home.begin, size, [answer for answer in answers if answer is not None]))
        return blocks

    def preceding(self, num_sequences: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """(num_sequences,) int64, how many positions of its sample come before each sequence of this rank's batch.

        Raises:
            ValueError: If a piece is a sequence beyond `num_sequences`.
        """
        result = torch.zeros(num_sequences, dtype=torch.int64)
        for piece in self._pieces:
            if piece.sequence >= num_sequences:
                raise ValueError(f"a piece is sequence {piece.sequence} of {num_sequences}; pass all of the batch")
            result[piece.sequence] = piece.begin
        return _to(result, torch.device(device))

    def beginnings(self, num_sequences: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """(k,) int64, which sequences of this rank's batch have the first position of their sample."""
        later = {piece.sequence for piece in self._pieces if piece.begin}
        found = torch.tensor([number for number in range(num_sequences) if number not in later], dtype=torch.int64)
        return _to(found, torch.device(device))

    def endings(self, num_sequences: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """(k,) int64, which sequences of this rank's batch have the last position of their sample."""
        earlier = {piece.sequence for sample, piece in zip(*self.own, strict=True) if piece.end < sample.pieces[-1].end}
        found = torch.tensor([number for number in range(num_sequences) if number not in earlier], dtype=torch.int64)
        return _to(found, torch.device(device))

    def rows(self, offsets: torch.Tensor) -> torch.Tensor:
        """(rows,) int64, where the rows of own pieces are; those of pieces that see earlier ones first.

        Raises:
            ValueError: If a piece does not have as many rows as positions. On a GPU, which is not waited for, the
                process ends with a failed assertion of the device instead.
        """
        if self._rows is not None and self._rows[0] is offsets:
            return self._rows[1]
        if offsets.device.type == "cpu":
            self._check(offsets)
        counts = torch.tensor([len(piece) for piece in self._pieces])
        table = torch.stack(
            [torch.tensor([piece.sequence for piece in self._pieces]), counts.cumsum(0) - counts, counts]
        )
        sequences, before, counts = _to(table, offsets.device)
        if offsets.device.type == "cuda":
            held = offsets[sequences + 1] - offsets[sequences]
            torch._assert_async((held == counts).all(), "a piece does not have as many rows as positions")
        shift = torch.repeat_interleave(offsets[sequences].long() - before, counts, output_size=self.num_rows)
        rows = torch.arange(self.num_rows, device=offsets.device) + shift
        self._rows = offsets, rows
        return rows

    def _check(self, offsets: torch.Tensor) -> None:
        for piece in self._pieces:
            if piece.sequence + 1 >= offsets.shape[0]:
                raise ValueError(f"a piece is sequence {piece.sequence}, but offsets are of {offsets.shape[0] - 1}")
            held = int(offsets[piece.sequence + 1]) - int(offsets[piece.sequence])
            if held != len(piece):
                raise ValueError(
                    f"sequence {piece.sequence} has {held} rows, but its piece has positions {piece.begin} to "
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

    def queries_of(self, own: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """The blocks' queries, packed."""
        return _pack(own, arrived, [block.queries for block in self._blocks])

    def keys_of(self, own: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:
        """The blocks' keys or values, packed."""
        return _pack(own, arrived, [rows for block in self._blocks for rows in block.keys])

    def apart(self, packed: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Gradients of what `keys_of` packed, as those of own rows, None if there are none, and of what arrived."""
        count = self.keys.num_arriving
        places = [rows for block in self._blocks for rows in block.keys]
        if len(places) == 1 and places[0].arrived and places[0].size == count:
            return None, packed
        arrived, own = packed.new_zeros(count, *packed.shape[1:]), None
        begin = 0
        for rows in places:
            if not rows.arrived and own is None:
                own = packed.new_zeros(self.num_rows, *packed.shape[1:])
            total = arrived if rows.arrived else own
            assert total is not None
            total.narrow(0, rows.begin, rows.size).add_(packed.narrow(0, begin, rows.size))
            begin += rows.size
        return own, arrived


def _num_earlier(sample: SplitSample, number: int) -> int:
    return sum(map(sample.num_keys, range(number)))


def _pack(own: torch.Tensor, arrived: torch.Tensor, rows: list[Rows]) -> torch.Tensor:
    parts = [(arrived if each.arrived else own).narrow(0, each.begin, each.size) for each in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small table of the host on a device, which the host does not wait for."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
