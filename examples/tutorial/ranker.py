"""A small HSTU-like ranking model: causal pointwise attention over each user's history."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from examples.demo.histories import NUM_ITEMS


class Block(nn.Module):
    """One layer: causal pointwise (SiLU) attention, gated, with a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 4 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        """(length, width) to (length, width)."""
        length, width = history.shape
        gate, query, key, value = functional.silu(self.project_in(self.norm(history))).chunk(4, dim=-1)
        heads = [x.view(length, self.num_heads, -1).transpose(0, 1) for x in (query, key, value)]
        scores = functional.silu(heads[0] @ heads[1].transpose(1, 2)).tril() / length
        mixed = (scores @ heads[2]).transpose(0, 1).reshape(length, width)
        output: torch.Tensor = history + self.project_out(mixed * gate)
        return output


class Ranker(nn.Module):
    """From a batch of histories to one logit per user."""

    def __init__(self, *, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.score = nn.Linear(width, 1)

    def forward(self, items: torch.Tensor, num_items: torch.Tensor) -> torch.Tensor:
        """(total length,) items of (samples,) histories to (samples,) logits."""
        states = []
        for history in self.items(items).split(num_items.tolist()):
            state = history
            for block in self.blocks:
                state = block(state)
            states.append(state[-1])
        # An empty batch still has a part in the graph, so that every rank has gradients to average.
        last = torch.stack(states) if states else self.items.weight[:0]
        logits: torch.Tensor = self.score(last).squeeze(-1)
        return logits
