"""Other ways to redistribute, for comparison: the bare collective, and one All2All per field."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from evenkeel.partitioning import Slice
from trainer_client.balancing.batches import FlatBatch
from trainer_client.balancing.redistribution.copies import WHOLE, FieldTable, measure


class PackedBytes:
    """One All2All of as many bytes as a redistribution sends, between buffers that are there: what no way can beat."""

    def __init__(self, flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None) -> None:
        fields = FieldTable.of(flat.structure.leaves, 4 * flat.num_jagged)
        amounts = measure(piece, flat.lengths, fields, dist.get_world_size(group), WHOLE)
        self._in, self._out = amounts.received_bytes.tolist(), amounts.sent_bytes.tolist()
        self._group = group
        self._sent = torch.ones(sum(self._out), dtype=torch.uint8, device=flat.device)
        self._received = torch.empty(sum(self._in), dtype=torch.uint8, device=flat.device)

    def run(self) -> None:
        """Sends and receives once."""
        dist.all_to_all_single(self._received, self._sent, self._in, self._out, group=self._group)


class FieldByField:
    """One All2All of lengths, then one per field; sizes known from the plan, rows gathered by torch's indexing."""

    def __init__(self, flat: FlatBatch, piece: Slice, group: dist.ProcessGroup | None) -> None:
        self._flat, self._group = flat, group
        self._world_size = dist.get_world_size(group)
        self._order_host = np.argsort(piece.destinations, kind="stable")
        self._out_counts = np.bincount(piece.destinations, minlength=self._world_size).astype(np.int64)
        self._in_counts = np.zeros(self._world_size, dtype=np.int64)
        self._in_counts[piece.sources] = piece.source_counts
        self._in_totals = np.zeros((self._world_size, flat.num_jagged), dtype=np.int64)
        self._in_totals[piece.sources] = piece.source_totals
        self._out_totals = np.zeros((self._world_size, flat.num_jagged), dtype=np.int64)
        np.add.at(self._out_totals, piece.destinations, flat.lengths)
        self._flat_lengths = flat.lengths_tensor.t().contiguous()

    def run(self) -> list[torch.Tensor]:
        """The tensors that this rank trains."""
        device = self._flat.device
        order = torch.from_numpy(self._order_host).to(device, non_blocking=True)
        lengths = self._flat_lengths[order]
        self._exchange(lengths, self._in_counts, self._out_counts)
        rows: dict[int, torch.Tensor] = {}
        tensors = []
        for leaf, tensor in zip(self._flat.structure.leaves, self._flat.tensors, strict=True):
            if leaf.rows:
                tensors.append(self._exchange(tensor[order], self._in_counts, self._out_counts))
                continue
            (column,) = leaf.columns
            if column not in rows:
                rows[column] = self._rows_of(column, order)
            tensors.append(
                self._exchange(tensor[rows[column]], self._in_totals[:, column], self._out_totals[:, column])
            )
        return tensors

    def _rows_of(self, column: int, order: torch.Tensor) -> torch.Tensor:
        """Rows of a jagged field's values, samples by destination."""
        lengths = self._flat_lengths[:, column].long()
        total = int(self._flat.totals[column])
        starts, sorted_lengths = (torch.cumsum(lengths, 0) - lengths)[order], lengths[order]
        shift = starts - (torch.cumsum(sorted_lengths, 0) - sorted_lengths)
        within = torch.arange(total, device=lengths.device)
        return within + torch.repeat_interleave(shift, sorted_lengths, output_size=total)

    def _exchange(self, tensor: torch.Tensor, incoming: np.ndarray, outgoing: np.ndarray) -> torch.Tensor:
        result = tensor.new_empty((int(incoming.sum()), *tensor.shape[1:]))
        dist.all_to_all_single(result, tensor.contiguous(), incoming.tolist(), outgoing.tolist(), group=self._group)
        return result
